"""The modules of the Llama family: one layer, and what is around the layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models import rope
from jpaged.models.layers import Attend, Ends, EndsKeys, Linear, QKVLinear, RMSNorm
from jpaged.models.llama.config import LlamaConfig
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import TokenBatch


class Attention(nnx.Module):
    """Projections around an injected attention."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        head_dim = config.head_dim
        self.qkv = QKVLinear(config, config.attention_bias, dtype, rngs)
        width = config.num_heads * head_dim
        self.out = Linear(width, (config.hidden_size,), config.attention_output_bias, dtype, rngs)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def project(self, x_te: jax.Array, cos_td: jax.Array, sin_td: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q_thd, k_tkd, v_tkd), queries and keys normalised and rotated, queries not scaled."""
        q_thd, k_tkd, v_tkd = self.qkv.project(x_te)
        if self.q_norm is not None and self.k_norm is not None:
            q_thd, k_tkd = self.q_norm(q_thd), self.k_norm(k_tkd)
        return rope.apply(q_thd, cos_td, sin_td), rope.apply(k_tkd, cos_td, sin_td), v_tkd


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up share one kernel `[E, 2, F]`."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        inner = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, (2, inner), config.mlp_bias, dtype, rngs)
        self.down = Linear(inner, (config.hidden_size,), config.mlp_bias, dtype, rngs)

    def __call__(self, x_te: jax.Array) -> jax.Array:
        """`[T, E]` to `[T, E]`."""
        gate, up = (x.squeeze(1).astype(jnp.float32) for x in jnp.split(self.gate_up(x_te), 2, axis=1))
        return self.down((jax.nn.silu(gate) * up).astype(x_te.dtype))


class LlamaLayer(nnx.Module):
    """Norm, attention, norm, feed-forward, with two residual sums."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self, x_te: jax.Array, cos_sin: tuple[jax.Array, jax.Array], attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """One layer over packed tokens; attend, carry and place as in `Model.run`."""
        o_thd, carry = attend(*self.attention.project(self.attention_norm(x_te), *cos_sin), carry, place)
        x_te = x_te + self.attention.out(o_thd.astype(x_te.dtype).reshape(x_te.shape[0], -1))
        return x_te + self.mlp(self.mlp_norm(x_te)), carry


class LlamaEnds(Ends):
    """The embedding, a norm, and the output matrix."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, config.hidden_size, dtype, keys)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.config = config

    def begin(self, tokens: TokenBatch) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """See `Ends`; layers share cosine and sine."""
        config = self.config
        cos_sin = rope.cos_sin(config.rope, config.head_dim, tokens.positions_t, tokens.rope_lens_t)
        return self.embed(tokens.ids_t), cos_sin

    def finish(self, x_te: jax.Array) -> jax.Array:
        """See `Ends`."""
        return self.norm(x_te)
