"""Which rows read a prefix together: found by their blocks, chosen by what it saves, and moved next to each other."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.executor.io import CascadeCosts
from jpaged.engine.kv_cache.blocks import SequenceBlocks
from jpaged.engine.scheduler import cascade as cascade_module
from jpaged.engine.scheduler.cascade import CascadePlanner
from jpaged.engine.scheduler.output import ScheduledRow, SchedulerOutput, SharedPrefixGroup, build_step_inputs
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.testing import FakeExecutor
from jpaged.testing.fake_model import expected_tokens
from tests.engine.harness import Harness

BLOCK_SIZE = 4
BYTES_ONLY = CascadeCosts(
    granule_tokens=BLOCK_SIZE, tile_queries=64, tile_tokens=1.0, query_share=0.0, query_tokens=0.0, step_tokens=0.0
)
"""What is saved is (rows - 1) * tokens."""
GEOMETRY = FakeExecutor(block_size=BLOCK_SIZE).geometry


def schedule_of(
    tables: list[list[int]], starts: list[int] | None = None, lens: list[int] | None = None
) -> SchedulerOutput:
    """A row for each table; its full blocks were computed before, unless `starts` says otherwise."""
    rows = []
    for i, block_ids in enumerate(tables):
        sequence = Sequence(i, [], SequenceBlocks(GEOMETRY.max_blocks_per_seq, None))
        sequence.kv.tables[0].extend(block_ids)
        sequence.in_flight_row = i
        start = len(block_ids) * BLOCK_SIZE if starts is None else starts[i]
        num_tokens = 1 if lens is None else lens[i]
        rows.append(ScheduledRow(cast(SequenceGroup, None), sequence, start, num_tokens, True, i, None, 0))
    return SchedulerOutput(rows=rows, num_tokens=sum(row.num_tokens for row in rows))


def shared(
    tables: list[list[int]], costs: CascadeCosts = BYTES_ONLY, **how: Any
) -> tuple[list[SharedPrefixGroup], list[int]]:
    """The runs, and the rows in their new order."""
    schedule = schedule_of(tables, **how)
    CascadePlanner().share(schedule, dataclasses.replace(GEOMETRY, cascade=costs))
    return schedule.runs, indices(schedule)


def indices(schedule: SchedulerOutput) -> list[int]:
    """The sequences of the rows, in the order of the device."""
    return [schedule.row_at(row).sequence.index for row in range(schedule.num_rows)]


def test_rows_that_begin_alike_make_a_run() -> None:
    assert shared([[1, 2, 3], [1, 2, 4], [1, 2, 5]]) == ([SharedPrefixGroup(3, 8)], [0, 1, 2])


def test_who_shares_nothing_has_no_runs() -> None:
    assert shared([[1, 2], [3, 4], [5]]) == ([], [0, 1, 2])
    assert shared([[1, 2]]) == ([], [0])


def test_members_move_to_the_first_of_them_and_the_others_keep_their_order() -> None:
    runs, order = shared([[9], [1, 2], [8], [5, 6], [1, 4], [7], [5, 6], [1, 3]])
    assert order == [0, 1, 4, 7, 2, 3, 6, 5]
    assert runs == [
        SharedPrefixGroup(1, 0),
        SharedPrefixGroup(3, 4),
        SharedPrefixGroup(1, 0),
        SharedPrefixGroup(2, 8),
        SharedPrefixGroup(1, 0),
    ]


def test_what_names_rows_by_place_follows_them() -> None:
    schedule = schedule_of([[1], [2], [1], [2]], lens=[1, 1, 1, 0])
    schedule.rows[3].sample_row = 2  # a fresh fork of row 2, which has no token of its own
    CascadePlanner().share(schedule, dataclasses.replace(GEOMETRY, cascade=BYTES_ONLY))
    assert indices(schedule) == [0, 2, 1, 3]
    assert [schedule.row_at(row).sequence.in_flight_row for row in range(4)] == [0, 1, 2, 3]
    assert build_step_inputs(schedule, GEOMETRY).sample_tokens_s.tolist()[:4] == [0, 1, 2, 1]
    assert schedule.runs == [SharedPrefixGroup(2, 4), SharedPrefixGroup(2, 0)]


def test_only_blocks_that_were_full_before_the_step_count() -> None:
    assert shared([[1, 2, 3], [1, 2, 4]], starts=[7, 8])[0] == [SharedPrefixGroup(2, 4)]
    assert shared([[1, 2, 3], [1, 2, 4]], starts=[3, 8])[0] == []


def test_equal_blocks_behind_different_ones_are_not_shared() -> None:
    """Two rows can have computed the same first block twice, and found the second in the cache."""
    assert shared([[1, 5, 6], [2, 5, 6]])[0] == []
    assert shared([[1, 2, 6], [1, 3, 6], [1, 3, 6]])[0] == [SharedPrefixGroup(1, 0), SharedPrefixGroup(2, 12)]


def test_of_nested_prefixes_the_split_that_saves_most() -> None:
    """Three beams of four blocks in common, of eight for two of them."""
    assert shared([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9]])[0] == [
        SharedPrefixGroup(2, 32),
        SharedPrefixGroup(1, 0),
    ]
    assert shared([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 9]])[0] == [SharedPrefixGroup(3, 16)]


def test_a_system_prompt_is_left_to_those_who_have_nothing_better() -> None:
    """Two requests of four samples each with prompts of six blocks, and three alone, behind one common block."""
    first, second = [1, 2, 3, 4, 5, 6], [1, 12, 13, 14, 15, 16]
    tables = [*[first] * 4, *[second] * 4, [1, 21], [1, 22], [1, 23]]
    assert shared(tables)[0] == [SharedPrefixGroup(4, 24), SharedPrefixGroup(4, 24), SharedPrefixGroup(3, 4)]


def test_what_a_second_pass_costs_is_weighed() -> None:
    tables = [[1, 2, i] for i in range(3, 6)]
    assert shared(tables, dataclasses.replace(BYTES_ONLY, step_tokens=15.0))[0] == [SharedPrefixGroup(3, 8)]
    assert shared(tables, dataclasses.replace(BYTES_ONLY, step_tokens=16.0))[0] == []
    assert shared(tables, dataclasses.replace(BYTES_ONLY, query_tokens=5.0))[0] == [SharedPrefixGroup(3, 8)]
    assert shared(tables, dataclasses.replace(BYTES_ONLY, query_tokens=5.4))[0] == []
    assert shared(tables, dataclasses.replace(BYTES_ONLY, tile_tokens=2.5))[0] == [SharedPrefixGroup(3, 8)]
    assert shared(tables, dataclasses.replace(BYTES_ONLY, query_share=0.25))[0] == []
    assert shared(tables, dataclasses.replace(BYTES_ONLY, tile_queries=1))[0] == []


def test_of_a_prefix_counts_what_windows_hold() -> None:
    """The last row's query stands at 12; of 8 tokens its window of 7 holds those from 6 on."""
    tables = [[1, 2, i] for i in range(3, 6)]
    windowed = dataclasses.replace(BYTES_ONLY, windows=((7, 1.0),), step_tokens=3.9)
    assert shared(tables, windowed)[0] == [SharedPrefixGroup(3, 8)]
    assert shared(tables, dataclasses.replace(windowed, step_tokens=4.0))[0] == []
    assert shared(tables, dataclasses.replace(windowed, windows=((5, 1.0),)))[0] == []
    assert shared(tables, dataclasses.replace(windowed, windows=((5, 0.5),)))[0] == [SharedPrefixGroup(3, 8)]


