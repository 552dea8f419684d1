"""The OPT family (Zhang et al. 2022): flax.nnx modules for one layer, and `Opt`, which runs them over plain trees."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.config import OPT_POSITION_OFFSET, Activation, OptConfig
from jpaged.models.layers import (
    Attend,
    LayerNorm,
    Linear,
    Params,
    QKVLinear,
    check_dtype,
    init_layers,
    layer_graph,
    layer_norm,
    normal,
)
from jpaged.models.matmul import dot
from jpaged.models.stack import LayerMode, run_layers

_NORM_EPS = 1e-5


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The activation in float32, returned in x's type; gelu is the exact one."""
    x32 = x.astype(jnp.float32)
    return (jax.nn.relu(x32) if activation == "relu" else jax.nn.gelu(x32, approximate=False)).astype(x.dtype)


class Attention(nnx.Module):
    """Projections around an injected attention."""

    def __init__(self, config: OptConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.qkv = QKVLinear(config, config.use_bias, dtype, rngs)
        self.out = Linear(config.hidden_size, (config.hidden_size,), config.use_bias, dtype, rngs)


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: OptConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.up = Linear(config.hidden_size, (config.intermediate_size,), config.use_bias, dtype, rngs)
        self.down = Linear(config.intermediate_size, (config.hidden_size,), config.use_bias, dtype, rngs)
        self.activation = config.activation

    def __call__(self, x_te: jax.Array) -> jax.Array:
        """`[T, E]` to `[T, E]`."""
        return self.down(activate(self.up(x_te), self.activation))


class OptLayer(nnx.Module):
    """Attention and feed-forward, each with a residual sum and a norm.

    norm_first      x + f(norm(x))       all sizes but one
    otherwise       norm(x + f(x))       350M
    """

    def __init__(self, config: OptConfig, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = LayerNorm(config.hidden_size, _NORM_EPS, config.norm_affine, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = LayerNorm(config.hidden_size, _NORM_EPS, config.norm_affine, dtype)
        self.mlp = MLP(config, dtype, rngs)
        self.norm_first = config.norm_first

    def __call__(self, x_te: jax.Array, attend: Attend, carry: Any, layer_index: jax.Array) -> tuple[jax.Array, Any]:
        """One layer over packed tokens; attend and carry as in `Model.run`."""
        normed_te = self.attention_norm(x_te) if self.norm_first else x_te
        o_thd, carry = attend(*self.attention.qkv.project(normed_te), carry, layer_index)
        x_te = x_te + self.attention.out(o_thd.astype(x_te.dtype).reshape(x_te.shape[0], -1))
        if self.norm_first:
            return x_te + self.mlp(self.mlp_norm(x_te)), carry
        x_te = self.attention_norm(x_te)
        return self.mlp_norm(x_te + self.mlp(x_te)), carry


@dataclass(frozen=True, slots=True)
class Opt:
    """Implements `jpaged.models.model.Model` for OPT.

    Attributes:
        config: the shape of the model.
        dtype: type of parameters and activations, float32 or bfloat16.
    """

    config: OptConfig
    dtype: np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", check_dtype(self.dtype))

    def abstract_params(self, layer_mode: LayerMode) -> Params:
        """See `Model`."""
        return jax.eval_shape(functools.partial(self.init_params, layer_mode=layer_mode), jax.random.key(0))

    def init_params(self, key: jax.Array, layer_mode: LayerMode) -> Params:
        """See `Model`."""
        config, dtype = self.config, self.dtype
        embed_key, position_key, in_key, out_key, head_key, layers_key = jax.random.split(key, 6)
        embedding = (config.vocab_size, config.embed_size)
        positions = (config.max_position_embeddings + OPT_POSITION_OFFSET, config.hidden_size)
        params: Params = {
            "embed": {"embedding": normal(embed_key, embedding, dtype)},
            "positions": {"embedding": normal(position_key, positions, dtype)},
            "layers": init_layers(OptLayer, config, dtype, layers_key, layer_mode),
        }
        if config.embed_size != config.hidden_size:
            params["project_in"] = {"kernel": normal(in_key, (config.embed_size, config.hidden_size), dtype)}
            params["project_out"] = {"kernel": normal(out_key, (config.hidden_size, config.embed_size), dtype)}
        if config.final_norm and config.norm_affine:
            width = (config.hidden_size,)
            params["norm"] = {"scale": jnp.ones(width, dtype), "bias": jnp.zeros(width, dtype)}
        if not config.tie_word_embeddings:
            params["lm_head"] = {"kernel": normal(head_key, embedding, dtype)}
        return params

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
        graph = layer_graph(OptLayer, self.config, self.dtype)

        def layer(params: Params, x_te: jax.Array, carry: Any, layer_index: jax.Array) -> tuple[jax.Array, Any]:
            return nnx.merge(graph, nnx.State(params))(x_te, attend, carry, layer_index)

        x_te = params["embed"]["embedding"][token_ids_t]
        if "project_in" in params:
            x_te = dot(x_te, params["project_in"]["kernel"], 0).astype(self.dtype)
        x_te = x_te + params["positions"]["embedding"][positions_t + OPT_POSITION_OFFSET]
        x_te, carry = run_layers(layer, params["layers"], x_te, carry, mode=layer_mode)
        if self.config.final_norm:
            x_te = layer_norm(x_te, params.get("norm", {}), _NORM_EPS)
        return x_te, carry

    def logits(self, params: Params, hidden_re: jax.Array) -> jax.Array:
        """See `Model`."""
        if "project_out" in params:
            hidden_re = dot(hidden_re, params["project_out"]["kernel"], 0).astype(self.dtype)
        matrix = params["embed"]["embedding"] if self.config.tie_word_embeddings else params["lm_head"]["kernel"]
        return dot(hidden_re, matrix, 1)
