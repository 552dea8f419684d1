"""What adapters add: the CPU kernel at every width of vectors, and XLA, against float64, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jpaged.kernels import lora, matmul
from jpaged.kernels.lora.cpu import CpuLora

Adapt = Callable[[jax.Array, jax.Array, lora.AdaptedMatrix], np.ndarray]
# `out` of the matrix, its groups of columns, and columns of each part.
SHAPES = {
    "one part": ((40,), 1, (40,)),
    "gates and ups": ((2, 37), 1, (37, 37)),
    "queries, keys, values": ((288,), 3, (192, 48, 48)),
    "wide": ((2100,), 1, (2100,)),
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
DTYPES = ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long)]


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.dtype(dtype))


def matrix_of(name: str, dtype: str, depth: int = 77, rank: int = 5, num_slots: int = 3) -> lora.AdaptedMatrix:
    out, num_groups, of_part = SHAPES[name]
    a = numbers((num_slots, len(of_part) * rank, depth), dtype, 1)
    b = tuple(numbers((num_slots, rank, width), dtype, 2 + i) for i, width in enumerate(of_part))
    return lora.AdaptedMatrix(numbers((depth, *out), dtype, 9), a, b, num_groups)


def oracle(x: np.ndarray, slot: int, matrix: lora.AdaptedMatrix) -> np.ndarray:
    """What one row adds, from its own adapter alone."""
    if slot == 0:
        return np.zeros(matrix.shape[1:])
    a, rank = np.asarray(matrix.a[slot - 1], np.float64), matrix.rank
    parts = []
    for part, b in enumerate(matrix.b):
        inner = (a[part * rank : (part + 1) * rank] @ x.astype(np.float64)).astype(matrix.dtype).astype(np.float64)
        parts.append(inner @ np.asarray(b[slot - 1], np.float64))
    of_groups = [part.reshape(matrix.num_groups, -1) for part in parts]
    return np.concatenate(of_groups, axis=1).reshape(matrix.shape[1:])


def in_xla(x: jax.Array, adapters_t: jax.Array, matrix: lora.AdaptedMatrix) -> np.ndarray:
    return np.asarray(jax.jit(lora.adapt)(x, adapters_t, matrix))


def by_kernel(kernel: CpuLora) -> Adapt:
    def adapt(x: jax.Array, adapters_t: jax.Array, matrix: lora.AdaptedMatrix) -> np.ndarray:
        sums_tn = np.asarray(jax.jit(kernel.adapt)(x, adapters_t, jnp.int32(len(x)), matrix))
        # Rows without an adapter are whatever lay there.
        return np.where(np.asarray(adapters_t)[:, None] > 0, sums_tn, 0).reshape(len(x), *matrix.shape[1:])

    return adapt


@pytest.fixture(params=["xla", 16, 8, 4], ids=str)
def adapt(request: pytest.FixtureRequest) -> Adapt:
    if request.param == "xla":
        return in_xla
    return by_kernel(dataclasses.replace(lora.loaded(), max_width=request.param))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_each_row_adds_what_its_own_adapter_makes_of_it(adapt: Adapt, name: str, dtype: str) -> None:
    matrix, slots = matrix_of(name, dtype), [0, 3, 1, 3, 3, 0, 3, 2, 3, 1, 3]
    x = numbers((len(slots), 77), dtype)
    got = adapt(x, jnp.asarray(slots, jnp.int32), matrix)
    want = np.stack([oracle(np.asarray(row), slot, matrix) for row, slot in zip(x, slots, strict=True)])
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * np.abs(want).max())


def test_neither_the_batch_nor_the_threads_show_in_a_single_bit() -> None:
    matrix, x = matrix_of("queries, keys, values", "bfloat16", 200), numbers((64, 200), "bfloat16")
    alone = by_kernel(lora.loaded())(x[:1], jnp.asarray([2], jnp.int32), matrix)[0]
    for num_rows in (2, 3, 4, 5, 7, 64):
        slots = np.random.default_rng(num_rows).integers(0, 4, num_rows).astype(np.int32)
        slots[-1] = 2
        rows = jnp.concatenate((x[64 - num_rows + 1 :], x[:1]))
        threads = dataclasses.replace(lora.loaded(), max_threads=1 + num_rows % 3)
        got = by_kernel(threads)(rows, jnp.asarray(slots), matrix)
        assert got[-1].tobytes() == alone.tobytes(), num_rows


def test_adapters_that_no_row_in_use_has_are_not_read() -> None:
    matrix = matrix_of("gates and ups", "float32")
    poisoned = dataclasses.replace(
        matrix, a=matrix.a.at[1].set(jnp.nan), b=tuple(b.at[1].set(jnp.nan) for b in matrix.b)
    )
    x = numbers((4, 77), "float32").at[3].set(jnp.nan)
    adapters_t = jnp.asarray([1, 3, 0, 2], jnp.int32)
    got = np.asarray(jax.jit(lora.loaded().adapt)(x, adapters_t, jnp.int32(3), poisoned))
    assert np.isfinite(got[:2]).all()
    want = np.stack([oracle(np.asarray(x[i]), slot, matrix).reshape(-1) for i, slot in ((0, 1), (1, 3))])
    np.testing.assert_allclose(got[:2], want, rtol=1e-5, atol=1e-5)


def test_operands_that_contradict_each_other_are_refused() -> None:
    matrix, x, adapters_t = matrix_of("one part", "float32"), numbers((4, 77), "float32"), jnp.ones(4, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and a differ"):
        by_kernel(lora.loaded())(x[:, :70], adapters_t, matrix)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows differ in number"):
        by_kernel(lora.loaded())(x, adapters_t[:3], matrix)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a and b differ in rank"):
        by_kernel(lora.loaded())(x, adapters_t, dataclasses.replace(matrix, a=matrix.a[:, :4]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_packed_products_add_it_to_the_sums_of_rows_that_have_one(num_parts: int, dtype: str) -> None:
    width, inner = 90, 45
    shape = (width, 2, inner) if num_parts == 2 else (width, inner)
    run, weights, x = matmul.loaded(), numbers(shape, dtype, 1), numbers((14, width), dtype)
    packed = run.packer(SingleDeviceSharding(jax.devices()[0])).pack(weights, num_parts=num_parts)
    sums = np.array(numbers((14, num_parts * inner), "float32", 2))
    slots = np.asarray([0, 1] * 7, np.int32)
    sums[slots == 0] = np.nan
    bias, residual = numbers(shape[1:], dtype, 3), numbers((14, inner), dtype, 4)
    delta = matmul.RowDelta(jnp.asarray(sums), jnp.asarray(slots))
    got = run.multiply(x, packed, jnp.int32(13), bias=bias, residual=residual, delta=delta)
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).reshape(width, -1)
    want += np.where(slots[:, None] > 0, sums, 0) + np.asarray(bias, np.float64).reshape(-1)
    if num_parts == 2:
        want = want[:, :inner] / (1 + np.exp(-want[:, :inner])) * want[:, inner:]
    want += np.asarray(residual, np.float64)
    rtol = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(np.asarray(got[:13], np.float64), want[:13], rtol=rtol, atol=1e-3)
    without = run.multiply(x, packed, jnp.int32(13), bias=bias, residual=residual)
    assert np.asarray(got)[slots == 0].tobytes() == np.asarray(without)[slots == 0].tobytes()


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "wide"])
def test_products_are_scaled_and_shifted_by_the_vectors_of_each_row_alone(name: str) -> None:
    out, num_groups, of_part = SHAPES[name]
    vectors = tuple(numbers((3, 2, width), "float32", 5 + i) for i, width in enumerate(of_part))
    matrix = dataclasses.replace(matrix_of(name, "float32"), vectors=vectors)
    slots = np.asarray([0, 3, 1, 3, 0, 2], np.int32)
    y = numbers((len(slots), *out), "float32", 7)
    got = np.asarray(jax.jit(lora.scaled)(y, jnp.asarray(slots), matrix))
    joined = np.asarray(lora.joined_vectors(matrix))
    for row, slot in enumerate(slots):
        alone = np.asarray(y[row]).reshape(-1)
        parts = [np.asarray(part[slot - 1], np.float32).reshape(2, num_groups, -1) for part in vectors]
        scales, shifts = np.concatenate(parts, axis=2).reshape(2, -1)
        if slot:
            np.testing.assert_array_equal(joined[slot - 1], [scales, shifts])
            alone = alone * (1 + scales) + shifts
        np.testing.assert_allclose(got[row].reshape(-1), alone, rtol=1e-5, atol=1e-5)
    assert got[slots == 0].tobytes() == np.asarray(y)[slots == 0].tobytes()


@pytest.mark.parametrize("num_parts", [1, 2])
def test_packed_products_scale_and_shift_the_sums_of_rows_with_vectors(num_parts: int) -> None:
    width, inner = 90, 45
    shape = (width, 2, inner) if num_parts == 2 else (width, inner)
    run, weights, x = matmul.loaded(), numbers(shape, "float32", 1), numbers((14, width), "float32")
    packed = run.packer(SingleDeviceSharding(jax.devices()[0])).pack(weights, num_parts=num_parts)
    sums, vectors = numbers((14, num_parts * inner), "float32", 2), numbers((2, 2, num_parts * inner), "float32", 3)
    slots, bias = np.asarray([0, 1, 2, 2, 1, 0, 2] * 2, np.int32), numbers(shape[1:], "float32", 3)

    def multiply(rows: slice) -> np.ndarray:
        delta = matmul.RowDelta(sums[rows], jnp.asarray(slots[rows]), vectors)
        return np.asarray(run.multiply(x[rows], packed, jnp.int32(len(slots[rows])), bias=bias, delta=delta))

    got = multiply(slice(None))
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).reshape(width, -1)
    scales, shifts = (np.asarray(vectors, np.float64)[np.maximum(slots - 1, 0), row] for row in range(2))
    want += np.where(slots[:, None] > 0, want * scales + shifts + np.asarray(sums), 0)
    want += np.asarray(bias, np.float64).reshape(-1)
    if num_parts == 2:
        want = want[:, :inner] / (1 + np.exp(-want[:, :inner])) * want[:, inner:]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    for row in (2, 6):
        assert multiply(slice(row, row + 1)).tobytes() == got[row].tobytes()
    wrong = matmul.RowDelta(sums, jnp.asarray(slots), vectors[:, :1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="scales and shifts of adapters do not fit the sums"):
        run.multiply(x, packed, jnp.int32(14), delta=wrong)
