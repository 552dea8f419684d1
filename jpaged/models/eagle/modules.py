"""The modules of heads: the layer of EAGLE-3, and the modules around it and around MTP layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import InternalError
from jpaged.models.decoder import DecoderConfig
from jpaged.models.decoder.modules import MLP, Attention, DecoderEnds, Shared, make_norm
from jpaged.models.eagle.config import NUM_WATCHED, EagleConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.layers import (
    Attend,
    EndsKeys,
    Linear,
    Measured,
    Module,
    Param,
    RandomKeys,
    TokenEmbedding,
)
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import Rows, TokenBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class HeadShared(Shared):
    """Inputs of the layer in addition to states, including the tokens' embeddings."""

    embedded_te: jax.Array = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, shared: Shared, embedded_te: jax.Array) -> HeadShared:
        """Return the shared values of a decoder's layers, with embeddings."""
        return cls(shared.angles, shared.rows, shared.heads, shared.experts, embedded_te=embedded_te)


class EagleLayer(Module):
    """A Llama layer whose queries, keys and values are computed from embeddings and states, concatenated."""

    def __init__(self, config: EagleConfig, dtype: np.dtype, rngs: RandomKeys, kind: LayerKind) -> None:
        self.embedding_norm = make_norm(config, dtype)
        self.state_norm = make_norm(config, dtype)
        self.attention = Attention(config, dtype, rngs, num_inputs=2 * config.hidden_size)
        self.mlp_norm = make_norm(config, dtype)
        self.mlp = MLP(config, dtype, rngs)
        self.adds_to_norm = config.norm_before_residual

    def __call__(
        self, x: Measured, shared: HeadShared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[Measured, Any]:
        """Run the layer over packed tokens; attend, carry and place as in `Model.run`."""
        normed_te = self.state_norm(x.x_te)
        both_te = jnp.concatenate([self.embedding_norm(shared.embedded_te), normed_te], axis=-1)
        o_te, carry = self.attention.attend(both_te, None, shared, attend, carry, place)
        residual_te = normed_te if self.adds_to_norm else x.x_te
        x_te = self.attention.out(o_te, shared.rows, residual=residual_te)
        x_te = self.mlp(x_te, shared.rows, norm=self.mlp_norm, residual=x_te)
        return Measured.of(x_te, is_measured=False), carry


class EagleEnds(DecoderEnds):
    """The embeddings, the matrix that joins hidden states, a norm, and the output matrix of the proposed tokens."""

    def __init__(self, config: EagleConfig, dtype: np.dtype, keys: EndsKeys) -> None:
        super().__init__(config, dtype, keys)
        rngs = RandomKeys(jax.random.fold_in(keys[0], 2))
        self.lm_head = TokenEmbedding(config.draft_vocab_size, config.hidden_size, dtype, keys[1])
        self.fc = Linear(NUM_WATCHED * config.target_hidden_size, (config.hidden_size,), False, dtype, rngs)
        self.ids = Param(jnp.arange(config.draft_vocab_size, dtype=jnp.int32)) if config.has_ids else None
        if not config.has_embedding:
            del self.embed
        self.vocab_size = config.vocab_size

    def begin(self, tokens: TokenBatch) -> tuple[Measured, HeadShared]:
        """See `Ends`."""
        shared = HeadShared.of(self.shared(tokens), self.embed(tokens.ids_t))
        return Measured.of(_states(tokens), is_measured=False), shared

    def combine(self, features_tf: jax.Array, rows: Rows) -> jax.Array:
        """See `Ends`."""
        return self.fc(features_tf, rows)

    def logits(self, hidden_re: jax.Array, num_rows: jax.Array) -> jax.Array:
        """See `Ends`. Tokens that it does not propose have minus infinity."""
        logits_rd = super().logits(hidden_re, num_rows)
        if self.ids is None:
            return logits_rd
        none_rv = jnp.full((len(hidden_re), self.vocab_size), -jnp.inf, logits_rd.dtype)
        return none_rv.at[:, self.ids[...]].set(logits_rd)


class MtpEnds(DecoderEnds):
    """The norms and the projection before an MTP layer, a norm after it, and modules of the model.

    These are its embedding, output matrix and final norm, `target_norm`.
    """

    def __init__(self, config: DecoderConfig, dtype: np.dtype, keys: EndsKeys, *, state_first: bool) -> None:
        super().__init__(config, dtype, keys)
        rngs = RandomKeys(jax.random.fold_in(keys[0], 2))
        self.target_norm, self.token_norm, self.state_norm = (make_norm(config, dtype) for _ in range(3))
        self.eh_proj = Linear(2 * config.hidden_size, (config.hidden_size,), False, dtype, rngs)
        self.state_first = state_first

    def begin(self, tokens: TokenBatch) -> tuple[Measured, Shared]:
        """See `Ends`."""
        inputs = [self.token_norm(self.embed(tokens.ids_t)), self.state_norm(_states(tokens))]
        joined_td = jnp.concatenate(inputs[::-1] if self.state_first else inputs, axis=-1)
        return Measured.of(self.eh_proj(joined_td, tokens.rows), is_measured=False), self.shared(tokens)

    def combine(self, features_tf: jax.Array, rows: Rows) -> jax.Array:
        """See `Ends`."""
        return self.target_norm(features_tf)

    def own_states(self, hidden_te: jax.Array) -> jax.Array:
        """See `Ends`. The states are normalized, as those of the model are."""
        return self.normed(hidden_te)


def _states(tokens: TokenBatch) -> jax.Array:
    if tokens.states_te is None:
        raise InternalError("a head requires hidden states")
    return tokens.states_te
