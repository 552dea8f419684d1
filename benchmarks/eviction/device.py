"""What blocks cost on the device that is here, as a server times it when it starts."""

from __future__ import annotations

from typing import Any

from benchmarks.eviction.traces import BLOCK_SIZE
from jpaged.build import build
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.executor import Executor
from jpaged.engine.kv_cache.eviction.cost_aware import BlockCosts


def measured_costs(model: str) -> BlockCosts:
    """The costs of blocks of a model, loaded and timed here."""
    loaded = build(EngineConfig.load({"model": model, "wait_for_all_programs": True, "swap_space": 0.0}))
    assert isinstance(loaded.engine, Engine)
    executor: Executor[Any, Any] = loaded.engine._executor
    geometry = executor.geometry
    costs = BlockCosts.of(executor.rates, BLOCK_SIZE, geometry.bytes_per_block * BLOCK_SIZE // geometry.block_size)
    executor.shutdown()
    return costs
