"""The CPU product: every result against float64 at every width of vectors, and rows that never show in each other."""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jpaged.kernels.matmul import Gate, Norm, PackedMatrix, ProductKernel, kernel
from jpaged.models import rope
from tests.kernels.matmul.products import multiply

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 24, 25, 31, 64, 100, 128, 256, 512)
SHAPES = ((1, 1), (2, 31), (7, 32), (64, 33), (97, 100), (256, 64), (384, 96))
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-3}
DTYPES = ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long)]


def found_kernel() -> ProductKernel:
    found = kernel()
    assert isinstance(found, ProductKernel), found
    return found


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def pack(matrix: np.ndarray, *, is_embedding: bool = False, num_parts: int = 1) -> PackedMatrix:
    packer = found_kernel().packer(SingleDeviceSharding(jax.devices()[0]))
    return packer.pack(jnp.asarray(matrix), is_embedding=is_embedding, num_parts=num_parts)


def normalised(x: np.ndarray, norm: Norm | None, dtype: str) -> np.ndarray:
    """Float64, rounded as the kernel rounds."""
    x64 = x.astype(np.float64)
    if norm is None:
        return x64
    if norm.kind == "layer":
        x64 = x64 - x64.mean(-1, keepdims=True)
    x64 = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + norm.eps)
    x64 = x64 if norm.scale is None else x64 * np.asarray(norm.scale, np.float64)
    x64 = x64 if norm.bias is None else x64 + np.asarray(norm.bias, np.float64)
    return x64.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.fixture(params=[16, 8, 4], ids=lambda width: f"width{width}")
def limited(request: pytest.FixtureRequest) -> ProductKernel:
    """The kernel with vectors of so many floats at most."""
    return dataclasses.replace(found_kernel(), max_width=request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.thinned(7)
def test_products_are_those_of_float64(limited: ProductKernel, shape: tuple[int, int], dtype: str) -> None:
    matrix = numbers(shape, dtype)
    for num_rows in (1, 3, 14):
        x = numbers((num_rows, shape[0]), dtype, 1)
        want = x.astype(np.float64) @ matrix.astype(np.float64)
        got = multiply(limited, x, pack(matrix), dtype=np.dtype("float32"))
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * shape[0] ** 0.5 * 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer", "plain layer"])
@pytest.mark.thinned(5)
def test_what_is_around_a_product_is_computed_with_it(limited: ProductKernel, kind: str, dtype: str) -> None:
    depth, width = 70, 45
    matrix, x = numbers((depth, width), dtype), numbers((13, depth), dtype, 1) * 3
    scale, shift = (jnp.asarray(numbers((depth,), dtype, seed)) for seed in (2, 3))
    norm = {
        "rms": Norm("rms", 1e-5, scale),
        "layer": Norm("layer", 1e-5, scale, shift),
        "plain layer": Norm("layer", 1e-5, None),
    }[kind]
    bias, residual = numbers((width,), dtype, 4), numbers((13, width), dtype, 5)
    sums = normalised(x, norm, dtype) @ matrix.astype(np.float64) + bias.astype(np.float64)
    got = multiply(limited, x, pack(matrix), norm=norm, bias=jnp.asarray(bias), residual=jnp.asarray(residual))
    want = residual.astype(np.float64) + sums
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=TOLERANCE[dtype], atol=40 * TOLERANCE[dtype])
    assert got.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_alone(limited: ProductKernel, dtype: str) -> None:
    x = numbers((40, 51), dtype)
    norm = Norm("layer", 1e-5, jnp.asarray(numbers((51,), dtype, 1)), jnp.asarray(numbers((51,), dtype, 2)))
    got = np.asarray(jax.jit(lambda x: limited.normalise(x, norm, jnp.int32(38)))(x))
    want = normalised(x[:38], norm, dtype)
    np.testing.assert_allclose(got[:38].astype(np.float64), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not got[38:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [32, 48, 5])
@pytest.mark.thinned(5)
def test_a_matrix_of_two_parts_is_gated(limited: ProductKernel, inner: int, dtype: str) -> None:
    matrix, x = numbers((24, 2, inner), dtype), numbers((9, 24), dtype, 1)
    bias = numbers((2, inner), dtype, 2)
    gate, up = np.moveaxis(
        np.einsum("te,epf->tpf", x.astype(np.float64), matrix.astype(np.float64)) + bias.astype(np.float64), 1, 0
    )
    got = multiply(limited, x, pack(matrix, num_parts=2), bias=jnp.asarray(bias))
    np.testing.assert_allclose(
        got.astype(np.float64), silu(gate) * up, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_sums_have_an_activation_before_a_residual_is_added(limited: ProductKernel, activation: Gate) -> None:
    x = np.concatenate([np.linspace(-9, 9, 1801), [-1e30, -1e4, -1e-30, 0, 1e-30, 1e4]]).astype(np.float32)[:, None]
    matrix, bias = pack(np.ones((1, 1), np.float32)), jnp.float32([0.25])
    kernel = dataclasses.replace(limited, activation=activation)
    run = jax.jit(lambda x: kernel.multiply(x, matrix, jnp.int32(len(x)), bias=bias, residual=x))
    sums = x.astype(np.float64) + 0.25
    normal = 0.5 * np.vectorize(math.erfc)(-sums / 2**0.5)
    tanh = 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * sums * (1 + 0.044715 * np.minimum(sums**2, 1e10))))
    with np.errstate(over="ignore"):
        factor = {"silu": 1 / (1 + np.exp(-sums)), "gelu_tanh": tanh, "gelu": normal}[activation]
    np.testing.assert_allclose(run(x), x + sums * factor, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(1400, 384, 96), (700, 768, 5000)], ids=str)
