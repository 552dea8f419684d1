"""Lifecycle of a router: first the port, then its servers, then calls; at the end a drain and an exit code.

For "", "readiness" and each service, grpc.health.v1 answers SERVING while any server accepts calls, otherwise and
during a drain NOT_SERVING; for "liveness" it always answers SERVING. Metrics in Prometheus' format are computed per
scrape.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jpaged.access import authenticator as access
from jpaged.access.authenticator import Authenticator
from jpaged.client.channel import Tls
from jpaged.client.routing.retry import ResumePolicy
from jpaged.config import AccessOptions, ServerOptions
from jpaged.errors import InvalidArgument, QueueFull, Unavailable, get_reason
from jpaged.route.aggregate import AggregateCalls, Options, ReplicatedControl
from jpaged.route.fleet import BackendPool, RouterCounts
from jpaged.route.kv_event_index import KVEventIndex
from jpaged.route.methods import (
    SERVICES,
    WAYS,
    Handler,
    abort_with_error,
    forwarded_metadata,
    get_via,
    register,
    require_no_loop,
)
from jpaged.route.prefix_table import MAX_KNOWN_PREFIXES, PrefixTable
from jpaged.route.relay import Proxy
from jpaged.route.targets import BackendTargets
from jpaged.server.grpc_server import AuthInterceptor, bind, error_for, make_server
from jpaged.server.health import LIVENESS, READINESS, Health, HealthServicer, ProbeServer
from jpaged.telemetry.scrapes import ScrapeServer

_BY_TARGET = {
    "begun": ("jpaged:route_begun_calls", "Calls started at a backend, including retries."),
    "retried": ("jpaged:route_retried_calls", "Calls retried because a backend was gone, refused them or failed."),
    "resumed": ("jpaged:route_resumed_streams", "Streams resumed at a backend after another one failed."),
    "messages": ("jpaged:route_messages", "Stream messages forwarded."),
    "tokens": ("jpaged:route_tokens", "Tokens in forwarded messages."),
}


class RouteCollector(Collector):
    """Collector of a fleet's state and counters."""

    def __init__(self, fleet: BackendPool) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        counts, directory = self._fleet.counts, self._fleet.directory
        ended = CounterMetricFamily(
            "jpaged:route_calls", "Finished calls by method and status.", labels=("method", "code")
        )
        for (method, code), value in list(counts.ended.items()):
            ended.add_metric((method, code), value)
        yield ended
        for name, (metric, text) in _BY_TARGET.items():
            family = CounterMetricFamily(metric, text, labels=("target",))
            for target, value in list(vars(counts)[name].items()):
                family.add_metric((target,), value)
            yield family
        yield GaugeMetricFamily("jpaged:route_open_calls", "Open calls.", value=counts.open)
        yield CounterMetricFamily("jpaged:route_placed_prompts", "Prompts routed.", directory.num_placed)
        yield CounterMetricFamily(
            "jpaged:route_prefix_hits",
            "Prompts routed to a backend that has their prefix cached or was sent it before.",
            directory.num_hits,
        )
        yield CounterMetricFamily(
            "jpaged:route_passed_over",
            "Prompts not routed to the backend with their longest prefix, because it was away or too loaded.",
            directory.num_passed_over,
        )
        yield GaugeMetricFamily("jpaged:route_known_prefixes", "Prefix hashes kept by the router.", len(directory))
        yield from self._targets()

    def _targets(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("jpaged:route_target_up", "1 if the backend accepts calls.", labels=("target",))
        calls = GaugeMetricFamily(
            "jpaged:route_target_open_calls", "Open calls from this router to the backend.", labels=("target",)
        )
        busy = GaugeMetricFamily(
            "jpaged:route_target_busy",
            "Open requests reported by the backend, including those of other routers.",
            labels=("target",),
        )
        heard = GaugeMetricFamily(
            "jpaged:route_target_heard", "1 if the router receives the backend's KV cache events.", labels=("target",)
        )
        blocks = GaugeMetricFamily(
            "jpaged:route_target_blocks",
            "KV blocks that the backend holds, according to its events.",
            labels=("target",),
        )
        held = self._fleet.held
        for member in list(self._fleet.members.values()):
            endpoint = member.endpoint
            if held is not None and (is_heard := held.is_heard(endpoint.name)) is not None:
                heard.add_metric((endpoint.name,), float(is_heard))
                blocks.add_metric((endpoint.name,), held.num_blocks(endpoint.name))
            up.add_metric((endpoint.name,), float(member.is_admitted and endpoint.is_there))
            calls.add_metric((endpoint.name,), endpoint.num_open)
            busy.add_metric((endpoint.name,), endpoint.num_busy)
        yield from (up, calls, busy, heard, blocks)


def serve_counts(fleet: BackendPool, host: str, port: int) -> ScrapeServer:
    """Serve scrapes on a separate port, in threads, until the server is stopped; 0 is a free port.

    Raises:
        InvalidArgument: the port cannot be bound.
    """
    registry = CollectorRegistry()
    registry.register(RouteCollector(fleet))
    try:
        return ScrapeServer(make_wsgi_app(registry), host, port)
    except OSError as error:
        raise InvalidArgument("metrics_port", f"cannot listen on port {port} of {host}: {error}") from error


_LOG = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.05
_FLUSH_TIMEOUT_S = 2.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Options of a router, in addition to those of the port.

    Attributes:
        targets: servers from the command line.
        targets_file: path of a file with more servers; None for none.
        tls: certificates for connections to servers; None connects without TLS.
        api_key: key for the router's own queries of servers.
        resume_within_s: time that a stream looks for another server; 0 ends it with its server.
        max_known_prefixes: maximum number of hashes of beginnings; 0 places prompts by load only.
        max_calls: maximum open calls; more are refused with QueueFull.
        shown_options: all options for GetServerInfo: name, value, source.
    """

    targets: tuple[str, ...]
    targets_file: str | None = None
    tls: Tls | None = None
    api_key: str = ""
    resume_within_s: float = 60.0
    max_known_prefixes: int = MAX_KNOWN_PREFIXES
    max_calls: int = 8192
    shown_options: Options = ()


class Router:
    """One gRPC server that forwards to many. Bound to one event loop: `start`, then `run`.

    Attributes:
        port: its port; 0 before `start`.
        fleet: the servers.
        counts: its counters.
    """

    def __init__(self, options: RouteOptions, server: ServerOptions, access_options: AccessOptions) -> None:
        self.port = 0
        self.counts = RouterCounts()
        self._options, self._server_options = options, server
        self._gate = Authenticator(access_options)
        held = KVEventIndex() if options.max_known_prefixes else None
        self._directory = PrefixTable(options.max_known_prefixes, held)
        self._targets = targets = BackendTargets(options.targets, options.targets_file)
        self.fleet = BackendPool(targets, self._directory, self.counts, options.tls, options.api_key, held)
        resuming = ResumePolicy(options.resume_within_s) if options.resume_within_s else None
        self._relay = Proxy(self.fleet, resuming)
        self._acts = ReplicatedControl(self.fleet)
        self.fleet.set_bring(self._acts.reconcile)
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._fleetwide = AggregateCalls(self.fleet, self._relay, options.shown_options, self._stop.is_set)
        self._calls = set[asyncio.Task[Any]]()
        self._metrics: ScrapeServer | None = None
        self._probes: ProbeServer | None = None

    @property
    def metrics_port(self) -> int | None:
        """The port of metrics; None if not configured."""
        return None if self._metrics is None else self._metrics.server_port

    @property
    def probe_port(self) -> int | None:
        """The port only for health; None if not configured."""
        return None if self._probes is None else self._probes.port

    async def start(self) -> int:
        """Open the port, and start to look for servers; return the port.

        Raises:
            InvalidArgument: the host or a port cannot be bound, or a file named by the options cannot be read.
        """
        options = self._server_options
        self._gate.read()
        max_bytes = int(options.max_request_size * 2**20)
        self._grpc = make_server(options, max_bytes, AuthInterceptor(self._gate, takes_control=True))
        register(self._grpc, self._handler)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if options.enable_reflection:
            names = (*_SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._grpc)
        await self._set_health(is_ready=False)
        self.port = bind(self._grpc, "port", options.host, options.port, self._gate.certificates)
        if options.metrics_port is not None:
            self._metrics = serve_counts(self.fleet, options.host, options.metrics_port)
        if options.probe_port is not None:
            self._probes = ProbeServer(self._health_now, options.host, options.probe_port)
        await self._grpc.start()
        self._running = [asyncio.create_task(self.fleet.run()), asyncio.create_task(self._gate.watch())]
        return self.port

    def stop_on_signals(self) -> None:
        """Map SIGTERM and SIGINT to a drain (a second one cuts it short), SIGHUP to a reload of keys and targets."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        self._gate.reload()
        self._targets.expire()

    def request_stop(self) -> None:
        """Begin a drain; a second call cuts it short."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def run(self) -> int:
        """Forward calls until `request_stop`; then shut down and return the exit code."""
        is_ready = False
        while not self._stop.is_set():
            for task in self._running:
                if task.done():
                    task.result()  # re-raise its error: tasks are not cancelled before the end
            if (now_ready := self._health_now().is_ready) != is_ready:
                is_ready = now_ready
                await self._set_health(is_ready)
            await _wait(self._stop, _WATCH_INTERVAL_S)
        await self._set_health(is_ready=False)
        await self._drain()
        await self._close()
        return 0

    def _health_now(self) -> Health:
        return Health(True, not self._stop.is_set() and self.fleet.endpoints.has_any())

    async def _set_health(self, is_ready: bool) -> None:
        kinds = health_pb2.HealthCheckResponse
        for name in ("", READINESS, *_SERVICE_NAMES):
            await self._health.set(name, kinds.SERVING if is_ready else kinds.NOT_SERVING)
        await self._health.set(LIVENESS, kinds.SERVING)

    def _handler(self, method: str) -> Handler:
        """Return the handler of a method, which authorizes and counts calls and sets one status."""

        async def answer(request: Any, context: Any) -> Any:
            task, code = asyncio.current_task(), "OK"
            assert task is not None  # gRPC runs each call in its own task
            self._calls.add(task)
            self.counts.note_open(1)
            try:
                self.fleet.note_upstream(get_via(context))
                require_no_loop(context, self.fleet.router_id)
                if len(self._calls) > self._options.max_calls:
                    raise QueueFull(f"{self._options.max_calls} calls are open (max_calls)", retry_after_s=_RETRY_S)
                return await self._answer(method, request, context)
            except (aio.InternalError, aio.AbortError):  # the peer has disconnected, or has its status already
                code = "CANCELLED"
                raise
            except asyncio.CancelledError:
                code = "CANCELLED"
                if not self._hurry.is_set():
                    raise
                gone = Unavailable("the router shut down before the call ended")
                await abort_with_error(context, gone)
            except Exception as error:
                code = _noted(error)
                await abort_with_error(context, error)
            finally:
                self._calls.discard(task)
                self.counts.note_open(-1)
                self.counts.ended[method, code] += 1

        return answer

    async def _answer(self, method: str, request: Any, context: Any) -> Any:
        if self._stop.is_set() and method not in ("GetServerInfo", "Abort"):
            raise Unavailable("the router is draining")
        match WAYS[method]:
            case "stream":
                return await self._relay.generate(request, context)
            case "prompt" | "one":
                return await self._relay.one(method, request, context)
            case "all":
                return await self._acts.run(method, request, forwarded_metadata(context, self.fleet.router_id))
            case "knowing":
                metadata = forwarded_metadata(context, self.fleet.router_id)
                return await self._fleetwide.abort(request, metadata, context.time_remaining())
        if method == "GetServerInfo":
            return await self._fleetwide.server_info()
        ask = self._fleetwide.load if method == "GetLoad" else self._fleetwide.adapters
        return await ask(forwarded_metadata(context, self.fleet.router_id))

    async def _drain(self) -> None:
        """Wait until all calls have ended, up to the timeout or a second stop; cancel the remaining ones."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._server_options.shutdown_timeout
        while self._calls and loop.time() < until_s and not self._hurry.is_set():
            await _wait(self._hurry, min(_WATCH_INTERVAL_S, max(0.0, until_s - loop.time())))
        self._hurry.set()
        left = set(self._calls)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_FLUSH_TIMEOUT_S)

    async def _close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._health.end_watches(_FLUSH_TIMEOUT_S)
        await self._grpc.stop(grace=_FLUSH_TIMEOUT_S)
        await self.fleet.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        await asyncio.to_thread(self._gate.end, _FLUSH_TIMEOUT_S)
        if self._probes is not None:
            await asyncio.to_thread(self._probes.stop)


_SERVICE_NAMES: Sequence[str] = tuple(service.full_name for service in SERVICES)


def _noted(failure: Exception) -> str:
    """Note a call's error in the audit; return the status that its caller gets."""
    error, entry = error_for(failure), access.current()
    if entry is not None:
        entry.note_error(get_reason(error))
    cause = error.__cause__
    if isinstance(cause, aio.AioRpcError) and cause.code() is not grpc.StatusCode.CANCELLED:
        return str(cause.code().name)
    return error.grpc_status


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, up to the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
