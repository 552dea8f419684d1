"""The modules of a decoder: one layer, and the modules around the layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.kernels.experts import ExpertsKernel
from jpaged.models.decoder.config import DecoderConfig
from jpaged.models.experts.modules import MixtureOfExperts
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.layers import (
    Attend,
    Embedding,
    Ends,
    EndsKeys,
    GatedLinear,
    LayerNorm,
    Linear,
    Measured,
    MeasuredNorm,
    Norm,
    QKVLinear,
    RMSNorm,
    activate,
)
from jpaged.models.rope import angles as rope
from jpaged.models.rope.config import RopeConfig
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import HeadsKernel, Rows, TokenBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Shared:
    """Values that all layers share.

    Attributes:
        angles: for each rope, cosines and sines of the tokens, float32 `[T, D/2]`, or the kernel's form of them.
        rows: the tokens as rows of matmuls.
        heads: the kernel that splits and rotates heads, if there is one. Static.
        experts: see `TokenBatch`. Static.
    """

    angles: tuple[Any, ...]
    rows: Rows
    heads: HeadsKernel | None = dataclasses.field(default=None, metadata={"static": True})
    experts: ExpertsKernel | None = dataclasses.field(default=None, metadata={"static": True})


def make_norm(config: DecoderConfig, dtype: np.dtype) -> RMSNorm | LayerNorm:
    """Return a norm of hidden states."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.norm_eps, True, dtype)
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, config.norm_offset)


