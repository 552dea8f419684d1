"""Score and embed calls of a service: one request per part of a call, a bounded number at a time.

    read ──> token ids of all parts, bounded and checked ──> one request each ──> the results, in order

A call is admitted once; its requests share model, adapter and deadline. A full queue fails the call only if no request
was admitted; otherwise the remaining requests wait.

A part is a prompt with log-probabilities or hidden states, and one sampled token that is dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InternalError, InvalidArgument, QueueFull, RequestTooLong, Unsupported
from jpaged.outputs import ClassificationOutput, PoolingOutput, PoolingRequestOutput, ScoringOutput
from jpaged.sampling_params import PoolingParams, RequestOutputKind, change_sampling
from jpaged.service.calls import NOBODY, Call, Caller, RequestRecord, loggable_name, require_salt
from jpaged.service.input_processor import InputProcessor
from jpaged.service.loaded_model import LoadedModel, Pooler
from jpaged.service.service import Service, get_timeout
from jpaged.types import (
    Embedding,
    LoadedAdapter,
    ModelInfo,
    Pooling,
    Prompt,
    RequestOutput,
    SamplingParams,
    Score,
    Usage,
)

MAX_PARTS = 1024
"""Maximum continuations of one prompt, or prompts of one embed call."""
MAX_SCORE_SIZE = 4 << 20
"""Maximum characters and token ids of one call's prompt with each of its continuations, in total: 0.25 s of tokenizing.
"""
SCORE_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
EMBED_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

GivenContinuation = str | Sequence[int]


def require_parts(field: str, num: int) -> None:
    """Reject an empty or too long list.

    Raises:
        InvalidArgument: names the field.
    """
    if not 1 <= num <= MAX_PARTS:
        raise InvalidArgument(field, f"{num} are given; must be from 1 to {MAX_PARTS}")


def require_score_size(size: int) -> None:
    """Reject a prompt and continuations that are too much work together, judged by their sizes.

    Raises:
        InvalidArgument: names the continuations.
    """
    if size > MAX_SCORE_SIZE:
        problem = f"have {size} characters and token ids, each with the prompt; at most {MAX_SCORE_SIZE} per call"
        raise InvalidArgument("continuations", problem)


def one_each(field: str, given: Any, kinds: tuple[type, ...], count: int) -> list[Any]:
    """Return one value for each: the given one repeated, or the given list.

    Raises:
        InvalidArgument: the list has another length, or a value has another type.
    """
    if isinstance(given, kinds):
        return [given] * count
    names = " or ".join(kind.__name__ for kind in kinds)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidArgument(field, f"{given!r} is neither {names} nor a list of them")
    many = list(given)
    if len(many) != count:
        raise InvalidArgument(field, f"{len(many)} given for {count} prompts")
    for one in many:
        if not isinstance(one, kinds):
            raise InvalidArgument(field, f"{one!r} is not {names}")
    return many


def require_known_options(method: str, options: Mapping[str, Any], known: type) -> None:
    """Raise TypeError if a method has no such option, as Python does for its arguments."""
    for name in options.keys() - known.__annotations__.keys():
        raise TypeError(f"LLM.{method}() got an unexpected keyword argument {name!r}")


@contextmanager
def errors_named(field: str) -> Iterator[None]:
    """Rename the field of errors about a part's prompt to the part; errors about shared fields keep their names."""
    try:
        yield
    except InvalidArgument as error:
        if error.field in ("pooling", "adapter") or error.field.startswith("tokenization_kwargs"):
            raise
        name = f"{field}.{error.field}" if error.field == "prompt_embeds" else field
        raise type(error)(name, error.problem) from error


@dataclass(frozen=True, slots=True)
class PromptContinuations:
    """A prompt and its continuations as token ids. Shared tokens are stored once.

    Attributes:
        prompt_ids: token ids of the prompt.
        tails: for each continuation, the number of leading prompt_ids it shares, and the token ids after them.
    """

    prompt_ids: tuple[int, ...]
    tails: tuple[tuple[int, tuple[int, ...]], ...]

    def __len__(self) -> int:
        return len(self.tails)

    def size(self, i: int) -> int:
        """Return the number of tokens of the prompt with a continuation."""
        num_shared, tail = self.tails[i]
        return num_shared + len(tail)

    def prompt(self, i: int) -> Prompt:
        """Return the prompt with a continuation, with log-probabilities requested for the continuation."""
        num_shared, tail = self.tails[i]
        token_ids = [*self.prompt_ids[:num_shared], *tail]
        return Prompt(token_ids=token_ids, prompt_logprobs_start=len(self.prompt_ids), is_only_told=True)


