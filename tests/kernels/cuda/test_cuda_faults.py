"""Faults planted in the CUDA kernels are found by the conformance suite, and divergent lanes by the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpaged.kernels import cuda_library as library
from jpaged.kernels.matmul import quantized
from tests.kernels.attention_conformance import RAGGED, Shape
from tests.kernels.cuda import cuda_emulator, test_product_cuda
from tests.kernels.cuda.test_paged_attention_cuda import Emulated

ROOT = Path(__file__).parents[3]
SOURCE = cuda_emulator.read_source(library.TARGET)
BFLOAT16, WINDOW = Shape(dtype="bfloat16", num_tokens=40), Shape(sliding_window=33, num_tokens=40)
FAULTS: dict[str, tuple[str, str, Shape]] = {
    "a window one key too long": ("position - call.window + 1", "position - call.window", WINDOW),
    "a query that sees the next key": ("position + 1 < 0 ? 0 : position + 1", "position + 2", BFLOAT16),
    "outputs that do not fade": ("if (any(fade[0] != 1 || fade[1] != 1))", "if (any(false))", BFLOAT16),
    "a part that is not merged": ("part < merge.num_parts", "part < merge.num_parts - 1", BFLOAT16),
    "parts merged by the last maximum": ("return fmaf(before, factors.before,", "return fmaf(before, 1,", BFLOAT16),
    "values of neighboring keys": ("8 * tile + 2 * j + k);", "8 * tile + 2 * j + 1 - k);", BFLOAT16),
    "halves of a word": ("n % 2 ? a >> 16", "n % 2 == 0 ? a >> 16", BFLOAT16),
    "one product of TF32": ("  multiply_tf32(sum, a_low, b_high);\n", "", Shape(num_tokens=40)),
    "heads in another order": (
        "pair % group;\n    const float out_scale",
        "(pair + 1) % group;\n    const float out_scale",
        BFLOAT16,
    ),
    "the scale of the keys for the values": (
        "call.scales_lk2 ? scales[1] : 1",
        "call.scales_lk2 ? scales[0] : 1",
        Shape(kv_dtype="int8", num_tokens=40),
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, shape = FAULTS[name]
    assert SOURCE.count(before) == 1
    target = f"jpaged_faulty_{list(FAULTS).index(name)}"
    cuda_emulator.register()
    cuda_emulator.compile_and_register(SOURCE.replace(before, after), target)
    suite = Emulated()
    suite.part_keys, suite.num_slots = 64, 10
    suite.check(RAGGED["mixed"], shape)
    monkeypatch.setattr(library, "TARGET", target)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        suite.check(RAGGED["mixed"], shape)


PRODUCT = cuda_emulator.read_source(library.PRODUCT_TARGET)
PRODUCT_FAULTS: dict[str, tuple[str, str, str]] = {
    "bytes of the other half of the depths": (
        "found[4 * side + column][half] =",
        "found[4 * side + column][1 - half] =",
        "int8",
    ),
    "sums of one warp left out": ("half > 0; half /= 2", "half > 1; half /= 2", "int4"),
    "scales of neighboring columns": ("kLaneNumbers * k + n;", "kLaneNumbers * k + (n ^ 1);", "int4"),
    "scales of another group": ("chunk * kChunk / group_size;", "chunk * kChunk / group_size / 2;", "int4 groups"),
    "zero points that are added": ("column) - zero, number(", "column) + zero, number(", "int4 groups"),
    "numbers of neighboring columns": (">> 4 * column & 0xf", ">> 4 * (column ^ 1) & 0xf", "mxfp4"),
    "rows with the scale of their first group": ("row_groups > 1 ? group : 0", "row_groups > 1 ? 0 : 0", "fp8 blocks"),
    "rows of the other half of a tile": (
        "kTileRows * of + 8 * half + i;\n      if",
        "kTileRows * of + 8 * (1 - half) + i;\n      if",
        "int8 rows",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", PRODUCT_FAULTS)
def test_a_fault_of_products_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, form = PRODUCT_FAULTS[name]
    assert PRODUCT.count(before) == 1
    target = f"jpaged_faulty_product_{list(PRODUCT_FAULTS).index(name)}"
    monkeypatch.setattr(quantized, "multiplies_fp8", lambda: True)
    test_product_cuda.test_rows_of_one_matrix(form, jnp.bfloat16)
    cuda_emulator.compile_and_register(PRODUCT.replace(before, after), target)
    monkeypatch.setattr(library, "PRODUCT_TARGET", target)
    monkeypatch.setattr(cuda_emulator, "register", lambda target: None)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_product_cuda.test_rows_of_one_matrix(form, jnp.bfloat16)


@pytest.mark.deep
def test_lanes_that_diverge_end_the_process() -> None:
    """One half of a warp takes part in an operation that the other half leaves out."""
    before = "if (any(fade[0] != 1 || fade[1] != 1))"
    assert SOURCE.count(before) == 1
    code = (
        "from tests.kernels.cuda.test_cuda_faults import *\n"
        f"source = SOURCE.replace({before!r}, 'if (lane < 16 && any(true))')\n"
        "cuda_emulator.compile_and_register(source, library.TARGET)\n"
        "cuda_emulator.register = lambda: None\n"
        "Emulated().check(RAGGED['mixed'], BFLOAT16)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode != 0
    assert "emulated CUDA: the lanes of a warp diverge" in done.stderr
