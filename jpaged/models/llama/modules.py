"""The modules of the Llama family: one layer, and what is around the layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jpaged.models import rope
from jpaged.models.layers import (
    Attend,
    Ends,
    EndsKeys,
    GatedLinear,
    Linear,
    Measured,
    MeasuredNorm,
    Norm,
    QKVLinear,
    RMSNorm,
)
from jpaged.models.llama.config import LlamaConfig
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import HeadsKernel, TokenBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LlamaShared:
    """What all layers share.

    Attributes:
        angles: of each token: cosines and sines, float32 `[T, D/2]`, or what the kernel made of them.
        num_tokens: tokens in use, the first ones.
        heads: the kernel that turns heads, if there is one. Static.
    """

    angles: Any
    num_tokens: jax.Array
    heads: HeadsKernel | None = dataclasses.field(default=None, metadata={"static": True})


class Attention(nnx.Module):
    """Projections around an injected attention."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        head_dim = config.head_dim
        self.qkv = QKVLinear(config, config.attention_bias, dtype, rngs)
        width = config.num_heads * head_dim
        self.out = Linear(width, (config.hidden_size,), config.attention_output_bias, dtype, rngs)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def project(self, x_te: jax.Array, shared: LlamaShared, norm: Norm) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q_thd, k_tkd, v_tkd) of the normalised states, queries and keys rotated, queries not scaled."""
        head_norms = None
        if self.q_norm is not None and self.k_norm is not None:
            head_norms = self.q_norm, self.k_norm
        return self.qkv.project_rotated(x_te, shared.num_tokens, shared.angles, norm, head_norms, shared.heads)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up share one kernel `[E, 2, F]`."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        inner = config.intermediate_size
        self.gate_up = GatedLinear(config.hidden_size, (2, inner), config.mlp_bias, dtype, rngs)
        self.down = Linear(inner, (config.hidden_size,), config.mlp_bias, dtype, rngs)


class LlamaLayer(nnx.Module):
    """Norm, attention, norm, feed-forward, with two residual sums."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self, x: Measured, shared: LlamaShared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[Measured, Any]:
        """One layer over packed tokens; attend, carry and place as in `Model.run`."""
        x_te, norm = x.x_te, MeasuredNorm(self.attention_norm, x.squares_t)
        o_thd, carry = attend(*self.attention.project(x_te, shared, norm), carry, place)
        o_te, num_tokens = o_thd.astype(x_te.dtype).reshape(x_te.shape[0], -1), shared.num_tokens
        x_te = self.attention.out(o_te, num_tokens, residual=x_te)
        inner_tf = self.mlp.gate_up(x_te, num_tokens, norm=self.mlp_norm)
        x_te = self.mlp.down(inner_tf, num_tokens, residual=x_te)
        return Measured.of(x_te, is_measured=x.squares_t is not None), carry


class LlamaEnds(Ends):
    """The embedding, a norm, and the output matrix."""

    def __init__(self, config: LlamaConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, config.hidden_size, dtype, keys)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.config = config

    def begin(self, tokens: TokenBatch) -> tuple[Measured, LlamaShared]:
        """See `Ends`; states are measured where the layers are a loop on a TPU."""
        config, heads = self.config, tokens.heads
        angles = rope.cos_sin(config.rope, config.head_dim, tokens.positions_t, tokens.rope_lens_t)
        # Behind the barrier, XLA for TPUs does not compute them again in every layer.
        angles = jax.lax.optimization_barrier(angles if heads is None else heads.angles(*angles))
        x = Measured.of(self.embed(tokens.ids_t), is_measured=heads is not None)
        return x, LlamaShared(angles, tokens.num_in_use, heads)

    def end(self, x: Measured) -> jax.Array:
        """See `Ends`."""
        return x.x_te

    @property
    def final_norm(self) -> RMSNorm:
        """See `Ends`."""
        return self.norm
