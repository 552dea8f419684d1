"""/v1/embeddings, /v1/score, /v1/rerank, /pooling: calls of several requests, and tokens.

If the client disconnects, all requests of a call are aborted.

/tokenize, /detokenize and /tokenizer_info are compatible with vLLM. `LocalServer` is an in-process client: the methods
that OpenAI's bodies need, on the service of this process.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.chat import ChatOptions
from jpaged.errors import InvalidArgument
from jpaged.http.exchange import (
    CHARS_OF_NUMBER,
    JSON,
    body_in,
    build_answer,
    get_caller,
    get_remaining_s,
    get_tenant,
    name_request,
    note_ignored_fields,
    read_body,
    while_there,
)
from jpaged.openai.embeddings import (
    HEAD_TASKS,
    ClassifyJob,
    EmbedJob,
    PoolingJob,
    ScoringJob,
    SimilarityJob,
    classify_job,
    embed_job,
    parse_detokenize_job,
    parse_tokenize_job,
    pooling_job,
    rerank_job,
    score_job,
    tokenized_body,
)
from jpaged.openai.lines import EMBEDDINGS_URL, SCORE_URL, Answers, Evaluation, LocalCalls
from jpaged.openai.request import renamed
from jpaged.openai.response import AnswerSize
from jpaged.outputs import Evaluated, new_completions
from jpaged.service.calls import NOBODY, Call, Caller
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.score_embed import (
    CallerOptions,
    VectorOptions,
    classify,
    embed,
    embed_tokens,
    no_classification_head,
    score,
)
from jpaged.service.service import Service
from jpaged.types import MAX_DETOKENIZE_IDS, Pooling, Prompt, RequestOutput, SamplingParams, Score, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """Implementation of `jpaged.openai.lines.LineServer` for one caller.

    Attributes:
        tenant: tenant of the requests.
        request_id: the caller's id, for calls that make one request.
        until_s: deadline on the monotonic clock; None for none.
        caller: identity of the caller for the record.
        priority: lower bound of the priority number of every request; None for none.
    """

    service: Service
    tenant: str = ""
    caller: Caller = NOBODY
    request_id: str | None = None
    until_s: float | None = None
    priority: int | None = None

    async def complete(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        adapter: str = "",
    ) -> RequestOutput:
        """Run a request to its end."""
        sampling = sampling or SamplingParams()
        sampling = replace(sampling, priority=self._priority(sampling.priority))
        given = Prompt(prompt, prompt_token_ids, messages, chat_options=chat_options or ChatOptions())
        completions = new_completions(sampling)
        size = AnswerSize(
            sampling,
            vocab_size=self.service.state.loaded().model.vocab_size,
            is_chat=messages is not None,
            max_bytes=int(self.service.state.config.http.max_response_size * 2**20),
        )
        call = Call(
            read=lambda: (given, sampling),
            size=None if messages is not None else given.size,
            request_id=self.request_id,
            tenant=self.tenant,
            remaining_s=self._remaining_s(),
            is_whole=True,
            adapter=adapter,
            caller=self.caller,
        )
        async with self.service.generate(call) as generation:
            size.add_prompt(len(generation.prompt_token_ids))
            async for event in generation:
                completions.add(event)
            return completions.output(generation.request_id, prompt, generation.prompt_token_ids)

    async def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[Score]:
        """Return the score of each continuation."""
        size = len(continuations) * len(prompt) + sum(map(len, continuations))
        asker = self._asker(adapter, cache_salt, priority)
        found = await score(self.service, asker, lambda: (_prompt(prompt), continuations), size)
        return Evaluated(found, _usage([one.usage for one in found]))

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]:
        """Return the vector of each input."""
        size = sum(map(len, inputs))
        asker = self._asker(adapter, cache_salt, priority)
        options = VectorOptions(pooling, normalize, dimensions, prompt_name)
        found = await embed(self.service, asker, lambda: [_prompt(one) for one in inputs], size, options)
        return Evaluated([one.values for one in found], _usage([one.usage for one in found]))

    async def embed_tokens(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        normalize: bool = False,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[NDArray[np.float32]]:
        """Return the hidden states of each input's tokens, `[T, E]`."""
        size = sum(map(len, inputs))
        asker = self._asker(adapter, cache_salt, priority)
        found = await embed_tokens(
            self.service, asker, lambda: [_prompt(one) for one in inputs], size, normalize=normalize
        )
        return Evaluated([values_te for values_te, _ in found], _usage([usage for _, usage in found]))

    async def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        limit: int | None = None,
        use_activation: bool = True,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[float]:
        """Return the score of each pair of texts by the model's classification head, or its logit."""
        size, asker = sum(len(text) for pair in pairs for text in pair), self._asker(adapter, cache_salt, priority)

        def read() -> list[Prompt]:
            return [Prompt(text=first, text_pair=second) for first, second in pairs]

        found = await classify(
            self.service, asker, read, size, use_activation=use_activation, limit=limit, for_pairs=True
        )
        return Evaluated([one.values[0] for one in found], _usage([one.usage for one in found]))

    async def classify(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        use_activation: bool = True,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]:
        """Return the probabilities of each input's labels, or their logits."""
        size, asker = sum(map(len, inputs)), self._asker(adapter, cache_salt, priority)
        found = await classify(
            self.service, asker, lambda: [_prompt(one) for one in inputs], size, use_activation=use_activation
        )
        return Evaluated([one.values for one in found], _usage([one.usage for one in found]))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
    ) -> list[int]:
        """Return the token ids of a text or a chat."""
        prompt = Prompt(text, messages=messages, chat_options=chat_options or ChatOptions())
        return await self.service.tokenize(lambda: prompt, None if messages is not None else prompt.size)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return await self.service.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[bytes]:
        """Return the bytes that each token adds to a text."""
        return await self.service.token_bytes(token_ids, skip_special_tokens=skip_special_tokens)

    def _asker(self, adapter: str, cache_salt: str, priority: int) -> CallerOptions:
        return CallerOptions(
            tenant=self.tenant,
            remaining_s=self._remaining_s(),
            adapter=adapter,
            cache_salt=cache_salt,
            priority=self._priority(priority),
            caller=self.caller,
        )

    def _remaining_s(self) -> float | None:
        return None if self.until_s is None else self.until_s - time.monotonic()

    def _priority(self, asked: int) -> int:
        """Return the larger of the two priority numbers, i.e. the less urgent one."""
        return asked if self.priority is None else max(asked, self.priority)


