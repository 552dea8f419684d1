"""Host blocks that others than the device read and write: held, settled, taken in, and counted."""

import pytest

from jpaged.engine.executor import Move
from jpaged.engine.kv_cache.blocks import BlockCopyPlan
from jpaged.engine.kv_cache.eviction.cost_aware import BlockCosts
from jpaged.engine.kv_cache.eviction.free_list import CachedBlock
from jpaged.engine.kv_cache.eviction.policies import EVICTION_POLICIES, Eviction
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.errors import InternalError
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.engine.harness import CheckedHarness, Harness
from tests.engine.kv_cache.oracle import expected_outputs

KEYS = [bytes([i]) * 32 for i in range(8)]


class Landing:
    """Blocks that land when they are told to."""

    bytes_per_block = 0
    place = None

    def __init__(self):
        self.on_the_way = set()

    def have_landed(self, block_ids):
        return self.on_the_way.isdisjoint(block_ids)

    def view(self, block_id):
        raise AssertionError(f"nobody reads block {block_id} here")

    def read(self, block_ids, host_block_ids):
        raise AssertionError(f"no data port reads blocks {block_ids} here")

    def receive(self, contents, block_ids):
        raise AssertionError(f"no data port writes blocks {block_ids} here")

    def kv_identity(self):
        return b""


@pytest.fixture
def tier():
    landing, ops = Landing(), BlockCopyPlan()
    tier = HostTier(6, 4, ops, blocks=landing)
    return tier, ops, landing


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_of_what_is_taken_in_the_end_of_a_chain_goes_first_and_what_is_unknown_too(policy):
    ranked = Eviction(policy, BlockCosts(1.0, 0.5, 0.1)).free_list(6)
    tier = HostTier(6, 4, BlockCopyPlan(), blocks=Landing(), ranked=ranked)
    table = tier.reserve(4)
    for i, block_id in enumerate(table.block_ids()[:3]):
        assert tier.insert(KEYS[i], block_id, CachedBlock(KEYS[i], KEYS[i - 1] if i else None, i, b""))
    assert tier.insert(KEYS[3], table.block_ids()[3])
    tier.release(table)
    tier.check([])
    gone = []
    for num_blocks in range(3, 7):
        held = tier.reserve(num_blocks)
        tier.release(held)
        tier.check([])
        gone.append([key in tier for key in KEYS[:3]])
    assert all(kept == sorted(kept, reverse=True) for kept in gone), "a block was kept behind a gap"
    assert not any(gone[-1]) and KEYS[3] not in tier


def test_a_reserved_block_is_found_once_it_is_taken_in(tier):
    tier, _, _ = tier
    table = tier.reserve(2)
    first, second = table.block_ids()
    assert KEYS[0] not in tier
    assert tier.insert(KEYS[0], first)
    assert KEYS[0] in tier and tier.marks[first]
    assert not tier.insert(KEYS[0], second)  # another holds it already
    with pytest.raises(InternalError, match=f"host block {first} is inserted but not reserved"):
        tier.insert(KEYS[1], first)
    tier.check([])
    tier.release(table)
    tier.check([])
    assert KEYS[0] in tier
    with pytest.raises(InternalError, match="is inserted but not reserved"):
        tier.insert(KEYS[1], second)
    with pytest.raises(InternalError, match="are released but not held"):
        tier.release(table)


def test_what_is_held_is_not_given_to_others(tier):
    tier, _, _ = tier
    for i in range(6):
        tier.keep(KEYS[i], i + 1)
    table = tier.hold([KEYS[0], KEYS[3]])
    others = tier.reserve(4)
    assert set(others.block_ids()).isdisjoint(table.block_ids())
    assert [key in tier for key in KEYS[:6]] == [True, False, False, True, False, False]
    tier.check([])
    with pytest.raises(InternalError, match="no host block has the hashes"):
        tier.hold([KEYS[1]])
    tier.release(others)
    tier.release(table)
    tier.check([])


def test_a_table_is_settled_when_its_moves_are_given_to_the_device_and_have_landed(tier):
    tier, ops, landing = tier
    tier.keep(KEYS[0], 1)
    table, seen = tier.hold([KEYS[0]]), []
    tier.on_transfers_done(table, lambda: seen.append(True))
    landing.on_the_way = {*table.block_ids()}
    tier.advance()
    assert tier.pending_callbacks and not seen  # the move is not even given to the device
    ops.take()
    tier.advance()
    assert not seen  # nor has it landed
    landing.on_the_way = set()
    tier.advance()
    assert seen and not tier.pending_callbacks
    tier.release(table)


