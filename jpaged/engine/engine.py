"""Thread-safe front end of the engine, and the thread that runs its loop."""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from numbers import Integral
from typing import Any, TypeVar, get_args

from jpaged.config import EngineConfig
from jpaged.engine.core import Clock, Done, EngineCore, PauseMode
from jpaged.engine.executor import SLEEP_TAGS, Executor, Geometry, Sleeper, SleepTag, StepInputs, WeightUpdate
from jpaged.engine.executor.io import RopeLengthLimits
from jpaged.engine.inspector import PoolInspector, ReplicaInspector
from jpaged.engine.kv_cache.connector import EngineStore
from jpaged.engine.kv_cache.offload.transfer import KVTransfer, ReplicaTransfer
from jpaged.engine.kv_cache.pinned import PinnedPrefixes, pin_limit
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.sequence import OutputCallback
from jpaged.engine.stats import HistogramSnapshot
from jpaged.engine.structured_output import MakeMasks
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InternalError, InvalidArgument, JpagedError, Unavailable, Unsupported
from jpaged.server_load import EngineLoad
from jpaged.types import FinishReason, LoadedAdapter, Request

logger = logging.getLogger(__name__)

_JOIN_S, _ABANDONED_JOIN_S = 0.2, 1.0
"""Timeouts of the join of a loop that may hang in its executor."""
_LOOK_S = 0.005
THREAD_NAME = "jpaged-engine"
PAUSED = "generation is paused: try again after it is resumed"
UPDATING = "the weights are being updated: try again"
ASLEEP = "the engine is asleep: try again after wake_up"
_ANY_LENGTH = RopeLengthLimits()
_MAX_NEW = 50_000
"""Container objects created since the last collection: a few MB, and a few ms to collect if all of them are alive."""
_MAX_LOOKS = 50
"""Collections of young objects between two full collections."""


def check_mode(mode: str) -> None:
    """Raise InvalidArgument if a mode of a pause is unknown."""
    if mode not in (modes := get_args(PauseMode)):
        raise InvalidArgument("mode", f"{str(mode)[:80]!r} is not one of {', '.join(modes)}")


MAX_VERSION_CHARS = 128
"""Limit of the name of a version of the weights."""


def check_version(version: str | int | None) -> str | None:
    """Return the name of a version of the weights; None counts.

    Raises:
        InvalidArgument: it is empty, too long, or not printable.
    """
    if version is None:
        return None
    if isinstance(version, Integral) and not isinstance(version, bool):
        is_valid = abs(version) < 10 ** (MAX_VERSION_CHARS - 1)
        name = str(version) if is_valid else hex(version)  # str refuses the longest numbers
    else:
        name = str(version)
        is_valid = isinstance(version, str) and 0 < len(name) <= MAX_VERSION_CHARS and name.isprintable()
    if not is_valid:
        problem = f"must be a number or a printable text of at most {MAX_VERSION_CHARS} characters"
        raise InvalidArgument("version", f"{name[:80]!r} {problem}")
    return name


def _get_update_obstacle(config: EngineConfig) -> str:
    """Return the option with which weights cannot be updated, or an empty text."""
    if config.lora.enable_dora:
        return "--enable-dora: magnitudes belong to the first weights"
    return "" if config.roles.role == "both" else f"--role {config.roles.role}"


def check_sleep(level: int, sleeper: Sleeper | None, *, has_stores: bool) -> None:
    """Check that an executor can sleep.

    Args:
        has_stores: there are stores of cached prefixes below host memory, which belong to the weights.

    Raises:
        InvalidArgument: the level is out of range.
        Unsupported: the executor cannot release its memory, or cannot read the weights again.
    """
    if level not in (0, 1, 2):
        raise InvalidArgument("level", f"{level!r} is not 0, 1 or 2")
    if level and sleeper is None:
        raise Unsupported("sleep: levels 1 and 2 are not supported with several processes, a draft model or EPLB")
    if level > 1 and sleeper is not None and (has_stores or not sleeper.can_reload):
        raise Unsupported("sleep: level 2 is not supported with several replicas or with stores of cached prefixes")


