"""Attention over parts of contexts, merged: rows that share a prefix, and rows that see the first tokens and a window.

The blocks of a shared prefix are read once for all of its rows:

    row 0   p p p p p p | a a . .        prefixes   one row of 5 queries (a b c c c) over p, all of which they see
    row 1   p p p p p p | b . . .        rows       each over its own part, which begins after p
    row 2   p p p p p p | c c c .
    row 3   d d d . . . . . . . .        a prefix of no tokens; it sees its context from the beginning

The two outputs of a query are merged by the logarithms of their sums of exponentials (lse):

    lse = log(e^lse_a + e^lse_b)         o = o_a e^(lse_a - lse) + o_b e^(lse_b - lse)

This is the method of Hydragen (Juravsky et al., 2024) and cascade inference (Ye et al., 2024). If a backend takes
several lists of rows in one launch, as the GPU kernels do, the two are one call, and a step in which no rows share a
prefix has no extra cost. Elsewhere they are two calls, and such a step costs one comparison per layer.

Sliding windows begin at different keys. Keys of the prefix that all queries of a run see are read once, as above. Each
row reads earlier keys by itself, from the beginning of the row's window to that of the last:

    row 0   . . E E p p | a          E  edges: seen by some of the run's queries
    row 1   . . . E p p | b b        p  prefixes: seen by all of them
    row 2   . . . . p p | c c c

Lossy attention sees only the first and the last tokens of a context (StreamingLLM):

    position    0 1 2 3 4 5 6 7 8 9        two first tokens, a window of three
    query 4     s . w w w
    query 9     s s . . . . . w w w        s  sinks: read in a separate pass           w  the window

A query at position p sees the keys from p - window + 1 to p, and the first tokens before them: k with k <= p - window.
The latter form a causal context of the first tokens alone, whose queries stand `window` positions earlier, so that
kernels need no change. The two passes are merged as in a cascade. Positions are those of the text. If no query is far
enough from the beginning, the second pass is skipped.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.config import Backend
from jpaged.errors import InternalError
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.paged_attention.api import implementation, paged_attention, paged_attention_update, prepare_rows
from jpaged.kernels.paged_attention.spec import (
    Attended,
    AttentionCall,
    AttentionSpec,
    ContextPart,
    NewKV,
    Queries,
    RaggedRows,
    Updated,
    merge,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Shaped


def attend_ahead(
    q_thd: Float[Array, "T H D"],
    k_tkd: Float[Array, "T K D"],
    v_tkd: Float[Array, "T K D"],
    images_t: Int[Array, "T"],
    image_tokens: int,
    kind: AttentionKind,
) -> Attended:
    """Return attention of the tokens of images over later tokens of the same image, in the same step.

    Merged with causal attention, the tokens of an image see each other. Blocks as long as an image attend to
    themselves and the next block.

    Args:
        images_t: number of each token's image; -1 for text.
        image_tokens: maximum tokens of an image.
    """
    num_tokens, num_heads, head_dim = q_thd.shape
    num_kv_heads, size = k_tkd.shape[1], min(image_tokens, num_tokens)
    num_blocks = -(-num_tokens // size)
    short = num_blocks * size - num_tokens

    def blocks(x: jax.Array, fill: float = 0.0) -> jax.Array:
        padded = jnp.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
        return padded.reshape(num_blocks, size, *x.shape[1:])

    def pairs(x: jax.Array, fill: float = 0.0) -> jax.Array:
        own = blocks(x, fill)
        following = jnp.concatenate([own[1:], jnp.full_like(own[:1], fill)])
        return jnp.concatenate([own, following], axis=1)

    q_nbkgd = blocks(q_thd).reshape(num_blocks, size, num_kv_heads, -1, head_dim)
    precision = jax.lax.Precision.HIGHEST if q_thd.dtype == jnp.float32 else None
    multiply = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = multiply("nbkgd,nskd->nkgbs", q_nbkgd, pairs(k_tkd.astype(q_thd.dtype))) * kind.scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    own_nb, seen_ns = blocks(images_t, -1), pairs(images_t, -1)
    is_later_bs = jnp.arange(2 * size) > jnp.arange(size)[:, None]
    is_seen_nbs = (own_nb[:, :, None] == seen_ns[:, None]) & (own_nb[:, :, None] >= 0) & is_later_bs
    scores = jnp.where(is_seen_nbs[:, None, None], scores, -jnp.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0.0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    shares = (weights / jnp.where(total > 0, total, 1)).astype(q_thd.dtype)
    o_nbkgd = multiply("nkgbs,nskd->nbkgd", shares, pairs(v_tkd.astype(q_thd.dtype)))
    lse_nkgb = (highest + jnp.log(total))[..., 0]
    o_thd = o_nbkgd.reshape(-1, num_heads, head_dim)[:num_tokens].astype(q_thd.dtype)
    lse_th = lse_nkgb.transpose(0, 3, 1, 2).reshape(-1, num_heads)[:num_tokens]
    return o_thd, lse_th


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StreamingRows:
    """The rows of a step, and the same rows over the first tokens of their contexts.

    Attributes:
        rows: over each row's window.
        sinks: over the first tokens before the windows; no rows if no query sees any.
    """

    rows: RaggedRows
    sinks: RaggedRows

    @classmethod
    def of(cls, rows: RaggedRows, spec: AttentionSpec) -> StreamingRows:
        """Build the rows over the first tokens, with each row's own block table.

        Args:
            rows: see their contexts from the beginning.
            spec: its kind has a window and sink tokens.
        """
        window, num_sinks = spec.kind.sliding_window or 0, spec.kind.num_sink_tokens
        ends_s = rows.positions + rows.query_starts_s1[1:] - rows.query_starts_s1[:-1]
        lens_s = jnp.clip(ends_s - window, 0, num_sinks)
        is_any = ((lens_s > 0) & (jnp.arange(lens_s.shape[0]) < rows.num_rows)).any()
        sinks = dataclasses.replace(
            rows,
            kv_lens_s=lens_s,
            num_rows=jnp.where(is_any, rows.num_rows, 0),
            first_positions_s=rows.positions - window,
            kv_begins_s=None,
            lists=None,
        )
        return cls(rows, sinks)

    @property
    def has_others(self) -> Bool[Array, ""]:
        """True if any query sees a first token that is not in its window."""
        return self.sinks.num_rows > 0

    def parts(self, spec: AttentionSpec) -> tuple[ContextPart, ...]:
        """Return the parts to attend to and merge: the windows first."""
        return ContextPart(self.rows, window_spec(spec)), ContextPart(self.sinks, sinks_spec(spec))


def window_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of the call over the windows."""
    return dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, num_sink_tokens=0))


