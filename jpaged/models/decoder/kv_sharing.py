"""Layers that attend to the keys and values of an earlier layer, and inputs of each layer next to the hidden states.

Gemma 4 has both. Keys and values of this step are passed from layer to layer, next to the hidden states:

    layer      0    1    2    3    4    5
    window     w    w    g    w    w    g        w sees a window, g everything
    keys of    0    1    2    1    1    2        layer 3 and later ones have only queries
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.experts import ExpertsKernel, Routes, apply_experts, route
from jpaged.kernels.recurrence import count_expert_load
from jpaged.models import rope
from jpaged.models.config import Mixture
from jpaged.models.decoder.config import DecoderConfig
from jpaged.models.decoder.modules import (
    MLP,
    Attention,
    DecoderEnds,
    DecoderLayer,
    MixtureOfExperts,
    Shared,
    divide_by_size,
)
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.layers import (
    Attend,
    EndsKeys,
    Linear,
    Measured,
    Module,
    Norm,
    Param,
    RandomKeys,
    RMSNorm,
    TokenEmbedding,
    activate,
)
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import Rows, TokenBatch

KeysValues = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SharingState:
    """Values that pass from layer to layer.

    Attributes:
        x_te: hidden states `[T, E]`.
        number: of the next layer, int32 scalar.
        kv: keys and values of the last layer of each rope that computed them, `[T, K, D]`; empty if none are shared.
    """

    x_te: jax.Array
    number: jax.Array
    kv: tuple[KeysValues, ...]


class OwnKeysAttention(Attention):
    """Attention of a layer with its own keys and values, which are returned."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        super().__init__(config, dtype, rngs)
        self.value_eps = config.norm_eps if config.value_norm else None

    def project(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, place: LayerPlace, given: KeysValues | None
    ) -> tuple[jax.Array, KeysValues]:
        """Return queries, and the layer's keys and values."""
        assert place.kind.rope is not None
        angles, norms = shared.angles[place.kind.rope], self._head_norms
        q_thd, k_tkd, v_tkd = self.qkv.project_rotated(x_te, shared.rows, angles, norm, norms, None)
        return q_thd, (k_tkd, v_tkd if self.value_eps is None else divide_by_size(v_tkd, self.value_eps))


class SharedKeysAttention(Module):
    """Attention of a layer with queries only."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        width = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.query = Linear(config.hidden_size, (width,), False, dtype, rngs)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, dtype, config.norm_offset)
        self.out = Linear(width, (config.hidden_size,), False, dtype, rngs)

    def project(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, place: LayerPlace, given: KeysValues | None
    ) -> tuple[jax.Array, KeysValues]:
        """Return queries, and the given keys and values."""
        assert place.kind.rope is not None
        assert given is not None
        q_thd = self.query(x_te, shared.rows, norm=norm).reshape(len(x_te), -1, self.head_dim)
        return rope.apply(self.q_norm(q_thd), *shared.angles[place.kind.rope]), given


class LayerInput(Module):
    """The sum of the hidden states and the layer's own inputs, which a gate multiplies."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        width, inner = config.hidden_size, config.layer_inputs
        self.gate = Linear(width, (inner,), False, dtype, rngs)
        self.out = Linear(inner, (width,), False, dtype, rngs)
        self.norm = RMSNorm(width, config.norm_eps, dtype, config.norm_offset)
        self.activation = config.activation

    def __call__(self, x_te: jax.Array, shared: Shared, number: jax.Array) -> jax.Array:
        """Map `[T, E]` to `[T, E]`, for the layer of this number."""
        assert shared.layer_inputs_ltp is not None
        inputs_tp = jax.lax.dynamic_index_in_dim(shared.layer_inputs_ltp, number, keepdims=False)
        gates_tp = activate(self.gate(x_te, shared.rows), self.activation)
        return x_te + self.norm(self.out(gates_tp * inputs_tp, shared.rows))


class NormedExperts(MixtureOfExperts):
    """Experts whose router normalizes the hidden states by itself, and which have factors (Gemma 4)."""

    def __init__(self, config: DecoderConfig, mixture: Mixture, dtype: np.dtype, rngs: RandomKeys) -> None:
        super().__init__(config.hidden_size, mixture, dtype, rngs)
        self.router_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.factors = Param(jnp.ones((mixture.routing.num_experts,), dtype))

    def __call__(  # type: ignore[override]
        self, x_te: jax.Array, rows: Rows, *, norm: Norm, kernel: ExpertsKernel | None = None
    ) -> tuple[jax.Array, Routes]:
        """Map `[T, E]` to `[T, E]`. Also return the routes, to physical experts."""
        scores_te = self.router_norm(x_te) * jnp.asarray(x_te.shape[1] ** -0.5, x_te.dtype)
        routes = route(self.router(scores_te, rows), self.mixture.routing, rows.num_in_use, None, rows.is_used_t)
        factors_tk = self.factors[...].astype(jnp.float32)[routes.ids_tk]
        routes = dataclasses.replace(routes, weights_tk=routes.weights_tk * factors_tk)
        h_te = norm(x_te)
        if self.expert_map is not None:
            routes = self.expert_map.value.apply(routes, h_te)
        y_te = apply_experts(h_te, routes, self.experts.weights, self.mixture.gate, kernel)
        return y_te.astype(x_te.dtype), routes


