"""Lists of a step's rows for the TPU kernels' calls: which queries meet which keys, the same in all layers.

They are a few hundred integers, computed by XLA once per step (`prepare`), before the loop over the layers. In the loop
they were 23 operations of each layer, and a TPU starts none in less than a microsecond.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

    from jpaged.kernels.paged_attention.tpu.chunks.plan import ChunkPlan, ChunkSegments
    from jpaged.kernels.paged_attention.tpu.decode.plan import DecodePlan, Tiles


class CallLists(NamedTuple):
    """Lists of one of the two calls.

    Attributes:
        segments: its work, as its kernel takes it.
        num_segments: [1].
        is_ours_t: whether a token is in any of the call's rows.
    """

    segments: Any
    num_segments: Int[Array, "1"]
    is_ours_t: Bool[Array, "T"]


class StepLists(NamedTuple):
    """Lists of the calls of a step, or of a part of the contexts.

    Attributes:
        decodes: rows of one query.
        chunks: rows of more; None in a step of one token.
        cores: the rows of one query of each core: its first, and the end of all.
        starts: first token of each core, and the number of tokens.
        tiles: of tokens, for the call of rows of one query.
        tables: block tables of whole pages.
        writes: (slots [T], whether B tokens from here on fill a block [T]); empty if nothing is stored.
    """

    decodes: CallLists
    chunks: CallLists | None
    cores: Int[Array, "cores+1"]
    starts: Int[Array, "cores+1"]
    tiles: Tiles
    tables: Int[Array, "S N"]
    writes: tuple[jax.Array, ...]


def prepare(rows: RaggedRows, slots_t: Int[Array, "T"] | None, spec: AttentionSpec, queries: Queries) -> RaggedRows:
    """See `jpaged.kernels.paged_attention.prepare_rows`.

    The barrier keeps XLA from recomputing cheap lists in every layer.
    """
    return dataclasses.replace(rows, lists=jax.lax.optimization_barrier(step_lists(rows, slots_t, spec, queries)))


def step_lists(rows: RaggedRows, slots_t: Int[Array, "T"] | None, spec: AttentionSpec, queries: Queries) -> StepLists:
    """Return all lists; those of writes only if the step's tokens have slots."""
    from jpaged.kernels.paged_attention.tpu import tables  # imports Pallas

    writes: tuple[jax.Array, ...] = ()
    if slots_t is not None:
        slots_t = slots_t.astype(jnp.int32)
        writes = slots_t, _starts_whole_block(slots_t, spec.layout.block_size)
    decodes, token_n, cores = _decode_lists(rows, spec, queries)
    chunks = _chunk_lists(rows, spec, queries) if queries.num_tokens > 1 else None
    plan = decode_plan_for(spec, queries, has_writes=False)
    is_other_t = jnp.ones_like(decodes.is_ours_t) if chunks is None else ~chunks.is_ours_t
    is_other_t = jnp.pad(is_other_t, (0, num_padding(spec, queries)))
    starts, tiles = _tiles(is_other_t, token_n, decodes.num_segments, cores, plan)
    return StepLists(
        decodes=decodes,
        chunks=chunks,
        cores=cores,
        starts=starts,
        tiles=tiles,
        tables=tables.whole_pages(rows.block_tables_sm, plan.paging, chunk_plan_for(spec, queries).paging),
        writes=writes,
    )


def chunk_plan_for(spec: AttentionSpec, queries: Queries) -> ChunkPlan:
    """Return the static part of the call for rows of several queries."""
    from jpaged.kernels.paged_attention.tpu.chunks.plan import plan_for

    return plan_for(spec, queries, device_kind(), num_cores())


def decode_plan_for(spec: AttentionSpec, queries: Queries, *, has_writes: bool) -> DecodePlan:
    """Return the static part of the call for rows of one query."""
    from jpaged.kernels.paged_attention.tpu.decode.plan import plan_for

    queries = dataclasses.replace(queries, num_tokens=queries.num_tokens + num_padding(spec, queries))
    return plan_for(spec, queries, device_kind(), has_writes=has_writes, num_cores=num_cores())


def num_padding(spec: AttentionSpec, queries: Queries) -> int:
    """Return the number of padding tokens that complete the last tile of a step."""
    return -queries.num_tokens % chunk_plan_for(spec, queries).tile if queries.num_tokens > 1 else 0


def device_kind() -> str:
    """Return the kind of the device that is compiled for, from the mesh, or else of the attached devices."""
    return str(_device().device_kind)


def num_cores() -> int:
    """Return the cores of that device: two for a v5p or v4 whose chip is one device."""
    device = _device()
    return (device.num_cores or 1) if device.platform == "tpu" else 1