def check_tags(tags: Collection[str] | None) -> tuple[SleepTag, ...]:
    """Return the tags that name device memory, of a call's tags; None is all.

    Raises:
        InvalidArgument: a tag is unknown.
    """
    known = (*SLEEP_TAGS, SCHEDULING)
    for tag in tags or ():
        if tag not in known:
            raise InvalidArgument("tags", f"{str(tag)[:80]!r} is not one of {', '.join(known)}")
    return tuple(tag for tag in SLEEP_TAGS if tags is None or tag in tags)


SCHEDULING = "scheduling"
"""Tag of `wake_up` that names no memory: it ends a sleep of level 0."""


class GCPause:
    """Context manager that disables Python's garbage collector for the whole process while any thread is inside it.

        automatic   after every 700 new objects, at any point, and now and then a full collection of the process: 0.2 s
        here        disabled while a loop runs; the loop collects young objects once there are enough of them, right
                    after a dispatch, and everything after each _MAX_LOOKS of those; objects that a server has loaded
                    at its start (`cli/serve.py`) are frozen

    Collecting by the number of new objects, and not by time, bounds the size of garbage.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_enabled: bool  # set by the first loop that enters

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._was_enabled:
                gc.enable()


collected_between_steps = GCPause()
"""For loops that call `collect_if_due` after every dispatch."""


def collect_if_due(schedule: SchedulerOutput, inputs: StepInputs) -> None:
    """Collect garbage if there are enough new objects; an observer of dispatches."""
    num_new, _, num_looks = gc.get_count()
    if num_new > _MAX_NEW:
        gc.collect(2 if num_looks >= _MAX_LOOKS else 1)


class EngineThread:
    """Runs a loop until it is stopped or fails; without `start` the caller of `step` is its thread."""

    def __init__(self, loop: EngineCore) -> None:
        self._loop = loop
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._on_failure: Callable[[Exception], None] | None = None
        self.has_ended = False
        """Commands that are added from now on never run; set before the last read of the inbox."""

    def call_soon(self, command: Callable[[], None]) -> None:
        """Post a command to the loop's thread, to run before its next step. Thread-safe."""
        self._inbox.put(command)

    def start(self, on_failure: Callable[[Exception], None] | None) -> None:
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Run the posted commands and one iteration of the loop."""
        self._drain_inbox()
        return self._loop.step()

    def fail(self, error: Exception, *, hangs: bool) -> None:
        """End the loop as an internal fault would; with `hangs`, `stop` does not wait for it."""
        self._is_abandoned = self._is_abandoned or hangs
        self.call_soon(lambda: self._give_up(error))

    def stop(self) -> bool:
        """Stop the loop and fail its requests. Return False if it hangs; its resources are not released then."""
        self.call_soon(self._stopping.set)
        if self._thread is not None:
            while self._thread.is_alive() and not self._is_abandoned:  # another thread may call `fail`
                self._thread.join(_JOIN_S)
            self._thread.join(_ABANDONED_JOIN_S)
            if self._thread.is_alive():
                return False
        self._end(Unavailable("the server is shutting down"))
        return True

    def _run(self) -> None:
        self._loop.observers.on_dispatched.append(collect_if_due)
        try:
            while not self._stopping.is_set():
                with collected_between_steps:
                    while self.step() and not self._stopping.is_set():
                        self._await_arrivals()
                if not self._stopping.is_set():  # the step may have read the stop command from the inbox
                    self._loop.check()
                    self._inbox.get()()
        except Unavailable as error:  # raised from outside, or another process is lost: nothing failed here
            self._fail(error)
        except Exception as error:  # the top of the loop: whatever happened, every stream must get its error
            logger.exception("the engine failed")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._loop.in_flight.close(error)
        if self._on_failure is not None:
            self._on_failure(error)
        if not isinstance(error, InternalError | Unavailable):
            failure = InternalError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._end(error)

    def _end(self, error: Exception) -> None:
        self.has_ended = True
        self._drain_inbox()
        self._loop.fail_all(error)

    def _drain_inbox(self) -> None:
        self._loop.arrivals.reset()
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _await_arrivals(self) -> None:
        """Wait for commands while the device runs several steps, until the next step must be decided."""
        seconds = self._loop.idle_budget_s
        if seconds > 0:
            try:
                self._inbox.get(timeout=seconds)()
            except queue.Empty:
                """No command arrived."""

    def flush_connectors(self, until_s: float) -> bool:
        """Write the cached blocks that connectors lack. Return False if the time (of `time.monotonic`) has passed."""
        if self._thread is not None and not self._thread.is_alive():
            return True
        is_over = threading.Event()

        def look() -> None:
            if not [connector for connector in self._loop.memory.connectors if not connector.flush()]:
                is_over.set()

        while not is_over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            self.call_soon(look)
            if self._thread is None:
                self.step()
            is_over.wait(min(left_s, _LOOK_S))
        return is_over.is_set()

    def await_tiers(self) -> None:
        """Wait briefly if no request runs, and transfers between memory tiers or reads of adapters are pending."""
        if self._loop.only_awaits:
            self._await_arrivals()

    def _give_up(self, error: Exception) -> None:
        if self._loop.in_flight.failure is None and not self._stopping.is_set():
            raise error


class Engine:
    """Engine of one model replica: runs requests until they finish.

    Methods are thread-safe. Events are emitted on the engine thread: the one that `start` creates, or the caller of
    `step`.

    Attributes:
        clock: the clock of deadlines.
        max_num_in_flight: maximum number of accepted requests, running and queued ones together.
        in_flight: ids of requests that were accepted and have not ended.
        prefixes: operations on the prefix cache; None without a prefix cache.
        inspector: inspection of the pool.
        kv_transfer: transfers of prefixes from and to other servers.
        reserve_slot: reserves a place for a request whose prompt is computed elsewhere, until it is submitted or
            dropped. Returns the transfers that receive the prompt's blocks, and raises the errors of `submit`.

    Args:
        config: scheduler, cache, timeouts, speculation and `server.max_pinned_blocks` are read; missing sizes default
            to the executor's.
        lengths: lengths up to which the model's keys stay valid.
        eos_token_ids: every token that ends a sequence of this model.
        make_masks: creates the object that fills grammar masks; None if no request has a grammar.
        stores: stores below host memory for cached prefixes, such as disk; owned by the engine until `stop`.
    """

    def __init__(
        self,
        executor: Executor[Any, Any],
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        lengths: RopeLengthLimits = _ANY_LENGTH,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Clock = time.monotonic,
        make_masks: MakeMasks | None = None,
        stores: tuple[EngineStore, ...] = (),
    ) -> None:
        self._executor = executor
        self._loop = EngineCore(
            executor,
            tokenizer,
            config,
            lengths=lengths,
            eos_token_ids=eos_token_ids,
            clock=clock,
            make_masks=make_masks,
            stores=stores,
        )
        self._thread = EngineThread(self._loop)
        self._in_flight = self._loop.in_flight
        self.in_flight: Container[str] = self._in_flight
        self.clock = clock
        self._can_sleep = config.scheduler.enable_sleep_mode
        self._update_lock = threading.Lock()
        self._stays_paused = False  # after an update
        self._unsupported_update = _get_update_obstacle(config)
        self.max_num_in_flight = self._in_flight.max_num
        self.prefixes = self._loop.memory.prefixes
        geometry = executor.geometry
        self._pins = PinnedPrefixes(
            self.prefixes,
            geometry,
            pin_limit(config.server.max_pinned_blocks, geometry),
            submit=self.submit,
            ask=self._thread.call_soon,
            groups=self._loop.groups,
            limit=lambda: self._loop.memory.limit,
        )
        loop = self._loop
        self.kv_transfer = KVTransfer(
            [ReplicaTransfer(loop.memory, geometry, executor.host_blocks, self._thread.call_soon, loop.prefill_rates)]
        )

        def reserve(request: Request) -> KVTransfer:
            self._in_flight.reserve(request.request_id, loop.stats.seconds_per_request)
            return self.kv_transfer

        self.reserve_slot: Callable[[Request], KVTransfer] = reserve
        self.inspector = PoolInspector(
            [ReplicaInspector(loop.snapshotter, loop.memory, loop.stats, loop.groups, geometry, self._thread.call_soon)]
        )

    @property
    def geometry(self) -> Geometry:
        return self._executor.geometry

    @property
    def failure(self) -> Exception | None:
        """The error that ended the loop, or None."""
        return self._in_flight.failure

    @property
    def is_full(self) -> bool:
        """True if no further request is accepted.

        Prefixes that are being pinned count, and dropped requests until the next step.
        """
        return len(self._in_flight) >= self.max_num_in_flight

    def submit(self, request: Request, sink: OutputCallback) -> None:
        """Accept a request, which then ends in exactly one event with `is_last`, on the engine thread.

        Raises:
            Unavailable: the engine is draining, stopped or failed.
            AlreadyExists: a request with this id is in flight.
            QueueFull: too many requests wait.
        """

        def ask() -> None:
            arrival_s = self.clock()
            self._thread.call_soon(lambda: self._loop.add_request(request, sink, arrival_s))
            self._loop.arrivals.notify()

        self._in_flight.admit(request.request_id, ask, self._loop.stats.seconds_per_request)

    def abort(self, request_id: str) -> bool:
        """Finish a request with reason ABORT. Return False if no request has that id."""
        is_known = request_id in self._in_flight
        if is_known:
            self._thread.call_soon(lambda: self._loop.abort_request(request_id, FinishReason.ABORT))
        return is_known

    def drop(self, request_id: str) -> None:
        """Drop a request whose client is gone: no further event, its blocks are free by the next step."""
        dropped_s = self.clock()
        self._in_flight.cancel_reservation(request_id)
        self._thread.call_soon(lambda: self._loop.drop_request(request_id, dropped_s))

    def pin_prefix(
        self,
        name: str,
        token_ids: Iterable[int],
        salt: str = "",
        tenant: str = "",
        adapter: LoadedAdapter | None = None,
    ) -> Future[int]:
        """Compute a prefix and keep its full blocks in the pool until `unpin_prefix`.

        Args:
            salt, tenant: cache_salt and cache_tenant of the requests that may use it; the name belongs to the tenant.
            adapter: the adapter of those requests.

        Returns:
            the number of pinned tokens, once they are pinned; or the error: AlreadyExists for the name, InvalidArgument
            if there is nothing to pin or no room, Unsupported without a prefix cache, and the errors of `submit`.
        """
        return self._pins.pin((tenant, name), tuple(token_ids), salt, adapter)

    def unpin_prefix(self, name: str, tenant: str = "") -> bool:
        """Make a pinned prefix evictable again. Return False if the tenant has not pinned that name."""
        return self._pins.unpin((tenant, name))

    def reset_prefix_cache(self) -> Future[int]:
        """Clear the prefix cache before the next step, except blocks in use.

        Blocks of requests in flight and of pinned prefixes stay cached.

        Returns:
            the number of blocks, in device and host memory, whose prefixes were dropped, once they are; or the error:
            Unavailable if the engine has ended.
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        counts: list[int] = []
        reset = self.call_soon(lambda: counts.append(0 if self.prefixes is None else self.prefixes.reset()))

        def finish(done: Future[None]) -> None:
            if done.cancelled():
                future.set_exception(Unavailable("the engine has ended"))
            elif (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(counts[0])

        reset.add_done_callback(finish)
        return future

    def pause(self, mode: PauseMode = "abort", *, why: str = PAUSED) -> Future[None]:
        """Pause generation until `resume`; the result is there once no step runs.

        Args:
            mode: "abort" ends all requests with reason ABORT, "wait" lets them end, "keep" keeps them for `resume`.
                New requests are refused with Unavailable, except with "keep", which queues them.
            why: message of that error.

        Raises:
            InvalidArgument: the mode is unknown.
        """
        check_mode(mode)
        self._in_flight.refuse("" if mode == "keep" else why)

        def begin(done: Done) -> None:
            self._stays_paused = True
            self._loop.pause(mode, done)

        return self._run_command(begin)

    def resume(self) -> Future[None]:
        """Continue after `pause`; no-op if the engine is not paused.

        Returns:
            a future; it has Unavailable if device memory is released, see `sleep`.
        """

        def resume(done: Done) -> None:
            error = self._loop.resume()
            if error is None:
                self._stays_paused = False
                self._in_flight.refuse("")
            done(error)

        return self._run_command(resume)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]:
        """Pause generation, and release device memory until `wake_up`.

        Args:
            level: 0 releases none, 1 keeps the weights in host memory, 2 discards them. The blocks are freed, and with
                them cached and pinned prefixes.
            mode: as for `pause`; requests that are kept are recomputed.

        Raises:
            InvalidArgument: the level is out of range, or the mode is unknown.
            Unsupported: `enable_sleep_mode` is off, or the executor cannot release its memory, or cannot read the
                weights again.
        """
        check_mode(mode)
        if level and not self._can_sleep:
            raise Unsupported("sleep is off: set enable_sleep_mode (--enable-sleep-mode)")
        check_sleep(level, self._executor.sleeper, has_stores=bool(self._loop.memory.connectors))

        def begin(done: Done) -> None:
            def then(error: JpagedError | None) -> None:
                if error is None and level:
                    self._pins.clear()
                    error = self._loop.sleep(level)
                done(error)

            self._stays_paused = True
            self._loop.pause(mode, then)

        self._in_flight.refuse("" if mode == "keep" else ASLEEP)
        return self._run_command(begin)

    def wake_up(self, tags: Collection[str] | None = None) -> Future[bool]:
        """Restore device memory after `sleep`, and continue once all of it is there.

        Args:
            tags: "weights", "kv_cache" and "scheduling", which names no memory; None for all.

        Returns:
            a future: True if the engine runs again.

        Raises:
            InvalidArgument: a tag is unknown.
        """
        wanted = check_tags(tags)
        is_awake: Future[bool] = Future()
        is_awake.set_running_or_notify_cancel()

        def wake(done: Done) -> None:
            error = self._loop.wake_up(wanted)
            if error is None and not self._loop.asleep:
                self._stays_paused = False
                self._in_flight.refuse("")
            done(error)

        def finish(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                is_awake.set_exception(error)
            else:
                is_awake.set_result(not self._loop.asleep)

        self._run_command(wake).add_done_callback(finish)
        return is_awake

    def update_weights(
        self, weights: object, mode: PauseMode = "keep", version: str | int | None = None
    ) -> Future[str]:
        """Replace the weights between two steps.

        Args:
            weights: what `Sleeper.check_update` accepts.
            mode: as for `pause`; requests that are kept are recomputed from their tokens. If generation is paused, it
                stays paused.
            version: name of the new weights; None counts the updates.

        Returns:
            the version, once requests run with the new weights; or an error, after which the weights are asleep unless
            nothing was changed.

        Raises:
            InvalidArgument: the weights are not of this model, or the mode or the version is invalid.
            Unsupported: the executor cannot replace its weights, or an option does not allow that.
            Unavailable: another update runs.
        """
        return update_replicas([self], weights, mode, version)

    def check_weights(self, weights: object) -> None:
        """Check names, shapes and types for `update_weights`, of which nothing else is read; raise as it does."""
        self.open_update(weights).close()

    def open_update(self, weights: object) -> WeightUpdate:
        """Check weights for `update_weights`."""
        sleeper = self._executor.sleeper
        if sleeper is None:
            raise Unsupported("update_weights: is not supported with several processes, a draft model or EPLB")
        if self._unsupported_update:
            raise Unsupported(f"update_weights: is not supported with {self._unsupported_update}")
        return sleeper.check_update(weights)

    def lock_update(self) -> None:
        """Let no other update begin until `end_update` is done.

        Raises:
            Unavailable: one runs.
        """
        if not self._update_lock.acquire(blocking=False):
            raise Unavailable("another update of the weights is running: try again")

    def unlock_update(self) -> None:
        """Let other updates begin."""
        self._update_lock.release()

    def begin_update(self, mode: PauseMode) -> Future[None]:
        """Pause generation for an update."""

        def begin(done: Done) -> None:
            self._stays_paused = self._loop.is_paused
            if not self._stays_paused and mode != "keep":
                self._in_flight.refuse(UPDATING)
            self._loop.pause(mode, done)

        return self._run_command(begin)

    def apply_update(self, update: WeightUpdate, version: str | None) -> Future[None]:
        """Replace the weights during a pause."""

        def apply(done: Done) -> None:
            was_asleep = bool(self._loop.asleep)
            self._pins.clear()
            error = self._loop.update_weights(update, version)
            if error is None and was_asleep and not self._loop.asleep:
                self._in_flight.refuse("")
            done(error)

        return self._run_command(apply)

    def end_update(self, num_updates: int, *, must_discard: bool) -> Future[None]:
        """End an update: discard the weights because another replica has none, or resume unless it is paused.

        Args:
            num_updates: the maximum over the replicas, from which all continue to count.
        """

        def end(done: Done) -> None:
            if must_discard:
                self._loop.discard_weights()
                self._loop.num_updates = num_updates
            if self._loop.asleep:
                self._in_flight.refuse(ASLEEP)
            elif not self._stays_paused and self._loop.resume() is None:
                self._in_flight.refuse("")
            done(None)

        ended = self._run_command(end)
        ended.add_done_callback(lambda _: self.unlock_update())
        return ended

    @property
    def weight_version(self) -> str:
        """Version of the weights: "0" at first."""
        return self._loop.weight_version

    @property
    def num_weight_updates(self) -> int:
        """Number of times that the weights were replaced."""
        return self._loop.num_updates

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`, or `sleep` and `wake_up`."""
        return self._loop.is_paused

    @property
    def asleep(self) -> frozenset[SleepTag]:
        """Device memory that is released."""
        return frozenset(self._loop.asleep)

    @property
    def sleep_level(self) -> int:
        """Level of the sleep that released device memory; 0 if none is."""
        return self._loop.sleep_level

    def _run_command(self, command: Callable[[Done], None]) -> Future[None]:
        """Run a command on the engine thread, which calls its argument when it is done, then or later.

        Returns:
            a future that is done then; it has Unavailable if the engine has ended.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def finish(posted: Future[None]) -> None:
            if posted.cancelled():
                future.set_exception(Unavailable("the engine has ended"))
            elif (error := posted.exception()) is not None:
                future.set_exception(error)

        def done(error: JpagedError | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(None)

        self.call_soon(lambda: command(done)).add_done_callback(finish)
        return future

    def call_soon(self, command: Callable[[], None]) -> Future[None]:
        """Run a command on the engine thread before the next step; any thread may call this.

        Returns:
            a future that is done after the command; it is cancelled, and the command never runs, if the loop has ended.
        """
        future: Future[None] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                command()
            except Exception as error:
                future.set_exception(error)
                raise
            future.set_result(None)

        self._thread.call_soon(run)
        if self._thread.has_ended:
            future.cancel()
        return future

    def load(self) -> EngineLoad:
        """Return a snapshot of the last step's counters."""
        executor, loop = self._executor, self._loop
        return loop.stats.snapshot(executor.num_compiles_after_warm_up, loop.stall_detector, executor.expert_stats)

    def replica_loads(self) -> tuple[EngineLoad, ...]:
        """Return the load of each replica: here of the only one."""
        return (self.load(),)

    def histogram(self, name: str) -> HistogramSnapshot:
        """Return a distribution so far, by one of the names in `jpaged.server_load.DISTRIBUTIONS`."""
        return self._loop.stats.histogram(name)

    def num_ended_by_reason(self) -> dict[str, int]:
        """Return the number of ended requests by reason: stop, length, abort (or client gone), deadline, error."""
        return self._loop.stats.num_ended()

    def start(self, on_failure: Callable[[Exception], None] | None = None) -> None:
        """Run the loop in its own thread until `stop`.

        Args:
            on_failure: called on that thread with the error that ended the loop; by then no request is accepted.
        """
        self._thread.start(on_failure)

    def fail(self, error: Exception, *, hangs: bool = False) -> None:
        """End the loop as an internal fault would, because another part of the server has failed.

        Args:
            hangs: the executor may never return: `stop` does not wait for it and does not release its resources.
        """
        self._thread.fail(error, hangs=hangs)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; wait for those in flight and for pending writes of connectors.

        Returns:
            False if either was not done in time.
        """
        until_s = time.monotonic() + timeout_s
        self._in_flight.close()
        self._thread.call_soon(self._loop.end_pause)
        if not self._in_flight.wait_idle(timeout_s):
            return False
        return not self._loop.memory.connectors or self._thread.flush_connectors(until_s)

    def stop(self) -> None:
        """Stop the loop. Requests in flight get Unavailable."""
        self._in_flight.close()
        if self._thread.stop():
            for connector in self._loop.memory.connectors:
                connector.close()
            self._executor.shutdown()
        if self.prefixes is not None:
            self.prefixes.changes.close()

    def step(self) -> bool:
        """Run one iteration. Return False if there was nothing to do and nothing is pending."""
        did_something = self._thread.step()
        if did_something:
            self._thread.await_tiers()
        return did_something

    def check(self) -> None:
        """Raise InternalError if a block is lost, shared by mistake, or free and in use."""
        self._loop.check()


def update_replicas(
    engines: Sequence[Engine],
    weights: object,
    mode: PauseMode,
    version: str | int | None,
    forget_pins: Callable[[], None] = lambda: None,
) -> Future[str]:
    """Replace the weights of all replicas while none of them runs a step; see `Engine.update_weights`.

    check all | pause all | replace all | resume all       an error in one replica: all discard their weights

    Args:
        forget_pins: called when all are paused, before they drop their pinned prefixes.
    """
    check_mode(mode)
    named = check_version(version)
    if not isinstance(weights, str | os.PathLike | Mapping) and isinstance(weights, Iterable):
        weights = list(weights)  # of an iterator, for every replica
    updates: list[WeightUpdate] = []
    result: Future[str] = Future()
    result.set_running_or_notify_cancel()

    def close() -> None:
        for update in updates:
            update.close()

    def end(error: BaseException | None) -> None:
        close()
        changed = [engine.num_weight_updates != count or "weights" in engine.asleep for engine, count in before]
        must_discard = error is not None and any(changed)
        num_updates = max(engine.num_weight_updates for engine in engines)
        ends = [engine.end_update(num_updates, must_discard=must_discard) for engine in engines]

        def finish() -> None:
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(engines[0].weight_version)

        when_all_are_done(ends, finish)

    def first_error(parts: Sequence[Future[None]]) -> BaseException | None:
        return next((error for part in parts if (error := part.exception()) is not None), None)

    def apply() -> None:
        if (error := first_error(pauses)) is not None:
            end(error)
            return
        forget_pins()
        parts = [engine.apply_update(update, named) for engine, update in zip(engines, updates, strict=True)]
        when_all_are_done(parts, lambda: end(first_error(parts)))

    locked: list[Engine] = []
    try:
        for engine in engines:
            updates.append(engine.open_update(weights))
        for engine in engines:
            engine.lock_update()
            locked.append(engine)
    except BaseException:
        for engine in locked:
            engine.unlock_update()
        close()
        raise
    before = [(engine, engine.num_weight_updates) for engine in engines]
    pauses = [engine.begin_update(mode) for engine in engines]
    when_all_are_done(pauses, apply)
    return result


_PartT = TypeVar("_PartT")
_ResultT = TypeVar("_ResultT")


def gather(parts: Sequence[Future[_PartT]], combine: Callable[[Iterable[_PartT]], _ResultT]) -> Future[_ResultT]:
    """Return a future with the combined results, or with the first error."""
    future: Future[_ResultT] = Future()
    future.set_running_or_notify_cancel()

    def all_are_done() -> None:
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            future.set_exception(errors[0])
        else:
            future.set_result(combine([part.result() for part in parts]))

    when_all_are_done(parts, all_are_done)
    return future


def when_all_are_done(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    """Call a function after all futures are done."""
    if futures:
        futures[0].add_done_callback(lambda _: when_all_are_done(futures[1:], then))
    else:
        then()
