"""Sizes that belong to the platform: whose they are, when they give way, and that no kernel is passed over for them."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp
import pytest

from jpaged.checkpoints.names import num_params
from jpaged.config import EngineConfig
from jpaged.device.aot.topology import GPUS, TOPOLOGIES, Topology, description, device_kind
from jpaged.device.step_sizes import DeviceAttention, StepSizes
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.hardware import find_hardware, identify_hardware
from jpaged.models.config import ModelConfig
from jpaged.models.model import Model
from jpaged.models.sharding import largest_split
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.plan.step_times import find_target

OWN = {"tpu": "pallas-tpu", "gpu": "pallas-gpu"}


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    device_kind: str = "a device that is not in the table"
    compute_capability: str = "9.0"
    bytes_limit: int | None = None
    core_count: int | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.bytes_limit is None else {"bytes_limit": self.bytes_limit}


def attention(
    name: str = "llama-3.1-8b", platform: str = "tpu", num_parts: int = 1, dtype: str = "bfloat16", **options: Any
) -> DeviceAttention:
    device: Any = Device(platform)
    return DeviceAttention(
        Model(KNOWN_MODELS[name].config, jnp.dtype(dtype)), EngineConfig.load(options), device, num_parts
    )


def sizes(*arguments: Any, **options: Any) -> tuple[int, int, int]:
    found = attention(*arguments, **options).sizes()
    return found.block_size, found.max_num_seqs, found.max_num_batched_tokens


def needed_bytes(config: ModelConfig, num_devices: int) -> float:
    """The bytes that one device needs: bfloat16 weights, and one sequence of the greatest length."""
    token_bytes = 2 * 2 * config.num_layers * max(config.num_kv_heads, num_devices) * config.head_dim
    return (2 * num_params(config) + token_bytes * config.max_model_len) / num_devices


def usable_bytes(target: str) -> int:
    return find_target(target).hardware.usable_bytes


def smallest_slice(config: ModelConfig) -> Topology:
    """The slice with the fewest chips that can hold it, and among these the one with the least memory."""

    def size(topology: Topology) -> tuple[int, int]:
        return topology.num_chips, usable_bytes(topology.name)

    def holds(topology: Topology) -> bool:
        num_devices = largest_split(config, topology.num_devices)
        return needed_bytes(config, num_devices) < 0.85 * usable_bytes(topology.name)

    return min((topology for topology in TOPOLOGIES.values() if holds(topology)), key=size)


@pytest.mark.parametrize("name", KNOWN_MODELS)
@pytest.mark.thinned(11)
def test_every_model_has_its_devices_own_kernel_on_a_slice_that_holds_it(name: str) -> None:
    config = KNOWN_MODELS[name].config
    topology = smallest_slice(config)
    found = attention(name, "tpu", largest_split(config, topology.num_devices))
    assert (found.choose(found.sizes()).backend, found.passed_over()) == (OWN["tpu"], []), topology.name
    assert found.sizes().max_num_seqs >= 128, topology.name


@pytest.mark.parametrize("name", [name for name, model in KNOWN_MODELS.items() if model.num_params < 4e11])
@pytest.mark.thinned(5)
def test_every_model_that_h200s_hold_has_the_hopper_kernel(name: str) -> None:
    config = KNOWN_MODELS[name].config
    usable = usable_bytes("h200")
    num_devices = next(n for n in (1, 2, 4, 8) if needed_bytes(config, largest_split(config, n)) < 0.85 * usable)
    found = attention(name, "gpu", largest_split(config, num_devices))
    chosen = found.choose(found.sizes()).backend
    if config.value_dim is not None:
        assert (chosen, len(found.passed_over())) == ("pallas-triton", 1)
        assert "keys are latents" in found.passed_over()[0]
    elif config.num_heads // config.num_kv_heads > 64:
        assert (chosen, len(found.passed_over())) == ("pallas-triton", 1)
        assert "limit is 64" in found.passed_over()[0]
    elif name.startswith("gemma-4"):  # heads of 512 numbers
        assert (chosen, len(found.passed_over())) == ("xla", 3)
        assert all("256" in reason for reason in found.passed_over()[:2])
    else:
        assert (chosen, found.passed_over()) == (OWN["gpu"], [])
    assert sizes(name, "gpu") == (32, 128, 1024)


def test_each_platform_has_its_own() -> None:
    assert sizes("llama-2-7b", "cpu") == (16, 64, 512)
    assert sizes("llama-2-7b", "gpu") == (32, 128, 1024)
    assert sizes("llama-2-7b", "tpu") == (64, 128, 1024)


def test_rows_of_an_unknown_device_follow_from_the_memory_that_it_reports() -> None:
    small, large = (
        dataclasses.replace(
            attention(platform="gpu", max_model_len=8192), device=Device("gpu", "NVIDIA Z1", bytes_limit=size << 30)
        )
        for size in (24, 120)
    )
    assert (small.sizes().max_num_seqs, small.sizes().max_num_batched_tokens) == (128, 1024)
    assert (large.sizes().max_num_seqs, large.sizes().max_num_batched_tokens) == (512, 2048)
    (line,) = large.reasons()
    assert line.startswith(
        "512 rows, 2048 tokens and blocks of 32: NVIDIA Z1 is not in the table; its allocator has room"
    )


def test_an_unknown_gpu_is_estimated_from_its_multiprocessors_and_compute_capability() -> None:
    device = Device("gpu", "NVIDIA Z1", "9.0", 120 << 30, core_count=132)
    found = dataclasses.replace(attention(platform="gpu", max_model_len=8192), device=device)
    assert (found.sizes().max_num_seqs, found.sizes().max_num_batched_tokens) == (512, 2048)
    (line,) = found.reasons()
    assert line.endswith("; 132 multiprocessors of compute capability 9.0 make about 249 FLOPs per byte of memory")
    hardware = identify_hardware(device, 114 << 30)
    assert hardware is not None
    assert hardware.multiplies_fp8
    assert hardware.hbm_bytes == pytest.approx(120 << 30)
    assert not getattr(identify_hardware(Device("gpu", "NVIDIA Z1", "8.6", core_count=72)), "multiplies_fp8", True)
    newer, oldest = (identify_hardware(Device("gpu", "NVIDIA Z1", text, core_count=100)) for text in ("13.0", "6.1"))
    assert newer is not None
    assert (newer.multiplies_fp8, oldest) == (True, None)
    for other in (Device("gpu", "AMD Z1", "gfx942", core_count=304), Device("gpu"), Device("tpu", "TPU v9")):
        assert identify_hardware(other) is None
    assert identify_hardware(Device("gpu", "NVIDIA H200", "9.0", core_count=132)) is find_hardware("NVIDIA H200")


@pytest.mark.parametrize("gpu", GPUS)
def test_estimates_of_gpus_are_near_the_table(gpu: str) -> None:
    known, text = find_hardware(device_kind(gpu)), description(gpu)
    (major, minor), (cores,) = (
        re.search(pattern, text).groups()  # type: ignore[union-attr]
        for pattern in (r"cuda_compute_capability \{\s*major: (\d+)(?:\s+minor: (\d+))?", r"core_count: (\d+)")
    )
    kind = "NVIDIA GeForce Z1" if "GeForce" in device_kind(gpu) else "NVIDIA Z1"
    found = identify_hardware(Device("gpu", kind, f"{major}.{minor or 0}", core_count=int(cores)))
    assert known is not None
    assert found is not None
    assert found.multiplies_fp8 == known.multiplies_fp8
    assert 0.6 < found.flops / known.flops < 1.7
    assert 0.6 < found.hbm_bytes_per_s / known.hbm_bytes_per_s < 1.7


@pytest.mark.parametrize(
    "kind",
    [
        *("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H20", "NVIDIA GH200 480GB", "NVIDIA GB200"),
        *("NVIDIA B300 SXM6 AC", "NVIDIA L40S", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A10"),
        *("Tesla T4", "TPU v4"),
    ],
)
def test_devices_without_plans_are_known(kind: str) -> None:
    hardware = find_hardware(kind)
    assert hardware is not None
    assert hardware.usable_bytes <= hardware.hbm_bytes
    assert hardware.usable_bytes / hardware.hbm_bytes > 0.94
    assert 30 < hardware.ridge_tokens < 450


def on_device(name: str, kind: str, num_parts: int = 1, **options: Any) -> tuple[int, int, int]:
    device: Any = Device("gpu" if kind.startswith("NVIDIA") else "tpu", kind)
    found = dataclasses.replace(attention(name, device.platform, num_parts, **options), device=device).sizes()
    return found.block_size, found.max_num_seqs, found.max_num_batched_tokens


def test_rows_are_as_many_as_sequences_of_1024_tokens_the_memory_holds() -> None:
    """A v6e has 30.3 GiB at 0.97; a token of the 8B's takes 128 KiB, of the 70B's over 8 devices 40 KiB."""
    short = {"max_model_len": 8192}
    assert on_device("llama-3.1-8b", "TPU v6 lite", **short)[1] == 128  # 15.4 GiB hold 122 sequences
    assert on_device("qwen3-32b", "TPU v6 lite", 4, **short)[1] == 256  # 15.1 GiB hold 240
    assert on_device("llama-3.1-70b", "TPU v6 lite", 8, **short)[1] == 512  # 13.9 GiB hold 354
    assert on_device("llama-3.1-8b", "TPU7x", 8, **short)[1] == 512  # more than a step has rows
    assert on_device("llama-3.1-70b", "TPU v5 lite", 4, **short)[1] == 128  # nothing is left: the platform's
    assert on_device("llama-3.1-8b", "TPU v6 lite", memory_utilization=0.6, **short)[1] == 128
    assert on_device("llama-3.1-8b", "TPU v6 lite", 4, memory_utilization=0.2, **short)[1] == 128
    assert on_device("llama-3.1-8b", "TPU v6 lite", kv_cache_dtype="int8", **short)[1] == 256


def test_rows_keep_the_block_tables_of_every_step_below_a_mebibyte() -> None:
    assert on_device("llama-3.1-8b", "NVIDIA H200", max_model_len=8192)[1] == 512  # 256 blocks of 32 each
    assert on_device("llama-3.1-8b", "NVIDIA H200", max_model_len=32768)[1] == 256
    assert on_device("llama-3.1-8b", "NVIDIA H200")[1] == 128  # 4096 blocks: the platform's, and 2 MiB


def test_steps_have_tokens_for_products_to_take_twice_the_time_of_the_weights_and_for_prompts_beside_rows() -> None:
    short = {"max_model_len": 8192}
    assert on_device("llama-3.1-8b", "TPU v6 lite", **short)[2] == 2048  # 560 FLOPs a byte
    assert on_device("llama-3.1-70b", "TPU v5 lite", 4, **short)[2] == 1024  # 241: the platform's
    assert on_device("llama-3.1-8b", "NVIDIA H200", max_num_seqs=64)[2] == 1024
    assert on_device("llama-3.1-8b", "NVIDIA H200", max_num_seqs=512)[2] == 2048
    assert on_device("llama-3.1-8b", "NVIDIA H200", max_num_batched_tokens=256)[1:] == (128, 256)


def test_what_the_sizes_are_made_of_is_told_where_one_was_left_out() -> None:
    tpu: Any = Device("tpu", "TPU v6 lite")
    found = attention("llama-3.1-70b", "tpu", 8, max_model_len=8192)
    (line,) = dataclasses.replace(found, device=tpu).reasons()
    assert line == (
        "512 rows, 2048 tokens and blocks of 128: tpu-v6e has room for 355 sequences of 1024 tokens after the "
        "weights, and 560 FLOPs per byte of memory; a block is 64 KiB per layer"
    )
    (line,) = found.reasons()
    assert line.startswith(
        "128 rows, 1024 tokens and blocks of 128: the default for any TPU; a device that is not in the table"
    )
    assert attention(platform="cpu").reasons() == []
    assert attention(block_size=64, max_num_seqs=64, max_num_batched_tokens=512).reasons() == []


@pytest.mark.long
def test_blocks_are_128_where_a_device_has_little_of_a_block() -> None:
    """A block of 64 tokens of one key/value head in bfloat16 is 32 KiB."""
    assert on_device("llama-3.1-70b", "TPU v6 lite", 8, max_model_len=8192)[0] == 128
    assert on_device("llama-3.1-70b", "TPU v6 lite", 4, max_model_len=8192)[0] == 64
    assert on_device("llama-3.1-70b", "TPU v6 lite", 4, max_model_len=8192, kv_cache_dtype="fp8")[0] == 128
    assert on_device("llama-3.1-70b", "TPU v6 lite", 8, max_model_len=8192, block_size=64)[0] == 64
    assert on_device("llama-3.1-70b", "NVIDIA H200", 8)[0] == 32


def test_blocks_are_128_where_tables_would_have_a_mebibyte() -> None:
    assert sizes("llama-3.1-8b", max_model_len=8192)[0] == 64
    assert sizes("llama-3.1-8b") == (128, 128, 1024)  # 131072 tokens: 128 x 2048 blocks of 64
    assert sizes("llama-3.1-8b", "gpu")[0] == 32
    assert sizes("llama-3.1-8b", block_size=16) == (16, 128, 1024)


@pytest.mark.parametrize(("rows", "block_size"), [(64, 16), (256, 16), (256, 64)])
def test_tables_of_any_length_are_a_kernels(rows: int, block_size: int) -> None:
    assert attention(block_size=block_size, max_num_seqs=rows).passed_over() == []


@pytest.mark.parametrize(
    ("options", "rows_and_tokens"),
    [
        ({"max_num_seqs": 1024, "max_model_len": 8192}, (1024, 1024)),
        ({"max_num_seqs": 2048, "max_model_len": 2048}, (2048, 2048)),
        ({"max_num_batched_tokens": 40}, (40, 40)),
        ({"max_num_batched_tokens": 8192}, (128, 8192)),
        ({"max_num_seqs": 3}, (3, 1024)),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 8}, (3, 8)),
    ],
)
def test_rows_and_tokens_follow_each_other(options: dict[str, int], rows_and_tokens: tuple[int, int]) -> None:
    assert sizes(**options)[1:] == rows_and_tokens


def test_what_was_chosen_stays_and_a_kernel_that_is_passed_over_is_said_with_what_would_bring_it_back() -> None:
    found = attention(max_num_batched_tokens=1 << 20)
    assert found.sizes() == StepSizes(128, 128, 1 << 20, 131072)
    (line,) = found.passed_over()
    assert line.startswith("attention xla, not pallas-tpu: the step lists of 128 rows and 1048576 tokens require ")
    highest = int(line.partition("--max-num-batched-tokens ")[2].split()[0])
    assert line.endswith(" would enable it")
    assert attention(max_num_batched_tokens=highest).passed_over() == []
    assert attention(max_num_batched_tokens=highest + 128).passed_over() != []


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"block_size": 512}, "--block-size 128"),
        ({"block_size": 1}, "--block-size 16"),
        ({"platform": "gpu", "block_size": 256}, "--block-size 128"),
        ({"block_size": 128, "max_num_batched_tokens": 1 << 17}, "--max-num-batched-tokens "),
        ({"platform": "gpu", "dtype": "float32"}, "--dtype bfloat16"),
        ({"platform": "gpu", "kv_cache_dtype": "float32"}, "--kv-cache-dtype auto"),
    ],
)
def test_the_remedy_is_one_option_that_works(options: dict[str, Any], remedy: str) -> None:
    found = attention(**options)
    (line,) = found.passed_over()
    assert f"; {remedy}" in line
    assert line.endswith(" would enable it")
    words = line.rpartition("; --")[2].removesuffix(" would enable it").split()
    name, value = words[0].replace("-", "_"), words[1]
    assert attention(**{**options, name: int(value) if value.isdigit() else value}).passed_over() == []


@pytest.mark.parametrize(
    ("options", "remedy", "left"),
    [
        (
            {"block_size": 512, "max_num_batched_tokens": 1 << 20},
            "leaving out --block-size and --max-num-batched-tokens",
            {},
        ),
        (
            {"platform": "gpu", "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 16},
            "leaving out --kv-cache-dtype, with --dtype bfloat16,",
            {"platform": "gpu", "block_size": 16},
        ),
    ],
)
def test_where_no_option_does_it_alone_the_fewest_are_told(
    options: dict[str, Any], remedy: str, left: dict[str, Any]
) -> None:
    (line,) = attention(**options).passed_over()
    assert line.endswith(f"; {remedy} would enable it")
    assert attention(**left).passed_over() == []


def test_no_option_makes_another_device_of_it() -> None:
    found = attention(platform="gpu")
    l4: Any = Device("gpu", "L4", "8.9")
    (line,) = dataclasses.replace(found, device=l4).passed_over()
    assert line == "attention pallas-triton, not pallas-gpu: runs on Hopper (sm_90); this is L4, sm_89"
    assert dataclasses.replace(found, device=l4).sizes() == found.sizes()


def test_a_backend_that_was_named_is_an_error_with_the_same_remedy() -> None:
    found = attention(max_num_batched_tokens=1 << 20, attention_backend="pallas-tpu")
    assert found.passed_over() == []
    with pytest.raises(
        Unsupported, match=r"pallas-tpu cannot run here: the step lists .* --max-num-batched-tokens \d+ would"
    ):
        found.choose(found.sizes())
    assert attention(attention_backend="pallas-tpu").sizes().block_size == 128


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_model_len: 9000 is above the limit of the model, 8192"):
        attention("llama-3-8b", max_model_len=9000).sizes()


def test_a_sequence_takes_whole_blocks() -> None:
    assert StepSizes(64, 1, 8, 65).blocks_per_seq == math.ceil(65 / 64)
