"""Compiles a vision encoder for a TPU that is not here: a process of its own, for jax must not take others for a TPU's.

python -m tests.aot.compile_vision v6e:2x2 1024      prints bytes of arguments and of working memory, as JSON
"""

from __future__ import annotations

import json
import sys

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


def main(topology: str, num_patches: int) -> None:
    device = compile_only_devices(find_topology(topology))[0]
    lowered = lower_encoder(MISTRAL_SMALL, np.dtype(jnp.bfloat16), num_patches, device)
    report = ProgramReport.of(lowered.compile())
    print(json.dumps({"arguments": report.argument_bytes, "working": report.temp_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
