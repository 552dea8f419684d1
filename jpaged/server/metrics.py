"""What Prometheus is told of a loaded model: its engine's counts under its name."""

from __future__ import annotations

from jpaged.server.prometheus import MetricsSource
from jpaged.service.loaded_model import LoadedModel


def metrics_source(serving: LoadedModel) -> MetricsSource:
    """Where a scrape of this model reads; the labels of the cache are vLLM's, which gateways look for."""
    cache, geometry = serving.config.cache, serving.engine.geometry
    return MetricsSource(
        load=serving.engine.load,
        replica_loads=serving.engine.replica_loads,
        latency=serving.engine,
        ended=serving.engine.num_ended_by_reason,
        model_name=serving.model.name,
        cache_config={
            "block_size": str(geometry.block_size),
            "num_gpu_blocks": str(geometry.num_blocks),
            "num_cpu_blocks": str(geometry.num_host_blocks),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "kv_policy": cache.kv_policy,
        },
    )
