"""Offline inference: a model and a batch of prompts in one process, without a server.

    llm = LLM("demo", max_num_seqs=32)
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, max_tokens=64))

Every command-line option except the server's is a keyword here. Threads and event loops may share an `LLM`:

    thread ── generate ──> _Call ──┐                        engine thread
    thread ── chat ──────> _Call ──┴─> _Admission ─ submit ─> one batch ─ events ─> each call's own queue

A progress bar on stderr, in the style of vLLM's `LLM`, shows finished prompts and tokens per second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any, NamedTuple, TypedDict, Unpack

from jpaged.build import build, ignore_progress
from jpaged.chat import ChatKwargs, build_chat_options
from jpaged.config import PROCESS_OPTIONS, EngineConfig, server_field_names
from jpaged.engine.engine import THREAD_NAME as ENGINE_THREAD
from jpaged.engine.executor import Progress
from jpaged.errors import InvalidArgument, JpagedError, Unavailable
from jpaged.outputs import new_completions, without_errors
from jpaged.server_load import EngineLoad
from jpaged.service.chat.output_parser import ChatOutputParser
from jpaged.service.loaded_model import EngineClient, LoadedModel
from jpaged.service.score_embed import EMBED_SAMPLING, SCORE_SAMPLING, continued, errors_named, get_embedding, get_score
from jpaged.types import Embedding, OutputEvent, Pooling, Prompt, Request, RequestOutput, SamplingParams, Score, Usage
from jpaged.sampling_params import with_defaults

MakeBar = Callable[..., Any]
"""Creates a bar like `tqdm(total=..., desc=..., dynamic_ncols=...)`, with `update`, `postfix` and `close`."""


class ProgressBar:
    """A bar over requests, or none.

    By default there is a bar only on a terminal, because a library should not write into its user's logs and pipes.

    Args:
        use_tqdm: True shows a bar if stderr is a terminal, a callable creates the bar, False shows none.
        num_requests: total number of requests.
    """

    def __init__(self, use_tqdm: bool | MakeBar, num_requests: int) -> None:
        self._bar: Any = None
        self._start_s = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0
        if use_tqdm is False:
            return
        if use_tqdm is True:
            from tqdm.auto import tqdm  # a notebook would draw a widget

            use_tqdm = functools.partial(tqdm, disable=None)
        self._bar = use_tqdm(total=num_requests, desc="Processed prompts", dynamic_ncols=True)

    def note_done(self, usage: Usage) -> None:
        """Count one more finished request, with its tokens."""
        if self._bar is None:
            return
        self._num_prompt_tokens += usage.prompt_tokens
        self._num_output_tokens += usage.completion_tokens
        seconds = max(time.perf_counter() - self._start_s, 1e-9)
        inputs, outputs = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        self._bar.postfix = f"input: {inputs:.1f} tok/s, output: {outputs:.1f} tok/s"
        self._bar.update(1)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


_DEFAULTS = {"num_scheduler_steps": -1}
"""Defaults that differ from a server's, because no requests arrive later."""
GivenPrompt = str | TextPrompt | TokensPrompt
Messages = Sequence[Mapping[str, Any]]
GivenAdapter = str | Sequence[str | None] | None


class _Asked(NamedTuple):
    """A request, and for chats the parser of the answers."""

    request: Request
    answers: ChatOutputParser | None


class _Call:
    """The requests of one call, and their events.

    Attributes:
        waiting: requests that are not submitted yet.
        running: ids of the requests in the engine.
        events: written by the engine thread, read by the caller.
    """

    __slots__ = ("events", "running", "waiting")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.waiting = deque(requests)
        self.running: set[str] = set()
        self.events: SimpleQueue[OutputEvent] = SimpleQueue()


