"""The modules of a decoder: one layer with its feed-forward or experts, and the modules around the layers.

Experts have a router, and may have a shared expert.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels import matmul
from jpaged.kernels.experts import ExpertsKernel, ExpertWeights, apply_experts, route
from jpaged.models import rope
from jpaged.models.config import Mixture
from jpaged.models.decoder.config import DecoderConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.layers import (
    Attend,
    ColumnParts,
    Ends,
    EndsKeys,
    GatedLinear,
    LayerNorm,
    Linear,
    Measured,
    MeasuredNorm,
    Module,
    Norm,
    Param,
    QKVLinear,
    RandomKeys,
    RMSNorm,
    TokenEmbedding,
    activate,
    dot,
    normal,
)
from jpaged.models.rope_config import RopeConfig
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import HeadsKernel, Rows, StateShardings, TokenBatch


class ExpertRouter(Module):
    """A score for each row and expert, in float32."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: RandomKeys) -> None:
        num_experts = mixture.routing.num_experts
        self.kernel = Param(normal(rngs.next_key(), (width, num_experts), dtype))
        self.bias = Param(jnp.zeros((num_experts,), dtype)) if mixture.router_bias else None
        # Added to scores whose differences may be below the resolution of bfloat16.
        self.choice_bias = Param(jnp.zeros((num_experts,), jnp.float32)) if mixture.choice_bias else None

    def __call__(self, x_te: jax.Array, rows: Rows) -> jax.Array:
        """Map `[T, E]` to `[T, X]`."""
        kernel = self.kernel.get_value()
        if isinstance(kernel, matmul.PackedMatrix):
            logits_tx = matmul.loaded().multiply(x_te, kernel, rows.num_in_use, dtype=np.dtype(np.float32))
        else:
            logits_tx = dot(x_te, kernel, 0)
        return logits_tx if self.bias is None else logits_tx + self.bias[...].astype(jnp.float32)


class ExpertLinear(Module):
    """One matrix for each expert, `[X, in, out]`, and biases `[X, out]`."""

    def __init__(
        self, num_experts: int, widths: tuple[int, int], use_bias: bool, dtype: np.dtype, rngs: RandomKeys
    ) -> None:
        self.kernel = Param(normal(rngs.next_key(), (num_experts, *widths), dtype))
        self.bias = Param(jnp.zeros((num_experts, widths[1]), dtype)) if use_bias else None


class Experts(Module):
    """The matrices of all experts."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: RandomKeys) -> None:
        num_experts, inner, use_bias = mixture.routing.num_experts, mixture.width, mixture.has_biases
        self.gate = ExpertLinear(num_experts, (width, inner), use_bias, dtype, rngs)
        self.up = ExpertLinear(num_experts, (width, inner), use_bias, dtype, rngs)
        self.down = ExpertLinear(num_experts, (inner, width), use_bias, dtype, rngs)

    @property
    def weights(self) -> ExpertWeights:
        """The arrays."""
        linears = (self.gate, self.up, self.down)
        biases = (None if linear.bias is None else linear.bias[...] for linear in linears)
        return ExpertWeights(*(linear.kernel.get_value() for linear in linears), *biases)


class SharedExpert(Module):
    """An expert that all rows use, optionally weighted by a score."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.gate_up = GatedLinear(width, mixture.shared_width, False, "silu", dtype, rngs)
        self.down = Linear(mixture.shared_width, (width,), False, dtype, rngs)
        self.score = Linear(width, (1,), False, dtype, rngs) if mixture.shared_is_weighed else None

    def __call__(self, x_te: jax.Array, rows: Rows) -> jax.Array:
        """Map `[T, E]` to float32 `[T, E]`."""
        y_te = self.down(self.gate_up(x_te, rows), rows).astype(jnp.float32)
        if self.score is None:
            return y_te
        return jax.nn.sigmoid(self.score(x_te, rows).astype(jnp.float32)) * y_te


