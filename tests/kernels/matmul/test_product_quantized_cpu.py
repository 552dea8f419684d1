"""The CPU product of quantized matrices: each format at every width of vectors against float64, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jpaged.errors import Unsupported
from jpaged.kernels.cpu.library import ISAS, limit_isa
from jpaged.kernels.matmul import Norm, PackedMatrix, ProductKernel, QuantizedMatrix, can_pack, kernel
from jpaged.kernels.matmul.multiply import Gate
from jpaged.kernels.matmul.quantized import MatrixFormat, abstract_matrix, dequantize, quantize
from jpaged.kernels.matmul.quantized import multiply as multiply_in_xla
from jpaged.kernels.matrix_format import NUM_BITS, Values
from tests.kernels.matmul.products import multiply

FORMATS = {
    "int8": MatrixFormat("int8"),
    "int8 groups": MatrixFormat("int8", 32, has_zeros=True),
    "int8 rows": MatrixFormat("int8", activations="int8"),
    "int4": MatrixFormat("int4"),
    "int4 groups": MatrixFormat("int4", 64),
    "int4 zeros": MatrixFormat("int4", 32, has_zeros=True),
    "int4 fractions": MatrixFormat("int4", 32, has_zeros=True, has_whole_zeros=False),
    "int8 fractions": MatrixFormat("int8", 16, has_zeros=True, has_whole_zeros=False),
    "mxfp4": MatrixFormat("mxfp4", 32),
    "fp8": MatrixFormat("fp8"),
    "fp8 groups": MatrixFormat("fp8", 64),
    "int5 groups": MatrixFormat("int8", 32, num_bits=5, has_half_scales=True),
    "int5 fractions": MatrixFormat("int8", 32, has_zeros=True, has_whole_zeros=False, num_bits=5),
    "int6 groups": MatrixFormat("int8", 16, num_bits=6),
    "int6 zeros": MatrixFormat("int8", 64, has_zeros=True, num_bits=6, has_half_scales=True),
}
DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long))
# Of the largest result. Two digits of rows of bfloat16 hold 15 bits of a span's largest number.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-5, "float16": 1e-6}


def found_kernel() -> ProductKernel:
    found = kernel()
    assert isinstance(found, ProductKernel), found
    return found


@pytest.fixture(params=[16, 8, 4], ids=lambda width: f"width{width}")
def limited(request: pytest.FixtureRequest) -> ProductKernel:
    """The kernel with vectors of so many floats at most."""
    return dataclasses.replace(found_kernel(), max_width=request.param)


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def pack(matrix: QuantizedMatrix, num_parts: int = 1, *, rounds_rows: bool = False) -> PackedMatrix:
    packer = found_kernel().packer(SingleDeviceSharding(jax.devices()[0]), rounds_rows=rounds_rows)
    return packer.pack(matrix, num_parts=num_parts)


def rounded(x: np.ndarray, step: float | None = None) -> np.ndarray:
    """Rows as a checkpoint with int8 rows asks for them."""
    x32 = x.astype(np.float32)
    steps = np.abs(x32).max(1, keepdims=True) / np.float32(127) if step is None else np.float32(step)
    return np.clip(np.rint(x32 / steps), -128, 127).astype(np.float64) * steps


def rounded_by_spans(x: np.ndarray, group: int) -> np.ndarray:
    """Rows as int8 activations are: a step for each group of the matrix, or for 64 numbers if groups are larger."""
    x32 = x.astype(np.float32)
    rounded = np.zeros(x.shape, np.float64)
    for begin in range(0, x.shape[1], group):
        for at in range(begin, min(begin + group, x.shape[1]), 64):
            span = slice(at, min(at + 64, begin + group))
            largest = np.abs(x32[:, span]).max(1, keepdims=True)
            is_negligible = largest < 2.0**-100
            largest = np.where(is_negligible, np.float32(1), largest)
            integers = np.where(is_negligible, 0, np.rint(x32[:, span] * (np.float32(127) / largest)))
            rounded[:, span] = integers * (largest / np.float32(127)).astype(np.float64)
    return rounded


def weights(matrix: QuantizedMatrix) -> np.ndarray:
    return np.asarray(_dequantize(matrix, np.dtype(np.float32))).astype(np.float64)


_dequantize = jax.jit(dequantize, static_argnums=1)
"""As one program: each of its operations would be compiled otherwise."""


def assert_near(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.thinned(13)
def test_products_are_those_of_the_weights_in_float64(limited: ProductKernel, name: str, dtype: str) -> None:
    form = FORMATS[name]
    for depth, width, num_rows in ((192, 33, 14), (384, 64, 1)) if form.group_size else ((3, 1, 3), (301, 40, 14)):
        matrix = quantize(numbers((depth, width), "float32"), form)
        x = numbers((num_rows, depth), dtype, 1)
        want = (rounded(x) if form.activations else x.astype(np.float64)) @ weights(matrix)
        assert_near(multiply(limited, x, pack(matrix), dtype=np.dtype("float32")), want, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["int8", "int4", "mxfp4", "fp8"])
@pytest.mark.thinned(5)
def test_every_code_is_its_number(limited: ProductKernel, kind: Any) -> None:
    """A column for each place of a lane, whose codes begin with another one; rows that take one number each."""
    dtype, depth = MatrixFormat(kind).dtype, 256
    codes = np.arange(256, dtype=np.uint8) if NUM_BITS[kind] == 8 else np.arange(256, dtype=np.uint8) % 16
    values = np.stack([np.roll(codes, place) for place in range(8)], axis=1)
    values = values.view(dtype) if kind != "int4" else (values.view(np.int8) - 8).astype(dtype)
    values = np.where(np.isfinite(values.astype(np.float32)), values, np.zeros((), dtype))
    scales = np.full((1, 8), 2.0, np.float32)
    arrays = (jnp.asarray(values), jnp.asarray(scales), None, None, None)
    matrix = QuantizedMatrix(*arrays, axis=-2, activations=None, dtype=np.dtype("float32"))
    for dtype_of_rows in TOLERANCE:
        rows = np.eye(depth, dtype=jnp.dtype(dtype_of_rows))
        got = multiply(limited, rows, pack(matrix), dtype=np.dtype("float32"))
        np.testing.assert_array_equal(got, 2 * values.astype(np.float32))


@pytest.mark.parametrize("rounds_rows", [False, True])
@pytest.mark.parametrize("num_bits", [5, 6])
def test_every_code_of_five_and_six_bits_is_its_number(
    limited: ProductKernel, num_bits: int, rounds_rows: bool
) -> None:
    """A column for each place of a chunk, as above."""
    depth, num_places, least = 128, 32, -(1 << (num_bits - 1))
    codes = np.arange(depth) % (1 << num_bits) + least
    values = np.stack([np.roll(codes, place) for place in range(num_places)], axis=1).astype(np.int8)
    arrays = (jnp.asarray(values), jnp.full((depth // 32, num_places), 2.0, np.float32), None, None, None)
    options: dict[str, Any] = {"axis": -2, "activations": None, "dtype": np.dtype("float32"), "num_bits": num_bits}
    matrix = pack(QuantizedMatrix(*arrays, **options), rounds_rows=rounds_rows)
    assert matrix.scales is not None
    assert matrix.scales.kind == f"int{num_bits}"
    assert matrix.blocks.nbytes == depth * num_places * num_bits // 8
    got = multiply(limited, np.eye(depth, dtype=np.float32), matrix, dtype=np.dtype("float32"))
    np.testing.assert_array_equal(got, 2 * values.astype(np.float32))


@pytest.mark.parametrize(
    ("num_bits", "group", "kind"),
    [(5, 16, "int8"), (5, 96, "int5"), (6, 8, "int8"), (6, 48, "int6"), (None, 32, "int8")],
)
def test_groups_that_are_no_whole_chunks_keep_a_byte_per_number(num_bits: int | None, group: int, kind: str) -> None:
    form = MatrixFormat("int8", group, num_bits=num_bits)
    matrix, x = quantize(numbers((2 * group, 40), "float32"), form), numbers((3, 2 * group), "float32", 1)
    packed = pack(matrix)
    assert packed.scales is not None
    assert packed.scales.kind == kind
    assert_near(multiply(found_kernel(), x, packed), x.astype(np.float64) @ weights(matrix), TOLERANCE["float32"])


def test_rows_that_are_not_in_use_may_stay_undefined() -> None:
    matrix, x = pack(quantize(numbers((192, 40), "float32"), FORMATS["int8 groups"])), numbers((9, 192), "float32", 1)
    kernel = dataclasses.replace(found_kernel(), clears=False)
    called = jax.jit(kernel.multiply)
    got = np.asarray(called(jnp.asarray(x), matrix, jnp.int32(4)))
    assert got[:4].tobytes() == multiply(found_kernel(), x[:4], matrix).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "int4 zeros", "fp8 groups"])
@pytest.mark.thinned(5)
def test_norm_gate_bias_and_sum_are_computed_around_it(limited: ProductKernel, name: str, dtype: str) -> None:
    depth, inner = 128, 45
    matrix = quantize(numbers((depth, 2, inner), "float32"), FORMATS[name])
    x, bias = numbers((13, depth), dtype, 1), numbers((2, inner), dtype, 2)
    residual = numbers((13, inner), dtype, 3)
    norm = Norm("rms", 1e-5, jnp.asarray(numbers((depth,), dtype, 4)))
    around: dict[str, Any] = {"norm": norm, "bias": jnp.asarray(bias), "residual": jnp.asarray(residual)}
    got = multiply(limited, x, pack(matrix, 2), **around)
    x64 = x.astype(np.float64)
    x64 = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm.scale, np.float64)
    x64 = x64.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)
    gate, up = np.moveaxis(np.einsum("te,epf->tpf", x64, weights(matrix)) + bias.astype(np.float64), 1, 0)
    want = residual.astype(np.float64) + gate / (1 + np.exp(-gate)) * up
    assert_near(got, want, {"float32": 2e-6, "bfloat16": 5e-3, "float16": 6e-4}[dtype])


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_have_the_activation_of_the_model(limited: ProductKernel, gate: Gate) -> None:
    """Gates are those of a bias alone: from where the activation vanishes to where it is the identity."""
    gates = np.concatenate([np.linspace(-9, 9, 181), [-1e30, -1e4, -87.5, -40, -1e-30, 0, 1e-30, 40, 1e4, 1e15]])
    bias = np.stack([gates, np.full(len(gates), 1.5)]).astype(np.float32)
    matrix = quantize(np.zeros((32, 2, len(gates)), np.float32), FORMATS["int8"])
    run, x = dataclasses.replace(limited, gate=gate), numbers((2, 32), "float32")
    got = multiply(run, x, pack(matrix, 2), bias=jnp.asarray(bias))
    act = jax.nn.silu if gate == "silu" else jax.nn.gelu
    want = np.asarray(act(jnp.asarray(bias[0]))) * np.float32(1.5)
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("step", [None, 0.02])
def test_rows_of_int8_are_rounded_as_xla_rounds_them(limited: ProductKernel, step: float | None) -> None:
    matrix = quantize(numbers((200, 50), "float32"), FORMATS["int8 rows"])
    if step is not None:
        matrix = dataclasses.replace(matrix, input_scale=jnp.float32(step))
    x = numbers((9, 200), "float32", 1)
    x[3] = 0
    got = multiply(limited, x, pack(matrix))
    assert_near(got, np.asarray(multiply_in_xla(jnp.asarray(x), matrix)).astype(np.float64), 1e-6)
    assert_near(got[[0]], rounded(x[:1], step) @ weights(matrix), 1e-6)
    assert not got[3].any()


def test_rows_that_a_checkpoint_rounds_to_fp8_by_its_own_scale_are_taken_as_they_are(limited: ProductKernel) -> None:
    """What static activations of an FP8 checkpoint bring is no step of int8."""
    matrix = quantize(numbers((200, 50), "float32"), MatrixFormat("fp8", activations="fp8"))
    matrix = dataclasses.replace(matrix, input_scale=jnp.float32(0.02))
    x = numbers((9, 200), "float32", 1)
    assert_near(multiply(limited, x, pack(matrix)), x.astype(np.float64) @ weights(matrix), TOLERANCE["float32"])


def test_groups_may_be_listed(limited: ProductKernel) -> None:
    depth, form = 160, MatrixFormat("int4", 32, has_zeros=True)
    matrix = quantize(numbers((depth, 40), "float32"), form)
    group_ids = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 32)).astype(np.int32)
    matrix = dataclasses.replace(matrix, group_ids=jnp.asarray(group_ids))
    norm = Norm("rms", 1e-6, jnp.asarray(numbers((depth,), "float32", 2)))
    x = numbers((7, depth), "float32", 1)
    normalised = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm.scale)
    assert_near(multiply(limited, x, pack(matrix), norm=norm), normalised @ weights(matrix), 2e-6)


def test_listed_groups_of_several_sizes_are_refused() -> None:
    matrix = quantize(numbers((64, 8), "float32"), MatrixFormat("int4", 32))
    group_ids = jnp.asarray(np.arange(64) // 48, jnp.int32)
    with pytest.raises(Unsupported, match="linear_backend: cpu cannot multiply groups of 16 to 48 numbers"):
        pack(dataclasses.replace(matrix, group_ids=group_ids))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.thinned(37)
def test_neither_the_batch_nor_the_threads_show_in_a_single_bit(limited: ProductKernel, name: str, dtype: str) -> None:
    depth = 160 if FORMATS[name].group_size is None else 192
    matrix, x = pack(quantize(numbers((depth, 200), "float32"), FORMATS[name])), numbers((200, depth), dtype, 1)
    alone, last = multiply(limited, x[:1], matrix)[0], multiply(limited, x[199:], matrix)[0]
    for num_rows in (2, 5, 12, 13, 97, 200):
        threads = dataclasses.replace(limited, max_threads=1 + num_rows % 3)
        assert multiply(threads, x[200 - num_rows :], matrix)[-1].tobytes() == last.tobytes(), num_rows
        assert multiply(threads, x[:num_rows], matrix)[0].tobytes() == alone.tobytes(), num_rows


ROUNDED = [name for name in FORMATS if not name.startswith("fp8") and name != "int8 rows"]
"""Formats whose rows int8 activations round."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ROUNDED, "int8 large groups"])
@pytest.mark.thinned(13)
def test_int8_activations_are_rounded_by_spans(limited: ProductKernel, name: str, dtype: str) -> None:
    form = FORMATS.get(name, MatrixFormat("int8", 96))
    for depth, width, num_rows in ((192, 33, 14), (384, 64, 1)) if form.group_size else ((3, 1, 3), (301, 40, 14)):
        matrix = quantize(numbers((depth, width), "float32"), form)
        x = numbers((num_rows, depth), dtype, 1)
        x[0, : depth // 2] = 0
        want = rounded_by_spans(x, matrix.group_size) @ weights(matrix)
        got = multiply(limited, x, pack(matrix, rounds_rows=True), dtype=np.dtype("float32"))
        assert_near(got, want, 1e-6)


@pytest.fixture
def with_isa() -> Iterator[Callable[[str], str]]:
    """Limit the instruction set; return the core that then runs."""
    found = found_kernel()

    def limit(isa: str) -> str:
        limit_isa(found.library, isa)
        return found.library.jpaged_product_core().decode()

    yield limit
    limit(ISAS[-1])


@pytest.mark.parametrize("name", [*ROUNDED, "int8 large groups"])
@pytest.mark.thinned(3)
def test_int8_activations_have_the_same_bits_with_every_instruction_set(
    name: str, with_isa: Callable[[str], str]
) -> None:
    form = FORMATS.get(name, MatrixFormat("int8", 96))
    depth = 192 if form.group_size else 100
    matrix = pack(quantize(numbers((depth, 70), "float32"), form), rounds_rows=True)
    x = numbers((101, depth), "float32", 1)
    x[3] = np.where(x[3] < 0, -1, 1)
    every = {with_isa(isa): [multiply(found_kernel(), x[:count], matrix) for count in (1, 3, 101)] for isa in ISAS}
    assert "baseline" in every
    for core, results in every.items():
        for got, want in zip(results, every["baseline"], strict=True):
            assert got.tobytes() == want.tobytes(), core
    assert_near(
        every["baseline"][-1],
        rounded_by_spans(x, form.group_size or depth) @ weights(quantize(numbers((depth, 70), "float32"), form)),
        1e-6,
    )


def test_int8_activations_differ_little_from_exact_ones(limited: ProductKernel) -> None:
    matrix, x = quantize(numbers((256, 64), "float32"), FORMATS["int4 zeros"]), numbers((9, 256), "float32", 1)
    exact, rounded_ = (multiply(limited, x, pack(matrix, rounds_rows=rounds)) for rounds in (False, True))
    error = np.sqrt(np.square(rounded_ - exact).mean() / np.square(exact).mean())
    assert 1e-4 < error < 8e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.thinned(13)
@pytest.mark.long
def test_int8_activations_of_a_row_do_not_depend_on_others(limited: ProductKernel, name: str, dtype: str) -> None:
    depth = 160 if FORMATS[name].group_size is None else 192
    matrix = pack(quantize(numbers((depth, 2, 70), "float32"), FORMATS[name]), 2, rounds_rows=True)
    norm, x = Norm("rms", 1e-5, jnp.asarray(numbers((depth,), dtype, 4))), numbers((200, depth), dtype, 1)
    alone, last = multiply(limited, x[:1], matrix, norm=norm)[0], multiply(limited, x[199:], matrix, norm=norm)[0]
    for num_rows in (2, 6, 7, 13, 97, 200):
        threads = dataclasses.replace(limited, max_threads=1 + num_rows % 3)
        assert multiply(threads, x[200 - num_rows :], matrix, norm=norm)[-1].tobytes() == last.tobytes(), num_rows
        assert multiply(threads, x[:num_rows], matrix, norm=norm)[0].tobytes() == alone.tobytes(), num_rows


def test_int8_activations_are_those_of_a_listed_order(limited: ProductKernel) -> None:
    """A span has numbers of one group, which lie apart in the row."""
    matrix = quantize(numbers((160, 40), "float32"), MatrixFormat("int4", 32, has_zeros=True))
    group_ids = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 32)).astype(np.int32)
    matrix = dataclasses.replace(matrix, group_ids=jnp.asarray(group_ids))
    x, order = numbers((7, 160), "float32", 1), np.argsort(group_ids, kind="stable")
    want = rounded_by_spans(x[:, order], 32) @ weights(matrix)[order]
    assert_near(multiply(limited, x, pack(matrix, rounds_rows=True)), want, 1e-6)