@pytest.mark.long
def test_rows_that_are_divided_into_spans_have_the_bits_of_each_alone(shape: tuple[int, int, int]) -> None:
    """Rows exceed what stays in a cache, or blocks do; a span ends within the rows."""
    num_rows, depth, width = shape
    x, matrix = numbers((num_rows, depth), "float32", 1), numbers((depth, width), "float32")
    packed = pack(matrix)
    got = multiply(found_kernel(), x, packed)
    for row in (0, 335, 336, 347, 348, num_rows - 1):
        assert got[row].tobytes() == multiply(found_kernel(), x[row : row + 1], packed)[0].tobytes()
    np.testing.assert_allclose(got, x.astype(np.float64) @ matrix, rtol=0, atol=3e-4)


def test_every_float16_is_read_and_written_as_itself(limited: ProductKernel) -> None:
    """Subnormal, largest, infinite: a norm without a scale or a product with one changes none of them."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = bits[np.isfinite(bits)]
    got = multiply(limited, halves[:, None], pack(np.ones((1, 1), np.float16)))
    np.testing.assert_array_equal(got[:, 0], halves)
    got = multiply(limited, np.ones((1, 1), np.float16), pack(halves[None, :2048]))
    np.testing.assert_array_equal(got[0], halves[:2048])


def test_sums_are_rounded_to_float16_as_numpy_rounds_them(limited: ProductKernel) -> None:
    edges = [2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 2.0**-14 * (1 - 2.0**-12), 65504, 65519.9, 65520, 1e30]
    x = np.concatenate([edges, np.random.default_rng(0).standard_normal(500) * 10.0 ** np.arange(-9, 1).repeat(50)])
    x32 = np.concatenate([x, -x]).astype(np.float32)[:, None]
    got = multiply(limited, x32, pack(np.ones((1, 1), np.float32)), dtype=np.dtype("float16"))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, x32.astype(np.float16))


def test_gates_far_from_zero_are_finite(limited: ProductKernel) -> None:
    gates = np.array([-1e30, -200, -88, -87, 0, 87, 88, 200, 1e30], np.float32)[:, None]
    matrix = np.ones((1, 2, 1), np.float32)
    matrix[0, 1] = 0
    bias = jnp.asarray([0, 1], jnp.float32)
    got = multiply(limited, gates, pack(matrix, num_parts=2), bias=bias)
    np.testing.assert_allclose(got, np.where(gates < -80, 0, silu(np.maximum(gates, -80.0))), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_stay_in_their_row(limited: ProductKernel, dtype: str) -> None:
    x = numbers((4, 40), dtype)
    x[1, 3], x[2, 5] = np.nan, np.inf
    got = multiply(limited, x, pack(numbers((40, 33), dtype, 1)), norm=Norm("rms", 1e-6, jnp.ones(40, dtype)))
    assert np.isfinite(got[[0, 3]].astype(np.float32)).all()
    assert np.isnan(got[[1, 2]].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_in_use_are_zeros_whatever_lies_in_them(limited: ProductKernel, dtype: str) -> None:
    x, matrix = numbers((16, 40), dtype), pack(numbers((40, 50), dtype, 1))
    whole = multiply(limited, x, matrix)
    x[5:] = np.nan
    for num_rows in (0, 1, 5):
        got = multiply(limited, x, matrix, num_rows)
        assert got[:num_rows].tobytes() == whole[:num_rows].tobytes()
        assert not got[num_rows:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [96, 256, 97])
@pytest.mark.thinned(17)
def test_neither_the_batch_nor_the_threads_show_in_a_single_bit(limited: ProductKernel, depth: int, dtype: str) -> None:
    width = 200
    matrix, x = pack(numbers((depth, width), dtype)), numbers((512, depth), dtype, 1)
    around: dict[str, Any] = {
        "norm": Norm("rms", 1e-6, jnp.asarray(numbers((depth,), dtype, 2))),
        "bias": jnp.ones(width, dtype),
    }
    alone = multiply(limited, x[:1], matrix, **around)[0]
    last = multiply(limited, x[511:], matrix, **around)[0]
    for num_rows in ROW_COUNTS:
        threads = dataclasses.replace(limited, max_threads=1 + num_rows % 3)
        got = multiply(threads, x[512 - num_rows :], matrix, **around)
        assert got[-1].tobytes() == last.tobytes(), num_rows
        got = multiply(threads, x[:num_rows], matrix, **around)
        assert got[0].tobytes() == alone.tobytes(), num_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embeddings_multiply_and_give_their_rows(dtype: str) -> None:
    embedding, x = numbers((77, 31), dtype), numbers((3, 31), dtype, 1)
    packed = pack(embedding, is_embedding=True)
    got = multiply(found_kernel(), x, packed, dtype=np.dtype("float32"))
    np.testing.assert_allclose(got, x.astype(np.float64) @ embedding.astype(np.float64).T, rtol=0, atol=5e-5)
    ids = np.array([0, 76, 31, 32, 5], np.int32)
    rows = jax.jit(lambda packed, ids: packed.rows(ids))(packed, ids)
    assert np.asarray(rows).tobytes() == embedding[ids].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(97, 100), (34, 64), (40, 2, 33), (70, 2, 64)])
def test_matrices_are_packed_in_either_layout(shape: tuple[int, ...], dtype: str) -> None:
    """Rows or columns may be adjacent in memory; lengths are not those of lines, and blocks not whole."""
    matrix, num_parts = numbers(shape, dtype), 2 if len(shape) == 3 else 1
    depth, num_columns, packer = shape[0], shape[-1], found_kernel().packer(SingleDeviceSharding(jax.devices()[0]))
    deep = 2 if dtype == "bfloat16" else 1
    padded = np.zeros((num_parts, -(-num_columns // 32) * 32, -(-depth // deep) * deep), matrix.dtype)
    padded[:, :num_columns, :depth] = np.moveaxis(matrix.reshape(depth, num_parts, num_columns), 0, -1)
    wanted = padded.reshape(-1, 32, padded.shape[-1] // deep, deep).swapaxes(1, 2)
    for given in (matrix, np.moveaxis(np.ascontiguousarray(np.moveaxis(matrix, 0, -1)), -1, 0)):
        packed = packer.pack(given, num_parts=num_parts)
        np.testing.assert_array_equal(np.asarray(packed.blocks).reshape(wanted.shape), wanted)


def test_packed_matrices_lie_where_they_were_packed() -> None:
    packer = found_kernel().packer(SingleDeviceSharding(jax.devices()[0]))
    first, second = (packer.pack(jnp.asarray(numbers((64, 64), "float32", seed))) for seed in range(2))
    begins = [packed.blocks.unsafe_buffer_pointer() for packed in (first, second)]
    assert begins[0] % (2 << 20) == 0, "it begins with a huge page"
    assert begins[1] - begins[0] == first.blocks.nbytes


def test_packed_matrices_lie_in_memory_that_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory has huge pages only where the system is set up for it."""
    flags, real = list[int](), mmap.mmap

    def recorded(*arguments: int, **named: int) -> mmap.mmap:
        flags.append(named.get("flags", mmap.MAP_SHARED))
        return real(*arguments, **named)

    monkeypatch.setattr(mmap, "mmap", recorded)
    pack(numbers((64, 33), "float32"))
    assert flags == [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS]


