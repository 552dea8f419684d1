"""Who holds the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.mesh import build_mesh, replicated
from jpaged.device.model_runner import KVPool
from jpaged.errors import InternalError
from jpaged.kernels.kv_layout import KVLayout


def _pool() -> KVPool:
    layout = KVLayout(1, 3, 4, 1, 8, jnp.dtype("bfloat16"))
    return KVPool(layout, replicated(build_mesh(jax.devices()[:1])))


def test_a_pool_starts_as_zeros_and_is_spent_while_a_step_has_it() -> None:
    pool = _pool()
    array = pool.take()
    np.testing.assert_array_equal(array, 0)
    assert (array.shape, str(array.dtype)) == ((4, 4, 2, 8), "uint16")
    with pytest.raises(InternalError, match="the KV pool is gone"):
        pool.take()
    pool.put(array)
    assert pool.take() is array


def test_a_pool_is_given_back_once() -> None:
    pool = _pool()
    array = pool.take()
    pool.put(array)
    with pytest.raises(InternalError, match="returned twice"):
        pool.put(array)


def test_a_released_pool_frees_its_memory() -> None:
    pool = _pool()
    array = pool.take()
    pool.put(array)
    pool.release()
    pool.release()
    assert array.is_deleted()
    with pytest.raises(InternalError, match="the KV pool is gone"):
        pool.take()
