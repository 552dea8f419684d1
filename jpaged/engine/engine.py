"""The engine's face: what any thread may ask of it, and the thread that its loop runs on."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.executor import Executor, Geometry
from jpaged.engine.garbage import collected_between_steps
from jpaged.engine.grammars import MakeMasks
from jpaged.engine.kv.pinned import PinnedPrefixes, pin_limit
from jpaged.engine.kv.tiers.disk import Disk, DiskTier
from jpaged.engine.kv.tiers.travels import Travel, Travels
from jpaged.engine.loop import Clock, EngineLoop
from jpaged.engine.reach import KeyLengths
from jpaged.engine.sequence import Sink
from jpaged.engine.stats import HistogramSnapshot
from jpaged.engine.tokenizer import Tokenizer
from jpaged.engine.watching.eyes import Eye, Eyes
from jpaged.errors import InternalError, Unavailable
from jpaged.load import EngineLoad
from jpaged.types import FinishReason, LoadedAdapter, Request

logger = logging.getLogger(__name__)

_JOIN_S, _ABANDONED_JOIN_S = 0.2, 1.0
"""How long to wait for the end of a loop that may hang in its executor."""
_LOOK_S = 0.005
THREAD_NAME = "jpaged-engine"
_ANY_LENGTH = KeyLengths()


class LoopThread:
    """Runs a loop until it is stopped or fails; without `start` whoever calls `step` is the thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._on_failure: Callable[[Exception], None] | None = None
        self.has_ended = False
        """Commands that are added now never run; set before the last look at the inbox."""

    def ask(self, command: Callable[[], None]) -> None:
        """Has something done on the loop's thread before its next step; any thread may ask."""
        self._inbox.put(command)

    def start(self, on_failure: Callable[[Exception], None] | None) -> None:
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Does what was asked for, and one iteration of the loop."""
        self._drain_inbox()
        return self._loop.step()

    def fail(self, error: Exception, *, hangs: bool) -> None:
        """Ends the loop as a fault of its own would; if it hangs, `stop` does not wait for it."""
        self._is_abandoned = self._is_abandoned or hangs
        self.ask(lambda: self._give_up(error))

    def stop(self) -> bool:
        """Ends the loop and what it has in flight; False when it hangs, and what it holds is left to it."""
        self.ask(self._stopping.set)
        if self._thread is not None:
            while self._thread.is_alive() and not self._is_abandoned:  # somebody may say so meanwhile
                self._thread.join(_JOIN_S)
            self._thread.join(_ABANDONED_JOIN_S)
            if self._thread.is_alive():
                return False
        self._end(Unavailable("the server is shutting down"))
        return True

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with collected_between_steps:
                    while self.step() and not self._stopping.is_set():
                        self._await_arrivals()
                if not self._stopping.is_set():  # which the step may have read from the inbox
                    self._loop.check()
                    self._inbox.get()()
        except Unavailable as error:  # from outside, or of several processes one is lost: nothing here went wrong
            self._fail(error)
        except Exception as error:  # the top of the loop: whatever happened, every stream must hear of it
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
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _await_arrivals(self) -> None:
        """While the device runs several steps, waits for what may be asked for before the next are decided."""
        seconds = self._loop.spare_s
        if seconds > 0:
            try:
                self._inbox.get(timeout=seconds)()
            except queue.Empty:
                """Nobody came."""

    def flush(self, disk: DiskTier, until_s: float) -> bool:
        """Has written what memory has and disk has not; False when that is not over at a time (of `time.monotonic`)."""
        if self._thread is not None and not self._thread.is_alive():
            return True
        is_over = threading.Event()

        def look() -> None:
            if disk.flush():
                is_over.set()

        while not is_over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            self.ask(look)
            if self._thread is None:
                self.step()
            is_over.wait(min(left_s, _LOOK_S))
        return is_over.is_set()

    def await_tiers(self) -> None:
        """Waits a moment where nothing runs and blocks are on their way between tiers of memory."""
        if self._loop.awaits_tiers and not self._loop.scheduler.queues.has_work:
            self._await_arrivals()

    def _give_up(self, error: Exception) -> None:
        if self._loop.in_flight.failure is None and not self._stopping.is_set():
            raise error


class Engine:
    """Runs requests to their end.

    Callers' methods may be called from any thread; events come from the engine's own: the thread that `start` makes, or
    whoever calls `step`.

    Attributes:
        clock: what deadlines are read off.
        max_num_in_flight: requests that are accepted at one time: those that run, and the queue in front of them.
        in_flight: ids of requests that were accepted and have not ended.
        prefixes: what may be asked of cached prefixes; None where nothing is cached.
        eyes: what may be asked about the pool.
        travels: what may be asked of prefixes that come from other servers, and go there.
        keep_place: keeps a place for a request whose prompt is computed elsewhere, until it is submitted, or dropped;
            says where the prompt's blocks have to arrive, and raises what `submit` does.

    Args:
        config: scheduler, cache and `max_pinned_blocks` are read; sizes that are left out are the executor's.
        lengths: up to which keys are what they are.
        eos_token_ids: every token that ends a sequence of this model.
        make_masks: makes what fills masks for grammars; None where requests have none.
        disk: where prefixes are kept that outlive the engine, which is the engine's until `stop`; None is nowhere.
    """

    def __init__(
        self,
        executor: Executor[Any, Any],
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        lengths: KeyLengths = _ANY_LENGTH,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Clock = time.monotonic,
        make_masks: MakeMasks | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._executor = executor
        self._loop = EngineLoop(
            executor,
            tokenizer,
            config,
            lengths=lengths,
            eos_token_ids=eos_token_ids,
            clock=clock,
            make_masks=make_masks,
            disk=disk,
        )
        self._thread = LoopThread(self._loop)
        self._in_flight = self._loop.in_flight
        self.in_flight: Container[str] = self._in_flight
        self.clock = clock
        self.max_num_in_flight = self._in_flight.max_num
        self.prefixes = self._loop.memory.prefixes
        geometry = executor.geometry
        self._pins = PinnedPrefixes(
            self.prefixes,
            geometry,
            pin_limit(config.server.max_pinned_blocks, geometry),
            submit=self.submit,
            ask=self._thread.ask,
            groups=self._loop.groups,
            limit=lambda: self._loop.memory.limit,
        )
        loop = self._loop
        self.travels = Travels([Travel(loop.memory, geometry, executor.host_blocks, self._thread.ask)])

        def keep_place(request: Request) -> Travels:
            self._in_flight.expect(request.request_id, loop.stats.seconds_per_request)
            return self.travels

        self.keep_place: Callable[[Request], Travels] = keep_place
        self.eyes = Eyes([Eye(loop.watch, loop.memory, loop.stats, loop.groups, geometry, self._thread.ask)])

    @property
    def geometry(self) -> Geometry:
        return self._executor.geometry

    @property
    def failure(self) -> Exception | None:
        """The error that ended the loop; None while there is none."""
        return self._in_flight.failure

    @property
    def is_full(self) -> bool:
        """No further request is taken. A prefix that is being pinned counts, and until a step what was dropped."""
        return len(self._in_flight) >= self.max_num_in_flight

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request; from now on it ends in exactly one event with `is_last`, on the engine's thread.

        Raises:
            Unavailable: the engine is draining, stopped or failed.
            AlreadyExists: a request with this id is in flight.
            QueueFull: too many requests wait.
        """

        def ask() -> None:
            arrival_s = self.clock()
            self._thread.ask(lambda: self._loop.arrive(request, sink, arrival_s))

        self._in_flight.enter(request.request_id, ask, self._loop.stats.seconds_per_request)

    def abort(self, request_id: str) -> bool:
        """Ends a request with finish reason ABORT; False when there is none of that id."""
        is_known = request_id in self._in_flight
        if is_known:
            self._thread.ask(lambda: self._loop.end_early(request_id, FinishReason.ABORT))
        return is_known

    def drop(self, request_id: str) -> None:
        """Forgets a request that nobody listens to any more: no further event, its blocks free by the next step."""
        dropped_s = self.clock()
        self._in_flight.give_up(request_id)
        self._thread.ask(lambda: self._loop.forget(request_id, dropped_s))

    def pin_prefix(
        self,
        name: str,
        token_ids: Iterable[int],
        salt: str = "",
        tenant: str = "",
        adapter: LoadedAdapter | None = None,
    ) -> Future[int]:
        """Computes a prefix and keeps its full blocks in the pool until `unpin_prefix`.

        Args:
            salt, tenant: cache_salt and cache_tenant of the requests that may use it; the name is the tenant's, too.
            adapter: theirs as well.

        Returns:
            the number of tokens that are pinned, once they are; or the error: AlreadyExists for the name,
            InvalidArgument where there is nothing to pin or no room, Unsupported without a prefix cache, and whatever
            `submit` may raise.
        """
        return self._pins.pin((tenant, name), tuple(token_ids), salt, adapter)

    def unpin_prefix(self, name: str, tenant: str = "") -> bool:
        """Lets a pinned prefix be evicted again; False when the tenant has pinned none of that name."""
        return self._pins.unpin((tenant, name))

    def reset_prefix_cache(self) -> Future[int]:
        """Forgets the prefixes that nobody holds before the next step: what is cached of earlier requests is gone.

        Blocks of requests in flight and of pinned prefixes stay known.

        Returns:
            the number of blocks, of the device and of host memory, whose prefixes were forgotten, once they are.
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        self._thread.ask(lambda: future.set_result(0 if self.prefixes is None else self.prefixes.reset()))
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

        self._thread.ask(run)
        if self._thread.has_ended:
            future.cancel()
        return future

    def load(self) -> EngineLoad:
        """A snapshot of the last step's counts."""
        return self._loop.stats.snapshot(self._executor.num_compiles_after_warm_up, self._loop.pulse)

    def replica_loads(self) -> tuple[EngineLoad, ...]:
        """The load of each replica: here of the one that there is."""
        return (self.load(),)

    def histogram(self, name: str) -> HistogramSnapshot:
        """Distribution so far, by one of the names in `jpaged.load.DISTRIBUTIONS`."""
        return self._loop.stats.histogram(name)

    def num_ended_by_reason(self) -> dict[str, int]:
        """Requests that have ended: stop, length, abort (also when the caller went away), deadline, error."""
        return self._loop.stats.num_ended()

    def start(self, on_failure: Callable[[Exception], None] | None = None) -> None:
        """Runs the loop in a thread of its own until `stop`.

        Args:
            on_failure: told, on that thread, what ended the loop; by then nothing is accepted any more.
        """
        self._thread.start(on_failure)

    def fail(self, error: Exception, *, hangs: bool = False) -> None:
        """Ends the loop as a fault of its own would: for when what the engine is a part of has failed.

        Args:
            hangs: the executor may never return: `stop` does not wait for it, and leaves it what it holds.
        """
        self._thread.fail(error, hangs=hangs)

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those in flight, and for what is to be kept on disk.

        Returns:
            False when some of either were left at the end of the time.
        """
        until_s = time.monotonic() + timeout_s
        self._in_flight.close()
        if not self._in_flight.wait_idle(timeout_s):
            return False
        disk = self._loop.memory.disk
        return disk is None or self._thread.flush(disk, until_s)

    def stop(self) -> None:
        """Ends the loop. Requests that are still in flight get Unavailable."""
        self._in_flight.close()
        if self._thread.stop():
            if self._loop.memory.disk is not None:
                self._loop.memory.disk.close()
            self._executor.shutdown()
        if self.prefixes is not None:
            self.prefixes.changes.close()

    def step(self) -> bool:
        """One iteration; False when there was nothing to do and nothing waits."""
        did_something = self._thread.step()
        if did_something:
            self._thread.await_tiers()
        return did_something

    def check(self) -> None:
        """Raises InternalError when a block is lost, shared by mistake, or free and in use."""
        self._loop.check()
