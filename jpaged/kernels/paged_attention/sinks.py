"""Attention sinks: a score of its own for each head, which takes its share of every query's weights and has no value.

With the sum of a query's exponentials at hand (lse) no kernel has to know of them, nor of which part of a context it is
asked about:

    weights with a sink     e^s_i / (e^sink + sum of e^s_j)  =  e^s_i / sum of e^s_j  x  1 / (1 + e^(sink - lse))

Sinks that are learned are those of gpt-oss (OpenAI, 2025); why models want one: Xiao et al., "Efficient Streaming
Language Models with Attention Sinks" (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import Attended

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def add_sinks(attended: Attended, sinks_h: Float[Array, "H"]) -> Attended:
    """Attention without sinks -> with them: over whole contexts, where parts of them are merged behind the merge.

    Args:
        attended: what attention gave.
        sinks_h: the score of each head's sink, as scores are: scaled, and not capped.

    Returns:
        outputs and log-sum-exp with the sinks; what saw no key keeps 0 and minus infinity.
    """
    o_thd, lse_th = attended
    sinks_h = sinks_h.astype(jnp.float32)
    share_th = jax.nn.sigmoid(lse_th - sinks_h)
    with_sinks_th = jnp.where(jnp.isneginf(lse_th), lse_th, jnp.logaddexp(lse_th, sinks_h))
    return (o_thd.astype(jnp.float32) * share_th[..., None]).astype(o_thd.dtype), with_sinks_th
