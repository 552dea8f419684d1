"""Compiles a vision encoder for a TPU that is not here, in another process: this one's jax has other devices.

python -m tests.aot.compile_vision v6e:2x2 mistral_small 1024

It prints bytes of arguments and of working memory, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jpaged.device.aot.topology import compile_only_devices, find_topology
from jpaged.device.compilation.memory_plan import ProgramReport
from jpaged.device.vision import lower_encoder
from jpaged.models.config import VisionConfig

MISTRAL_SMALL = VisionConfig(
    kind="pixtral",
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=24,
    num_heads=16,
    patch_size=14,
    image_size=1540,
    merge_size=2,
    out_size=5120,
    activation="silu",
    norm_eps=1e-5,
    image_token_id=10,
    projector_eps=1e-5,
    rope_theta=1e4,
)
"""The encoder of Mistral-Small-3.1-24B, as its config.json has it."""
GEMMA_4B = VisionConfig(
    kind="siglip",
    hidden_size=1152,
    intermediate_size=4304,
    num_layers=27,
    num_heads=16,
    patch_size=14,
    image_size=896,
    merge_size=4,
    out_size=2560,
    activation="gelu_tanh",
    norm_eps=1e-6,
    image_token_id=262144,
    projector_eps=1e-6,
)
"""The encoder of Gemma-3-4B."""
QWEN_7B = VisionConfig(
    kind="qwen2_5_vl",
    hidden_size=1280,
    intermediate_size=3420,
    num_layers=32,
    num_heads=16,
    patch_size=14,
    temporal_size=2,
    image_size=0,
    merge_size=2,
    out_size=3584,
    activation="silu",
    norm_eps=1e-6,
    image_token_id=151655,
    projector_eps=1e-6,
    projector_bias=True,
    rope_theta=1e4,
    window_size=112,
    full_layers=(7, 15, 23, 31),
)
"""The encoder of Qwen2.5-VL-7B."""
PUBLISHED: Mapping[str, VisionConfig] = {"mistral_small": MISTRAL_SMALL, "gemma_4b": GEMMA_4B, "qwen_7b": QWEN_7B}


def main(topology: str, name: str, num_patches: int) -> None:
    device = compile_only_devices(find_topology(topology))[0]
    lowered = lower_encoder(PUBLISHED[name], np.dtype(jnp.bfloat16), num_patches, device)
    report = ProgramReport.of(lowered.compile())
    print(json.dumps({"arguments": report.argument_bytes, "working": report.temp_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
