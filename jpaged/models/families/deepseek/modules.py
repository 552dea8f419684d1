"""Latent attention: one key for all query heads; its first part also yields their values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models import rope
from jpaged.models.decoder.config import DecoderConfig
from jpaged.models.decoder.modules import AttentionModule, DecoderLayer, Shared
from jpaged.models.decoder.recurrent import ChannelDelta
from jpaged.models.families.deepseek.config import DeepseekConfig
from jpaged.models.layers import (
    Attend,
    Linear,
    Module,
    Norm,
    Param,
    RandomKeys,
    RMSNorm,
    accumulate,
    normal,
)
from jpaged.models.stack import LayerPlace

_EPS = 1e-6
"""Added to the mean square in the norms within attention, whatever config.json has for the others."""


class LatentAttention(Module):
    """Projections around an injected attention, whose keys are latents.

    A head's key is `key_up` times the latent, and a rotated part that all heads share. The query's score with both
    equals that of the query times `key_up` with the latent: so only latents are stored, as in DeepSeek-V2 (2024).
    """

    def __init__(self, config: DeepseekConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        width, num_heads, rank = config.hidden_size, config.num_heads, config.query_rank
        self.q_down = None if rank is None else Linear(width, (rank,), False, dtype, rngs)
        self.q_norm = None if rank is None else RMSNorm(rank, _EPS, dtype)
        # One axis for all heads: TPUs would copy a stack of heads whose width is no multiple of 128.
        self.q = Linear(rank or width, (num_heads * (config.nope_dim + config.rope_dim),), False, dtype, rngs)
        self.kv_down = Linear(width, (config.head_dim,), False, dtype, rngs)
        self.kv_norm = RMSNorm(config.latent_dim, _EPS, dtype)
        ups = (num_heads, config.nope_dim, config.latent_dim), (num_heads, config.latent_dim, config.v_head_dim)
        self.key_up, self.value_up = (Param(normal(rngs.next_key(), shape, dtype)) for shape in ups)
        self.out = Linear(num_heads * config.v_head_dim, (width,), False, dtype, rngs)
        self.num_heads, self.num_kv_heads = num_heads, config.num_kv_heads
        self.latent_dim, self.nope_dim = config.latent_dim, config.nope_dim

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return the heads' outputs `[T, H * V]`, and the carry."""
        rows = shared.rows
        q_te, q_norm = x_te, norm
        if self.q_down is not None and self.q_norm is not None:
            q_te, q_norm = self.q_down(x_te, rows, norm=norm), self.q_norm
        q_thd = self.q(q_te, rows, norm=q_norm).reshape(len(x_te), self.num_heads, -1)
        own_thd, turned_thd = q_thd[..., : self.nope_dim], _rotate(q_thd[..., self.nope_dim :], shared, place)
        q_thd = jnp.concatenate((_of_each_head(own_thd, self.key_up[...]), turned_thd), axis=-1)

        kv_td = self.kv_down(x_te, rows, norm=norm)
        latent_tr = self.kv_norm(kv_td[:, : self.latent_dim])
        turned_t1d = _rotate(kv_td[:, None, self.latent_dim :], shared, place)
        k_t1d = jnp.concatenate((latent_tr[:, None], turned_t1d), axis=-1)
        if shared.query_scales_t is not None:
            q_thd = (q_thd.astype(jnp.float32) * shared.query_scales_t[:, None, None]).astype(q_thd.dtype)
        k_tkd = jnp.broadcast_to(k_t1d, (len(x_te), self.num_kv_heads, k_t1d.shape[-1]))
        o_thr, carry = attend(q_thd, k_tkd, None, carry, place)
        o_thr = o_thr[..., : self.latent_dim].astype(x_te.dtype)
        return _of_each_head(o_thr, self.value_up[...]).reshape(len(x_te), -1), carry


def _rotate(x_thd: jax.Array, shared: Shared, place: LayerPlace) -> jax.Array:
    """Rotate parts of heads, if the layer has a rotary embedding."""
    return x_thd if place.kind.rope is None else rope.apply(x_thd, *shared.angles[place.kind.rope])


def _of_each_head(x_thi: jax.Array, matrix_hio: jax.Array) -> jax.Array:
    """Multiply `[T, H, in]` with a matrix for each head, in x's type."""
    y_hto = accumulate(x_thi, matrix_hio, ((2,), (1,)), ((1,), (0,)))
    return y_hto.swapaxes(0, 1).astype(x_thi.dtype)


class LatentLayer(DecoderLayer):
    """A decoder's layer with latent attention."""

    @staticmethod
    def make_attention(config: Any, dtype: np.dtype, rngs: RandomKeys) -> LatentAttention:
        """See `DecoderLayer`."""
        return LatentAttention(config, dtype, rngs)


class LatentDeltaLayer(LatentLayer):
    """A layer with latent attention or Kimi Delta Attention (Kimi-Linear)."""

    @staticmethod
    def make_recurrent(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
        """See `DecoderLayer`."""
        return ChannelDelta(config, dtype, rngs)