class _Admission:
    """Submits the requests of concurrent calls as the engine has capacity, one of each call in turn.

    Requests are submitted on the engine thread: all requests of a call are there before the next step begins.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()

    def add(self, call: _Call) -> None:
        """Queue a call; each request ends in exactly one event with `is_last`."""
        with self._lock:
            self._calls.append(call)
        if self._engine.call_soon(self._fill).cancelled():
            self._fill()  # the engine has ended, so every request is refused individually

    def remove(self, call: _Call) -> None:
        """Abort the requests of an abandoned call; their slots are free by the next step."""
        with self._lock:
            call.waiting.clear()
            running = list(call.running)
        for request_id in running:
            self._engine.abort(request_id)

    def _fill(self) -> None:
        with self._lock:
            while self._calls and not self._engine.is_full:
                call = self._calls.popleft()
                if call.waiting:
                    self._submit(call, call.waiting.popleft())
                if call.waiting:
                    self._calls.append(call)

    def _submit(self, call: _Call, request: Request) -> None:
        def take(event: OutputEvent) -> None:
            call.events.put(event)
            if event.is_last:
                with self._lock:
                    call.running.discard(event.request_id)
                if self._calls:
                    self._fill()

        call.running.add(request.request_id)
        try:
            self._engine.submit(request, take)
        except JpagedError as error:
            call.running.discard(request.request_id)
            call.events.put(OutputEvent(request.request_id, is_last=True, error=error))


def _stop(serving: LoadedModel, process_id: int) -> None:
    """Stop the engine thread and its child processes; a forked child owns neither."""
    if os.getpid() != process_id:
        return
    if (
        threading.current_thread().name == ENGINE_THREAD
    ):  # the garbage collector ran on that thread, which cannot join itself
        threading.Thread(target=_stop, args=(serving, process_id), daemon=True).start()
        return
    serving.engine.stop()
    if serving.grammars is not None:
        serving.grammars.close()


class LLM:
    """A loaded model for offline inference on batches of prompts.

        llm = LLM("demo")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
        print(outputs[0].outputs[0].text)

    The engine runs on a separate thread. All methods are thread-safe; concurrent calls share the engine's batch, which
    does not change their results. On an event loop, use `await asyncio.to_thread(llm.generate, ...)`. The engine stops
    with `close`, at the end of a `with` block, or when the object is garbage-collected. A forked child process cannot
    use it.

    Args:
        model: `demo`, a folder in Hugging Face layout or from `jpaged convert`, a GGUF file, or a Hugging Face hub id.
        options: command-line options with underscores (`dtype`, `max_model_len`, `block_size`, `num_blocks`,
            `max_num_seqs`, `max_num_batched_tokens`, `seed`, ...). Two defaults differ from the server's.
            `wait_for_all_programs` is False only if programs of all sizes return the same bits (the CPU's kernels
            without a draft model), so that results do not depend on timing. `num_scheduler_steps` is -1 (automatic),
            because no requests arrive later.
        progress: called with (what, done, total) while the model loads and its programs compile.

    Raises:
        InvalidArgument: an option is unknown, out of range, or one of the server's.
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        for name in (*server_field_names(), *PROCESS_OPTIONS):
            if name in options:
                raise InvalidArgument(name, "is an option of `jpaged serve`, not of LLM")
        config = EngineConfig.load({"model": model, **_DEFAULTS, **options})
        self._serving = build(config, progress or ignore_progress, is_offline=True)
        self._numbers = itertools.count(1)
        self._admission = _Admission(self._serving.engine)
        self._process_id = os.getpid()
        self._is_closed = False
        self._serving.engine.start()
        self._stop = weakref.finalize(self, _stop, self._serving, self._process_id)

    @property
    def config(self) -> EngineConfig:
        """The resolved options."""
        return self._serving.config

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any: the model's generation config, then the API's defaults."""
        return SamplingParams(**self._serving.model.default_sampling)

    def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        adapter: GivenAdapter = None,
    ) -> list[RequestOutput]:
        """Generate completions for every prompt; return the results in the order of the prompts.

        If one of several requests fails at run time, only its output has an `error` and no `outputs`. The error of a
        single prompt is raised, and so is a failure of the engine.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": ids}`; one or a sequence.
            sampling_params: one for all prompts, or one for each; `get_default_sampling_params()` by default.
            use_tqdm: progress bar. True shows one on stderr if that is a terminal; False shows none. A callable that
                creates the bar, such as `functools.partial(tqdm, leave=False)`, is always used.
            adapter: name of a LoRA adapter for all prompts, or one for each; None for the base model.

        Raises:
            InvalidArgument: a prompt or its parameters are invalid; nothing was generated.
            NotFound: there is no such adapter; nothing was generated.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._run(self._requests([_get_prompt(one) for one in many], sampling_params, adapter), use_tqdm)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        adapter: GivenAdapter = None,
        **words: Unpack[ChatKwargs],
    ) -> list[RequestOutput]:
        """Generate the assistant's next turn of every conversation, using the model's chat template.

        If the model's format is known (`tool_call_parser`, `reasoning_parser`), outputs have tool calls in `tool_calls`
        and reasoning in `reasoning_content`, and `text` has neither. `sampling_params`, `use_tqdm` and `adapter` are
        those of `generate`.

        Args:
            conversations: messages in OpenAI's format, of one conversation or of several.
            words: chat options for all conversations: tools, tool choice and reasoning.
        """
        many: list[Any] = list(conversations)
        if many and isinstance(many[0], Mapping):
            many = [many]
        options = build_chat_options(**words)
        prompts = [Prompt(messages=one, chat_options=options) for one in many]
        return self._run(self._requests(prompts, sampling_params, adapter), use_tqdm)

    def score(
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
        is_one = isinstance(prompts, str | Mapping)
        many: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        of_each: list[Any] = [continuations] if is_one else list(continuations)
        if len(of_each) != len(many):
            raise InvalidArgument("continuations", f"{len(of_each)} are given for {len(many)} prompts")
        requests: list[_Asked] = []
        for prompt, each in zip(many, of_each, strict=True):
            given = continued(self._serving.input_processor, _get_prompt(prompt), list(each))
            for i in range(len(given)):
                with errors_named(f"continuations[{i}]"):
                    requests.append(self._request(SCORE_SAMPLING, given.prompt(i), adapter))
        outputs = iter(without_errors(self._run(requests, use_tqdm)))
        return [[get_score(next(outputs)) for _ in each] for each in of_each]

    def embed(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        use_tqdm: bool | MakeBar = True,
        adapter: str | None = None,
    ) -> list[Embedding]:
        """Return one vector per prompt: its hidden states after the model's final norm, pooled.

        Args:
            prompts: as in `generate`.
            pooling: "last" for the last token, "mean" for the mean of all.
            normalize: scale each vector to length 1.
            use_tqdm: as in `generate`.
            adapter: name of an adapter for all; None for the base model.

        Raises:
            InvalidArgument: a prompt is invalid; nothing was computed.
            NotFound: there is no such adapter; nothing was computed.
        """
        many: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        requests: list[_Asked] = []
        for i, one in enumerate(many):
            with errors_named(f"prompts[{i}]"):
                pooled = dataclasses.replace(_get_prompt(one), pooling=pooling)
                requests.append(self._request(EMBED_SAMPLING, pooled, adapter))
        outputs = without_errors(self._run(requests, use_tqdm))
        return [get_embedding(output, normalize=normalize) for output in outputs]

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter under a name; requires `enable_lora`. Errors are those of `Adapters.load`."""
        self._check_usable()
        self._serving.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; raise NotFound if there is none of that name."""
        self._check_usable()
        self._serving.adapters.unload(name)

    def load(self) -> EngineLoad:
        """Return a snapshot of the engine's counters and of the pool's state; see `jpaged.server_load.EngineLoad`.

        The difference of two snapshots covers the work between them.
        """
        self._finish_step()
        return self._serving.engine.load()

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes that are not in use; return the number of dropped blocks."""
        self._check_usable()
        forgotten = self._serving.engine.reset_prefix_cache()
        self._finish_step()
        if not forgotten.done():
            raise Unavailable("the engine has failed")
        return forgotten.result()

    def close(self) -> None:
        """Stop the engine thread and free the device's memory; the LLM cannot be used again, and calls in flight fail.

        With a KV connector or a disk tier, pending blocks are written first.
        """
        if self._is_closed or os.getpid() != self._process_id:
            return
        self._is_closed = True
        config = self._serving.config
        if config.cache.store_option is not None:
            self._serving.engine.drain(config.server.shutdown_timeout)
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: GivenAdapter,
    ) -> list[_Asked]:
        defaults = self._serving.model.default_sampling
        given: SamplingParams | Sequence[SamplingParams]
        if sampling_params is not None:
            given = sampling_params
        elif (most := defaults.get("max_tokens")) is not None:
            given = SamplingParams(**with_defaults({}, defaults), max_tokens=1)  # the minimum that must fit
            prompts = [dataclasses.replace(prompt, fills_length=True, max_filled=most) for prompt in prompts]
        else:
            given = SamplingParams(**defaults)
        params = _one_each("sampling_params", given, SamplingParams, len(prompts))
        names = _one_each("adapter", "" if adapter is None else adapter, str, len(prompts))
        return [self._request(*one) for one in zip(params, prompts, names, strict=True)]

    def _request(self, sampling: SamplingParams, prompt: Prompt, adapter: str | None = None) -> _Asked:
        self._check_usable()
        processor = self._serving.input_processor
        request = processor.make_request(
            request_id=f"llm-{next(self._numbers)}",
            sampling=sampling,
            prompt=prompt,
            is_whole=True,
            adapter=self._serving.adapters.find(adapter) if adapter else None,
        )
        grammars = self._serving.grammars
        with processor.naming_errors(prompt, sampling, request):
            request = request if grammars is None else grammars.bind_now(request)
        return _Asked(request, processor.answers(prompt, sampling, request))

    def _run(self, asked: list[_Asked], use_tqdm: bool | MakeBar) -> list[RequestOutput]:
        requests = [one.request for one in asked]
        answers = {one.request.request_id: one.answers for one in asked}
        completions = {request.request_id: new_completions(request.sampling) for request in requests}
        failures: dict[str, Exception] = {}
        call, num_left = _Call(requests), len(requests)
        bar = ProgressBar(use_tqdm, len(requests))
        try:
            self._admission.add(call)
            while num_left:
                event = call.events.get()
                reader = answers[event.request_id]
                completions[event.request_id].add(event if reader is None else reader.split(event))
                if event.error is not None:
                    failures[event.request_id] = event.error
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
                outputs.append(completions[name].output(name, prompt, ids))
            elif len(requests) == 1:
                raise error
            else:
                outputs.append(RequestOutput(name, prompt, ids, (), Usage(len(ids)), error=error))
        return outputs

    def _check_usable(self) -> None:
        """Raise an error if a call could never finish.

        Raises:
            Unavailable: the LLM is closed, or belongs to the process that this one was forked from.
        """
        if os.getpid() != self._process_id:
            raise Unavailable(
                f"this LLM belongs to process {self._process_id}: its engine thread and device do not survive fork(); "
                "create the LLM in the child process, or start children by the method 'spawn'"
            )
        if self._is_closed:
            raise Unavailable("the LLM is closed")

    def _finish_step(self) -> None:
        """Wait for the end of the step in flight, so that the counters include all of an ended call."""
        if self._is_closed:
            return
        self._check_usable()
        with contextlib.suppress(CancelledError):  # the engine has ended: no step is in flight
            self._serving.engine.call_soon(_nothing).result()


def _nothing() -> None:
    """Do nothing, on the engine thread."""


def _get_prompt(prompt: GivenPrompt) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    fields: dict[str, Any] = dict(prompt)
    unknown = fields.keys() - {"prompt", "prompt_token_ids"}
    if unknown or len(fields) != 1:
        raise InvalidArgument("prompts", f"{sorted(fields)} given; must be one of prompt and prompt_token_ids")
    return Prompt(fields.get("prompt"), fields.get("prompt_token_ids"))


def _one_each(field: str, given: Any, kind: type, count: int) -> list[Any]:
    """Return one value for each: the given one repeated, or the given list."""
    if isinstance(given, kind):
        return [given] * count
    if len(given) != count:
        raise InvalidArgument(field, f"{len(given)} given for {count} prompts")
    return list(given)
