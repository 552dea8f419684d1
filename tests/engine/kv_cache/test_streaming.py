"""First tokens are held beside a window: by who runs, who forks, who is swapped, and who finds them by their keys."""

import dataclasses

import pytest

from jpaged.engine.executor.io import WindowSpec
from jpaged.engine.kv_cache.blocks import group_block_hash
from jpaged.engine.kv_cache.eviction.policies import EVICTION_POLICIES
from jpaged.engine.kv_cache.offload.transfer import BlockHashChain, BlockPosition
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.engine.sequence import Status
from jpaged.testing import FakeExecutor, SeveralStepsExecutor, expected_tokens, seeing
from tests.engine.harness import Harness
from tests.engine.kv_cache.test_windows import compute, group_of, held, pinned, settle

WINDOWS = ((6, 5), (3, 5))
"""Two groups; blocks of four, so that two of them hold the first tokens."""


def memory_of(num_blocks=60, **sizes):
    return PagedKVCacheManager(seeing(WINDOWS)(num_blocks=num_blocks, max_num_batched_tokens=8, **sizes).geometry)


def test_what_lies_between_first_tokens_and_window_is_given_up():
    memory = memory_of()
    leader = compute(memory, group_of(range(30)))
    assert held(leader) == [[0, 1, 5, 6, 7], [0, 1, 6, 7]]
    assert (leader.kv.ids_gm > 0).sum() == memory.use().num_referenced == 9
    memory.release(leader)
    assert (memory.use().num_referenced, memory.use().num_cached) == (0, 2 * 7)


@pytest.mark.parametrize("num_tokens", range(1, 40))
@pytest.mark.parametrize("window", [1, 6])
def test_no_more_is_held_than_was_promised(num_tokens, window):
    reach = WindowSpec.of(window, 4, 8, num_sink_tokens=5)
    for start in range(num_tokens):
        end = min(num_tokens, start + 8)
        num_held = len(reach.visible_blocks(reach.first_block(start // 4), -(-end // 4)))
        assert num_held <= reach.num_held(-(-end // 4)) <= reach.num_blocks(num_tokens, [num_tokens])
    assert len(reach.visible_blocks(reach.first_block(num_tokens // 4), -(-num_tokens // 4))) == reach.num_kept(
        num_tokens
    )


def test_a_fork_holds_what_its_parent_holds():
    memory = memory_of()
    leader = compute(memory, group := group_of(range(30), n=2))
    child = group.sequences[1]
    memory.fork(leader, child)
    assert held(child) == held(leader)
    memory.check([group])
    memory.release(child)
    memory.release(leader)
    assert memory.use().num_referenced == 0


def test_what_is_swapped_comes_back_to_its_place():
    memory = memory_of(num_host_blocks=12)
    leader = compute(memory, group := group_of(range(30)))
    before = held(leader)
    memory.swapping.swap_out(group)
    group.move_to(Status.SWAPPED)
    assert memory.use().num_referenced == 0
    memory.swapping.swap_in(group)
    assert held(leader) == before
    memory.check([group])


def test_who_goes_back_keeps_first_tokens_or_runs_from_the_beginning():
    for num_tokens, num_left in ((28, 28), (23, 0)):
        memory = memory_of()
        leader = compute(memory, group := group_of(range(20)))
        leader.token_ids += range(20, 30)
        memory.grow(leader, 10)
        leader.set_num_computed_tokens(30)
        settle(memory, leader)
        leader.rewind(num_tokens)
        memory.rewind(leader)
        assert (leader.num_computed_tokens, leader.kv.num_blocks) == (num_left, num_left // 4)
        assert held(leader) == ([[0, 1, 5, 6], [0, 1, 6]] if num_left else [[], []])
        memory.check([group])


def test_a_prefix_without_its_first_tokens_is_none():
    """Seven blocks of 30 tokens are full. Who comes behind them sees the first two, and the last ones."""
    for index, num_known in ((0, 0), (1, 1), (2, 7), (4, 7), (6, 6)):
        memory = memory_of()
        leader = compute(memory, group_of(range(30)))
        key = leader.kv.keys(leader.token_ids, 7, 4)[index]
        memory.release(leader)
        block_id = memory.prefixes.cache.find(key)
        memory.prefixes.remove_block(block_id)
        memory.prefixes.num_cached -= 1
        again = group_of(range(30))
        assert memory.admit(again) // 4 == num_known, index
        memory.check([again])


def test_a_pin_keeps_first_tokens_and_the_end_of_a_window():
    pinned(WINDOWS, num_blocks=(2 + 2) + (2 + 1))


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_many_times_the_pool_run_side_by_side(overlap):
    """Each has 100 blocks or more in all, and holds 7 at most; the pool has 16."""
    windows = ((7, 5),)
    executor = seeing(windows, SeveralStepsExecutor)(
        num_blocks=16, max_num_batched_tokens=8, max_model_len=512, num_host_blocks=4
    )
    h = Harness(executor=executor, overlap=overlap, num_scheduler_steps=8, max_num_steps=3000)
    prompts = [[i * 3 % 11 for i in range(400)], [i * 5 % 13 for i in range(450)]]
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, max_tokens=40)
    h.run()
    for i, prompt in enumerate(prompts):
        assert h.tokens(f"r{i}") == expected_tokens(prompt, 40, windows=windows)
    assert h.engine.load().peak_blocks_used <= 2 * 7


class Growing(FakeExecutor):
    """Tokens cost more the more are in front of them, so that the first block costs least."""

    @property
    def rates(self):
        return dataclasses.replace(super().rates, pair_s=1e-6)


@pytest.mark.parametrize("policy", ["lru", *EVICTION_POLICIES])
def test_first_tokens_outlive_all_that_is_seen_with_them(policy):
    executor = seeing(((6, 5),), Growing)(num_blocks=14, max_num_batched_tokens=32, max_model_len=64)
    h = Harness(executor=executor, eviction_policy=policy)
    text = list(range(60, 92))
    for name in ("first", "again"):
        h.submit(name, text, max_tokens=2)
        h.run()
    prefixes, lens = h.engine.prefixes, []
    assert prefixes is not None
    for i in range(6):
        h.submit(f"other {i}", [120 + 9 * i + j for j in range(9)], max_tokens=2)
        h.run()
        keys = group_of(text).live[0].kv.keys(text, 8, 4)
        known = [prefixes.cache.find(key) is not None for key in keys]
        assert known[:2] == sorted(known[:2], reverse=True)
        assert all(known[:2]) or not any(known[2:]), "blocks are kept that nobody can use"
        lens.append(sum(known))
    assert lens[0] > lens[-1]


def test_a_chain_that_travels_needs_its_first_tokens():
    reaches = (WindowSpec.of(6, 4, 8, num_sink_tokens=5), WindowSpec.of(6, 4, 8), WindowSpec.of(None, 4, 8))
    chain = BlockHashChain.of(b"root", range(24), 4)
    for index in range(6):
        above = [chain.entry(BlockPosition(index, group), reaches).parent for group in range(3)]
        sinks = None if index == 0 else chain.keys[min(index, 2) - 1]
        before = None if index == 0 else group_block_hash(chain.keys[index - 1], 2)
        assert above == [sinks, None, before]
