"""The modules of a decoder: one layer with its feed-forward or experts, and the modules around the layers.

Experts have a router, and may have a shared expert.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import InternalError
from jpaged.kernels import lora, matmul
from jpaged.kernels.experts import (
    ExpertAdapters,
    ExpertMap,
    ExpertsKernel,
    ExpertWeights,
    Routes,
    apply_experts,
    route,
)
from jpaged.kernels.recurrence import RecurrentRows, record_routes
from jpaged.models import rope
from jpaged.models.config import Mixture
from jpaged.models.decoder.config import DecoderConfig, QueryScale
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.layers import (
    ActivatedLinear,
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
    Params,
    QKVLinear,
    RandomKeys,
    RMSNorm,
    RowChunks,
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
        kernel = matrix = self.kernel.get_value()
        kernel = matrix.base if isinstance(matrix, lora.AdaptedMatrix) else matrix
        if isinstance(kernel, matmul.PackedMatrix):
            logits_tx = matmul.loaded().multiply(x_te, kernel, rows.num_in_use, dtype=np.dtype(np.float32))
        else:
            logits_tx = dot(x_te, kernel, 0)
        if isinstance(matrix, lora.AdaptedMatrix) and rows.adapters_t is not None:
            logits_tx = logits_tx + lora.adapt(x_te, rows.adapters_t, matrix)
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
        has_gates = mixture.gate.has_gates
        self.gate = ExpertLinear(num_experts, (width, inner), use_bias, dtype, rngs) if has_gates else None
        self.up = ExpertLinear(num_experts, (width, inner), use_bias, dtype, rngs)
        self.down = ExpertLinear(num_experts, (inner, width), use_bias, dtype, rngs)

    @property
    def weights(self) -> ExpertWeights:
        """The arrays."""
        linears = (self.gate or self.up, self.up, self.down)
        biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
        kernels = [linear.kernel.get_value() for linear in linears]
        if not isinstance(kernels[0], lora.AdaptedMatrix):
            return ExpertWeights(*kernels, *biases)
        weights = ExpertWeights(*(kernel.base for kernel in kernels), *biases)
        adapters = tuple(ExpertAdapters(kernel.a, kernel.b[0]) for kernel in kernels)
        return dataclasses.replace(weights, adapters=adapters)


class SharedExpert(Module):
    """An expert that all rows use, optionally weighted by a score."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: RandomKeys) -> None:
        inner = mixture.shared_width
        has_gates = mixture.gate.has_gates
        self.gate_up = GatedLinear(width, inner, False, "silu", dtype, rngs) if has_gates else None
        self.up = None if has_gates else Linear(width, (inner,), False, dtype, rngs)
        self.down = Linear(mixture.shared_width, (width,), False, dtype, rngs)
        self.score = Linear(width, (1,), False, dtype, rngs) if mixture.shared_is_weighed else None

    def __call__(self, x_te: jax.Array, rows: Rows) -> jax.Array:
        """Map `[T, E]` to float32 `[T, E]`."""
        if self.gate_up is not None:
            inner_tf = self.gate_up(x_te, rows)
        else:
            assert self.up is not None
            inner_tf = activate(self.up(x_te, rows), "relu2")
        y_te = self.down(inner_tf, rows).astype(jnp.float32)
        if self.score is None:
            return y_te
        return jax.nn.sigmoid(self.score(x_te, rows).astype(jnp.float32)) * y_te


class ExpertMapArrays(Module):
    """The arrays of an `ExpertMap`. They are no weights of the model: the device sets them, and replaces them."""

    def __init__(self) -> None:
        self.starts, self.physical = Param(None), Param(None)

    def params(self) -> Params:
        """Return nothing: see the class."""
        return {}

    @property
    def value(self) -> ExpertMap:
        """The map."""
        return ExpertMap(self.starts.get_value(), self.physical.get_value())


