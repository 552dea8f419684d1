"""Attention over packed rows for training, with a gradient made of fast products.

Scores lie with the keys before the queries. So no product, forward or backward, contracts the leading axes of both its
arrays, which is slow on CPUs, and all that must be transposed is as narrow as a head:

    S = K Q'          O' = V' P         with P the softmax of S over the keys
    dV = P dO         dP = V dO'        dS = P (dP - sum(dO O))
    dK = dS Q         dQ' = K' dS

Queries are taken in blocks, and a block leaves out the keys that come after it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.models.layers import accumulate, transposed
from jpaged.models.stack import LayerPlace

_BLOCK_LEN = 128

# The inputs, the output, and the probabilities of every block.
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, list[jax.Array]]


def attend(
    mask_bst: jax.Array, q_thd: jax.Array, k_tkd: jax.Array, v_tkd: jax.Array, carry: Any, place: LayerPlace
) -> tuple[jax.Array, Any]:
    """Attention as `Model.run` takes it, once the mask is bound.

    Args:
        mask_bst: whether key s of row b is seen by query t; never where s comes after t.
        q_thd: queries of all rows, one row after the other.
        k_tkd: keys, likewise.
        v_tkd: values, likewise.
        carry: handed through.
        place: not used: the demo's layers are all alike.
    """
    num_rows, row_len, _ = mask_bst.shape
    num_heads, head_dim = q_thd.shape[1:]
    num_shares = num_heads // k_tkd.shape[1]

    def by_head(x_thd: jax.Array) -> jax.Array:
        x = x_thd.reshape(num_rows, row_len, num_heads, head_dim).transpose(0, 2, 1, 3)
        return x.reshape(num_rows * num_heads, row_len, head_dim)

    o = _attend(mask_bst, by_head(q_thd), *(by_head(jnp.repeat(x, num_shares, axis=1)) for x in (k_tkd, v_tkd)))
    o = o.reshape(num_rows, num_heads, row_len, head_dim)
    return o.transpose(0, 2, 1, 3).reshape(q_thd.shape), carry


@jax.custom_vjp
def _attend(mask_bst: jax.Array, q_ntd: jax.Array, k_nsd: jax.Array, v_nsd: jax.Array) -> jax.Array:
    return _forward(mask_bst, q_ntd, k_nsd, v_nsd)[0]


def _forward(mask_bst: jax.Array, q_ntd: jax.Array, k_nsd: jax.Array, v_nsd: jax.Array) -> tuple[jax.Array, _Saved]:
    outputs, probs = [], []
    for start, end in _blocks(mask_bst.shape[-1]):
        scores = _product(k_nsd[:, :end], q_ntd[:, start:end], 2, 2) / math.sqrt(q_ntd.shape[-1])
        by_row = scores.reshape(mask_bst.shape[0], -1, *scores.shape[1:])
        by_row = jnp.where(mask_bst[:, None, :end, start:end], by_row, -1e30)
        probs.append(jax.nn.softmax(by_row.reshape(scores.shape), axis=1).astype(q_ntd.dtype))
        outputs.append(transposed(_product(transposed(v_nsd[:, :end]), probs[-1], 2, 1)))
    o_ntd = jnp.concatenate(outputs, axis=1).astype(q_ntd.dtype)
    return o_ntd, (q_ntd, k_nsd, v_nsd, o_ntd, probs)


def _backward(saved: _Saved, do_ntd: jax.Array) -> tuple[None, jax.Array, jax.Array, jax.Array]:
    q_ntd, k_nsd, v_nsd, o_ntd, probs = saved
    delta_nt = (do_ntd.astype(jnp.float32) * o_ntd.astype(jnp.float32)).sum(axis=-1)
    parts = []
    for (start, end), probs_nst in zip(_blocks(q_ntd.shape[1]), probs, strict=True):
        q, k, v, do = q_ntd[:, start:end], k_nsd[:, :end], v_nsd[:, :end], do_ntd[:, start:end]
        d_scores = _product(v, do, 2, 2) - delta_nt[:, None, start:end]
        d_scores = (d_scores * probs_nst.astype(jnp.float32) / math.sqrt(q.shape[-1])).astype(q.dtype)
        dq = transposed(_product(transposed(k), d_scores, 2, 1))
        parts.append((dq, _product(d_scores, q, 2, 1), _product(probs_nst, do, 2, 1)))
    dqs, dks, dvs = zip(*parts, strict=True)
    dq, dk, dv = jnp.concatenate(dqs, axis=1), _sum_by_key(dks), _sum_by_key(dvs)
    return None, dq.astype(q_ntd.dtype), dk.astype(k_nsd.dtype), dv.astype(v_nsd.dtype)


def _blocks(row_len: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK_LEN, row_len)) for start in range(0, row_len, _BLOCK_LEN)]


def _sum_by_key(parts: tuple[jax.Array, ...]) -> jax.Array:
    """Sums arrays of which each has the keys of the one before, and more."""
    ends = [0, *(part.shape[1] for part in parts)]
    sums = [
        sum((part[:, start:end] for part in parts[index + 1 :]), parts[index][:, start:end])
        for index, (start, end) in enumerate(itertools.pairwise(ends))
    ]
    return jnp.concatenate(sums, axis=1)


def _product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    return accumulate(a, b, ((a_axis,), (b_axis,)), ((0,), (0,)))


_attend.defvjp(_forward, _backward)