def _prompt(given: str | Sequence[int]) -> Prompt:
    if isinstance(given, str):
        return Prompt(text=given)
    if not given:
        raise InvalidArgument("prompt", "is empty: at least one token is needed")
    return Prompt(token_ids=given)


def _usage(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(one.prompt_tokens for one in usages), cached_tokens=sum(one.cached_tokens for one in usages)
    )


ScoringReader = Callable[[Mapping[str, Any]], ScoringJob]
"""Reads a body."""


def scoring_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/embeddings, /v1/score, /v1/rerank, /pooling and /classify."""

    def answering(read: ScoringReader) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await answer_scoring(service, request, read, *await body_in(service, request))

        return answer

    paths: dict[str, ScoringReader] = {
        EMBEDDINGS_URL: embed_job,
        "/pooling": pooling_job,
        "/classify": classify_job,
        **dict.fromkeys((SCORE_URL, "/score"), score_job),
        **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), rerank_job),
    }
    return [Route(path, answering(read), methods=["POST"]) for path, read in paths.items()]


async def answer_scoring(
    service: Service, request: Request, read: ScoringReader, body: Mapping[str, Any], num_bytes: int
) -> Response:
    """Return the response to a body of embeddings, scores or ranks."""
    job = await service.run_blocking(lambda: read(body), num_bytes)
    note_ignored_fields(service, request, body)
    found = await evaluate_job(service, request, job, str(body.get("user") or ""))
    if isinstance(job, EmbedJob) and job.is_binary:
        return await service.run_blocking(partial(_binary_answer, job, found), CHARS_OF_NUMBER * found.size)
    return await build_answer(service, found.body, CHARS_OF_NUMBER * found.size)


def _binary_answer(job: EmbedJob, found: Evaluation) -> Response:
    """Return vectors as the bytes of a body, described by a header if the job asks for it.

    Raises:
        InvalidArgument: the header would be longer than clients accept.
    """
    content, metadata = job.binary_body(found.body())
    if job.encoding != "bytes":
        return Response(content, media_type="application/octet-stream")
    if len(metadata) > _MAX_HEADER_BYTES:
        problem = f"describes {len(job.inputs)} inputs in a header of {len(metadata)} bytes, over {_MAX_HEADER_BYTES}"
        raise InvalidArgument("encoding_format", f"{problem}: use bytes_only, or send fewer inputs")
    return Response(content, media_type="application/octet-stream", headers={"metadata": metadata})


_MAX_HEADER_BYTES = 32768
"""Half of the line that Python's HTTP client accepts."""


