"""Blocks come out once, go back once, and the pool notices when they do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.engine.executor import NULL_BLOCK
from jpaged.engine.kv_cache.blocks import BlockPool, BlockTable
from jpaged.errors import InternalError


def table_of(pool, num_blocks):
    table = BlockTable(max_blocks=16)
    table.extend(pool.allocate(num_blocks))
    return table


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(num_blocks=3, block_size=4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert not pool.can_allocate(1)
    with pytest.raises(InternalError, match="1 blocks requested, but 0 of 3 are free"):
        pool.allocate(1)


def test_blocks_are_needed_only_when_a_token_comes():
    pool = BlockPool(num_blocks=8, block_size=4)
    assert [pool.num_blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_the_last_block_of_a_table_is_the_first_to_be_free():
    pool = BlockPool(num_blocks=4, block_size=4)
    table = table_of(pool, 4)
    held = table.block_ids()
    pool.release(table)
    assert pool.allocate(4) == held[::-1]


def test_a_released_table_reads_the_null_block():
    pool = BlockPool(num_blocks=4, block_size=4)
    table = table_of(pool, 3)
    pool.release(table)
    assert table.num_blocks == 0 and set(table.ids_m.tolist()) == {NULL_BLOCK}


@given(st.lists(st.integers(0, 4), max_size=12))
def test_no_block_is_lost_or_held_twice(sizes):
    pool = BlockPool(num_blocks=10, block_size=2)
    tables = []
    for size in sizes:
        if pool.can_allocate(size):
            tables.append(table_of(pool, size))
        elif tables:
            pool.release(tables.pop(0))
            tables = [table for table in tables if table.num_blocks]
        pool.check(tables)
    for table in tables:
        pool.release(table)
    pool.check([])
    assert pool.num_free == 10


def test_the_check_sees_a_lost_block():
    pool = BlockPool(num_blocks=4, block_size=2)
    table_of(pool, 2)
    with pytest.raises(InternalError, match="held by 0 tables, but its reference count is 1"):
        pool.check([])


def test_the_check_sees_a_table_that_names_a_free_block():
    pool = BlockPool(num_blocks=4, block_size=2)
    stray = BlockTable(max_blocks=4)
    stray.extend([2])
    with pytest.raises(InternalError, match="block 2 is held by 1 tables, but its reference count is 0"):
        pool.check([stray])


def test_a_double_release_raises():
    pool = BlockPool(num_blocks=4, block_size=2)
    table = table_of(pool, 1)
    twin = BlockTable(max_blocks=4)
    twin.extend(table.block_ids())
    pool.release(table)
    with pytest.raises(InternalError, match="has 0 references"):
        pool.release(twin)
