"""Servers of both roles with data ports: the same tokens, whether blocks are pulled, sent, or computed again."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jpaged.engine.executor import BlockArrays, BlockOffer
from jpaged.errors import Unavailable
from jpaged.service.roles import OfferTable, TransferRates
from jpaged.testing import FakeExecutor, seeing
from tests.server import harness
from tests.server.harness import eventually, make_serving, request
from tests.server.roles.test_roles import LONG, Pair, Rereading, alone, fake, folded, pair, reread

NUMBERS = itertools.count(1)
TRANSFER = '{"kv_connector": "jax", "kv_connector_extra_config": {"address": "127.0.0.1:0", "pull_timeout": 0.05}}'
WHOLE = len(LONG) // 4


@dataclasses.dataclass
class FakePull:
    """A pull that is done when its offer is there, unless the port is stuck."""

    port: FakePort
    offer: BlockOffer
    is_abandoned: bool = False

    @property
    def is_done(self) -> bool:
        return not self.port.is_stuck

    def take(self) -> tuple[BlockArrays, tuple[tuple[int, int], ...]]:
        if (contents := self.port.world.pop(self.offer.uuid, None)) is None:
            raise Unavailable("the other server has ended")
        return contents, self.offer.positions

    def abandon(self) -> None:
        self.is_abandoned = True


class FakePort:
    """A data port whose network is a dict."""

    def __init__(self, world: dict[int, BlockArrays], room: int = 1 << 20) -> None:
        self.protocol = "fake"
        self.world = world
        self.room = room
        self.is_stuck = False
        self.sizes: dict[int, int] = {}
        self.drains: list[int] = []
        self.pulls: list[FakePull] = []
        self.admitted: set[str] = set()

    @property
    def num_bytes_offered(self) -> int:
        return sum(self.sizes.values())

    @property
    def is_settled(self) -> bool:
        return not self.drains

    def admit(self, host: str) -> None:
        self.admitted.add(host)

    def offer(self, contents: BlockArrays) -> BlockOffer:
        num_bytes = sum(array.nbytes for array in contents.arrays)
        if self.num_bytes_offered + num_bytes > self.room:
            raise Unavailable("no room")
        uuid = next(NUMBERS)
        self.world[uuid], self.sizes[uuid] = contents, num_bytes
        sizes = tuple(len(array) for array in contents.arrays)
        return BlockOffer(uuid, "fake:1", "int64", (1, *contents.arrays[0].shape[1:]), (), sizes, contents.num_rows)

    def release(self, uuid: int) -> None:
        self.sizes.pop(uuid, None)

    def withdraw(self, uuid: int) -> None:
        self.drains.append(uuid)

    def sweep(self) -> None:
        for uuid in self.drains:
            self.world.pop(uuid, None)
            self.sizes.pop(uuid, None)
        self.drains.clear()

    def pull(self, offer: BlockOffer, place: object) -> FakePull:
        self.pulls.append(FakePull(self, offer))
        return self.pulls[-1]

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Ports:
    """Two servers with ports, and the ports."""

    both: Pair
    offering: FakePort
    pulling: FakePort

    async def check_tokens(self, message: Any) -> None:
        assert folded(await self.both.generate(message)) == folded(await alone(message))


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts two servers with data ports."""

    @asynccontextmanager
    async def connect(
        *, executors: tuple[FakeExecutor, FakeExecutor] | None = None, room: int = 1 << 20, **options: Any
    ) -> AsyncIterator[Ports]:
        world: dict[int, BlockArrays] = {}
        ports = {"prefill": FakePort(world, room), "decode": FakePort(world)}

        def serve(*of: Any) -> Any:
            model = make_serving(*of)
            return dataclasses.replace(model, block_port=ports.get(model.config.roles.role))

        monkeypatch.setattr(harness, "make_serving", serve)
        options = {"prefill": {"kv_transfer_config": TRANSFER}, "decode": {"kv_transfer_config": TRANSFER}, **options}
        async with pair(executors=executors, **options) as both:
            yield Ports(both, ports["prefill"], ports["decode"])
            await eventually(lambda: not ports["prefill"].num_bytes_offered)

    return connect


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3, "n": 3}, {"cache_salt": "salt"}])
async def test_blocks_are_pulled_and_the_tokens_are_those_of_one_server(
    connected: Callable[..., Any], sampling: dict[str, Any]
) -> None:
    async with connected() as ports:
        await ports.check_tokens(request(LONG, max_tokens=24, **sampling))
        received = ports.both.received
        assert (received.num_blocks_received, received.num_pulls, received.num_pulls_failed) == (WHOLE, 1, 0)
        assert ports.offering.admitted == {"127.0.0.1"}
        assert received.num_bytes_pulled == received.num_bytes_received > 0
        assert ports.both.decode.serving.engine.load().num_blocks_swapped_in == WHOLE
        assert not ports.both.failures


