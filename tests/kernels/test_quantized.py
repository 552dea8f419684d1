"""Quantized matrices: what their arrays mean, and that products with them are those with the weights they stand for."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

from jpaged.kernels.matmul import quantized
from jpaged.kernels.matmul.quantized import QuantizedMatrix, abstract_matrix, dequantize, multiply, quantize
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.layers import dot

DEPTH, OUT = 48, (3, 10)
FORMATS = {
    "int8 columns": MatrixFormat("int8"),
    "int8 columns with zeros": MatrixFormat("int8", has_zeros=True),
    "int8 groups": MatrixFormat("int8", 16),
    "int4 groups": MatrixFormat("int4", 16),
    "int4 groups with zeros": MatrixFormat("int4", 16, has_zeros=True),
    "int4 groups with fractions": MatrixFormat("int4", 16, has_zeros=True, has_whole_zeros=False),
    "fp8 columns": MatrixFormat("fp8"),
    "fp8 groups": MatrixFormat("fp8", 8),
    "mxfp4": MatrixFormat("mxfp4", 16),
}
STEPS = {"int8": 1 / 254, "int4": 1 / 13, "fp8": 1 / 28, "mxfp4": 1 / 4}
"""The largest error of a weight, as a share of the largest of its group."""


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def oracle(matrix: QuantizedMatrix) -> np.ndarray:
    """The weights by the definition, in float64."""
    place = matrix.ndim + matrix.axis
    values, scales = (
        np.moveaxis(np.asarray(each).astype(np.float64), place, 0) for each in (matrix.values, matrix.scales)
    )
    zeros = np.zeros_like(scales) if matrix.zeros is None else np.moveaxis(np.asarray(matrix.zeros), place, 0)
    ids = np.arange(len(values)) // (len(values) // len(scales)) if matrix.group_ids is None else matrix.group_ids
    return np.moveaxis((values - zeros[np.asarray(ids)]) * scales[np.asarray(ids)], 0, place)


def with_group_ids(matrix: QuantizedMatrix) -> QuantizedMatrix:
    ids = np.random.default_rng(5).permutation(np.arange(matrix.depth) % matrix.num_groups)
    return dataclasses.replace(matrix, group_ids=jnp.asarray(ids.astype(np.int32)))


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_number_of_the_format(name: str) -> None:
    form, weights = FORMATS[name], normal((DEPTH, *OUT))
    matrix = quantize(weights, form)
    groups = weights.reshape(-1, form.group_size or DEPTH, *OUT)
    error = np.abs(groups - oracle(matrix).reshape(groups.shape)).max(1)
    span = groups.max(1) - groups.min(1) if form.has_zeros else np.abs(groups).max(1)
    assert (error <= span * STEPS[form.values] * (0.9 if form.has_zeros else 1.01)).all()


def test_weights_of_zero_stay_zero() -> None:
    for form in FORMATS.values():
        assert not oracle(quantize(np.zeros((DEPTH, *OUT), np.float32), form)).any()


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.thinned(5)
def test_products_are_those_with_the_weights(name: str, has_ids: bool, dtype) -> None:
    matrix = quantize(normal((DEPTH, *OUT)), FORMATS[name], dtype=np.dtype(dtype))
    matrix = with_group_ids(matrix) if has_ids and matrix.num_groups > 1 else matrix
    x = jnp.asarray(normal((5, DEPTH), 1), dtype)
    want = np.einsum("te,ekn->tkn", np.asarray(x, np.float64), oracle(matrix))
    tolerance = 2e-5 if dtype == jnp.float32 else 0.1
    np.testing.assert_allclose(multiply(x, matrix), want, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(dot(x, matrix, 0), multiply(x, matrix))
    np.testing.assert_allclose(dequantize(matrix, np.dtype(np.float32)), oracle(matrix), rtol=1e-6, atol=1e-6)
    if matrix.num_groups > 1 and matrix.group_ids is None:
        by_groups = quantized._by_groups(x, None, matrix)
        np.testing.assert_allclose(by_groups, want, rtol=0, atol=2e-5 if dtype == jnp.float32 else 1e-4)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["int8 columns", "int4 groups with zeros", "fp8 groups"])
def test_an_embedding_gives_rows_and_multiplies_by_all_of_them(name: str) -> None:
    matrix = quantize(normal((20, DEPTH)), FORMATS[name], axis=-1)
    assert matrix.is_embedding and matrix.shape == (20, DEPTH) and matrix.depth == DEPTH
    ids = jnp.array([3, 3, 19])
    np.testing.assert_allclose(matrix.rows(ids), oracle(matrix)[ids], rtol=1e-6)
    x = normal((4, DEPTH), 1)
    np.testing.assert_allclose(multiply(jnp.asarray(x), matrix), x @ oracle(matrix).T, atol=2e-5)
    if matrix.num_groups > 1:
        np.testing.assert_allclose(quantized._by_groups(jnp.asarray(x), None, matrix), x @ oracle(matrix).T, atol=2e-5)


@pytest.mark.parametrize(
    ("form", "num_groups"),
    [
        (MatrixFormat("int8", activations="int8"), 1),
        (MatrixFormat("int8", activations="int8", has_zeros=True), 1),
        (MatrixFormat("int4", 16, activations="int8"), 1),
        (MatrixFormat("fp8", activations="fp8"), 1),
        (MatrixFormat("fp8", 16, activations="fp8-groups"), 3),
    ],
)
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.thinned(3)
def test_rows_are_rounded_as_the_matrix_asks(
    form: MatrixFormat, num_groups: int, is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = quantize(normal((DEPTH, *OUT)), form)
    x = normal((5, DEPTH), 1) * np.array([[1], [9], [0], [0.1], [3]], np.float32)
    if is_static:
        matrix = dataclasses.replace(matrix, input_scale=jnp.float32(0.02))
    rounded, scales = quantized.round_rows(jnp.asarray(x), matrix)
    assert scales.shape == (5, num_groups)
    rows = np.asarray(rounded, np.float64).reshape(5, num_groups, -1) * np.asarray(scales)[..., None]
    if not is_static:
        step = 1 / 254 if form.activations == "int8" else 1 / 28
        largest = np.abs(x.reshape(5, num_groups, -1)).max(-1, keepdims=True)
        assert (np.abs(rows - x.reshape(rows.shape)) <= largest * step * 1.01).all()
    want = np.einsum("te,ekn->tkn", rows.reshape(x.shape), oracle(matrix))
    monkeypatch.setattr(quantized, "multiplies_fp8", lambda: True)
    np.testing.assert_allclose(multiply(jnp.asarray(x), matrix), want, rtol=1e-5, atol=2e-4)
    if matrix.num_groups > 1:
        np.testing.assert_allclose(quantized._by_groups(rounded, scales, matrix), want, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "is_rounded"),
    [("TPU v6 lite", False), ("TPU7x", True), ("NVIDIA H200", True), ("NVIDIA A100-SXM4-40GB", False)],
)
def test_rows_are_rounded_to_floats_where_those_are_multiplied(
    kind: str, is_rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    floats, integers = (
        quantize(normal((DEPTH, *OUT)), MatrixFormat(values, activations=values)) for values in ("fp8", "int8")
    )
    x = normal((5, DEPTH), 1)
    plain = np.einsum("te,ekn->tkn", x, oracle(floats))
    np.testing.assert_allclose(multiply(jnp.asarray(x), floats), plain, rtol=1e-5, atol=2e-4)  # on this CPU
    device = AbstractDevice(kind, 1, "tpu" if kind.startswith("TPU") else "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert quantized.rounds_rows(floats) == is_rounded
        assert quantized.rounds_rows(integers)


@pytest.mark.parametrize("has_ids", [False, True])
def test_layers_that_are_stacked_come_off_one_by_one(has_ids: bool) -> None:
    layers = [quantize(normal((DEPTH, *OUT), seed), FORMATS["int4 groups with zeros"]) for seed in range(3)]
    layers = [with_group_ids(layer) if has_ids else layer for layer in layers]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    assert stacked.shape == (3, DEPTH, *OUT) and stacked.depth == DEPTH
    np.testing.assert_array_equal(dequantize(stacked), jnp.stack([dequantize(layer) for layer in layers]))
    x = jnp.asarray(normal((2, DEPTH), 1))
    _, scanned = jax.lax.scan(lambda carry, layer: (carry, multiply(x, layer)), None, stacked)
    np.testing.assert_allclose(scanned, jnp.stack([multiply(x, layer) for layer in layers]), atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_are_known_without_numbers(name: str) -> None:
    form = FORMATS[name]
    for shape, axis in (((DEPTH, *OUT), -3), ((20, DEPTH), -1)):
        made = jax.tree.map(lambda array: (array.shape, array.dtype), quantize(normal(shape), form, axis=axis))
        abstract = abstract_matrix(form, shape, axis, np.dtype(np.float32))
        assert made == jax.tree.map(lambda array: (array.shape, array.dtype), abstract)
    stacked = dataclasses.replace(form, has_group_ids=True, has_input_scale=True)
    abstract = abstract_matrix(stacked, (2, DEPTH, *OUT), -3, np.dtype(np.float32))
    assert abstract.group_ids.shape == (2, DEPTH) and abstract.input_scale.shape == (2,)
    axes = quantized.component_axes(("layers", "heads", None, "embed"), -3, stacked, np.dtype(np.float32))
    assert str(jax.tree.structure(abstract)) == str(
        jax.tree.structure(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    )
    assert axes.group_ids == ("layers", "heads") and axes.scales == ("layers", None, None, "embed")


def test_groups_that_would_be_cut_are_made_smaller() -> None:
    form = MatrixFormat("int4", 32)
    assert form.split(96, 2).group_size == 16
    assert form.split(128, 4) == form
    assert quantize(normal((40, 3)), form).num_groups == 5


@pytest.mark.parametrize("name", ["int8 groups", "int4 groups with zeros", "mxfp4"])
def test_a_tpu_multiplies_a_group_at_a_time(name: str) -> None:
    """No array of the weights' size is made wide before the product."""
    matrix = quantize(normal((DEPTH, *OUT)), FORMATS[name])
    lower = functools.partial(jax.jit(multiply).trace(jnp.ones((4, DEPTH)), matrix).lower, lowering_platforms=("tpu",))
    (product,) = [line for line in lower().as_text().splitlines() if "dot_general" in line]
    assert "batching_dims = [1] x [0]" in product
