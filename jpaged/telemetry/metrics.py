"""Metrics of a loaded model in Prometheus format, read at scrape time; `jpaged.server_load` declares them.

Nothing here runs on the engine's path: a scrape reads one snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jpaged.engine.stats import HistogramSnapshot
from jpaged.errors import InvalidArgument
from jpaged.outputs import CounterMetric, GaugeMetric, HistogramMetric, VectorMetric
from jpaged.server_load import (
    DISTRIBUTIONS,
    IGNORED_FIELDS,
    PER_POSITION,
    PREFILL_FAILURES,
    PREFILLS_HERE,
    EngineLoad,
    ImageLoad,
    RoleLoad,
    SpeculationLoad,
    get_metrics,
)
from jpaged.service.loaded_model import LoadedModel
from jpaged.telemetry.scrapes import ScrapeServer


class EngineCollector(Collector):
    """Collector that builds a scrape from one snapshot; every metric has the label `model_name`."""

    def __init__(self, serving: LoadedModel) -> None:
        self._serving = serving

    def collect(self) -> Iterator[Metric]:
        engine, name = self._serving.engine, self._serving.model.name
        load, replica_loads = engine.load(), engine.replica_loads()
        for kind, family in (("gauge", GaugeMetricFamily), ("counter", CounterMetricFamily)):
            for field, metric in get_metrics(kind):
                total = family(metric.name, metric.help, labels=("model_name",))
                total.add_metric((name,), getattr(load, field))
                yield total
        for field, metric in get_metrics("replica"):
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=("model_name", "replica"))
            for index, one in enumerate(replica_loads):
                gauge.add_metric((name, str(index)), getattr(one, field))
            yield gauge
        if load.speculation.num_accepted_tokens_per_pos:
            yield from self._speculation(load.speculation)
        # "perc" is vLLM's name; the value is a fraction from 0 to 1.
        use = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Fraction of KV blocks in use, 0 to 1.", labels=("model_name",)
        )
        use.add_metric((name,), load.num_blocks_used / load.num_blocks)
        yield use
        limit = GaugeMetricFamily(
            "jpaged:pool_limit_blocks",
            "KV blocks available to requests in each pool; the live page can lower it.",
            labels=("model_name",),
        )
        whole = load.num_blocks // max(1, len(replica_loads))
        limit.add_metric((name,), engine.inspector.limited_to or whole)
        yield limit
        yield self._ended()
        for field, distribution in DISTRIBUTIONS.items():
            yield self._histogram(distribution.metric.name, distribution.metric.help, engine.histogram(field))
        yield self._cache_config()
        if self._serving.config.roles.role != "both":
            yield from self._roles()
        ignored = CounterMetricFamily(IGNORED_FIELDS.name, IGNORED_FIELDS.help, labels=("model_name", "field"))
        for field, count in sorted(self._serving.ignored_fields.counts.items()):
            ignored.add_metric((name, field), count)
        yield ignored
        if self._serving.config.scheduler.enable_sleep_mode:
            yield self._sleep_state()
            updates = CounterMetricFamily(
                "jpaged:weight_updates", "Replacements of the model's weights.", labels=("model_name",)
            )
            updates.add_metric((name,), engine.num_weight_updates)
            yield updates
        if self._serving.images is not None:
            yield from self._images(self._serving.images.load())
        if (max_loras := self._serving.model.max_loras) > 0:
            yield self._adapters(load, max_loras)

    def _images(self, load: ImageLoad) -> Iterator[Metric]:
        for kind, family in (("gauge", GaugeMetricFamily), ("counter", CounterMetricFamily)):
            for field, metric in get_metrics(kind, ImageLoad):
                total = family(metric.name, metric.help, labels=("model_name",))
                total.add_metric((self._serving.model.name,), getattr(load, field))
                yield total

    def _roles(self) -> Iterator[Metric]:
        counts, name = self._serving.role_counts, self._serving.model.name
        for field, metric in get_metrics("counter", RoleLoad):
            counter = CounterMetricFamily(metric.name, metric.help, labels=("model_name",))
            counter.add_metric((name,), getattr(counts.load(), field))
            yield counter
        for metric, by_reason in ((PREFILLS_HERE, counts.num_here), (PREFILL_FAILURES, counts.num_failed)):
            counter = CounterMetricFamily(metric.name, metric.help, labels=("model_name", "reason"))
            for reason, count in sorted(by_reason.items()):
                counter.add_metric((name, reason), count)
            yield counter

    def _speculation(self, load: SpeculationLoad) -> Iterator[Metric]:
        name = self._serving.model.name
        for field, metric in get_metrics("counter", SpeculationLoad):
            counter = CounterMetricFamily(metric.name, metric.help, labels=("model_name",))
            counter.add_metric((name,), getattr(load, field))
            yield counter
        by_position = CounterMetricFamily(PER_POSITION.name, PER_POSITION.help, labels=("model_name", "position"))
        for position, count in enumerate(load.num_accepted_tokens_per_pos):
            by_position.add_metric((name, str(position)), count)
        yield by_position

    def _ended(self) -> Metric:
        counter = CounterMetricFamily(
            "vllm:request_success", "Finished requests by reason.", labels=("model_name", "finished_reason")
        )
        for reason, count in self._serving.engine.num_ended_by_reason().items():
            counter.add_metric((self._serving.model.name, reason), count)
        return counter

    def _histogram(self, name: str, help: str, snapshot: HistogramSnapshot) -> Metric:
        histogram = HistogramMetricFamily(name, help, labels=("model_name",))
        bounds = [*(str(bound) for bound in snapshot.bounds), "+Inf"]
        buckets = list(zip(bounds, snapshot.cumulative_counts, strict=True))
        histogram.add_metric((self._serving.model.name,), buckets, snapshot.sum)
        return histogram

    def _adapters(self, load: EngineLoad, max_loras: int) -> Metric:
        """Return the adapters of running and waiting requests as labels, with the time as value, as gateways expect.

        The names: https://gateway-api-inference-extension.sigs.k8s.io, proposal 003, the model server's protocol.
        """
        labels = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "LoRA adapters of running and waiting requests.", labels=labels
        )
        names = ",".join(load.running_adapters), ",".join(load.waiting_adapters)
        info.add_metric((self._serving.model.name, str(max_loras), *names), time.time())
        return info

    def _sleep_state(self) -> Metric:
        """Return what is released of the device memory, as vLLM does."""
        state, level = (
            GaugeMetricFamily(
                "vllm:engine_sleep_state",
                "1 for the state of the device memory, 0 for the others.",
                labels=("model_name", "sleep_state"),
            ),
            self._serving.engine.sleep_level,
        )
        for value, name in enumerate(("awake", "weights_offloaded", "discard_all")):
            state.add_metric((self._serving.model.name, name), float(level == value))
        return state

    def _cache_config(self) -> Metric:
        """Return the cache configuration under vLLM's labels, which gateways expect."""
        cache, geometry = self._serving.config.cache, self._serving.engine.geometry
        info = InfoMetricFamily("vllm:cache_config", "KV cache configuration.", labels=("model_name",))
        sizes = {
            "block_size": str(geometry.block_size),
            "num_gpu_blocks": str(geometry.num_blocks),
            "num_cpu_blocks": str(geometry.num_host_blocks),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "kv_policy": cache.kv_policy,
        }
        info.add_metric((self._serving.model.name,), sizes)
        return info