def sinks_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of the call over the first tokens; a row's length limits how many it sees."""
    return dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, num_sink_tokens=0, sliding_window=None))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class CascadeRows:
    """The rows of a step, and rows for the prefixes that adjacent rows share.

    Attributes:
        rows: with `kv_begins_s`: the tokens that each row shares with its neighbors.
        prefixes: a row for each run of neighbors, over the shared tokens that all see; no rows if no prefix is shared.
        first_rows_s: the first row of each run, whose block table it uses.
        edges: the rows again, over the prefix tokens that only some queries of their run see; None without a window.
    """

    rows: RaggedRows
    prefixes: RaggedRows
    first_rows_s: Int[Array, "S"]
    edges: RaggedRows | None = None

    @classmethod
    def of(
        cls,
        rows: RaggedRows,
        run_starts_s1: Int[Array, "S+1"],
        num_runs: Int[Array, ""],
        spec: AttentionSpec,
    ) -> CascadeRows:
        """Build the prefixes from the first row of each run.

        Args:
            rows: `kv_begins_s` is a whole number of blocks, the same for all rows of a run, and at most the position of
                each one's first query. Up to there their block tables are equal.
            run_starts_s1: run g is the rows run_starts[g] to run_starts[g + 1]; the runs cover the rows in use.
            num_runs: 0 if no two rows share a prefix.
            spec: of the calls that they are for.
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
        if spec.kind.sliding_window is None:
            return cls(rows, prefixes, first_rows_s)
        places_s = jnp.arange(lens_s.shape[0])
        run_s = (run_starts_s1[None, 1:] <= places_s[:, None]).sum(axis=1)
        is_run_s = places_s < num_runs
        ends_s = rows.positions + rows.query_starts_s1[1:] - rows.query_starts_s1[:-1]
        last_ends_s = jnp.where(run_s[None, :] == places_s[:, None], ends_s[None, :], 0).max(axis=1)
        # Rounded up to whole blocks: a part of a context begins with a block.
        block_size = spec.layout.block_size
        begins_s = -(-jnp.maximum(last_ends_s - spec.kind.sliding_window, 0) // block_size) * block_size
        begins_s = jnp.where(is_run_s, jnp.minimum(begins_s, lens_s), 0)
        edges = dataclasses.replace(
            rows,
            kv_lens_s=begins_s[jnp.minimum(run_s, len(places_s) - 1)],
            num_rows=jnp.where(num_runs > 0, rows.num_rows, 0),
            first_positions_s=rows.positions,
            kv_begins_s=None,
            lists=None,
        )
        return cls(rows, dataclasses.replace(prefixes, kv_begins_s=begins_s), first_rows_s, edges)

    @property
    def has_others(self) -> Bool[Array, ""]:
        """True if any rows share a prefix."""
        return self.prefixes.num_rows > 0

    def parts(self, spec: AttentionSpec) -> tuple[ContextPart, ...]:
        """Return the parts to attend to and merge: the rows' own part first."""
        own = ContextPart(self.rows, spec)
        prefixes = ContextPart(self.prefixes, prefix_spec(spec), self.first_rows_s)
        return (own, prefixes) if self.edges is None else (own, prefixes, ContextPart(self.edges, spec))


