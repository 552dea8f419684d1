"""The GPUs' product of groups of rows, in Pallas' interpreter: every format against float64, whatever the groups."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jpaged.device.mesh import MESH_AXES, build_mesh
from jpaged.device.sharded_matmul import _matrix_specs
from jpaged.kernels.matmul import on_device, quantized
from jpaged.kernels.matmul.quantized import (
    QuantizedMatrix,
    abstract_matrix,
    component_axes,
    dequantize,
    quantize,
    rows_on_device,
)
from jpaged.kernels.matmul.triton import form, grouped
from jpaged.kernels.matmul.triton.form import choose_form, list_tiles, max_tiles, split_depth, unsupported_reason
from jpaged.kernels.matrix_format import MatrixFormat
from tests.conftest import QUICK_XLA_OPTIONS

FORMATS = {
    "int8": MatrixFormat("int8", has_zeros=True),
    "int8 rows": MatrixFormat("int8", activations="int8"),
    "int8 groups": MatrixFormat("int8", 32, has_zeros=True, activations="int8"),
    "int4": MatrixFormat("int4"),
    "int4 groups": MatrixFormat("int4", 64, has_zeros=True),
    "mxfp4": MatrixFormat("mxfp4", 32),
    "int4 rows": MatrixFormat("int4", 32, activations="int8"),
    "fp8": MatrixFormat("fp8"),
    "fp8 rows": MatrixFormat("fp8", activations="fp8"),
    "fp8 blocks": MatrixFormat("fp8", 64, activations="fp8-groups"),
}
DEPTH, OUT = 128, (2, 13)


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def matrices_of(name: str, num_matrices: int, dtype: Any = jnp.bfloat16) -> QuantizedMatrix:
    return quantize(normal((num_matrices, DEPTH, *OUT)), FORMATS[name], axis=-3, dtype=np.dtype(dtype))


def interpreted(multiply: Any) -> Any:
    called = functools.partial(multiply, is_interpreted=True)
    return jax.jit(called, compiler_options=QUICK_XLA_OPTIONS)


@pytest.fixture(params=[False, True], ids=["no fp8", "fp8"])
def has_fp8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the device multiplies floats of 8 bits."""
    has_fp8: bool = request.param
    monkeypatch.setattr(quantized, "multiplies_fp8", lambda: has_fp8)
    monkeypatch.setattr(grouped, "multiplies_fp8", lambda: has_fp8)
    return has_fp8


def expected(x: jax.Array, matrix: QuantizedMatrix) -> np.ndarray:
    """Rows as the device multiplies them, times weights, in float64."""
    rows, scales = rows_on_device(x, matrix)
    wide = np.asarray(rows, np.float64)
    if scales is not None:
        wide = wide * np.repeat(np.asarray(scales, np.float64), DEPTH // scales.shape[-1], axis=-1)
    return wide @ np.asarray(dequantize(matrix, np.dtype(np.float32)), np.float64).reshape(DEPTH, -1)


IN_FLOAT16 = [pytest.param(name, jnp.float16, marks=pytest.mark.long) for name in FORMATS]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.bfloat16) for name in FORMATS), ("int4 groups", jnp.float32), *IN_FLOAT16]
)
@pytest.mark.thinned(9)
def test_rows_of_one_matrix_are_multiplied_with_what_it_stands_for(name: str, dtype: Any) -> None:
    matrix = jax.tree.map(lambda array: array[0], matrices_of(name, 1, dtype))
    x = jnp.asarray(normal((19, DEPTH), 1), dtype)
    got = interpreted(grouped.multiply_one)(*rows_on_device(x, matrix), matrix)
    want = expected(x, matrix)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.usefixtures("has_fp8")
@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks"])
def test_rows_of_floats_are_rounded_where_the_device_multiplies_those(name: str) -> None:
    test_rows_of_one_matrix_are_multiplied_with_what_it_stands_for(name, jnp.bfloat16)