@pytest.mark.parametrize("window", [(8, None), (8, 20), ((8, 5),)])
async def test_blocks_of_sliding_windows_are_pulled(connected: Callable[..., Any], window: Any) -> None:
    kind = seeing(window)
    async with connected(executors=(fake(kind), fake(kind))) as ports:
        message = request(LONG, max_tokens=24)
        told = await ports.both.generate(message)
        async with harness.running(executor=fake(kind)) as single:
            assert folded(told) == folded(await harness.collect(single.inference.Generate(message)))
        assert ports.both.received.num_pulls == 1


async def test_a_pull_that_never_ends_is_abandoned_and_the_blocks_are_sent(connected: Callable[..., Any]) -> None:
    async with connected() as ports:
        ports.pulling.is_stuck = True
        await ports.check_tokens(request(LONG, max_tokens=8))
        assert [pull.is_abandoned for pull in ports.pulling.pulls] == [True]
        received = ports.both.received
        assert (received.num_pulls, received.num_pulls_failed, received.num_blocks_received) == (0, 1, WHOLE)
        assert not ports.both.failures  # nothing was computed again


async def test_a_pull_that_fails_is_followed_by_pieces(connected: Callable[..., Any]) -> None:
    async with connected() as ports:
        ports.pulling.world = {}
        await ports.check_tokens(request(LONG, max_tokens=8))
        assert (ports.both.received.num_pulls_failed, ports.both.received.num_blocks_received) == (1, WHOLE)


async def test_without_room_in_the_port_blocks_are_sent(connected: Callable[..., Any]) -> None:
    async with connected(room=0) as ports:
        await ports.check_tokens(request(LONG, max_tokens=8))
        assert (ports.both.received.num_pulls, ports.both.received.num_blocks_received) == (0, WHOLE)


