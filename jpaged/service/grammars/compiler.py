"""Constraints -> grammars, off the event loop, each compiled once.

compile(outputs) ──> cache? ──> a thread: source -> trial in a child -> the same compile here -> completions
                       │
                       └── concurrent requests with the same constraint wait for the one compile
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
from llguidance import LLMatcher

from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidArgument, QueueFull, Unavailable
from jpaged.service.grammars.completions import Endings, endings_of
from jpaged.service.grammars.limits import GrammarLimits, library_limits
from jpaged.service.grammars.masks import LlguidanceMasks
from jpaged.service.grammars.sources import refusal, source_key, source_of
from jpaged.service.grammars.state import LlguidanceState
from jpaged.service.grammars.trial_process import TrialProcess
from jpaged.service.grammars.vocabulary import Vocabulary, num_words
from jpaged.structured import JSON_WHITESPACE, Grammar, StructuredOutputs, ThinkingGrammar
from jpaged.types import Request

_MAX_COMPLETION_TOKENS = 4096
"""If the shortest completion that the search finds is longer, `always_complete` is refused."""
_ALWAYS_COMPLETE = "sampling.structured_outputs.always_complete"
_REFUSAL_BYTES = 1024


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar that implements the engine's `Grammar`.

    Attributes:
        num_bytes: memory that it takes.
        endings: its completions; computed only with `always_complete`.
    """

    vocabulary: Vocabulary
    matcher: LLMatcher
    num_bytes: int
    endings: Endings | None = None

    def start(self) -> LlguidanceState:
        return LlguidanceState(self.vocabulary, self.matcher.deep_copy(), self.endings)

    def check_max_tokens(self, max_tokens: int, field: str = "sampling.max_tokens") -> None:
        """Reject a `max_tokens` that is too small for any complete text that was found.

        Raises:
            InvalidArgument: states how many tokens are needed, without the end-of-sequence token.
        """
        if self.endings is None:
            return
        if self.endings.shortest is None:
            problem = f"no complete text of at most {_MAX_COMPLETION_TOKENS} tokens was found for this grammar"
            raise InvalidArgument(_ALWAYS_COMPLETE, problem)
        if max_tokens < (needed := len(self.endings.shortest)):
            problem = f"{max_tokens} is out of range: the shortest complete text that was found has {needed} tokens"
            raise InvalidArgument(field, f"{problem}, and {_ALWAYS_COMPLETE} is true")


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Thread-safe; `close` ends its processes.

    Attributes:
        vocabulary: the model's.

    Args:
        whitespace: a regular expression of the whitespace between parts of JSON, unless a request sets one.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: GrammarLimits | None = None, whitespace: str = JSON_WHITESPACE
    ) -> None:
        self.vocabulary = vocabulary
        self._whitespace = whitespace
        self._limits = limits or GrammarLimits()
        self._threads = _threads(self._limits)
        self._trials: SimpleQueue[TrialProcess] = SimpleQueue()
        self._processes = [TrialProcess(vocabulary.spec, self._limits) for _ in range(self._limits.num_threads)]
        for process in self._processes:
            self._trials.put(process)
        self._lock = threading.RLock()  # reentrant: the callback of a result may request another compile
        self._found: OrderedDict[tuple[Any, ...], Future[CompiledGrammar]] = OrderedDict()
        self._num_bytes = 0
        self._num_waiting = 0
        self._is_closed = False
        self.num_compiles = 0
        """Constraints that were compiled or refused, i.e. cache misses."""

    async def compile(self, outputs: StructuredOutputs) -> CompiledGrammar:
        """Return the grammar of a constraint without blocking the event loop.

        Raises:
            InvalidArgument: it is not a grammar, or exceeds a limit: names the field, and the place in it.
            QueueFull: too many compiles wait.
            Unavailable: the process that tries grammars died.
        """
        # Shield the compile from cancellation: other callers may wait for it.
        return await asyncio.shield(asyncio.wrap_future(self.submit(outputs)))

    def submit(self, outputs: StructuredOutputs) -> Future[CompiledGrammar]:
        """Start a compile, unless it is done or in flight. The result raises as `compile` does.

        Raises:
            QueueFull: too many compiles wait.
            Unavailable: the compiler is closed.
        """
        key = (self.vocabulary.key, *source_key(outputs), outputs.always_complete)
        with self._lock:
            if (found := self._found.get(key)) is not None:
                self._found.move_to_end(key)
                return found
            if self._num_waiting >= self._limits.max_waiting:
                raise QueueFull(
                    f"structured_outputs: {self._num_waiting} grammars are waiting to be compiled, which is the limit",
                    retry_after_s=self._limits.cpu_s,
                )
            if self._is_closed:
                raise _closed()
            self._num_waiting += 1
            self.num_compiles += 1
            result: Future[CompiledGrammar] = Future()
            self._found[key] = result
            # Under the lock, so that `close` finds either no work or no threads.
            run = self._threads.submit(self._run, key, result, lambda: self._compile(outputs))
        run.add_done_callback(lambda run: result.set_exception(_closed()) if run.cancelled() else None)
        return result

    def close(self) -> None:
        """End the processes and refuse further compiles."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _run(
        self, key: tuple[Any, ...], result: Future[CompiledGrammar], compile_: Callable[[], CompiledGrammar]
    ) -> None:
        grammar, error = None, None
        try:
            grammar = compile_()
        except BaseException as found:  # waiters must get every error
            error = found
        with self._lock:
            self._num_waiting -= 1
            if grammar is not None:
                result.set_result(grammar)
            else:
                result.set_exception(error)
            if error is not None and not isinstance(error, InvalidArgument):
                self._found.pop(key, None)  # a crash of the process does not prove that the grammar is bad
            else:
                self._num_bytes += _REFUSAL_BYTES if grammar is None else grammar.num_bytes
                self._evict()

    def _evict(self) -> None:
        """Evict the least recently used entries down to the limits; compiles in flight stay."""
        limits = self._limits
        for key in list(self._found):
            if len(self._found) <= limits.max_entries and self._num_bytes <= limits.max_bytes:
                return
            entry = self._found[key]
            if entry.done():
                refused = entry.exception() is not None
                self._num_bytes -= _REFUSAL_BYTES if refused else entry.result().num_bytes
                del self._found[key]

    def _compile(self, outputs: StructuredOutputs) -> CompiledGrammar:
        source = source_of(outputs, self._limits, self._whitespace)
        process = self._trials.get()
        try:
            trial = process.run(source.grammar)
            if trial.error is not None:
                raise refusal(outputs, source, trial.error, lambda grammar: process.run(grammar).error)
        finally:
            self._trials.put(process)
        matcher = LLMatcher(self.vocabulary.tokenizer, source.grammar, log_level=0, limits=library_limits())
        if matcher.is_error():
            raise refusal(outputs, source, matcher.get_error(), lambda _: None)
        endings = None
        if outputs.always_complete:
            endings = endings_of(self.vocabulary, matcher, _MAX_COMPLETION_TOKENS)
        num_bytes = trial.num_bytes + 2 * len(source.grammar.encode())
        return CompiledGrammar(self.vocabulary, matcher, num_bytes, endings)


def _threads(limits: GrammarLimits) -> ThreadPoolExecutor:
    """Return threads with twice the stack of a trial; Python's default is smaller on some systems."""
    threads = ThreadPoolExecutor(limits.num_threads, thread_name_prefix="jpaged-grammar")
    all_there = threading.Barrier(limits.num_threads + 1)
    before = threading.stack_size(2 * limits.compile_stack_bytes)
    try:
        for _ in range(limits.num_threads):
            threads.submit(all_there.wait)
    finally:
        threading.stack_size(before)
    all_there.wait()
    return threads


