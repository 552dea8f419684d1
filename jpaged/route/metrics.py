"""Metrics of a router in Prometheus' format, computed per scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jpaged.errors import InvalidArgument
from jpaged.route.fleet import Fleet
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

    def __init__(self, fleet: Fleet) -> None:
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


def serve_counts(fleet: Fleet, host: str, port: int) -> ScrapeServer:
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
