"""Products of groups of rows in CUDA C++, compiled as C++ with emulated warps: every format against float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels import cuda_library
from jpaged.kernels import cuda_library as library
from jpaged.kernels.experts import ExpertWeights, Routes, StackedExperts, apply_experts, sum_experts
from jpaged.kernels.experts.sorted_rows import takes_all
from jpaged.kernels.matmul import quantized
from jpaged.kernels.matmul.quantized import QuantizedMatrix, abstract_matrix, dequantize, quantize, rows_on_device
from jpaged.kernels.matmul.triton import grouped
from jpaged.kernels.matmul.triton.form import list_tiles
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.mixture_kind import SILU, GateFunction
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels.cuda import cuda_emulator
from tests.kernels.experts.mixtures import CLAMPED, mixture, numbers, random_routes
from tests.kernels.experts.mixtures import expected as expected_of_experts
from tests.kernels.experts.test_experts import AS_SERVED, TOLERANCE
from tests.kernels.matmul.test_product_triton import FORMATS, normal

DEPTH, OUT = 320, (2, 36)
"""More than a chunk for each of a block's warps, and more columns than those of a block."""


def matrices_of(name: str, num_matrices: int, dtype: Any = jnp.bfloat16) -> QuantizedMatrix:
    return quantize(normal((num_matrices, DEPTH, *OUT)), FORMATS[name], axis=-3, dtype=np.dtype(dtype))


def of_one(matrices: QuantizedMatrix, index: int) -> QuantizedMatrix:
    one: QuantizedMatrix = jax.tree.map(lambda array: array[index], matrices)
    return one


