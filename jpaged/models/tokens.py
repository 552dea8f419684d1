"""What packed tokens bring to a model."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a call, packed in one axis T.

    Attributes:
        ids_t: int32 `[T]`, all below vocab_size.
        positions_t: int32 `[T]`, the token's place in its sequence.
        rope_lens_t: int32 `[T]`, see `jpaged.models.rope.cos_sin`; learned positions do not depend on it.
        num_tokens: int32 scalar, how many are in use, the first ones; None is all. What the others become is undefined.
    """

    ids_t: jax.Array
    positions_t: jax.Array
    rope_lens_t: jax.Array
    num_tokens: jax.Array | None = None

    @property
    def num_in_use(self) -> jax.Array:
        """Tokens in use."""
        return jnp.int32(len(self.ids_t)) if self.num_tokens is None else self.num_tokens