def continued(
    processor: InputProcessor, prompt: Prompt, continuations: Sequence[GivenContinuation]
) -> PromptContinuations:
    """Return the prompt with each continuation.

    If the prompt is a text, a text continuation is tokenized together with it as one text. The tokens of both are split
    after the number of tokens that the prompt has alone.

    Raises:
        InvalidArgument: there are none or too many, or one is empty or neither text nor token ids.
        RequestTooLong: one exceeds max_model_len with the prompt.
    """
    require_parts("continuations", len(continuations))
    for i, continuation in enumerate(continuations):
        if not len(continuation):
            raise InvalidArgument(f"continuations[{i}]", "is empty")
    with errors_named("prompt"):
        prompt_ids = _fitting(processor, prompt)
    tails = []
    for i, continuation in enumerate(continuations):
        with errors_named(f"continuations[{i}]"):
            tails.append(_tail(processor, prompt, prompt_ids, continuation))
    return PromptContinuations(prompt_ids, tuple(tails))


def embeddable(processor: InputProcessor, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt.

    Raises:
        InvalidArgument: one is empty, or has an id outside the vocabulary.
        RequestTooLong: one exceeds max_model_len.
    """
    found = []
    for i, prompt in enumerate(prompts):
        with errors_named(f"inputs[{i}]"):
            found.append(_fitting(processor, prompt, is_whole=True))
    return found


def _fitting(processor: InputProcessor, prompt: Prompt, *, is_whole: bool = False) -> tuple[int, ...]:
    token_ids = processor.prefix(prompt, is_whole=is_whole)
    if not token_ids:
        raise InvalidArgument("prompt", "is empty: at least one token is needed")
    if prompt.token_ids is not None:
        return token_ids
    return processor.prefix(Prompt(token_ids=token_ids), is_whole=is_whole)


def _tail(
    processor: InputProcessor, prompt: Prompt, prompt_ids: tuple[int, ...], continuation: GivenContinuation
) -> tuple[int, tuple[int, ...]]:
    if not isinstance(continuation, str):
        whole = (*prompt_ids, *continuation)
    elif prompt.text is not None:
        whole = processor.prefix(Prompt(text=prompt.text + continuation), is_whole=True)
    else:
        whole = (*prompt_ids, *processor.tokenize(Prompt(text=continuation), add_special_tokens=False))
    if len(whole) <= len(prompt_ids):
        raise InvalidArgument("continuation", "adds no token to the prompt")
    try:
        processor.prefix(Prompt(token_ids=whole), is_whole=True)
    except RequestTooLong as error:
        raise RequestTooLong("continuation", f"with the prompt, {error.problem}") from error
    num_shared = next((i for i, (a, b) in enumerate(zip(whole, prompt_ids, strict=False)) if a != b), len(prompt_ids))
    return num_shared, whole[num_shared:]


def get_score(output: RequestOutput) -> Score:
    """Return the score of a finished request made by `PromptContinuations.prompt`."""
    if output.prompt_logprobs is None:
        raise InternalError(f"request {output.request_id!r} has no prompt log-probabilities")
    told = [position.chosen for position in output.prompt_logprobs if position is not None]
    return Score(tuple(told), all(one.rank == 1 for one in told), output.usage)


class ScoreKwargs(TypedDict, total=False):
    """Further options of `LLM.score`.

    Attributes:
        adapter: as in `LLM.generate`.
        truncate_prompt_tokens: keep only the last N tokens of each prompt; -1 keeps what fits into max_model_len.
        tokenization_kwargs: as in `LLM.generate`; a cross-encoder has only `truncate_prompt_tokens`.
        chat_template: template by which a cross-encoder joins the texts, as messages of the roles "query" and
            "document"; None: the tokenizer joins them. Without an effect on embeddings, as in vLLM.
        continuations: former argument; calls `score_continuations`.
    """

    adapter: str | None
    truncate_prompt_tokens: int | None
    tokenization_kwargs: Mapping[str, Any] | None
    chat_template: str | None
    continuations: Any


class EmbedKwargs(TypedDict, total=False):
    """Further options of `LLM.embed`.

    Attributes:
        truncate_prompt_tokens: keep only the last N tokens of each prompt; -1 keeps what fits into max_model_len.
        tokenization_kwargs: as in `LLM.generate`.
        pooling: "last" for the last token, "mean" for the mean of all; encoders also have "cls", "max", "weightedmean"
            and "mean_sqrt_len_tokens". None is the model's own, with its layers and norm: the last token's hidden
            state, unless the checkpoint has modules of sentence-transformers or is an encoder's.
        normalize: without `pooling_params`: scale each vector to length 1; None leaves it to the model.
        adapter: name of a loaded adapter for all; None for the base model.
        prompt_name: the model's prompt to put before texts; None for its default, if it has one.
    """

    truncate_prompt_tokens: int | None
    tokenization_kwargs: Mapping[str, Any] | None
    pooling: Pooling | None
    normalize: bool | None
    adapter: str | None
    prompt_name: str | None


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """Options of a vector; None leaves a field to the model.

    Attributes:
        pooling: a pooling of hidden states, without the model's own layers and norm.
        normalize: scale vectors to length 1.
        dimensions: keep only the first numbers of each vector.
        prompt_name: the model's prompt to put before texts.
        classifies: return probabilities of labels instead, or logits if `normalize` is False.
        truncate_prompt_tokens: number of a prompt's last tokens to keep.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    classifies: bool = False

    truncate_prompt_tokens: int | None = None

    @classmethod
    def of_encode(cls, params: PoolingParams, task: str | None = None) -> VectorOptions:
        """Return the options of `LLM.encode`: vectors have length 1 by default, as in vLLM.

        Args:
            task: instead of that of the parameters.
        """
        task = params.task if task is None else task
        pooling: Pooling | None = "all" if task == "token_embed" else None
        normalize, kept = params.is_normalized(default=True), params.truncate_prompt_tokens
        return cls(pooling, normalize, params.dimensions, None, task == "classify", kept)

    def check(self, pooler: Pooler | None, hidden_size: int) -> None:
        """Reject options that the model does not support.

        Raises:
            InvalidArgument: names the field.
            Unsupported: the model classifies, or should and has no head.
        """
        if self.classifies:
            if pooler is None or not pooler.labels:
                raise Unsupported("pooling_task: 'classify' is not supported: the model has no classification head")
            return
        if self.pooling is None and pooler is not None and pooler.labels:
            raise Unsupported("this model classifies texts and has no vectors of its own: use /classify or /score")
        if self.prompt_name is not None and (pooler is None or self.prompt_name not in pooler.prompts):
            known = ", ".join(pooler.prompts) if pooler is not None and pooler.prompts else "none"
            raise InvalidArgument("prompt_name", f"{self.prompt_name[:80]!r} is not a prompt of this model: {known}")
        own = pooler.width if pooler is not None and self.pooling is None else None
        width = own or hidden_size
        if self.dimensions is None or not width or self.dimensions == width:
            return
        if pooler is None or not pooler.can_shorten or self.dimensions > width:
            what = "" if pooler is None or not pooler.can_shorten else " or fewer"
            raise InvalidArgument(
                "dimensions", f"{self.dimensions} is not supported: the model's vectors have {width}{what} dimensions"
            )

    def prepare(
        self, pooler: Pooler | None, hidden_size: int, prompt: Prompt, changes: Mapping[str, Any]
    ) -> tuple[Prompt, SamplingParams]:
        """Return a prompt and its parameters as the engine takes them.

        Args:
            changes: other parameters.

        Raises:
            InvalidArgument, Unsupported: as `check`.
        """
        self.check(pooler, hidden_size)
        own = {"truncate_prompt_tokens": self.truncate_prompt_tokens, "output_kind": RequestOutputKind.FINAL_ONLY}
        return self.prompted(pooler, prompt), change_sampling(EMBED_SAMPLING, own | dict(changes))

    def get_pooling(self, pooler: Pooler | None) -> Pooling:
        """Return the pooling of the requests."""
        return self.pooling or ("last" if pooler is None else pooler.pooling)

    def prompted(self, pooler: Pooler | None, prompt: Prompt) -> Prompt:
        """Return a prompt with the pooling, and with the model's text before its own, if it is a text."""
        prompt = dataclasses.replace(prompt, pooling=self.get_pooling(pooler))
        if pooler is None or prompt.text is None:
            return prompt
        name = self.prompt_name or pooler.default_prompt
        return prompt if name is None else dataclasses.replace(prompt, text=pooler.prompts[name] + prompt.text)

    def embedding(self, pooler: Pooler | None, output: RequestOutput) -> Embedding:
        """Return the embedding of a finished request with the pooling."""
        values, normalize = output.embedding, self.normalize
        if self.pooling is None and pooler is not None and isinstance(values, tuple):
            if pooler.width is not None:
                values = tuple(pooler.apply(np.array(values, np.float32)).tolist())
            normalize = pooler.normalizes if normalize is None else normalize
        if self.dimensions is not None and isinstance(values, tuple):
            values = values[: self.dimensions]
        return get_embedding(dataclasses.replace(output, embedding=values), normalize=bool(normalize))


def get_embedding(output: RequestOutput, *, normalize: bool = False) -> Embedding:
    """Return the embedding of a finished request with pooling; scaled to length 1 if `normalize`."""
    values = output.embedding
    if not isinstance(values, tuple):
        raise InternalError(f"request {output.request_id!r} has no pooled hidden states")
    if normalize:
        length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
        values = tuple(value / length for value in values)
    return Embedding(output.prompt_token_ids, values, output.usage)


def get_token_embeddings(output: RequestOutput, *, normalize: bool = False) -> NDArray[np.float32]:
    """Return the hidden state of each prompt token `[T, E]`, float32, of a finished request with the pooling "all".

    Args:
        normalize: scale each hidden state to length 1.
    """
    if not isinstance(output.embedding, memoryview):
        raise InternalError(f"request {output.request_id!r} has no hidden states of its tokens")
    values_te = np.frombuffer(output.embedding, np.float32).reshape(len(output.prompt_token_ids), -1)
    if not normalize:
        return values_te
    lengths_t1 = np.linalg.norm(values_te, axis=1, keepdims=True)
    return np.divide(values_te, np.where(lengths_t1 == 0, 1, lengths_t1), dtype=np.float32)


def get_pooling_output(
    output: RequestOutput, options: VectorOptions, pooler: Pooler | None
) -> PoolingRequestOutput[PoolingOutput]:
    """Return the result of `LLM.encode` from a finished request with pooling."""
    if isinstance(output.embedding, memoryview):
        data = PoolingOutput(get_token_embeddings(output, normalize=bool(options.normalize)))
    elif options.classifies and pooler is not None:
        data = PoolingOutput(get_classification(pooler, output, use_activation=options.normalize is not False).values)
    else:
        data = PoolingOutput(options.embedding(pooler, output).values)
    return PoolingRequestOutput(output.request_id, data, output.prompt_token_ids, output.usage.cached_tokens)


@dataclass(frozen=True, slots=True)
class Classification:
    """A prompt's probabilities of labels, or its score by a single label; logits without an activation."""

    prompt_token_ids: tuple[int, ...]
    values: tuple[float, ...]
    usage: Usage


def get_classification(pooler: Pooler, output: RequestOutput, *, use_activation: bool = True) -> Classification:
    """Return the result of a finished request with the pooling of a classifier."""
    if not isinstance(output.embedding, tuple):
        raise InternalError(f"request {output.request_id!r} has no pooled hidden states")
    logits = pooler.apply(np.array(output.embedding, np.float32))
    values = pooler.activate(logits) if use_activation else logits
    return Classification(output.prompt_token_ids, tuple(values.tolist()), output.usage)


def get_class_output(
    model: LoadedModel, output: RequestOutput, params: PoolingParams
) -> PoolingRequestOutput[ClassificationOutput]:
    """Return the result of `LLM.classify` from a finished request."""
    found = get_classification(require_classifier(model), output, use_activation=params.is_normalized(default=True))
    return PoolingRequestOutput(output.request_id, ClassificationOutput(found.values), found.prompt_token_ids)


def get_pair_output(
    model: LoadedModel, output: RequestOutput, params: PoolingParams
) -> PoolingRequestOutput[ScoringOutput]:
    """Return the result of `LLM.score` from the finished request of a pair."""
    found = get_class_output(model, output, params)
    return PoolingRequestOutput(found.request_id, ScoringOutput(found.outputs.probs[0]), found.prompt_token_ids)


def require_classifier(model: LoadedModel, *, for_pairs: bool = False) -> Pooler:
    """Return the pooler of a classifier.

    Args:
        for_pairs: it must have one label, which is the score of a pair.

    Raises:
        Unsupported: the model has no classification head, or another number of labels.
    """
    if model.pooler is None or not model.pooler.labels:
        raise no_classification_head(model.model)
    if for_pairs and len(model.pooler.labels) != 1:
        raise Unsupported(
            f"scores of pairs: {model.model.name!r} has {len(model.pooler.labels)} labels; a cross-encoder has 1"
        )
    return model.pooler


def classifiable(processor: InputProcessor, prompt: Prompt, pooler: Pooler, limit: int | None = None) -> Prompt:
    """Return a prompt or a pair of texts as token ids, with the pooling of a classifier.

    Args:
        limit: tokens that are kept of a pair, as of `InputProcessor.pair`.

    Raises:
        InvalidArgument, RequestTooLong, Unsupported: as `embeddable` and `InputProcessor.pair`.
    """
    prompt = dataclasses.replace(prompt, pooling=pooler.pooling)
    if prompt.text_pair is not None:
        return processor.pair(prompt, limit)
    return dataclasses.replace(prompt, text=None, token_ids=_fitting(processor, prompt, is_whole=True))


def no_classification_head(model: ModelInfo) -> Unsupported:
    """Return the error of a classification with a model that cannot classify."""
    what = f"{model.name!r} ({model.architecture}) has no classification head, as *ForSequenceClassification have"
    return Unsupported(f"classify: {what}; compare the log-likelihoods of continuations instead")


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerOptions:
    """Caller and options of a score or embed call, as in `service.Call`.

    Attributes:
        priority: of each request.
        cache_salt: of each request.
    """

    model: str | None = None
    tenant: str = ""
    remaining_s: float | None = None
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    caller: Caller = NOBODY

    def begins(self, operation: str) -> RequestRecord:
        """Return the record of a call that begins."""
        return RequestRecord(
            operation=operation,
            tenant=self.tenant,
            caller=self.caller,
            adapter=self.adapter and loggable_name(self.adapter),
        )


async def score(
    service: Service, asker: CallerOptions, read: Callable[[], tuple[Prompt, Sequence[GivenContinuation]]], size: int
) -> list[Score]:
    """Score each continuation of a prompt by its log-likelihood.

    Args:
        read: decodes the prompt and its continuations; called on a thread if they are large.
        size: total characters and token ids of the prompt with each continuation.

    Raises:
        JpagedError: one of them is invalid or has failed; the others are aborted.
    """
    require_score_size(size)
    require_salt(asker.cache_salt)
    record = asker.begins("score")
    async with service.open_batch_call(asker.model, record) as model:
        parts = _Parts(service, model, asker, record)
        given = await service.run_blocking(lambda: continued(model.input_processor, *read()), size)

        async def one(i: int) -> Score:
            with errors_named(f"continuations[{i}]"):
                return get_score(await parts.complete(lambda: given.prompt(i), given.size(i), SCORE_SAMPLING))

        return await run_all(one, len(given), parts.num_at_once)


async def embed(
    service: Service,
    asker: CallerOptions,
    read: Callable[[], Sequence[Prompt]],
    size: int,
    options: VectorOptions,
) -> list[Embedding]:
    """Embed each prompt that `read` decodes; `size` is their characters and token ids. Raises as `score` does."""

    def convert(model: LoadedModel, output: RequestOutput) -> Embedding:
        return options.embedding(model.pooler, output)

    return await _pool(service, asker, read, size, options, convert)


async def embed_tokens(
    service: Service, asker: CallerOptions, read: Callable[[], Sequence[Prompt]], size: int, *, normalize: bool = False
) -> list[tuple[NDArray[np.float32], Usage]]:
    """Return the hidden states of each prompt's tokens `[T, E]`, with its usage; arguments and errors as `embed`."""

    def convert(model: LoadedModel, output: RequestOutput) -> tuple[NDArray[np.float32], Usage]:
        return get_token_embeddings(output, normalize=normalize), output.usage

    return await _pool(service, asker, read, size, VectorOptions("all"), convert)


async def classify(
    service: Service,
    asker: CallerOptions,
    read: Callable[[], Sequence[Prompt]],
    size: int,
    *,
    use_activation: bool = True,
    limit: int | None = None,
    for_pairs: bool = False,
) -> list[Classification]:
    """Classify each prompt or pair that `read` decodes; raises as `embed` and `require_classifier` do.

    Args:
        size: as in `embed`.
        use_activation: return probabilities or scores, not logits.
        limit: tokens that are kept of a pair; -1 for the model's limit, None refuses longer pairs.
        for_pairs: as of `require_classifier`.
    """

    def prepare(model: LoadedModel) -> list[Prompt]:
        pooler, prompts, found = require_classifier(model, for_pairs=for_pairs), read(), list[Prompt]()
        require_parts("inputs", len(prompts))
        for i, prompt in enumerate(prompts):
            with errors_named(f"inputs[{i}]"):
                found.append(classifiable(model.input_processor, prompt, pooler, limit))
        return found

    def convert(model: LoadedModel, output: RequestOutput) -> Classification:
        return get_classification(require_classifier(model), output, use_activation=use_activation)

    return await _run_pooled(service, asker, prepare, size, convert)


async def _pool(
    service: Service,
    asker: CallerOptions,
    read: Callable[[], Sequence[Prompt]],
    size: int,
    options: VectorOptions,
    convert: Callable[[LoadedModel, RequestOutput], _T],
) -> list[_T]:
    def prepare(model: LoadedModel) -> list[Prompt]:
        options.check(model.pooler, model.hidden_size)
        prompts = [options.prompted(model.pooler, prompt) for prompt in read()]
        require_parts("inputs", len(prompts))
        pooling = options.get_pooling(model.pooler)
        return [Prompt(token_ids=ids, pooling=pooling) for ids in embeddable(model.input_processor, prompts)]

    return await _run_pooled(service, asker, prepare, size, convert)


async def _run_pooled(
    service: Service,
    asker: CallerOptions,
    prepare: Callable[[LoadedModel], list[Prompt]],
    size: int,
    convert: Callable[[LoadedModel, RequestOutput], _T],
) -> list[_T]:
    require_salt(asker.cache_salt)
    record = asker.begins("embeddings")
    async with service.open_batch_call(asker.model, record) as model:
        parts = _Parts(service, model, asker, record)
        inputs = await service.run_blocking(lambda: prepare(model), size)

        async def one(i: int) -> _T:
            prompt = inputs[i]
            with errors_named(f"inputs[{i}]"):
                output = await parts.complete(lambda: prompt, prompt.size, EMBED_SAMPLING)
            num_numbers = len(output.embedding or ())
            return await service.run_blocking(lambda: convert(model, output), num_numbers)

        return await run_all(one, len(inputs), parts.num_at_once)


class _Parts:
    """The requests of one call."""

    def __init__(self, service: Service, model: LoadedModel, asker: CallerOptions, record: RequestRecord) -> None:
        self._service, self._model, self._asker, self._record = service, model, asker, record
        self._adapter: str | LoadedAdapter = model.adapters.named(asker.adapter) or ""
        self._began_s = time.monotonic()
        self.num_at_once = num_at_once(model)

    async def complete(self, read: Callable[[], Prompt], size: int, sampling: SamplingParams) -> RequestOutput:
        """Run one request to its end; raise what `Service.complete` raises."""
        asker = self._asker
        sampling = dataclasses.replace(sampling, cache_salt=asker.cache_salt, priority=asker.priority)
        remaining_s = get_timeout(self._model, asker.remaining_s)
        if remaining_s is not None:
            remaining_s -= time.monotonic() - self._began_s
        call = Call(
            read=lambda: (read(), sampling),
            size=size,
            tenant=asker.tenant,
            remaining_s=remaining_s,
            is_whole=True,
            adapter=self._adapter,
            caller=asker.caller,
            record=self._record,
        )
        return await self._service.complete(call, self._model)


def num_at_once(model: LoadedModel) -> int:
    """Return how many parts of a call may run concurrently: the number of rows of a step, over all replicas."""
    engine = model.engine
    return min(engine.geometry.max_num_seqs * max(1, len(engine.replica_loads())), engine.max_num_in_flight)


async def run_all(work: Callable[[int], Awaitable[_T]], num: int, num_at_once: int) -> list[_T]:
    """Run all parts of a call, `num_at_once` at a time; the first error ends the call.

    A part that finds the queue full is retried, unless no part of the call is running or done.
    """
    free, num_open, num_done = asyncio.Semaphore(num_at_once), 0, 0

    async def run(i: int) -> _T:
        nonlocal num_open, num_done
        async with free:
            while True:
                num_open += 1
                try:
                    result = await work(i)
                except QueueFull as error:
                    if num_open == 1 and not num_done:
                        raise
                    wait_s = error.retry_after_s
                else:
                    num_done += 1
                    return result
                finally:
                    num_open -= 1
                await asyncio.sleep(wait_s)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(i)) for i in range(num)]
    except BaseExceptionGroup as errors:  # the first error has cancelled all others
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