def expected(x: jax.Array, matrix: QuantizedMatrix) -> np.ndarray:
    """Rows as the device multiplies them, times weights, in float64."""
    rows, scales = rows_on_device(x, matrix)
    wide = np.asarray(rows, np.float64)
    if scales is not None:
        wide = wide * np.repeat(np.asarray(scales, np.float64), DEPTH // scales.shape[-1], axis=-1)
    return wide @ np.asarray(dequantize(matrix, np.dtype(np.float32)), np.float64).reshape(DEPTH, -1)


def multiply_one(x: jax.Array, matrix: QuantizedMatrix) -> np.ndarray:
    """Multiply with emulated warps."""
    cuda_emulator.register(library.PRODUCT_TARGET)

    def run(x: jax.Array, matrix: QuantizedMatrix) -> jax.Array:
        return grouped.multiply_one(*rows_on_device(x, matrix), matrix, backend="cuda")

    return np.asarray(jax.jit(run, compiler_options=QUICK_XLA_OPTIONS)(x, matrix))


def multiply_sorted(x: jax.Array, counts: np.ndarray, owners: np.ndarray, matrices: Any) -> np.ndarray:
    cuda_emulator.register(library.PRODUCT_TARGET)

    def run(x: jax.Array, counts: jax.Array, owners: jax.Array, matrices: Any) -> jax.Array:
        return grouped.multiply_sorted(x, counts, owners, matrices, backend="cuda")

    return np.asarray(jax.jit(run, compiler_options=QUICK_XLA_OPTIONS)(x, counts, owners, matrices))


def owners_of(counts: np.ndarray, num_rows: int) -> np.ndarray:
    owners = np.repeat(np.arange(len(counts)), counts)
    return np.pad(owners, (0, num_rows - len(owners)), constant_values=len(counts) - 1).astype(np.int32)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_one_matrix(name: str, dtype: Any) -> None:
    """19 rows are one tile of 32, of which some are not there."""
    matrix = of_one(matrices_of(name, 1, dtype), 0)
    x = jnp.asarray(normal((19, DEPTH), 1), dtype)
    want = expected(x, matrix)
    np.testing.assert_allclose(multiply_one(x, matrix), want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks"])
def test_rows_of_floats_of_8_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "multiplies_fp8", lambda: True)
    test_rows_of_one_matrix(name, jnp.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize(("name", "is_static"), [("int8 rows", True), ("int4 groups", False), ("mxfp4", False)])
def test_each_row_meets_its_own_matrix(name: str, is_static: bool) -> None:
    """A matrix without rows, one with many, and rows after those that are counted."""
    counts, matrices = np.array([3, 0, 20, 1], np.int32), matrices_of(name, 4)
    if is_static:
        scales = jnp.array([0.02, 0.5, 0.03, 0.04], jnp.float32)
        matrices = dataclasses.replace(matrices, input_scale=scales)
    x, owners = jnp.asarray(normal((27, DEPTH), 1), jnp.bfloat16), owners_of(counts, 27)
    got = multiply_sorted(x, counts, owners, matrices)
    for matrix in (0, 2, 3):
        places = np.flatnonzero(owners[:24] == matrix)
        want = expected(x[places], of_one(matrices, matrix))
        np.testing.assert_allclose(got[places], want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.long
@pytest.mark.parametrize("depth", [8, 40, 320])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_matrices_of_the_rows_own_type(dtype: Any, depth: int) -> None:
    counts, matrices = np.array([0, 18, 3], np.int32), jnp.asarray(normal((3, depth, 72)), dtype)
    x, owners = jnp.asarray(normal((21, depth), 1), dtype), owners_of(counts, 21)
    got = multiply_sorted(x, counts, owners, matrices)
    want = np.einsum("pk,pkn->pn", np.asarray(x, np.float64), np.asarray(matrices, np.float64)[owners])
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.long
@pytest.mark.parametrize("name", ["int4 groups", "fp8 blocks", "int8 rows"])
def test_the_bits_of_a_row_follow_from_it_alone(name: str) -> None:
    """Alone, and among other rows in a tile of 16 or 32."""
    matrix = of_one(matrices_of(name, 1), 0)
    x = jnp.asarray(normal((33, DEPTH), 1), jnp.bfloat16)
    together = multiply_one(x, matrix)
    for row in (0, 17, 32):
        np.testing.assert_array_equal(multiply_one(x[row : row + 1], matrix)[0], together[row])
    np.testing.assert_array_equal(multiply_one(x[5:14], matrix), together[5:14])


@pytest.mark.long
@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_number_that_a_matrix_can_hold_is_read(name: str, dtype: Any) -> None:
    """A row with a single one gives the numbers of its depth."""
    kind = MatrixFormat(name)  # type: ignore[arg-type]
    bits = np.arange(256, dtype=np.uint8) if name in ("int8", "fp8") else np.resize(np.arange(16, dtype=np.uint8), 256)
    every = bits.view(kind.dtype)
    numbers = np.where(np.isfinite(every.astype(np.float32)), every, kind.dtype.type(0)).reshape(32, 8)
    matrix = QuantizedMatrix(
        jnp.asarray(numbers), jnp.ones((1, 8)), None, None, None, axis=-2, activations=None, dtype=np.dtype(dtype)
    )
    got = multiply_one(jnp.eye(32, dtype=dtype), matrix)
    np.testing.assert_array_equal(got, numbers.astype(np.float32))


@pytest.mark.long
def test_tiles_outside_of_rows_and_matrices_are_not_computed() -> None:
    cuda_emulator.register(library.PRODUCT_TARGET)
    x, matrices = jnp.asarray(normal((4, 8)), jnp.float32), jnp.asarray(normal((2, 8, 8), 1))
    for tile in ((-1, 0, 4), (2, 0, 4), (0, -1, 4), (0, 1, 4), (0, 0, 0)):
        tiles = jnp.array([tile, (1, 0, 2)], jnp.int32)
        got = np.asarray(grouped._run_cuda(x, tiles, matrices, None, 16))
        np.testing.assert_allclose(got[:2], np.asarray(x[:2], np.float64) @ np.asarray(matrices[1]), rtol=1e-5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        grouped._run_cuda(x, list_tiles(jnp.array([4, 0]), 4, 16), matrices, None, 48).block_until_ready()


def apply(
    x: Any, routes: Routes, weights: ExpertWeights, gate: GateFunction = SILU, options: Any = QUICK_XLA_OPTIONS
) -> np.ndarray:
    """Compute experts with emulated warps."""
    assert takes_all(weights, "cuda")
    cuda_emulator.register(library.PRODUCT_TARGET)
    kernel = functools.partial(sum_experts, backend="cuda")
    called = jax.jit(functools.partial(apply_experts, gate=gate, kernel=kernel), compiler_options=options)
    return np.asarray(called(jnp.asarray(x), routes, weights))


@pytest.mark.long
@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 40, 72, 3), (16, 64, 32, 16)], ids=str)
def test_experts_become_what_float64_makes_of_rows(
    shape: tuple[int, int, int, int], dtype: str, gate: GateFunction
) -> None:
    num_experts, width, inner, top_k = shape
    weights = mixture(num_experts, width, inner, dtype)
    for num_tokens in (1, 21):
        x, routes = numbers((num_tokens, width), dtype), random_routes(num_tokens, num_experts, top_k)
        want = expected_of_experts(x, routes, weights, gate)
        got = apply(x, routes, weights, gate)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(want).max()))


