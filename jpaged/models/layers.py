"""What models are made of: matrices, norms, the grouped query/key/value projection, and their random beginnings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.errors import InvalidArgument
from jpaged.models.config import ModelConfig
from jpaged.models.matmul import dot
from jpaged.models.stack import LayerMode

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


def layer_norm(x: jax.Array, params: Params, eps: float) -> jax.Array:
    """Computes (x - mean) / sqrt(var + eps) * scale + bias over the last axis, in float32, returned in x's type.

    Args:
        x: what to normalise.
        params: `scale` and `bias`, or empty for neither.
        eps: added to the variance.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if params:
        x32 = x32 * params["scale"].astype(jnp.float32) + params["bias"].astype(jnp.float32)
    return x32.astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale."""

    def __init__(self, width: int, eps: float, dtype: np.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return rms_norm(x, self.scale[...], self.eps)


class LayerNorm(nnx.Module):
    """`layer_norm` with its scale and bias, or without."""

    def __init__(self, width: int, eps: float, is_affine: bool, dtype: np.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((width,), dtype)) if is_affine else None
        self.bias = nnx.Param(jnp.zeros((width,), dtype)) if is_affine else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        params: Params = {}
        if self.scale is not None and self.bias is not None:
            params = {"scale": self.scale[...], "bias": self.bias[...]}
        return layer_norm(x, params, self.eps)


class Linear(nnx.Module):
    """`x[T, in] @ kernel[in, *out] + bias[*out]`, accumulated in float32, returned in x's type."""

    def __init__(self, width: int, out: tuple[int, ...], use_bias: bool, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(normal(rngs.params(), (width, *out), dtype))
        self.bias = nnx.Param(jnp.zeros(out, dtype)) if use_bias else None

    def __call__(self, x_te: jax.Array) -> jax.Array:
        """`[T, in]` to `[T, *out]`."""
        y = dot(x_te, self.kernel[...], 0)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x_te.dtype)


class QKVLinear(Linear):
    """One kernel for query, key and value, grouped by key/value head.

    Splitting its K axis over devices gives every device whole groups:

        kernel [E, K, G + 2, D]      G = H / K query heads, then their key, then their value
    """

    def __init__(self, config: ModelConfig, use_bias: bool, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        rows = config.num_heads // config.num_kv_heads + 2
        super().__init__(config.hidden_size, (config.num_kv_heads, rows, config.head_dim), use_bias, dtype, rngs)

    def project(self, x_te: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q_thd, k_tkd, v_tkd), queries not scaled."""
        qkv = self(x_te)
        num_tokens, num_groups, rows, head_dim = qkv.shape
        q, k, v = jnp.split(qkv, (rows - 2, rows - 1), axis=2)
        return q.reshape(num_tokens, num_groups * (rows - 2), head_dim), k.squeeze(2), v.squeeze(2)


# Makes the module of one layer: (config, dtype, rngs).
LayerClass = Callable[[Any, np.dtype, nnx.Rngs], nnx.Module]


@functools.lru_cache(maxsize=32)
def layer_graph(layer_class: LayerClass, config: ModelConfig, dtype: np.dtype) -> nnx.GraphDef:
    """The structure of a layer without its arrays; parameters are merged into it while tracing only."""
    layer = nnx.eval_shape(lambda: layer_class(config, dtype, nnx.Rngs(0)))
    return nnx.split(layer)[0]


def init_layers(
    layer_class: LayerClass, config: ModelConfig, dtype: np.dtype, key: jax.Array, layer_mode: LayerMode
) -> Any:
    """Random parameters of all layers, as `run_layers` takes them; both layer modes sample the same numbers."""

    def init_layer(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(layer_class(config, dtype, nnx.Rngs(key))))

    keys, init = jax.random.split(key, config.num_layers), jax.jit(init_layer)
    return jax.vmap(init)(keys) if layer_mode == "scan" else [init(key) for key in keys]


def normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Random parameters with a standard deviation of 0.02."""
    return (jax.random.normal(key, shape) * _INIT_STD).astype(dtype)


def check_dtype(dtype: np.dtype) -> np.dtype:
    """The type that a model computes in.

    Raises:
        InvalidArgument: it is neither float32 nor bfloat16.
    """
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(jnp.float32), np.dtype(jnp.bfloat16)):
        raise InvalidArgument("dtype", f"is {dtype.name}; it must be float32 or bfloat16")
    return dtype
