"""Layers that attend to the keys and values of an earlier layer, and inputs of each layer next to the hidden states.

Gemma 4 and Gemma 3n have both, and Gemma 3n has several hidden states of each token. Keys and values of this step are
passed from layer to layer, next to the hidden states:

    layer      0    1    2    3    4    5
    window     w    w    g    w    w    g        w sees a window, g everything
    keys of    0    1    2    1    1    2        layer 3 and later ones have only queries
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.experts import ExpertsKernel, Routes, apply_experts, route
from jpaged.kernels.recurrence import record_routes
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
    dot,
    normal,
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
        others: further hidden states of each token; see `DecoderConfig.num_states`.
    """

    x_te: jax.Array
    number: jax.Array
    kv: tuple[KeysValues, ...]
    others: tuple[jax.Array, ...] = ()


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
        """Map `[T, E]` to the summand `[T, E]`, for the layer of this number."""
        assert shared.layer_inputs_ltp is not None
        inputs_tp = jax.lax.dynamic_index_in_dim(shared.layer_inputs_ltp, number, keepdims=False)
        gates_tp = activate(self.gate(x_te, shared.rows), self.activation)
        return self.norm(self.out(gates_tp * inputs_tp, shared.rows))


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
        routes = dataclasses.replace(routes, weights_tk=routes.weights_tk * factors_tk, adapters_t=rows.adapters_t)
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
        self.attention: OwnKeysAttention | SharedKeysAttention = attention(own, dtype, rngs)  # type: ignore[assignment]
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
        x_te = x.x_te
        o_te, latest, carry = self._attend(x_te, x, shared, attend, carry, place)
        x_te = x_te + self._adjusted(o_te, self.attention_post_norm)
        y_te, carry = self._feed_forward(x_te, shared, self.mlp_norm, carry, place)
        x_te = x_te + self._adjusted(y_te, self.mlp_post_norm)
        if self.layer_input is not None:
            x_te = x_te + self.layer_input(x_te, shared, x.number)
        if self.factor is not None:
            x_te = x_te * self.factor[...]
        return SharingState(x_te, x.number + 1, latest), carry

    def _attend(
        self, x_te: jax.Array, x: SharingState, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, tuple[KeysValues, ...], Any]:
        """Return attention's output `[T, E]` for hidden states, the latest keys and values, and the carry."""
        index = place.kind.rope
        assert index is not None
        q_thd, kv = self.attention.project(x_te, self.attention_norm, shared, place, x.kv[index] if x.kv else None)
        o_thd, carry = attend(q_thd, *kv, carry, place)
        o_te = self.attention.out(o_thd.astype(x_te.dtype).reshape(len(x_te), -1), shared.rows)
        latest = tuple(kv if one == index else given for one, given in enumerate(x.kv))
        return o_te, latest, carry

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
        carry = record_routes(carry, routes.ids_tk, place.group, place.index)
        return dense_te + self.dense.experts_post_norm(y_te), carry


class SparseMLP(Module):
    """A feed-forward with gates of which most are zero: those below a cutoff, by the mean and deviation of all."""

    def __init__(self, config: DecoderConfig, sparsity: float, dtype: np.dtype, rngs: RandomKeys) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.pair = Linear(width, (2, inner), False, dtype, rngs)
        self.down = Linear(inner, (width,), False, dtype, rngs)
        self.activation, self.num_deviations = config.activation, statistics.NormalDist().inv_cdf(sparsity)

    def __call__(
        self, x_te: jax.Array, rows: Rows, *, norm: Norm | None, residual: jax.Array | None = None
    ) -> jax.Array:
        """See `MLP`."""
        pair_t2f = self.pair(x_te, rows, norm=norm)
        gates_tf = pair_t2f[:, 0].astype(jnp.float32)
        cutoff_t1 = jnp.mean(gates_tf, axis=1, keepdims=True)
        cutoff_t1 = cutoff_t1 + self.num_deviations * jnp.std(gates_tf, axis=1, keepdims=True)
        gates_tf = activate(jax.nn.relu(gates_tf - cutoff_t1).astype(x_te.dtype), self.activation)
        return self.down(gates_tf * pair_t2f[:, 1], rows, residual=residual)


