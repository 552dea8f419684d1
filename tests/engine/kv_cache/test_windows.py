"""What nobody sees any more is given back: held, promised, found again and moved is what a window still holds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.engine.executor import Geometry
from jpaged.engine.executor.io import WindowSpec
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.engine.kv_cache.prefix_cache import num_usable
from jpaged.engine.sequence import SequenceGroup, Status
from jpaged.models.layer_kinds import group_layers
from jpaged.testing import SeveralStepsExecutor, expected_tokens, seeing
from jpaged.types import Request, SamplingParams
from tests.engine.harness import Harness

WINDOWS = (None, 6)
GEMMA_3_27B = [None if index % 6 == 5 else 1024 for index in range(62)]
LONG = 32_768


def geometry(num_blocks=60, **sizes) -> Geometry:
    return seeing(WINDOWS)(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=8, **sizes).geometry


def group_of(prompt, **sampling) -> SequenceGroup:
    return SequenceGroup(
        Request("g", tuple(prompt), SamplingParams(max_tokens=8, **sampling)), 0, 0.0, print, 32, len(WINDOWS)
    )


def compute(memory, group):
    """Runs a group's prompt, four tokens a step, as the scheduler would."""
    leader = group.live[0]
    memory.admit(group)
    group.move_to(Status.RUNNING)
    while leader.num_computed_tokens < leader.num_prompt_tokens:
        settle(memory, leader)
        num_tokens = min(4, leader.num_prompt_tokens - leader.num_computed_tokens)
        memory.grow(leader, num_tokens)
        leader.set_num_computed_tokens(leader.num_computed_tokens + num_tokens)
    settle(memory, leader)
    return leader


def settle(memory, sequence):
    memory.prefixes.register_full_blocks(sequence)
    memory.windows.free_out_of_window(sequence)


def held(sequence):
    """Which places of each table hold a block."""
    return [[i for i in range(table.num_blocks) if table.block_id(i)] for table in sequence.kv.tables]


