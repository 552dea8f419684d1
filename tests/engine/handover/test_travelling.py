"""Prompts on their way between servers: what is held, for how long, and who has to make room for whom."""

from __future__ import annotations

from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.handover.handover import Handover
from jpaged.engine.kv.blocks import BlockTable
from jpaged.engine.kv.tiers.travelling import Portion
from jpaged.errors import InternalError, QueueFull
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import OutputEvent, Request, SamplingParams

PROMPT = tuple(range(50, 70))  # five blocks


class Server:
    """An engine whose steps the test takes."""

    def __init__(self, **sizes: Any) -> None:
        executor = FakeExecutor(**{"num_blocks": 32, "num_host_blocks": 16, **sizes})
        self.engine = Engine(executor, ByteTokenizer(), EngineConfig.load({"max_num_queued_reqs": 2}))
        assert self.engine.handover is not None
        self.handover: Handover = self.engine.handover
        self.events: list[OutputEvent] = []

    def prefill(self, name: str, prompt: tuple[int, ...] = PROMPT, num_known: int = 0) -> int:
        """Computes a prompt that travels from here; how many blocks will."""
        first = self.handover.submit_held(one_token(name, prompt), self.events.append, num_known, 0)
        self.rest()
        assert first.result(timeout=0) == Portion() or not first.result().blocks
        journey = self.handover._travelling._journeys.get(name)
        return 0 if journey is None else len(journey.keys)

    def stage(self, name: str, num_blocks: int) -> Portion:
        staged = self.handover.stage(name, num_blocks)
        self.rest()
        return staged.result(timeout=0)

    def rest(self) -> None:
        while self.engine.step():
            """Whatever there is to do."""
        self.engine.check()

    @property
    def num_used(self) -> int:
        return self.engine.load().num_blocks_used