def _closed() -> Unavailable:
    return Unavailable("structured_outputs: the server is shutting down")


class ServedGrammars:
    """Attaches grammars to requests of a served model. Thread-safe.

    The compiler is created by the first constraint.

    Args:
        vocab_size: V, the width of the model's logits.
        eos_token_ids: all tokens that end a text.
        whitespace: as `GrammarCompiler` takes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        limits: GrammarLimits | None = None,
        whitespace: str = JSON_WHITESPACE,
    ) -> None:
        self._whitespace = whitespace
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = limits
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    async def bind(self, request: Request) -> Request:
        """Return the request with its grammar, if it has a constraint, without blocking the event loop.

        Raises:
            InvalidArgument: the constraint is invalid, exceeds a limit, or cannot be met within `max_tokens`.
            Unsupported: the model has no tokenizer with known token texts, or no token that ends a text.
            QueueFull, Unavailable: see `GrammarCompiler.compile`.
        """
        outputs = request.sampling.structured_outputs
        if outputs is None:
            return request
        compiler = self._compiler
        if compiler is None:
            compiler = await asyncio.to_thread(self._made)
        return _bound(request, await compiler.compile(outputs))

    def bind_now(self, request: Request) -> Request:
        """Attach the grammar as `bind` does, but block. For callers on a thread."""
        outputs = request.sampling.structured_outputs
        if outputs is None:
            return request
        return _bound(request, self._made().submit(outputs).result())

    def make_masks(self) -> LlguidanceMasks:
        """Return the object that fills masks, for one engine."""
        return LlguidanceMasks(num_words(self._vocab_size))

    def close(self) -> None:
        """End the processes that try grammars."""
        with self._lock:
            if self._compiler is not None:
                self._compiler.close()

    def _made(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size, self._eos_token_ids)
                self._compiler = GrammarCompiler(vocabulary, self._limits, self._whitespace)
            return self._compiler


def _bound(request: Request, grammar: CompiledGrammar) -> Request:
    grammar.check_max_tokens(request.sampling.max_tokens)
    bound: Grammar = grammar if request.thinking is None else ThinkingGrammar(request.thinking, grammar)
    _check_first_token(request, bound, grammar.vocabulary)
    return dataclasses.replace(request, grammar=bound)


def _check_first_token(request: Request, grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Reject a request whose other fields ban every token that its grammar allows first."""
    allowed, words = request.sampling.allowed_token_ids, request.bad_word_ids
    if (allowed is None and not words) or request.continued:
        return
    mask_w = np.zeros(vocabulary.num_words, np.int32)
    grammar.start().fill(mask_w)
    if allowed is not None:
        mask_w &= vocabulary.mask_of(allowed)
    name = "bad_words" if mask_w.any() else "allowed_token_ids"
    mask_w &= ~vocabulary.mask_of([word[0] for word in words if len(word) == 1])
    if not mask_w.any():
        problem = "leaves no token that its grammar allows as output token 1"
        raise InvalidArgument(f"sampling.{name}", problem)


def compile_now(compiler: GrammarCompiler, outputs: StructuredOutputs) -> CompiledGrammar:
    """Compile a constraint and block until it is done, for callers on a thread; raises as `compile` does."""
    return compiler.submit(outputs).result()