class AltUp(Module):
    """Predictions of all hidden states of a token, and their correction by the one that a layer computed."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        num_states, width = config.num_states, config.hidden_size
        self.router = Param(normal(rngs.next_key(), (width, num_states), dtype))
        self.predictions = Param(normal(rngs.next_key(), (num_states, num_states**2), dtype))
        self.corrections = Param(normal(rngs.next_key(), (num_states, num_states), dtype))
        self.norm = RMSNorm(width, config.norm_eps, dtype, config.norm_offset)
        self.scale = Param(jnp.ones((width,), dtype))

    def predict(self, states: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the predictions `[T, E]` of all states."""
        mixes_tn = self._choose(states[0], self.predictions[...])
        num_states = len(states)
        return [
            sum(
                (mixes_tn[:, row * num_states + i, None] * x.astype(jnp.float32) for i, x in enumerate(states)),
                states[row].astype(jnp.float32),
            ).astype(states[0].dtype)
            for row in range(num_states)
        ]

    def correct(self, predicted: Sequence[jax.Array], computed_te: jax.Array) -> list[jax.Array]:
        """Return the states `[T, E]` after a layer that computed the first one."""
        shares_tn = self._choose(computed_te, self.corrections[...]) + 1
        change_te = (computed_te - predicted[0]).astype(jnp.float32)
        return [
            (x.astype(jnp.float32) + change_te * shares_tn[:, i, None]).astype(computed_te.dtype)
            for i, x in enumerate(predicted)
        ]

    def _choose(self, x_te: jax.Array, matrix: jax.Array) -> jax.Array:
        """Return coefficients, float32, by the modalities of hidden states."""
        routed_tn = dot(self.norm(x_te) * jnp.asarray(1 / x_te.shape[1], x_te.dtype), self.router[...], 0)
        return dot(jnp.tanh(routed_tn).astype(x_te.dtype), matrix, 0)


