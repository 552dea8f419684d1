"""The product of the models and its gradient, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from jpaged.device.mesh import MESH_AXES
from jpaged.kernels.matmul.on_device import parts_of_depth
from jpaged.models import layers
from jpaged.models.layers import dot

# Both orders of a matrix, and a kernel with more axes.
CASES = {"in first": ((24, 40), 0), "in last": ((40, 24), 1), "kernel": ((24, 4, 3, 8), 0)}


@functools.partial(jax.jit, static_argnums=2)
def product_and_gradients(x, matrix, axis, weights):
    def weighed(x, matrix):
        y = dot(x, matrix, axis)
        return (y * weights).sum(), y

    gradients, y = jax.grad(weighed, (0, 1), has_aux=True)(x, matrix)
    return y, *gradients


def case(shape, axis):
    rng = np.random.default_rng(0)
    x, matrix = rng.standard_normal((16, 24)), rng.standard_normal(shape)
    flat = matrix.reshape(24, -1) if axis == 0 else matrix.T
    y = x @ flat
    weights = rng.standard_normal(y.shape)
    d_flat = x.T @ weights
    want = (y, weights @ flat.T, d_flat.reshape(shape) if axis == 0 else d_flat.T)
    out_shape = (16, *shape[1:]) if axis == 0 else y.shape
    return x, matrix, weights.reshape(out_shape), (want[0].reshape(out_shape), *want[1:])


@pytest.mark.parametrize(("shape", "axis"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_product_and_gradients(shape, axis, dtype, tolerance):
    x, matrix, weights, want = case(shape, axis)
    y, dx, d_matrix = product_and_gradients(
        jnp.asarray(x, dtype), jnp.asarray(matrix, dtype), axis, jnp.asarray(weights, jnp.float32)
    )
    assert (y.dtype, dx.dtype, d_matrix.dtype) == (jnp.float32, dtype, dtype)
    for have, expected in zip((y, dx, d_matrix), want, strict=True):
        assert have.shape == expected.shape
        error = np.asarray(have, np.float64) - expected
        assert np.linalg.norm(error) < tolerance * np.linalg.norm(expected)


def test_it_maps_over_a_batch():
    x, matrix, _, (y, *_) = case((24, 40), 0)
    stacked = jnp.stack([jnp.asarray(x, jnp.float32)] * 2)
    mapped = jax.vmap(lambda x: dot(x, jnp.asarray(matrix, jnp.float32), 0))(stacked)
    np.testing.assert_allclose(mapped, np.stack([y] * 2), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "depth", "columns", "parts"),
    [
        (64, 10_944, 2048, 9),
        (8, 10_944, 2048, 9),
        (512, 10_944, 2048, 1),  # has tiles enough
        (8, 18_176, 4544, 16),
        (8, 4544, 4672, 4),
        (64, 14_336, 4096, 1),
        (8, 1600, 4800, 1),
        (8, 12_289, 64, 1),  # is prime
    ],
)
def test_a_depth_is_divided_where_a_gpu_would_pad_it(num_rows, depth, columns, parts):
    assert parts_of_depth(num_rows, depth, columns) == parts
    assert depth % (16 * parts) == 0 or parts == 1


@pytest.mark.parametrize(
    ("platform", "num_devices", "divides"), [("gpu", 1, True), ("gpu", 2, False), ("tpu", 1, False)]
)
def test_a_depth_is_divided_on_one_gpu(platform, num_devices, divides):
    x, matrix = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4544), (4544, 2, 8)))
    device, types = AbstractDevice(platform, 1, platform), (AxisType.Auto,) * len(MESH_AXES)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1, num_devices), MESH_AXES, types, abstract_device=device)):
        jaxpr = str(jax.make_jaxpr(lambda x, matrix: dot(x, matrix, 0))(x, matrix))
        assert ("8,4,1136" in jaxpr) is divides
        y = jax.eval_shape(lambda x, matrix: dot(x, matrix, 0), x, matrix)
    assert y.shape == (8, 2, 8)


def test_the_parts_of_a_depth_add_up(monkeypatch):
    rng = np.random.default_rng(0)
    x, matrix = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 4544), (4544, 2, 8)))
    monkeypatch.setattr(layers, "parts_on_device", lambda x, matrix: 4)
    got = dot(jnp.asarray(x), jnp.asarray(matrix), 0)
    np.testing.assert_allclose(got, np.tensordot(x, matrix, 1), rtol=0, atol=1e-3)
