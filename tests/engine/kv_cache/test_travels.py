"""Prefixes that go from one pool to another: held while they are on their way, and the same tokens behind them."""

import hashlib
from typing import Any

import pytest

from jpaged.engine.executor import Move
from jpaged.engine.kv_cache.blocks import BlockTable, root_block_hash
from jpaged.engine.kv_cache.offload import transfer as leaving_module
from jpaged.engine.kv_cache.offload.transfer import BlockHashChain, BlockPosition
from jpaged.errors import Cancelled, InternalError, Unsupported
from jpaged.testing import FakeExecutor, expected_tokens, seeing
from tests.engine.data_parallel.fleet import Fleet
from tests.engine.harness import Harness

PROMPT = list(range(60, 101))  # ten blocks of four, and one token
WINDOWS = (None, 6)


class Counting(FakeExecutor):
    """Counts the blocks that leave in each transfer."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.swapped_out: list[int] = []

    def move_blocks(self, moves):
        if moves.move is Move.SWAP_OUT:
            self.swapped_out.append(len(moves.sources))
        super().move_blocks(moves)


def make(kind=Counting, **options):
    sizes: dict[str, Any] = {name: options.pop(name) for name in ("num_blocks", "num_host_blocks") if name in options}
    defaults: dict[str, Any] = {"num_blocks": 40, "num_host_blocks": 40, "block_size": 4, "max_num_batched_tokens": 16}
    executor = kind(**{**defaults, **sizes})
    return Harness(executor=executor, **options)


def compute(h, name="first", prompt=PROMPT, **sampling):
    h.submit(name, prompt, max_tokens=4, ignore_eos=True, **sampling)
    h.run()
    return h.last(name).usage.cached_tokens


def chain_of(h, prompt=PROMPT, salt="", tenant=""):
    return h.engine.kv_transfer.chain(root_block_hash(salt, tenant), prompt)


def leave(h, chain=None, num_skipped=0):
    """What is held, before anything of it was staged."""
    future = h.engine.kv_transfer.leave(chain or chain_of(h), num_skipped)
    h.step()
    return future.result(0)


def bytes_of(h, leaving):
    """Place -> bytes, read part by part as they come."""
    found = {}
    for part in range(leaving.num_parts):
        while not leaving.when_there(part).done():
            h.step()
        leaving.read(part, lambda place, view: found.update({place: bytes(view)}))
        h.step()
    return found


def bring(h, chain, contents):
    """Writes what came, all of it or as much as there is room for; the blocks that a request would find."""
    arriving = h.engine.kv_transfer.arrive(chain)
    reserved = arriving.reserve(len(contents))
    while not reserved.done():
        h.step()
    homes = reserved.result()
    for home, content in zip(homes, contents.values(), strict=False):
        arriving.write(home, 0, content[:10])
        arriving.write(home, 10, content[10:])
    arriving.enter(list(contents)[: len(homes)], homes)
    closed = arriving.close()
    h.run()
    return closed.result(0)


def assert_nothing_is_held(h):
    memory = h.engine._loop.memory
    h.run()
    assert not list(memory.held.tables())
    assert not memory.host._held
    assert memory.use().num_referenced == 0


def carry(a, b, prompt=PROMPT, **of):
    leaving = leave(a, chain_of(a, prompt, **of))
    contents = bytes_of(a, leaving)
    leaving.close()
    assert_nothing_is_held(a)
    num_blocks = bring(b, chain_of(b, prompt, **of), contents)
    assert_nothing_is_held(b)
    return num_blocks


@pytest.mark.parametrize("kind", [Counting, seeing(WINDOWS)], ids=["everything", "a window"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_behind_a_prefix_that_travelled_are_what_they_are_anywhere(kind, overlap):
    a, b = make(kind, overlap=overlap), make(kind, overlap=overlap)
    compute(a)
    assert carry(a, b) == 10
    assert compute(b) == 40
    assert compute(b, "longer", [*PROMPT, 5, 6, 7]) == 41  # what b computed has one token more
    fresh = make(kind)
    compute(fresh, prompt=[*PROMPT, 5, 6, 7])
    assert b.tokens("first") == a.tokens("first")
    assert b.tokens("longer") == fresh.tokens("first")


@pytest.mark.parametrize("num_tokens", [40, 41, 43, 44])
def test_of_a_window_come_the_blocks_that_a_prompt_of_the_same_tokens_sees(num_tokens):
    a, b = make(seeing(WINDOWS)), make(seeing(WINDOWS))
    prompt = [*PROMPT, 1, 2, 3][:num_tokens]
    compute(a, prompt=prompt)
    assert carry(a, b, prompt) == num_tokens // 4
    assert compute(b, prompt=prompt) == (num_tokens - 1) // 4 * 4


def test_blocks_of_both_tiers_leave_and_those_of_host_memory_are_not_copied():
    a, b = make(num_blocks=14), make()
    compute(a)
    compute(a, "other", [200] * 24)
    memory = a.engine._loop.memory
    num_kept = sum(key in memory.host for key in chain_of(a).keys)
    assert 0 < num_kept < 10
    a.executor.swapped_out.clear()
    assert carry(a, b) == 10
    assert sum(a.executor.swapped_out) == 10 - num_kept
    assert compute(b) == 40


def test_of_both_tiers_each_block_is_read_where_it_is():
    a, b = make(num_blocks=14), make()
    compute(a, "begin", PROMPT[:21])
    for i in range(2):
        compute(a, f"other {i}", [200 + i] * 30)
    assert compute(a) == 20  # from host memory, where it still is; the rest is on the device alone
    leaving = leave(a)
    memory = a.engine._loop.memory
    assert [key in memory.host for key in chain_of(a).keys] == [True] * 5 + [False] * 5
    contents = bytes_of(a, leaving)
    leaving.close()
    assert_nothing_is_held(a)
    assert bring(b, chain_of(b), contents) == 10
    assert compute(b) == 40
    assert b.tokens("first") == a.tokens("first") == expected_tokens(PROMPT, 4)


def test_a_part_is_not_ready_before_its_blocks_are_copied():
    a, ready = make(), []
    compute(a)
    future = a.engine.kv_transfer.leave(chain_of(a))
    future.add_done_callback(lambda done: ready.append(done.result().when_there(0).done()))
    a.step()
    assert ready == [False]
    future.result(0).close()
    assert_nothing_is_held(a)


def test_a_step_moves_a_part_at_most_and_running_rows_go_on(monkeypatch):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 3)
    a = make()
    compute(a)
    a.submit("running", [7] * 5, max_tokens=20, ignore_eos=True)
    a.step()
    a.executor.swapped_out.clear()
    leaving = leave(a)
    assert leaving.num_parts == 4
    num_steps = 0
    while not leaving.when_there(3).done():  # nobody reads, and the device's blocks are let go of all the same
        a.step()
        num_steps += 1
    assert a.executor.swapped_out == [3, 3, 3, 1]
    assert num_steps <= 10
    assert not list(a.engine._loop.memory.held.tables())
    a.run()
    assert a.tokens("running") == expected_tokens([7] * 5, 20)
    leaving.close()
    assert_nothing_is_held(a)


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_whoever_goes_away_leaves_nothing_held(monkeypatch, num_read):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 4)
    a = make()
    compute(a)
    leaving = leave(a)
    for part in range(num_read):
        while not leaving.when_there(part).done():
            a.step()
        leaving.read(part, lambda place, view: None)
    leaving.close()
    leaving.close()
    assert_nothing_is_held(a)
    with pytest.raises(Cancelled):
        leaving.read(2, lambda place, view: None)
    with pytest.raises(Cancelled):
        leaving.when_there(2).result(0)
    assert compute(a, "again") == 40  # it is known all the same


def test_of_what_somebody_waits_for_more_moves_in_a_step(monkeypatch):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 2)
    a = make()
    compute(a)
    a.executor.swapped_out.clear()
    future = a.engine.kv_transfer.leave(chain_of(a), is_hurried=True)
    a.run()
    assert a.executor.swapped_out == [8, 2]
    future.result(0).close()
    assert_nothing_is_held(a)


def test_what_leaves_beside_others_holds_half_of_the_pool_with_them_and_is_cut_short():
    a, b = make(num_blocks=24), make()
    other = [130, *PROMPT[1:]]
    compute(a)
    compute(a, "other", other)
    first = a.engine.kv_transfer.leave(chain_of(a))
    second = a.engine.kv_transfer.leave(chain_of(a, other))
    a.step()
    assert (first.result(0).num_blocks, second.result(0).num_blocks) == (10, 2)
    contents = bytes_of(a, second.result(0))
    third = leave(a, chain_of(a, other))  # by now nothing is held on the device
    assert third.num_blocks == 10
    for leaving in (first.result(0), second.result(0), third):
        leaving.close()
    assert_nothing_is_held(a)
    assert bring(b, chain_of(b, other), contents) == 2
    assert compute(b, "other", other) == 8


def test_a_request_that_wants_what_leaves_waits_for_no_reader(monkeypatch):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 2)
    a = make(num_blocks=12)
    compute(a)
    leaving = leave(a)
    a.submit("large", [7] * 42, max_tokens=4, ignore_eos=True)  # twelve blocks: nobody else's are left
    a.run()
    assert a.tokens("large") == expected_tokens([7] * 42, 4)
    assert len(bytes_of(a, leaving)) == 10
    leaving.close()
    assert_nothing_is_held(a)


@pytest.mark.parametrize("kind", [Counting, seeing(WINDOWS)], ids=["everything", "a window"])
def test_what_arrives_is_what_leaves_and_what_is_here_stays_longest(kind):
    a, b = make(kind), make(kind, num_blocks=30)
    compute(a)
    compute(b, "before", PROMPT[:13])
    for name in ("other", "another"):
        compute(b, name, [ord(name[0])] * 24)
    arriving, num_known = b.engine.kv_transfer.arrive(chain_of(b)), b.engine.kv_transfer.num_known(chain_of(b))
    assert num_known == 3
    leaving = leave(a, num_skipped=num_known)
    assert arriving.missing(num_known) == leaving.positions
    reserved = arriving.reserve(len(leaving.positions))
    b.run()
    contents, homes = bytes_of(a, leaving), reserved.result(0)
    compute(b, "last", [9] * 40)  # evicts, and not what came first
    memory = b.engine._loop.memory
    assert all(memory.held.find(key) is not None for key in chain_of(b).keys[:2])
    for home, content in zip(homes, contents.values(), strict=True):
        arriving.write(home, 0, content)
    arriving.enter(list(contents), homes)
    arriving.close()
    leaving.close()
    assert compute(b) == 40
    assert b.tokens("first") == a.tokens("first")
    assert_nothing_is_held(a)
    assert_nothing_is_held(b)


def test_what_travels_is_neither_evicted_nor_written_and_comes_free_afterwards(monkeypatch):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 2)
    a, b = make(num_blocks=16, num_host_blocks=24), make()
    compute(a)
    leaving = leave(a)
    for i in range(3):  # as many as want the whole pool
        a.submit(f"other {i}", [200 + i] * 30, max_tokens=6, ignore_eos=True)
    contents = bytes_of(a, leaving)
    a.run()
    for i in range(3):
        assert a.tokens(f"other {i}") == expected_tokens([200 + i] * 30, 6)
    leaving.close()
    assert_nothing_is_held(a)
    assert bring(b, chain_of(b), contents) == 10
    assert compute(b) == 40


def test_a_block_that_is_freed_while_it_travels_is_noticed():
    a = make()
    compute(a)
    leaving = leave(a)
    memory = a.engine._loop.memory
    (table,) = memory.held.tables()
    block_id = table.block_id(3)
    memory._pool._let_go([block_id])
    with pytest.raises(InternalError, match=f"block {block_id} is held by 1 tables, but its reference count is 0"):
        a.engine.check()
    memory.prefixes.num_cached -= memory._pool.acquire(block_id)
    a.engine.check()
    leaving.close()
    assert_nothing_is_held(a)
    with pytest.raises(InternalError, match="are released but not held"):
        memory.held.release(table)


def test_only_what_is_known_leaves_and_what_the_other_has_stays():
    a = make()
    compute(a, prompt=PROMPT[:25])
    leaving = leave(a, num_skipped=2)
    assert (leaving.num_found, leaving.num_blocks) == (6, 6)
    assert leaving.positions == tuple(BlockPosition(index, 0) for index in range(2, 6))
    leaving.close()
    nothing = leave(a, chain_of(a, [1] * 20))
    assert (nothing.num_found, nothing.num_blocks, nothing.num_parts) == (0, 0, 0)
    nothing.close()
    assert leave(a, chain_of(a, tenant="another")).num_found == 0
    assert_nothing_is_held(a)


@pytest.mark.parametrize(("num_host_blocks", "kind"), [(4, Counting), (7, seeing(WINDOWS)), (1, Counting)])
def test_a_prefix_that_host_memory_has_no_room_for_leaves_in_part(num_host_blocks, kind):
    a, b = make(kind, num_host_blocks=num_host_blocks), make(kind)
    compute(a)
    leaving = leave(a)
    assert 0 < leaving.num_blocks < leaving.num_found == 10
    assert len(leaving.positions) <= num_host_blocks
    contents = bytes_of(a, leaving)
    leaving.close()
    assert_nothing_is_held(a)
    assert bring(b, chain_of(b), contents) == leaving.num_blocks
    assert compute(b) == leaving.num_blocks * 4


def test_a_prefix_that_finds_no_room_is_taken_in_part_and_evicts_no_part_of_itself():
    a, b = make(), make(num_host_blocks=6)
    compute(a)
    assert carry(a, b) == 6
    assert compute(b) == 24


def test_what_is_here_is_not_evicted_for_the_rest_of_its_prefix():
    a, b = make(), make(num_host_blocks=8)
    compute(a)
    leaving = leave(a)
    contents = bytes_of(a, leaving)
    leaving.close()
    assert bring(b, chain_of(b, PROMPT[:24]), dict([*contents.items()][:6])) == 6
    chain = chain_of(b)
    arriving = b.engine.kv_transfer.arrive(chain)
    missing = {place: content for place, content in contents.items() if not arriving.is_known(place)}
    assert len(missing) == 4
    assert bring(b, chain, missing) == 8
    assert compute(b) == 32


def test_what_is_entered_twice_or_late_changes_nothing():
    a, b = make(), make()
    compute(a)
    leaving = leave(a)
    contents = bytes_of(a, leaving)
    assert bring(b, chain_of(b), contents) == 10
    arriving = b.engine.kv_transfer.arrive(chain_of(b))
    assert all(arriving.is_known(place) for place in contents)
    assert bring(b, chain_of(b), contents) == 10
    reserved = arriving.reserve(2)
    arriving.close()
    b.run()
    with pytest.raises(Cancelled):
        reserved.result(0)
    with pytest.raises(Cancelled):
        arriving.write(1, 0, b"too late")
    arriving.enter([BlockPosition(0, 0)], [1])
    b.run()
    assert_nothing_is_held(b)
    assert compute(b) == 40


def test_nobody_writes_a_block_that_is_not_reserved_or_beyond_it():
    b = make()
    arriving = b.engine.kv_transfer.arrive(chain_of(b))
    reserved = arriving.reserve(1)
    b.run()
    (home,) = reserved.result(0)
    for block_id, start, content in ((home + 1, 0, b"x"), (home, 64, b"x"), (home, 0, bytes(65))):
        with pytest.raises(InternalError, match="outside this prefix"):
            arriving.write(block_id, start, content)
    with pytest.raises(InternalError, match=r"not all of the host blocks .* are reserved"):
        arriving.enter([BlockPosition(0, 0)], [home + 1])
    arriving.write(home, 0, bytes(64))
    arriving.enter([BlockPosition(0, 0)], [home])
    with pytest.raises(InternalError, match="outside this prefix"):
        arriving.write(home, 0, b"x")
    arriving.close()
    assert_nothing_is_held(b)


def test_a_chain_is_that_of_the_cache():
    h = make()
    compute(h, cache_salt="s", cache_tenant="t")
    chain = chain_of(h, salt="s", tenant="t")
    parent = root_block_hash("s", "t")
    for i, key in enumerate(chain.keys):
        parent = hashlib.sha256(parent + b"".join(t.to_bytes(4, "little") for t in PROMPT[4 * i : 4 * i + 4])).digest()
        assert key == parent
    assert chain.token_ids == tuple(PROMPT[:40])
    assert h.engine.kv_transfer.num_known(chain) == 10
    assert BlockHashChain.of(root_block_hash(""), PROMPT, 4, 3).token_ids == tuple(PROMPT[:12])


def test_nothing_beyond_the_limit_of_the_cache_travels():
    h = make(max_cached_tokens=100)
    assert len(chain_of(h, [1] * 90).keys) == 22
    assert len(chain_of(h, [1] * 104).keys) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_host_blocks": 0}, "no host memory is configured"),
        ({"enable_prefix_caching": False}, "the prefix cache is off"),
        ({"kv_policy": "reserve-max"}, "the prefix cache is off"),
    ],
)
def test_where_prefixes_cannot_travel_it_says_why(options, why):
    h = make(**options)
    for ask in (h.engine.kv_transfer.kv_identity, lambda: chain_of(h), lambda: h.engine.kv_transfer.bytes_per_block):
        with pytest.raises(Unsupported, match=f"prefixes cannot be transferred: .*{why}"):
            ask()


def test_what_is_reserved_early_leaves_half_of_host_memory():
    b = make(num_host_blocks=16)
    arriving, other = b.engine.kv_transfer.arrive(chain_of(b)), b.engine.kv_transfer.arrive(chain_of(b, [1] * 30))
    early, late = arriving.reserve(10, is_early=True), other.reserve(6, is_early=True)
    rest = arriving.reserve(2)
    b.run()
    assert [len(one.result(0)) for one in (early, late, rest)] == [8, 0, 2]
    arriving.close()
    other.close()
    assert_nothing_is_held(b)


def test_a_block_of_host_memory_that_is_freed_while_it_is_written_is_noticed():
    b = make()
    arriving = b.engine.kv_transfer.arrive(chain_of(b))
    reserved = arriving.reserve(5)
    b.run()
    freed = BlockTable(5)
    freed.extend(reserved.result(0))
    b.engine._loop.memory.host.pool.release(freed)
    with pytest.raises(InternalError, match="is held by 1 tables, but its reference count is 0"):
        b.engine.check()


def test_of_replicas_the_one_that_has_most_is_asked_and_the_one_that_requests_go_to_gets_it():
    fleet = Fleet(2, num_host_blocks=40, block_size=4)
    transfer = fleet.replicas.kv_transfer
    assert len(transfer.each) == 2
    other = make()
    compute(other)
    contents = bytes_of(other, leave(other))
    chain = transfer.chain(root_block_hash(""), PROMPT)
    arriving = transfer.arrive(chain)
    assert arriving._tiers is transfer.each[0].tiers
    reserved = arriving.reserve(10)
    fleet.run()
    for home, content in zip(reserved.result(0), contents.values(), strict=True):
        arriving.write(home, 0, content)
    arriving.enter(list(contents), reserved.result(0))
    arriving.close()
    fleet.run()
    assert transfer.num_known(chain) == 10
    assert [one.tiers.num_known(chain) for one in transfer.each] == [10, 0]
    assert transfer.arrive(chain)._tiers is transfer.each[0].tiers  # where its prefix is
    future = transfer.leave(chain)
    fleet.run()
    assert future.result(0).num_found == 10
    future.result(0).close()
    fleet.run()
