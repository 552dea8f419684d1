"""How the Triton kernels' work is cut: every query in one tile, every key in one part, and not too many parts."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, RaggedRows
from jpaged.kernels.paged_attention.triton.work import Cut, ItemField, TileField, choose_cut, plan

LAYOUT = KVLayout(1, 8, 16, 8, 128, jnp.dtype("bfloat16"), "gpu")
SPEC = AttentionSpec(LAYOUT, AttentionKind(1.0))
BFLOAT16 = jnp.dtype("bfloat16")


def decodes(lens: list[int], num_rows: int, table_width: int) -> RaggedRows:
    kv_lens = np.zeros(num_rows, np.int32)
    kv_lens[: len(lens)] = lens
    starts = np.minimum(np.arange(num_rows + 1), len(lens)).astype(np.int32)
    tables = jnp.zeros((num_rows, table_width), jnp.int32)
    return RaggedRows(jnp.array(starts), jnp.array(kv_lens), tables, jnp.int32(len(lens)))


def items_of(rows: RaggedRows, cut: Cut, num_tokens: int, spec: AttentionSpec = SPEC) -> list[list[int]]:
    """The items in use."""
    items = np.asarray(plan(rows, spec, cut, num_tokens).items).tolist()
    return [item for item in items if item[ItemField.NUM_TOKENS]]


@pytest.mark.parametrize("seed", range(8))
def test_every_query_is_in_one_tile_and_every_key_that_it_sees_in_one_part(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, num_tokens, width = 6, 90, 8
    window = [None, 40][seed % 2]
    counts = rng.multinomial(int(rng.integers(0, num_tokens + 1)), np.ones(num_rows) / num_rows) * (rng.random(6) < 0.8)
    used = int(rng.integers(0, num_rows + 1))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    kv_lens = np.minimum(counts + rng.integers(0, 50, num_rows), width * 16).astype(np.int32)
    spec = dataclasses.replace(SPEC, kind=AttentionKind(1.0, window))
    cut = choose_cut(spec, BFLOAT16, 56, (num_tokens, num_rows, width))
    cut = dataclasses.replace(cut, chunk_tokens=16, part_chunks=1, num_parts=int(rng.integers(2, 60)), max_chunks=9)
    tables = jnp.zeros((num_rows, width), jnp.int32)
    rows = RaggedRows(jnp.array(starts), jnp.array(kv_lens), tables, jnp.int32(used))
    work = plan(rows, spec, cut, num_tokens)
    seen: dict[int, list[int]] = {}
    for item in np.asarray(work.items).tolist():
        first, size, row = item[ItemField.FIRST_TOKEN], item[ItemField.NUM_TOKENS], item[ItemField.ROW]
        keys = range(item[ItemField.FIRST_KEY], item[ItemField.FIRST_KEY] + 16 * item[ItemField.NUM_CHUNKS])
        assert item[ItemField.FIRST_KEY] % 16 == 0
        for i in range(size):
            if (token := first + i) < starts[used]:
                assert starts[row] <= token < starts[row + 1]
                assert item[ItemField.POSITION] + i == kv_lens[row] - counts[row] + token - starts[row]
                assert (item[ItemField.KV_BEGIN], item[ItemField.KV_END]) == (0, kv_lens[row])
            seen.setdefault(token, []).extend(keys)
    assert sorted(seen) == list(range(num_tokens))
    for token, found in seen.items():
        assert len(set(found)) == len(found)
        if token >= starts[used]:
            assert found == []
            continue
        row = int(np.searchsorted(starts, token, "right")) - 1
        position = int(kv_lens[row] - counts[row] + token - starts[row])
        assert set(range(max(0, position + 1 - (window or position + 1)), position + 1)) <= set(found)
    tiles = np.asarray(work.tiles)
    if (tiles[:, TileField.NUM_ITEMS] > 1).any():
        assert tiles[:, TileField.NUM_ITEMS].sum() <= cut.num_parts
    for tile in tiles.tolist():
        for i in range(tile[TileField.NUM_ITEMS]):
            item = np.asarray(work.items)[tile[TileField.FIRST_ITEM] + i]
            assert item[ItemField.FIRST_TOKEN] == tile[TileField.FIRST_TOKEN]
            assert item[ItemField.IS_PART] == (tile[TileField.NUM_ITEMS] > 1)


def test_parts_follow_from_the_rows_that_are_there_and_not_from_the_bucket() -> None:
    cut = choose_cut(SPEC, BFLOAT16, 32, (64, 64, 512))
    assert cut.num_parts == 64
    assert len(items_of(decodes([8192], 64, 512), cut, 1)) == 32
    assert len(items_of(decodes([8192] * 4, 64, 512), cut, 4)) == 64
    assert len(items_of(decodes([8192] * 64, 64, 512), cut, 64)) == 64
    assert len(items_of(decodes([300] * 64, 64, 512), cut, 64)) == 64


def test_a_long_context_has_more_parts_than_a_short_one() -> None:
    cut = choose_cut(SPEC, BFLOAT16, 32, (64, 64, 512))
    items = items_of(decodes([8192, 256, 1000], 64, 512), cut, 3)
    assert [sum(item[ItemField.ROW] == row for item in items) for row in range(3)] == [32, 1, 4]


def test_short_contexts_are_not_divided() -> None:
    assert choose_cut(SPEC, BFLOAT16, 32, (1, 1, 256 // 16)).num_parts == 0
    window = dataclasses.replace(SPEC, kind=AttentionKind(1.0, sliding_window=128))
    assert choose_cut(window, BFLOAT16, 32, (1, 1, 4096)).num_parts == 0
    cut = choose_cut(SPEC, BFLOAT16, 32, (8, 8, 64))
    assert all(not item[ItemField.IS_PART] for item in items_of(decodes([256] * 8, 8, 64), cut, 8))


@pytest.mark.parametrize(
    ("sizes", "num_heads", "tile_rows"),
    [((64, 64, 8), 32, 16), ((512, 64, 8), 32, 64), ((8, 8, 8), 8 * 71, 128), ((64, 8, 8), 8, 64)],
)
def test_tiles_hold_the_heads_of_a_token_and_where_there_are_prompts_more_tokens(
    sizes: tuple[int, int, int], num_heads: int, tile_rows: int
) -> None:
    cut = choose_cut(SPEC, BFLOAT16, num_heads, sizes)
    assert (cut.tile_rows, cut.tile_tokens) == (tile_rows, tile_rows * 8 // num_heads)
    assert cut.num_tiles <= sizes[0]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "chunk_tokens"),
    [(64, "bfloat16", 64), (128, "bfloat16", 64), (256, "bfloat16", 32), (128, "float32", 32), (128, "int8", 64)],
)
def test_chunks_are_no_larger_than_shared_memory_has_room_for(head_dim: int, dtype: str, chunk_tokens: int) -> None:
    layout = dataclasses.replace(LAYOUT, head_dim=head_dim, dtype=jnp.dtype(dtype))
    spec = dataclasses.replace(SPEC, layout=layout)
    assert choose_cut(spec, BFLOAT16, 32, (64, 64, 8)).chunk_tokens == chunk_tokens
