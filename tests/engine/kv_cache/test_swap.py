"""A group that makes room leaves whole and comes back whole, before anybody new."""

from typing import Any

import pytest

from jpaged.engine.executor import DeviceRates, Move
from jpaged.engine.scheduler.scheduler import Preemption
from jpaged.engine.sequence import SequenceGroup
from jpaged.testing import FakeExecutor, expected_tokens, seeing
from jpaged.types import Request, SamplingParams
from tests.engine.harness import Harness


class MovesExecutor(FakeExecutor):
    """Remembers the moves."""

    def __init__(self, **pool):
        super().__init__(**pool)
        self.moves = []

    def move_blocks(self, moves):
        self.moves.append(moves)
        super().move_blocks(moves)

    def moved(self, move):
        return [moves for moves in self.moves if moves.move is move]


def make(num_blocks=16, num_host_blocks=32, **options):
    executor = MovesExecutor(block_size=4, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    return Harness(executor=executor, preemption_mode="swap", enable_prefix_caching=False, **options)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request):
    return request.param


def test_a_swapped_sequence_goes_on_where_it_was(overlap):
    h = make(overlap=overlap, num_blocks=9)
    for name in ("a", "b", "c"):
        h.submit(name, [1, 2, 3], max_tokens=16)
    h.run()
    load = h.engine.load()
    assert load.num_blocks_swapped_out == load.num_blocks_swapped_in > 0
    assert load.num_recomputed_tokens == 0
    for name in ("a", "b", "c"):
        assert h.tokens(name) == expected_tokens([1, 2, 3], 16)


def test_blocks_that_a_group_shares_leave_once_and_are_shared_again(overlap):
    h = make(overlap=overlap, num_blocks=18)
    prompt = list(range(16))
    for name in ("a", "b"):
        h.submit(name, prompt, max_tokens=16, n=3, temperature=1.0, seed=4)
    h.run()
    for name in ("a", "b"):
        expected = [expected_tokens(prompt, 16, seed=4, sequence_index=i) for i in range(3)]
        assert [h.tokens(name, i) for i in range(3)] == expected
    (out,) = h.executor.moved(Move.SWAP_OUT)
    (back,) = h.executor.moved(Move.SWAP_IN)
    # Four blocks of prompt for all, and what each of the three had sampled: never three times the prompt.
    assert len(set(out.sources)) == len(out.sources) == len(back.sources) <= 4 + 3 * 3
    assert sorted(back.sources) == sorted(out.destinations)
    # Sharing would be lost if a block came back once for every holder.
    assert h.engine.load().peak_blocks_used <= 18


def test_nobody_new_is_admitted_while_a_group_is_out(overlap):
    h = make(overlap=overlap, num_blocks=9)
    for name in ("a", "b"):
        h.submit(name, [1, 2, 3], max_tokens=24)
    while h.engine.load().num_swapped == 0:
        h.step()
    h.submit("new", [9], max_tokens=1)
    while h.engine.load().num_swapped:
        assert not h.events["new"]
        h.step()
    h.run()
    assert h.tokens("new") == expected_tokens([9], 1)


def test_groups_come_back_in_order_of_arrival(overlap):
    h = make(overlap=overlap, num_blocks=12)
    names = ["a", "b", "c", "d"]
    for name in names:
        h.submit(name, [1, 2, 3], max_tokens=25)
    ended = []
    while h.step():
        ended += [name for name in names if h.events[name] and h.events[name][-1].is_last and name not in ended]
    assert h.engine.load().num_blocks_swapped_out > 0
    assert ended == names


def test_without_room_in_host_memory_a_group_is_computed_again(overlap):
    h = make(overlap=overlap, num_blocks=9, num_host_blocks=1)
    for name in ("a", "b", "c"):
        h.submit(name, [1, 2, 3], max_tokens=16)
    h.run()
    load = h.engine.load()
    assert load.num_preemptions > 0 and load.num_recomputed_tokens > 0
    assert load.num_blocks_swapped_out == 0
    assert h.tokens("c") == expected_tokens([1, 2, 3], 16)


@pytest.mark.parametrize("windows", [(None, 5), (6,), (17, 16, 15)], ids=str)
@pytest.mark.parametrize("num_steps_before", [1, 2, 3])
def test_samples_that_leave_just_behind_their_prompt_find_room_again(windows, num_steps_before, overlap):
    """Their windows hold the whole of the prompt's last chunk then, and memory has no more than they need."""
    kind, prompt = seeing(windows), [i * 7 % 50 for i in range(32)]
    sizes: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 128}

    def answer(num_blocks, *, is_disturbed):
        executor = kind(num_blocks=num_blocks, num_host_blocks=100, **sizes)
        h = Harness(executor=executor, overlap=overlap, policy="priority", preemption_mode="swap")
        h.submit("a", prompt, max_tokens=4, n=2, temperature=1.0, seed=1, priority=1)
        for _ in range(num_steps_before):
            h.step()
        if is_disturbed:
            h.submit("b", [3] * 20, max_tokens=2, priority=0)
        h.run()
        return [h.tokens("a", i) for i in range(2)]

    num_blocks = kind(num_blocks=1000, **sizes).geometry.num_blocks_alone(len(prompt), 4, 2)
    assert answer(num_blocks, is_disturbed=True) == answer(1000, is_disturbed=False)


def test_an_aborted_group_leaves_nothing_in_host_memory():
    h = make(num_blocks=9)
    for name in ("a", "b"):
        h.submit(name, [1, 2, 3], max_tokens=24)
    while h.engine.load().num_swapped == 0:
        h.step()
    h.engine.abort("b")
    h.run()  # checks both pools after every step
    assert h.last("b").finish is not None
    assert h.engine.load().num_blocks_swapped_in == 0


def test_blocks_leave_in_a_step_that_has_no_rows_too():
    # "a" waits for its last token when "b", alone with rows to run, finds no block and leaves.
    h = make(num_blocks=5, num_host_blocks=4)
    h.submit("a", [87, 13, 9], max_tokens=6)
    h.submit("b", [0, 1, 2, 3, 216, 179, 156], max_tokens=12)
    h.run()
    assert h.engine.load().num_blocks_swapped_out == 3
    assert h.tokens("b") == expected_tokens([0, 1, 2, 3, 216, 179, 156], 12)


@pytest.mark.parametrize(
    ("copy_bytes_per_s", "prefill_tokens_per_s", "prefers_swap"),
    [(1e9, 1e3, True), (1e3, 1e9, False)],
)
def test_auto_takes_the_cheaper_way_out(copy_bytes_per_s, prefill_tokens_per_s, prefers_swap):
    group = SequenceGroup(Request("a", tuple(range(8)), SamplingParams(temperature=0.0)), 0, 0.0, print, 4)
    group.sequences[0].kv.tables[0].extend([1, 2])
    rates = DeviceRates(copy_bytes_per_s, copy_bytes_per_s, ((1, 1 / prefill_tokens_per_s),))
    preemption = Preemption("auto", 1000, rates)
    assert preemption.swap_s(group) == pytest.approx(2 * 2 * 1000 / copy_bytes_per_s)
    assert preemption.recompute_s(group) == pytest.approx(8 / prefill_tokens_per_s)
    assert preemption.prefers_swap(group) is prefers_swap
    assert Preemption("swap", 1000, rates).prefers_swap(group)
    assert not Preemption("recompute", 1000, rates).prefers_swap(group)