class MixtureOfExperts(Module):
    """The weighted sum of the outputs of each row's experts, plus the shared expert's."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.router = ExpertRouter(width, mixture, dtype, rngs)
        self.experts = Experts(width, mixture, dtype, rngs)
        self.shared = SharedExpert(width, mixture, dtype, rngs) if mixture.shared_width else None
        self.expert_map = None if mixture.num_redundant_experts is None else ExpertMapArrays()
        self.mixture = mixture

    def __call__(
        self,
        x_te: jax.Array,
        rows: Rows,
        *,
        norm: Norm | None,
        residual: jax.Array | None = None,
        kernel: ExpertsKernel | None = None,
    ) -> tuple[jax.Array, Routes]:
        """Map `[T, E]` to `[T, E]`; adds the residual, if any. Also return the routes, to physical experts.

        Sums are made in float32 and rounded once.
        """
        kernel_of_router = self.router.kernel.get_value()
        if isinstance(kernel_of_router, lora.AdaptedMatrix):
            kernel_of_router = kernel_of_router.base
        is_packed = isinstance(kernel_of_router, matmul.PackedMatrix)
        before = norm.for_kernel if is_packed and norm is not None else None
        if before is not None:
            h_te = matmul.loaded().normalise(x_te, before, rows.num_in_use)
        else:
            h_te = x_te if norm is None else norm(x_te)
        choice_bias = None if self.router.choice_bias is None else self.router.choice_bias[...]
        logits_tx = self.router(h_te, rows)
        routes = route(logits_tx, self.mixture.routing, rows.num_in_use, choice_bias, rows.is_used_t)
        routes = dataclasses.replace(routes, adapters_t=rows.adapters_t)
        weighed_te = h_te
        if self.mixture.weighs_inputs:
            weighed_te = (h_te.astype(jnp.float32) * routes.weights_tk).astype(h_te.dtype)
            routes = dataclasses.replace(routes, weights_tk=jnp.ones_like(routes.weights_tk))
        if self.expert_map is not None:
            routes = self.expert_map.value.apply(routes, h_te)
        y_te = apply_experts(weighed_te, routes, self.experts.weights, self.mixture.gate, kernel)
        if self.shared is not None:
            y_te = y_te + self.shared(h_te, rows)
        y_te = y_te.astype(x_te.dtype)
        return (y_te if residual is None else residual + y_te), routes


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
        query_scales_t: a factor of each token's queries, float32; None is none.
        recurrent: see `TokenBatch`.
        layer_inputs_ltp: numbers of each token for every layer, `[L, T, P]`; see `DecoderConfig.layer_inputs`.
    """

    angles: tuple[Any, ...]
    rows: Rows
    heads: HeadsKernel | None = dataclasses.field(default=None, metadata={"static": True})
    experts: ExpertsKernel | None = dataclasses.field(default=None, metadata={"static": True})
    states: StateShardings | None = dataclasses.field(default=None, metadata={"static": True})
    query_scales_t: jax.Array | None = None
    recurrent: RecurrentRows | None = None
    layer_inputs_ltp: jax.Array | None = None


def make_norm(config: DecoderConfig, dtype: np.dtype) -> RMSNorm | LayerNorm:
    """Return a norm of hidden states."""
    if config.norm == "layer":
        bias, offset = config.norm_bias, config.norm_offset
        return LayerNorm(config.hidden_size, config.norm_eps, True, dtype, use_bias=bias, offset=offset)
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, config.norm_offset)