async def evaluate_job(service: Service, request: Request, job: ScoringJob, user: str = "") -> Evaluation:
    """Run a job of embeddings, scores or ranks while the client is connected; `user` is the end user's name."""
    remaining_s = get_remaining_s(request)
    server = LocalServer(
        service=service,
        tenant=get_tenant(request),
        caller=replace(get_caller(request), user=user),
        until_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )
    answers = _make_answers(service, server)
    if isinstance(job, PoolingJob):
        answers.check_model(job.how)
        if job.task in HEAD_TASKS:
            loaded = service.state.serving()
            is_classifier = loaded.pooler is not None and bool(loaded.pooler.labels)
            if not is_classifier or job.task != HEAD_TASKS[0]:
                error = f"only {HEAD_TASKS[0]!r}" if is_classifier else no_classification_head(loaded.model)
                raise InvalidArgument("task", f"{job.task!r} is not supported: {error}")
    if isinstance(job, PoolingJob | ClassifyJob):
        job = replace(job, request_id=name_request(request, job.request_id))

    async def evaluate() -> Evaluation:
        return await answers.evaluate(server, await _tokenized(service, job))

    return await while_there(request, evaluate(), remaining_s)


def get_local_calls(loaded: LoadedModel, server: LocalServer | None) -> LocalCalls:
    """Return the calls of this process's server for its model."""
    if server is None or loaded.pooler is None or not loaded.pooler.labels:
        return LocalCalls()
    return LocalCalls(loaded.pooler.labels, server.score_pairs, server.classify)


def _make_answers(service: Service, server: LocalServer | None = None) -> Answers:
    """Return what answers bodies of scores and embeddings with the served model."""
    loaded = service.state.serving()
    return Answers(
        loaded.model,
        service.run_blocking,
        loaded.adapters.names,
        max_bytes=int(service.state.config.http.max_response_size * 2**20),
        hidden_size=loaded.hidden_size,
        embed_tokens=None if server is None else server.embed_tokens,
        local=get_local_calls(loaded, server),
    )


async def _tokenized(service: Service, job: ScoringJob) -> ScoringJob:
    """Return a job whose texts are as long as they may be, or token ids if they are to have no special tokens."""
    if isinstance(job, SimilarityJob) and any(job.max_tokens):
        pairs = [[await _cut(service, *one) for one in zip(pair, job.max_tokens, strict=True)] for pair in job.pairs]
        return replace(job, pairs=tuple((first, second) for first, second in pairs), max_tokens=(0, 0))
    if not isinstance(job, EmbedJob) or job.add_special_tokens:
        return job
    pooler, prompt = service.state.serving().pooler, ""
    if pooler is not None and not pooler.labels:
        prompt = pooler.prompts.get(job.prompt_name or pooler.default_prompt or "", "")
    inputs = [
        await _ids_without_special(service, prompt + text) if isinstance(text, str) else text for text in job.inputs
    ]
    return replace(job, inputs=tuple(inputs))


async def _cut(service: Service, text: str, max_tokens: int) -> str:
    """Return the text of the first tokens; 0 returns the whole text."""
    token_ids = await _ids_without_special(service, text) if max_tokens else ()
    return text if len(token_ids) <= max_tokens else await service.detokenize(token_ids[:max_tokens])


async def _ids_without_special(service: Service, text: str) -> tuple[int, ...]:
    prompt = Prompt(text=text)
    return tuple(await service.tokenize(lambda: prompt, prompt.size, add_special_tokens=False))


def token_routes(service: Service) -> list[Route]:
    """Return the routes of /tokenize, /detokenize and /tokenizer_info."""

    async def tokenize(request: Request) -> Response:
        job = await read_body(service, request, parse_tokenize_job)
        size = None if job.prompt.messages is not None else job.prompt.size
        token_ids = await service.tokenize(
            lambda: job.prompt, size, add_special_tokens=job.add_special_tokens, model=job.model
        )
        model = service.state.loaded()
        texts = None
        if job.wants_texts:
            if len(token_ids) > MAX_DETOKENIZE_IDS:
                problem = f"would return {len(token_ids)} tokens; at most {MAX_DETOKENIZE_IDS}"
                raise InvalidArgument("return_token_strs", problem)
            texts = await service.run_blocking(lambda: model.tokenizer.token_strings(token_ids), 8 * len(token_ids))
        max_model_len = model.model.max_model_len
        return await build_answer(
            service,
            lambda: tokenized_body(token_ids, texts, max_model_len=max_model_len),
            CHARS_OF_NUMBER * len(token_ids),
        )

    async def detokenize(request: Request) -> Response:
        job = await read_body(service, request, parse_detokenize_job)
        try:
            text = await service.detokenize(job.token_ids, skip_special_tokens=job.skip_special_tokens, model=job.model)
        except InvalidArgument as error:
            raise renamed(error, {"token_ids": "tokens"}) from error
        return await build_answer(service, lambda: {"prompt": text}, len(text))

    async def tokenizer_info(request: Request) -> Response:
        model = service.state.loaded()
        return JSON({**model.tokenizer.describe(), "model_max_length": model.model.max_model_len})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]