async def test_an_offer_of_other_tokens_is_refused(
    connected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_offer = OfferTable.open

    def open_another(table: OfferTable, contents: BlockArrays, positions: Any, key: bytes) -> BlockOffer:
        return open_offer(table, contents, positions, bytes(32))

    monkeypatch.setattr(OfferTable, "open", open_another)
    async with connected() as ports:
        await ports.check_tokens(request(LONG, max_tokens=8))
        assert (ports.both.received.num_pulls_failed, ports.both.received.num_blocks_received) == (1, WHOLE)


async def test_a_client_that_goes_away_during_a_pull_leaves_nothing(connected: Callable[..., Any]) -> None:
    transfer = TRANSFER.replace("0.05", "60")
    async with connected(decode={"kv_transfer_config": transfer}) as ports:
        ports.pulling.is_stuck = True
        call = ports.both.decode.inference.Generate(request(LONG, max_tokens=8))
        await eventually(lambda: len(ports.pulling.pulls) == 1)
        call.cancel()
        await eventually(lambda: ports.pulling.pulls[0].is_abandoned)
        await eventually(lambda: not ports.offering.num_bytes_offered)


@pytest.mark.parametrize("without", ["prefill", "decode"])
async def test_blocks_are_sent_if_only_one_server_has_a_port(connected: Callable[..., Any], without: str) -> None:
    async with connected() as ports:
        side = ports.both.prefill if without == "prefill" else ports.both.decode
        role: Any = side.server._role
        if without == "prefill":
            role._offers = None
        else:
            role._port = None
        await ports.check_tokens(request(LONG, max_tokens=8))
        assert (ports.both.received.num_pulls, ports.both.received.num_blocks_received) == (0, WHOLE)


async def test_servers_of_other_layouts_only_pull(connected: Callable[..., Any]) -> None:
    """Another identity, the same model: blocks are pulled, and computed if that fails, but never sent as pieces."""

    class Elsewhere(FakeExecutor):
        """Its blocks have the same contents and another identity."""

    async with connected(executors=(fake(Elsewhere), fake())) as ports:
        await ports.check_tokens(request(LONG, max_tokens=8))
        assert (ports.both.received.num_pulls, ports.both.received.num_blocks_received) == (1, WHOLE)
        ports.pulling.is_stuck = True
        await ports.check_tokens(request(f"2 {LONG}", max_tokens=8))
        received = ports.both.received
        assert (received.num_pulls_failed, received.num_blocks_received) == (1, WHOLE)
        assert received.num_blocks_missing == (len(LONG) + 2) // 4


@pytest.mark.parametrize("who", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
async def test_blocks_are_pulled_after_the_weights_were_read_again(connected: Callable[..., Any], who: str) -> None:
    """Servers of other layouts refuse each other then, because the files may have changed."""

    class Elsewhere(Rereading):
        """Its blocks have the same contents and another identity."""

    for other, num_pulls in ((Rereading, 1), (Elsewhere, 0)):
        async with connected(executors=(fake(other), fake(Rereading)), enable_sleep_mode=True) as ports:
            await reread(getattr(ports.both, who))
            await ports.check_tokens(request(LONG, max_tokens=8))
            assert ports.both.received.num_pulls == num_pulls
            assert ports.both.decode.serving.engine.load().num_blocks_swapped_in == num_pulls * WHOLE
            assert ports.both.failures == ({} if num_pulls else {"prefill": 1})


@pytest.mark.parametrize("num_requests", [30, pytest.param(1000, marks=pytest.mark.long)])
async def test_seeded_requests_equal_those_of_one_server(connected: Callable[..., Any], num_requests: int) -> None:
    """Prompts share prefixes; some pulls get stuck or lose their offer."""
    chance = random.Random(7)
    async with connected() as ports, harness.running(executor=fake()) as single:
        for number in range(num_requests):
            ports.pulling.is_stuck = chance.random() < 0.02
            if chance.random() < 0.05:
                ports.offering.room = 0
            begin = "" if chance.random() < 0.3 else f"{chance.randrange(40)} "
            sampling: dict[str, Any] = {
                "temperature": chance.choice((0.0, 1.0)),
                "seed": number,
                "n": chance.choice((1, 1, 2)),
            }
            message = request(begin + LONG[: chance.randrange(8, len(LONG))], max_tokens=6, **sampling)
            told = await ports.both.generate(message)
            assert folded(told) == folded(await harness.collect(single.inference.Generate(message)))
            ports.offering.room = 1 << 20
        assert ports.both.received.num_pulls > num_requests // 10
        assert not ports.both.failures


def test_the_faster_transport_is_chosen_and_the_other_one_tried_again() -> None:
    rates, size = TransferRates(), 1 << 20
    rates.record(size, 2.0, is_port=True)
    assert rates.choose_port(size)  # nothing is known of the other one
    rates.record(size, 1.0, is_port=False)
    assert [rates.choose_port(size) for _ in range(32)].count(True) == 2
    for _ in range(16):
        rates.record(size, 0.1, is_port=True)
    assert rates.choose_port(size)


def test_what_takes_longer_to_transfer_than_to_compute_is_computed_and_tried_again() -> None:
    rates, size = TransferRates(), 1 << 20
    for _ in range(4):
        assert rates.compare(size, 0.5, has_port=False) is None  # too little is known
        rates.record(size, 1.0, is_port=False)
    found = [rates.compare(size, 0.5, has_port=False) for _ in range(32)]
    assert found.count(None) == 2 and found[0] == pytest.approx(1.0, rel=0.3)
    assert rates.compare(size, 2.0, has_port=False) is None
    assert rates.compare(size, 0.5, has_port=True) is None  # the port is not tried yet
    for _ in range(4):
        rates.record(size, 0.1, is_port=True)
    assert rates.compare(size, 0.5, has_port=True) is None


def test_a_port_whose_pulls_all_fail_does_not_prevent_computing() -> None:
    rates, size = TransferRates(), 1 << 20
    for _ in range(4):
        rates.record(size, 1.0, is_port=False)
        assert rates.compare(size, 0.5, has_port=True) is None
        rates.note_failed_pull()
    assert rates.compare(size, 0.5, has_port=True) == pytest.approx(1.0, rel=0.3)


async def test_prompts_are_computed_where_a_transfer_would_take_longer(connected: Callable[..., Any]) -> None:
    """A token takes a millionth of a second here, less than any transfer."""
    async with connected(decode={"kv_transfer_config": TRANSFER, "prefill_policy": "auto"}) as ports:
        for number in range(12):
            await ports.check_tokens(request(f"{number}" + LONG, max_tokens=4))
        pulls, here = ports.both.received.num_pulls, ports.both.decode.serving.role_counts.num_here["slower"]
        assert 4 <= pulls < 12 and pulls + here == 12
