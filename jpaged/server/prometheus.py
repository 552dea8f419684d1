"""The engine's counts in Prometheus' format, taken when somebody asks.

`vllm:*` names where the meaning is vLLM's, so that dashboards, autoscalers and routers made for it read ours;
`jpaged:*` for what only we have. Nothing here runs on the engine's path: a scrape reads one snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jpaged.engine.histogram import HistogramSnapshot
from jpaged.errors import InvalidArgument
from jpaged.server.scrapes import ScrapeServer

GAUGES: Mapping[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("num_running", "Requests with rows in the current step."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests that wait for rows or blocks, preempted ones included."),
    "jpaged:num_requests_swapped": ("num_swapped", "Requests whose blocks are in host memory."),
    "jpaged:blocks_free": ("num_blocks_empty", "Free blocks that hold no cached prefix."),
    "jpaged:blocks_cached": ("num_blocks_cached", "Free blocks that still hold a cached prefix."),
    "jpaged:blocks_referenced": ("num_blocks_used", "Blocks that sequences or pinned prefixes hold."),
    "jpaged:slot_use_ratio": ("slot_use", "Share of reserved slots that held a token, over all steps so far."),
}
"""Metric -> (field of the snapshot, help)."""

REPLICA_GAUGES: Mapping[str, tuple[str, str]] = {
    "jpaged:replica_requests_running": ("num_running", "Requests with rows in the current step of a replica."),
    "jpaged:replica_requests_waiting": ("num_waiting", "Requests that wait at a replica, preempted ones included."),
    "jpaged:replica_blocks_cached": ("num_blocks_cached", "Free blocks of a replica that still hold a prefix."),
    "jpaged:replica_blocks_referenced": ("num_blocks_used", "Blocks of a replica that sequences or pins hold."),
}
"""Those of each copy of the model, by the label `replica`; the others are of all together."""

COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:num_preemptions": ("num_preemptions", "Groups that had to leave for others."),
    "vllm:prefix_cache_queries": ("num_prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("num_prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    "vllm:prompt_tokens": ("num_prompt_tokens", "Tokens of admitted prompts."),
    "vllm:generation_tokens": ("num_generation_tokens", "Tokens sampled."),
    "jpaged:copies_on_write": ("num_copies_on_write", "Shared blocks copied because a sequence wrote to them."),
    "jpaged:blocks_swapped_out": ("num_blocks_swapped_out", "Blocks moved to host memory."),
    "jpaged:blocks_swapped_in": ("num_blocks_swapped_in", "Blocks moved back from host memory."),
    "jpaged:recomputed_tokens": ("num_recomputed_tokens", "Tokens of preempted groups that ran again."),
    "jpaged:cascade_steps": ("num_cascade_steps", "Steps in which rows read the blocks of a shared prefix together."),
    "jpaged:cascade_tokens": ("num_cascade_tokens", "Tokens of context that rows did not read again by it."),
    "jpaged:nonfinite_requests": ("num_nonfinite_requests", "Requests that ended: the model's logits were not finite."),
    "jpaged:compiles_after_warm_up": ("num_compiles_after_warm_up", "Programs compiled while serving; 0, or a bug."),
    "jpaged:steps": ("num_steps", "Steps dispatched."),
    "jpaged:host_seconds": ("host_s", "Seconds that the host spent deciding, packing and publishing steps."),
}

HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "vllm:time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "vllm:inter_token_latency_seconds": ("inter_token", "Between two tokens of a request's sequence."),
    "vllm:e2e_request_latency_seconds": ("end_to_end", "From arrival to the end, of requests that finished."),
    "vllm:request_queue_time_seconds": ("queue_time", "From arrival to the first step."),
    "jpaged:host_step_seconds": ("host_step", "Host work of one step."),
}


class Load(Protocol):
    """The two counts that are combined; the others are read by name."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_blocks_used(self) -> int: ...


class LatencySource(Protocol):
    """Where the histograms come from."""

    def histogram(self, name: str) -> HistogramSnapshot:
        """The snapshot of one of the names in HISTOGRAMS."""
        ...


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """What a scrape reads.

    Attributes:
        load: the engine's snapshot; its fields are named in GAUGES and COUNTERS.
        replica_loads: of each replica; their fields are named in REPLICA_GAUGES.
        latency: the engine's histograms.
        ended: requests that ended, by finish reason.
        model_name: the label of every metric.
        cache_config: the labels of vllm:cache_config_info.
    """

    load: Callable[[], Load]
    replica_loads: Callable[[], Sequence[Load]]
    latency: LatencySource
    ended: Callable[[], Mapping[str, int]]
    model_name: str
    cache_config: Mapping[str, str]


class EngineCollector(Collector):
    """Makes a scrape of one snapshot."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        source = self._source
        load, labels, values = source.load(), ("model_name",), (source.model_name,)
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, getattr(load, field))
            yield gauge
        replica_loads = source.replica_loads()
        for name, (field, text) in REPLICA_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=("model_name", "replica"))
            for index, one in enumerate(replica_loads):
                gauge.add_metric((source.model_name, str(index)), getattr(one, field))
            yield gauge
        yield self._kv_use(load)
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, getattr(load, field))
            yield counter
        yield self._ended()
        for name, (field, text) in HISTOGRAMS.items():
            yield self._histogram(name, text, source.latency.histogram(field))
        info = InfoMetricFamily("vllm:cache_config", "Sizes of the KV cache.", labels=labels)
        info.add_metric(values, dict(source.cache_config))
        yield info

    def _kv_use(self, load: Load) -> Metric:
        # "perc" is vLLM's name; the value is a fraction from 0 to 1.
        gauge = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", labels=("model_name",))
        gauge.add_metric((self._source.model_name,), load.num_blocks_used / load.num_blocks)
        return gauge

    def _ended(self) -> Metric:
        counter = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=("model_name", "finished_reason")
        )
        for reason, count in self._source.ended().items():
            counter.add_metric((self._source.model_name, reason), count)
        return counter

    def _histogram(self, name: str, text: str, snapshot: HistogramSnapshot) -> Metric:
        histogram = HistogramMetricFamily(name, text, labels=("model_name",))
        bounds = [*(str(bound) for bound in snapshot.bounds_s), "+Inf"]
        buckets = list(zip(bounds, snapshot.cumulative_counts, strict=True))
        histogram.add_metric((self._source.model_name,), buckets, snapshot.sum_s)
        return histogram


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """Answers scrapes until `stop` is called."""

    port: int
    stop: Callable[[], None]


def serve_metrics(source: MetricsSource, *, host: str, port: int) -> MetricsServer:
    """Answers scrapes on a port of its own, in threads.

    Args:
        source: what is asked at each scrape.
        host: the address to listen on.
        port: 0 picks a free one.

    Raises:
        InvalidArgument: the port cannot be had.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(source))
    try:
        server = ScrapeServer(make_wsgi_app(registry), host, port)
    except OSError as error:
        raise InvalidArgument("metrics_port", f"{port} on {host} cannot be listened on: {error}") from error
    return MetricsServer(server.server_port, server.stop)