@pytest.mark.usefixtures("has_fp8")
@pytest.mark.parametrize(("name", "is_static"), [("int8 rows", True), ("int4 groups", False), ("fp8 blocks", False)])
@pytest.mark.thinned(4)
def test_each_row_meets_its_own_matrix_alone(name: str, is_static: bool) -> None:
    """A matrix without rows, one with many, and rows behind those that are counted."""
    counts, matrices = np.array([3, 0, 20, 1], np.int32), matrices_of(name, 4)
    if is_static:
        scales = jnp.array([0.02, 0.5, 0.03, 0.04], jnp.float32)
        matrices = dataclasses.replace(matrices, input_scale=scales)
    x, owners = jnp.asarray(normal((27, DEPTH), 1), jnp.bfloat16), np.repeat(np.arange(4), counts)
    padded = np.pad(owners, (0, 27 - len(owners)), constant_values=3).astype(np.int32)
    got = interpreted(grouped.multiply_sorted)(x, counts, padded, matrices)
    for matrix in np.unique(owners):
        of_one = jax.tree.map(lambda array, matrix=matrix: array[matrix], matrices)
        want = expected(x[:24][owners == matrix], of_one)
        np.testing.assert_allclose(got[:24][owners == matrix], want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", ["int8", "int8 rows", "int8 groups", "fp8", "fp8 rows", "fp8 blocks"])
@pytest.mark.thinned(3)
def test_numbers_of_8_bits_are_read_in_pairs_where_31_bits_do_not_count_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "_LEAST_OFFSET", 0)
    matrices, counts = matrices_of(name, 2), np.array([3, 16], np.int32)
    assert choose_form(matrices, 19, np.dtype(jnp.bfloat16), are_rounded=True, has_fp8=True).are_pairs
    x, owners = jnp.asarray(normal((19, DEPTH), 1), jnp.bfloat16), np.repeat(np.arange(2), counts).astype(np.int32)
    got = interpreted(grouped.multiply_sorted)(x, counts, owners, matrices)
    for matrix in range(2):
        want = expected(x[owners == matrix], jax.tree.map(lambda array, matrix=matrix: array[matrix], matrices))
        np.testing.assert_allclose(got[owners == matrix], want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_floats_of_8_bits_are_multiplied_as_they_are_where_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = jax.tree.map(lambda array: array[0], matrices_of("fp8 blocks", 1))
    rows = quantized.round_rows(jnp.asarray(normal((5, DEPTH), 1), jnp.bfloat16), matrix)
    widened = interpreted(grouped.multiply_one)(*rows, matrix)
    monkeypatch.setattr(grouped, "multiplies_fp8", lambda: True)
    as_they_are = interpreted(grouped.multiply_one)(*rows, matrix)
    np.testing.assert_allclose(as_they_are, widened, rtol=0, atol=1e-5)
    matrices = jax.tree.map(lambda array: array[None], matrix)
    forms = [choose_form(matrices, 5, np.dtype(jnp.bfloat16), are_rounded=True, has_fp8=has) for has in (False, True)]
    assert [form.multiplied for form in forms] == [np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)]


def test_parts_of_the_depth_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = jax.tree.map(lambda array: array[0], matrices_of("int4 groups", 1))
    x = jnp.asarray(normal((2, DEPTH), 1), jnp.bfloat16)
    monkeypatch.setattr(form, "_LEAST_CHUNKS", 1)
    matrices = jax.tree.map(lambda array: array[None], matrix)
    whole = choose_form(matrices, 2, np.dtype(x.dtype), are_rounded=False, has_fp8=False)
    assert (whole.num_splits, split_depth(whole, 1, 2).num_splits) == (1, 2)
    got = interpreted(grouped.multiply_one)(x, None, matrix)
    np.testing.assert_allclose(got, expected(x, matrix), rtol=0, atol=1e-4)


@pytest.mark.parametrize("counts", [(0, 0), (5,), (1, 2, 3), (16, 0, 17, 1), (0, 0, 64)], ids=str)
@pytest.mark.thinned(3)
def test_tiles_are_the_rows_of_each_matrix_in_turn(counts: tuple[int, ...]) -> None:
    rows, want, first = sum(counts) + 3, [], 0
    for matrix, count in enumerate(counts):
        want += [(matrix, first + i, min(16, count - i)) for i in range(0, count, 16)]
        first += count
    found = np.asarray(list_tiles(jnp.array(counts, jnp.int32), rows, 16))
    assert len(found) == max_tiles(rows, len(counts), 16)
    assert [tuple(tile) for tile in found if tile[2] > 0] == want
    assert (found[len(want) :, 2] == 0).all()


_FRACTIONS = MatrixFormat("int4", 32, has_zeros=True, has_whole_zeros=False)