class HeadsNorm(Module):
    """A norm of queries and keys in the columns of `QKVLinear`, with a scale for each column.

    `wide` divides by the root mean square over all heads, and `layer` normalizes each head. Values pass unchanged.
    """

    def __init__(self, config: DecoderConfig, dtype: np.dtype) -> None:
        group = config.num_heads // config.num_kv_heads
        self.groups = config.num_kv_heads, group + 2, config.head_dim
        self.scale = Param(jnp.ones((math.prod(self.groups),), dtype))
        self.is_wide, self.eps = config.qk_norm == "wide", config.norm_eps

    def __call__(self, qkv: jax.Array) -> jax.Array:
        """Map `[T, K * (G + 2) * D]` to the same shape."""
        x_tkgd = qkv.reshape(len(qkv), *self.groups)
        heads, values = x_tkgd[:, :, :-1].astype(jnp.float32), x_tkgd[:, :, -1:]
        if self.is_wide:
            means_tg = jnp.mean(jnp.square(heads), axis=(1, 3))
            queries_t1 = jnp.mean(means_tg[:, :-1], axis=1, keepdims=True)
            queries_tg = jnp.broadcast_to(queries_t1, (len(qkv), self.groups[1] - 2))
            means = jnp.concatenate((queries_tg, means_tg[:, -1:]), axis=1)[:, None, :, None]
        else:
            heads = heads - jnp.mean(heads, axis=-1, keepdims=True)
            means = jnp.mean(jnp.square(heads), axis=-1, keepdims=True)
        scale_kgd = self.scale[...].reshape(self.groups)[:, :-1].astype(jnp.float32)
        heads = heads * jax.lax.rsqrt(means + self.eps) * scale_kgd
        return jnp.concatenate((heads.astype(qkv.dtype), values), axis=2).reshape(qkv.shape)


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
        has_norms = config.qk_norm in ("head", "rotated")
        self.q_norm = RMSNorm(head_dim, eps, dtype, offset) if has_norms else None
        self.k_norm = RMSNorm(head_dim, eps, dtype, offset) if has_norms else None
        self.heads_norm = HeadsNorm(config, dtype) if config.qk_norm in ("wide", "layer") else None
        self.norms_rotated = config.qk_norm in ("rotated", "unit")
        self.unit_eps = eps if config.qk_norm == "unit" else None
        self.query_scale = config.query_scale
        self.sinks = Param(jnp.zeros((config.num_heads,), dtype)) if config.has_sinks else None

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return the heads' outputs `[T, H * D]`, and the carry."""
        rope_index, norms = place.kind.rope, self._head_norms
        if rope_index is None or self.heads_norm is not None or self.norms_rotated:
            qkv = self.qkv(x_te, shared.rows, norm=norm)
            return self.attend_projected(qkv, shared, attend, carry, place)
        angles = shared.angles[rope_index]
        projected = self.qkv.project_rotated(x_te, shared.rows, angles, norm, norms, shared.heads)
        return self._attend(projected, shared, attend, carry, place, x_te.dtype)

    def attend_projected(
        self, qkv: jax.Array, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return `attend` for the result of `qkv`, whose queries and keys are not rotated."""
        rope_index, norms, dtype = place.kind.rope, self._head_norms, qkv.dtype
        if self.heads_norm is not None:
            qkv = self.heads_norm(qkv)
        if rope_index is None:
            q_thd, k_tkd, v_tkd = self.qkv.split(qkv)
        else:
            before = None if self.norms_rotated else norms
            q_thd, k_tkd, v_tkd = self.qkv.rotate(qkv, shared.angles[rope_index], before, shared.heads)
        if norms is not None and (self.norms_rotated or rope_index is None):
            q_thd, k_tkd = norms[0](q_thd), norms[1](k_tkd)
        if self.unit_eps is not None and rope_index is not None:
            q_thd, k_tkd = (divide_by_size(x, self.unit_eps) for x in (q_thd, k_tkd))
        return self._attend((q_thd, k_tkd, v_tkd), shared, attend, carry, place, dtype)

    def _attend(
        self,
        projected: tuple[jax.Array, jax.Array, jax.Array],
        shared: Shared,
        attend: Attend,
        carry: Any,
        place: LayerPlace,
        dtype: np.dtype,
    ) -> tuple[jax.Array, Any]:
        sinks = () if self.sinks is None else (self.sinks[...],)
        q_thd, k_tkd, v_tkd = projected
        scale, scales_t = self.query_scale, shared.query_scales_t
        if scale is not None and scales_t is not None and (place.kind.rope is None or not scale.is_global):
            q_thd = (q_thd.astype(jnp.float32) * scales_t[:, None, None]).astype(q_thd.dtype)
        o_thd, carry = attend(q_thd, k_tkd, v_tkd, carry, place, *sinks)
        return o_thd.astype(dtype).reshape(len(o_thd), -1), carry

    @property
    def _head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of queries and keys."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)


def divide_by_size(x_thd: jax.Array, eps: float) -> jax.Array:
    """Divide each head by its root mean square."""
    means = RMSNorm.measure(x_thd)[..., None] / x_thd.shape[-1]
    return (x_thd.astype(jnp.float32) * jax.lax.rsqrt(means + eps)).astype(x_thd.dtype)


class XIELU(Module):
    """The activation xIELU (Huang 2024, arXiv 2411.13010): quadratic above zero, and exponential below."""

    def __init__(self, dtype: np.dtype) -> None:
        self.alpha_p, self.alpha_n = Param(jnp.ones((1,), dtype)), Param(jnp.ones((1,), dtype))
        self.beta, self.eps = Param(jnp.full((1,), 0.5, dtype)), Param(jnp.full((1,), -1e-6, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply it in float32; returns x's type."""
        x32 = x.astype(jnp.float32)
        parameters = (self.alpha_p, self.alpha_n, self.beta, self.eps)
        alpha_p, alpha_n, beta, eps = (parameter[...].astype(jnp.float32) for parameter in parameters)
        above = jax.nn.softplus(alpha_p) * x32 * x32
        below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x32, eps)) - x32)
        return (jnp.where(x32 > 0, above, below) + beta * x32).astype(x.dtype)