def test_a_system_without_huge_pages_packs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # no such advice: EINVAL
    matrix, x = numbers((64, 33), "float32"), numbers((3, 64), "float32", 1)
    np.testing.assert_allclose(multiply(found_kernel(), x, pack(matrix)), x @ matrix, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.thinned(5)
def test_heads_are_normalised_and_turned(limited: ProductKernel, has_norms: bool, dtype: str) -> None:
    num_tokens, num_groups, group, dim = 20, 3, 2, 40
    qkv = numbers((num_tokens, num_groups, group + 2, dim), dtype)
    angles = np.random.default_rng(3).uniform(0, 6, (num_tokens, dim // 2)).astype(np.float32)
    cos_sin = jnp.cos(angles), jnp.sin(angles)
    scales = [jnp.asarray(numbers((dim,), dtype, seed)) for seed in (4, 5)] if has_norms else [None, None]
    q, k, v = jax.jit(lambda qkv, n: limited.rotate(qkv, cos_sin, n, q_scale=scales[0], k_scale=scales[1], eps=1e-5))(
        qkv, jnp.int32(num_tokens)
    )

    def turned(x: np.ndarray, scale: jax.Array | None) -> np.ndarray:
        x64 = x.astype(np.float64) if scale is None else normalised(x, Norm("rms", 1e-5, scale), "float32")
        return np.asarray(rope.apply(jnp.asarray(x64, jnp.float32), *cos_sin))

    want_q = turned(qkv[:, :, :group].reshape(num_tokens, -1, dim), scales[0])
    np.testing.assert_allclose(np.asarray(q, np.float32), want_q, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    want_k = turned(qkv[:, :, group], scales[1])
    np.testing.assert_allclose(np.asarray(k, np.float32), want_k, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    assert np.asarray(v).tobytes() == np.ascontiguousarray(qkv[:, :, group + 1]).tobytes()


def test_heads_of_rows_that_are_not_in_use_are_zeros() -> None:
    qkv, cos_sin = jnp.full((6, 1, 3, 8), jnp.nan).at[:2].set(1), (jnp.ones((6, 4)), jnp.zeros((6, 4)))
    for part in found_kernel().rotate(qkv, cos_sin, jnp.int32(2)):
        np.testing.assert_array_equal(np.asarray(part)[:2], 1)
        np.testing.assert_array_equal(np.asarray(part)[2:], 0)


def test_operands_that_contradict_each_other_are_refused() -> None:
    matrix, x = pack(numbers((40, 50), "float32")), numbers((4, 40), "float32")
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and matrix differ in depth"):
        multiply(found_kernel(), x[:, :39], matrix)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and matrix differ in type"):
        multiply(found_kernel(), x.astype(jnp.bfloat16), matrix)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the bias does not fit"):
        multiply(found_kernel(), x, matrix, bias=jnp.ones(49))
    with pytest.raises(jax.errors.JaxRuntimeError, match="what is added does not fit"):
        multiply(found_kernel(), x, matrix, residual=jnp.ones((4, 49)))
