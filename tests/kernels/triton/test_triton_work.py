"""How the Triton kernels' work is cut: every query in one tile, every key in one part, and not too many parts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, RaggedRows
from jpaged.kernels.paged_attention.cascade import CascadeRows
from jpaged.kernels.paged_attention.spec import ContextPart
from jpaged.kernels.paged_attention.triton.work import AttentionWork, Cut, MergeField, TritonItemField, choose_cut, plan

LAYOUT = KVLayout(1, 8, 16, 8, 128, jnp.dtype("bfloat16"), "gpu")
SPEC = AttentionSpec(LAYOUT, AttentionKind(1.0))
BFLOAT16 = jnp.dtype("bfloat16")


def decodes(lens: list[int], num_rows: int, table_width: int) -> RaggedRows:
    kv_lens = np.zeros(num_rows, np.int32)
    kv_lens[: len(lens)] = lens
    starts = np.minimum(np.arange(num_rows + 1), len(lens)).astype(np.int32)
    tables = jnp.zeros((num_rows, table_width), jnp.int32)
    return RaggedRows(jnp.array(starts), jnp.array(kv_lens), tables, jnp.int32(len(lens)))


def planned(parts: Sequence[ContextPart], cut: Cut, num_tokens: int) -> AttentionWork:
    """Plan in one program: outside of one, each operation is compiled by itself."""
    return jax.jit(lambda: plan(parts, cut, num_tokens))()


def used(work: AttentionWork) -> list[list[int]]:
    """The items in use."""
    return [item for item in np.asarray(work.items).tolist() if item[TritonItemField.NUM_TOKENS]]


def items_of(rows: RaggedRows, cut: Cut, num_tokens: int, spec: AttentionSpec = SPEC) -> list[list[int]]:
    """The items in use of a call without shared prefixes."""
    return used(planned([ContextPart(rows, spec)], cut, num_tokens))


class Draw:
    """Rows of random lengths, neighbours of which may share the beginnings of their contexts, and a cut for them."""

    num_rows, num_tokens, width = 6, 90, 8

    def __init__(self, seed: int, *, are_shared: bool) -> None:
        rng = np.random.default_rng(seed)
        self.window = [None, 40][seed % 2]
        self.spec = dataclasses.replace(SPEC, kind=AttentionKind(1.0, self.window))
        weights = np.ones(self.num_rows) / self.num_rows
        counts = rng.multinomial(int(rng.integers(0, self.num_tokens + 1)), weights) * (rng.random(6) < 0.8)
        self.used = int(rng.integers(0, self.num_rows + 1))
        self.starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.counts = counts
        before = rng.integers(0, 50, self.num_rows)
        runs = sorted(rng.choice(np.arange(self.used + 1), size=min(3, self.used + 1), replace=False).tolist())
        runs = sorted({0, *runs, self.used}) if are_shared else [0]
        begins = np.zeros(self.num_rows, np.int32)
        for first, end in itertools.pairwise(runs):
            begins[first:end] = 16 * int(rng.integers(0, 4))
        self.begins = begins
        self.kv_lens = np.minimum(counts + before + begins, self.width * 16).astype(np.int32)
        tables = jnp.zeros((self.num_rows, self.width), jnp.int32)
        rows = RaggedRows(jnp.array(self.starts), jnp.array(self.kv_lens), tables, jnp.int32(self.used))
        self.parts: tuple[ContextPart, ...] = (ContextPart(rows, self.spec),)
        if are_shared:
            run_starts = np.full(self.num_rows + 1, self.used, np.int32)
            run_starts[: len(runs)] = runs
            rows = dataclasses.replace(rows, kv_begins_s=jnp.asarray(begins))
            cascade = CascadeRows.of(rows, jnp.asarray(run_starts), jnp.int32(len(runs) - 1), self.spec)
            self.parts = cascade.parts(self.spec)
        shared = [part.table_rows_s is not None for part in self.parts]
        cut = choose_cut(self.spec, BFLOAT16, 56, (self.num_tokens, self.num_rows, self.width), shared)
        tiles = tuple(dataclasses.replace(tile, chunk_tokens=16) for tile in cut.tiles)
        num_parts = int(rng.integers(2, 60))
        self.cut = dataclasses.replace(cut, tiles=tiles, part_tokens=16, num_parts=num_parts, max_tokens=144)

    def row_of(self, token: int) -> int:
        return int(np.searchsorted(self.starts, token, "right")) - 1

    def seen(self, token: int) -> list[int]:
        """The keys that a token sees."""
        if token >= self.starts[self.used]:
            return []
        row = self.row_of(token)
        position = int(self.kv_lens[row] - self.counts[row] + token - self.starts[row])
        return list(range(max(0, position + 1 - (self.window or position + 1)), position + 1))


@pytest.mark.parametrize("are_shared", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.thinned(9)
def test_every_query_sees_each_of_its_keys_in_one_part(seed: int, are_shared: bool) -> None:
    draw = Draw(seed, are_shared=are_shared)
    seen: dict[int, list[int]] = {token: [] for token in range(draw.num_tokens)}
    read: dict[tuple[int, int], list[int]] = {}
    for item in used(planned(draw.parts, draw.cut, draw.num_tokens)):
        spec = draw.parts[item[TritonItemField.LIST]].spec
        first_key = item[TritonItemField.FIRST_KEY]
        assert first_key % 16 == 0
        keys = range(first_key, first_key + 16 * item[TritonItemField.NUM_CHUNKS])
        for i in range(item[TritonItemField.NUM_TOKENS]):
            token, position = item[TritonItemField.FIRST_TOKEN] + i, item[TritonItemField.POSITION] + i
            begin, end = item[TritonItemField.KV_BEGIN], min(item[TritonItemField.KV_END], position + 1)
            if spec.kind.sliding_window is not None:
                begin = max(begin, position + 1 - spec.kind.sliding_window)
            seen[token] += [key for key in keys if begin <= key < end]
            read.setdefault((token, item[TritonItemField.LIST]), []).extend(keys)
            if token < draw.starts[draw.used]:
                its_row = draw.row_of(token)
                assert item[TritonItemField.ROW] == its_row or (are_shared and item[TritonItemField.ROW] < its_row)
    for token, keys_of_token in seen.items():
        assert sorted(keys_of_token) == draw.seen(token)
    assert {token for token, place in read if place == 0} == set(range(draw.num_tokens))
    for found in read.values():
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("are_shared", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.thinned(5)
def test_results_that_are_merged_have_a_place_of_their_own_and_others_are_whole(seed: int, are_shared: bool) -> None:
    draw = Draw(seed, are_shared=are_shared)
    work = planned(draw.parts, draw.cut, draw.num_tokens)
    tiles, items = draw.cut.tiles, used(work)
    places: dict[tuple[int, int], list[int]] = {}
    num_results = dict.fromkeys(range(draw.num_tokens), 0)
    taken: list[int] = []
    for item in items:
        place, first_row = item[TritonItemField.LIST], item[TritonItemField.MERGED_ROW]
        if first_row >= 0:
            taken += range(first_row, first_row + tiles[place].rows)
        for i in range(item[TritonItemField.NUM_TOKENS]):
            num_results[token := item[TritonItemField.FIRST_TOKEN] + i] += 1
            if first_row >= 0:
                places.setdefault((place, token), []).append(first_row + i * tiles[place].group)
    assert len(set(taken)) == len(taken)
    assert max(taken, default=0) < draw.cut.merged_rows
    for place, fields_of_tokens in enumerate(np.asarray(work.merges).tolist()):
        for token, fields in enumerate(fields_of_tokens):
            count, row = fields[MergeField.NUM_PARTS], fields[MergeField.FIRST_ROW]
            assert places.get((place, token), []) == [row + i * tiles[place].rows for i in range(count)]
            if num_results[token] > 1 and token < draw.starts[draw.used]:
                assert sum(len(places.get((other, token), [])) for other in range(len(tiles))) == num_results[token]
    if len(items) > sum(draw.cut.nums_tiles):
        assert len(items) <= draw.cut.num_parts


@pytest.mark.long
def test_a_prefix_is_read_by_the_queries_of_all_its_rows_together() -> None:
    """In tiles of 32 rows, 8 queries of 4 heads, where rows that decode alone have tiles of 16."""
    rows = dataclasses.replace(decodes([1000, 1001, 997, 1050, 30], 64, 512), kv_begins_s=jnp.zeros(64, jnp.int32))
    rows = dataclasses.replace(rows, kv_begins_s=rows.begins.at[:4].set(960))
    starts = jnp.full(65, 5).at[:3].set(jnp.array([0, 4, 5]))
    cascade = CascadeRows.of(rows, starts, jnp.int32(2), SPEC)
    cut = choose_cut(SPEC, BFLOAT16, 32, (64, 64, 512), (False, True))
    assert [tile.rows for tile in cut.tiles] == [16, 32]
    work = planned(cascade.parts(SPEC), cut, 64)
    fields = (
        TritonItemField.LIST,
        TritonItemField.ROW,
        TritonItemField.NUM_TOKENS,
        TritonItemField.KV_BEGIN,
        TritonItemField.KV_END,
    )
    own = [[0, i, 1, 960, end] for i, end in enumerate((1000, 1001, 997, 1050))] + [[0, 4, 1, 0, 30]]
    items = [[item[field] for field in fields] for item in used(work)]
    assert items[:5] == own
    assert items[-4:] == [[1, 0, 4, 0, 960]] * 4
    assert np.asarray(work.merges)[:, :6, MergeField.NUM_PARTS].tolist() == [[1] * 4 + [0] * 2, [4] * 4 + [0] * 2]


@pytest.mark.long
def test_parts_follow_from_the_rows_that_are_there_and_not_from_the_bucket() -> None:
    cut = choose_cut(SPEC, BFLOAT16, 32, (64, 64, 512))
    assert cut.num_parts == 64
    assert len(items_of(decodes([8192], 64, 512), cut, 1)) == 32
    assert len(items_of(decodes([8192] * 4, 64, 512), cut, 4)) == 64
    assert len(items_of(decodes([8192] * 64, 64, 512), cut, 64)) == 64
    assert len(items_of(decodes([300] * 64, 64, 512), cut, 64)) == 64


@pytest.mark.long
def test_a_long_context_has_more_parts_than_a_short_one() -> None:
    cut = choose_cut(SPEC, BFLOAT16, 32, (64, 64, 512))
    items = items_of(decodes([8192, 256, 1000], 64, 512), cut, 3)
    assert [sum(item[TritonItemField.ROW] == row for item in items) for row in range(3)] == [32, 1, 4]


def test_short_contexts_are_not_divided() -> None:
    assert choose_cut(SPEC, BFLOAT16, 32, (1, 1, 256 // 16)).num_parts == 0
    window = dataclasses.replace(SPEC, kind=AttentionKind(1.0, sliding_window=128))
    assert choose_cut(window, BFLOAT16, 32, (1, 1, 4096)).num_parts == 0
    cut = choose_cut(SPEC, BFLOAT16, 32, (8, 8, 64))
    assert all(item[TritonItemField.MERGED_ROW] < 0 for item in items_of(decodes([256] * 8, 8, 64), cut, 8))


@pytest.mark.parametrize(
    ("sizes", "num_heads", "tile_rows"),
    [((64, 64, 8), 32, 16), ((512, 64, 8), 32, 64), ((8, 8, 8), 8 * 71, 128), ((64, 8, 8), 8, 64)],
)
def test_tiles_hold_the_heads_of_a_token_and_where_there_are_prompts_more_tokens(
    sizes: tuple[int, int, int], num_heads: int, tile_rows: int
) -> None:
    cut = choose_cut(SPEC, BFLOAT16, num_heads, sizes)
    ((tile,), (num_tiles,)) = cut.tiles, cut.nums_tiles
    assert (tile.rows, tile.num_tokens) == (tile_rows, tile_rows * 8 // num_heads)
    assert num_tiles <= sizes[0]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "chunk_tokens"),
    [(64, "bfloat16", 64), (128, "bfloat16", 64), (256, "bfloat16", 32), (128, "float32", 32), (128, "int8", 64)],
)
def test_chunks_are_no_larger_than_shared_memory_has_room_for(head_dim: int, dtype: str, chunk_tokens: int) -> None:
    layout = dataclasses.replace(LAYOUT, head_dim=head_dim, dtype=jnp.dtype(dtype))
    spec = dataclasses.replace(SPEC, layout=layout)
    assert choose_cut(spec, BFLOAT16, 32, (64, 64, 8)).tiles[0].chunk_tokens == chunk_tokens


@pytest.mark.parametrize(
    ("head_dim", "dtype", "rows"),
    [(64, "bfloat16", 32), (256, "bfloat16", 32), (256, "float32", 16), (128, "int8", 32), (256, "int8", 16)],
)
def test_tiles_of_prefixes_take_no_more_warps_than_rows_that_decode(head_dim: int, dtype: str, rows: int) -> None:
    layout = dataclasses.replace(LAYOUT, head_dim=head_dim, dtype=jnp.dtype(dtype))
    cut = choose_cut(dataclasses.replace(SPEC, layout=layout), BFLOAT16, 32, (64, 64, 8), (False, True))
    assert [tile.rows for tile in cut.tiles] == [16, rows]
    assert [tile.num_warps(layout, BFLOAT16) for tile in cut.tiles] == [4, 4]
