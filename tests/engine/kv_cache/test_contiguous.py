"""The baselines: contiguous regions for a whole life, and batches that end together. Same tokens, other memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.executor import NULL_BLOCK
from jpaged.engine.kv_cache.contiguous import RESERVE_POLICIES, BuddyAllocator
from jpaged.engine.sequence import Status
from jpaged.errors import InternalError
from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.groups import group_of, reserved_memory
from tests.engine.harness import Harness
from tests.engine.kv_cache.oracle import expected_outputs

NO_LENS = np.zeros(0, np.int32)


class TablesExecutor(FakeExecutor):
    """Refuses a step in which a sequence's blocks are not consecutive."""

    def forward(self, inputs):
        for table in inputs.block_tables_gsm[0, : inputs.num_rows]:
            block_ids = table[table != NULL_BLOCK]
            assert np.all(np.diff(block_ids) == 1), block_ids
        return super().forward(inputs)


def make(kv_policy, *, contiguous=True, num_blocks=64, **options):
    kind = TablesExecutor if contiguous else FakeExecutor
    executor = kind(block_size=4, num_blocks=num_blocks, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=32)
    return Harness(executor=executor, kv_policy=kv_policy, **options)


MIXED = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 3},
    "samples": {"temperature": 1.0, "seed": 3, "n": 3},
    "beams": {"temperature": 0.0, "beam_width": 3, "n": 2},
}


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("kv_policy", [*RESERVE_POLICIES, "paged"])
def test_every_policy_gives_the_same_tokens(kv_policy, batching):
    h = make(kv_policy, contiguous=kv_policy != "paged", batching=batching)
    expected = {}
    for i in range(3):
        for name, shape in MIXED.items():
            prompt = list(range(i, i + 3 + 4 * i))
            request = h.submit(f"{name}{i}", prompt, max_tokens=7 + i, **shape)
            expected[request.request_id] = expected_outputs(prompt, request.sampling)
    h.run()
    for name, outputs in expected.items():
        n = h.last(name).index + 1
        assert [h.tokens(name, index) for index in range(n)] == outputs[:n], name
    assert h.engine.load().num_blocks_used == 0