@pytest.mark.long
def test_rows_that_no_request_uses_are_not_read() -> None:
    weights, x, routes = mixture(4, 16, 48, "float32"), numbers((12, 16), "float32"), random_routes(12, 4, 2, 5)
    want = expected_of_experts(x, routes, weights, SILU)
    x[5:] = np.nan
    got = apply(x, routes, weights)
    np.testing.assert_allclose(got[:5], want[:5], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got[5:], 0)


@pytest.mark.long
@pytest.mark.parametrize("name", [None, "int4 groups", "mxfp4"])
def test_neither_other_rows_nor_layers_show_in_a_bit_of_experts(name: str | None) -> None:
    weights, x, routes = mixture(4, 64, 128, "bfloat16"), numbers((70, 64), "bfloat16"), random_routes(70, 4, 2)
    if name is not None:
        matrices: dict[str, Any] = {
            part: quantize(np.asarray(getattr(weights, part), np.float32), FORMATS[name], axis=-2, dtype=x.dtype)
            for part in ("gate", "up", "down")
        }
        weights = dataclasses.replace(weights, **matrices)
    together = apply(x, routes, weights, options=AS_SERVED)
    for first in (0, 69):
        part = Routes(routes.ids_tk[first : first + 1], routes.weights_tk[first : first + 1])
        alone = apply(x[first : first + 1], part, weights, options=AS_SERVED)
        np.testing.assert_array_equal(alone[0], together[first])
    stacks = {
        part: jax.tree.map(lambda array: jnp.stack([jnp.zeros_like(array), array]), getattr(weights, part))
        for part in ("gate", "up", "down")
    }
    stacked: dict[str, Any] = {part: StackedExperts(stack, jnp.int32(1)) for part, stack in stacks.items()}
    of_stack = apply(x, routes, dataclasses.replace(weights, **stacked), options=AS_SERVED)
    np.testing.assert_array_equal(of_stack, together)


@pytest.mark.parametrize(
    ("shape", "values", "reason"),
    [
        ((4, 64, 20), "int8", "64 x 20 numbers are not multiples of 8"),
        ((4, 36, 16), "mxfp4", "36 x 16 numbers are not multiples of 8"),
        ((4, 64, 16), "int4", None),
    ],
)
def test_what_the_kernel_does_not_take_is_said(shape: tuple[int, ...], values: Any, reason: str | None) -> None:
    matrix = abstract_matrix(MatrixFormat(values), shape, -2, np.dtype(np.float32))
    assert grouped.unsupported_reason(matrix, "cuda") == reason
    assert grouped.unsupported_reason(matrix, "triton") is None
    plain: Any = jax.ShapeDtypeStruct(shape, np.float32)
    assert (grouped.unsupported_reason(plain, "cuda") is None) == (reason is None)


def test_a_jax_without_triton_gets_this_kernel_if_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unusable_reason", lambda: None)
    assert grouped.choose_backend() == "triton"
    monkeypatch.setattr(cuda_library, "_TRITON", "jax.experimental.pallas.no_triton")
    cuda_library.has_triton.cache_clear()
    found = grouped.choose_backend()
    monkeypatch.setattr(library, "unusable_reason", lambda: "not built")
    without = grouped.choose_backend()
    cuda_library.has_triton.cache_clear()
    assert (found, without) == ("cuda", None)
