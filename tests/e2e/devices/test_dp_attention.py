"""Data-parallel attention: each device has the latents of its own sequences, and a mix of requests gives the same
tokens that one device gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from jpaged.errors import InvalidArgument
from tests.e2e.devices.test_context_combinations import MODEL, SIZES, check
from tests.e2e.rig import engine_of, open_llm, write_model
from tests.models.tiny import tiny_case, write_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_programs")]


def on(num_devices: int) -> dict[str, Any]:
    parallel = {"tensor_parallel_size": num_devices, "enable_expert_parallel": True, "enable_dp_attention": True}
    return {**parallel, "max_num_seqs": 4 * num_devices}


@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    [
        ("deepseek_v3", 4, {"num_scheduler_steps": 4}),
        ("deepseek_v3", 2, {"preemption_mode": "recompute", "num_blocks": 30, "max_num_seqs": 16}),
        ("deepseek_v3", 2, {"kv_cache_dtype": "int8"}),
        ("deepseek_v2", 2, {"quantization": "int8", "enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_the_mix_is_the_same_on_each_device(
    name: str, num_devices: int, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(MODEL, tmp_path, with_tokenizer=True)  # for its tokenizer
    write_checkpoint(tiny_case(name), folder)
    is_rounded = {"kv_cache_dtype", "quantization"} & options.keys()
    check(folder, on(num_devices), options, 2e-3 if is_rounded else 1e-4)


def test_the_pool_grows_with_the_devices(tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case("deepseek_v3"), tmp_path)
    sizes = {**SIZES, "num_blocks": None, "kv_cache_memory_bytes": 1 << 20}
    with open_llm(folder, **sizes, **{**on(4), "enable_dp_attention": False}) as llm:
        alike = engine_of(llm).geometry.num_blocks
    with open_llm(folder, **sizes, **on(4)) as llm:
        executor: Any = engine_of(llm)._executor
        layout = executor.step.layout
        assert engine_of(llm).geometry.num_blocks == layout.num_blocks == 4 * alike
        pool = executor._pool.take()
        executor._pool.put(pool)
        assert pool.sharding.shard_shape(pool.shape) == layout.local.shape
        assert layout.local.num_bytes <= 1 << 20


def test_blocks_have_to_be_shared_evenly(tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case("deepseek_v3"), tmp_path)
    with pytest.raises(InvalidArgument, match="num_blocks: 42 blocks cannot be divided evenly among 4 devices"):
        LLM(str(folder), **{**SIZES, **on(4), "num_blocks": 42})
    with pytest.raises(InvalidArgument, match="enable_dp_attention: is on, but enable_expert_parallel is off"):
        LLM(str(folder), **{**SIZES, **on(4), "enable_expert_parallel": False})
