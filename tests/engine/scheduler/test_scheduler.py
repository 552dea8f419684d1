"""Who is let in, who has to leave and what it costs, with three and more running: every number worked out by hand."""

import pytest

from jpaged.engine.executor import DeviceRates
from jpaged.engine.scheduler.scheduler import Preemption
from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.groups import group_of, num_swapped_blocks
from tests.engine.harness import Harness

# --- who leaves -------------------------------------------------------------------------------------------------------


def make(
    policy="fcfs",
    max_num_seqs=8,
    preemption_mode="recompute",
    enable_prefix_caching=False,
    long_prefill_token_threshold=0,
    **pool,
):
    executor = FakeExecutor(max_num_seqs=max_num_seqs, block_size=4, **{"max_num_batched_tokens": 512} | pool)
    return Harness(
        executor=executor,
        long_prefill_token_threshold=long_prefill_token_threshold,
        policy=policy,
        overlap=False,
        preemption_mode=preemption_mode,
        enable_prefix_caching=enable_prefix_caching,
    )


def running(h):
    return [group.request.request_id for group in h.engine._loop.scheduler.queues.running]


def preempted(h):
    """How often each request that has not ended was preempted, where it was."""
    counts = {name: group.num_preemptions for name, group in h.engine._loop.groups.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("grower", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_in_order_makes_room_whoever_needs_it(policy, grower):
    # Four blocks for four prompts, and one that is left. In the second step three samples write to the block that they
    # share, which takes two copies: one more block than there is, and one preemption gives one.
    h = make(policy, num_blocks=5)
    arrivals = range(4) if policy == "fcfs" else range(3, -1, -1)  # by priority the last to arrive is the first
    for place in arrivals:
        shape = {"n": 3, "temperature": 1.0, "seed": 5} if place == grower else {}
        h.submit(f"r{place}", [place, 9], max_tokens=2, priority=place, **shape)
    h.step()
    assert running(h) == ["r0", "r1", "r2", "r3"]
    h.step()
    assert preempted(h) == {"r3": 1}
    h.run()
    for place in range(4):
        seeds = [5] * 3 if place == grower else [None]
        expected = [expected_tokens([place, 9], 2, seed=seed, sequence_index=i) for i, seed in enumerate(seeds)]
        assert [h.tokens(f"r{place}", i) for i in range(len(seeds))] == expected


@pytest.mark.parametrize(
    ("priorities", "urgent", "leaves"),
    [
        ([1, 2, 3], 0, ["r2"]),
        ([3, 2, 1], 0, ["r0"]),
        ([1, 3, 3, 2], 2, ["r2"]),  # of equals the one that came last; who is not above 2 stays
        ([1, 2, 2], 2, []),
    ],
)
def test_an_urgent_request_takes_the_row_of_the_last_in_order(priorities, urgent, leaves):
    h = make("priority", max_num_seqs=len(priorities))
    for i, priority in enumerate(priorities):
        h.submit(f"r{i}", [i, 9], max_tokens=9, priority=priority)
        h.step()
    h.submit("urgent", [7], max_tokens=2, priority=urgent)
    h.step()
    assert list(preempted(h)) == leaves
    assert ("urgent" in running(h)) == bool(leaves)
    h.run()
    assert h.tokens("urgent") == expected_tokens([7], 2)


def test_urgent_requests_take_as_many_blocks_as_they_need_and_no_more():
    # Each running one has a block, and a second by its fourth token; six of eight are held when five are asked for.
    h = make("priority", num_blocks=8)
    for i in range(3):
        h.submit(f"r{i}", [i, 9, 9], max_tokens=5, priority=5)
    for _ in range(3):
        h.step()
    assert h.engine.load().num_blocks_used == 6
    # Five for the prompt and one to spare: two are free, and two victims give two each.
    h.submit("urgent", [7] * 20, max_tokens=2, priority=0)
    h.step()
    assert preempted(h) == {"r1": 1, "r2": 1}
    assert running(h) == ["urgent", "r0"]
    h.run()


def test_an_urgent_request_does_not_count_on_blocks_that_others_were_promised():
    # Of ten blocks "low" has two and is promised three; six and one to spare are not free besides those.
    h = make("priority", num_blocks=10, max_num_batched_tokens=8)
    h.submit("low", [1] * 20, max_tokens=2, priority=5)
    h.step()
    h.submit("urgent", [7] * 24, max_tokens=2, priority=0)
    h.step()
    assert preempted(h) == {"low": 1}
    assert running(h) == ["urgent"]
    h.run()


def test_nobody_is_let_in_by_a_step_that_somebody_had_to_leave():
    # Three samples need two copies where one block is free: "b" leaves, and two of its three blocks are left.
    h = make("fair", num_blocks=5)
    h.submit("a", [1, 9], max_tokens=2, n=3, temperature=1.0, seed=5, tenant="a")
    h.submit("b", [2] * 9, max_tokens=2, tenant="b")
    h.submit("gone", [4] * 16, max_tokens=1, tenant="gone")
    h.step()
    h.submit("new", [3], max_tokens=1, tenant="new")  # served as little as "gone", which waits: before "b"
    h.engine.abort("gone")
    h.step()
    assert preempted(h) == {"b": 1}
    assert not h.events["new"]
    h.run()


@pytest.mark.parametrize(("enable_prefix_caching", "num_recomputed_tokens"), [(False, 10), (True, 2)])
def test_what_is_cached_is_not_counted_as_computed_again(enable_prefix_caching, num_recomputed_tokens):
    # The same, without the others: "b" had nine tokens and one sampled, in two full blocks and a third.
    h = make(num_blocks=5, enable_prefix_caching=enable_prefix_caching)
    h.submit("a", [1, 9], max_tokens=2, n=3, temperature=1.0, seed=5)
    h.submit("b", [2] * 9, max_tokens=2)
    h.run()
    load = h.engine.load()
    assert (load.num_preemptions, load.num_recomputed_tokens) == (1, num_recomputed_tokens)


def test_who_leaves_a_static_batch_leaves_nothing_behind():
    # "b" has two samples, of which one has ended. In the third step "a" takes the last of six blocks, "b" finds none.
    h = Harness(executor=FakeExecutor(block_size=4, num_blocks=6), batching="static", overlap=False)
    first, second = [expected_tokens([2] * 7, 4, seed=5, sequence_index=i) for i in range(2)]
    assert second[0] not in first
    h.submit("a", [1] * 7, max_tokens=6)
    h.submit("b", [2] * 7, max_tokens=4, n=2, temperature=1.0, seed=5, stop_token_ids=[second[0]])
    h.step()
    assert h.tokens("b", 1) == second[:1]
    h.step()
    h.step()
    assert preempted(h) == {"b": 1}
    assert h.engine.load().num_blocks_used == 3
    h.run()
    assert h.tokens("b", 0) == first


def test_a_sample_that_ends_while_its_static_batch_is_out_leaves_nothing_behind():
    # The same, but the sample's last token is in flight when "b" leaves.
    executor = FakeExecutor(block_size=4, num_blocks=6, num_host_blocks=6)
    h = Harness(executor=executor, batching="static", preemption_mode="swap", enable_prefix_caching=False)
    first, second = [expected_tokens([2] * 7, 4, seed=5, sequence_index=i) for i in range(2)]
    assert second[1] not in (second[0], *first)
    h.submit("a", [1] * 7, max_tokens=6)
    h.submit("b", [2] * 7, max_tokens=4, n=2, temperature=1.0, seed=5, stop_token_ids=[second[1]])
    for _ in range(3):
        h.step()
    assert preempted(h) == {"b": 1}
    assert h.tokens("b", 1) == second[:2]
    assert num_swapped_blocks(h.engine._loop.memory) == 2  # of the three that left, one was its own
    h.run()
    assert h.tokens("b", 0) == first


def test_who_left_first_comes_back_last_whichever_way_they_left():
    # As above, and host memory has room for one of the two that leave.
    h = make("priority", preemption_mode="swap", num_blocks=8, num_host_blocks=2)
    for i in range(3):
        h.submit(f"r{i}", [i, 9, 9], max_tokens=5, priority=5)
    for _ in range(3):
        h.step()
    h.submit("urgent", [7] * 20, max_tokens=2, priority=0)
    h.step()
    scheduler = h.engine._loop.scheduler
    assert [group.request.request_id for group in scheduler.queues.swapped] == ["r2"]
    assert [group.request.request_id for group in scheduler.queues.waiting] == ["r1"]
    assert scheduler.queues.next_group().request.request_id == "r1"
    h.submit("urgent too", [1] * 20, max_tokens=1, priority=1)
    h.engine.abort("r1")
    h.step()
    assert scheduler.queues.next_group().request.request_id == "urgent too"  # "r2" would leave for it again
    h.run()
    assert h.tokens("r2") == expected_tokens([2, 9, 9], 5)


# --- who is let in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "is_admitted"), [(188, True), (189, False)])
@pytest.mark.parametrize("begins_together", [True, False])
def test_blocks_that_were_promised_and_a_hundredth_of_the_pool_are_left(begins_together, num_tokens, is_admitted):
    # Of 200 blocks "a" has 150 and is promised one more for the token that it has sampled; two are spare: 47 are left.
    h = make(num_blocks=200, max_model_len=800, max_num_batched_tokens=1024 if begins_together else 512)
    h.submit("a", [1] * 600, max_tokens=9)
    if not begins_together:
        h.step()  # 512 tokens: what "a" was promised is 22 blocks before the next, and one after it
    h.submit("b", [2] * num_tokens, max_tokens=1)
    h.step()
    assert running(h) == ["a"] + ["b"] * is_admitted or h.last("b").usage.completion_tokens == is_admitted
    assert bool(h.events["b"]) == is_admitted
    h.run()


def test_a_group_alone_needs_to_leave_nothing():
    h = make(num_blocks=10, max_model_len=40)
    h.submit("a", [1] * 39, max_tokens=1)
    h.step()
    assert h.tokens("a") == expected_tokens([1] * 39, 1)


def test_a_step_without_tokens_left_lets_nobody_in():
    h = make(max_num_batched_tokens=16)
    h.submit("a", [1] * 16, max_tokens=2)
    h.submit("b", [2], max_tokens=1)
    h.step()
    assert running(h) == ["a"]
    h.run()


@pytest.mark.parametrize(("num_ends", "is_next_batch"), [(0, False), (1, False), (2, False), (3, True)])
def test_a_static_batch_is_closed_until_its_last_has_ended(num_ends, is_next_batch):
    h = Harness(executor=FakeExecutor(max_num_seqs=4, block_size=4, num_blocks=64), batching="static", overlap=False)
    for i in range(3):
        h.submit(f"r{i}", [i], max_tokens=2 * (i + 1))
    h.step()
    h.submit("next", [9], max_tokens=3)
    h.submit("next too", [8], max_tokens=3)
    for _ in range(2 * num_ends):
        h.step()
    assert [name for name in ("r0", "r1", "r2") if h.events[name][-1].is_last] == ["r0", "r1", "r2"][:num_ends]
    assert [name in running(h) for name in ("next", "next too")] == [is_next_batch] * 2
    h.run()


def test_a_static_batch_makes_way_for_nobody():
    h = Harness(executor=FakeExecutor(max_num_seqs=2), batching="static", policy="priority", overlap=False)
    for i in range(2):
        h.submit(f"r{i}", [i], max_tokens=4, priority=5)
    h.step()
    h.submit("urgent", [9], max_tokens=2, priority=0)
    h.step()
    assert running(h) == ["r0", "r1"]
    h.run()
    assert h.engine.load().num_preemptions == 0


# --- which way out ----------------------------------------------------------------------------------------------------


def test_auto_counts_a_shared_block_and_the_prompt_once():
    # Two blocks of prompt that both share, and one of each: four. Eight tokens of prompt, and one of each: ten.
    group = group_of(8, n=2)
    for sequence, own in zip(group.sequences, (3, 4), strict=True):
        sequence.kv.tables[0].extend([1, 2, own])
        sequence.token_ids.append(200)
    rates = DeviceRates(swap_out_bytes_per_s=1000.0, swap_in_bytes_per_s=500.0, forward_s=((10, 1.0),))
    preemption = Preemption("auto", 100, rates)
    assert preemption.swap_s(group) == pytest.approx(400 / 1000 + 400 / 500)
    assert preemption.recompute_s(group) == pytest.approx(10 / 10)
    assert not preemption.prefers_swap(group)
    assert Preemption("auto", 80, rates).prefers_swap(group)  # 0.96 s; six blocks, or no prompt, would say otherwise


def test_parts_of_prompts_change_no_token_and_end_for_beams_that_are_recomputed():
    found = []
    for threshold in (0, 2):
        h = make(num_blocks=9, long_prefill_token_threshold=threshold)
        for place in range(3):
            h.submit(f"r{place}", [place] * 7, max_tokens=9)
        h.submit("beams", [9] * 5, max_tokens=6, beam_width=3)
        h.run()
        load = h.engine.load()
        assert load.num_preemptions > 0
        tokens = [h.tokens(f"r{place}") for place in range(3)] + [h.tokens("beams", place) for place in range(3)]
        found.append((load.num_steps, tokens))
    assert found[0][0] < found[1][0]
    assert found[0][1] == found[1][1]