# --- how far a window reaches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9, 40])
def test_every_token_that_is_seen_is_held_and_no_block_too_many(window, block_size):
    reach = WindowSpec.of(window, block_size, most_at_once=7)
    for start in range(60):
        first = reach.first_block(start // block_size)
        assert first * block_size <= max(0, start + 1 - window)  # all that a query at `start` sees
        boundary = start // block_size * block_size
        assert (first + 1) * block_size > max(0, boundary + 1 - window)  # and one at its block's first place needs all
        for num_tokens in range(1, 8):
            end = -(-(start + num_tokens) // block_size)
            assert end - first <= reach.num_held(end) == min(end, reach.max_num_held or 0)


@given(
    st.lists(st.sampled_from([(None, 0), (0, 0), (1, 0), (2, 0), (5, 0), (1, 2), (0, 1)]), min_size=1, max_size=3),
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=10),
)
def test_the_longest_prefix_is_found_of_which_all_that_is_seen_is_known(seen, known):
    reaches = [WindowSpec(1, num_seen, num_sinks=num_sinks) for num_seen, num_sinks in seen]
    keys = [bytes([100 + i]) for i in range(len(known))]

    def is_known(key):
        return known[key[0] - 100][key[1] if len(key) > 1 else 0]

    usable = [
        all(known[i][group] for group, reach in enumerate(reaches) for i in reach.seen(end))
        for end in range(len(known) + 1)
    ]
    assert num_usable(keys, reaches, is_known) == max(end for end, is_usable in enumerate(usable) if is_usable)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_table_gives_up_what_its_window_has_left_behind():
    memory = PagedKVCacheManager(geometry())
    leader = compute(memory, group_of(range(30)))
    assert held(leader) == [list(range(8)), [5, 6, 7]]  # whoever is in the block that begins at 28 sees 23 at most
    assert leader.kv.ids_gm[1, :5].tolist() == [0] * 5
    assert memory.use().num_referenced == 8 + 3
    memory.release(leader)
    assert (memory.use().num_referenced, memory.use().num_cached) == (0, 2 * 7)


def test_a_waiting_group_is_promised_what_it_holds_at_once():
    group = group_of(range(30))
    assert (
        PagedKVCacheManager(geometry()).num_outstanding_blocks(group) == 8 + 5
    )  # two that are seen, and a step of 8 tokens
    assert not PagedKVCacheManager(geometry(12)).can_admit(group, 0)
    assert PagedKVCacheManager(geometry(13)).can_admit(group, 0)


def test_samples_keep_what_the_slowest_of_them_sees():
    memory = PagedKVCacheManager(geometry())
    group = group_of(range(10), n=2)
    leader, other = group.live
    compute(memory, group)
    memory.fork(leader, other)
    assert memory.use().num_referenced == 3 + 3
    for _ in range(12):
        memory.grow(leader, 1)
        leader.set_num_computed_tokens(leader.num_computed_tokens + 1)
        settle(memory, leader)
    assert held(leader) == [list(range(6)), [3, 4, 5]]
    assert held(other) == [[0, 1, 2], [0, 1, 2]]
    memory.check([group])
    settle(memory, other)
    memory.grow(other, 1)
    memory.check([group])
    assert memory.use().num_referenced == (6 + 1) + (3 + 3)  # what was begun together is each one's own by now


def test_a_hit_needs_the_whole_of_what_is_seen_from_everywhere_and_the_end_of_a_window():
    memory = PagedKVCacheManager(geometry(24))
    memory.release(compute(memory, group_of(range(30))))
    again = group_of(range(40))
    assert memory.admit(again) == 28
    assert held(again.live[0]) == [list(range(7)), [5, 6]]
    memory.release(again.live[0])
    shorter = group_of([*range(21), 99])
    assert memory.admit(shorter) == 21  # its window's blocks were given back long ago, and are found as well
    memory.release(shorter.live[0])


def test_a_prefix_ends_where_its_window_was_reissued():
    memory = PagedKVCacheManager(geometry(20))
    assert memory.prefixes is not None
    memory.release(compute(memory, group_of(range(30))))
    (sequence,) = group_of(range(30)).sequences
    keys = sequence.kv.keys(range(30), 7, 4)
    reissued = memory.prefixes.cache.find(keys[5] + b"\x01")
    assert reissued is not None
    memory.prefixes.remove_block(reissued)
    memory.prefixes.num_cached -= 1
    assert memory.admit(group_of(range(30))) == 5 * 4  # six and seven blocks in see the sixth
    memory.prefixes.check()


def test_parts_of_blocks_are_copied_in_every_group_whatever_block_is_reissued_first():
    for order in itertools.permutations(range(1, 6)):
        memory = PagedKVCacheManager(geometry(5))
        first = compute(memory, group_of(range(8)))
        tails = [table.block_id(1) for table in first.kv.tables]
        memory.release(first)
        for block_id in order:
            del memory._pool._free_lists[0][block_id]
            memory._pool._free_lists[0][block_id] = None
        memory.take_ops()
        group = group_of([*range(6), 99])
        num_tokens, contents = memory.admit(group), {block_id: block_id for block_id in range(1, 6)}
        for moves in memory.take_ops().batches():
            read = [contents[source] for source in moves.sources]
            contents |= dict(zip(moves.destinations, read, strict=True))
        assert [contents[table.block_id(1)] for table in group.live[0].kv.tables] == tails, order
        assert num_tokens == 6
        memory.check([group])


def test_what_is_swapped_is_what_is_held():
    memory = PagedKVCacheManager(geometry(20, num_host_blocks=11))
    assert memory.swapping is not None
    group = group_of(range(30))
    leader = compute(memory, group)
    assert memory.swapping.can_swap_out(group)
    memory.swapping.swap_out(group)
    group.move_to(Status.SWAPPED)
    assert [table.num_dropped for table in leader.kv.host_tables] == [0, 5]
    assert memory.use().num_referenced == 0
    assert memory.swapping.can_swap_in(group, 20 - 11)
    assert not memory.swapping.can_swap_in(group, 20 - 10)
    memory.swapping.swap_in(group)
    assert held(leader) == [list(range(8)), [5, 6, 7]]
    memory.check([group])


def test_who_goes_back_behind_what_was_given_up_runs_from_the_beginning():
    for num_tokens, num_left in ((29, 29), (28, 28), (23, 0)):
        memory = PagedKVCacheManager(geometry())
        group = group_of(range(20))
        leader = compute(memory, group)
        leader.token_ids += range(20, 30)
        memory.grow(leader, 10)
        leader.set_num_computed_tokens(30)
        settle(memory, leader)
        leader.rewind(num_tokens)
        memory.rewind(leader)
        assert leader.num_computed_tokens == num_left
        assert leader.kv.num_blocks == -(-num_left // 4)
        memory.check([group])


def pinned(windows, num_blocks):
    """An engine in which seven full blocks of a prompt are pinned, as so many, and found though others came since."""
    h = Harness(executor=seeing(windows)(num_blocks=60, max_num_batched_tokens=16))
    prompt = list(range(30))
    future = h.engine.pin_prefix("system", prompt)
    h.run()
    assert future.result() == 28
    assert h.engine.load().num_blocks_used == num_blocks
    for i in range(4):
        h.submit(f"other {i}", [100 + i] * 60, max_tokens=1)
    h.run()
    h.submit("a", [*prompt[:28], 1, 2], max_tokens=4)
    h.run()
    assert h.last("a").usage.cached_tokens == 28
    assert h.tokens("a") == expected_tokens([*prompt[:28], 1, 2], 4, windows=windows)
    return h


def test_a_pin_keeps_the_end_of_a_window():
    h = pinned(WINDOWS, num_blocks=7 + 2)
    assert h.engine.unpin_prefix("system")
    h.step()
    assert h.engine.load().num_blocks_used == 0


# --- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_five_windows_to_one_global_layer_hold_a_quarter_of_full_attention():
    groups = group_layers(GEMMA_3_27B, LONG)
    executor = seeing(groups.windows)(
        num_blocks=4096,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        max_model_len=LONG,
    )
    h = Harness(executor=executor)
    prompt = [i * i % 251 for i in range(LONG - 24)]
    h.submit("a", prompt, max_tokens=24)
    while len(h.tokens("a")) < 20:
        h.step()
    bytes_of_full = 62 * LONG
    load = h.engine.load()
    assert load.num_blocks_used * 16 * groups.num_layers < 0.2 * bytes_of_full
    assert load.peak_blocks_used * 16 * groups.num_layers < 0.25 * bytes_of_full
    h.run()
    assert h.tokens("a") == expected_tokens(prompt, 24, windows=groups.windows)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_runs_that_only_fits_because_its_windows_move_on(overlap):
    executor = seeing((None, 7), SeveralStepsExecutor)(
        num_blocks=24 + 8, max_num_batched_tokens=16, max_model_len=96, num_host_blocks=4
    )
    h = Harness(executor=executor, overlap=overlap, num_scheduler_steps=8)
    prompts = [[i % 7 for i in range(40)], [i % 5 for i in range(50)]]
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, max_tokens=96 - len(prompt))
    h.run()
    for i, prompt in enumerate(prompts):
        assert h.tokens(f"r{i}") == expected_tokens(prompt, 96 - len(prompt), windows=(None, 7))
    assert h.engine.load().num_blocks_used == 0


@pytest.mark.parametrize("kv_policy", ["reserve-max", "reserve-pow2", "reserve-oracle"])
def test_the_baselines_keep_everything_and_sample_the_same(kv_policy):
    executor = seeing((None, 7, 3))(num_blocks=120, max_num_batched_tokens=16, max_model_len=64)
    h = Harness(executor=executor, kv_policy=kv_policy)
    prompts = [list(range(20)), [3, 1, 4] * 5]
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, max_tokens=20)
    h.submit("beams", [1, 2, 3], max_tokens=12, beam_width=2, n=2)
    h.run()
    for i, prompt in enumerate(prompts):
        assert h.tokens(f"r{i}") == expected_tokens(prompt, 20, windows=(None, 7, 3))
    assert h.engine.load().num_blocks_used == 0


def test_rows_read_what_they_share_once_where_windows_hold_it():
    executor = seeing((None, 9, 2))(num_blocks=200, max_num_batched_tokens=32)
    h = Harness(executor=executor)
    prompt = list(range(40))
    h.submit("a", prompt, max_tokens=30, n=4, temperature=1.0, seed=3)
    h.run()
    assert h.engine.load().num_cascade_steps > 20
    for i in range(4):
        assert h.tokens("a", i) == expected_tokens(prompt, 30, seed=3, sequence_index=i, windows=(None, 9, 2))
