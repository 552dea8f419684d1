"""Data-parallel attention: every sequence has all its blocks on one device, and each device its share of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.engine.executor import BucketTable
from jpaged.engine.kv_cache.blocks import BlockPool, BlockTable
from jpaged.engine.kv_cache.pinned import pin_limit
from jpaged.engine.scheduler.output import padded_for_ranks
from jpaged.errors import InternalError, InvalidArgument, RequestTooLong
from jpaged.testing import SeveralStepsExecutor
from tests.engine.harness import Harness
from tests.engine.lives import Life


class TwoRanks(SeveralStepsExecutor):
    """A fake of two devices, each with half of the blocks, and no host memory. It checks every step."""

    dp_size = 2

    def __init__(self, **sizes: Any) -> None:
        sizes = {**sizes, "num_blocks": 2 * sizes["num_blocks"], "max_num_seqs": 8, "num_host_blocks": 0}
        super().__init__(**sizes)


@pytest.mark.parametrize("first", range(0, 20, 10))
@pytest.mark.thinned(2)
def test_lives_on_two_devices_sample_every_token_as_if_alone(first: int) -> None:
    for seed in range(first, first + 10):
        options = {"batching": "continuous", "num_speculative_tokens": 0, "preemption_mode": "recompute"}
        Life(seed, kind=TwoRanks, **options).run()


def harness(num_blocks: int = 8, **options: Any) -> Any:
    executor = TwoRanks(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=32, max_model_len=64)
    return Harness(executor=executor, **options)


def ranks(h: Any) -> dict[str, int]:
    """The device of each running request."""
    return {group.request.request_id: group.rank for group in h.engine._loop.scheduler.queues.running}


def test_requests_are_distributed_over_the_devices() -> None:
    h = harness()
    for first in range(4):
        h.submit(str(first), list(range(20 * first, 20 * first + 10)), max_tokens=6)
    while h.engine._loop.scheduler.queues.num_rows < 4:
        h.step()
    assert sorted(ranks(h).values()) == [0, 0, 1, 1], "each device has 8 blocks, and a request needs 4"
    h.run()
    assert not any(event.error for first in range(4) for event in h.events[str(first)])


def test_a_prefix_is_found_on_the_device_that_has_it() -> None:
    h = harness()
    prompt = list(range(1, 14))
    h.submit("other", list(range(40, 45)), max_tokens=20)
    h.submit("a", prompt, max_tokens=2)
    while not h.ended("a"):
        h.step()
    h.submit("b", [*prompt, 99], max_tokens=4)
    while "b" not in ranks(h):
        h.step()
    assert ranks(h) == {"other": 0, "b": 1}
    h.run()
    assert h.engine.load().num_prefix_hit_tokens >= 12


def test_a_device_gets_its_share_of_the_rows_even_if_it_has_the_prefix_of_all() -> None:
    h = harness(num_blocks=60)
    prompt = list(range(1, 14))
    h.submit("first", prompt, max_tokens=2)
    h.run()
    for index in range(8):
        h.submit(str(index), [*prompt, 20 + index], max_tokens=20)
    while h.engine._loop.scheduler.queues.num_rows < 8:
        h.step()
    assert sorted(ranks(h).values()) == [0] * 4 + [1] * 4
    h.run()


def test_tokens_of_the_previous_step_preempt_no_request() -> None:
    h = harness(num_blocks=60, policy="priority")
    for first in (0, 1):
        h.submit(f"low {first}", list(range(first, first + 40)), max_tokens=4, priority=5)
    h.step()
    h.step()
    assert h.engine.load().num_running == 2
    h.submit("high", [1, 2, 3], max_tokens=4, priority=0)
    h.run()
    assert h.engine.load().num_preemptions == 0


def test_a_request_must_fit_onto_one_device() -> None:
    h = harness()
    with pytest.raises(RequestTooLong, match=r"over the whole pool \(32: 8 blocks of 4\)"):
        h.submit("long", list(range(30)), max_tokens=10)
    with pytest.raises(InvalidArgument, match=r"5 is over max_num_seqs over 2 devices \(4\)"):
        h.submit("wide", [1], n=5, max_tokens=1)


def test_pinned_prefixes_leave_room_for_the_longest_request_on_every_device() -> None:
    geometry = TwoRanks(num_blocks=20, block_size=4, max_model_len=64).geometry
    assert (pin_limit(None, geometry), pin_limit(4, geometry)) == (4, 4)
    with pytest.raises(InvalidArgument, match=r"5 is over 4: .* may need 16 of 20 blocks of a device"):
        pin_limit(5, geometry)


def test_a_limited_pool_leaves_room_for_each_request_on_a_device() -> None:
    h = harness()
    h.submit("needs six", list(range(10)), max_tokens=14)
    h.step()
    (refused,), (limited,) = h.engine.inspector.limit(11), h.engine.inspector.limit(12)
    h.step()
    assert "11 blocks are fewer than the 12" in str(refused.exception())
    assert limited.exception() is None
    h.submit("needs seven", list(range(30, 40)), max_tokens=18)
    h.run()
    assert len(h.tokens("needs six")) == 14
    assert "into the pool of a device, which has 6 blocks" in str(h.last("needs seven").error)


def test_a_part_of_the_pool_has_its_own_free_list() -> None:
    pool = BlockPool(num_blocks=6, block_size=4, dp_size=2)
    assert (pool.allocate(2, 1), pool.get_num_free(0), pool.get_num_free(1)) == ([4, 5], 3, 1)
    assert pool.can_allocate(3, 0) and not pool.can_allocate(2, 1)
    with pytest.raises(InternalError, match="2 blocks requested, but 1 of 3 are free"):
        pool.allocate(2, 1)
    table = BlockTable(3)
    table.extend([4, 5])
    pool.release(table)
    assert pool.get_num_free(1) == 3
    assert pool.allocate_last(3) == [3, 6, 2], "of all parts equally many"


def test_programs_have_equal_places_for_each_device() -> None:
    buckets = BucketTable.build(max_num_batched_tokens=50, max_num_seqs=10, max_num_steps=2, multiple=4)
    assert (buckets.tokens, buckets.rows) == ((32, 52), (32,))
    geometry = TwoRanks(num_blocks=8, block_size=4).geometry
    lens_s = np.array([3, 1, 1], np.int32)
    assert padded_for_ranks(geometry, 5, np.array([1, 8, 9], np.int32), lens_s) == 8, "4 tokens of the first device"
    assert padded_for_ranks(geometry, 5, np.array([1, 9, 16], np.int32), lens_s) == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_parallel_size", 2),
        ("kv_policy", "reserve-max"),
        ("batching", "static"),
        ("speculative_config", '{"method": "suffix"}'),
        ("enable_lora", True),
        ("swap_space", 2.0),
        ("eviction_policy", "lfu"),
        ("lossy_kv_window", 64),
        ("kv_events_endpoint", "tcp://*:5557"),
        ("role", "prefill"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"enable_dp_attention: is on, and does not support {name}"):
        EngineConfig.load({"enable_dp_attention": True, name: value})


def test_no_block_moves_to_the_host() -> None:
    assert EngineConfig.load({"enable_dp_attention": True}).cache.swap_space == 0
