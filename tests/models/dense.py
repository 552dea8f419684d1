"""Dense causal attention over one sequence: the plainest thing that a model can be run with."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode, LayerPlace
from jpaged.models.tokens import TokenBatch


def attend(
    q_thd: jax.Array,
    k_tkd: jax.Array,
    v_tkd: jax.Array | None,
    carry: tuple,
    place: LayerPlace,
    sinks_h: jax.Array | None = None,
    images_t: jax.Array | None = None,
):
    """Every token sees itself and those before it, as far as the layer's window goes, and sinks; nothing is kept.

    Tokens with the same number of an image, from 0, see each other, also later ones.

    Keys without values are seen as values, too: what begins with them comes out at the beginning.
    """
    v_tkd = k_tkd if v_tkd is None else v_tkd
    kind, (queries, keys) = place.attention, jnp.indices((len(q_thd), len(k_tkd)))
    is_near = queries - keys < (kind.sliding_window or len(k_tkd))
    is_seen = keys <= queries
    if images_t is not None:
        is_seen |= (images_t[:, None] == images_t) & (images_t >= 0)
    is_seen &= is_near | (keys < kind.num_sink_tokens)
    group = q_thd.shape[1] // k_tkd.shape[1]
    k_thd, v_thd = jnp.repeat(k_tkd, group, axis=1), jnp.repeat(v_tkd, group, axis=1)
    scores = jnp.einsum("thd,shd->hts", q_thd, k_thd, preferred_element_type=jnp.float32) * kind.scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    scores = jnp.where(is_seen, scores, -jnp.inf)
    if sinks_h is not None:
        sinks_ht1 = jnp.broadcast_to(sinks_h[:, None, None].astype(jnp.float32), (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sinks_ht1], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(k_tkd)]
    return jnp.einsum("hts,shd->thd", weights, v_thd.astype(jnp.float32)).astype(q_thd.dtype), carry


@functools.partial(jax.jit, static_argnames=("model", "layer_mode"))
def logits(model: Model, params: Params, token_ids_t: jax.Array, prompt_len: jax.Array, layer_mode: LayerMode = "loop"):
    """Float32 logits `[T, V]` after every token, of which the first `prompt_len` are the prompt."""
    positions_t = jnp.arange(token_ids_t.shape[0], dtype=jnp.int32)
    rope_lens_t = jnp.maximum(positions_t + 1, prompt_len)
    hidden_te, _ = model.run(params, TokenBatch(token_ids_t, positions_t, rope_lens_t), attend, (), layer_mode)
    return model.logits(params, hidden_te)


def greedy(model: Model, params: Params, prompt: list[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` tokens, each from a full recomputation at one padded shape."""
    token_ids = np.zeros(len(prompt) + num_tokens, np.int32)
    token_ids[: len(prompt)] = prompt
    for length in range(len(prompt), len(token_ids)):
        token_ids[length] = int(jnp.argmax(logits(model, params, token_ids, len(prompt))[length - 1]))
    return token_ids[len(prompt) :].tolist()