def read_metrics(serving: LoadedModel) -> list[CounterMetric | GaugeMetric | HistogramMetric | VectorMetric]:
    """Return the counters, gauges and distributions of a loaded model, one object for each set of labels."""
    found: list[CounterMetric | GaugeMetric | HistogramMetric | VectorMetric] = []
    for family in EngineCollector(serving).collect():
        if family.type == "histogram":
            found += _read_histograms(family)
        elif family.name == PER_POSITION.name:
            values = {int(one.labels["position"]): int(one.value) for one in family.samples}
            labels = {name: value for name, value in family.samples[0].labels.items() if name != "position"}
            found.append(VectorMetric(family.name, labels, [values[i] for i in sorted(values)]))
        elif family.type == "counter":
            found += [CounterMetric(family.name, dict(one.labels), int(one.value)) for one in family.samples]
        elif family.type == "gauge":
            found += [GaugeMetric(family.name, dict(one.labels), float(one.value)) for one in family.samples]
    return found


def _read_histograms(family: Metric) -> Iterator[HistogramMetric]:
    parts: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        key = sample.labels.get("le") or sample.name.removeprefix(family.name)
        parts.setdefault(labels, {})[key] = sample.value
    for labels, values in parts.items():
        total, count = values.pop("_sum"), int(values.pop("_count"))
        buckets = {bound: int(value) for bound, value in values.items()}
        yield HistogramMetric(family.name, dict(labels), count, total, buckets)


def serve_metrics(serving: LoadedModel, *, host: str, port: int) -> ScrapeServer:
    """Serve scrapes of a model on a separate port, in threads, until the server is stopped; 0 is a free port.

    Raises:
        InvalidArgument: the port is unavailable.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(serving))
    try:
        return ScrapeServer(make_wsgi_app(registry), host, port)
    except OSError as error:
        raise InvalidArgument("metrics_port", f"cannot listen on port {port} of {host}: {error}") from error