def one_token(name: str, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    return Request(name, prompt, SamplingParams(**{"max_tokens": 1, "temperature": 0.0, "seed": 0, **sampling}))


def bring(sender: Server, receiver: Server, name: str, num_blocks: int = 99) -> int:
    """Brings what was computed for a journey over; how many blocks came."""
    request = one_token(name)
    keys = receiver.handover.keys(request)
    expected = receiver.handover.expect(name, keys)
    receiver.rest()
    homes = expected.result(timeout=0)
    portion = sender.stage(name, num_blocks)
    for key, home in portion.blocks:
        receiver.handover.host_blocks.view(homes[key])[:] = sender.handover.host_blocks.view(home)
    receiver.handover.arrived(name, {key: homes[key] for key, _ in portion.blocks})
    receiver.rest()
    return len(portion.blocks)


def test_what_is_computed_on_one_engine_is_found_on_another() -> None:
    sender, receiver = Server(), Server()
    assert sender.prefill("a") == 5
    assert bring(sender, receiver, "a") == 5
    receiver.engine.submit(one_token("a"), receiver.events.append)
    receiver.rest()
    assert receiver.events[-1].usage.cached_tokens == 16  # the last token of a prompt always runs
    assert receiver.events[-1].token_ids == sender.events[-1].token_ids
    sender.handover.let_go("a")
    receiver.handover.let_go("a")
    for one in (sender, receiver):
        one.rest()
        assert one.num_used == 0


def test_a_prompt_stays_on_the_device_until_it_is_let_go() -> None:
    sender = Server(num_blocks=12)
    assert sender.prefill("a") == 5
    assert sender.num_used == 5
    sender.engine.submit(one_token("b", tuple(range(100, 124))), sender.events.append)  # takes all that is left
    sender.rest()
    assert len(sender.stage("a", 2).blocks) == 2
    assert len(sender.stage("a", 9).blocks) == 3
    assert sender.stage("a", 9).blocks == ()
    sender.handover.let_go("a")
    sender.rest()
    assert sender.num_used == 0


def test_blocks_that_are_there_already_stay() -> None:
    sender = Server()
    assert sender.prefill("a", num_known=2) == 3
    sent = sender.stage("a", 9).blocks
    assert [key for key, _ in sent] == list(sender.handover.keys(one_token("a")).known[2:])


def test_an_older_journey_makes_room_for_a_younger_and_for_requests() -> None:
    sender = Server(num_blocks=12)
    assert sender.prefill("a") == 5
    other = tuple(range(100, 120))
    assert sender.prefill("b", other) == 5  # six blocks may be pinned: the first is not any more
    assert sender.num_used == 5
    assert sender.prefill("c", tuple(range(150, 186))) == 0  # nine are more than half of twelve
    sender.engine.submit(one_token("d", tuple(range(200, 240))), sender.events.append)  # eleven: nobody else's are left
    sender.rest()
    assert sender.events[-1].error is None
    assert sender.num_used == 0


def test_the_first_blocks_are_staged_with_the_first_token() -> None:
    sender = Server()
    first = sender.handover.submit_held(one_token("a"), sender.events.append, 1, 3)
    sender.rest()
    assert len(first.result(timeout=0).blocks) == 3
    assert len(sender.stage("a", 9).blocks) == 1


def test_where_the_host_has_no_room_fewer_come() -> None:
    sender = Server(num_host_blocks=3)
    assert sender.prefill("a") == 5
    first = sender.stage("a", 9)
    assert len(first.blocks) == 3
    assert sender.stage("a", 9).blocks == ()  # nothing behind a gap is of use


def test_blocks_that_are_sent_make_room_for_others() -> None:
    sender = Server(num_host_blocks=3)
    assert sender.prefill("a") == 5
    first = sender.stage("a", 3)
    sender.handover.sent("a", first)
    assert len(sender.stage("a", 3).blocks) == 2


def test_a_journey_that_ends_before_its_blocks_came_leaves_nothing() -> None:
    sender, receiver = Server(), Server()
    assert sender.prefill("a") == 5
    assert bring(sender, receiver, "a", 2) == 2
    receiver.handover.let_go("a")
    receiver.handover.arrived("a", {b"x" * 32: 9})  # too late: the block is somebody else's
    receiver.rest()
    assert receiver.handover.keys(one_token("a")).num_known == 2


def test_what_was_cached_on_the_way_is_held_for_what_comes() -> None:
    receiver = Server(num_blocks=12)
    receiver.engine.submit(one_token("before", PROMPT[:12]), receiver.events.append)
    receiver.rest()
    keys = receiver.handover.keys(one_token("a"))
    assert (keys.num_known, len(keys.known), len(keys.wanted)) == (3, 3, 2)
    receiver.handover.expect("a", keys)
    receiver.rest()
    assert receiver.num_used == 3


def test_a_freed_block_that_travels_is_caught() -> None:
    """A planted fault: what comes over is written to a block that is nobody's."""
    receiver = Server()
    keys = receiver.handover.keys(one_token("a"))
    expected = receiver.handover.expect("a", keys)
    receiver.rest()
    tier = receiver.engine._loop.memory.host
    assert tier is not None
    freed = BlockTable(5)
    freed.extend(list(expected.result(timeout=0).values()))
    tier.pool.release(freed)
    with pytest.raises(InternalError, match="is held by 1 tables, its reference count is 0"):
        receiver.engine.check()


def test_a_place_is_kept_for_what_is_computed_elsewhere() -> None:
    server = Server(max_num_seqs=1)
    limit = server.engine.max_num_in_flight
    for number in range(limit):
        server.handover.keep_place(f"request {number}")
    with pytest.raises(QueueFull):
        server.engine.submit(one_token("one too many"), server.events.append)
    assert not server.engine.drain(0.0)
    server.engine.submit(one_token("request 0"), server.events.append)  # a drain does not refuse what it waits for
    for number in range(1, limit):
        server.engine.drop(f"request {number}")
    server.rest()
    assert server.engine.drain(0.0)
    assert [event.request_id for event in server.events] == ["request 0"]
