"""How rows are taken apart for devices that share contexts, held against one position at a time in plain Python."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged.device.context import ContextOrder, check_windows, kind_of_part, merged, most_rows, own_slots
from jpaged.device.mesh import CONTEXT_AXIS, build_mesh, on_shards
from jpaged.errors import InvalidArgument
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import RaggedRows

NUMS = [1, 7, 0, 1, 4, 2]
"""Queries of each row; a row in use may have none."""
POSITIONS = [9, 0, 5, 0, 30, 3]
NUM_TOKENS, NUM_ROWS, BLOCK = 20, 8, 24


def step_rows(begins: list[int] | None = None) -> RaggedRows:
    starts = np.cumsum([0, *NUMS, 0, 0])
    lens = [n + p for n, p in zip(NUMS, POSITIONS, strict=True)]
    return RaggedRows(
        query_starts_s1=jnp.asarray(starts, jnp.int32),
        kv_lens_s=jnp.asarray([*lens, 0, 0], jnp.int32),
        block_tables_sm=jnp.arange(NUM_ROWS * 3, dtype=jnp.int32).reshape(NUM_ROWS, 3),
        num_rows=jnp.int32(len(NUMS)),
        kv_begins_s=None if begins is None else jnp.asarray(begins, jnp.int32),
    )


def order_of(rows: RaggedRows, num_parts: int) -> ContextOrder:
    return ContextOrder.of(rows.query_starts_s1, rows.num_rows, NUM_TOKENS, num_parts)


@pytest.mark.parametrize("num_parts", [2, 3, 4, 8])
def test_the_queries_of_a_row_lie_together_by_their_distance_from_its_first(num_parts: int) -> None:
    rows = step_rows()
    order = order_of(rows, num_parts)
    want: list[int] = []
    starts = rows.query_starts_s1.tolist()
    for start, num in zip(starts, NUMS, strict=False):
        want += [t for k in range(num_parts) for t in range(start + k, start + num, num_parts)]
    want += range(len(want), NUM_TOKENS)
    assert order.tokens_t.tolist() == want
    assert order.places_t[order.tokens_t].tolist() == list(range(NUM_TOKENS))
    assert order.firsts_s1[-1] == sum(min(num, num_parts) for num in NUMS) <= len(order.rows_u)
    assert len(order.rows_u) == most_rows(NUM_ROWS, NUM_TOKENS, num_parts)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("num_parts", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 24])
def test_every_query_sees_each_key_on_one_device(num_parts: int, window: int | None) -> None:
    """Each device has the keys of a causal row, with the part of a window: together those that it saw before."""
    begins = [0, 0, 0, 0, BLOCK, 0, 0, 0]
    rows = step_rows(begins)
    order = order_of(rows, num_parts)
    own_window = kind_of_part(AttentionKind(scale=1.0, sliding_window=window), num_parts).sliding_window
    seen: dict[int, list[int]] = {t: [] for t in range(sum(NUMS))}
    for part in range(num_parts):
        own = order.get_rows(rows, jnp.int32(part), num_parts)
        assert own.first_positions_s is None
        assert own.kv_begins_s is not None
        for row in range(int(own.num_rows)):
            begin, end = own.query_starts_s1[row : row + 2].tolist()
            for i, place in enumerate(range(begin, end)):
                position = int(own.positions[row]) + i
                first = int(own.kv_begins_s[row])
                if own_window is not None:
                    first = max(first, position - own_window + 1)
                keys = range(max(0, first), min(position, int(own.kv_lens_s[row]) - 1) + 1)
                seen[int(order.tokens_t[place])] += [key * num_parts + part for key in keys]
    starts = rows.query_starts_s1.tolist()
    for row, (num, position) in enumerate(zip(NUMS, POSITIONS, strict=True)):
        for i in range(num):
            first = max(begins[row], 0 if window is None else position + i - window + 1)
            assert sorted(seen[starts[row] + i]) == list(range(first, position + i + 1)), (row, i)


@pytest.mark.long
def test_new_rows_have_the_block_tables_of_theirs_and_runs_begin_with_them() -> None:
    rows = step_rows()
    order = order_of(rows, 4)
    own = order.get_rows(rows, jnp.int32(0), 4)
    num_rows = int(own.num_rows)
    assert (own.block_tables_sm[:num_rows] == rows.block_tables_sm[order.rows_u[:num_rows]]).all()
    starts = order.run_starts(jnp.asarray([0, 2, *[len(NUMS)] * 7], jnp.int32))
    assert starts[:3].tolist() == [0, 1 + 4, num_rows]
    assert set(starts[3:].tolist()) == {num_rows}
    assert len(starts) == len(order.rows_u) + 1


def test_a_token_has_a_slot_on_one_device_where_its_block_is() -> None:
    """Slots of a block of 24 on four devices: six of them on each."""
    slots = jnp.arange(2 * 24, 3 * 24)
    own = np.stack([own_slots(slots, jnp.int32(part), 4) for part in range(4)])
    assert ((own >= 0).sum(axis=0) == 1).all()
    for part in range(4):
        assert own[part][own[part] >= 0].tolist() == list(range(2 * 6, 3 * 6))


@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_of_a_context_merge_to_the_whole(num_parts: int) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(num_parts, 5, 3, 7)).astype(np.float32)
    scores[0, 1] = scores[1, 2, 0] = -np.inf  # devices that have no key of it
    scores[:, 4] = -np.inf  # nobody has
    values = rng.normal(size=(num_parts, 7, 4)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = np.exp(scores).sum(axis=-1)
        parts = np.einsum("pthk,pkd->pthd", np.exp(scores), values) / np.where(sums > 0, sums, 1)[..., None]
        lse = np.log(sums)
        want_sum = sums.sum(axis=0)
        want = np.einsum("pthk,pkd->thd", np.exp(scores), values) / np.where(want_sum > 0, want_sum, 1)[..., None]
    mesh, of_parts, whole = (
        build_mesh(jax.devices()[:num_parts], num_parts),
        PartitionSpec(CONTEXT_AXIS),
        PartitionSpec(),
    )
    run = on_shards(lambda o, lse: merged((o[0], lse[0]), CONTEXT_AXIS), mesh, (of_parts, of_parts), (whole, whole))
    o, total = jax.jit(run)(parts.astype(np.float32), lse)
    np.testing.assert_allclose(o, want, atol=1e-5)
    np.testing.assert_allclose(np.asarray(total)[:4], np.log(want_sum[:4]), rtol=1e-5)
    assert np.isneginf(np.asarray(total)[4]).all()


def test_a_window_that_cannot_be_cut_evenly_is_refused() -> None:
    kinds = [AttentionKind(scale=1.0), AttentionKind(scale=1.0, sliding_window=9)]
    check_windows(kinds, 9, 2)  # no sequence is longer
    check_windows(kinds, 100, 3)
    with pytest.raises(
        InvalidArgument, match="context_parallel_size: 2 does not divide the model's sliding window of 9"
    ):
        check_windows(kinds, 10, 2)


def test_a_block_is_cut_into_equal_parts() -> None:
    layout = KVLayout(2, 4, 24, 4, 16, jnp.dtype("float32"), num_shards=2, num_context_parts=3)
    assert (layout.local.block_size, layout.local.num_kv_heads) == (8, 2)
    assert layout.local.num_bytes == layout.num_bytes // 6
    with pytest.raises(InvalidArgument, match="num_context_parts: 5 does not divide the 24 slots of a block"):
        dataclasses.replace(layout, num_context_parts=5)
