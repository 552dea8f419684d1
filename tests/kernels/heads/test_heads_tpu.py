"""Heads turned by the kernel for TPUs, interpreted here, against XLA's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels import qkv_rope as heads
from jpaged.models import rope
from jpaged.models.layers import RMSNorm

LANES = 128


def store(new_ref: Any, head: int, part: int, words_tl: Any) -> None:
    """What `heads.store` does, without a reference seen as another type."""
    numbers_t2l = jax.lax.bitcast_convert_type(words_tl, jnp.bfloat16).transpose(0, 2, 1)
    new_ref[:, head, :, part * LANES : (part + 1) * LANES] = numbers_t2l


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads, "store", store)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def projection(num_tokens: int, num_kv_heads: int, group: int, head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Heads, and cosines and sines of angles that differ in every token and dimension."""
    rng = np.random.default_rng(3)
    qkv_tkrd = jnp.asarray(rng.normal(size=(num_tokens, num_kv_heads, group + 2, head_dim)), jnp.bfloat16)
    angles_td = jnp.asarray(rng.uniform(-3, 3, size=(num_tokens, head_dim // 2)), jnp.float32)
    return qkv_tkrd, jnp.cos(angles_td), jnp.sin(angles_td)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "group", "head_dim", "has_norms"),
    [(16, 2, 2, 128, False), (24, 1, 3, 128, True), (8, 1, 1, 256, False)],
    ids=["groups", "tiles-normalised", "wide"],
)
def test_queries_and_keys_are_turned_and_values_are_not(
    num_tokens: int, num_kv_heads: int, group: int, head_dim: int, has_norms: bool
) -> None:
    qkv_tkrd, cos_td, sin_td = projection(num_tokens, num_kv_heads, group, head_dim)
    q_thd = qkv_tkrd[:, :, :group].reshape(num_tokens, -1, head_dim)
    k_tkd, v_tkd = qkv_tkrd[:, :, group], qkv_tkrd[:, :, group + 1]
    norms = None
    if has_norms:
        q_norm, k_norm = (RMSNorm(head_dim, 1e-6, np.dtype(jnp.bfloat16)) for _ in range(2))
        q_norm.scale[...], k_norm.scale[...] = (jnp.linspace(0.5, end, head_dim, dtype=jnp.bfloat16) for end in (2, 3))
        q_thd, k_tkd, norms = q_norm(q_thd), k_norm(k_tkd), (q_norm.scale[...], k_norm.scale[...], 1e-6)
    # Everything is traced, the epsilon too, as behind shard_map.
    got = jax.jit(heads.turn)(qkv_tkrd, heads.angles(cos_td, sin_td), norms)
    want = rope.apply(q_thd, cos_td, sin_td), rope.apply(k_tkd, cos_td, sin_td), v_tkd
    for one, other in zip(got, want, strict=True):
        assert one.dtype == jnp.bfloat16
        # One unit in the last place: a product and a sum may be rounded once or twice.
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2**-7, atol=2**-8)
    np.testing.assert_array_equal(got[2], v_tkd)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "num_rows", "reason"),
    [
        (64, "bfloat16", "bfloat16", 48, "head_dim 64 is not a multiple of 128"),
        (128, "float32", "float32", 48, "heads and keys must both be bfloat16; they are float32 and float32"),
        (128, "bfloat16", "int8", 48, "heads and keys must both be bfloat16; they are bfloat16 and int8"),
        (256, "bfloat16", "bfloat16", 1024, "1024 heads of 256 do not fit in vector memory"),
        (128, "bfloat16", "bfloat16", 48, None),
        (256, "bfloat16", "bfloat16", 96, None),
    ],
)
def test_what_is_left_to_xla(head_dim: int, dtype: str, kv_dtype: str, num_rows: int, reason: str | None) -> None:
    assert heads.unsupported_reason(head_dim, jnp.dtype(dtype), jnp.dtype(kv_dtype), num_rows) == reason
