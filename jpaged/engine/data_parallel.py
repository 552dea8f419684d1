"""Data-parallel engine: replicas with separate copies of the model, pools and threads, and the interface of one engine.

    submit ──> Router ──> Engine 0   devices 0, 1
                     └──> Engine 1   devices 2, 3        if one fails, all end with that error

It has the interface of `Engine`, which documents the methods. Ids are unique and limits hold across replicas, a prefix
is pinned in every replica or in none, and loads and histograms are sums.

Replica selection: by cached prefix, then by load, then by index.

    prefix   leading blocks of the prompt that are cached there, or belong to a prompt that is in flight there
    load     of the requests in flight: their rows over max_num_seqs, and their tokens over the pool's slots, added up

The prefix counts only for replicas whose load is at most MAX_LOAD_IMBALANCE above the least: otherwise a prefix that
all requests share would keep one replica busy and the others idle. The rule is a deterministic function of what is
cached and in flight. It affects where a request runs, never its results.

Dispatch of requests to one of several engines, and reservations for requests that come later.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jpaged.engine.core import PauseMode
from jpaged.engine.engine import Engine, gather, update_replicas, when_all_are_done
from jpaged.engine.executor import Geometry, SleepTag
from jpaged.engine.inspector import PoolInspector
from jpaged.engine.kv_cache.blocks import BlockHash, block_keys, hash_blocks, root_block_hash
from jpaged.engine.kv_cache.offload.transfer import KVTransfer
from jpaged.engine.kv_cache.pinned import Pin
from jpaged.engine.kv_cache.prefix_cache import PrefixCacheManager
from jpaged.engine.sequence import OutputCallback
from jpaged.engine.stats import HistogramSnapshot
from jpaged.errors import AlreadyExists, InternalError, QueueFull, Unavailable
from jpaged.server_load import EngineLoad, total_load
from jpaged.types import LoadedAdapter, OutputEvent, PackedTokens, Request

MAX_LOAD_IMBALANCE = 0.5
"""Load above the least loaded replica, in replicas, up to which prefix affinity counts."""
MAX_ROUTED_BLOCKS = 256
"""Leading blocks of a prompt that are compared: a hash takes 3 us on the caller's thread, which others need."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The replica of one request, and its share of the load.

    Attributes:
        replica: index.
        cost: load in units of one row's slot: max_num_seqs x the pool's slots is a whole replica.
        keys: block hashes of the prompt's leading blocks.
    """

    replica: int
    cost: int
    keys: tuple[BlockHash, ...]


class ReplicaRouter:
    """Tracks the requests in flight on each replica. Callers hold a lock.

    Args:
        sources: the prefix caches of the replicas, in order; None without a prefix cache.
        geometry: geometry of each replica.
    """

    def __init__(self, sources: Sequence[PrefixCacheManager | None], geometry: Geometry) -> None:
        self._sources = sources
        self._block_size = geometry.block_size
        self._num_rows = geometry.max_num_seqs
        self._num_slots = geometry.num_blocks * geometry.block_size
        self._loads = [0] * len(sources)
        self._routes: dict[str, Route] = {}
        # Number of prompts in flight per block: it is cached once computed, and stays until they end.
        self._in_flight: list[Counter[BlockHash]] = [Counter() for _ in sources]

    def routes(self, request: Request) -> list[Route]:
        """Return a route for every replica, best first."""
        keys, cost = self._keys(request), self._cost(request)
        return [Route(replica, cost, keys) for replica in self._ranked(keys)]

    def best(self, keys: Sequence[BlockHash]) -> int:
        """Return the replica that a prompt with these leading blocks would be sent to first."""
        return self._ranked(keys[:MAX_ROUTED_BLOCKS])[0]

    def _ranked(self, keys: Sequence[BlockHash]) -> list[int]:
        most = min(self._loads) + MAX_LOAD_IMBALANCE * self._num_rows * self._num_slots

        def rank(replica: int) -> tuple[int, int, int]:
            load = self._loads[replica]
            return (-self._num_leading(replica, keys) if load <= most else 0, load, replica)

        return sorted(range(len(self._sources)), key=rank)

    def get_route(self, request_id: str) -> Route | None:
        """Return the route of a request in flight, or None."""
        return self._routes.get(request_id)

    def enter(self, request_id: str, route: Route) -> None:
        """Record a request as in flight."""
        self._routes[request_id] = route
        self._loads[route.replica] += route.cost
        self._in_flight[route.replica].update(route.keys)

    def leave(self, request_id: str, route: Route) -> None:
        """Remove a request that is no longer in flight; no-op if it was dropped before."""
        if self._routes.get(request_id) is not route:
            return
        del self._routes[request_id]
        self._loads[route.replica] -= route.cost
        counts = self._in_flight[route.replica]
        for key in route.keys:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    def _num_leading(self, replica: int, keys: Sequence[BlockHash]) -> int:
        source, in_flight = self._sources[replica], self._in_flight[replica]
        for count, key in enumerate(keys):
            if key not in in_flight and (source is None or not source.has_prefix(key)):
                return count
        return len(keys)

    def _keys(self, request: Request) -> tuple[BlockHash, ...]:
        """Return the hashes of the blocks that a replica could have cached.

        The last token of a prompt always runs, so its block does not count.
        """
        if not request.sampling.use_prefix_cache:
            return ()
        token_ids, size = request.prompt_token_ids, self._block_size
        source = self._sources[0]
        num_cacheable = 0 if source is None else source.num_cacheable_blocks(len(token_ids))
        num_blocks = min(num_cacheable, (len(token_ids) - 1) // size, MAX_ROUTED_BLOCKS)
        weights = b"" if source is None else source.weights
        root = root_block_hash(request.sampling.cache_salt, request.cache_tenant, request.adapter_digest, weights)
        if isinstance(token_ids, PackedTokens) and not request.block_digests:
            return tuple(hash_blocks(root, token_ids.packed[: 4 * num_blocks * size], size))
        return tuple(block_keys(root, token_ids[: num_blocks * size], size, request.block_digests))

    def _cost(self, request: Request) -> int:
        sampling = request.sampling
        num_rows = sampling.beam_width or sampling.num_samples
        num_tokens = len(request.prompt_token_ids) + num_rows * sampling.max_num_tokens
        return num_rows * self._num_slots + num_tokens * self._num_rows


class ReplicaDispatcher:
    """Tracks which engine has which request. Thread-safe.

    Args:
        lock: guards the router. Engines take their locks inside it, and never call back while they hold them.
    """

    def __init__(self, engines: Sequence[Engine], router: ReplicaRouter, lock: threading.Lock) -> None:
        self._engines = engines
        self._router = router
        self._lock = lock
        self._kept: dict[str, Route] = {}  # reservations of requests that are submitted later

    def submit(self, request: Request, sink: OutputCallback) -> None:
        """Submit a request to the engine with its reservation, or else to the first engine that accepts it.

        Raises:
            the errors of `DataParallelEngine.submit`.
        """

        def pass_on_from(route: Route) -> OutputCallback:
            def pass_on(event: OutputEvent) -> None:
                if event.is_last:
                    with self._lock:
                        self._router.leave(event.request_id, route)
                sink(event)

            return pass_on

        with self._lock:
            kept = self._kept.pop(request.request_id, None)
            if kept is None:
                self._enter(request, lambda engine, route: engine.submit(request, pass_on_from(route)))
                return
            self._router.leave(request.request_id, kept)
            self._engines[kept.replica].submit(request, pass_on_from(kept))
            self._router.enter(request.request_id, kept)

    def reserve_slot(self, request: Request) -> KVTransfer:
        """Reserve a place at the engine that a request will run on; see `Engine.reserve_slot`."""
        with self._lock:
            route = self._enter(request, lambda engine, _: engine.reserve_slot(request))
            self._kept[request.request_id] = route
            return self._engines[route.replica].kv_transfer

    def get_engine(self, request_id: str) -> Engine | None:
        """Return the engine on which a request is in flight, or None."""
        with self._lock:
            route = self._router.get_route(request_id)
        return None if route is None else self._engines[route.replica]

    def leave(self, request_id: str) -> Engine | None:
        """Remove a request, or its reservation. Return the engine that had it, or None."""
        with self._lock:
            route = self._router.get_route(request_id)
            self._kept.pop(request_id, None)
            if route is None:
                return None
            self._router.leave(request_id, route)
        return self._engines[route.replica]

    def _enter(self, request: Request, take: Callable[[Engine, Route], object]) -> Route:
        request_id, refusals = request.request_id, []
        # A dropped request stays in flight on its engine until the next step there.
        is_routed = self._router.get_route(request_id) is not None
        if is_routed or any(request_id in engine.in_flight for engine in self._engines):
            raise AlreadyExists(f"request {request_id!r} is in flight")
        for route in self._router.routes(request):
            try:
                take(self._engines[route.replica], route)
            except QueueFull as refusal:
                refusals.append(refusal)
                continue
            self._router.enter(request_id, route)
            return route
        # Each engine was at its limit when it refused; only the engines have the exact counts.
        limit = sum(engine.max_num_in_flight for engine in self._engines)
        raise QueueFull(
            f"{limit} requests are in flight, the limit of {len(self._engines)} replicas (pinning a prefix counts as "
            "one request on each)",
            retry_after_s=min(refusal.retry_after_s for refusal in refusals),
        )


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
        self.inspector = PoolInspector(one for engine in engines for one in engine.inspector.each)
        self.max_num_in_flight = sum(engine.max_num_in_flight for engine in engines)
        router = ReplicaRouter([engine.prefixes for engine in engines], self.geometry)
        # Guards the fields below; engines take their locks inside it, and never call back while they hold them.
        self._lock = threading.Lock()
        self._pinning: set[Pin] = set()
        self._pinned: set[Pin] = set()
        self._entrance = ReplicaDispatcher(self._engines, router, self._lock)
        self.reserve_slot: Callable[[Request], KVTransfer] = self._entrance.reserve_slot

        def place(keys: Sequence[BlockHash]) -> int:
            with self._lock:
                return router.best(keys)

        self.kv_transfer = KVTransfer((one for engine in engines for one in engine.kv_transfer.each), place)

    @property
    def geometry(self) -> Geometry:
        """The geometry of each replica, which bounds one request."""
        return self._engines[0].geometry

    @property
    def is_full(self) -> bool:
        return all(engine.is_full for engine in self._engines)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: OutputCallback) -> None:
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
        engine = self._entrance.get_engine(request_id)
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

        when_all_are_done(parts, all_are_done)
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
        return gather([engine.reset_prefix_cache() for engine in self._engines], sum)

    def pause(self, mode: PauseMode = "abort") -> Future[None]:
        """Pause every replica; see `Engine.pause`."""
        return gather([engine.pause(mode) for engine in self._engines], lambda results: None)

    def resume(self) -> Future[None]:
        """Resume every replica; see `Engine.resume`. If a sleep waits for some of them, the others wake up."""
        is_pending = not all(engine.asleep for engine in self._engines)
        parts: list[Future[Any]] = [
            engine.wake_up() if is_pending and engine.asleep else engine.resume() for engine in self._engines
        ]
        return gather(parts, lambda results: None)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]:
        """Release the device memory of every replica; see `Engine.sleep`."""

        def finish(_: Iterable[None]) -> None:
            if level:
                self._forget_pins()

        return gather([engine.sleep(level, mode) for engine in self._engines], finish)

    def wake_up(self, tags: Collection[str] | None = None) -> Future[bool]:
        """Restore the device memory of every replica; see `Engine.wake_up`."""
        return gather([engine.wake_up(tags) for engine in self._engines], all)

    def update_weights(
        self, weights: object, mode: PauseMode = "keep", version: str | int | None = None
    ) -> Future[str]:
        """Replace the weights of all replicas while none runs a step; see `Engine.update_weights`."""
        return update_replicas(self._engines, weights, mode, version, self._forget_pins)

    def check_weights(self, weights: object) -> None:
        """See `Engine.check_weights`."""
        self._engines[0].check_weights(weights)

    def _forget_pins(self) -> None:
        """Forget the names of pinned prefixes, whose blocks the replicas drop."""
        with self._lock:
            self._pinned.clear()

    @property
    def weight_version(self) -> str:
        return self._engines[0].weight_version

    @property
    def num_weight_updates(self) -> int:
        return self._engines[0].num_weight_updates

    @property
    def is_paused(self) -> bool:
        return any(engine.is_paused for engine in self._engines)

    @property
    def asleep(self) -> frozenset[SleepTag]:
        return frozenset().union(*(engine.asleep for engine in self._engines))

    @property
    def sleep_level(self) -> int:
        return max(engine.sleep_level for engine in self._engines)

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

        when_all_are_done(parts, all_are_done)
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
            failure = InternalError(f"replica {index} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for other in self._engines[:index] + self._engines[index + 1 :]:
                other.fail(failure)


def shares(total: int, num_parts: int) -> list[int]:
    """Divide a limit evenly; the first parts get the remainder."""
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]
