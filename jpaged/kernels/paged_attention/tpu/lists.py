"""What the TPU kernels' calls know of a step's rows: which queries meet which keys, the same in all layers.

A few hundred integers, made by XLA once a step (`prepare`), ahead of the loop over the layers. Made in the loop they
were 23 operations of each layer, and a TPU starts none in less than a microsecond.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows
from jpaged.kernels.paged_attention.tpu import tables

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

    from jpaged.kernels.paged_attention.tpu.chunks.plan import Plan as ChunkPlan
    from jpaged.kernels.paged_attention.tpu.chunks.plan import Segments as ChunkSegments
    from jpaged.kernels.paged_attention.tpu.decode.plan import Plan as DecodePlan
    from jpaged.kernels.paged_attention.tpu.decode.plan import Tiles


class CallLists(NamedTuple):
    """What one of the two calls needs.

    Attributes:
        segments: its work, as its kernel takes it.
        num_segments: [1].
        is_ours_t: whether a token is in any of its rows.
    """

    segments: Any
    num_segments: Int[Array, "1"]
    is_ours_t: Bool[Array, "T"]


class StepLists(NamedTuple):
    """What the calls of a step need, and those of a part of its contexts.

    Attributes:
        decodes: rows of one query.
        chunks: rows of more; None in a step of one token.
        cores: which rows of one query are each core's: first of them, and one behind the last of all.
        starts: first token of each core's, and how many there are.
        tiles: of tokens, that the call for rows of one query has.
        tables: block tables of whole pages.
        writes: (slots [T], whether B tokens from here on fill a block [T]); empty where nothing is stored.
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

    XLA would make cheap lists again in every layer: it may not, behind the barrier.
    """
    return dataclasses.replace(rows, lists=jax.lax.optimization_barrier(step_lists(rows, slots_t, spec, queries)))


def step_lists(rows: RaggedRows, slots_t: Int[Array, "T"] | None, spec: AttentionSpec, queries: Queries) -> StepLists:
    """All lists; those of writes where the step's tokens have slots."""
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
    """The static side of the call for rows of several queries."""
    from jpaged.kernels.paged_attention.tpu.chunks.plan import plan_for

    return plan_for(spec, queries, device_kind(), num_cores())


def decode_plan_for(spec: AttentionSpec, queries: Queries, *, has_writes: bool) -> DecodePlan:
    """The static side of the call for rows of one query."""
    from jpaged.kernels.paged_attention.tpu.decode.plan import plan_for

    queries = dataclasses.replace(queries, num_tokens=queries.num_tokens + num_padding(spec, queries))
    return plan_for(spec, queries, device_kind(), has_writes=has_writes, num_cores=num_cores())


def num_padding(spec: AttentionSpec, queries: Queries) -> int:
    """Tokens that a step has to have besides its own, so that they are whole tiles."""
    return -queries.num_tokens % chunk_plan_for(spec, queries).tile if queries.num_tokens > 1 else 0


def device_kind() -> str:
    """The kind of the device that is compiled for, if the mesh says so, or else of those that are here."""
    return str(_device().device_kind)


def num_cores() -> int:
    """The cores of that device: two of a v5p or v4 whose chip is one device."""
    device = _device()
    return (device.num_cores or 1) if device.platform == "tpu" else 1


def _device() -> Any:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0] if device is None else device


def _decode_lists(
    rows: RaggedRows, spec: AttentionSpec, queries: Queries
) -> tuple[CallLists, Int[Array, "n"], Int[Array, "cores+1"]]:
    """The lists of rows of one query, their tokens, and how the cores share them."""
    from jpaged.kernels.paged_attention.tpu.decode.plan import Segments as DecodeSegments

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
    """Where each core's segments begin, and the last one's end: as near to equal shares of the items as they are cut.

    Args:
        items_n1: of all segments before each, and of all.
        num_cores: that share them.
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
    """Where each core's tokens begin, and its tiles that have a token which is in no chunk of a prompt, in order."""
    from jpaged.kernels.paged_attention.tpu.decode.plan import Tiles

    places = plan.sizes.places
    num_tokens, inner_c = len(is_other_t), cores[1:-1]
    inner_t = jnp.where(inner_c < num_segments, token_n.at[inner_c].get(mode="clip"), num_tokens)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), inner_t.astype(jnp.int32), jnp.full(1, num_tokens, jnp.int32)])
    i = jnp.arange(num_tokens // places, dtype=jnp.int32)
    is_in_ci = is_other_t.reshape(-1, places).any(axis=1)
    is_in_ci = is_in_ci & (i * places < starts[1:, None]) & ((i + 1) * places > starts[:-1, None])
    rank_ci = jnp.cumsum(is_in_ci, axis=1, dtype=jnp.int32)
    # The tile behind the last stands for steps that are not: all segments are before it.
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
    """The tiles that each of our rows has a part of, row by row, and how many they are."""
    from jpaged.kernels.paged_attention.tpu.chunks.plan import Segments as ChunkSegments

    spec, tile = plan.spec, plan.tile
    starts_s, ends_s = rows.query_starts_s1[:-1], rows.query_starts_s1[1:]
    num_rows, num_tiles = starts_s.shape[0], -(-num_tokens // tile)
    nums_s = jnp.where(is_ours_s, (ends_s - 1) // tile - starts_s // tile + 1, 0)
    lasts_s = jnp.cumsum(nums_s)
    # A row of several queries shares a tile with others at its two ends only.
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
    """Whether each token is in any of our rows."""
    t_t1 = jnp.arange(num_tokens)[:, None]
    is_in_ts = (t_t1 >= rows.query_starts_s1[:-1]) & (t_t1 < rows.query_starts_s1[1:]) & is_ours_s
    return is_in_ts.any(axis=1)


def _starts_whole_block(slots_t: Int[Array, "T"], block_size: int) -> Int[Array, "T"]:
    """1 where this token and those behind it fill a block in order: they are stored at once."""
    num_tokens = slots_t.shape[0]
    if num_tokens < block_size:
        return jnp.zeros_like(slots_t)
    is_break_t = jnp.concatenate([jnp.zeros(1, jnp.int32), (slots_t[1:] != slots_t[:-1] + 1).astype(jnp.int32)])
    breaks_t = jnp.cumsum(is_break_t)
    last_t = jnp.minimum(jnp.arange(num_tokens) + block_size - 1, num_tokens - 1)
    has_room_t = jnp.arange(num_tokens) + block_size <= num_tokens
    is_whole_t = (slots_t % block_size == 0) & has_room_t & (breaks_t[last_t] == breaks_t)
    return is_whole_t.astype(jnp.int32)