class Attention(nnx.Module):
    """Projections around an injected attention.

    Args:
        num_inputs: width of the input; None is that of the hidden state.
    """

    def __init__(
        self, config: DecoderConfig, dtype: np.dtype, rngs: nnx.Rngs, *, num_inputs: int | None = None
    ) -> None:
        head_dim, eps, offset = config.head_dim, config.norm_eps, config.norm_offset
        self.qkv = QKVLinear(config, config.attention_bias, dtype, rngs, num_inputs)
        width = config.num_heads * head_dim
        self.out = Linear(width, (config.hidden_size,), config.attention_output_bias, dtype, rngs)
        self.q_norm = RMSNorm(head_dim, eps, dtype, offset) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, dtype, offset) if config.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.has_sinks else None

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return the heads' outputs `[T, H * D]`, and the carry."""
        q_thd, k_tkd, v_tkd = self._project(x_te, norm, shared, place.kind.rope)
        if self.sinks is None:
            o_thd, carry = attend(q_thd, k_tkd, v_tkd, carry, place)
        else:
            o_thd, carry = attend(q_thd, k_tkd, v_tkd, carry, place, self.sinks[...])
        return o_thd.astype(x_te.dtype).reshape(x_te.shape[0], -1), carry

    def _project(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, which: int | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (q_thd, k_tkd, v_tkd) of the normalized states: queries and keys rotated, queries not scaled."""
        if which is None:
            return self.qkv.project(x_te, shared.rows, norm)
        head_norms = None
        if self.q_norm is not None and self.k_norm is not None:
            head_norms = self.q_norm, self.k_norm
        angles = shared.angles[which]
        return self.qkv.project_rotated(x_te, shared.rows, angles, norm, head_norms, shared.heads)


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one kernel `[E, 2, F]`, or down(act(up(x)))."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        is_gated = config.is_gated
        self.gate_up = GatedLinear(width, inner, bias, config.activation, dtype, rngs) if is_gated else None
        self.up = None if is_gated else Linear(width, (inner,), bias, dtype, rngs)
        self.down = Linear(inner, (width,), bias, dtype, rngs)
        self.activation = config.activation

    def __call__(self, x_te: jax.Array, rows: Rows, *, norm: Norm, residual: jax.Array | None = None) -> jax.Array:
        """Map `[T, E]` to `[T, E]`; adds the residual, if any."""
        if self.gate_up is not None:
            inner_tf = self.gate_up(x_te, rows, norm=norm)
        else:
            assert self.up is not None
            inner_tf = activate(self.up(x_te, rows, norm=norm), self.activation)
        return self.down(inner_tf, rows, residual=residual)


class AttentionModule(Protocol):
    """Interface of a layer's attention."""

    out: Linear

    def attend(
        self, x_te: jax.Array, norm: Norm, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return the heads' outputs, concatenated, `[T, width]`, and the carry."""


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward, each after a norm, with the residual sums of the config."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: nnx.Rngs, kind: LayerKind) -> None:
        has_two = config.residual != "shared"
        self.attention_norm = make_norm(config, dtype)
        self.attention = self.make_attention(config, dtype, rngs)
        self.mlp_norm = make_norm(config, dtype) if has_two else None
        self.mlp: MLP | MixtureOfExperts
        if kind.is_sparse and config.mixture is not None:
            self.mlp = MixtureOfExperts(config.hidden_size, config.mixture, dtype, rngs)
        else:
            self.mlp = MLP(config, dtype, rngs)
        self.attention_post_norm = make_norm(config, dtype) if config.post_norms else None
        self.mlp_post_norm = make_norm(config, dtype) if config.post_norms else None
        self.is_sequential = config.residual == "sequential"

    @staticmethod
    def make_attention(config: DecoderConfig, dtype: np.dtype, rngs: nnx.Rngs) -> AttentionModule:
        """Return the attention of a layer; families may override it."""
        return Attention(config, dtype, rngs)

    def __call__(
        self, x: Measured, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[Measured, Any]:
        """Run one layer over packed tokens; attend, carry and place as in `Model.run`."""
        x_te, rows = x.x_te, shared.rows
        norm: Norm = self.attention_norm
        if isinstance(norm, RMSNorm):
            norm = MeasuredNorm(norm, x.squares_t)
        o_te, carry = self.attention.attend(x_te, norm, shared, attend, carry, place)
        if self.attention_post_norm is not None and self.mlp_post_norm is not None:
            assert self.mlp_norm is not None
            x_te = x_te + self.attention_post_norm(self.attention.out(o_te, rows))
            x_te = x_te + self.mlp_post_norm(self._feed_forward(x_te, shared, self.mlp_norm))
        else:
            attended_te = self.attention.out(o_te, rows, residual=x_te)
            source_te = attended_te if self.is_sequential else x_te
            x_te = self._feed_forward(source_te, shared, self.mlp_norm or self.attention_norm, attended_te)
        return Measured.of(x_te, is_measured=x.squares_t is not None), carry

    def _feed_forward(
        self, x_te: jax.Array, shared: Shared, norm: Norm, residual: jax.Array | None = None
    ) -> jax.Array:
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(x_te, shared.rows, norm=norm, residual=residual, kernel=shared.experts)
        return self.mlp(x_te, shared.rows, norm=norm, residual=residual)


class DecoderEnds(Ends):
    """The embeddings of tokens and, if they are learned, of positions, a norm, and the output matrix."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, config.hidden_size, dtype, keys)
        num_positions, key = config.num_positions, jax.random.fold_in(keys[0], 1)
        self.positions = Embedding(num_positions, config.hidden_size, dtype, key) if num_positions else None
        self.norm = make_norm(config, dtype)
        self.config = config

    def begin(self, tokens: TokenBatch) -> tuple[Measured, Shared]:
        """See `Ends`. States are measured if a TPU kernel rotates the heads and norms are RMS norms."""
        config = self.config
        x_te = self.embed(tokens.ids_t)
        if config.embed_scale != 1:
            x_te = x_te * jnp.asarray(config.embed_scale, x_te.dtype)
        if self.positions is not None:
            x_te = x_te + self.positions(tokens.positions_t)
        x = Measured.of(x_te, is_measured=tokens.heads is not None and config.norm == "rms")
        return x, self.shared(tokens)

    def shared(self, tokens: TokenBatch) -> Shared:
        """Return the values that all layers share."""
        config, heads = self.config, tokens.heads

        def angles(which: RopeConfig) -> Any:
            made = rope.cos_sin(which, config.rotary_dim, tokens.positions_t, tokens.rope_lens_t)
            # With the barrier, XLA for TPUs does not compute them again in every layer.
            return jax.lax.optimization_barrier(made if heads is None else heads.angles(*made))

        return Shared(tuple(map(angles, config.ropes)), tokens.rows, heads, tokens.experts)

    def end(self, x: Measured) -> jax.Array:
        """See `Ends`."""
        return x.x_te

    @property
    def final_norm(self) -> Norm:
        """See `Ends`."""
        return self.norm

    def logits(self, hidden_re: jax.Array, num_rows: jax.Array) -> jax.Array:
        """See `Ends`."""
        logits_rv, cap = super().logits(hidden_re, num_rows), self.config.logit_cap
        return logits_rv if cap is None else cap * jnp.tanh(logits_rv / cap)
