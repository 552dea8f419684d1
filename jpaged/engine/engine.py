"""The loop: drain the inbox, schedule, dispatch, collect, publish. One thread owns everything in here.

    plain     | schedule n | dispatch n | collect n | publish n | schedule n+1 ...
    overlap   | schedule n+1 | dispatch n+1 | collect n | publish n | schedule n+2 ...
              device:  === step n ===========| === step n+1 ==========

With overlap the host decides step n + 1 before it has seen what step n drew. Two rules follow. A decoding row's input
is named by its row in the step before and never fetched by value. A row that ended in step n may already be in step
n + 1: that result is dropped; its blocks are free at once, because the device runs steps in order of dispatch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.deadlines import Deadlines, is_over
from jpaged.engine.executor import Executor, Geometry, StepOutputs
from jpaged.engine.histogram import HistogramSnapshot
from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.pinned import Pin, PinnedPrefixes, pin_limit
from jpaged.engine.kv.policy import make_memory
from jpaged.engine.kv.prefixes import PrefixOptions
from jpaged.engine.output.beam_rows import advance_beams
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.scheduling.batch import build_sampling_inputs, build_step_inputs
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.shared_prefixes import share_prefixes
from jpaged.engine.sequence import Group, Sequence, Sink
from jpaged.engine.soundness import Soundness
from jpaged.engine.stats import DEADLINE, StepStats
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    JpagedError,
    QueueFull,
    RequestTooLong,
    Unavailable,
)
from jpaged.load import EngineLoad
from jpaged.types import FinishReason, OutputEvent, Request

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_ABANDONED_JOIN_S = 1.0
"""For a loop that may hang in its executor."""


class Engine:
    """Runs requests to their end.

    Callers' methods may be called from any thread; events come from the engine's own: the thread that `start` makes, or
    whoever calls `step`.

    Args:
        config: scheduler, cache and `max_pinned_blocks` are read; sizes that are left out are the executor's.
        max_cached_tokens: positions from here on are never shared by prefix; None is no limit.
        eos_token_ids: every token that ends a sequence of this model.
    """

    def __init__(
        self,
        executor: Executor[Any, Any],
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        max_cached_tokens: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Clock = time.monotonic,
    ) -> None:
        geometry = executor.geometry
        self.clock = clock
        self.failure: Exception | None = None
        self._executor = executor
        self._config = config
        self._eos_token_ids = eos_token_ids
        prefix = PrefixOptions(is_enabled=config.cache.enable_prefix_caching, max_tokens=max_cached_tokens)
        self._memory = make_memory(geometry, config.cache.kv_policy, prefix)
        self._scheduler = Scheduler(self._memory, config.scheduler, geometry, executor.rates)
        self._pins = PinnedPrefixes(
            self._memory.prefixes, geometry, pin_limit(config.server.max_pinned_blocks, geometry)
        )
        self._publisher = OutputProcessor(tokenizer, eos_token_ids)
        self._stats = StepStats(geometry, clock)
        self._soundness = Soundness(self._memory, self._publisher, self._stats)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._groups: dict[str, Group] = {}
        self._deadlines = Deadlines()
        self._in_flight: tuple[Schedule, Any] | None = None
        self._device_wait_s = 0.0
        self._num_arrivals = 0
        # Ids that were accepted and did not end yet, shared with the submitting threads.
        self._lock = threading.Lock()
        self._accepted: set[str] = set()
        self._is_draining = False
        self._is_stopping = False
        self._is_abandoned = False
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None
        self._on_failure: Callable[[Exception], None] = _ignore

    @property
    def geometry(self) -> Geometry:
        return self._executor.geometry

    @property
    def max_num_in_flight(self) -> int:
        """Requests that are accepted at one time: those that run, and the queue in front of them."""
        return self._config.scheduler.max_num_queued_reqs + self._scheduler.max_num_seqs

    @property
    def is_full(self) -> bool:
        """No further request is taken. A prefix that is being pinned counts, and until a step what was dropped."""
        with self._lock:
            return len(self._accepted) >= self.max_num_in_flight

    # --- called from any thread -------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request; from now on it ends in exactly one event with `is_last`, on the engine's thread.

        Raises:
            Unavailable: the engine is draining, stopped or failed.
            AlreadyExists: a request with this id is in flight.
            QueueFull: too many requests wait.
        """
        with self._lock:
            if self._is_draining or self.failure is not None:
                raise Unavailable("the engine has failed" if self.failure else "the server is shutting down")
            if request.request_id in self._accepted:
                raise AlreadyExists(f"request {request.request_id!r} is in flight")
            # Counted here and not by the scheduler, so that a burst is bounded as well.
            if len(self._accepted) >= self.max_num_in_flight:
                raise QueueFull(
                    f"{len(self._accepted)} requests are in flight, the limit is {self.max_num_in_flight} "
                    f"(max_num_queued_reqs {self._config.scheduler.max_num_queued_reqs})",
                    retry_after_s=self._stats.seconds_per_request(),
                )
            self._accepted.add(request.request_id)
            self._is_idle.clear()
            arrival_s = self.clock()
            # Inside the lock: an engine that fails right now must find it in the inbox.
            self._inbox.put(lambda: self._arrive(request, sink, arrival_s))

    def is_in_flight(self, request_id: str) -> bool:
        """A request of that id was accepted and has not ended."""
        with self._lock:
            return request_id in self._accepted

    def abort(self, request_id: str) -> bool:
        """Ends a request with finish reason ABORT; False when there is none of that id."""
        is_known = self.is_in_flight(request_id)
        if is_known:
            self._inbox.put(lambda: self._end_early(request_id, FinishReason.ABORT))
        return is_known

    def drop(self, request_id: str) -> None:
        """Forgets a request that nobody listens to any more: no further event, its blocks free by the next step."""
        dropped_s = self.clock()
        self._inbox.put(lambda: self._forget(request_id, dropped_s))

    def pin_prefix(self, name: str, token_ids: Iterable[int], salt: str = "", tenant: str = "") -> Future[int]:
        """Computes a prefix and keeps its full blocks in the pool until `unpin_prefix`.

        Args:
            salt, tenant: cache_salt and cache_tenant of the requests that may use it; the name is the tenant's, too.

        Returns:
            the number of tokens that are pinned, once they are; or the error: AlreadyExists for the name,
            InvalidArgument where there is nothing to pin or no room, Unsupported without a prefix cache, and whatever
            `submit` may raise.
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # once asked for it cannot be cancelled, so its result can always be set
        try:
            request = self._pins.request((tenant, name), tuple(token_ids), salt)
        except JpagedError as error:
            future.set_exception(error)
        else:
            self._compute_prefix((tenant, name), request, future)
        return future

    def unpin_prefix(self, name: str, tenant: str = "") -> bool:
        """Lets a pinned prefix be evicted again; False when the tenant has pinned none of that name."""
        is_pinned = self._pins.take((tenant, name))
        if is_pinned:
            self._inbox.put(lambda: self._pins.release((tenant, name)))
        return is_pinned

    def has_prefix(self, key: Key) -> bool:
        """A block with this key is cached, as far as another thread can know."""
        prefixes = self._memory.prefixes
        return prefixes is not None and prefixes.has_prefix(key)

    def num_cacheable_blocks(self, num_prompt_tokens: int) -> int:
        """Full blocks of a prompt that are cached once it is computed."""
        prefixes = self._memory.prefixes
        return 0 if prefixes is None else prefixes.num_cacheable_blocks(num_prompt_tokens)

    def load(self) -> EngineLoad:
        """A snapshot of the last step's counts."""
        return self._stats.snapshot(self._executor.num_compiles_after_warm_up)

    def replica_loads(self) -> tuple[EngineLoad, ...]:
        """Of each replica: here of the one that there is."""
        return (self.load(),)

    def histogram(self, name: str) -> HistogramSnapshot:
        """Durations so far, by one of the names in `jpaged.load.DURATIONS`."""
        return self._stats.histogram(name)

    def num_ended_by_reason(self) -> dict[str, int]:
        """Requests that have ended: stop, length, abort (also when the caller went away), deadline, error."""
        return self._stats.num_ended()

    def start(self, on_failure: Callable[[Exception], None] | None = None) -> None:
        """Runs the loop in a thread of its own until `stop`.

        Args:
            on_failure: told, on that thread, what ended the loop; by then nothing is accepted any more.
        """
        self._on_failure = on_failure or _ignore
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """Ends the loop as a fault of its own would: for when what the engine is a part of has failed."""
        self._inbox.put(lambda: self._give_up(error))

    def abandon(self, error: Exception) -> None:
        """`fail`, for when the executor may never return: `stop` does not wait for it, and leaves it what it holds."""
        self._is_abandoned = True
        self.fail(error)

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those in flight; False when some were left at the end of the time."""
        with self._lock:
            self._is_draining = True
        return self._is_idle.wait(timeout_s)

    def stop(self) -> None:
        """Ends the loop. Requests that are still in flight get Unavailable."""
        with self._lock:
            self._is_draining = True
        self._inbox.put(self._set_stopping)
        if self._thread is not None:
            self._thread.join(_ABANDONED_JOIN_S if self._is_abandoned else None)
            if self._thread.is_alive():
                return
        self._fail_all(Unavailable("the server is shutting down"))
        self._executor.shutdown()

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration; False when there was nothing to do and nothing waits."""
        start_s = self.clock()
        self._device_wait_s = 0.0
        self._drain_inbox()
        self._expire()
        schedule = self._scheduler.schedule()
        dispatched = self._dispatch(schedule)
        if self._config.scheduler.overlap:
            dispatched, self._in_flight = self._in_flight, dispatched
        if dispatched is not None:
            self._collect(*dispatched)
        if schedule.rows or dispatched is not None:
            self._stats.count_host(self.clock() - start_s - self._device_wait_s)
        self._stats.end_step(self._memory, self._scheduler.queues)
        return bool(schedule.rows) or dispatched is not None or self._scheduler.queues.has_work

    def check(self) -> None:
        """Raises InternalError when a block is lost, shared by mistake, or free and in use."""
        self._memory.check(self._scheduler.queues.groups())

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                if not self.step() and not self._is_stopping:  # which the step may have read from the inbox
                    self.check()
                    self._inbox.get()()
        except Unavailable as error:  # from outside, or of several processes one is lost: nothing here went wrong
            self._fail(error)
        except Exception as error:  # the top of the loop: whatever happened, every stream must hear of it
            logger.exception("the engine failed")
            self._fail(error)

    def _dispatch(self, schedule: Schedule) -> tuple[Schedule, Any] | None:
        """Starts a step: its moves, which there may be without a row, and its rows."""
        share_prefixes(schedule, self.geometry)
        self._stats.count_step(schedule)
        for moves in schedule.ops.batches():
            self._executor.move_blocks(moves)
        if not schedule.rows:
            return None
        hidden = self._executor.forward(build_step_inputs(schedule, self.geometry))
        sampling = build_sampling_inputs(schedule, self.geometry, self._eos_token_ids)
        return schedule, self._executor.sample(hidden, sampling)

    def _collect(self, schedule: Schedule, handle: Any) -> None:
        waiting_since_s = self.clock()
        outputs = self._executor.collect(handle)
        now = self.clock()
        self._device_wait_s = now - waiting_since_s
        for group in self._soundness.fail_unsound(schedule, outputs):
            self._release(group)
        beams: dict[Group, dict[Sequence, int]] = {}
        for row, scheduled in enumerate(schedule.rows):
            group, sequence = scheduled.group, scheduled.sequence
            if not scheduled.samples_token or not sequence.is_live:
                continue
            self._stats.count_token(group, now)
            if group.request.sampling.beam_width:
                beams.setdefault(group, {})[sequence] = row
            elif self._publisher.publish(group, sequence, outputs, row):
                self._end_sequence(group, sequence)
        for group, rows in beams.items():
            self._advance_beams(group, rows, outputs)

    def _end_sequence(self, group: Group, sequence: Sequence) -> None:
        if len(group.live) > 1:
            self._scheduler.finish_sequence(group, sequence)
        else:
            self._publisher.finish(group)
            self._release(group)

    def _advance_beams(self, group: Group, rows: dict[Sequence, int], outputs: StepOutputs) -> None:
        search = self._publisher.search(group)
        advance_beams(group, rows, outputs, search, self._scheduler)
        if search.is_done:
            self._publisher.finish(group)
            self._release(group)

    def _arrive(self, request: Request, sink: Sink, arrival_s: float) -> None:
        group = Group(request, self._num_arrivals, arrival_s, sink, self.geometry.max_blocks_per_seq)
        self._num_arrivals += 1
        if not self._memory.can_ever_fit(group):
            limit = f"{self._memory.num_blocks} blocks, less what pinned prefixes hold"
            error = RequestTooLong("sampling.max_tokens", f"the request can never fit into the pool: {limit}")
            self._publisher.fail(group, error)
            self._stats.count_end(group)
            self._send_last([group])
            self._note_idle()
            return
        self._groups[request.request_id] = group
        self._publisher.open(group)
        self._scheduler.queues.add(group)
        self._deadlines.add(group)

    def _compute_prefix(self, pin: Pin, request: Request, future: Future[int]) -> None:
        try:
            self.submit(request, lambda event: self._keep_prefix(pin, event, future))
        except JpagedError as error:
            self._pins.give_up(pin)
            future.set_exception(error)

    def _keep_prefix(self, pin: Pin, event: OutputEvent, future: Future[int]) -> None:
        """Takes the events of a request for a prefix; its blocks are pinned at the last, before it gives them back."""
        if not event.is_last:
            return
        error = event.error
        if error is None and event.finish is not None and event.finish.reason is FinishReason.ABORT:
            error = Cancelled(f"the request for prefix {pin[1]!r} was aborted")
        if error is None:
            group = self._groups[event.request_id]
            if not group.has_prompt_blocks:  # it was preempted with its last token in flight
                self._compute_prefix(pin, self._pins.renamed(pin, group.request), future)
                return
            try:
                num_tokens = self._pins.keep(pin, group, [g for g in self._groups.values() if g is not group])
                future.set_result(num_tokens)
                return
            except InvalidArgument as no_room:
                error = no_room
        self._pins.give_up(pin)
        future.set_exception(error)

    def _expire(self) -> None:
        """Ends requests whose deadline has passed."""
        for group in self._deadlines.passed(self.clock()):
            waited = self.clock() - group.arrival_s
            self._publisher.fail(group, DeadlineExceeded(f"the deadline passed {waited:.3f} s after arrival"))
            self._release(group)

    def _end_early(self, request_id: str, reason: FinishReason) -> None:
        group = self._groups.get(request_id)
        if group is not None and self.failure is None:
            self._publisher.end(group, reason)
            self._release(group)

    def _forget(self, request_id: str, dropped_s: float) -> None:
        group = self._groups.get(request_id)
        if group is not None and self.failure is None:
            is_late = is_over(group.request, group.arrival_s, dropped_s)
            group.ended(DEADLINE if is_late else FinishReason.ABORT.value)
            self._release(group)

    def _release(self, group: Group) -> None:
        """Ends a request: sends its last event, unless nobody wants it, and gives back what it holds.

        Who sees it end finds it counted, its id free and its place in the queue too.
        """
        self._stats.count_end(group)
        self._send_last([group])
        self._scheduler.finish(group)
        self._deadlines.discard(group)
        del self._groups[group.request.request_id]
        self._note_idle()

    def _send_last(self, ended: Collection[Group]) -> None:
        with self._lock:
            self._accepted.difference_update(group.request.request_id for group in ended)
        for group in ended:
            self._publisher.close(group)

    def _note_idle(self) -> None:
        with self._lock:
            if not self._accepted:
                self._is_idle.set()

    def _drain_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def _give_up(self, error: Exception) -> None:
        if self.failure is None and not self._is_stopping:
            raise error

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.failure = error
        self._on_failure(error)
        if not isinstance(error, InternalError | Unavailable):
            failure = InternalError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        """Sends every request its last event; for the end of the loop, when the device may no longer be asked."""
        self._drain_inbox()
        for group in self._groups.values():
            self._publisher.fail(group, error)
            self._stats.count_end(group)
        ended = list(self._groups.values())
        self._groups.clear()
        self._send_last(ended)
        self._note_idle()


def _ignore(error: Exception) -> None:
    """Nobody wants to hear of it."""
