"""The offline face: a model and a batch of prompts in one process, without a server.

    llm = LLM("demo", max_num_seqs=32)
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, max_tokens=64))

Every option of the command line but the server's is a keyword here. Threads and event loops may share an `LLM`:

    thread ── generate ──> _Call ──┐                        engine thread
    thread ── chat ──────> _Call ──┴─> _Admission ─ submit ─> one batch ─ events ─> each call's own queue
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any, NamedTuple, TypedDict, Unpack

from jpaged.assemble import build
from jpaged.chat import ChatWords, chat_options_of
from jpaged.completions import completions_of, without_errors
from jpaged.config import PROCESS_OPTIONS, EngineConfig, server_field_names
from jpaged.engine.engine import THREAD_NAME as ENGINE_THREAD
from jpaged.engine.executor import Progress
from jpaged.errors import InvalidArgument, JpagedError, Unavailable
from jpaged.load import EngineLoad
from jpaged.progress_bar import MakeBar, ProgressBar
from jpaged.service.chat.answers import ChatAnswers
from jpaged.service.loaded_model import EngineClient, LoadedModel
from jpaged.service.scoring import EMBED_SAMPLING, SCORE_SAMPLING, continued, embedding_of, errors_named, score_of
from jpaged.types import Embedding, OutputEvent, Pooling, Prompt, Request, RequestOutput, SamplingParams, Score, Usage


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


_DEFAULTS = {"wait_for_all_programs": True, "num_scheduler_steps": -1}
"""What differs from a server, which has newcomers."""
GivenPrompt = str | TextPrompt | TokensPrompt
Messages = Sequence[Mapping[str, Any]]
GivenAdapter = str | Sequence[str | None] | None


class _Asked(NamedTuple):
    """A request, and what reads its answers where they are a chat's."""

    request: Request
    answers: ChatAnswers | None


class _Call:
    """The requests of one call, and the events that the engine made for them.

    Attributes:
        waiting: requests that have no place in the engine yet.
        running: ids of the requests in the engine.
        events: written by the engine thread, read by the caller.
    """

    __slots__ = ("events", "running", "waiting")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.waiting = deque(requests)
        self.running: set[str] = set()
        self.events: SimpleQueue[OutputEvent] = SimpleQueue()


