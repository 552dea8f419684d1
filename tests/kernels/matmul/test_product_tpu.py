"""The TPUs' product of numbers that share scales in groups, in Pallas' interpreter: every format against float64."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from jpaged.device.mesh import MESH_AXES
from jpaged.kernels.matmul import on_device, quantized, tpu
from jpaged.kernels.matmul.quantized import (
    QuantizedMatrix,
    StackedMatrix,
    abstract_matrix,
    dequantize,
    quantize,
    rows_on_device,
)
from jpaged.kernels.matmul.tpu import choose_form, unsupported_reason
from jpaged.kernels.matrix_format import MatrixFormat
from tests.conftest import QUICK_XLA_OPTIONS

FORMATS = {
    "int4": MatrixFormat("int4", 128, has_zeros=True),
    "int4 rows": MatrixFormat("int4", 128, has_zeros=True, activations="int8"),
    "int4 small groups": MatrixFormat("int4", 64, has_zeros=True),
    "int8 rows of small groups": MatrixFormat("int8", 32, activations="int8"),
    "int8 fractions": MatrixFormat("int8", 16, has_zeros=True, has_whole_zeros=False),
    "fp8 blocks": MatrixFormat("fp8", 128, activations="fp8-groups"),
    "fp8 rows": MatrixFormat("fp8", 64, activations="fp8"),
    "mxfp4": MatrixFormat("mxfp4", 32),
}
DEPTH, COLUMNS = 384, 192
NUMBERS = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -6, -4, -3, -2, -1.5, -1, -0.5], np.float32)
CODES = np.asarray([0, 1, 2, 3, 4, 5, 6, 7, -1, -2, -3, -4, -5, -6, -7], np.int8)


@pytest.fixture(autouse=True)
def _bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA for CPUs cannot take one type of 4 bits for another."""

    def codes_of(values: jax.Array) -> jax.Array:
        numbers, codes = values.astype(jnp.float32), jnp.zeros(values.shape, jnp.int8)
        for number, code in zip(NUMBERS.tolist(), CODES.tolist(), strict=True):
            codes = jnp.where(numbers == number, jnp.int8(code), codes)
        return codes

    monkeypatch.setattr(tpu, "get_codes", codes_of)


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def matrices_of(name: str, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> QuantizedMatrix:
    return quantize(normal(shape), FORMATS[name], axis=1 - len(shape), dtype=np.dtype(dtype))


def interpreted(multiply: Any) -> Any:
    called = functools.partial(multiply, is_interpreted=True)
    return jax.jit(called, compiler_options=QUICK_XLA_OPTIONS)


def expected(x: jax.Array, matrix: QuantizedMatrix) -> np.ndarray:
    """Rows as the device multiplies them, times weights, in float64."""
    rounded, scales = jax.jit(functools.partial(rows_on_device))(x, matrix)  # traced anew: the device may be another
    rows = np.asarray(rounded, np.float64)
    if scales is not None:
        rows = rows * np.repeat(np.asarray(scales, np.float64), DEPTH // scales.shape[-1], axis=-1)
    weights = np.asarray(dequantize(matrix, np.dtype(np.float32)), np.float64)
    return np.tensordot(rows, weights, 1)


def layer_of(matrices: QuantizedMatrix, index: int) -> QuantizedMatrix:
    return jax.tree.map(lambda array: array[index], matrices)


@pytest.mark.parametrize(("name", "num_rows"), [*((name, 19) for name in FORMATS), ("int4", 150), ("fp8 blocks", 150)])
@pytest.mark.thinned(3)
@pytest.mark.long
def test_rows_are_multiplied_with_what_the_matrix_of_a_layer_stands_for(name: str, num_rows: int) -> None:
    matrices = matrices_of(name, (3, DEPTH, COLUMNS))
    assert unsupported_reason(matrices) is None
    x = jnp.asarray(normal((num_rows, DEPTH), 1), jnp.bfloat16)
    want = expected(x, layer_of(matrices, 2))
    got = interpreted(tpu.multiply_one)(x, matrices, jnp.int32(2))
    # Weights and rows of groups are rounded to bfloat16 where they are made.
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-3 * np.abs(want).max())


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 rows"])
def test_rows_are_rounded_to_floats_where_the_device_multiplies_those(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, x = layer_of(matrices_of(name, (1, DEPTH, COLUMNS)), 0), jnp.asarray(normal((19, DEPTH), 1), jnp.bfloat16)
    plain = expected(x, matrix)
    monkeypatch.setattr(quantized, "multiplies_fp8", lambda: True)
    assert np.abs(expected(x, matrix) - plain).max() > 8e-3 * np.abs(plain).max(), "rounding shows"
    test_rows_are_multiplied_with_what_the_matrix_of_a_layer_stands_for(name, 19)


@pytest.mark.parametrize("name", ["int4", "int4 small groups", "int8 fractions", "mxfp4"])
@pytest.mark.long
def test_in_float32_products_are_those_of_float64(name: str) -> None:
    matrices = matrices_of(name, (2, DEPTH, COLUMNS), jnp.float32)
    x = jnp.asarray(normal((19, DEPTH), 1))
    want = expected(x, layer_of(matrices, 1))
    got = interpreted(tpu.multiply_one)(x, matrices, jnp.int32(1))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_every_number_of_mxfp4_is_what_its_code_says() -> None:
    bits = np.arange(16, dtype=np.uint8)
    codes = np.where(bits > 7, bits.astype(np.int8) - 16, bits)
    np.testing.assert_array_equal(np.asarray(tpu.of_mxfp4(jnp.asarray(codes))), bits.view(ml_dtypes.float4_e2m1fn))
    np.testing.assert_array_equal(np.asarray(tpu.of_mxfp4(jnp.asarray(CODES))), NUMBERS)


def test_parts_of_columns_stay_apart() -> None:
    matrices = matrices_of("int4", (2, DEPTH, 2, 128), jnp.float32)
    x = jnp.asarray(normal((19, DEPTH), 1))
    want = expected(x, layer_of(matrices, 1))
    got = interpreted(tpu.multiply_one)(x, matrices, jnp.int32(1))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize(("name", "is_static"), [("int4 rows", True), ("mxfp4", False), ("fp8 blocks", False)])
@pytest.mark.thinned(2)
def test_each_row_meets_its_own_matrix_alone(name: str, is_static: bool) -> None:
    """A matrix without rows, one with more than a tile, and rows behind those that are counted."""
    counts, matrices = np.array([3, 0, 40, 1], np.int32), matrices_of(name, (4, DEPTH, COLUMNS))
    if is_static:
        matrices = dataclasses.replace(matrices, input_scale=jnp.array([0.02, 0.5, 0.03, 0.04], jnp.float32))
    x = jnp.asarray(normal((50, DEPTH), 1), jnp.bfloat16)
    ids = np.minimum(np.repeat(np.arange(5), [*counts, 6]), 3)
    got = interpreted(tpu.multiply_sorted)(x, jnp.asarray(counts), jnp.asarray(ids), matrices)
    for index, end in enumerate(np.cumsum(counts)):
        rows = slice(end - counts[index], end)
        if not counts[index]:
            continue
        want = expected(x[rows], layer_of(matrices, index))
        np.testing.assert_allclose(got[rows], want, rtol=0, atol=4e-3 * np.abs(want).max())


def test_blocks_cover_a_depth_exactly() -> None:
    for depth in (256, 640, 2880, 4096, 11008, 14336, 28672):
        for name in ("int4", "mxfp4"):
            shape = (1, depth - depth % 128, 4096)
            matrix = abstract_matrix(FORMATS[name], shape, -2, np.dtype(jnp.bfloat16))
            form = choose_form(matrix, 64, np.dtype(jnp.bfloat16))
            assert shape[1] % form.block_depth == form.block_depth % form.chunk_depth == 0
            assert form.chunk_depth % math.lcm(form.group_size, 64) == 0
            assert form.block_depth % 128 == 0 or form.block_depth == shape[1]


@pytest.mark.parametrize(
    ("form", "shape", "reason"),
    [
        (MatrixFormat("int4", 128, has_group_ids=True), (2, 256, 128), "groups are listed"),
        (MatrixFormat("int8"), (2, 256, 128), "one scale"),
        (MatrixFormat("int4", 128), (2, 256, 2, 192), "192 columns"),
        (MatrixFormat("int4", 4), (2, 256, 128), "groups of 4"),
    ],
)
def test_what_the_kernel_does_not_take_is_left_to_xla_and_why(form: Any, shape: Any, reason: str) -> None:
    matrix = abstract_matrix(form, shape, 1 - len(shape), np.dtype(jnp.bfloat16))
    assert reason in (unsupported_reason(matrix) or "")


@pytest.mark.parametrize(("num_devices", "platform", "runs"), [(1, "tpu", True), (2, "tpu", False), (1, "cpu", False)])
def test_it_runs_on_one_tpu(num_devices: int, platform: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = matrices_of("int4", (2, DEPTH, 2, 128), jnp.float32)
    x = jnp.asarray(normal((4, DEPTH), 1))
    calls: list[int] = []

    def called(x: jax.Array, *_: Any) -> jax.Array:
        calls.append(len(x))
        return jnp.zeros((4, 2, 128))

    monkeypatch.setattr(tpu, "multiply_one", called)
    mesh = AbstractMesh(
        (1, 1, num_devices),
        MESH_AXES,
        (AxisType.Auto,) * len(MESH_AXES),
        abstract_device=AbstractDevice("some", 1, platform),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        y = jax.eval_shape(on_device.multiply_on_device, x, StackedMatrix(matrices, jnp.int32(1)))
    assert y.shape == (4, 2, 128)
    assert bool(calls) is runs


def test_a_matrix_of_a_stack_is_that_layers() -> None:
    matrices = matrices_of("int4", (2, DEPTH, 2, 128), jnp.float32)
    x = jnp.asarray(normal((4, DEPTH), 1))
    got = jax.jit(on_device.multiply_on_device)(x, StackedMatrix(matrices, jnp.int32(1)))
    np.testing.assert_array_equal(got, jax.jit(on_device.multiply_on_device)(x, layer_of(matrices, 1)))