class DenseBeside(Module):
    """The dense feed-forward next to experts, and the norms of both."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.mlp = MLP(config, dtype, rngs)
        self.norm, self.experts_norm, self.experts_post_norm = (
            RMSNorm(config.hidden_size, config.norm_eps, dtype, config.norm_offset) for _ in range(3)
        )


class SharingLayer(DecoderLayer):
    """A layer with norms around attention and feed-forward, and with or without keys (Gemma 4)."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys, kind: LayerKind) -> None:
        super().__init__(config, dtype, rngs, kind)
        own = config.of_layer(kind)
        attention = OwnKeysAttention if kind.kv_source is None else SharedKeysAttention
        self.attention: OwnKeysAttention | SharedKeysAttention = attention(own, dtype, rngs)
        self.dense: DenseBeside | None = None
        if kind.is_sparse and config.mixture is not None:
            self.mlp = NormedExperts(config, config.mixture, dtype, rngs)
            self.dense = DenseBeside(own, dtype, rngs)
        self.layer_input = LayerInput(config, dtype, rngs) if config.layer_inputs else None
        self.factor = Param(jnp.ones((1,), dtype)) if config.layer_scales else None

    def __call__(  # type: ignore[override]
        self, x: SharingState, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[SharingState, Any]:
        """See `DecoderLayer`."""
        index, x_te = place.kind.rope, x.x_te
        assert index is not None
        q_thd, kv = self.attention.project(x_te, self.attention_norm, shared, place, x.kv[index] if x.kv else None)
        o_thd, carry = attend(q_thd, *kv, carry, place)
        o_te = self.attention.out(o_thd.astype(x_te.dtype).reshape(len(x_te), -1), shared.rows)
        x_te = x_te + self._adjusted(o_te, self.attention_post_norm)
        y_te, carry = self._feed_forward(x_te, shared, self.mlp_norm, carry, place)
        x_te = x_te + self._adjusted(y_te, self.mlp_post_norm)
        if self.layer_input is not None:
            x_te = self.layer_input(x_te, shared, x.number)
        if self.factor is not None:
            x_te = x_te * self.factor[...]
        latest = tuple(kv if one == index else given for one, given in enumerate(x.kv))
        return SharingState(x_te, x.number + 1, latest), carry

    def _feed_forward(
        self,
        x_te: jax.Array,
        shared: Shared,
        norm: Norm | None,
        carry: Any,
        place: LayerPlace,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """See `DecoderLayer`; with experts it is a sum: the dense result is added to that of the experts."""
        if self.dense is None:
            return super()._feed_forward(x_te, shared, norm, carry, place, residual)
        assert isinstance(self.mlp, NormedExperts)
        dense_te = self.dense.norm(self.dense.mlp(x_te, shared.rows, norm=norm))
        y_te, routes = self.mlp(x_te, shared.rows, norm=self.dense.experts_norm, kernel=shared.experts)
        carry = count_expert_load(carry, routes.ids_tk, place.group, place.index)
        return dense_te + self.dense.experts_post_norm(y_te), carry


class LayerInputs(Module):
    """The inputs of all layers: an embedding of tokens, plus a projection of the first layer's input."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, key: jax.Array) -> None:
        keys, width = RandomKeys(key), config.num_layers * config.layer_inputs
        self.config = config
        self.embed = TokenEmbedding(config.vocab_size, width, dtype, keys.next_key())
        self.project = Linear(config.hidden_size, (width,), False, dtype, keys)
        self.norm = RMSNorm(config.layer_inputs, config.norm_eps, dtype, config.norm_offset)

    def __call__(self, x_te: jax.Array, tokens: TokenBatch) -> jax.Array:
        """Return `[L, T, P]`."""
        config, dtype = self.config, x_te.dtype
        shape = len(x_te), config.num_layers, config.layer_inputs
        projected = self.project(x_te, tokens.rows) * jnp.asarray(config.hidden_size**-0.5, dtype)
        of_tokens = self.embed(tokens.ids_t) * jnp.asarray(config.layer_inputs**0.5, dtype)
        both = self.norm(projected.reshape(shape)) + of_tokens.reshape(shape)
        return jnp.moveaxis(both * jnp.asarray(2.0**-0.5, dtype), 1, 0)


class SharingEnds(DecoderEnds):
    """The modules around layers that share keys, or have separate inputs."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, dtype, keys)
        key = jax.random.fold_in(keys[0], 3)
        self.layer_inputs = LayerInputs(config, dtype, key) if config.layer_inputs else None

    def begin(self, tokens: TokenBatch) -> tuple[SharingState, Shared]:  # type: ignore[override]
        """See `Ends`."""
        x, shared = super().begin(dataclasses.replace(tokens, heads=None))
        assert isinstance(x, Measured)
        x_te, kinds, config = x.x_te, self.config.layer_kinds, self.config
        if self.layer_inputs is not None:
            shared = dataclasses.replace(shared, layer_inputs_ltp=self.layer_inputs(x_te, tokens))
        kv: list[KeysValues] = []
        if any(kind.kv_source is not None for kind in kinds):
            for index in range(len(config.ropes)):
                own = config.of_layer(next(kind for kind in kinds if kind.rope == index))
                blank = jnp.zeros((len(x_te), own.num_kv_heads, own.head_dim), x_te.dtype)
                kv.append((blank, blank))
        return SharingState(x_te, jnp.int32(0), tuple(kv)), shared

    def end(self, x: SharingState) -> jax.Array:  # type: ignore[override]
        """See `Ends`."""
        return x.x_te
