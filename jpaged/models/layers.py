"""What models are made of: matrices, norms, the grouped query/key/value projection, embeddings, all random at first."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.config import ModelConfig
from jpaged.models.matmul import dot
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import TokenBatch

# Attention over whatever the carry holds: (q_thd, k_tkd, v_tkd, carry, which layer) -> (o_thd, carry).
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, LayerPlace], tuple[jax.Array, Any]]

# Nested dictionaries of arrays; under "layers" a list of them in loop mode, one stacked in scan mode.
Params = dict[str, Any]

_INIT_STD = 0.02


class RMSNorm(nnx.Module):
    """Computes x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, returned in x's type."""

    def __init__(self, width: int, eps: float, dtype: np.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Computes (x - mean) / sqrt(var + eps) * scale + bias over the last axis, in float32, returned in x's type.

    One that is not affine has neither scale nor bias.
    """

    def __init__(self, width: int, eps: float, is_affine: bool, dtype: np.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((width,), dtype)) if is_affine else None
        self.bias = nnx.Param(jnp.zeros((width,), dtype)) if is_affine else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None and self.bias is not None:
            x32 = x32 * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return x32.astype(x.dtype)


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


# The keys of what is before the layers, and of what is behind them.
EndsKeys = tuple[jax.Array, jax.Array]


class Embedding(nnx.Module):
    """A matrix with a row for each id: rows of ids, and of hidden states their products with all rows."""

    def __init__(self, size: int, width: int, dtype: np.dtype, key: jax.Array) -> None:
        self.embedding = nnx.Param(normal(key, (size, width), dtype))

    def __call__(self, ids_t: jax.Array) -> jax.Array:
        """`[T]` to `[T, width]`."""
        return self.embedding[...][ids_t]

    def logits(self, hidden_re: jax.Array) -> jax.Array:
        """`[R, width]` to float32 `[R, size]`."""
        return dot(hidden_re, self.embedding[...], 1)


class Ends(nnx.Module):
    """What is around the layers: the embedding before them and the output matrix behind them, which may be one.

    Each family has its own, which adds what else it has there.
    """

    def __init__(self, config: ModelConfig, width: int, dtype: np.dtype, keys: EndsKeys) -> None:
        self.embed = Embedding(config.vocab_size, width, dtype, keys[0])
        is_tied = config.tie_word_embeddings
        self.lm_head = None if is_tied else Embedding(config.vocab_size, width, dtype, keys[1])

    @abc.abstractmethod
    def begin(self, tokens: TokenBatch) -> tuple[jax.Array, Any]:
        """The hidden states `[T, E]` before the first layer, and what all layers share: a tree of arrays."""

    @abc.abstractmethod
    def finish(self, x_te: jax.Array) -> jax.Array:
        """The last layer's hidden states after the final norm."""

    def logits(self, hidden_re: jax.Array) -> jax.Array:
        """Hidden states `[R, E]` to float32 logits `[R, V]`."""
        return (self.lm_head or self.embed).logits(hidden_re)


def normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Random parameters with a standard deviation of 0.02."""
    return (jax.random.normal(key, shape) * _INIT_STD).astype(dtype)
