"""Which blocks a draft model has seen: one row of five blocks, 11 to 15, of four tokens each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jpaged.engine.executor import BlockMoves, Move
from jpaged.engine.speculative.draft_model import DraftKVState
from jpaged.testing import FakeExecutor

SIZE = 4
TABLE = [11, 12, 13, 14, 15]


def step(start: int, table: list[int] = TABLE) -> Any:
    """The row's token at a position."""
    slot = table[start // SIZE] * SIZE + start % SIZE
    return SimpleNamespace(
        num_rows=1,
        num_tokens=1,
        positions_t=np.array([start, 0]),
        slots_gt=np.array([[slot, 0]]),
        block_tables_gsm=np.array([[[*table, 0]]]),
    )


def first_unseen(seen: DraftKVState, start: int, num_left: int = 1, table: list[int] = TABLE) -> int:
    return int(seen.see(step(start, table), np.array([num_left]))[0])


@pytest.fixture
def seen() -> DraftKVState:
    """The draft has seen 13 tokens of the row."""
    found = DraftKVState(FakeExecutor(block_size=SIZE).geometry)
    assert first_unseen(found, 13) == 0
    return found


def test_what_rounds_have_written_is_seen(seen: DraftKVState) -> None:
    assert first_unseen(seen, 14, num_left=3) == 14
    assert first_unseen(seen, 17) == 17


def test_what_the_model_alone_writes_is_not_seen_until_it_is_shown(seen: DraftKVState) -> None:
    seen.write(step(14), num_steps=1)
    assert first_unseen(seen, 15) == 12
    assert first_unseen(seen, 15) == 15


def test_several_steps_write_into_each_block_that_they_reach(seen: DraftKVState) -> None:
    seen.write(step(15), num_steps=2)
    assert first_unseen(seen, 17) == 12
    seen.write(step(16), num_steps=2)
    assert first_unseen(seen, 18) == 16


@pytest.mark.parametrize("num_seen", [1, 2])
def test_what_comes_from_the_host_is_not_seen(seen: DraftKVState, num_seen: int) -> None:
    seen.move(BlockMoves(Move.SWAP_OUT, TABLE, [1, 2, 3, 4, 5]))
    assert first_unseen(seen, 13) == 13
    seen.move(BlockMoves(Move.SWAP_IN, [1], [TABLE[num_seen]]))
    assert first_unseen(seen, 13) == num_seen * SIZE


def test_a_copy_is_as_seen_as_what_it_is_of(seen: DraftKVState) -> None:
    seen.move(BlockMoves(Move.COPY, [14, 20], [30, 11]))
    assert first_unseen(seen, 13, table=[12, 12, 13, 30]) == 13
    assert first_unseen(seen, 13) == 0