def test_windows_that_have_left_a_prefix_end_its_run() -> None:
    tables = [[1, 2, 3], [1, 2, 4]]
    sharing = CascadePlanner()
    geometry = dataclasses.replace(GEOMETRY, cascade=dataclasses.replace(BYTES_ONLY, windows=((40, 1.0),)))
    runs = []
    for start in (12, 47, 90):
        schedule = schedule_of(tables, starts=[start, start])
        sharing.share(schedule, geometry)
        runs.append(schedule.runs)
    assert runs == [[SharedPrefixGroup(2, 8)], [], []]


def test_a_prefix_is_shared_in_whole_granules() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert shared(tables, dataclasses.replace(BYTES_ONLY, granule_tokens=8))[0] == [SharedPrefixGroup(2, 8)]
    assert shared(tables, dataclasses.replace(BYTES_ONLY, granule_tokens=16))[0] == []


def test_chunks_of_prompts_take_part() -> None:
    runs, order = shared([[1, 2], [3], [1, 2]], lens=[10, 1, 1])
    assert (runs, order) == ([SharedPrefixGroup(2, 8), SharedPrefixGroup(1, 0)], [0, 2, 1])


def test_deep_nesting_takes_no_time() -> None:
    """Each row leaves the common path one block later: with every second level the choices double."""
    path = list(range(1, 16))
    tables = [[*path[: i // 2], 100 + i] for i in range(30)]
    saved = sum((run.num_rows - 1) * run.num_tokens for run in shared(tables)[0])
    assert saved > max((30 - 2 * level - 1) * level * BLOCK_SIZE for level in range(15))


TABLES = st.lists(st.lists(st.integers(1, 2), min_size=0, max_size=6), min_size=1, max_size=7)


@pytest.mark.long
@given(TABLES, st.integers(0, 8))
@settings(max_examples=150)
def test_no_other_partition_saves_more(paths: list[list[int]], step_tokens: int) -> None:
    """Against every partition of the rows, where blocks are named by the path to them, as in a tree of forks."""
    ids: dict[tuple[int, ...], int] = {}
    tables = [[ids.setdefault(tuple(path[: i + 1]), len(ids) + 1) for i in range(len(path))] for path in paths]
    runs, order = shared(tables, dataclasses.replace(BYTES_ONLY, step_tokens=float(step_tokens)))
    best = max(sum(_saved(tables, part) for part in partition) for partition in _partitions(list(range(len(tables)))))
    saved = sum((run.num_rows - 1) * run.num_tokens for run in runs)
    assert saved == (best if best > step_tokens else 0)
    assert sorted(order) == list(range(len(tables)))
    if runs:
        assert sum(run.num_rows for run in runs) == len(tables)
    begin = 0
    for run in runs:
        members = order[begin : begin + run.num_rows]
        begin += run.num_rows
        assert len({tuple(tables[i][: run.num_tokens // BLOCK_SIZE]) for i in members}) == 1 or not run.num_tokens


def _saved(tables: list[list[int]], members: list[int]) -> int:
    common = 0
    for column in itertools.zip_longest(*(tables[i] for i in members)):
        if len(set(column)) > 1:
            break
        common += BLOCK_SIZE
    return (len(members) - 1) * common


def _partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    found = []
    for partition in _partitions(rest):
        found.append([[first], *partition])
        for i in range(len(partition)):
            found.append([*partition[:i], [first, *partition[i]], *partition[i + 1 :]])
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_what_was_found_is_looked_for_again_where_something_changed(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For rows that keep together the runs are looked for once; others take the place of one that ends."""
    looks: list[int] = []
    look = cascade_module._share_prefixes

    def counted(schedule: SchedulerOutput, *how: Any) -> None:
        looks.append(schedule.num_rows)
        look(schedule, *how)

    monkeypatch.setattr(cascade_module, "_share_prefixes", counted)

    def lived(*, forgets: bool) -> tuple[Harness, int]:
        harness = Harness(FakeExecutor(max_num_batched_tokens=64, num_blocks=400, max_num_seqs=6), overlap=overlap)
        harness.submit("a", list(range(10, 31)), n=3, temperature=1.0, seed=7, max_tokens=61)
        harness.submit("b", list(range(10, 26)), n=2, temperature=1.0, seed=7, max_tokens=30)
        harness.submit("c", [1, 2], temperature=0.0, max_tokens=41)
        harness.submit("d", list(range(60, 90)), n=2, temperature=1.0, seed=7, max_tokens=25)
        looks.clear()
        while harness.step():
            if forgets:
                harness.engine._loop._cascade_planner = CascadePlanner()
        return harness, len(looks)

    harness, num_looks = lived(forgets=False)
    other, num_looks_always = lived(forgets=True)
    assert other.executor.num_steps == harness.executor.num_steps
    assert num_looks < num_looks_always / 2
    for count in ("num_cascade_steps", "num_cascade_tokens"):
        assert getattr(harness.engine.load(), count) == getattr(other.engine.load(), count) > 0
    for name, n in (("a", 3), ("b", 2), ("c", 1), ("d", 2)):
        for index in range(n):
            assert harness.tokens(name, index) == other.tokens(name, index)


# --- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_samples_read_their_prompt_together(overlap: bool) -> None:
    harness = Harness(FakeExecutor(max_num_batched_tokens=16), overlap=overlap)
    prompt = list(range(10, 31))
    harness.submit("a", prompt, n=4, temperature=1.0, seed=7, max_tokens=6)
    harness.run()
    for index in range(4):
        assert harness.tokens("a", index) == expected_tokens(prompt, 6, seed=7, sequence_index=index)
    load = harness.engine.load()
    assert load.num_cascade_steps == 5  # every step but those of the prompt, the last of which samples the first tokens
    assert load.num_cascade_tokens == 5 * 3 * 20


def test_cached_prefixes_are_read_together_whoever_is_between_them() -> None:
    harness = Harness(FakeExecutor(max_num_batched_tokens=32))
    common, other = list(range(40, 61)), list(range(90, 99))
    harness.submit("first", common, max_tokens=1)
    harness.run()
    assert harness.engine.load().num_cascade_steps == 0
    prompts = {"a": [*common, 1], "x": other, "b": [*common, 2], "y": other[::-1], "c": [*common, 3]}
    for name, prompt in prompts.items():
        harness.submit(name, prompt, max_tokens=6)
    harness.run()
    for name, prompt in prompts.items():
        assert harness.tokens(name) == expected_tokens(prompt, 6)
    load = harness.engine.load()
    assert load.num_cascade_steps >= 5
    assert load.num_cascade_tokens == load.num_cascade_steps * 2 * 20


def test_a_run_ends_when_windows_have_left_its_prefix() -> None:
    """It is asked for again every 64 tokens, although the rows are the same."""
    executor = FakeExecutor(max_num_batched_tokens=32, num_blocks=400, max_model_len=400)
    costs = dataclasses.replace(BYTES_ONLY, windows=((40, 1.0),))
    executor._geometry = dataclasses.replace(executor.geometry, cascade=costs)
    harness = Harness(executor)
    harness.submit("a", list(range(10, 31)), n=2, temperature=1.0, seed=7, max_tokens=200)
    harness.run()
    # The window of 40 has left the 20 tokens at position 60, which is found out 64 behind the first step.
    assert harness.engine.load().num_cascade_steps in range(64, 68)


def test_an_executor_that_does_not_cascade_gets_no_runs() -> None:
    executor = FakeExecutor(max_num_batched_tokens=16)
    executor._geometry = dataclasses.replace(executor.geometry, cascade=None)
    harness = Harness(executor)
    harness.submit("a", list(range(10, 31)), n=4, temperature=1.0, seed=7, max_tokens=6)
    harness.run()
    assert harness.engine.load().num_cascade_steps == 0