def test_a_copy_out_of_the_device_goes_where_it_is_told(tier):
    tier, ops, _ = tier
    table = tier.reserve(1)
    (home,) = table.block_ids()
    tier.copy_out(5, home)
    (moves,) = ops.take().batches()
    assert (moves.move, moves.sources, moves.destinations) == (Move.SWAP_OUT, [5], [home])


@pytest.mark.parametrize("fault", ["freed", "lost", "stale"])
def test_a_check_sees_what_travels_go_wrong(tier, fault):
    tier, _, _ = tier
    table = tier.reserve(2)
    if fault == "freed":  # while it travels
        tier.pool.release(table)
        table.extend([1, 2])
    elif fault == "lost":
        tier._held.clear()
    else:
        tier.insert(KEYS[0], table.block_id(0))
        tier._keys[table.block_id(0)] = KEYS[1]
    with pytest.raises(InternalError):
        tier.check([])


def test_steps_go_on_until_errands_are_done():
    """An idle engine steps until what was promised has been called, and then rests."""
    h = Harness(executor=FakeExecutor(num_host_blocks=4))
    host, seen = h.engine._loop.memory.host, list[str]()
    assert host is not None
    table = host.reserve(2)
    host.on_transfers_done(table, lambda: seen.append("settled"))
    assert h.step()
    assert h.step() is False
    assert seen == ["settled"]
    assert Harness(executor=FakeExecutor()).engine._loop.memory.host is None


def test_a_block_that_was_taken_in_is_a_hit():
    """What somebody has written into host memory is used by whoever has its key, and is right."""
    h = CheckedHarness(executor=FakeExecutor(num_blocks=16, num_host_blocks=8, block_size=4))
    prompt = list(range(1, 10))
    for name in ("first", "second"):
        h.expected[name] = expected_outputs(prompt, SamplingParams(max_tokens=2, temperature=0.0), vocab_size=257)
    h.submit("first", prompt, max_tokens=2)
    h.run()
    host, prefixes, blocks = h.engine._loop.memory.host, h.engine._loop.memory.prefixes, h.executor.host_blocks
    assert host is not None and prefixes is not None and blocks is not None
    keys = [*prefixes.cache._blocks]
    table = host.reserve(len(keys))
    for key, home in zip(keys, table.block_ids(), strict=True):
        host.copy_out(prefixes.cache._blocks[key], home)
    h.step()
    sent = {key: bytes(blocks.view(home)) for key, home in zip(keys, table.block_ids(), strict=True)}
    host.release(table)
    prefixes.reset()
    h.step()
    table = host.reserve(len(keys))
    for key, home in zip(keys, table.block_ids(), strict=True):
        blocks.view(home)[:] = sent[key]
        assert host.insert(key, home)
    host.release(table)
    h.submit("second", prompt, max_tokens=2)
    h.run()
    assert h.last("second").usage.cached_tokens == 8
    assert h.engine.load().num_host_hit_tokens == 8


def test_a_block_in_host_memory_is_taken_instead_of_a_part_of_one_on_the_device():
    """The device has the first block and a sibling of the second one; host memory has the second one whole."""
    h = CheckedHarness(executor=FakeExecutor(num_blocks=16, num_host_blocks=8, block_size=4))
    prompt, sibling = list(range(1, 10)), [*range(1, 7), 99, 98, 97]
    for name, tokens in (("first", prompt), ("sibling", sibling), ("second", prompt)):
        h.expected[name] = expected_outputs(tokens, SamplingParams(max_tokens=2, temperature=0.0), vocab_size=257)
    h.submit("first", prompt, max_tokens=2)
    h.run()
    host, prefixes, blocks = h.engine._loop.memory.host, h.engine._loop.memory.prefixes, h.executor.host_blocks
    assert host is not None and prefixes is not None and blocks is not None
    last_key = [*prefixes.cache._blocks][1]
    table = host.reserve(1)
    host.copy_out(prefixes.cache._blocks[last_key], table.block_ids()[0])
    h.step()
    prefixes.reset()
    h.submit("sibling", sibling, max_tokens=2)
    h.run()
    assert host.insert(last_key, table.block_ids()[0])
    host.release(table)
    h.submit("second", prompt, max_tokens=2)
    h.run()
    assert h.last("second").usage.cached_tokens == 8
    assert h.engine.load().num_host_hit_tokens == 4
