"""Compiles a vision encoder for a TPU that is not here, in another process: this one's jax has other devices.

python -m tests.aot.compile_vision v6e:2x2 mistral_small 1024

It prints bytes of arguments and of working memory, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from benchmarks.cpu.vision import SHAPES
from jpaged.device.aot.topology import compile_only_devices, find_topology
from jpaged.device.compilation.memory_plan import ProgramReport
from jpaged.device.vision import lower_encoder
from jpaged.models.config import VisionConfig

PUBLISHED: Mapping[str, VisionConfig] = {
    "mistral_small": replace(SHAPES["pixtral"], num_layers=24, image_size=1540, image_token_id=10),
    "gemma_4b": replace(SHAPES["siglip"], num_layers=27, image_token_id=262144),
    "qwen_7b": replace(
        SHAPES["qwen2_5_vl"], num_layers=32, image_size=0, image_token_id=151655, full_layers=(7, 15, 23, 31)
    ),
}
"""The encoders of Mistral-Small-3.1-24B, Gemma-3-4B and Qwen2.5-VL-7B, as their config.json has them."""


def main(topology: str, name: str, num_patches: int) -> None:
    device = compile_only_devices(find_topology(topology))[0]
    lowered = lower_encoder(PUBLISHED[name], np.dtype(jnp.bfloat16), num_patches, device)
    report = ProgramReport.of(lowered.compile())
    print(json.dumps({"arguments": report.argument_bytes, "working": report.temp_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
