"""Batches of moves leave what the moves leave one after the other, and are few."""

import numpy as np
import pytest

from jpaged.engine.executor import Move
from jpaged.engine.kv_cache.blocks import BlockCopyPlan

SPACES = {Move.COPY: (0, 0), Move.SWAP_OUT: (0, 1), Move.SWAP_IN: (1, 0)}


def batched(*moves):
    ops = BlockCopyPlan()
    for move in moves:
        ops.add(*move)
    return [(batch.move, batch.sources, batch.destinations) for batch in ops.batches()]


@pytest.mark.parametrize("seed", range(50))
def test_batches_do_what_the_moves_do_in_order(seed):
    rng = np.random.default_rng(seed)
    one_by_one = [np.arange(12), np.arange(100, 112)]  # device and host blocks, few so that moves collide
    at_once = [space.copy() for space in one_by_one]
    ops = BlockCopyPlan()
    for _ in range(30):
        move = Move(rng.choice([move.value for move in Move]))
        source, destination = (int(n) for n in rng.permutation(11)[:2] + 1)
        ops.add(move, source, destination)
        read, written = SPACES[move]
        one_by_one[written][destination] = one_by_one[read][source]
    for batch in ops.batches():
        read, written = SPACES[batch.move]
        if read == written:
            assert set(batch.sources).isdisjoint(batch.destinations)
        assert len(set(batch.destinations)) == len(batch.destinations)
        at_once[written][batch.destinations] = at_once[read][batch.sources]
    np.testing.assert_array_equal(at_once, one_by_one)
    assert sum(len(batch.sources) for batch in ops.batches()) == 30


def test_a_block_that_was_read_may_be_overwritten_in_the_same_step():
    """The sharers of block 1 leave after one of them has copied it, and it is given to somebody else."""
    assert batched((Move.COPY, 1, 2), (Move.COPY, 3, 1)) == [(Move.COPY, [1], [2]), (Move.COPY, [3], [1])]


def test_evictions_between_copies_are_one_transfer():
    moves = [pair for i in range(1, 9) for pair in ((Move.SWAP_OUT, i, 10 + i), (Move.COPY, 20 + i, i))]
    assert batched(*moves) == [
        (Move.SWAP_OUT, list(range(1, 9)), list(range(11, 19))),
        (Move.COPY, list(range(21, 29)), list(range(1, 9))),
    ]


def test_nothing_overtakes_what_it_depends_on():
    """Out of 1, copied over, out again: the second time its new content leaves."""
    moves = [(Move.SWAP_OUT, 1, 1), (Move.COPY, 2, 1), (Move.SWAP_OUT, 1, 2), (Move.SWAP_IN, 1, 2)]
    assert batched(*moves) == [(move, [source], [destination]) for move, source, destination in moves]
