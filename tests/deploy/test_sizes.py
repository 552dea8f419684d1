"""The arithmetic of docs/memory.md is the server's."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from jpaged.checkpoints.names import num_params
from jpaged.config import platform_default
from jpaged.kernels.kv_layout import KVForm, KVLayout
from jpaged.plan.known_models import KNOWN_MODELS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text()
GIB = 1 << 30


@pytest.mark.parametrize(
    ("model", "dtype", "form", "num_devices", "of_a_block", "on_a_device"),
    [
        ("llama-3.1-8b", "bfloat16", "gpu", 1, "2 MiB", 2 << 20),
        ("llama-3.1-8b", "int8", "gpu", 1, "1 MiB", 1 << 20),
        ("llama-3.1-70b", "bfloat16", "gpu", 8, "5 MiB", 640 << 10),
        ("llama-3.1-70b", "bfloat16", "tpu", 16, "10 MiB", 640 << 10),
    ],
)
def test_a_block_costs_what_the_runbook_says(model, dtype, form: KVForm, num_devices, of_a_block, on_a_device):
    config = KNOWN_MODELS[model].config
    num_heads = max(config.num_kv_heads, num_devices)  # fewer heads than devices: they are repeated
    layout = KVLayout(config.num_layers, 100, 16, num_heads, config.head_dim, jnp.dtype(dtype), form, num_devices)
    assert layout.local.bytes_per_block == on_a_device
    assert f"| {of_a_block} |" in PAGE
    assert f"{layout.bytes_per_block >> 20} MiB" == of_a_block


@pytest.mark.parametrize(
    ("model", "num_devices", "memory_gib", "platform", "bytes_per_block", "line"),
    [
        ("llama-3.1-8b", 1, 80 * 0.95, "gpu", 2 << 20, "56.2 GiB / 2 MiB"),
        ("llama-3.1-70b", 16, 31.25, "tpu", 640 << 10, "21.1 GiB / 640 KiB"),
    ],
)
def test_the_number_of_blocks_follows(model, num_devices, memory_gib, platform, bytes_per_block, line):
    weights_gib = num_params(KNOWN_MODELS[model].config) * 2 / num_devices / GIB
    left_gib = memory_gib * platform_default("memory_utilization", platform) - weights_gib - 1
    text = next(each for each in PAGE.splitlines() if line in each)
    assert f"{left_gib:.1f} GiB" == line.partition(" / ")[0]
    written = int(text.partition("= ")[2].partition(" blocks")[0].replace(" ", ""))
    assert written == pytest.approx(left_gib * GIB / bytes_per_block, rel=0.01)