class MixtureOfExperts(Module):
    """The weighted sum of the outputs of each row's experts, plus the shared expert's."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.router = ExpertRouter(width, mixture, dtype, rngs)
        self.experts = Experts(width, mixture, dtype, rngs)
        self.shared = SharedExpert(width, mixture, dtype, rngs) if mixture.shared_width else None
        self.mixture = mixture

    def __call__(
        self,
        x_te: jax.Array,
        rows: Rows,
        *,
        norm: Norm,
        residual: jax.Array | None = None,
        kernel: ExpertsKernel | None = None,
    ) -> jax.Array:
        """Map `[T, E]` to `[T, E]`; adds the residual, if any.

        Sums are made in float32 and rounded once.
        """
        is_packed = isinstance(self.router.kernel.get_value(), matmul.PackedMatrix)
        before = norm.for_kernel if is_packed else None
        h_te = norm(x_te) if before is None else matmul.loaded().normalise(x_te, before, rows.num_in_use)
        choice_bias = None if self.router.choice_bias is None else self.router.choice_bias[...]
        logits_tx = self.router(h_te, rows)
        routes = route(logits_tx, self.mixture.routing, rows.num_in_use, choice_bias, rows.is_used_t)
        y_te = apply_experts(h_te, routes, self.experts.weights, self.mixture.gate, kernel)
        if self.shared is not None:
            y_te = y_te + self.shared(h_te, rows)
        y_te = y_te.astype(x_te.dtype)
        return y_te if residual is None else residual + y_te


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Shared:
    """Values that all layers share.

    Attributes:
        angles: for each rope, cosines and sines of the tokens, float32 `[T, D/2]`, or the kernel's form of them.
        rows: the tokens as rows of matmuls.
        heads: the kernel that splits and rotates heads, if there is one. Static.
        experts: see `TokenBatch`. Static.
        states: see `TokenBatch`. Static.
    """

    angles: tuple[Any, ...]
    rows: Rows
    heads: HeadsKernel | None = dataclasses.field(default=None, metadata={"static": True})
    experts: ExpertsKernel | None = dataclasses.field(default=None, metadata={"static": True})
    states: StateShardings | None = dataclasses.field(default=None, metadata={"static": True})


def make_norm(config: DecoderConfig, dtype: np.dtype) -> RMSNorm | LayerNorm:
    """Return a norm of hidden states."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.norm_eps, True, dtype)
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, config.norm_offset)