class _Admission:
    """Submits the requests of concurrent calls as the engine has places, one of each call in turn.

    Requests are submitted on the engine thread: all requests of a call are there before the next step begins.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()

    def add(self, call: _Call) -> None:
        """Queue a call; each of its requests ends in exactly one event with `is_last`."""
        with self._lock:
            self._calls.append(call)
        if self._engine.call_soon(self._fill).cancelled():
            self._fill()  # every request is refused by name

    def remove(self, call: _Call) -> None:
        """End the requests of a call that nobody waits for; their places are free by the next step."""
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
    """End the engine thread and its child processes; a forked child owns neither."""
    if os.getpid() != process_id:
        return
    if (
        threading.current_thread().name == ENGINE_THREAD
    ):  # the garbage collector ran there: the thread cannot join itself
        threading.Thread(target=_stop, args=(serving, process_id), daemon=True).start()
        return
    serving.engine.stop()
    if serving.grammars is not None:
        serving.grammars.close()


class LLM:
    """A loaded model that generates for whole batches of prompts.

    The engine runs on a thread of its own. Any thread may call any method, and concurrent calls join one batch: each
    returns the tokens that it returns alone. On an event loop, `await asyncio.to_thread(llm.generate, ...)`. The thread
    ends with `close`, with the context or when the object is collected. A forked child cannot use the object.

    Args:
        model: `demo`, a folder in Hugging Face layout or from `jpaged convert`, a GGUF file, or a hub id.
        options: the command line's options with underscores (`dtype`, `max_model_len`, `block_size`, `num_blocks`,
            `max_num_seqs`, `max_num_batched_tokens`, `seed`, ...). All programs are waited for unless
            `wait_for_all_programs` is False: which program computes a token does not depend on the time of day.
            `num_scheduler_steps` is -1 unless it is given: a batch has no newcomers.
        progress: told (what, done, total) while the model loads and its programs compile.

    Raises:
        InvalidArgument: an option is unknown, out of its limits, or one of the server's.
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        for name in (*server_field_names(), *PROCESS_OPTIONS):
            if name in options:
                raise InvalidArgument(name, "is an option of `jpaged serve`; there is no server here")
        config = EngineConfig.load({"model": model, **_DEFAULTS, **options})
        self._serving = build(config) if progress is None else build(config, progress)
        self._numbers = itertools.count(1)
        self._admission = _Admission(self._serving.engine)
        self._process_id = os.getpid()
        self._is_closed = False
        self._serving.engine.start()
        self._stop = weakref.finalize(self, _stop, self._serving, self._process_id)

    @property
    def config(self) -> EngineConfig:
        """The options as they were resolved."""
        return self._serving.config

    def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        adapter: GivenAdapter = None,
    ) -> list[RequestOutput]:
        """Generates for every prompt; the results are in the order of the prompts.

        A request that fails while it runs fails alone: its output has `error` and no `outputs`. The error of a single
        prompt is raised, and so is a failure of the engine.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": ids}`; one or many.
            sampling_params: one for all, or one for each prompt; None is `SamplingParams()`.
            use_tqdm: show how many prompts are done. True shows a bar on stderr where that is a terminal; what makes
                the bar, say `functools.partial(tqdm, leave=False)`, shows it wherever that does; False shows none.
            adapter: the name of an adapter (LoRA) for all, or one for each prompt; None is the model as it is.

        Raises:
            InvalidArgument: a prompt or its parameters can never run; nothing was generated.
            NotFound: there is no such adapter; likewise.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._run(self._requests([_prompt_of(one) for one in many], sampling_params, adapter), use_tqdm)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        adapter: GivenAdapter = None,
        **words: Unpack[ChatWords],
    ) -> list[RequestOutput]:
        """Generates the assistant's next turn of every conversation, through the model's chat template.

        Where the model's format is known (`tool_call_parser`, `reasoning_parser`), outputs have what it called in
        `tool_calls` and what it thought in `reasoning_content`, apart from the text.

        `sampling_params`, `use_tqdm` and `adapter` are those of `generate`.

        Args:
            conversations: messages as OpenAI's API has them; those of one conversation, or of many.
            words: tools, and how the model is to call them and to think, for all conversations.
        """
        many: list[Any] = list(conversations)
        if many and isinstance(many[0], Mapping):
            many = [many]
        options = chat_options_of(**words)
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
        """How likely continuations of prompts are: of each prompt one score for each of its continuations, in order.

        A prompt is computed once, through the prefix cache, and many continuations in a step.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": ids}`; one or many.
            continuations: texts or lists of token ids, of one prompt; of many prompts a sequence of those for each. A
                text behind a text is tokenised with it; what comes behind so many tokens as the prompt has alone is it.
            use_tqdm: as in `generate`.
            adapter: the name of an adapter for all; None is the model as it is.

        Raises:
            InvalidArgument: one of them can never run; nothing was scored.
            NotFound: there is no such adapter; likewise.
        """
        is_one = isinstance(prompts, str | Mapping)
        many: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        of_each: list[Any] = [continuations] if is_one else list(continuations)
        if len(of_each) != len(many):
            raise InvalidArgument("continuations", f"{len(of_each)} are given for {len(many)} prompts")
        requests: list[_Asked] = []
        for prompt, each in zip(many, of_each, strict=True):
            given = continued(self._serving.input_processor, _prompt_of(prompt), list(each))
            for i in range(len(given)):
                with errors_named(f"continuations[{i}]"):
                    requests.append(self._request(SCORE_SAMPLING, given.prompt(i), adapter))
        outputs = iter(without_errors(self._run(requests, use_tqdm)))
        return [[score_of(next(outputs)) for _ in each] for each in of_each]

    def embed(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        use_tqdm: bool | MakeBar = True,
        adapter: str | None = None,
    ) -> list[Embedding]:
        """The hidden states of prompts, behind the model's last norm, pooled into one vector each.

        Args:
            prompts: as in `generate`.
            pooling: the last token's, or the mean of all.
            normalize: scale each vector to a length of 1.
            use_tqdm: as in `generate`.
            adapter: the name of an adapter for all; None is the model as it is.

        Raises:
            InvalidArgument: a prompt can never run; nothing was computed.
            NotFound: there is no such adapter; likewise.
        """
        many: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        requests: list[_Asked] = []
        for i, one in enumerate(many):
            with errors_named(f"prompts[{i}]"):
                pooled = dataclasses.replace(_prompt_of(one), pooling=pooling)
                requests.append(self._request(EMBED_SAMPLING, pooled, adapter))
        outputs = without_errors(self._run(requests, use_tqdm))
        return [embedding_of(output, normalize=normalize) for output in outputs]

    def load_adapter(self, name: str, path: str) -> None:
        """Reads an adapter (LoRA) and gives it a name; with `enable_lora`. `Adapters.load` says what is refused."""
        self._check_usable()
        self._serving.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Lets an adapter go; raises NotFound where there is none of that name."""
        self._check_usable()
        self._serving.adapters.unload(name)

    def load(self) -> EngineLoad:
        """Counts of what was done since the start, and of what the pool holds: see `jpaged.load.EngineLoad`.

        The difference of two snapshots is what was done between them.
        """
        self._finish_step()
        return self._serving.engine.load()

    def reset_prefix_cache(self) -> int:
        """Forgets the cached prefixes of earlier prompts, as if none had run; the number of blocks that held one."""
        self._check_usable()
        forgotten = self._serving.engine.reset_prefix_cache()
        self._finish_step()
        if not forgotten.done():
            raise Unavailable("the engine has failed")
        return forgotten.result()

    def close(self) -> None:
        """Ends the engine thread and gives the device's memory back; the LLM is spent, and calls in flight fail.

        What is to be kept on disk is written before.
        """
        if self._is_closed or os.getpid() != self._process_id:
            return
        self._is_closed = True
        config = self._serving.config
        if config.cache.kv_disk_space:
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
        given = SamplingParams() if sampling_params is None else sampling_params
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
        completions = {request.request_id: completions_of(request.sampling) for request in requests}
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
            # What was interrupted, by Ctrl-C as well, must not go on with the next call.
            self._admission.remove(call)
            raise
        finally:
            bar.close()
        if failures and self._is_closed:
            raise Unavailable("the LLM was closed during the call") from next(iter(failures.values()))
        if failures and self._serving.engine.failure is not None:
            raise next(iter(failures.values()))  # nothing of this call was at fault, and nothing else will run
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
        """Raise an error at once if a call could only wait.

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
        """Wait for the end of the step in flight, so that all of an ended call is counted."""
        if self._is_closed:
            return
        self._check_usable()
        with contextlib.suppress(CancelledError):  # the engine has ended: no step is in flight
            self._serving.engine.call_soon(_nothing).result()


def _nothing() -> None:
    """Do nothing, on the engine thread."""


def _prompt_of(prompt: GivenPrompt) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    fields: dict[str, Any] = dict(prompt)
    unknown = fields.keys() - {"prompt", "prompt_token_ids"}
    if unknown or len(fields) != 1:
        raise InvalidArgument("prompts", f"{sorted(fields)} given; one of prompt and prompt_token_ids is expected")
    return Prompt(fields.get("prompt"), fields.get("prompt_token_ids"))


def _one_each(field: str, given: Any, kind: type, count: int) -> list[Any]:
    """What is given for all, or one for each."""
    if isinstance(given, kind):
        return [given] * count
    if len(given) != count:
        raise InvalidArgument(field, f"{len(given)} given for {count} prompts")
    return list(given)