class MLP(Module):
    """down(act(gate(x)) * up(x)), with gate and up in one kernel `[E, 2, F]`, or down(act(up(x)))."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        is_gated = config.is_gated
        self.gate_up = GatedLinear(width, inner, bias, config.activation, dtype, rngs) if is_gated else None
        self.up: Linear | None = None
        if not is_gated and config.activation == "xielu":
            self.up = Linear(width, (inner,), bias, dtype, rngs)
        elif not is_gated:
            self.up = ActivatedLinear(width, inner, bias, config.activation, dtype, rngs)
        self.down = Linear(inner, (width,), bias, dtype, rngs)
        self.xielu = XIELU(dtype) if config.activation == "xielu" else None

    def __call__(
        self,
        x_te: jax.Array,
        rows: Rows,
        *,
        norm: Norm | None,
        residual: jax.Array | None = None,
        norm_after: Norm | None = None,
    ) -> jax.Array:
        """Map `[T, E]` to `[T, E]`; adds the residual and normalizes the sum, if there are any."""
        if self.gate_up is not None:
            inner_tf = self.gate_up(x_te, rows, norm=norm)
        else:
            assert self.up is not None
            inner_tf = self._activate(self.up(x_te, rows, norm=norm))
        return self.down(inner_tf, rows, residual=residual, norm_after=norm_after)

    def add_to_parts(self, x: ColumnParts, norm: Norm) -> ColumnParts:
        """Add the result of a call to the states, both in parts."""
        if self.gate_up is not None:
            inner_tf = self.gate_up.multiply_parts(x, norm)
        else:
            assert self.up is not None
            inner_tf = self._activate(self.up.multiply_parts(x, norm))
        return self.down.add_to_parts(inner_tf, x)

    def _activate(self, x: jax.Array) -> jax.Array:
        return x if self.xielu is None else self.xielu(x)


class AttentionModule(Protocol):
    """Interface of a layer's attention."""

    out: Linear

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Return the heads' outputs, concatenated, `[T, width]`, and the carry."""