def prefix_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of the call over the prefixes, without a window: all queries of a run see all of it."""
    return dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, sliding_window=None))


StepRows = RaggedRows | CascadeRows | StreamingRows
"""The rows of a step, whole or in parts."""


def prepare_step_rows(
    rows: RaggedRows,
    slots_t: Int[Array, "T"],
    runs: tuple[Int[Array, "S+1"], Int[Array, ""]] | None,
    spec: AttentionSpec,
    queries: Queries,
    *,
    backend: Backend,
) -> StepRows:
    """Return the rows of a step, split into the parts of attention, each prepared by `prepare_rows`.

    Args:
        runs: of rows that read a prefix together, as `CascadeRows.of` takes them; None for a kind with sink tokens.
    """

    def prepare(part: RaggedRows, slots_t: jax.Array | None, spec: AttentionSpec) -> RaggedRows:
        return prepare_rows(part, slots_t, spec, queries, backend=backend)

    if spec.kind.num_sink_tokens:
        if runs is not None:
            raise InternalError("rows with sink tokens cannot share a prefix")
        streaming = StreamingRows.of(rows, spec)
        own, sinks = streaming.parts(spec)
        return StreamingRows(prepare(own.rows, slots_t, own.spec), prepare(sinks.rows, None, sinks.spec))
    if runs is None:
        return prepare(rows, slots_t, spec)
    cascade = CascadeRows.of(rows, *runs, spec)
    return dataclasses.replace(
        cascade,
        rows=prepare(rows, slots_t, spec),
        prefixes=prepare(cascade.prefixes, None, prefix_spec(spec)),
        edges=cascade.edges and prepare(cascade.edges, None, spec),
    )


def cascade_attention_update(
    q_thd: Float[Array, "T H D"],
    new_kv: NewKV,
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    cascade: CascadeRows | StreamingRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> Updated:
    """Run `paged_attention_update` of `cascade.rows` over all parts of their contexts, reading each shared prefix once.

    Donate the pool: it is updated in place.

    The keys of the step are stored with the rows' own part, which runs first. The prefixes' keys are older, but sink
    tokens may be among the new ones. In this order the pool is an input of the condition and no output, which XLA would
    have to copy.

    Returns:
        the results of `paged_attention_update`, up to rounding: a part that is a separate call is rounded to the
            queries' type; the sum is in float32.

    Raises:
        Unsupported, InternalError: as `paged_attention_update`.
    """
    parts = cascade.parts(spec)
    spec = parts[0].spec
    call = AttentionCall(q_thd, pool, layer, cascade.rows, spec, scales_lk2)
    if (attend_parts := implementation(backend, spec, call.queries).attend_parts) is not None:
        pool = spec.layout.write(pool, layer, *call.scaled(new_kv))
        return *attend_parts(dataclasses.replace(call, pool=pool), parts), pool

    o_thd, lse_th, pool = paged_attention_update(
        q_thd, new_kv, pool, layer, cascade.rows, spec, scales_lk2, backend=backend
    )
    # Whole rows go through the condition: XLA for TPUs would transpose [T, H, D] for it, and back. The barrier keeps
    # XLA from moving the queries' reshape into the branch.
    shape, (q_tw, own_tw) = o_thd.shape, (x_thd.reshape(x_thd.shape[0], -1) for x_thd in (q_thd, o_thd))
    q_tw = jax.lax.optimization_barrier(q_tw)

    def with_others() -> Attended:
        found = own_tw.reshape(shape), lse_th
        for part in parts[1:]:
            q = q_tw.reshape(q_thd.shape)
            found = merge(paged_attention(q, pool, layer, part.rows, part.spec, scales_lk2, backend=backend), found)
        return found[0].reshape(own_tw.shape), found[1]

    o_tw, lse_th = jax.lax.cond(cascade.has_others, with_others, lambda: (own_tw, lse_th))
    return o_tw.reshape(shape), lse_th, pool
