"""Attention sinks: a score for each head that takes a share of every query's attention weights and has no value.

With a query's log-sum-exp (lse) sinks can be added after the kernel, and after the merge of parts of a context:

    weights with a sink     e^s_i / (e^sink + sum of e^s_j)  =  e^s_i / sum of e^s_j  x  1 / (1 + e^(sink - lse))

Learned sinks are those of gpt-oss (OpenAI, 2025); for the reasons see Xiao et al., "Efficient Streaming Language Models
with Attention Sinks" (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import Attended

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def add_sinks(attended: Attended, sinks_h: Float[Array, "H"]) -> Attended:
    """Add sinks to attention over whole contexts; if contexts were attended in parts, after their merge.

    Args:
        attended: results of attention.
        sinks_h: the score of each head's sink: scaled, and not capped.

    Returns:
        outputs and log-sum-exp with the sinks; tokens that saw no key keep 0 and minus infinity.
    """
    o_thd, lse_th = attended
    sinks_h = sinks_h.astype(jnp.float32)
    share_th = jax.nn.sigmoid(lse_th - sinks_h)
    with_sinks_th = jnp.where(jnp.isneginf(lse_th), lse_th, jnp.logaddexp(lse_th, sinks_h))
    return (o_thd.astype(jnp.float32) * share_th[..., None]).astype(o_thd.dtype), with_sinks_th
