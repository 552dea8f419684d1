"""Heads rotated by Hadamard matrices: products are kept, and a second rotation undoes the first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import Backend
from jpaged.kernels.paged_attention import rotate_heads


@pytest.mark.parametrize("backend", ["cpu", "xla"])
@pytest.mark.parametrize("head_dim", [64, 80, 3])
def test_products_are_kept_and_outliers_spread(backend: Backend, head_dim: int) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 5, 3, head_dim)).astype(np.float32)
    x[..., 1] *= 30
    a, b = (np.asarray(rotate_heads(jnp.asarray(one), jnp.float32, backend=backend)) for one in (x, y))
    np.testing.assert_allclose((a * b).sum(-1), (x * y).sum(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rotate_heads(jnp.asarray(a), jnp.float32, backend=backend), x, rtol=1e-4, atol=1e-4)
    block = head_dim & -head_dim
    signs = np.array([[(-1) ** (i & j).bit_count() for i in range(block)] for j in range(block)])
    expected = x.reshape(5, 3, -1, block) @ signs / block**0.5
    np.testing.assert_allclose(a, expected.reshape(x.shape), rtol=1e-5, atol=1e-4)
    if head_dim == 64:
        assert abs(a).max() < 0.4 * abs(x).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_vector_is_rotated_alike_alone_and_beside_others(dtype: str) -> None:
    x = jax.random.normal(jax.random.key(1), (9, 2, 64)).astype(dtype)
    together = rotate_heads(x, dtype, backend="cpu")
    assert together.dtype == dtype
    for number in range(9):
        alone = rotate_heads(x[number : number + 1], dtype, backend="cpu")
        assert (np.asarray(alone[0]) == np.asarray(together[number])).all()
    np.testing.assert_allclose(
        np.asarray(together, np.float32),
        np.asarray(rotate_heads(x, dtype, backend="xla"), np.float32),
        rtol=1e-2,
        atol=1e-2,
    )
