"""Constraints -> grammars, off the event loop, each compiled once.

compile(outputs) ──> cache? ──> a thread: source -> trial in a child -> the same compile here -> completions
                       │
                       └── concurrent requests with the same constraint wait for the one compile

`LlguidanceState` is the state of one sequence in its grammar. `LlguidanceMasks` fills the masks of a whole batch on the
library's threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par
from numpy.typing import NDArray

from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidArgument, QueueFull, Unavailable
from jpaged.service.structured_output.budgeted_completion import CompletionBudget, Endings, search_endings
from jpaged.service.structured_output.sandbox import GrammarLimits, TrialProcess, library_limits
from jpaged.service.structured_output.sources import build_source, refusal, source_key
from jpaged.service.structured_output.vocabulary import Vocabulary, num_words
from jpaged.structured import JSON_WHITESPACE, Grammar, StructuredOutputs, ThinkingGrammar
from jpaged.structured.grammar import GrammarBatch, GrammarState, StatesOneByOne
from jpaged.types import Request


@dataclass(slots=True)
class LlguidanceState:
    """Implementation of the engine's `GrammarState`.

    Attributes:
        matcher: the library's state, advanced only by this object.
        endings: known completions of the grammar, from its compile.
        narrowing: removes tokens from masks so that the text is complete in time; None without `always_complete`.
    """

    vocabulary: Vocabulary
    matcher: LLMatcher
    endings: Endings | None = None
    narrowing: CompletionBudget | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self.matcher.is_accepting())

    @property
    def has_ended(self) -> bool:
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    @property
    def failure(self) -> str | None:
        return self.matcher.get_error().partition("\n")[0] if self.matcher.is_error() else None

    def fill(self, mask_w: NDArray[np.int32]) -> None:
        num_words = self.vocabulary.num_library_words
        if num_words == self.vocabulary.num_words and mask_w.flags.c_contiguous:
            self.matcher.unsafe_compute_mask_ptr(mask_w.ctypes.data, mask_w.nbytes)
        else:
            mask_w[:] = self.vocabulary.allowed_by(self.matcher)
        mask_w &= self.vocabulary.all_mask_w
        self.narrow(mask_w)

    def narrow(self, mask_w: NDArray[np.int32]) -> None:
        """Remove tokens from the library's mask after which the text could not be completed in time."""
        if self.narrowing is not None and not self.matcher.is_stopped():
            self.narrowing.narrow(self.matcher, mask_w)

    def accept(self, token_id: int) -> bool:
        if self.narrowing is None or self.matcher.validate_tokens([token_id]) != 1:
            is_taken = self.matcher.try_consume_tokens([token_id]) == 1
            return is_taken or (self.has_ended and token_id in self.vocabulary.eos_token_ids)
        if token_id not in self.vocabulary.eos_token_ids:
            self.narrowing.move(self.matcher, token_id)
        return self.matcher.try_consume_tokens([token_id]) == 1

    def forced(self, limit: int) -> list[int]:
        if self.matcher.is_stopped():
            return []
        way = None if self.narrowing is None else self.narrowing.way(self.matcher)
        return list(self.matcher.compute_ff_tokens() if way is None else way)[:limit]

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        if self.has_ended:
            ends = self.vocabulary.eos_token_ids
            return next((i for i, token_id in enumerate(token_ids) if token_id not in ends), len(token_ids))
        count = int(self.matcher.validate_tokens(list(token_ids)))
        if self.narrowing is None:
            return count
        state, mask_w = self.copy(), np.zeros(self.vocabulary.num_words, np.int32)
        for index, token_id in enumerate(token_ids[:count]):
            state.fill(mask_w)
            if not mask_w[token_id // 32] >> (token_id % 32) & 1 or not state.accept(token_id):
                return index
        return count

    def closing(self, num_tokens_left: int) -> None:
        self.narrowing = CompletionBudget(self.vocabulary, self.endings, num_tokens_left)

    def copy(self) -> LlguidanceState:
        closing = None if self.narrowing is None else self.narrowing.copy()
        return LlguidanceState(self.vocabulary, self.matcher.deep_copy(), self.endings, closing)


class LlguidanceMasks:
    """Implementation of the engine's `GrammarMasks`. Used by one thread at a time.

    Attributes:
        num_words: W, the words of a mask.

    Args:
        num_threads: threads of the library; None for its default.
    """

    def __init__(self, num_words: int, num_threads: int | None = None) -> None:
        self.num_words = num_words
        self._executor = LLExecutor(num_threads)

    def batch(self, states: Sequence[GrammarState], rows: Sequence[int]) -> GrammarBatch:
        ours = [state for state in states if isinstance(state, LlguidanceState) and state.narrowing is None]
        if len(ours) < len(states) or not ours or ours[0].vocabulary.num_library_words != self.num_words:
            return StatesOneByOne(states, rows)
        matchers = [state.matcher for state in ours]
        return LlguidanceBatch(self._executor, ours[0].vocabulary, ours, list(zip(matchers, rows, strict=True)))

    def fill(self, states: Sequence[GrammarState | None], mask_rw: NDArray[np.int32]) -> None:
        ours = [(row, state) for row, state in enumerate(states) if isinstance(state, LlguidanceState)]
        if len(ours) < len(states):
            mask_rw[:] = -1
            for row, state in enumerate(states):
                if state is not None and not isinstance(state, LlguidanceState):
                    state.fill(mask_rw[row])
        if not ours:
            return
        vocabulary, num_words = ours[0][1].vocabulary, mask_rw.shape[1]
        num_library_words = vocabulary.num_library_words
        is_direct = num_library_words == num_words and mask_rw.flags.c_contiguous
        library_rw = mask_rw if is_direct else np.zeros((len(mask_rw), num_library_words), np.int32)
        fill_next_token_bitmask_par(self._executor, [(state.matcher, row) for row, state in ours], library_rw)
        rows = slice(None) if len(ours) == len(states) else [row for row, _ in ours]
        mask_rw[rows] = library_rw[rows, :num_words] & vocabulary.all_mask_w
        for row, state in ours:
            if state.narrowing is not None:
                state.narrow(mask_rw[row])


@dataclass(frozen=True, slots=True)
class LlguidanceBatch:
    """Implementation of `GrammarBatch` for states whose masks need no Python code per state.

    Attributes:
        matchers: the matchers of the states, with the rows of their masks.
    """

    executor: LLExecutor
    vocabulary: Vocabulary
    states: list[LlguidanceState]
    matchers: list[tuple[LLMatcher, int]]

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        if not self.vocabulary.eos_token_ids.isdisjoint(token_ids):  # a matcher that has ended reports these as errors
            pairs = enumerate(zip(self.states, token_ids, strict=True))
            return [place for place, (state, token_id) in pairs if not state.accept(token_id)]
        pairs_of = [(matcher, token_id) for (matcher, _), token_id in zip(self.matchers, token_ids, strict=True)]
        are_taken = consume_token_par(self.executor, pairs_of)
        return [] if all(are_taken) else [place for place, is_taken in enumerate(are_taken) if not is_taken]

    def fill(self, mask_rw: NDArray[np.int32]) -> bool:
        fill_next_token_bitmask_par(self.executor, self.matchers, mask_rw)
        mask_rw[[row for _, row in self.matchers]] &= self.vocabulary.all_mask_w
        return not any(matcher.is_error() for matcher, _ in self.matchers)


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
        source = build_source(outputs, self._limits, self._whitespace)
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
            endings = search_endings(self.vocabulary, matcher, _MAX_COMPLETION_TOKENS)
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
    grammar.check_max_tokens(request.sampling.max_num_tokens)
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
        mask_w &= vocabulary.build_mask(allowed)
    name = "bad_words" if mask_w.any() else "allowed_token_ids"
    mask_w &= ~vocabulary.build_mask([word[0] for word in words if len(word) == 1])
    if not mask_w.any():
        problem = "leaves no token that its grammar allows as output token 1"
        raise InvalidArgument(f"sampling.{name}", problem)


def compile_now(compiler: GrammarCompiler, outputs: StructuredOutputs) -> CompiledGrammar:
    """Compile a constraint and block until it is done, for callers on a thread; raises as `compile` does."""
    return compiler.submit(outputs).result()
