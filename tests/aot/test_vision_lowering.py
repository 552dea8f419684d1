"""Published vision encoders, lowered for CUDA and compiled for a TPU, without either."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from benchmarks.tpu_programs import library
from jpaged.device.aot.topology import compiler_environment
from jpaged.device.vision import encoder_bytes
from jpaged.models.vision import tower
from tests.aot.compile_vision import PUBLISHED

BFLOAT16 = np.dtype(jnp.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_encoder_lowers_for_cuda(name: str) -> None:
    config, size = PUBLISHED[name], 4096
    shape = jax.ShapeDtypeStruct
    patches = tower.PackedPatches(
        shape((size, config.patch_dim), np.float32),
        *(shape((size,), np.int32),) * 2,
        shape((size, 2), np.int32),
        shape((size, 2), np.float32),
    )
    encode = jax.jit(functools.partial(tower.encode, config=config))
    lowered = export.export(encode, platforms=["cuda"])(tower.abstract_params(config, BFLOAT16), patches)
    (rows,) = lowered.out_avals
    assert rows.shape == (size // config.num_merged, config.out_size)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_patches"),
    [("mistral_small", 1024), ("mistral_small", 12288), ("gemma_4b", 4096), ("qwen_7b", 4096), ("qwen_7b", 65536)],
)
def test_an_encoder_compiles_for_a_tpu_within_its_estimate(name: str, num_patches: int) -> None:
    """Weights without padding worth a mention, and no more working memory than the plan reserves."""
    environment = {**os.environ, **compiler_environment(library())}
    command = [sys.executable, "-m", "tests.aot.compile_vision", "v6e:2x2", name, str(num_patches)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found, planned = json.loads(done.stdout.splitlines()[-1]), encoder_bytes(PUBLISHED[name], BFLOAT16)
    given = planned.weights + 4 * num_patches * (PUBLISHED[name].patch_dim + 4)
    assert math.isclose(found["arguments"], given, rel_tol=0.05)
    assert 0 < found["working"] < planned.working
