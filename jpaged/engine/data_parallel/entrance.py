"""Dispatch of requests to one of several engines, and reservations for requests that come later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from jpaged.engine.data_parallel.routing import Route, Router
from jpaged.engine.engine import Engine
from jpaged.engine.kv.tiers.travels import Travels
from jpaged.engine.sequence import Sink
from jpaged.errors import AlreadyExists, QueueFull
from jpaged.types import OutputEvent, Request


class Entrance:
    """Tracks which engine has which request. Thread-safe.

    Args:
        lock: guards the router. Engines take their locks inside it, and never call back while they hold them.
    """

    def __init__(self, engines: Sequence[Engine], router: Router, lock: threading.Lock) -> None:
        self._engines = engines
        self._router = router
        self._lock = lock
        self._kept: dict[str, Route] = {}  # reservations of requests that are submitted later

    def submit(self, request: Request, sink: Sink) -> None:
        """Submit a request to the engine with its reservation, or else to the first engine that accepts it.

        Raises:
            the errors of `DataParallelEngine.submit`.
        """

        def pass_on_from(route: Route) -> Sink:
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

    def keep_place(self, request: Request) -> Travels:
        """Reserve a place at the engine that a request will run on; see `Engine.keep_place`."""
        with self._lock:
            route = self._enter(request, lambda engine, _: engine.keep_place(request))
            self._kept[request.request_id] = route
            return self._engines[route.replica].travels

    def engine_of(self, request_id: str) -> Engine | None:
        """Return the engine on which a request is in flight, or None."""
        with self._lock:
            route = self._router.route_of(request_id)
        return None if route is None else self._engines[route.replica]

    def leave(self, request_id: str) -> Engine | None:
        """Remove a request, or its reservation. Return the engine that had it, or None."""
        with self._lock:
            route = self._router.route_of(request_id)
            self._kept.pop(request_id, None)
            if route is None:
                return None
            self._router.leave(request_id, route)
        return self._engines[route.replica]

    def _enter(self, request: Request, take: Callable[[Engine, Route], object]) -> Route:
        request_id, refusals = request.request_id, []
        # A dropped request stays in flight on its engine until the next step there.
        is_routed = self._router.route_of(request_id) is not None
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