MULTIPLIED = {
    "int8 rows": ("int8", "int8"),
    "int4 rows": ("int8", "int8"),
    "int8 groups": ("bfloat16", "bfloat16"),  # a number less its zero point has 9 bits
    "fp8 rows": ("float8_e4m3fn", "bfloat16"),
    "fp8 blocks": ("float8_e4m3fn", "bfloat16"),
    "int8": ("float32", "float32"),
    "mxfp4": ("float32", "float32"),
    "fp8": ("float32", "float32"),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_rounded_rows_are_multiplied_in_the_least_type_that_holds_both(name: str) -> None:
    matrices, dtype = matrices_of(name, 2, jnp.float32), np.dtype(np.float32)
    for has_fp8, want in zip((True, False), MULTIPLIED[name], strict=True):
        found = choose_form(matrices, 8, dtype, are_rounded=True, has_fp8=has_fp8)
        assert (found.multiplied, found.columns, found.depth) == (np.dtype(want), 26, DEPTH)
        is_rounded = FORMATS[name].activations is not None
        assert found.rows_have_scales is is_rounded and found.rows_have_groups is (name == "fp8 blocks")
    plain = choose_form(matrices, 8, dtype, are_rounded=False, has_fp8=True)
    assert plain.multiplied == dtype and not plain.rows_have_scales


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        (abstract_matrix(MatrixFormat("int4", 32), (4, 64, 7), -2, np.dtype(np.float32)), "7 columns are odd"),
        (abstract_matrix(MatrixFormat("int8", 16), (4, 64, 8), -2, np.dtype(np.float32)), "not a multiple of 32"),
        (abstract_matrix(MatrixFormat("int8", 32, has_group_ids=True), (64, 8), -2, np.dtype(np.float32)), "listed"),
        (abstract_matrix(MatrixFormat("int8", 32), (8, 64), -1, np.dtype(np.float32)), "columns are stored as rows"),
        (abstract_matrix(_FRACTIONS, (64, 8), -2, np.dtype(np.float32)), "not integers"),
        (abstract_matrix(MatrixFormat("fp8"), (300, 7168, 1025), -2, np.dtype(np.float32)), "1025 columns are odd"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(matrix: QuantizedMatrix, reason: str) -> None:
    assert reason in str(unsupported_reason(matrix))
    assert unsupported_reason(jnp.zeros((4, 64, 7))) is None


@pytest.mark.parametrize(
    ("kind", "name", "parts", "takes"),
    [
        ("NVIDIA H200", "int4 groups", 1, True),
        ("NVIDIA A100-SXM4-80GB", "int4", 1, True),
        ("NVIDIA H200", "int8", 1, False),
        ("NVIDIA H200", "int4 groups", 2, False),
        ("Tesla T4", "int4 groups", 1, False),
    ],
)
def test_gpus_take_the_kernel_where_numbers_would_be_made_weights(
    kind: str, name: str, parts: int, takes: bool
) -> None:
    matrix = abstract_matrix(FORMATS[name], (DEPTH, 64), -2, np.dtype(jnp.bfloat16))
    mesh = AbstractMesh(
        (1, 1, parts), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), abstract_device=AbstractDevice(kind, 100, "gpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert on_device.takes_kernel(matrix) is takes
    assert not on_device.takes_kernel(matrix)


@pytest.mark.parametrize("name", ["int4", "int4 groups", "int4 rows", "mxfp4", "fp8 blocks"])
@pytest.mark.parametrize("split", ["depth", "columns"])
@pytest.mark.thinned(11)
def test_two_devices_multiply_with_a_part_each(name: str, split: str) -> None:
    depth, out = 256, (2, 26)
    whole = quantize(normal((depth, *out)), FORMATS[name], dtype=np.dtype(jnp.bfloat16))
    x = jnp.asarray(normal((5, depth), 1), jnp.bfloat16)
    names = ("heads", None, None) if split == "depth" else (None, None, "heads")
    axes = component_axes(names, -3, FORMATS[name], whole.dtype)
    specs = _matrix_specs(axes)
    assert specs is not None
    mesh = build_mesh(jax.devices()[:2])
    placed = jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), whole, specs)
    one = functools.partial(grouped.multiply_one, is_interpreted=True)
    parted = on_device.PartedMatrix(placed, specs, mesh)
    jitted = jax.jit(functools.partial(on_device.multiply_parts, multiply_one=one))
    rows, row_scales = on_device._rows(x, whole)
    want = one(rows, row_scales, whole).reshape(5, *out)
    got = jitted(x, parted)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    sums = str(jitted.lower(x, parted).compile().as_text())
    assert ("all-reduce" in sums) is (split == "depth")
    assert "all-gather" not in sums
