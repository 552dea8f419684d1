"""The modules of the OPT family: one layer, and the modules around the layers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jpaged.models.families.opt.config import POSITION_OFFSET, OptConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.layers import (
    Attend,
    Ends,
    EndsKeys,
    LayerNorm,
    Linear,
    Module,
    QKVLinear,
    RandomKeys,
    TokenEmbedding,
    activate,
)
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import Rows, TokenBatch

_NORM_EPS = 1e-5


class OptAttention(Module):
    """Projections around an injected attention."""

    def __init__(self, config: OptConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.qkv = QKVLinear(config, config.use_bias, dtype, rngs)
        self.out = Linear(config.hidden_size, (config.hidden_size,), config.use_bias, dtype, rngs)


class OptMLP(Module):
    """down(activation(up(x)))."""

    def __init__(self, config: OptConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.up = Linear(config.hidden_size, (config.intermediate_size,), config.use_bias, dtype, rngs)
        self.down = Linear(config.intermediate_size, (config.hidden_size,), config.use_bias, dtype, rngs)
        self.activation = config.activation

    def __call__(
        self, x_te: jax.Array, rows: Rows, *, norm: LayerNorm | None, norm_after: LayerNorm | None
    ) -> jax.Array:
        """Map `[T, E]` to `[T, E]`, with the residual sum."""
        inner_tf = activate(self.up(x_te, rows, norm=norm), self.activation)
        return self.down(inner_tf, rows, residual=x_te, norm_after=norm_after)


class OptLayer(Module):
    """Attention and feed-forward, each with a residual sum and a norm.

    norm_first      x + f(norm(x))       all sizes but one
    otherwise       norm(x + f(x))       350M
    """

    def __init__(self, config: OptConfig, dtype: np.dtype, rngs: RandomKeys, kind: LayerKind) -> None:
        self.attention_norm = LayerNorm(config.hidden_size, _NORM_EPS, config.norm_affine, dtype)
        self.attention = OptAttention(config, dtype, rngs)
        self.mlp_norm = LayerNorm(config.hidden_size, _NORM_EPS, config.norm_affine, dtype)
        self.mlp = OptMLP(config, dtype, rngs)
        self.norm_first = config.norm_first

    def __call__(
        self, x_te: jax.Array, rows: Rows, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """Run one layer over packed tokens; attend, carry and place as in `Model.run`."""
        attention_norm, mlp_norm = self.attention_norm, self.mlp_norm
        before = (attention_norm, mlp_norm) if self.norm_first else (None, None)
        after = (None, None) if self.norm_first else (attention_norm, mlp_norm)
        o_thd, carry = attend(*self.attention.qkv.project(x_te, rows, before[0]), carry, place)
        o_te = o_thd.astype(x_te.dtype).reshape(x_te.shape[0], -1)
        x_te = self.attention.out(o_te, rows, residual=x_te, norm_after=after[0])
        return self.mlp(x_te, rows, norm=before[1], norm_after=after[1]), carry


class OptEnds(Ends):
    """The embeddings of tokens and positions, an optional final norm, and the output matrix.

    If the embedding is narrower than the layers, projections connect the two.
    """

    def __init__(self, config: OptConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        (embed_key, position_key, in_key), (out_key, head_key) = (
            jax.random.split(key, num) for key, num in zip(keys, (3, 2), strict=True)
        )
        width, embed_size = config.hidden_size, config.embed_size
        super().__init__(config, embed_size, dtype, (embed_key, head_key))
        num_positions = config.max_position_embeddings + POSITION_OFFSET
        self.positions = TokenEmbedding(num_positions, width, dtype, position_key)
        is_narrow = embed_size != width
        self.project_in = Linear(embed_size, (width,), False, dtype, RandomKeys(in_key)) if is_narrow else None
        self.project_out = Linear(width, (embed_size,), False, dtype, RandomKeys(out_key)) if is_narrow else None
        self.norm = LayerNorm(width, _NORM_EPS, config.norm_affine, dtype) if config.final_norm else None

    def begin(self, tokens: TokenBatch) -> tuple[jax.Array, Rows]:
        """See `Ends`. Layers share the rows."""
        x_te, rows = self.embed_inputs(tokens), tokens.rows
        if self.project_in is not None:
            x_te = self.project_in(x_te, rows)
        return x_te + self.positions(tokens.positions_t + POSITION_OFFSET), rows

    @property
    def final_norm(self) -> LayerNorm | None:
        """See `Ends`."""
        return self.norm

    def logits(self, hidden_re: jax.Array, num_rows: jax.Array) -> jax.Array:
        """See `Ends`."""
        if self.project_out is None:
            return super().logits(hidden_re, num_rows)
        narrow_re = self.project_out(hidden_re, Rows(num_rows), norm=self.norm)
        return (self.lm_head or self.embed).logits(narrow_re, num_rows, None)