def _device() -> Any:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0] if device is None else device


def _decode_lists(
    rows: RaggedRows, spec: AttentionSpec, queries: Queries
) -> tuple[CallLists, Int[Array, "n"], Int[Array, "cores+1"]]:
    """Return the lists of rows of one query, their tokens, and their split over cores."""
    from jpaged.kernels.paged_attention.tpu.decode.plan import DecodeSegments

    plan = decode_plan_for(spec, queries, has_writes=False)
    is_ours_s = _is_used(rows) & (_num_queries(rows) == 1)
    rank_s = jnp.cumsum(is_ours_s, dtype=jnp.int32)
    chunk_tokens, num_rows = plan.sizes.chunk_tokens, queries.num_rows
    n = jnp.arange(min(num_rows, queries.num_tokens), dtype=jnp.int32)
    row_n = jnp.minimum((n[:, None] >= rank_s[None, :]).sum(axis=1, dtype=jnp.int32), num_rows - 1)
    token_n, position_n = rows.query_starts_s1[row_n], rows.positions[row_n]
    begin_n = jnp.maximum(rows.begins[row_n], 0)
    if spec.kind.sliding_window is not None:
        begin_n = jnp.maximum(begin_n, position_n - spec.kind.sliding_window + 1)
    table_len = queries.table_width * spec.layout.block_size
    end_n = jnp.minimum(jnp.minimum(rows.kv_lens_s[row_n], position_n + 1), table_len)
    first_n = begin_n // chunk_tokens
    last_n = jnp.maximum(-(-end_n // chunk_tokens), first_n + 1)
    items_n1 = jnp.pad(jnp.cumsum(jnp.where(n < rank_s[-1], last_n - first_n, 0)), (1, 0)).astype(jnp.int32)
    cores = shares(items_n1, plan.num_cores)
    segments = DecodeSegments(
        row=row_n,
        place=token_n % plan.sizes.places,
        begin=begin_n,
        end=end_n,
        first=jnp.pad(first_n, (0, 1)),
        last=last_n,
        items=items_n1,
    )
    segments = DecodeSegments(*(field.astype(jnp.int32) for field in segments))
    return CallLists(segments, rank_s[-1:], _are_in(rows, is_ours_s, queries.num_tokens)), token_n, cores


def shares(items_n1: Int[Array, "n+1"], num_cores: int) -> Int[Array, "cores+1"]:
    """Return the first segment of each core, and the end of the last.

    Items are split as evenly as whole segments allow.

    Args:
        items_n1: number of items before each segment, and in total.
        num_cores: cores that share them.
    """
    target_c = items_n1[-1] * jnp.arange(num_cores + 1, dtype=jnp.int32) // num_cores
    after_c = (items_n1[None, :] < target_c[:, None]).sum(axis=1, dtype=jnp.int32)
    before_c = jnp.maximum(after_c - 1, 0)
    is_before_nearer_c = target_c - items_n1[before_c] < items_n1[after_c] - target_c
    return jnp.where(is_before_nearer_c, before_c, after_c)


def _tiles(
    is_other_t: Bool[Array, "T"],
    token_n: Int[Array, "n"],
    num_segments: Int[Array, "1"],
    cores: Int[Array, "cores+1"],
    plan: DecodePlan,
) -> tuple[Int[Array, "cores+1"], Tiles]:
    """Return each core's first token, and its tiles with a token that is in no chunk of a prompt, in order."""
    from jpaged.kernels.paged_attention.tpu.decode.plan import Tiles

    places = plan.sizes.places
    num_tokens, inner_c = len(is_other_t), cores[1:-1]
    inner_t = jnp.where(inner_c < num_segments, token_n.at[inner_c].get(mode="clip"), num_tokens)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), inner_t.astype(jnp.int32), jnp.full(1, num_tokens, jnp.int32)])
    i = jnp.arange(num_tokens // places, dtype=jnp.int32)
    is_in_ci = is_other_t.reshape(-1, places).any(axis=1)
    is_in_ci = is_in_ci & (i * places < starts[1:, None]) & ((i + 1) * places > starts[:-1, None])
    rank_ci = jnp.cumsum(is_in_ci, axis=1, dtype=jnp.int32)
    # The tile after the last stands for unused steps: all segments are before it.
    i1 = jnp.arange(len(i) + 1, dtype=jnp.int32)
    tile_ci = (i1[:, None] >= rank_ci[:, None, :]).sum(axis=2, dtype=jnp.int32)
    n = jnp.arange(len(token_n), dtype=jnp.int32)
    is_before_cin = (token_n // places < tile_ci[..., None]) & (n < num_segments)
    first_ci = jnp.clip(is_before_cin.sum(axis=2, dtype=jnp.int32), cores[:-1, None], cores[1:, None])
    tile_ci = jnp.minimum(tile_ci[:, :-1], jnp.where(is_in_ci, i, 0).max(axis=1, keepdims=True))
    return starts, Tiles(rank_ci[:, -1], tile_ci.reshape(-1), first_ci.reshape(-1))


def _chunk_lists(rows: RaggedRows, spec: AttentionSpec, queries: Queries) -> CallLists:
    is_ours_s = _is_used(rows) & (_num_queries(rows) > 1)
    is_ours_t = _are_in(rows, is_ours_s, queries.num_tokens)
    segments, num_segments = _tile_segments(rows, is_ours_s, queries.num_tokens, chunk_plan_for(spec, queries))
    return CallLists(segments, num_segments.astype(jnp.int32), is_ours_t)


def _num_queries(rows: RaggedRows) -> Int[Array, "S"]:
    return rows.query_starts_s1[1:] - rows.query_starts_s1[:-1]


def _is_used(rows: RaggedRows) -> Bool[Array, "S"]:
    return jnp.arange(rows.kv_lens_s.shape[0]) < rows.num_rows


def _tile_segments(
    rows: RaggedRows, is_ours_s: Bool[Array, "S"], num_tokens: int, plan: ChunkPlan
) -> tuple[ChunkSegments, Int[Array, "1"]]:
    """Return the tiles that each of these rows has a part of, row by row, and their number."""
    from jpaged.kernels.paged_attention.tpu.chunks.plan import ChunkSegments

    spec, tile = plan.spec, plan.tile
    starts_s, ends_s = rows.query_starts_s1[:-1], rows.query_starts_s1[1:]
    num_rows, num_tiles = starts_s.shape[0], -(-num_tokens // tile)
    nums_s = jnp.where(is_ours_s, (ends_s - 1) // tile - starts_s // tile + 1, 0)
    lasts_s = jnp.cumsum(nums_s)
    # A row of several queries shares a tile with others only at its two ends.
    most = num_tiles + min(num_rows, num_tokens // 2)
    i_n = jnp.arange(most, dtype=jnp.int32)
    row_n = jnp.minimum((i_n[:, None] >= lasts_s[None, :]).sum(axis=1, dtype=jnp.int32), num_rows - 1)
    start_n, end_n = starts_s[row_n], ends_s[row_n]
    tile_n = jnp.clip(start_n // tile + i_n - (lasts_s - nums_s)[row_n], 0, num_tiles - 1)
    lo_n = jnp.maximum(start_n - tile_n * tile, 0)
    hi_n = jnp.minimum(end_n - tile_n * tile, tile)
    position_n = rows.positions[row_n] + tile_n * tile - start_n
    begin_n = jnp.maximum(rows.begins[row_n], 0)
    if spec.kind.sliding_window is not None:
        begin_n = jnp.maximum(begin_n, position_n + lo_n - spec.kind.sliding_window + 1)
    table_len = rows.block_tables_sm.shape[1] * spec.layout.block_size
    end_n = jnp.minimum(jnp.minimum(rows.kv_lens_s[row_n], position_n + hi_n), table_len)
    fields = (row_n, tile_n, lo_n, hi_n, position_n, begin_n, end_n)
    return ChunkSegments(*(field.astype(jnp.int32) for field in fields)), lasts_s[-1:]


def _are_in(rows: RaggedRows, is_ours_s: Bool[Array, "S"], num_tokens: int) -> Bool[Array, "T"]:
    """Return True for each token in any of these rows."""
    t_t1 = jnp.arange(num_tokens)[:, None]
    is_in_ts = (t_t1 >= rows.query_starts_s1[:-1]) & (t_t1 < rows.query_starts_s1[1:]) & is_ours_s
    return is_in_ts.any(axis=1)


def _starts_whole_block(slots_t: Int[Array, "T"], block_size: int) -> Int[Array, "T"]:
    """Return 1 for each token that begins B tokens that fill a block in order: they are stored at once."""
    num_tokens = slots_t.shape[0]
    if num_tokens < block_size:
        return jnp.zeros_like(slots_t)
    is_break_t = jnp.concatenate([jnp.zeros(1, jnp.int32), (slots_t[1:] != slots_t[:-1] + 1).astype(jnp.int32)])
    breaks_t = jnp.cumsum(is_break_t)
    last_t = jnp.minimum(jnp.arange(num_tokens) + block_size - 1, num_tokens - 1)
    has_room_t = jnp.arange(num_tokens) + block_size <= num_tokens
    is_whole_t = (slots_t % block_size == 0) & has_room_t & (breaks_t[last_t] == breaks_t)
    return is_whole_t.astype(jnp.int32)
