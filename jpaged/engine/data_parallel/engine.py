"""Data-parallel engine: replicas with separate copies of the model, pools and threads, and the interface of one engine.

    submit ──> Router ──> Engine 0   devices 0, 1
                     └──> Engine 1   devices 2, 3        if one fails, all end with that error

It has the interface of `Engine`, which documents the methods. Ids are unique and limits hold across replicas, a prefix
is pinned in every replica or in none, and loads and histograms are sums.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jpaged.engine.data_parallel.entrance import Entrance
from jpaged.engine.data_parallel.routing import Router
from jpaged.engine.engine import Engine
from jpaged.engine.executor import Geometry
from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.pinned import Pin
from jpaged.engine.kv.tiers.travels import Travels
from jpaged.engine.sequence import Sink
from jpaged.engine.stats import HistogramSnapshot
from jpaged.engine.watching.eyes import Eyes
from jpaged.errors import AlreadyExists, InternalError, Unavailable
from jpaged.load import EngineLoad, total_load
from jpaged.types import LoadedAdapter, Request


class DataParallelEngine:
    """Runs requests, each on one of several identical engines.

    Methods are thread-safe; a request's events come from that engine's thread. The queue limit is divided among the
    engines by their creator (`shares`): a full engine is skipped.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.failure: Exception | None = None
        self._engines = tuple(engines)
        buckets = self.geometry.buckets  # these grow while programs compile in the background, at different times
        alike = [dataclasses.replace(engine.geometry, buckets=buckets) for engine in engines]
        if any(one != alike[0] for one in alike):
            raise InternalError(f"replicas have different geometries: {alike}")
        self.clock = engines[0].clock
        self.eyes = Eyes(eye for engine in engines for eye in engine.eyes.each)
        self.max_num_in_flight = sum(engine.max_num_in_flight for engine in engines)
        router = Router([engine.prefixes for engine in engines], self.geometry)
        # Guards the fields below; engines take their locks inside it, and never call back while they hold them.
        self._lock = threading.Lock()
        self._pinning: set[Pin] = set()
        self._pinned: set[Pin] = set()
        self._entrance = Entrance(self._engines, router, self._lock)
        self.keep_place: Callable[[Request], Travels] = self._entrance.keep_place

        def place(keys: Sequence[Key]) -> int:
            with self._lock:
                return router.best(keys)

        self.travels = Travels((travel for engine in engines for travel in engine.travels.each), place)

    @property
    def geometry(self) -> Geometry:
        """The geometry of each replica, which bounds one request."""
        return self._engines[0].geometry

    @property
    def is_full(self) -> bool:
        return all(engine.is_full for engine in self._engines)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Submit a request to one of the engines; see `Engine.submit`.

        Raises:
            Unavailable: the engines are draining, stopped, or one has failed.
            AlreadyExists: a request with this id is in flight on any engine.
            QueueFull: too many requests wait at every engine.
        """
        if self.failure is not None:
            raise Unavailable("the engine has failed")
        self._entrance.submit(request, sink)

    def abort(self, request_id: str) -> bool:
        engine = self._entrance.engine_of(request_id)
        return engine is not None and engine.abort(request_id)

    def drop(self, request_id: str) -> None:
        engine = self._entrance.leave(request_id)
        if engine is not None:
            engine.drop(request_id)

    # --- pinned prefixes --------------------------------------------------------------------------------------------

    def pin_prefix(
        self,
        name: str,
        token_ids: Iterable[int],
        salt: str = "",
        tenant: str = "",
        adapter: LoadedAdapter | None = None,
    ) -> Future[int]:
        """Pin a prefix in every replica, or in none; see `Engine.pin_prefix`."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            pin = tenant, name
            is_taken = pin in self._pinning or pin in self._pinned
            if not is_taken:
                self._pinning.add(pin)
        if is_taken:
            future.set_exception(AlreadyExists(f"prefix {name!r} is pinned; unpin it, or choose another name"))
            return future
        token_ids = tuple(token_ids)
        parts = [engine.pin_prefix(name, token_ids, salt, tenant, adapter) for engine in self._engines]

        def all_are_done() -> None:
            """Unpin the prefix everywhere if one engine could not pin it."""
            errors = [error for part in parts if (error := part.exception()) is not None]
            if errors:
                for engine, part in zip(self._engines, parts, strict=True):
                    if part.exception() is None:
                        engine.unpin_prefix(name, tenant)
            with self._lock:
                self._pinning.discard(pin)
                if not errors:
                    self._pinned.add(pin)
            if errors:
                future.set_exception(errors[0])
            else:
                future.set_result(parts[0].result())

        _when_all_are_done(parts, all_are_done)
        return future

    def unpin_prefix(self, name: str, tenant: str = "") -> bool:
        with self._lock:
            is_pinned = (tenant, name) in self._pinned
            self._pinned.discard((tenant, name))
            if is_pinned:
                for engine in self._engines:
                    engine.unpin_prefix(name, tenant)
        return is_pinned

    def reset_prefix_cache(self) -> Future[int]:
        """Clear the prefix cache of every replica; see `Engine.reset_prefix_cache`."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        parts = [engine.reset_prefix_cache() for engine in self._engines]
        _when_all_are_done(parts, lambda: future.set_result(sum(part.result() for part in parts)))
        return future

    def call_soon(self, command: Callable[[], None]) -> Future[None]:
        """Run a command on the thread of every replica; see `Engine.call_soon`."""
        future: Future[None] = Future()
        parts = [engine.call_soon(command) for engine in self._engines]

        def all_are_done() -> None:
            errors = [error for part in parts if not part.cancelled() and (error := part.exception()) is not None]
            if errors:
                future.set_exception(errors[0])
            elif any(part.cancelled() for part in parts):
                future.cancel()
            else:
                future.set_result(None)

        _when_all_are_done(parts, all_are_done)
        return future

    # --- counts -----------------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        return total_load(self.replica_loads())

    def replica_loads(self) -> tuple[EngineLoad, ...]:
        return tuple(engine.load() for engine in self._engines)

    def histogram(self, name: str) -> HistogramSnapshot:
        return HistogramSnapshot.total([engine.histogram(name) for engine in self._engines])

    def num_ended_by_reason(self) -> dict[str, int]:
        counts = [engine.num_ended_by_reason() for engine in self._engines]
        return {reason: sum(count[reason] for count in counts) for reason in counts[0]}

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for index, engine in enumerate(self._engines):
            engine.start(functools.partial(self._note_failure, index))

    def step(self) -> bool:
        """Run one iteration of each engine in turn, on this thread. Return False if none had anything to do.

        With overlap, a replica's devices run its step while the host waits for those of other replicas.
        """
        did_something = [engine.step() for engine in self._engines]
        return any(did_something)

    def check(self) -> None:
        for engine in self._engines:
            engine.check()

    def drain(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        for engine in self._engines:
            engine.drain(0.0)
        return all(engine.drain(max(0.0, until_s - time.monotonic())) for engine in self._engines)

    def fail(self, error: Exception, *, hangs: bool = False) -> None:
        for engine in self._engines:
            engine.fail(error, hangs=hangs)

    def stop(self) -> None:
        self.drain(0.0)
        with ThreadPoolExecutor(len(self._engines), "jpaged-stop") as threads:  # stop concurrently: one may hang
            for stopped in [threads.submit(engine.stop) for engine in self._engines]:
                stopped.result()

    def _note_failure(self, index: int, error: Exception) -> None:
        with self._lock:
            is_first = self.failure is None
            if is_first:
                self.failure = error
        if is_first:
            told = InternalError(f"replica {index} failed: {type(error).__name__}: {error}")
            told.__cause__ = error
            for other in self._engines[:index] + self._engines[index + 1 :]:
                other.fail(told)


def shares(total: int, num_parts: int) -> list[int]:
    """Divide a limit evenly; the first parts get the remainder."""
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def _when_all_are_done(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    if futures:
        futures[0].add_done_callback(lambda _: _when_all_are_done(futures[1:], then))
    else:
        then()