def test_int8_activations_of_numbers_that_are_tiny_or_not_finite(limited: ProductKernel) -> None:
    x = numbers((6, 192), "float32")
    x[1, 150], x[2, 5], x[3], x[4] = np.nan, np.inf, 1e-35, x[4] * np.float32(1e30)
    matrix = quantize(numbers((192, 33), "float32", 1), FORMATS["int4 zeros"])
    got = multiply(limited, x, pack(matrix, rounds_rows=True))
    assert not np.isfinite(got[[1, 2]]).any()
    assert not got[3].any()
    for row in (0, 4, 5):
        assert_near(got[row], rounded_by_spans(x[[row]], 32)[0] @ weights(matrix), 1e-6)


def test_matrices_of_floats_leave_rows_unrounded() -> None:
    matrix, x = quantize(numbers((128, 33), "float32"), FORMATS["fp8"]), numbers((3, 128), "float32", 1)
    exact, rounds = (multiply(found_kernel(), x, pack(matrix, rounds_rows=rounds)) for rounds in (False, True))
    assert exact.tobytes() == rounds.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8 rows", "int4 zeros", "mxfp4", "fp8"])
@pytest.mark.thinned(5)
def test_numbers_that_are_not_finite_stay_in_their_row(limited: ProductKernel, name: str, dtype: str) -> None:
    x = numbers((4, 192), dtype)
    x[1, 150], x[2, 5] = np.nan, np.inf
    got = multiply(
        limited, x, pack(quantize(numbers((192, 33), "float32", 1), FORMATS[name])), dtype=np.dtype("float32")
    )
    assert np.isfinite(got[[0, 3]]).all()
    assert not np.isfinite(got[[1, 2]]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_any_size_multiply(limited: ProductKernel, dtype: str) -> None:
    """Rows of one size each, from nearly the smallest to nearly the largest, and what is far apart in one."""
    sizes = [1e-6, 1e-4, 1, 10, 1e4] if dtype == "float16" else [1e-25, 1e-6, 1, 1e6, 1e30]
    x = numbers((5, 256), dtype, 1) * np.array(sizes)[:, None].astype(jnp.dtype(dtype))
    x[2, ::16] *= 500
    matrix = quantize(numbers((256, 40), "float32"), FORMATS["int8"])
    got = multiply(limited, x, pack(matrix), dtype=np.dtype("float32"))
    for row in range(5):
        tolerance = 3e-4 if dtype == "bfloat16" else 2e-6
        assert_near(got[row], x[row].astype(np.float64) @ weights(matrix), tolerance)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.thinned(3)
@pytest.mark.long
def test_embeddings_multiply_and_give_their_rows(name: str) -> None:
    depth = 96 if FORMATS[name].group_size == 32 else 128
    matrix = quantize(numbers((77, depth), "float32"), FORMATS[name], axis=-1)
    packed, x = pack(matrix), numbers((3, depth), "float32", 1)
    want = (rounded(x) if FORMATS[name].activations else x.astype(np.float64)) @ weights(matrix).T
    assert_near(multiply(found_kernel(), x, packed), want, 1e-6)
    ids = np.array([0, 76, 31, 32, 5], np.int32)
    rows = jax.jit(lambda packed, ids: packed.rows(ids))(packed, ids)
    np.testing.assert_array_equal(np.asarray(rows), np.asarray(matrix.rows(jnp.asarray(ids))))


def test_shapes_are_packed_as_arrays_are() -> None:
    for form in FORMATS.values():
        matrix = quantize(numbers((192, 2, 40), "float32"), form)
        shapes = abstract_matrix(form, (192, 2, 40), -3, np.dtype(np.float32))
        wanted, got = jax.tree.leaves_with_path(pack(shapes, 2)), jax.tree.leaves_with_path(pack(matrix, 2))
        assert [path for path, _ in wanted] == [path for path, _ in got]
        assert [(leaf.shape, leaf.dtype) for _, leaf in wanted] == [(leaf.shape, leaf.dtype) for _, leaf in got]


def test_numbers_lie_in_so_many_bytes() -> None:
    for kind, num_bytes in (("int8", 1.0), ("int4", 0.5), ("mxfp4", 0.5), ("fp8", 1.0)):
        packed = pack(quantize(numbers((256, 64), "float32"), MatrixFormat(cast("Values", kind))))
        assert packed.blocks.nbytes == num_bytes * 256 * 64


def test_groups_that_are_no_whole_lanes_stay_with_xla() -> None:
    whole = quantize(numbers((48, 8), "float32"), MatrixFormat("int4", 16))
    parts = quantize(numbers((48, 8), "float32"), MatrixFormat("int4", 12))
    assert can_pack(whole)
    assert not can_pack(parts)
    assert can_pack(quantize(numbers((48, 8), "float32"), MatrixFormat("int8", 12)))
    assert not can_pack(quantize(numbers((2, 48, 8), "float32"), MatrixFormat("int4", 16), axis=-2)), "two of them"


def test_operands_that_contradict_each_other_are_refused() -> None:
    matrix, x = pack(quantize(numbers((64, 50), "float32"), FORMATS["int4 zeros"])), numbers((4, 64), "float32")

    def changed(packed: PackedMatrix, **fields: Any) -> PackedMatrix:
        assert packed.scales is not None
        return dataclasses.replace(packed, scales=dataclasses.replace(packed.scales, **fields))

    eight = pack(quantize(numbers((64, 50), "float32"), FORMATS["fp8"]))
    wrong = {
        "groups are no whole chunks": changed(matrix, group=12),
        "the scales do not fit": changed(matrix, scales=jnp.ones((1, 2, 32))),
        "the zeros do not fit": changed(matrix, zeros=jnp.ones((1, 2, 32), jnp.int8)),
        "the order does not fit": changed(matrix, order=jnp.arange(63, dtype=jnp.int32)),
        "rows have no step": changed(matrix, step=jnp.ones(1)),
        "rows of int8 want whole": changed(eight, rounding="row"),
        "rows of int8 want whole numbers": changed(eight, rounding="spans"),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and matrix differ in depth"):
        multiply(found_kernel(), x[:, :40], matrix)
    for reason, other in wrong.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
            multiply(found_kernel(), x, other)
