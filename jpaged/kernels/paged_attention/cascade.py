"""Attention of rows that begin with the same blocks: these are read once for all of them.

    row 0   p p p p p p | a a . .        prefixes   one row of 5 queries (a b c c c) over p, all of which they see
    row 1   p p p p p p | b . . .        rows       each over its own part: what it sees begins behind p
    row 2   p p p p p p | c c c .
    row 3   d d d . . . . . . . .        a prefix of no tokens; it sees its context from the beginning

The two outputs of a query are merged by the logarithms of their sums of exponentials (lse):

    lse = log(e^lse_a + e^lse_b)         o = o_a e^(lse_a - lse) + o_b e^(lse_b - lse)

This is what Hydragen (Juravsky et al., 2024) and cascade inference (Ye et al., 2024) do, in two calls of whichever
backend runs. A step in which no rows share a prefix pays for one comparison a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.config import Backend
from jpaged.kernels.paged_attention.api import paged_attention, paged_attention_update
from jpaged.kernels.paged_attention.spec import Attended, AttentionSpec, NewKV, RaggedRows, Updated

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class CascadeRows:
    """The rows of a step, and those that stand for the prefixes that neighbours among them share.

    Attributes:
        rows: with `kv_begins_s`: the tokens that each row shares with its neighbours.
        prefixes: a row for each run of neighbours, over what they share; none where nobody shares anything.
    """

    rows: RaggedRows
    prefixes: RaggedRows

    @classmethod
    def of(cls, rows: RaggedRows, run_starts_s1: Int[Array, "S+1"], num_runs: Int[Array, ""]) -> CascadeRows:
        """Takes the prefixes from the first row of each run.

        Args:
            rows: `kv_begins_s` is a whole number of blocks, the same for all rows of a run, and at most the position
                of each one's first query; so far their block tables are alike.
            run_starts_s1: run g is the rows run_starts[g] to run_starts[g + 1]; the runs cover the rows in use.
            num_runs: 0 where no two rows share anything.
        """
        first_rows_s = jnp.minimum(run_starts_s1[:-1], rows.kv_lens_s.shape[0] - 1)
        lens_s = rows.begins[first_rows_s]
        prefixes = RaggedRows(
            query_starts_s1=rows.query_starts_s1[run_starts_s1],
            kv_lens_s=lens_s,
            block_tables_sm=rows.block_tables_sm[first_rows_s],
            num_rows=num_runs,
            first_positions_s=lens_s,
        )
        return cls(rows, prefixes)


def cascade_attention_update(
    q_thd: Float[Array, "T H D"],
    new_kv: NewKV,
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    cascade: CascadeRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> Updated:
    """`paged_attention_update` of `cascade.rows` from the beginning of their contexts, reading each shared prefix once.

    Donate the pool: it is updated in place. Not for a sliding window, which ends at another key for every query:
    nothing would be common to all.

    The keys of the step are stored with the rows' own part. The prefixes are older, so that they could be read before
    or after; after, the pool is an input of the condition and no output, which XLA would have to copy.

    Returns:
        what `paged_attention_update` returns, up to rounding: each part comes in the queries' type, the sum is in
        float32.

    Raises:
        Unsupported, InternalError: as `paged_attention_update` does.
    """
    o_thd, lse_th, pool = paged_attention_update(
        q_thd, new_kv, pool, layer, cascade.rows, spec, scales_lk2, backend=backend
    )
    own = o_thd, lse_th

    def with_prefixes() -> Attended:
        return merge(paged_attention(q_thd, pool, layer, cascade.prefixes, spec, scales_lk2, backend=backend), own)

    return *jax.lax.cond(cascade.prefixes.num_rows > 0, with_prefixes, lambda: own), pool


def merge(a: Attended, b: Attended) -> Attended:
    """Attention over two disjoint parts of each context -> over both; a part without keys has -inf and counts nothing.

    In float32; the output is of the parts' type.
    """
    (o_a_thd, lse_a_th), (o_b_thd, lse_b_th) = a, b
    highest_th = jnp.maximum(lse_a_th, lse_b_th)
    highest_th = jnp.where(jnp.isneginf(highest_th), 0.0, highest_th)
    weight_a_th, weight_b_th = jnp.exp(lse_a_th - highest_th), jnp.exp(lse_b_th - highest_th)
    total_th = weight_a_th + weight_b_th
    share_a_th, share_b_th = (
        weight_th / jnp.where(total_th > 0, total_th, 1) for weight_th in (weight_a_th, weight_b_th)
    )
    o_thd = share_a_th[..., None] * o_a_thd.astype(jnp.float32) + share_b_th[..., None] * o_b_thd.astype(jnp.float32)
    return o_thd.astype(o_a_thd.dtype), highest_th + jnp.log(total_th)
