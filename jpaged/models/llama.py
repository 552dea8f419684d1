"""The Llama family: flax.nnx modules for one layer, and `Llama`, which runs them over plain parameter trees."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models import rope
from jpaged.models.config import LlamaConfig
from jpaged.models.layers import (
    Attend,
    Linear,
    Params,
    QKVLinear,
    RMSNorm,
    check_dtype,
    init_layers,
    layer_graph,
    normal,
    rms_norm,
)
from jpaged.models.matmul import dot
from jpaged.models.stack import LayerMode, run_layers


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
        self, x_te: jax.Array, cos_sin: tuple[jax.Array, jax.Array], attend: Attend, carry: Any, layer_index: jax.Array
    ) -> tuple[jax.Array, Any]:
        """One layer over packed tokens; attend and carry as in `Model.run`."""
        o_thd, carry = attend(*self.attention.project(self.attention_norm(x_te), *cos_sin), carry, layer_index)
        x_te = x_te + self.attention.out(o_thd.astype(x_te.dtype).reshape(x_te.shape[0], -1))
        return x_te + self.mlp(self.mlp_norm(x_te)), carry


@dataclass(frozen=True, slots=True)
class Llama:
    """Implements `jpaged.models.model.Model` for the Llama family.

    Attributes:
        config: the shape of the model.
        dtype: type of parameters and activations, float32 or bfloat16.
    """

    config: LlamaConfig
    dtype: np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", check_dtype(self.dtype))

    def abstract_params(self, layer_mode: LayerMode) -> Params:
        """See `Model`."""
        return jax.eval_shape(functools.partial(self.init_params, layer_mode=layer_mode), jax.random.key(0))

    def init_params(self, key: jax.Array, layer_mode: LayerMode) -> Params:
        """See `Model`."""
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        shape = (self.config.vocab_size, self.config.hidden_size)
        params: Params = {
            "embed": {"embedding": normal(embed_key, shape, self.dtype)},
            "layers": init_layers(LlamaLayer, self.config, self.dtype, layers_key, layer_mode),
            "norm": {"scale": jnp.ones((self.config.hidden_size,), self.dtype)},
        }
        if not self.config.tie_word_embeddings:
            params["lm_head"] = {"kernel": normal(head_key, shape, self.dtype)}
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
        """See `Model`."""
        graph = layer_graph(LlamaLayer, self.config, self.dtype)
        cos_sin = self.rope(positions_t, rope_lens_t)

        def layer(params: Params, x_te: jax.Array, carry: Any, layer_index: jax.Array) -> tuple[jax.Array, Any]:
            return nnx.merge(graph, nnx.State(params))(x_te, cos_sin, attend, carry, layer_index)

        x_te = params["embed"]["embedding"][token_ids_t]
        x_te, carry = run_layers(layer, params["layers"], x_te, carry, mode=layer_mode)
        return rms_norm(x_te, params["norm"]["scale"], self.config.rms_norm_eps), carry

    def logits(self, params: Params, hidden_re: jax.Array) -> jax.Array:
        """See `Model`."""
        matrix = params["embed"]["embedding"] if self.config.tie_word_embeddings else params["lm_head"]["kernel"]
        return dot(hidden_re, matrix, 1)