class DecoderLayer(Module):
    """Attention and a feed-forward, with the norms and the residual sums of the config."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys, kind: LayerKind) -> None:
        config = config.of_layer(kind)
        has_two = config.residual != "shared" and config.pre_norms and kind.has_feed_forward
        self.attention_norm = make_norm(config, dtype) if config.pre_norms and kind.has_norm else None
        make = self.make_recurrent if kind.states else self.make_attention
        self.attention = make(config, dtype, rngs)
        self.mlp_norm = make_norm(config, dtype) if has_two else None
        self.mlp: MLP | MixtureOfExperts | None
        if not kind.has_feed_forward:
            self.mlp = None
        elif kind.is_sparse and config.mixture is not None:
            self.mlp = MixtureOfExperts(config.hidden_size, config.mixture, dtype, rngs)
        else:
            self.mlp = MLP(config, dtype, rngs)
        self.attention_post_norm = make_norm(config, dtype) if config.post_norms else None
        self.mlp_post_norm = make_norm(config, dtype) if config.post_norms else None
        self.is_sequential = config.residual == "sequential"
        self.normalizes_sums = config.residual == "post"
        self.residual_scale = config.residual_scale

    @staticmethod
    def make_attention(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
        """Return the attention of a layer; families may override it."""
        return Attention(config, dtype, rngs)

    @staticmethod
    def make_recurrent(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
        """Return the replacement of attention in a recurrent layer; families with such layers override it."""
        raise InternalError(f"{config.architecture} has no recurrent layers")

    def __call__(
        self, x: Measured, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[Measured, Any]:
        """Run one layer over packed tokens; attend, carry and place as in `Model.run`."""
        x_te, rows = x.x_te, shared.rows
        norm: Norm | None = self.attention_norm
        if isinstance(norm, RMSNorm):
            norm = MeasuredNorm(norm, x.squares_t)
        o_te, carry = self.attention.attend(x_te, norm, shared, attend, carry, place)
        if self.normalizes_sums:
            x_te = self.attention.out(o_te, rows, residual=x_te, norm_after=self.attention_post_norm)
            assert isinstance(self.mlp, MLP)
            x_te = self.mlp(x_te, rows, norm=None, residual=x_te, norm_after=self.mlp_post_norm)
        elif self.mlp is None:
            x_te = self.attention.out(o_te, rows, residual=x_te)
        elif self.attention_post_norm is not None or self.residual_scale != 1:
            x_te = x_te + self._adjusted(self.attention.out(o_te, rows), self.attention_post_norm)
            y_te, carry = self._feed_forward(x_te, shared, self.mlp_norm, carry, place)
            x_te = x_te + self._adjusted(y_te, self.mlp_post_norm)
        else:
            attended_te = self.attention.out(o_te, rows, residual=x_te)
            source_te = attended_te if self.is_sequential else x_te
            norm = self.mlp_norm or self.attention_norm
            x_te, carry = self._feed_forward(source_te, shared, norm, carry, place, attended_te)
        return Measured.of(x_te, is_measured=x.squares_t is not None), carry

    @property
    def takes_parts(self) -> bool:
        """True if `project` and `finish` support the layer."""
        has_norms = isinstance(self.attention_norm, RMSNorm) and isinstance(self.mlp_norm, RMSNorm)
        is_plain = self.is_sequential and self.attention_post_norm is None and self.residual_scale == 1
        return has_norms and is_plain and type(self.attention) is Attention and isinstance(self.mlp, MLP)

    def project(self, x: RowChunks) -> jax.Array:
        """Return queries, keys and values, not rotated; see `LayerHalves`."""
        assert isinstance(self.attention, Attention)
        assert self.attention_norm is not None
        qkv, norm = self.attention.qkv, self.attention_norm
        return jnp.concatenate([qkv.multiply_parts(chunk, norm) for chunk in x])

    def finish(
        self, x: RowChunks, qkv: jax.Array, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[RowChunks, Any]:
        """Run the layer after its projection; see `LayerHalves`."""
        assert isinstance(self.attention, Attention)
        assert isinstance(self.mlp, MLP)
        mlp, norm, out = self.mlp, self.mlp_norm, self.attention.out
        assert norm is not None
        o_te, carry = self.attention.attend_projected(qkv, shared, attend, carry, place)
        outputs = jnp.split(o_te, len(x))
        attended = [out.add_to_parts(o_ce, chunk) for o_ce, chunk in zip(outputs, x, strict=True)]
        return tuple(mlp.add_to_parts(chunk, norm) for chunk in attended), carry

    def _adjusted(self, y_te: jax.Array, norm: Norm | None) -> jax.Array:
        """Return the output of attention or feed-forward as it is added."""
        y_te = y_te if norm is None else norm(y_te)
        return y_te if self.residual_scale == 1 else (y_te.astype(jnp.float32) * self.residual_scale).astype(y_te.dtype)

    def _feed_forward(
        self,
        x_te: jax.Array,
        shared: Shared,
        norm: Norm | None,
        carry: Any,
        place: LayerPlace,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Return the feed-forward's result, and the carry with the load of experts."""
        assert self.mlp is not None
        if isinstance(self.mlp, MixtureOfExperts):
            y_te, routes = self.mlp(x_te, shared.rows, norm=norm, residual=residual, kernel=shared.experts)
            return y_te, record_routes(carry, routes.ids_tk, place.group, place.index)
        if shared.states is None:
            return self.mlp(x_te, shared.rows, norm=norm, residual=residual), carry
        whole_te = jax.lax.with_sharding_constraint(x_te, shared.states.whole)
        y_te = jax.lax.with_sharding_constraint(self.mlp(whole_te, shared.rows, norm=norm), shared.states.split)
        return (y_te if residual is None else residual + y_te), carry