@pytest.mark.parametrize(
    ("kv_policy", "num_prompt_tokens", "max_tokens", "num_tokens"),
    [
        ("reserve-max", 4, 9, 32),
        ("reserve-pow2", 4, 9, 4 + 16),
        ("reserve-pow2", 4, 8, 4 + 8),  # itself a power of two
        ("reserve-pow2", 20, 9, 32),  # and no more than max_model_len
        ("reserve-oracle", 4, 9, 4 + 9),
    ],
)
def test_a_region_is_what_the_policy_says(kv_policy, num_prompt_tokens, max_tokens, num_tokens):
    memory = reserved_memory(64, max_model_len=32, policy=kv_policy)
    assert memory.num_region_blocks(num_prompt_tokens, max_tokens) == -(-num_tokens // 4)


def test_a_region_is_taken_from_the_smallest_hole_that_holds_it():
    buddies = BuddyAllocator(24)  # 16 blocks and 8
    assert [buddies.allocate(5), buddies.allocate(16)] == [17, 1]


def test_what_is_reserved_and_what_is_stored_of_it():
    # 4 tokens of prompt and 8 to sample: regions of three blocks of four, which are cut from holes of four.
    memory = reserved_memory(8, max_model_len=32, policy="reserve-oracle")
    assert [memory.can_ever_fit(group_of(4, n=n)) for n in (1, 2, 3)] == [True, True, False]
    group = group_of(4)
    assert memory.can_admit(group, 0)
    assert memory.num_reserved_slots() == 0  # it was a question
    memory.admit(group)
    (sequence,) = group.sequences
    memory.grow(sequence, 4)
    sequence.set_num_computed_tokens(4)
    assert (memory.num_reserved_slots(), memory.num_stored_tokens(group.sequences, NO_LENS)) == (16, 4)
    assert memory.num_stored_tokens(group.sequences, np.array([3, 2], np.int32)) == 9  # rows count their own
    group.move_to(Status.FINISHED)
    assert memory.num_stored_tokens(group.sequences, NO_LENS) == 4  # of a static batch: it keeps its region
    memory.release(sequence)
    assert (memory.num_reserved_slots(), memory.num_stored_tokens(group.sequences, NO_LENS)) == (0, 0)


@pytest.mark.parametrize(
    ("kv_policy", "num_reserved"), [("reserve-max", 8), ("reserve-pow2", 8), ("reserve-oracle", 4)]
)
def test_a_region_is_held_from_admission_to_the_end(kv_policy, num_reserved):
    h = make(kv_policy)
    h.submit("a", [1, 2, 3, 4], max_tokens=9)
    used = set()
    while h.step():
        used.add(h.engine.load().num_blocks_used)
    assert used == {num_reserved, 0}


def test_reserved_memory_admits_fewer_at_once_than_paged_memory():
    running = {}
    for kv_policy in ("reserve-max", "reserve-oracle", "paged"):
        h = make(kv_policy, contiguous=False, num_blocks=16)
        for i in range(8):
            h.submit(f"r{i}", [i, i], max_tokens=6)
        h.step()
        running[kv_policy] = h.engine.load().num_running
    assert running == {"reserve-max": 2, "reserve-oracle": 8, "paged": 8}


def test_a_static_batch_begins_when_the_one_before_has_ended():
    h = make("paged", contiguous=False, batching="static", enable_prefix_caching=False)
    for i in range(16):
        h.submit(f"r{i}", [i], max_tokens=2 + 10 * (i % 2))
    while h.step():
        first, second = (range(8), range(8, 16))
        if any(h.events[f"r{i}"] for i in second):
            assert all(h.events[f"r{i}"][-1].is_last for i in first)
    assert all(h.tokens(f"r{i}") == expected_tokens([i], 2 + 10 * (i % 2)) for i in range(16))


def test_a_static_batch_keeps_the_blocks_of_those_that_ended():
    h = make("paged", contiguous=False, batching="static", overlap=False, enable_prefix_caching=False)
    h.submit("short", list(range(16)), max_tokens=1)
    h.submit("long", [1], max_tokens=3)
    used = []
    while h.step():
        used.append(h.engine.load().num_blocks_used)
    assert used[0] == used[1] == 5 and h.engine.load().num_blocks_used == 0


def test_samples_that_are_aborted_before_they_have_moved_into_their_regions_leave_nothing():
    h = make("reserve-oracle", overlap=False)
    h.submit("a", [1] * 6, max_tokens=4, n=3, temperature=1.0, seed=1)
    h.step()
    h.engine.abort("a")
    h.run()
    assert h.engine.load().num_blocks_free == 64


@given(num_blocks=st.integers(1, 100), sizes=st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40))
@settings(max_examples=60)
def test_regions_never_overlap_and_merge_again(num_blocks, sizes):
    buddies = BuddyAllocator(num_blocks)
    largest = 1 << (num_blocks.bit_length() - 1)
    held: list[tuple[int, int, set[int]]] = []
    for size, releases in sizes:
        num_holes = buddies.num_holes(size)
        if num_holes:
            first = buddies.allocate(size)
            assert buddies.num_holes(size) == num_holes - 1
            rounded = 1 << (size - 1).bit_length()
            region = set(range(first, first + rounded))
            assert region <= set(range(1, num_blocks + 1))
            assert all(not region & other for _, _, other in held)
            held.append((first, size, region))
        if releases and held:
            begin, count, _ = held.pop(len(held) // 2)
            buddies.release(begin, count)
        assert buddies.num_free == num_blocks - sum(len(region) for _, _, region in held)
    for begin, count, _ in held:
        buddies.release(begin, count)
    assert buddies.num_free == num_blocks
    assert buddies.allocate(largest) == 1
    with pytest.raises(InternalError, match=f"no free region has {largest} blocks"):
        buddies.allocate(largest)


@pytest.mark.long
@given(
    kv_policy=st.sampled_from(RESERVE_POLICIES),
    batching=st.sampled_from(["continuous", "static"]),
    num_blocks=st.integers(24, 40),
    requests=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.sampled_from(sorted(MIXED)), st.integers(0, 3)),
        max_size=8,
    ),
)
@settings(max_examples=40)
def test_nothing_is_lost_whatever_comes_and_goes(kv_policy, batching, num_blocks, requests):
    h = make(kv_policy, num_blocks=num_blocks, batching=batching)
    expected = {}
    for i, (prompt_len, max_tokens, shape, num_steps) in enumerate(requests):
        prompt = list(range(i, i + prompt_len))
        request = h.submit(f"r{i}", prompt, max_tokens=max_tokens, **MIXED[shape])
        expected[f"r{i}"] = expected_outputs(prompt, request.sampling)
        for _ in range(num_steps):
            h.step()
        if num_steps == 3:
            h.engine.abort(f"r{i}")
            expected.pop(f"r{i}")
    h.run()
    assert h.engine.load().num_blocks_free == num_blocks
    for name, outputs in expected.items():
        if h.last(name).error is None:
            assert h.tokens(name) == outputs[0]
