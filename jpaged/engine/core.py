"""The step loop: schedule, dispatch, collect, publish. One thread owns everything in this module.

With overlap (see the diagram in docs/architecture.md) the host decides step n + 1 before it has seen the tokens of step
n. Two rules follow. A decoding row's input is identified by its row in the previous step and never fetched by value. A
row that ended in step n may already be in step n + 1: the loop drops that result. The row's blocks are free at once,
because the device runs steps in order of dispatch.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

from jpaged.config import EngineConfig
from jpaged.engine.deadlines import DeadlineEstimator, Deadlines, is_over
from jpaged.engine.executor import SLEEP_TAGS, Executor, SleepTag, StepOutputs, WeightUpdate
from jpaged.engine.executor.io import RopeLengthLimits
from jpaged.engine.inspector import PoolSnapshotter
from jpaged.engine.kv_cache.connector import EngineStore, PrefillRate
from jpaged.engine.kv_cache.offload.connector_tier import ConnectorTier
from jpaged.engine.kv_cache.paged import make_memory
from jpaged.engine.observers import StepObservers, StepTiming
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.results import NonFiniteLogitsGuard, ResultProcessor
from jpaged.engine.runners import ArrivalSignal, InFlightBatch, RunnerContext, make_runners
from jpaged.engine.scheduler.cascade import CascadePlanner
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.scheduler.policies import POLICIES
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequence import OutputCallback, SequenceGroup
from jpaged.engine.speculative.draft_model import DraftModelSpeculation
from jpaged.engine.speculative.drafter import SpecDecodeController
from jpaged.engine.speculative.drafts import DraftTokens
from jpaged.engine.stats import DEADLINE, StallDetector, StepStats, StepTimer
from jpaged.engine.structured_output import MakeMasks, StructuredOutputManager
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    JpagedError,
    NotFound,
    QueueFull,
    RequestTooLong,
    Unavailable,
    Unsupported,
)
from jpaged.types import FinishReason, Request

logger = logging.getLogger(__name__)


Clock = Callable[[], float]
PauseMode = Literal["abort", "wait", "keep"]
"""What a pause does with requests in flight: ends them, waits for their end, or keeps them."""
Done = Callable[[JpagedError | None], None]
"""Called on the engine thread when a command is done, with its error if it failed."""
_TIERS_S, _STALLED_TIERS_S = 0.001, 1.0
"""Seconds between two polls of pending transfers between memory tiers while no request runs, or if all hang too."""
_PAUSED_S = 1.0
"""Seconds between two looks at the deadlines of paused requests."""


_PROCESS = secrets.token_bytes(16)
"""Prevents that other processes find blocks of updated weights, whose contents are not compared."""


def _record_prefill(rate: PrefillRate, scheduled: SchedulerOutput, _: StepOutputs, timing: StepTiming) -> None:
    """Add a dispatch to a measured rate, unless every row of it decodes."""
    if any(row.num_tokens > 1 for row in scheduled.rows):
        rate.record(timing.num_tokens, timing.num_padded, timing.num_steps, timing.seconds)


def _with_problem(error: JpagedError, problem: str) -> tuple[str, ...]:
    """Return the arguments of an error like another, with a longer problem."""
    if isinstance(error, InvalidArgument):
        return error.field, problem.removeprefix(f"{error.field}: ")
    return (problem,)


class AdmissionControl:
    """Ids of the requests that were accepted and have not ended. Thread-safe.

    Attributes:
        max_num: maximum number of requests, running and queued ones together.
        failure: the error that ended the loop.

    Args:
        stall_detector: notified when the first request enters and when the last one leaves.
    """

    def __init__(self, num_running: int, num_queued: int, stall_detector: StallDetector) -> None:
        self.max_num = num_running + num_queued
        self.failure: Exception | None = None
        self._num_queued = num_queued
        self._stall_detector = stall_detector
        self._lock = threading.Lock()
        self._ids: set[str] = set()
        self._expected: set[str] = set()
        self._is_closed = False
        self._refusal = ""
        self._is_idle = threading.Event()
        self._is_idle.set()

    def __contains__(self, request_id: object) -> bool:
        with self._lock:
            return request_id in self._ids

    def __len__(self) -> int:
        with self._lock:
            return len(self._ids) + len(self._expected)

    def reserve(self, request_id: str, retry_after_s: Callable[[], float]) -> None:
        """Reserve a place for a request that enters later, whose prompt is computed elsewhere.

        Raises the same errors as `admit`.
        """
        with self._lock:
            self._check(request_id, retry_after_s)
            self._expected.add(request_id)
            self._is_idle.clear()

    def admit(self, request_id: str, then: Callable[[], None], retry_after_s: Callable[[], float]) -> None:
        """Accept an id and call `then` under the lock, before `close` can take effect.

        A reserved id is accepted unless the loop has failed.

        Raises:
            Unavailable: requests are no longer accepted.
            AlreadyExists: the id is in flight.
            QueueFull: too many requests are in flight.
        """
        with self._lock:
            if request_id not in self._expected or self.failure is not None:
                self._check(request_id, retry_after_s)
            self._expected.discard(request_id)
            if not self._ids:
                self._stall_detector.begin()
            self._ids.add(request_id)
            self._is_idle.clear()
            then()

    def _check(self, request_id: str, retry_after_s: Callable[[], float]) -> None:
        if self._is_closed or self.failure is not None:
            raise Unavailable("the engine has failed" if self.failure else "the server is shutting down")
        if self._refusal:
            raise Unavailable(self._refusal)
        if request_id in self._ids or request_id in self._expected:
            raise AlreadyExists(f"request {request_id!r} is in flight")
        # Counted here and not by the scheduler, so that a burst is bounded as well.
        if (count := len(self._ids) + len(self._expected)) >= self.max_num:
            limit = f"the limit is {self.max_num} (max_num_queued_reqs {self._num_queued})"
            raise QueueFull(f"{count} requests are in flight, {limit}", retry_after_s=retry_after_s())

    def cancel_reservation(self, request_id: str) -> None:
        """Cancel a reservation, if any."""
        with self._lock:
            self._expected.discard(request_id)
        self.note_idle()

    def remove(self, request_ids: Collection[str]) -> None:
        """Free these ids. `wait_idle` returns only after `note_idle`."""
        with self._lock:
            self._ids.difference_update(request_ids)
            if not self._ids:
                self._stall_detector.rest()

    def note_idle(self) -> None:
        """Wake `wait_idle` if no request is left; call it after finished requests have released their resources."""
        with self._lock:
            if not (self._ids or self._expected):
                self._is_idle.set()

    def refuse(self, reason: str) -> None:
        """Refuse requests with this reason, except those with a reservation; "" accepts them again."""
        with self._lock:
            self._refusal = reason

    def close(self, failure: Exception | None = None) -> None:
        """Stop accepting requests, because the engine stops or the loop has failed."""
        with self._lock:
            self._is_closed = True
            self.failure = failure or self.failure

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all requests have ended. Return False on timeout."""
        return self._is_idle.wait(timeout_s)


