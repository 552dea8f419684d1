"""The Llama family: flax.nnx modules for one layer, and `Llama`, which runs them over plain parameter trees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.errors import InvalidArgument
from jpaged.models import rope
from jpaged.models.config import ModelConfig
from jpaged.models.dot import dot
from jpaged.models.layers import LayerMode, run_layers

# Attention over whatever the carry holds: (q_thd, k_tkd, v_tkd, carry, layer index) -> (o_thd, carry).
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]

# Nested dictionaries of arrays; under "layers" a list of them in loop mode, one stacked in scan mode.
Params = dict[str, Any]

_INIT_STD = 0.02


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Computes x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, returned in x's type."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale."""

    def __init__(self, width: int, eps: float, dtype: np.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return rms_norm(x, self.scale[...], self.eps)


class Linear(nnx.Module):
    """`x[T, in] @ kernel[in, *out] + bias[*out]`, accumulated in float32, returned in x's type."""

    def __init__(self, width: int, out: tuple[int, ...], use_bias: bool, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(_normal(rngs.params(), (width, *out), dtype))
        self.bias = nnx.Param(jnp.zeros(out, dtype)) if use_bias else None

    def __call__(self, x_te: jax.Array) -> jax.Array:
        """`[T, in]` to `[T, *out]`."""
        y = dot(x_te, self.kernel[...], 0)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x_te.dtype)


class Attention(nnx.Module):
    """Projections around an injected attention.

    One kernel holds query, key and value, grouped by key/value head, so that splitting its K axis over devices gives
    every device whole groups:

        qkv.kernel [E, K, G + 2, D]      G = H / K query heads, then their key, then their value
    """

    def __init__(self, config: ModelConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        num_groups, head_dim = config.num_kv_heads, config.head_dim
        rows = config.num_heads // num_groups + 2
        self.qkv = Linear(config.hidden_size, (num_groups, rows, head_dim), config.attention_bias, dtype, rngs)
        width = config.num_heads * head_dim
        self.out = Linear(width, (config.hidden_size,), config.attention_output_bias, dtype, rngs)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def project(self, x_te: jax.Array, cos_td: jax.Array, sin_td: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q_thd, k_tkd, v_tkd), queries and keys normalised and rotated, queries not scaled."""
        qkv = self.qkv(x_te)
        num_tokens, num_groups, rows, head_dim = qkv.shape
        q, k, v = jnp.split(qkv, (rows - 2, rows - 1), axis=2)
        q_thd = q.reshape(num_tokens, num_groups * (rows - 2), head_dim)
        k_tkd, v_tkd = k.squeeze(2), v.squeeze(2)
        if self.q_norm is not None and self.k_norm is not None:
            q_thd, k_tkd = self.q_norm(q_thd), self.k_norm(k_tkd)
        return rope.apply(q_thd, cos_td, sin_td), rope.apply(k_tkd, cos_td, sin_td), v_tkd


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up share one kernel `[E, 2, F]`."""

    def __init__(self, config: ModelConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        inner = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, (2, inner), config.mlp_bias, dtype, rngs)
        self.down = Linear(inner, (config.hidden_size,), config.mlp_bias, dtype, rngs)

    def __call__(self, x_te: jax.Array) -> jax.Array:
        """`[T, E]` to `[T, E]`."""
        gate, up = (x.squeeze(1).astype(jnp.float32) for x in jnp.split(self.gate_up(x_te), 2, axis=1))
        return self.down((jax.nn.silu(gate) * up).astype(x_te.dtype))


class LlamaLayer(nnx.Module):
    """Norm, attention, norm, feed-forward, with two residual sums."""

    def __init__(self, config: ModelConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self, x_te: jax.Array, cos_sin: tuple[jax.Array, jax.Array], attend: Attend, carry: Any, layer_index: jax.Array
    ) -> tuple[jax.Array, Any]:
        """One layer over packed tokens; attend and carry as in `Llama.run`."""
        o_thd, carry = attend(*self.attention.project(self.attention_norm(x_te), *cos_sin), carry, layer_index)
        x_te = x_te + self.attention.out(o_thd.astype(x_te.dtype).reshape(x_te.shape[0], -1))
        return x_te + self.mlp(self.mlp_norm(x_te)), carry


@dataclass(frozen=True, slots=True)
class Llama:
    """A model of the Llama family as a description: hashable, without arrays, static under jit.

    It knows nothing of blocks, batches or sampling: tokens come packed in one axis T, and attention is injected.
    T is at least 2 in bfloat16, where a product with one row is ten times slower on CPUs than one with two.

    Attributes:
        config: the shape of the model.
        dtype: type of parameters and activations, float32 or bfloat16.
    """

    config: ModelConfig
    dtype: np.dtype

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype not in (np.dtype(jnp.float32), np.dtype(jnp.bfloat16)):
            raise InvalidArgument("dtype", f"is {dtype.name}; it must be float32 or bfloat16")
        object.__setattr__(self, "dtype", dtype)

    def abstract_params(self, layer_mode: LayerMode) -> Params:
        """Shapes and types of the parameter tree."""
        return jax.eval_shape(functools.partial(self.init_params, layer_mode=layer_mode), jax.random.key(0))

    def init_params(self, key: jax.Array, layer_mode: LayerMode) -> Params:
        """Random parameters: normal with a standard deviation of 0.02, norms of one, biases of zero.

        Both layer modes draw the same numbers.
        """
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        layer_keys = jax.random.split(layers_key, self.config.num_layers)
        init = jax.jit(self._init_layer)
        shape = (self.config.vocab_size, self.config.hidden_size)
        params: Params = {
            "embed": {"embedding": _normal(embed_key, shape, self.dtype)},
            "layers": jax.vmap(init)(layer_keys) if layer_mode == "scan" else [init(key) for key in layer_keys],
            "norm": {"scale": jnp.ones((self.config.hidden_size,), self.dtype)},
        }
        if not self.config.tie_word_embeddings:
            params["lm_head"] = {"kernel": _normal(head_key, shape, self.dtype)}
        return params

    def rope(self, positions_t: jax.Array, rope_lens_t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine, float32 `[T, D/2]`; see `jpaged.models.rope.cos_sin`."""
        return rope.cos_sin(self.config.rope, self.config.head_dim, positions_t, rope_lens_t)

    def run(
        self,
        params: Params,
        token_ids_t: jax.Array,
        positions_t: jax.Array,
        rope_lens_t: jax.Array,
        attend: Attend,
        carry: Any,
        layer_mode: LayerMode,
    ) -> tuple[jax.Array, Any]:
        """Tokens to hidden states after the final norm.

        A pure function of its arrays: it can be jitted, differentiated, and mapped over a batch with vmap.

        Args:
            params: the tree of `abstract_params(layer_mode)`.
            token_ids_t: int32 `[T]`, all below vocab_size.
            positions_t: int32 `[T]`, the token's place in its sequence.
            rope_lens_t: int32 `[T]`, see `jpaged.models.rope.cos_sin`.
            attend: attention. It stores k and v where the carry keeps them, scales scores by 1 / sqrt(D) itself,
                and masks; query head h reads key/value head h // (H / K).
            carry: what attend threads through the layers: the KV pool when serving, `()` when training.
            layer_mode: how the layers run; see `run_layers`.

        Returns:
            hidden states `[T, E]` in the model's type, and the carry.
        """
        graph = _layer_graph(self.config, self.dtype)
        cos_sin = self.rope(positions_t, rope_lens_t)

        def layer(params: Params, x_te: jax.Array, carry: Any, layer_index: jax.Array) -> tuple[jax.Array, Any]:
            return nnx.merge(graph, nnx.State(params))(x_te, cos_sin, attend, carry, layer_index)

        x_te = params["embed"]["embedding"][token_ids_t]
        x_te, carry = run_layers(layer, params["layers"], x_te, carry, mode=layer_mode)
        return rms_norm(x_te, params["norm"]["scale"], self.config.rms_norm_eps), carry

    def logits(self, params: Params, hidden_re: jax.Array) -> jax.Array:
        """Hidden states `[R, E]` to float32 logits `[R, V]`."""
        matrix = params["embed"]["embedding"] if self.config.tie_word_embeddings else params["lm_head"]["kernel"]
        return dot(hidden_re, matrix, 1)

    def _init_layer(self, key: jax.Array) -> Params:
        layer = LlamaLayer(self.config, self.dtype, nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(layer))


@functools.lru_cache(maxsize=32)
def _layer_graph(config: ModelConfig, dtype: np.dtype) -> nnx.GraphDef:
    """The structure of a layer without its arrays; parameters are merged into it while tracing only."""
    layer = nnx.eval_shape(lambda: LlamaLayer(config, dtype, nnx.Rngs(0)))
    return nnx.split(layer)[0]


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return (jax.random.normal(key, shape) * _INIT_STD).astype(dtype)