class Attention(Module):
    """Projections around an injected attention.

    Args:
        num_inputs: width of the input; None is that of the hidden state.
    """

    def __init__(
        self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys, *, num_inputs: int | None = None
    ) -> None:
        head_dim, eps, offset = config.head_dim, config.norm_eps, config.norm_offset
        self.qkv = QKVLinear(config, config.attention_bias, dtype, rngs, num_inputs)
        width = config.num_heads * head_dim
        self.out = Linear(width, (config.hidden_size,), config.attention_output_bias, dtype, rngs)
        self.q_norm = RMSNorm(head_dim, eps, dtype, offset) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, dtype, offset) if config.qk_norm else None
        self.sinks = Param(jnp.zeros((config.num_heads,), dtype)) if config.has_sinks else None

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return the heads' outputs `[T, H * D]`, and the carry."""
        projected = self._project(x_te, norm, shared, place.kind.rope)
        return self._attend(projected, attend, carry, place, x_te.dtype)

    def attend_projected(
        self, qkv: jax.Array, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return `attend` for the result of `qkv`, whose queries and keys are not rotated."""
        if place.kind.rope is None:
            projected = self.qkv.split(qkv)
        else:
            projected = self.qkv.rotate(qkv, shared.angles[place.kind.rope], self._head_norms, shared.heads)
        return self._attend(projected, attend, carry, place, qkv.dtype)

    def _attend(
        self,
        projected: tuple[jax.Array, jax.Array, jax.Array],
        attend: Attend,
        carry: Any,
        place: LayerPlace,
        dtype: np.dtype,
    ) -> tuple[jax.Array, Any]:
        sinks = () if self.sinks is None else (self.sinks[...],)
        o_thd, carry = attend(*projected, carry, place, *sinks)
        return o_thd.astype(dtype).reshape(len(o_thd), -1), carry

    def _project(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, which: int | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (q_thd, k_tkd, v_tkd) of the normalized states: queries and keys rotated, queries not scaled."""
        if which is None:
            return self.qkv.project(x_te, shared.rows, norm)
        angles = shared.angles[which]
        return self.qkv.project_rotated(x_te, shared.rows, angles, norm, self._head_norms, shared.heads)

    @property
    def _head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of queries and keys."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)


class MLP(Module):
    """down(act(gate(x)) * up(x)), with gate and up in one kernel `[E, 2, F]`, or down(act(up(x)))."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
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

    def add_to_parts(self, x: ColumnParts, norm: Norm) -> ColumnParts:
        """Add the result of a call to the states, both in parts."""
        if self.gate_up is not None:
            inner_tf = self.gate_up.multiply_parts(x, norm)
        else:
            assert self.up is not None
            inner_tf = activate(self.up.multiply_parts(x, norm), self.activation)
        return self.down.add_to_parts(inner_tf, x)


class AttentionModule(Protocol):
    """Interface of a layer's attention."""

    out: Linear

    def attend(
        self, x_te: jax.Array, norm: Norm, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return the heads' outputs, concatenated, `[T, width]`, and the carry."""


class DecoderLayer(Module):
    """Attention and a feed-forward, each after a norm, with the residual sums of the config."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys, kind: LayerKind) -> None:
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
    def make_attention(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
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

    @property
    def takes_parts(self) -> bool:
        """True if `project` and `finish` support the layer."""
        has_norms = isinstance(self.attention_norm, RMSNorm) and isinstance(self.mlp_norm, RMSNorm)
        is_plain = self.is_sequential and self.attention_post_norm is None
        return has_norms and is_plain and isinstance(self.attention, Attention) and isinstance(self.mlp, MLP)

    def project(self, x: ColumnParts) -> jax.Array:
        """Return queries, keys and values, not rotated; see `LayerHalves`."""
        assert isinstance(self.attention, Attention)
        return self.attention.qkv.multiply_parts(x, self.attention_norm)

    def finish(
        self, x: ColumnParts, qkv: jax.Array, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[ColumnParts, Any]:
        """Run the layer after its projection; see `LayerHalves`."""
        assert isinstance(self.attention, Attention)
        assert isinstance(self.mlp, MLP)
        assert self.mlp_norm is not None
        o_te, carry = self.attention.attend_projected(qkv, shared, attend, carry, place)
        return self.mlp.add_to_parts(self.attention.out.add_to_parts(o_te, x), self.mlp_norm), carry

    def _feed_forward(
        self, x_te: jax.Array, shared: Shared, norm: Norm, residual: jax.Array | None = None
    ) -> jax.Array:
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(x_te, shared.rows, norm=norm, residual=residual, kernel=shared.experts)
        if shared.states is None:
            return self.mlp(x_te, shared.rows, norm=norm, residual=residual)
        whole_te = jax.lax.with_sharding_constraint(x_te, shared.states.whole)
        y_te = jax.lax.with_sharding_constraint(self.mlp(whole_te, shared.rows, norm=norm), shared.states.split)
        return y_te if residual is None else residual + y_te


class DecoderEnds(Ends):
    """The embeddings of tokens and, if they are learned, of positions, a norm, and the output matrix."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, config.hidden_size, dtype, keys)
        num_positions, key = config.num_positions, jax.random.fold_in(keys[0], 1)
        self.positions = TokenEmbedding(num_positions, config.hidden_size, dtype, key) if num_positions else None
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
        if tokens.states is not None:
            x_te = jax.lax.with_sharding_constraint(x_te, tokens.states.split)
        x = Measured.of(x_te, is_measured=tokens.heads is not None and config.norm == "rms")
        return x, self.shared(tokens)

    def shared(self, tokens: TokenBatch) -> Shared:
        """Return the values that all layers share."""
        config, heads = self.config, tokens.heads

        def angles(which: RopeConfig) -> Any:
            made = rope.cos_sin(which, config.rotary_dim, tokens.positions_t, tokens.rope_lens_t)
            # With the barrier, XLA for TPUs does not compute them again in every layer.
            return jax.lax.optimization_barrier(made if heads is None else heads.angles(*made))

        return Shared(tuple(map(angles, config.ropes)), tokens.rows, heads, tokens.experts, tokens.states)

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