class EngineCore:
    """Step loop of the engine: runs groups until they finish, one step at a time.

    Attributes:
        groups: unfinished groups by request id.
        observers: callbacks of the features that are on.
        prefill_rates: measured rates of computing, for the features that choose between that and a transfer.
        snapshotter: takes pool snapshots and records events between them.
        stall_detector: measures the time without progress while requests are pending.
        arrivals: notified when a request has been posted to the loop.
        is_paused: steps are not scheduled; requests in flight are kept.
        asleep: released device memory, by the last `sleep` of `sleep_level`; 0 is none.
        weight_version: version of the weights, "0" at first.
        num_updates: how often the weights were replaced.
    """

    def __init__(
        self,
        executor: Executor[Any, Any],
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        lengths: RopeLengthLimits,
        eos_token_ids: frozenset[int],
        clock: Clock,
        make_masks: MakeMasks | None = None,
        stores: tuple[EngineStore, ...] = (),
    ) -> None:
        geometry = executor.geometry
        self.memory = make_memory(executor, config.cache, lengths.max_cached_tokens, stores)
        policy = POLICIES[config.scheduler.policy]()
        self.scheduler = Scheduler(
            self.memory, policy, config.scheduler, geometry, executor.rates, eos_token_ids, lengths.outgrown_len
        )
        options = config.speculation
        self.stats = StepStats(geometry, clock, 0 if options is None else options.num_speculative_tokens)
        self.stall_detector = StallDetector(clock, config.timeouts.stall_timeout)
        self.in_flight = AdmissionControl(
            self.scheduler.max_num_seqs, config.scheduler.max_num_queued_reqs, self.stall_detector
        )
        self.groups: dict[str, SequenceGroup] = {}
        self.is_paused = False
        self.asleep: set[SleepTag] = set()
        self.sleep_level, self.weight_version, self.num_updates = 0, "0", 0
        self._weights_digest = b""
        self._on_idle: list[Done] = []  # of pauses that wait for the end of all requests
        self._clock = clock
        self._executor = executor
        self._overlap = config.scheduler.overlap is not False
        self._output = OutputProcessor(tokenizer, eos_token_ids, executor.routed_experts)
        self._deadlines, self._queue_timeouts = Deadlines(), Deadlines()
        self._queue_timeout_s = config.timeouts.queue_timeout
        self._batch: InFlightBatch | None = None
        self._timer = StepTimer(executor, clock, self.stall_detector)
        self._cascade_planner = CascadePlanner()
        grammars = StructuredOutputManager(
            make_masks, geometry.vocab_size, self.scheduler.rows, self.scheduler.multi_step_policy
        )
        guard = NonFiniteLogitsGuard(self.memory, self._output, self.stats, eos_token_ids, geometry.vocab_size)
        self._results = ResultProcessor(self.scheduler, self._output, guard, grammars, self.stats, self._release)
        rounds = DraftModelSpeculation.of(options, geometry) if options and geometry.num_speculative_tokens else None
        drafting = SpecDecodeController.of(options, executor.rates, geometry) if options and rounds is None else None
        self._drafter: SpecDecodeController | DraftModelSpeculation | None = drafting or rounds
        self.arrivals = ArrivalSignal()
        self._runners = make_runners(self._make_runner_context(eos_token_ids), rounds)
        max_tokens_per_step = 1 + (0 if options is None else options.num_speculative_tokens)
        self._deadline_estimator: DeadlineEstimator | None = None
        if config.timeouts.refuse_late:
            self._deadline_estimator = DeadlineEstimator(self.scheduler, self.memory, geometry, max_tokens_per_step)
        self._num_arrivals = 0
        self.observers = StepObservers()
        self.prefill_rates = self._make_prefill_rates(config.roles.role)
        self._add_observers(config.scheduler.num_scheduler_steps)
        self.snapshotter = PoolSnapshotter(geometry, self.memory, self.scheduler, clock, self.observers)
        if self.memory.connectors:
            self.stats.end_step(self.memory, self.scheduler)

    def _make_prefill_rates(self, role: str) -> list[PrefillRate]:
        """Return the rates of prompts that loads are compared with: of connectors, or of a server that only decodes."""
        rates = [connector.prefill for connector in self.memory.connectors]
        return rates or ([PrefillRate(self._executor.rates)] if role == "decode" else [])

    def _make_runner_context(self, eos_token_ids: frozenset[int]) -> RunnerContext:
        return RunnerContext(
            self._executor,
            self.scheduler,
            self._results,
            self._timer,
            self._clock,
            eos_token_ids,
            self._process_in_flight,
            self.arrivals,
        )

    def _add_observers(self, num_scheduler_steps: int) -> None:
        """Add the callbacks of the features that are on; within a list, the order is that of the calls."""
        observers, executor, scheduler = self.observers, self._executor, self.scheduler
        if (host := self.memory.host) is not None:
            observers.on_begin.append(lambda now_s: host.advance() if host.pending_callbacks else None)
        for connector in self.memory.connectors:
            observers.on_begin.append(partial(self._poll, connector))
            observers.on_request_finished.append(connector.on_request_finished)
        for rate in self.prefill_rates:
            observers.on_results.append(partial(_record_prefill, rate))
        if executor.routed_experts is not None:
            scheduler.on_preempt.append(self._output.keep_experts)
        if executor.geometry.max_loras:
            observers.on_begin.append(self._fail_without_adapter)
            observers.on_scheduled.append(self._load_adapters)
        if (budget := scheduler.prefill_budget) is not None:
            observers.on_begin.append(lambda now_s: budget.steps.set_buckets(executor.geometry.buckets))
            observers.on_results.append(budget.steps.on_results)
        if num_scheduler_steps != 1:
            observers.on_begin.append(lambda now_s: scheduler.multi_step_policy.begin_step(now_s, executor.geometry))
            observers.on_results.append(scheduler.multi_step_policy.on_results)
        if self._deadline_estimator is not None:
            observers.on_results.append(self._deadline_estimator.least_times.on_results)
        if self._drafter is not None:
            self._drafter.observe(observers)
        if self._queue_timeout_s is not None:
            observers.on_request_finished.append(self._queue_timeouts.discard)
        if self.memory.prefixes is not None:
            changes = self.memory.prefixes.changes
            changes.call_with_sink(lambda: observers.on_end.append(changes.flush))

    def _poll(self, connector: ConnectorTier, now_s: float) -> None:
        """Advance the transfers of a connector, and queue the groups whose load has ended."""
        queues = self.scheduler.queues
        queues.release_pending(connector.poll(now_s, is_alone=not queues.running))

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        start_s = self._timer.begin_step()
        self._expire(start_s)
        if self.is_paused:
            return self._end_without_batch()
        for on_begin in self.observers.on_begin:
            on_begin(start_s)
        was_in_flight = self._batch is not None
        schedule = self.scheduler.schedule(*self._propose())
        self.stats.count_schedule(schedule)
        for on_scheduled in tuple(self.observers.on_scheduled):  # one may remove itself
            on_scheduled(schedule)
        batch = self._dispatch(schedule)
        if batch is not None:
            self.stats.count_steps(schedule)
            for on_dispatched in self.observers.on_dispatched:
                on_dispatched(schedule, batch.inputs)
        previous, self._batch = self._batch, batch
        if previous is not None:
            self._process(previous)
        if batch is not None and (batch.must_wait or not self._overlap):
            self._process_in_flight()
        has_run = batch is not None or was_in_flight
        if has_run:
            self.stats.count_times(*self._timer.end_step())
        self.stats.end_step(self.memory, self.scheduler)
        for on_end in self.observers.on_end:
            on_end()
        has_work = self.scheduler.queues.has_work
        if not has_work:
            self._timer.rest()
        if self._on_idle and not self.groups:
            self._set_paused(True)
            self._call_idle(None)
        return has_run or has_work or self.awaits_tiers

    def _end_without_batch(self) -> bool:
        """End a step of a paused loop; return True if a request is in flight, which may have a deadline."""
        self.stats.end_step(self.memory, self.scheduler)
        for on_end in self.observers.on_end:
            on_end()
        self._timer.rest()
        return bool(self.groups)

    # --- pauses -----------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, then: Done) -> None:
        """Schedule no further step until `resume`, and call `then` when no step is in flight any more.

        With mode "wait" the loop continues until all requests have ended, which fails if they need memory that is
        asleep. For modes other than "keep", the caller refuses new requests.
        """
        self._process_in_flight()
        if mode == "abort":
            self.abort_all()
        elif mode == "wait" and self.groups and self.asleep:
            then(Unavailable("requests that are kept cannot end during a sleep: call wake_up, or choose another mode"))
            return
        elif mode == "keep" and self.groups:
            self._call_idle(Unavailable("generation was paused before all requests had ended"))
        self._on_idle.append(then)
        self._set_paused(mode != "wait" or not self.groups)
        if self.is_paused:
            self._call_idle(None)

    def resume(self) -> JpagedError | None:
        """Schedule steps again; return an error if the device memory is released.

        Pauses that wait for the end of requests end with an error.
        """
        if self.asleep:
            return Unavailable(f"the {' and the '.join(sorted(self.asleep))} are asleep: call wake_up")
        self._set_paused(False)
        self._call_idle(Unavailable("generation was resumed before all requests had ended"))
        return None

    def sleep(self, level: int) -> JpagedError | None:
        """Release device memory during a pause; return an error if that is not possible now.

        Requests in flight are preempted, and recomputed after `wake_up`. All cached prefixes are dropped.
        """
        sleeper, held = self._executor.sleeper, self.memory.held
        assert sleeper is not None
        if not self.is_paused or (held is not None and any(held.tables())):
            return Unavailable("prefixes are being transferred, or generation was resumed: try again")
        self._drop_blocks(keeps_swapped=level < 2)
        sleeper.sleep(level)
        self.asleep.update(SLEEP_TAGS)
        self.sleep_level = max(level, self.sleep_level)
        if level > 1:
            self.scheduler.adapters.forget()
        return None

    def update_weights(self, update: WeightUpdate, version: str | None) -> JpagedError | None:
        """Replace the weights during a pause; return an error if that fails. The weights are asleep then.

        Requests in flight are preempted, and recomputed from their tokens. All cached prefixes are dropped.

        Args:
            version: None counts.
        """
        sleeper, held = self._executor.sleeper, self.memory.held
        assert sleeper is not None
        if not self.is_paused or (held is not None and any(held.tables())):
            return Unavailable("prefixes are being transferred, or generation was resumed: try again")
        if "weights" in self.asleep and not update.is_complete:
            return InvalidArgument(
                "weights", "must be complete: the weights are asleep, call wake_up for a part of them"
            )
        self._drop_blocks(keeps_swapped=False)
        try:
            sleeper.update(update)
        except JpagedError as error:
            self._mark_discarded()
            how = f"{error}; the weights are asleep until a complete update or wake_up succeeds"
            return Unavailable(how) if isinstance(error, InternalError) else type(error)(*_with_problem(error, how))
        was_asleep = bool(self.asleep)
        if "weights" in self.asleep:
            self.scheduler.adapters.forget()  # their slots are new as well
        self.asleep.discard("weights")
        self.begin_version(version)
        if was_asleep and not self.asleep:
            self.sleep_level = 0
            return self.resume()
        return None

    def discard_weights(self) -> None:
        """Let the weights sleep, because another replica has other ones; pause if generation was resumed."""
        if "weights" not in self.asleep:
            assert self._executor.sleeper is not None
            self._process_in_flight()
            self._set_paused(True)
            self._drop_blocks(keeps_swapped=False)
            self._executor.sleeper.discard()
            self._mark_discarded()

    def begin_version(self, version: str | None) -> None:
        """Record that the weights are others: blocks of the former ones are not found any more."""
        former, self.num_updates = self.weight_version, self.num_updates + 1
        self.weight_version = str(self.num_updates) if version is None else version
        content, prefixes = _PROCESS, self.memory.prefixes
        if self.memory.connectors and self._executor.host_blocks is not None:  # which other processes read
            content = self._executor.host_blocks.kv_identity()
        else:
            content += self.num_updates.to_bytes(8, "big")
        digest = hashlib.sha256(content + self.weight_version.encode()).digest()
        if prefixes is not None:
            prefixes.set_weights(digest)
        self._weights_digest = digest
        for connector in self.memory.connectors:
            connector.cancel_loads()
        self._output.set_weight_version(self.weight_version)
        for group in self.groups.values():
            group.end_version(former, digest)
            self._output.restart_prompt(group)

    def _drop_blocks(self, *, keeps_swapped: bool) -> None:
        """Preempt all requests for recompute, and drop cached prefixes.

        Args:
            keeps_swapped: False if the weights change; stores keep the prefixes of the former ones, by other keys.
        """
        self.scheduler.preempt_all(keeps_swapped=keeps_swapped)
        for moves in self.memory.take_ops().batches():
            self._executor.move_blocks(moves)
        if self.memory.prefixes is not None:
            self.memory.prefixes.reset(keeps_stores=not keeps_swapped)

    def _mark_discarded(self) -> None:
        self.asleep.add("weights")
        self.sleep_level = 2
        self.scheduler.adapters.forget()

    def wake_up(self, tags: Collection[SleepTag]) -> JpagedError | None:
        """Restore what sleeps, and schedule steps again if nothing sleeps any more; return an error if that fails."""
        for tag in (tag for tag in SLEEP_TAGS if tag in tags and tag in self.asleep):
            assert self._executor.sleeper is not None
            try:
                self._executor.sleeper.wake_up(tag)
            except Exception as error:  # of the files of discarded weights, which a caller may restore
                if isinstance(error, InvalidArgument | NotFound | Unsupported):
                    return error
                if tag != "weights" or self.sleep_level < 2:
                    raise
                problem = f"the weights cannot be read again: {type(error).__name__}: {error}"
                return Unavailable(f"{problem}; they stay asleep until wake_up or a complete update succeeds")
            self.asleep.discard(tag)
            if tag == "weights" and self.sleep_level > 1:
                self.begin_version(None)
        if self.asleep:
            return None
        self.sleep_level = 0
        return self.resume()

    def end_pause(self) -> None:
        """Let paused requests end before a shutdown; abort them if device memory is released."""
        if self.is_paused and self.resume() is not None:
            self.abort_all()

    def _set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.stall_detector.set_paused(is_paused)

    def _call_idle(self, error: JpagedError | None) -> None:
        calls, self._on_idle = self._on_idle, []
        for call in calls:
            call(error)

    @property
    def idle_budget_s(self) -> float:
        """Seconds until the next step must be decided while the device runs several; 0 or less is now."""
        if self.is_paused:
            return _PAUSED_S
        if self.scheduler.queues.has_work:
            batch, multi_step_policy = self._batch, self.scheduler.multi_step_policy
            if batch is None:
                return _TIERS_S if self.scheduler.is_fetching_adapter else 0.0
            return multi_step_policy.spare_s(batch.schedule, self._timer.start_s(batch.begin_s), self._clock())
        if not self.awaits_tiers:
            return 0.0
        busy = [connector for connector in self.memory.connectors if connector.is_busy]
        is_stalled = not self._awaits_host and all(connector.is_stalled for connector in busy)
        return _STALLED_TIERS_S if is_stalled else _TIERS_S

    @property
    def awaits_tiers(self) -> bool:
        """True if transfers between memory tiers are pending, which steps have to poll."""
        return self._awaits_host or any(connector.is_busy for connector in self.memory.connectors)

    @property
    def only_awaits(self) -> bool:
        """True if no request runs, and the next step waits for a transfer between tiers or for an adapter's files."""
        if self.is_paused:
            return False
        if self.scheduler.queues.has_work:
            return self._batch is None and self.scheduler.is_fetching_adapter
        return self.awaits_tiers

    @property
    def _awaits_host(self) -> bool:
        return self.memory.host is not None and bool(self.memory.host.pending_callbacks)

    def check(self) -> None:
        self.memory.check(self.scheduler.queues.groups())
        self.scheduler.rows.check()
        if self._executor.geometry.max_loras:
            self.scheduler.adapters.check(self.scheduler.queues.running)

    def _propose(self) -> tuple[DraftTokens | None, int]:
        """Return the draft tokens for the next step, and the number of draft-model rounds that replace it."""
        drafter, geometry = self._drafter, self._executor.geometry
        limit = 0 if drafter is None else drafter.limit(self.scheduler, geometry)
        if drafter is None or not limit:
            return None, 0
        self._process_in_flight()  # a drafter needs all tokens
        return drafter.propose(self.scheduler, limit)

    def _dispatch(self, schedule: SchedulerOutput) -> InFlightBatch | None:
        """Dispatch a step: its block moves, which may occur without rows, and its rows."""
        begin_s, geometry = self._clock(), self._executor.geometry
        if geometry.cascade is not None and schedule.num_rows > 1:
            self._cascade_planner.share(schedule, geometry)
        for moves in schedule.ops.batches():
            self._executor.move_blocks(moves)
        if not schedule.num_rows:
            return None
        return self._runners[schedule.decodes.kind].start(schedule, begin_s)

    def _process_in_flight(self) -> None:
        """Wait for the batch in flight, if any, and process its results."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._process(batch)

    def _process(self, batch: InFlightBatch) -> None:
        """Wait for a batch, process its results, and pass them to the observers."""
        self._timer.begin_wait()
        outputs = batch.wait()
        timing = self._timer.end_wait(batch.schedule, batch.inputs, batch.begin_s, batch.handle)
        batch.process(batch.schedule, outputs, timing.end_s)
        for on_results in self.observers.on_results:
            on_results(batch.schedule, outputs, timing)

    def _load_adapters(self, _: SchedulerOutput) -> None:
        """Start to load the adapters of a step into their slots."""
        for slot, matrices in self.scheduler.adapters.pop_pending_loads().items():
            self._executor.load_adapter(slot, matrices)

    def _fail_without_adapter(self, _: float) -> None:
        """End the next waiting group if its adapter could not be read again."""
        if not self.scheduler.adapters.has_fetch_error:
            return
        group = self.scheduler.queues.next_group()
        error = self.scheduler.adapters.pop_fetch_error(group)
        if group is None or error is None:
            return
        if not isinstance(error, JpagedError):
            failure = InternalError(f"an adapter could not be read: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._output.fail(group, error)
        self._release(group)

    def _expire(self, now_s: float) -> None:
        """End requests whose deadline has passed, and those that waited too long for their first step."""
        if self._deadlines.next_s <= now_s:
            for group in self._deadlines.expired(now_s):
                waited = now_s - group.arrival_s
                self._output.fail(group, DeadlineExceeded(f"the deadline passed {waited:.3f} s after arrival"))
                self._release(group)
        if self._queue_timeouts.next_s <= now_s:
            for group in self._queue_timeouts.expired(now_s):
                self._queue_timeouts.discard(group)
                if group.first_scheduled_s is None:
                    problem = f"the request waited {now_s - group.arrival_s:.3f} s for its first step (queue_timeout)"
                    self._output.fail(group, QueueFull(problem, retry_after_s=self.stats.seconds_per_request()))
                    self._release(group)

    # --- requests, between two steps --------------------------------------------------------------------------------

    def add_request(self, request: Request, sink: OutputCallback, arrival_s: float) -> None:
        """Add a request whose id is in flight."""
        geometry = self._executor.geometry
        group = SequenceGroup(
            request,
            self._num_arrivals,
            arrival_s,
            sink,
            geometry.max_blocks_per_seq,
            len(geometry.windows),
            self._weights_digest,
        )
        self._num_arrivals += 1
        if not self.memory.can_ever_fit(group):
            needed = (
                f"the request needs up to {group.num_blocks_alone(geometry)} blocks and can never fit into the pool"
            )
            limit, of_device = self.memory.limit // geometry.dp_size, " of a device" if geometry.dp_size > 1 else ""
            problem = f"{needed}{of_device}, which has {limit} blocks minus pinned prefixes"
            self._fail([group], RequestTooLong("sampling.max_tokens", problem))
            return
        if request.sampling.beam_width and self._executor.routed_experts is not None:
            problem = "is set; beams have no routed experts, which this engine returns (enable_return_routed_experts)"
            self._fail([group], InvalidArgument("sampling.beam_width", problem))
            return
        if request.deadline_s is not None and self._deadline_estimator is not None:
            late = self._deadline_estimator.check(group, request.deadline_s, self._clock())
            if late is not None:
                self._fail([group], late)
                return
        self.groups[request.request_id] = group
        if self.scheduler.queues.running:
            self.scheduler.multi_step_policy.arrivals.add(arrival_s)
        self._output.open(group)
        is_pending = not self.is_paused and any(connector.start_load(group) for connector in self.memory.connectors)
        (self.scheduler.queues.add_pending_fetch if is_pending else self.scheduler.queues.add)(group)
        if request.deadline_s is not None:
            self._deadlines.add(group, request.deadline_s)
        if self._queue_timeout_s is not None:
            self._queue_timeouts.add(group, arrival_s + self._queue_timeout_s)

    def abort_request(self, request_id: str, reason: FinishReason) -> None:
        """Finish a request with a reason, between two tokens; no-op if it has finished."""
        group = self.groups.get(request_id)
        if group is not None and self.in_flight.failure is None:
            self._output.end(group, reason)
            self._release(group)

    def abort_all(self) -> None:
        """Finish all requests."""
        for request_id in tuple(self.groups):
            self.abort_request(request_id, FinishReason.ABORT)

    def drop_request(self, request_id: str, dropped_s: float) -> None:
        """Drop a request whose client is gone, without a final event; no-op if it has finished."""
        group = self.groups.get(request_id)
        if group is not None and self.in_flight.failure is None:
            is_late = is_over(group.request, group.arrival_s, dropped_s)
            group.ended(DEADLINE if is_late else FinishReason.ABORT.value)
            self._release(group)

    def fail_all(self, error: Exception) -> None:
        """Send every request its last event; for the end of the loop, when the device must not be called any more."""
        groups = list(self.groups.values())
        self.groups.clear()
        self._fail(groups, error)
        self._call_idle(Unavailable("the engine has ended"))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _release(self, group: SequenceGroup) -> None:
        """End a request: send its last event, unless the client is gone, and free its resources.

        When the client sees the end, the request is counted, and its id and its place in the queue are free.
        """
        self.stats.count_end(group)
        self._send_last([group])
        self.scheduler.finish(group)
        for on_request_finished in self.observers.on_request_finished:
            on_request_finished(group)
        if group.request.deadline_s is not None:
            self._deadlines.discard(group)
        del self.groups[group.request.request_id]
        self.in_flight.note_idle()

    def _fail(self, groups: Collection[SequenceGroup], error: Exception) -> None:
        """End requests that hold no resources."""
        for group in groups:
            self._output.fail(group, error)
            self.stats.count_end(group)
        self._send_last(groups)
        self.in_flight.note_idle()

    def _send_last(self, ended: Collection[SequenceGroup]) -> None:
        self.in_flight.remove([group.request.request_id for group in ended])
        for group in ended:
            self._output.close(group)
