"""The product of the models and its gradient, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.matmul import dot

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
