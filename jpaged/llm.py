"""A model in the caller's process, without a server: `LLM` for batches, `AsyncLLM` for streams, `LLMEngine` for steps.

    llm = LLM("demo", max_num_seqs=32)
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, max_tokens=64))

Every command-line option except the server's is a keyword here. Threads share an `LLM`, tasks an `AsyncLLM`:

    thread ── generate ──> SubmittedCall ──┐                        engine thread
    task ──── generate ──> SubmittedCall ──┴─> Admission ─ submit ─> one batch ─ events ─> each call's own queue

A progress bar on stderr, in the style of vLLM's `LLM`, shows finished prompts and tokens per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from queue import SimpleQueue
from types import NoneType
from typing import Any, NoReturn, Unpack

from jpaged.chat import ChatKwargs, build_chat_options
from jpaged.engine.core import PauseMode
from jpaged.engine.engine import check_mode
from jpaged.engine.executor import Progress
from jpaged.errors import AlreadyExists, InvalidArgument, JpagedError, Unavailable, Unsupported
from jpaged.local_model import (
    ONLINE_DEFAULTS,
    AsynchronousModel,
    EmbedsPrompt,
    EngineArgs,
    GivenAdapter,
    GivenInput,
    GivenLora,
    GivenParams,
    GivenPrompt,
    GivenRequest,
    Messages,
    PreparedRequest,
    SynchronousModel,
    TextPrompt,
    TokensPrompt,
    apply_changes,
    change_prompt,
    list_prompts,
    parse_prompt,
)
from jpaged.outputs import (
    AsyncOutputStream,
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    EventDelivery,
    MakeBar,
    PoolingOutput,
    PoolingRequestOutput,
    ProgressBar,
    RequestOutputStream,
    ScoringOutput,
    decode_output,
    new_completions,
    without_errors,
)
from jpaged.sampling_params import (
    BeamSearchParams,
    PoolingParams,
    RequestOutputKind,
    change_sampling,
    check_pooling,
    check_pooling_task,
    get_pooling,
    get_sampling_changes,
    python_names,
    refuse_processor_options,
    with_python_name,
)
from jpaged.service.loaded_model import Admission, SubmittedCall
from jpaged.service.score_embed import (
    SCORE_SAMPLING,
    EmbedKwargs,
    ScoreKwargs,
    VectorOptions,
    continued,
    errors_named,
    get_class_output,
    get_pair_output,
    get_pooling_output,
    get_score,
    one_each,
    require_classifier,
    require_known_options,
)
from jpaged.types import (
    Embedding,
    LoRARequest,
    OutputEvent,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    Score,
    Usage,
)

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "EmbedsPrompt",
    "EngineArgs",
    "LLMEngine",
    "MakeBar",
    "ProgressBar",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
]

_QUICK_SIZE = 2000
"""Characters or token ids of a prompt that an event loop prepares without a thread, which would take longer: 1 ms."""
AsyncEngineArgs = EngineArgs
PromptType = GivenPrompt


class ChatCallKwargs(ChatKwargs, total=False):
    """Options of `LLM.chat`: those of a chat, and of the call.

    Attributes:
        adapter: as in `LLM.generate`.
        chat_template_content_format: "auto" or the model's option.
        tokenization_kwargs: as in `LLM.generate`.
        mm_processor_kwargs: as in `LLM.generate`.
        conversations: former name of `messages`.
    """

    adapter: GivenAdapter
    chat_template_content_format: str
    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    conversations: Messages | Sequence[Messages]


class LLM(SynchronousModel):
    """A loaded model for offline inference on batches of prompts; methods have vLLM's names.

        llm = LLM("demo")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
        print(outputs[0].outputs[0].text)

    The engine runs on a separate thread. All methods are thread-safe; concurrent calls share the engine's batch, which
    does not change their results. On an event loop, use `AsyncLLM`. The engine stops with `close`, at the end of a
    `with` block, or when the object is garbage-collected. A forked child process cannot use it. Arguments are those of
    `LocalModel`.
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        super().__init__(model, progress=progress, **options)
        self._admission = Admission(self._serving.engine)

    def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        sampling_params: GivenParams = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: GivenLora = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        adapter: GivenAdapter = None,
    ) -> list[RequestOutput]:
        """Generate completions for every prompt; return the results in the order of the prompts.

        If one of several requests fails at run time, only its output has an `error` and no `outputs`. The error of a
        single prompt is raised, and so is a failure of the engine.

        Args:
            prompts: text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}` or `{"prompt_embeds": array}`, the
                last three also with `cache_salt`; one or a sequence.
            sampling_params: one for all prompts, or one for each; `get_default_sampling_params()` by default.
            use_tqdm: progress bar. True shows one on stderr if that is a terminal; False shows none. A callable that
                creates the bar, such as `functools.partial(tqdm, leave=False)`, is always used.
            lora_request: LoRA adapter for all prompts, or one for each, loaded on first use; None for the base model.
            priority: priority for all prompts, or one for each, under the policy `priority`; lower runs first.
            tokenization_kwargs: `truncate_prompt_tokens`, `truncation_side` and `add_special_tokens`.
            mm_processor_kwargs: None, or an empty dictionary.
            adapter: name of a loaded LoRA adapter instead of a `lora_request`; one for all, or one for each.

        Raises:
            InvalidArgument: a prompt or its parameters are invalid; nothing was generated.
            NotFound: there is no such adapter; nothing was generated.
        """
        refuse_processor_options(mm_processor_kwargs)
        many = [parse_prompt(one) for one in list_prompts(prompts)[0]]
        params = self._params([one.prompt for one in many], sampling_params)
        params = apply_changes(params, tokenization_kwargs, [one.cache_salt for one in many], priority)
        return self._run(self._requests(params, lora_request, adapter), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages] | None = None,
        sampling_params: GivenParams = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: GivenLora = None,
        priority: int | Sequence[int] | None = None,
        **options: Unpack[ChatCallKwargs],
    ) -> list[RequestOutput]:
        """Generate the assistant's next turn of every conversation, using the model's chat template.

        If the model's format is known (`tool_call_parser`, `reasoning_parser`), outputs have tool calls in `tool_calls`
        and reasoning in `reasoning_content`, and `text` has neither. Other arguments are those of `generate`.

        Args:
            messages: messages in OpenAI's format, of one conversation or of several.
            options: chat options for all conversations: tools, tool choice, reasoning, the chat template, ...

        Raises:
            InvalidArgument: also if both `messages` and `conversations`, its former name, are given.
        """
        words: dict[str, Any] = {**options}
        adapter, tokenization = words.pop("adapter", None), words.pop("tokenization_kwargs", None)
        chats = self._parse_chats(messages, words)
        params = self._params(chats, sampling_params)
        params = apply_changes(params, tokenization, [None] * len(chats), priority)
        return self._run(self._requests(params, lora_request, adapter), use_tqdm)

    def preprocess_chat(
        self, messages: Messages | Sequence[Messages], **options: Unpack[ChatCallKwargs]
    ) -> list[TokensPrompt]:
        """Return the token ids of every conversation, which `generate` takes.

        Args:
            messages: as in `chat`.
            options: as in `chat`; an adapter has no effect.
        """
        words: dict[str, Any] = {**options}
        tokenization, _ = words.pop("tokenization_kwargs", None), words.pop("adapter", None)
        params = self._params(self._parse_chats(messages, words), SamplingParams(max_tokens=1))
        params = apply_changes(params, tokenization, [None] * len(params), None)
        found = [one.request.prompt_token_ids for one in self._requests(params, None, None)]
        return [TokensPrompt(prompt_token_ids=list(token_ids)) for token_ids in found]

    def _parse_chats(self, messages: Any, words: dict[str, Any]) -> list[Prompt]:
        refuse_processor_options(words.pop("mm_processor_kwargs", None))
        conversations = words.pop("conversations", None)
        content_format = words.pop("chat_template_content_format", "auto")
        if conversations is not None:
            if messages is not None:
                raise InvalidArgument("conversations", "is given together with messages, its new name: give only one")
            warnings.warn("LLM.chat: conversations is now messages", DeprecationWarning, stacklevel=3)
        many: list[Any] = list(messages if messages is not None else conversations or ())
        if messages is None and conversations is None:
            raise InvalidArgument("messages", "is missing")
        if content_format not in ("auto", own := self.config.model.chat_template_content_format):
            problem = f"{content_format!r} is not 'auto' or {own!r}, which is set for the model: set it in LLM(...)"
            raise InvalidArgument("chat_template_content_format", problem)
        if many and isinstance(many[0], Mapping):
            many = [many]
        chat_options = build_chat_options(**words)
        return [Prompt(messages=one, chat_options=chat_options) for one in many]

    def beam_search(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: BeamSearchParams,
        lora_request: GivenLora = None,
        use_tqdm: bool | MakeBar = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best sequences of every prompt, by the algorithm of Hugging Face's `generate`.

        Args:
            prompts: as in `generate`.
            params: width, length and scoring.
            lora_request: as in `generate`.
            use_tqdm: as in `generate`.
            concurrency_limit: has no effect: the engine limits how many searches run at once.

        Raises:
            InvalidArgument: a prompt or a parameter is invalid; nothing was generated.
        """
        with python_names():
            sampling = dataclasses.replace(params.to_sampling(), logprobs=0)
        outputs = without_errors(self.generate(list_prompts(prompts)[0], sampling, use_tqdm, lora_request))
        decode = self._serving.tokenizer.decode
        return [
            BeamSearchOutput(
                tuple(
                    BeamSearchSequence(
                        tokens := (*output.prompt_token_ids, *one.token_ids),
                        decode(tokens),
                        one.cumulative_logprob or 0.0,
                        one.logprobs,
                        one.finish_reason,
                        one.stop_reason,
                        one.lora_request,
                    )
                    for one in output.outputs
                )
            )
            for output in outputs
        ]

    def score(
        self,
        data_1: GivenPrompt | Sequence[GivenPrompt],
        data_2: GivenPrompt | Sequence[GivenPrompt] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: GivenLora = None,
        **options: Unpack[ScoreKwargs],
    ) -> Any:
        """Return the similarity of texts, in `outputs.score`: the cosine of their embeddings, -1 to 1.

        A cross-encoder reads both texts of a pair together, and returns its one score.

        Args:
            data_1: one prompt, or one for each of `data_2`.
            data_2: the prompts to compare with.
            use_tqdm: as in `generate`.
            pooling_params: as in `embed`, except that vectors always have length 1.
            lora_request: as in `generate`.
            options: see `ScoreKwargs`.

        Raises:
            InvalidArgument: a prompt is invalid, or the numbers of prompts differ; nothing was computed.
        """
        require_known_options("score", options, ScoreKwargs)
        continuations, adapter = options.get("continuations"), options.get("adapter")
        kept, tokenization = options.get("truncate_prompt_tokens"), options.get("tokenization_kwargs")
        if continuations is not None:
            what = "LLM.score(continuations=...) is now LLM.score_continuations"
            warnings.warn(what, DeprecationWarning, stacklevel=2)
            return self.score_continuations(data_1, continuations, use_tqdm=use_tqdm, adapter=adapter)
        if data_2 is None:
            raise InvalidArgument("data_2", "is missing")
        left, right = list_prompts(data_1)[0], list_prompts(data_2)[0]
        if len(left) not in (1, len(right)):
            raise InvalidArgument(
                "data_1", f"{len(left)} prompts are given for {len(right)} in data_2; must be 1 or equal"
            )
        if self._serving.pooler is not None and self._serving.pooler.labels:
            given = get_pooling(pooling_params, kept, tokenization)
            pairs = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
            requests = self._pair_requests(pairs, given, lora_request, adapter, options.get("chat_template"))
            outputs = without_errors(self._run(requests, use_tqdm))
            return [get_pair_output(self._serving, output, given) for output in outputs]
        how: dict[str, Any] = {"normalize": True, "lora_request": lora_request, "adapter": adapter}
        how |= {"truncate_prompt_tokens": kept, "tokenization_kwargs": tokenization}
        params = pooling_params and dataclasses.replace(check_pooling(pooling_params), use_activation=True)
        vectors = self.embed([*left, *right], use_tqdm=use_tqdm, pooling_params=params, **how)
        firsts, seconds = vectors[: len(left)], vectors[len(left) :]
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        return [
            PoolingRequestOutput(
                f"{a.request_id}_{b.request_id}",
                ScoringOutput(math.fsum(x * y for x, y in zip(a.values, b.values, strict=True))),
                a.prompt_token_ids + b.prompt_token_ids,
                a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in zip(firsts, seconds, strict=True)
        ]

    def score_continuations(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        continuations: Sequence[str | Sequence[int]] | Sequence[Sequence[str | Sequence[int]]],
        *,
        use_tqdm: bool | MakeBar = True,
        adapter: str | None = None,
    ) -> list[list[Score]]:
        """Return log-likelihoods of continuations: for each prompt, one score per continuation, in order.

        A prompt is computed once, by the prefix cache, and many continuations share a step.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": ids}`; one or a sequence.
            continuations: texts or lists of token ids for one prompt; for several prompts, one such sequence for each.
                A text continuation of a text prompt is tokenized together with it; the tokens after the prompt's are
                scored.
            use_tqdm: as in `generate`.
            adapter: name of an adapter for all; None for the base model.

        Raises:
            InvalidArgument: one of them is invalid; nothing was scored.
            NotFound: there is no such adapter; nothing was scored.
        """
        many, is_one = list_prompts(prompts)
        given_each: Iterable[Any] = [continuations] if is_one else continuations
        of_each = [list(each) for each in given_each]
        if len(of_each) != len(many):
            raise InvalidArgument("continuations", f"{len(of_each)} are given for {len(many)} prompts")
        requests: list[PreparedRequest] = []
        for prompt, each in zip(many, of_each, strict=True):
            given = continued(self._serving.input_processor, parse_prompt(prompt).prompt, each)
            for i in range(len(given)):
                with errors_named(f"continuations[{i}]"):
                    requests.append(self._start_request(SCORE_SAMPLING, given.prompt(i), adapter)())
        outputs = iter(without_errors(self._run(requests, use_tqdm)))
        return [[get_score(next(outputs)) for _ in each] for each in of_each]

    def embed(
        self,
        prompts: GivenInput | Sequence[GivenInput],
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: GivenLora = None,
        **options: Unpack[EmbedKwargs],
    ) -> list[Embedding]:
        """Return one vector per prompt: the model's own, or its hidden states after the final norm, pooled.

        A vector is in `values`, and in `outputs.embedding` as in vLLM.

        Args:
            prompts: as in `generate`, or a chat: `{"messages": [...]}`, also with `chat_template`,
                `chat_template_kwargs`, `add_generation_prompt` (default: False) and `continue_final_message`.
            use_tqdm: as in `generate`.
            pooling_params: `PoolingParams()` scales each vector to length 1, as in vLLM.
            lora_request: as in `generate`.
            options: see `EmbedKwargs`.

        Raises:
            InvalidArgument: a prompt is invalid; nothing was computed.
            NotFound: there is no such adapter; nothing was computed.
        """
        require_known_options("embed", options, EmbedKwargs)
        pooling, tokenization = options.get("pooling"), options.get("tokenization_kwargs")
        given = get_pooling(pooling_params, options.get("truncate_prompt_tokens"), tokenization)
        if given.task not in (None, "embed"):
            raise Unsupported(f"pooling_params.task: {given.task!r} is not supported here: use encode")
        if pooling == "all":
            raise InvalidArgument("pooling", f"{pooling!r} is not supported here: use encode")
        is_normalized = options.get("normalize") if pooling_params is None else given.is_normalized(default=True)
        vector = VectorOptions(pooling, is_normalized, given.dimensions, options.get("prompt_name"))
        requests = self._pooling_requests(prompts, given, lora_request, options.get("adapter"), vector, tokenization)
        outputs = without_errors(self._run(requests, use_tqdm))
        vectors = [vector.embedding(self._serving.pooler, output) for output in outputs]
        return [
            dataclasses.replace(one, request_id=output.request_id) for one, output in zip(vectors, outputs, strict=True)
        ]

    def encode(
        self,
        prompts: GivenInput | Sequence[GivenInput],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: GivenLora = None,
        pooling_task: str | None = "embed",
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return one vector per prompt, as `embed`, or one for each of the prompt's tokens, in `outputs.data`.

        Args:
            prompts: as in `embed`.
            pooling_params: as in `embed`.
            use_tqdm: as in `generate`.
            lora_request: as in `generate`.
            pooling_task: "embed", "token_embed" for an array `[T, E]` of the tokens' hidden states, or "classify" for
                the probabilities of labels. `pooling_params` with a task take precedence.
            truncate_prompt_tokens: as in `embed`.
            tokenization_kwargs: as in `generate`.

        Raises:
            Unsupported: another task.
        """
        check_pooling_task("pooling_task", pooling_task or "embed")
        params = get_pooling(pooling_params, truncate_prompt_tokens, tokenization_kwargs)
        task = params.task or pooling_task or "embed"
        options = VectorOptions.of_encode(params, task)
        requests = self._pooling_requests(prompts, params, lora_request, None, options, tokenization_kwargs)
        outputs = without_errors(self._run(requests, use_tqdm))
        return [get_pooling_output(output, options, self._serving.pooler) for output in outputs]

    def classify(
        self,
        prompts: GivenInput | Sequence[GivenInput],
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: GivenLora = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probability of each label for each prompt, in `outputs.probs`.

        Args:
            prompts: as in `embed`.
            use_tqdm: as in `generate`.
            pooling_params: with `use_activation` off, return logits.
            lora_request: as in `generate`.
            truncate_prompt_tokens: as in `embed`.
            tokenization_kwargs: as in `generate`.

        Raises:
            Unsupported: the model has no classification head.
            InvalidArgument: a prompt is invalid; nothing was computed.
        """
        options = VectorOptions(require_classifier(self._serving).pooling)
        given = get_pooling(pooling_params, truncate_prompt_tokens, tokenization_kwargs)
        requests = self._pooling_requests(prompts, given, lora_request, None, options, tokenization_kwargs)
        outputs = without_errors(self._run(requests, use_tqdm))
        return [get_class_output(self._serving, output, given) for output in outputs]

    def reward(self, prompts: GivenPrompt | Sequence[GivenPrompt], **options: Any) -> NoReturn:
        """Raise Unsupported: reward models are not supported."""
        raise Unsupported("reward: models with a reward head are not supported; embed() returns hidden states")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> int:
        """Drop all cached prefixes that are not in use; return the number of dropped blocks.

        Args:
            reset_running_requests: has no effect: running requests keep their blocks, and no result depends on them.
            reset_connector: has no effect: a KV connector keeps its blocks.
        """
        self._check_usable()
        forgotten = self._serving.engine.reset_prefix_cache()
        self._finish_step()
        if not forgotten.done():
            raise Unavailable("the engine has failed")
        return forgotten.result()

    def _requests(
        self, params: Sequence[GivenRequest], lora_request: GivenLora, adapter: GivenAdapter
    ) -> list[PreparedRequest]:
        names = one_each("adapter", adapter, (str, NoneType), len(params))
        loras = one_each("lora_request", lora_request, (LoRARequest, NoneType), len(params))
        started = [
            self._start_request(one.sampling, one.prompt, lora or name)
            for one, lora, name in zip(params, loras, names, strict=True)
        ]
        return [finish() for finish in started]  # images of all prompts are encoded together

    def _run(self, asked: list[PreparedRequest], use_tqdm: bool | MakeBar) -> list[RequestOutput]:
        requests = [one.request for one in asked]
        answers = {one.request.request_id: one.answers for one in asked}
        loras = {one.request.request_id: one.lora_request for one in asked}
        completions = {request.request_id: new_completions(request.sampling) for request in requests}
        failures: dict[str, Exception] = {}
        events: SimpleQueue[OutputEvent] = SimpleQueue()
        call, num_left = SubmittedCall(requests, events.put), len(requests)
        bar = ProgressBar(use_tqdm, len(requests))
        try:
            self._admission.add(call)
            while num_left:
                event = events.get()
                reader = answers[event.request_id]
                completions[event.request_id].add(event if reader is None else reader.split(event))
                if event.error is not None:
                    failures[event.request_id] = with_python_name(event.error)
                if event.is_last:
                    num_left -= 1
                    bar.note_done(event.usage)
        except BaseException:
            # An interrupted request (by Ctrl-C as well) must not continue during the next call.
            self._admission.remove(call)
            raise
        finally:
            bar.close()
        if failures and self._is_closed:
            raise Unavailable("the LLM was closed during the call") from next(iter(failures.values()))
        if failures and self._serving.engine.failure is not None:
            raise next(iter(failures.values()))  # the engine failed, so report that instead of an error per request
        outputs = []
        for request in requests:
            name, prompt, ids = request.request_id, request.prompt, request.prompt_token_ids
            if (error := failures.get(name)) is None:
                output = completions[name].output(name, prompt, ids)
                outputs.append(decode_output(output, self._decode_token, loras[name]))
            elif len(requests) == 1:
                raise error
            else:
                outputs.append(RequestOutput(name, prompt, ids, (), Usage(len(ids)), error=error))
        return outputs


def _require_id(request_id: str) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise InvalidArgument("request_id", f"{request_id!r} is not a text of at least one character")


class AsyncLLM(AsynchronousModel):
    """A loaded model in this process for asyncio; methods have vLLM's names.

        llm = AsyncLLM("demo")
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64), "request-1"):
            print(output.outputs[0].text)

    Requests of all tasks, event loops and threads share one batch, which does not change their results. Arguments are
    those of `LocalModel`.
    """

    _defaults = ONLINE_DEFAULTS

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        super().__init__(model, progress=progress, **options)
        self._admission = Admission(self._serving.engine)
        self._deliveries: dict[asyncio.AbstractEventLoop, EventDelivery] = {}  # of loops that have open streams
        self._running: dict[str, tuple[SubmittedCall, AsyncOutputStream]] = {}

    def get_num_unfinished_requests(self) -> int:
        """Return the number of waiting and running requests."""
        return len(self._running)

    async def generate(
        self,
        prompt: GivenPrompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt while it runs; `sampling_params.output_kind` selects their content.

        The request is aborted if the caller stops reading: when the generator is closed, or its task is cancelled.

        Args:
            prompt: as one prompt of `LLM.generate`.
            sampling_params: `get_default_sampling_params()` by default.
            request_id: id for `abort`; no other running request may have it.
            lora_request: LoRA adapter, loaded on first use; None for the base model.
            priority: priority under the policy `priority`; lower runs first.
            tokenization_kwargs: as in `LLM.generate`.
            trace_headers: has no effect: only servers export traces.
            data_parallel_rank: has no effect: the engine chooses the replica.

        Raises:
            InvalidArgument: the prompt or a parameter is invalid.
            AlreadyExists: a request with this id is running.
            NotFound: there is no such adapter.
            Unavailable: the engine has stopped.
        """
        parsed = parse_prompt(prompt)
        (given,) = self._params([change_prompt(parsed.prompt, tokenization_kwargs)], sampling_params)
        changes = get_sampling_changes(tokenization_kwargs, parsed.cache_salt, priority)
        sampling = change_sampling(given.sampling, changes)
        async with contextlib.aclosing(self._stream(sampling, given.prompt, request_id, lora_request)) as stream:
            async for output in stream:
                yield output

    async def encode(
        self,
        prompt: GivenPrompt,
        pooling_params: PoolingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the vector of one prompt, or one for each token, as `LLM.encode`; arguments are those of `generate`.

        Raises:
            Unavailable: also if the request was aborted.
        """
        parsed, params = parse_prompt(prompt), get_pooling(pooling_params, None, tokenization_kwargs)
        changes, options = get_sampling_changes(None, parsed.cache_salt, priority), VectorOptions.of_encode(params)
        given, sampling = options.prepare(
            self._serving.pooler, self._serving.hidden_size, change_prompt(parsed.prompt, tokenization_kwargs), changes
        )
        async with contextlib.aclosing(self._stream(sampling, given, request_id, lora_request)) as stream:
            async for output in stream:
                if output.embedding is None:
                    raise Unavailable(f"request {request_id!r} was aborted")
                yield get_pooling_output(output, options, self._serving.pooler)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests by id; their last output has the finish reason "abort". Unknown ids have no effect."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if (found := self._running.get(one)) is not None:
                self._admission.withdraw(found[0])
                self._serving.engine.abort(one)

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop running requests, and let later ones wait until `resume_generation`.

        Args:
            mode: "abort" aborts running requests, "wait" waits until they finish, "keep" continues them afterwards.
            clear_cache: drop all cached prefixes, except those of requests that are kept.
        """
        check_mode(mode)
        self._check_usable()
        if mode == "keep":
            await asyncio.wrap_future(self._serving.engine.pause(mode))
            if clear_cache:
                await self.reset_prefix_cache()
            return
        self._admission.pause()
        if self._serving.engine.is_paused and not self._serving.engine.asleep:
            await asyncio.wrap_future(self._serving.engine.resume())
        running = [(name, stream) for name, (call, stream) in self._running.items() if call.running]
        if mode == "abort":
            await self.abort([name for name, _ in running])
        await asyncio.gather(*(asyncio.wrap_future(stream.ended) for _, stream in running))
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Run requests again after `pause_generation`."""
        self._check_usable()
        await asyncio.wrap_future(self._serving.engine.resume())
        self._admission.resume()

    async def is_paused(self) -> bool:
        """Return True between `pause_generation` and `resume_generation`."""
        return self._admission.is_paused or self._serving.engine.is_paused

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes that are not in use, as `LLM.reset_prefix_cache`; return True."""
        self._check_usable()
        await asyncio.wrap_future(self._serving.engine.reset_prefix_cache())
        return True

    async def check_health(self) -> None:
        """Raise an error if no request can run."""
        self._check_usable()
        if (failure := self._serving.engine.failure) is not None:
            raise failure

    def close(self) -> None:
        super().close()
        self._admission.resume()  # paused requests fail

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine, as `close`."""
        self.close()

    async def _stream(
        self, sampling: SamplingParams, prompt: Prompt, request_id: str, lora_request: LoRARequest | None
    ) -> AsyncGenerator[RequestOutput, None]:
        _require_id(request_id)
        is_whole = sampling.output_kind is RequestOutputKind.FINAL_ONLY

        def prepare() -> PreparedRequest:
            return self._start_request(sampling, prompt, lora_request, request_id, is_whole=is_whole)()

        is_quick = prompt.size <= _QUICK_SIZE and sampling.structured_outputs is None and lora_request is None
        is_quick = is_quick and not prompt.images
        prepared = prepare() if is_quick else await asyncio.to_thread(prepare)
        if request_id in self._running:
            raise AlreadyExists(f"a request with the id {request_id!r} is running")
        loop = asyncio.get_running_loop()
        delivery = self._deliveries.setdefault(loop, EventDelivery(loop))
        outputs = RequestOutputStream(prepared.request, self._decode_token, sampling.output_kind, lora_request)
        stream = AsyncOutputStream(outputs)
        call = SubmittedCall([prepared.request], functools.partial(delivery.put, stream))
        self._running[request_id] = call, stream
        delivery.num_streams += 1
        try:
            self._admission.add(call)
            while not outputs.is_finished or stream.ready.is_set():
                await stream.ready.wait()
                stream.ready.clear()
                if stream.error is not None:
                    raise Unavailable("the LLM was closed during the call") if self._is_closed else stream.error
                if (output := outputs.take()) is not None:
                    yield output
        finally:
            del self._running[request_id]
            delivery.num_streams -= 1
            if delivery.num_streams == 0:
                del self._deliveries[loop]
            if not outputs.is_finished:
                self._admission.remove(call)


AsyncLLMEngine = AsyncLLM


class LLMEngine(SynchronousModel):
    """A loaded model whose loop the caller drives; methods have vLLM's names.

        engine = LLMEngine("demo")
        engine.add_request("0", "Once upon a time", SamplingParams(max_tokens=64))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.outputs[0].text)

    Not thread-safe. Arguments are those of `LocalModel`.
    """

    _has_thread = False
    _defaults = ONLINE_DEFAULTS

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        super().__init__(model, progress=progress, **options)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._streams: dict[str, RequestOutputStream] = {}
        self._pooling: dict[str, VectorOptions] = {}
        self._errors: dict[str, Exception] = {}
        self._dropped = set[str]()

    def add_request(
        self,
        request_id: str,
        prompt: GivenPrompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> str:
        """Queue a request for the next steps; return its id.

        Arguments and errors are those of `AsyncLLM.generate`, or with `PoolingParams` of `AsyncLLM.encode`.
        """
        _require_id(request_id)
        if request_id in self._streams:
            raise AlreadyExists(f"a request with the id {request_id!r} is running")
        parsed, options = parse_prompt(prompt), None
        given = change_prompt(parsed.prompt, tokenization_kwargs)
        if isinstance(params, PoolingParams):
            changes = get_sampling_changes(None, parsed.cache_salt, priority)
            options = VectorOptions.of_encode(get_pooling(params, None, tokenization_kwargs))
            given, sampling = options.prepare(self._serving.pooler, self._serving.hidden_size, given, changes)
        else:
            changes = get_sampling_changes(tokenization_kwargs, parsed.cache_salt, priority)
            ((given, sampling),) = self._params([given], params)
            sampling = change_sampling(sampling, changes)
        kind = sampling.output_kind
        is_whole = kind is RequestOutputKind.FINAL_ONLY
        request, *_ = self._start_request(sampling, given, lora_request, request_id, is_whole=is_whole)()
        if options is not None:
            self._pooling[request_id] = options
        self._streams[request_id] = RequestOutputStream(request, self._decode_token, kind, lora_request)
        self._waiting[request_id] = request
        return request_id

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Run one iteration of the engine; return the outputs of requests that have new tokens or finished.

        A failed request has an output with an `error` and no `outputs`.
        """
        self._check_usable()
        engine = self._serving.engine
        while self._waiting and not engine.is_full:
            if next(iter(self._waiting)) in self._dropped:  # until the step below
                break
            name, request = self._waiting.popitem(last=False)
            try:
                engine.submit(request, self._add)
            except JpagedError as error:
                self._add(OutputEvent(name, is_last=True, error=error))
        engine.step()
        self._dropped.clear()
        taken = [one for stream in self._streams.values() if (one := stream.take()) is not None]
        return [self._end(output) if output.finished else output for output in taken]

    def _end(self, output: RequestOutput) -> RequestOutput | PoolingRequestOutput[PoolingOutput]:
        del self._streams[output.request_id]
        options = self._pooling.pop(output.request_id, None)
        if (failure := self._errors.pop(output.request_id, None)) is not None:
            return dataclasses.replace(output, outputs=(), error=failure)
        return output if options is None else get_pooling_output(output, options, self._serving.pooler)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests by id, without a further output. Unknown ids have no effect."""
        for one in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if self._streams.pop(one, None) is not None and self._waiting.pop(one, None) is None:
                self._serving.engine.drop(one)
                self._dropped.add(one)
            self._pooling.pop(one, None)

    def has_unfinished_requests(self) -> bool:
        """Return True if a request is queued or running."""
        return bool(self._streams)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of queued and running requests."""
        return len(self._streams)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes that are not in use, as `LLM.reset_prefix_cache`; run one iteration, return True."""
        self._check_usable()
        dropped = self._serving.engine.reset_prefix_cache()
        self._serving.engine.step()
        dropped.result()
        return True

    def _add(self, event: OutputEvent) -> None:
        if (stream := self._streams.get(event.request_id)) is None:
            return
        stream.add(event)
        if event.error is not None:
            self._errors[event.request_id] = with_python_name(event.error)