class DecoderEnds(Ends):
    """The embeddings of tokens and, if they are learned, of positions, a norm, and the output matrix."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, config.hidden_size, dtype, keys)
        num_positions, key = config.num_positions, jax.random.fold_in(keys[0], 1)
        self.positions = TokenEmbedding(num_positions, config.hidden_size, dtype, key) if num_positions else None
        self.token_types: TokenEmbedding | None = None
        if config.num_token_types:
            key = jax.random.fold_in(keys[0], 2)
            self.token_types = TokenEmbedding(config.num_token_types, config.hidden_size, dtype, key)
        self.embed_norm = make_norm(config, dtype) if config.embed_norm else None
        self.norm = make_norm(config, dtype) if config.final_norm else None
        self.logit_bias = Param(jnp.zeros((config.vocab_size,), dtype)) if config.logit_bias else None
        self.config = config

    def begin(self, tokens: TokenBatch) -> tuple[Measured, Shared]:
        """See `Ends`. States are measured if a TPU kernel rotates the heads and norms are RMS norms."""
        config = self.config
        x_te = self.embed_inputs(tokens, config.embed_scale, scales_given=config.scales_given_embeds)
        if self.positions is not None:
            x_te = x_te + self.positions(tokens.positions_t)
        if self.token_types is not None:
            most = config.num_token_types - 1
            types_t = jnp.zeros_like(tokens.ids_t) if tokens.types_t is None else jnp.minimum(tokens.types_t, most)
            x_te = x_te + self.token_types(types_t)
        if self.embed_norm is not None:
            x_te = self.embed_norm(x_te)
        if tokens.states is not None:
            x_te = jax.lax.with_sharding_constraint(x_te, tokens.states.split)
        x = Measured.of(x_te, is_measured=tokens.heads is not None and config.norm == "rms" and config.pre_norms)
        return x, self.shared(tokens)

    def shared(self, tokens: TokenBatch) -> Shared:
        """Return the values that all layers share."""
        config, heads = self.config, tokens.heads

        def angles(index: int, which: RopeConfig) -> Any:
            positions = tokens.positions_t, tokens.rope_lens_t, tokens.rope_axes_3t
            made = rope.cos_sin(which, config.get_rotary_dim(index), *positions)
            # With the barrier, XLA for TPUs does not compute them again in every layer.
            return jax.lax.optimization_barrier(made if heads is None else heads.angles(*made))

        scales_t = None if config.query_scale is None else _query_scales(config.query_scale, tokens.positions_t)
        recurrent = tokens.recurrent
        if recurrent is None and any(kind.states for kind in config.layer_kinds):
            recurrent = RecurrentRows.one(len(tokens.ids_t))
        made = tuple(itertools.starmap(angles, enumerate(config.ropes)))
        return Shared(made, tokens.rows, heads, tokens.experts, tokens.states, scales_t, recurrent)

    def end(self, x: Measured) -> jax.Array:
        """See `Ends`."""
        return x.x_te

    @property
    def final_norm(self) -> Norm | None:
        """See `Ends`."""
        return self.norm

    def logits(self, hidden_re: jax.Array, num_rows: jax.Array) -> jax.Array:
        """See `Ends`."""
        logits_rv, cap, scale = super().logits(hidden_re, num_rows), self.config.logit_cap, self.config.logit_scale
        if self.logit_bias is not None:
            logits_rv = logits_rv + self.logit_bias[...].astype(jnp.float32)
        if scale != 1:
            logits_rv = logits_rv * scale
        return logits_rv if cap is None else cap * jnp.tanh(logits_rv / cap)


def _query_scales(scale: QueryScale, positions_t: jax.Array) -> jax.Array:
    periods_t = (positions_t + scale.offset) // scale.length
    return 1 + scale.beta * jnp.log1p(periods_t.astype(jnp.float32))
