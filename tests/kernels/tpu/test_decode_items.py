"""Items of the decode kernel: which blocks each of them reads, and what comes after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jpaged.kernels.paged_attention.tpu.decode import items

BLOCK_SIZE, NUM_BLOCKS = 4, 3


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 12), (0, 13), (3, 4), (4, 17), (7, 24), (11, 12), (13, 15)])
def test_an_item_reads_the_blocks_with_tokens_that_are_seen(begin: int, end: int) -> None:
    layout = SimpleNamespace(block_size=BLOCK_SIZE)
    plan: Any = SimpleNamespace(spec=SimpleNamespace(layout=layout), fetch_blocks=NUM_BLOCKS)
    scalars: Any = SimpleNamespace(segments=SimpleNamespace(begin=jnp.array([0, begin]), end=jnp.array([0, end])))
    for item in range(begin // (BLOCK_SIZE * NUM_BLOCKS), -(-end // (BLOCK_SIZE * NUM_BLOCKS))):
        first = item * NUM_BLOCKS
        seen = {token // BLOCK_SIZE - first for token in range(begin, end)} & set(range(NUM_BLOCKS))
        found = [int(one) for one in items._blocks(scalars, 1, item, plan)]
        assert found == [min(seen), max(seen) + 1]


def test_the_last_item_of_a_segment_is_followed_by_the_first_of_the_next() -> None:
    segments: Any = SimpleNamespace(first=jnp.array([0, 2, 0]), last=jnp.array([2, 3, 1]))
    order, at = [], (0, 0)
    for _ in range(4):
        order.append(at)
        segment, item = items.following(segments, *map(jnp.int32, at))
        at = int(segment), int(item)
    assert order == [(0, 0), (0, 1), (1, 2), (2, 0)]