class Laurel(Module):
    """A residual connection of low rank: its input, plus the normalized product with two matrices."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        width, rank = config.hidden_size, config.laurel_rank
        self.left = Linear(width, (rank,), False, dtype, rngs)
        self.right = Linear(rank, (width,), False, dtype, rngs)
        self.norm = RMSNorm(width, config.norm_eps, dtype, config.norm_offset)

    def __call__(self, x_te: jax.Array, rows: Rows) -> jax.Array:
        """Map `[T, E]` to `[T, E]`."""
        return x_te + self.norm(self.right(self.left(x_te, rows), rows))


class AltUpLayer(SharingLayer):
    """A layer that computes one of several hidden states of each token, and corrects the others (Gemma 3n)."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys, kind: LayerKind) -> None:
        super().__init__(config, dtype, rngs, kind)
        if kind.sparsity:
            self.mlp = SparseMLP(config.of_layer(kind), kind.sparsity, dtype, rngs)  # type: ignore[assignment]
        self.altup, self.laurel = AltUp(config, dtype, rngs), Laurel(config, dtype, rngs)

    def __call__(  # type: ignore[override]
        self, x: SharingState, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[SharingState, Any]:
        """See `DecoderLayer`."""
        assert self.attention_norm is not None
        assert self.layer_input is not None
        predicted = self.altup.predict((x.x_te, *x.others))
        laurel_te = self.laurel(self.attention_norm(predicted[0]), shared.rows)
        o_te, latest, carry = self._attend(predicted[0], x, shared, attend, carry, place)
        x_te = predicted[0] + self._adjusted(o_te, self.attention_post_norm)
        x_te = (x_te + laurel_te) * jnp.asarray(2**-0.5, x_te.dtype)
        y_te, carry = self._feed_forward(x_te, shared, self.mlp_norm, carry, place)
        first, *others = self.altup.correct(predicted, x_te + self._adjusted(y_te, self.mlp_post_norm))
        added_te = self.layer_input(first * self.altup.scale[...], shared, x.number)
        return SharingState(first, x.number + 1, latest, tuple(other + added_te for other in others)), carry


class LayerInputs(Module):
    """The inputs of all layers: an embedding of tokens, plus a projection of the first layer's input."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, key: jax.Array) -> None:
        keys, width = RandomKeys(key), config.num_layers * config.layer_inputs
        self.config = config
        self.embed = TokenEmbedding(config.layer_vocab_size or config.vocab_size, width, dtype, keys.next_key())
        self.project = Linear(config.hidden_size, (width,), False, dtype, keys)
        self.norm = RMSNorm(config.layer_inputs, config.norm_eps, dtype, config.norm_offset)

    def __call__(self, x_te: jax.Array, tokens: TokenBatch) -> jax.Array:
        """Return `[L, T, P]`."""
        config, dtype = self.config, x_te.dtype
        shape = len(x_te), config.num_layers, config.layer_inputs
        projected = self.project(x_te, tokens.rows) * jnp.asarray(config.hidden_size**-0.5, dtype)
        ids_t, size = tokens.ids_t, config.layer_vocab_size
        of_tokens = self.embed(jnp.where(ids_t < size, ids_t, 0) if size else ids_t) * jnp.asarray(
            config.layer_inputs**0.5, dtype
        )
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


class StateLinears(Module):
    """A matrix for each of the further hidden states of a token."""

    def __init__(self, width: int, num_states: int, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.num_states = num_states
        for index in range(num_states):
            setattr(self, f"state_{index}", Linear(width, (width,), False, dtype, rngs))

    def __call__(self, states: Sequence[jax.Array]) -> list[jax.Array]:
        """Map states `[T, E]`, each by its matrix."""
        rows = Rows(jnp.int32(len(states[0])))
        return [getattr(self, f"state_{index}")(state, rows) for index, state in enumerate(states)]


class AltUpEnds(SharingEnds):
    """The modules around layers with several hidden states of each token (Gemma 3n)."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, dtype, keys)
        rngs, width = RandomKeys(jax.random.fold_in(keys[0], 4)), config.hidden_size
        num_others = config.num_states - 1
        self.begins = Linear(width, (num_others, width), False, dtype, rngs)
        self.ends = StateLinears(width, num_others, dtype, rngs)

    def begin(self, tokens: TokenBatch) -> tuple[SharingState, Shared]:  # type: ignore[override]
        """See `Ends`."""
        x, shared = super().begin(tokens)
        others_tne = self.begins(x.x_te, tokens.rows)
        others = tuple(_as_large(others_tne[:, index], x.x_te) for index in range(others_tne.shape[1]))
        return dataclasses.replace(x, others=others), shared

    def end(self, x: SharingState) -> jax.Array:  # type: ignore[override]
        """See `Ends`; the mean of all states, each as large as the first one."""
        found = [_as_large(other, x.x_te) for other in self.ends(x.others)]
        total_te = sum((other.astype(jnp.float32) for other in found), x.x_te.astype(jnp.float32))
        return (total_te / (1 + len(found))).astype(x.x_te.dtype)


def _as_large(x_te: jax.Array, like_te: jax.Array) -> jax.Array:
    """Scale rows to the root mean square of other rows."""
    own_t1, wanted_t1 = (
        jnp.mean(jnp.square(rows.astype(jnp.float32)), axis=1, keepdims=True) for rows in (x_te, like_te)
    )
    factors_t1 = jnp.sqrt(wanted_t1) * jax.lax.rsqrt(jnp.maximum(own_t1, 1e-5))
    return (x_te.astype(jnp.float32) * factors_t1).astype(x_te.dtype)
