"""What a server tells over its sockets reaches who listens, in order, missed messages and new beginnings included."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from jpaged.config import KVEventsOptions
from jpaged.errors import InvalidArgument
from jpaged.kvevents import subscriber as subscriber_module
from jpaged.kvevents.encoding import Cleared, Encoder, Event
from jpaged.kvevents.publisher import Publisher, with_rank
from jpaged.kvevents.subscriber import Order, Subscriber
from jpaged.pool import Change, Stored

_PATIENCE_S = 60.0


def block(number: int) -> list[Change]:
    return [Stored("device", number.to_bytes(8, "big") + bytes(24), 0, None, (number,))]


def options(tmp_path: Path, **given: Any) -> KVEventsOptions:
    values: dict[str, Any] = {
        "kv_events_endpoint": f"ipc://{tmp_path}/e",
        "kv_events_replay_endpoint": f"ipc://{tmp_path}/r",
    }
    return KVEventsOptions(**values | given)


class Heard:
    """What a subscriber was given: the hashes of blocks, and None where it was to forget."""

    def __init__(self) -> None:
        self.found: list[int | None] = []
        self._news = threading.Condition()

    def take(self, events: Sequence[Event]) -> None:
        with self._news:
            for event in events:
                self.found += [None] if isinstance(event, Cleared) else [*event.hashes]
            self._news.notify_all()

    def wait_for(self, last: int) -> list[int | None]:
        with self._news:
            assert self._news.wait_for(lambda: last in self.found, _PATIENCE_S), self.found
            return [*self.found]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    found = Publisher(options(tmp_path), Encoder(1))
    yield found
    found.close()


def listen(publisher: Publisher, **given: Any) -> tuple[Subscriber, Heard]:
    """A subscriber that hears everything from now on: what comes before it is connected would be missed."""
    heard = Heard()
    assert publisher.endpoint is not None
    subscriber = Subscriber(publisher.endpoint, heard.take, **given)
    return subscriber, heard


def tell_until_heard(publisher: Publisher, heard: Heard, first: int) -> int:
    """Tells one block after the other until one is heard; the number of the next."""
    until_s = time.monotonic() + _PATIENCE_S
    while not heard.found:
        assert time.monotonic() < until_s
        publisher.publish(block(first))
        first += 1
        time.sleep(0.01)
    return first


def test_everything_is_heard_in_order_by_who_comes_late(publisher: Publisher) -> None:
    """What was told before somebody listened is asked for, so that all is there from the first."""
    for number in range(5):
        assert publisher.publish(block(number))
    subscriber, heard = listen(publisher, replay_endpoint=publisher.replay_endpoint)
    end = tell_until_heard(publisher, heard, 5)
    for number in range(end, end + 50):
        assert publisher.publish(block(number))
    assert heard.wait_for(end + 49) == [*range(end + 50)]
    subscriber.close()


def test_what_a_server_holds_that_says_nothing_is_known(publisher: Publisher) -> None:
    """What it has kept is asked for when it is connected, and is not taken a second time when it is told again."""
    for number in range(5):
        publisher.publish(block(number))
    with zmq.Context() as context:
        heard = Heard()
        assert publisher.endpoint is not None
        subscriber = Subscriber(
            publisher.endpoint, heard.take, replay_endpoint=publisher.replay_endpoint, context=context
        )
        assert heard.wait_for(4) == [0, 1, 2, 3, 4]
        until_s = time.monotonic() + _PATIENCE_S
        while not subscriber.is_heard:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        for number in range(5, 40):
            publisher.publish(block(number))
        assert heard.wait_for(39) == [*range(40)]
        publisher.close()
        while subscriber.is_heard or heard.found[-1] is not None:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        subscriber.close()


def test_what_was_asked_for_is_repeated_until_something_new_comes() -> None:
    order = Order()
    assert order.next == 0 and not order.is_repeated(0)
    for number in range(3):
        order.taken(number)
    order.was_replayed()
    assert [order.is_repeated(number) for number in (1, 2, 3, 0)] == [True, True, False, False]
    order.was_replayed()
    order.lost()
    assert order.next == 0 and not order.is_repeated(0)


class Scripted:
    """A server whose every message a test says."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._tells, self._answers = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/se", f"ipc://{folder}/sr"
        for one, endpoint in ((self._tells, self.endpoint), (self._answers, self.replay_endpoint)):
            one.bind(endpoint)
            one.setsockopt(zmq.RCVTIMEO, int(_PATIENCE_S * 1000))

    def subscribed(self) -> None:
        assert self._tells.recv() == b"\1"

    def tell(self, *numbers: int, message: bytes | None = None) -> None:
        for number in numbers:
            content = Encoder(1).encode(block(number), 0.0) if message is None else message
            self._tells.send_multipart((b"", number.to_bytes(8, "big"), content))

    def answer(self, asked: int, *numbers: int) -> None:
        who, _, first = self._answers.recv_multipart()
        assert int.from_bytes(first, "big") == asked
        for number in numbers:
            message = Encoder(1).encode(block(number), 0.0)
            self._answers.send_multipart((who, b"", number.to_bytes(8, "big"), message))
        self._answers.send_multipart((who, b"", b"\xff" * 8, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(subscriber_module, "_SETTLE_MS", 3_600_000)  # it is asked when the test says so
    found = Scripted(tmp_path)
    yield found
    found.close()


def test_each_message_is_taken_once_and_where_some_are_lost_nothing_is_known(server: Scripted) -> None:
    heard = Heard()
    subscriber = Subscriber(server.endpoint, heard.take, replay_endpoint=server.replay_endpoint)
    server.subscribed()
    server.answer(0, 0, 1)
    server.tell(1, 2, 5)
    server.answer(3, 3, 4, 5, 6)  # told and answered at one time
    server.tell(6, 7)
    assert heard.wait_for(7) == [0, 1, 2, 3, 4, 5, 6, 7]
    server.tell(11)
    server.answer(8, 8, 10)  # 9 is lost
    server.tell(15)
    server.answer(12, 12)  # what follows is kept no longer
    assert heard.wait_for(15)[8:] == [8, None, 10, 11, 12, None, 15]
    server.tell(1)  # it has begun anew
    server.answer(0, 0)
    server.tell(2, message=b"nonsense")
    server.tell(*range(3, 10))
    assert heard.wait_for(9)[15:] == [None, 0, 1, None, *range(3, 10)]
    subscriber.close()


def test_what_was_told_while_it_was_being_connected_is_heard_when_it_is_silent(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "_SETTLE_MS", 1)
    heard = Heard()
    subscriber = Subscriber(server.endpoint, heard.take, replay_endpoint=server.replay_endpoint)
    server.subscribed()
    server.answer(0, 0, 1)
    server.answer(2, 2, 3)
    server.tell(2, 3, 4)
    assert heard.wait_for(4) == [0, 1, 2, 3, 4]
    subscriber.close()


def test_who_cannot_ask_for_what_was_missed_knows_nothing_of_it(publisher: Publisher) -> None:
    for number in range(5):
        publisher.publish(block(number))
    until_s = time.monotonic() + _PATIENCE_S
    while len(publisher._kept) < 5:  # they have gone out, to nobody
        assert time.monotonic() < until_s
        time.sleep(0.01)
    subscriber, heard = listen(publisher)
    end = tell_until_heard(publisher, heard, 5)
    publisher.publish(block(end))
    found = heard.wait_for(end)
    assert found[0] is None
    assert found[1:] == [*range(found[1] or 0, end + 1)]
    subscriber.close()


def test_what_there_was_no_room_for_is_a_gap_that_nobody_fills(tmp_path: Path) -> None:
    """It is counted by who tells, and who listens forgets what it knew."""
    publisher = Publisher(options(tmp_path, kv_events_buffer=2), Held(1))
    encoder = publisher._encoder
    assert isinstance(encoder, Held)
    subscriber, heard = listen(publisher, replay_endpoint=publisher.replay_endpoint)
    end = tell_until_heard(publisher, heard, 0)
    until_s = time.monotonic() + _PATIENCE_S
    encoder.gate.clear()
    while publisher.publish(block(end)):
        end += 1
        assert time.monotonic() < until_s
    encoder.gate.set()
    while not publisher.publish(block(end + 1)):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    found = heard.wait_for(end + 1)
    assert end not in found
    assert None in found
    assert found[-1] == end + 1
    subscriber.close()
    publisher.close()


class Held(Encoder):
    """An encoder that waits at a gate."""

    gate = threading.Event()
    gate.set()

    def encode(self, changes: Sequence[Change], time_s: float) -> bytes:
        assert self.gate.wait(_PATIENCE_S)
        return super().encode(changes, time_s)


def test_a_server_that_starts_again_holds_nothing_of_what_it_told(tmp_path: Path) -> None:
    first = Publisher(options(tmp_path), Encoder(1))
    subscriber, heard = listen(first, replay_endpoint=first.replay_endpoint)
    end = tell_until_heard(first, heard, 0)
    first.publish(block(end))
    heard.wait_for(end)
    first.close()
    second = Publisher(options(tmp_path), Encoder(1))
    until_s = time.monotonic() + _PATIENCE_S
    while 1000 not in heard.found:
        assert time.monotonic() < until_s
        second.publish(block(1000))
        time.sleep(0.01)
    found = heard.wait_for(1000)
    assert None in found[: found.index(1000)]
    subscriber.close()
    second.close()


@pytest.mark.parametrize("wrong", [{"endpoint": "5557"}, {"replay_endpoint": "tcp://nowhere"}])
def test_what_is_no_address_is_refused(wrong: dict[str, str]) -> None:
    given: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:1", **wrong}
    with pytest.raises(InvalidArgument, match=next(iter(wrong.values()))):
        Subscriber(take=lambda events: None, **given)


def test_a_reader_of_vllms_finds_the_frames_that_it_knows(publisher: Publisher) -> None:
    """It asks from a number on, and is told until an empty message."""
    for number in range(3):
        publisher.publish(block(number))
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, int(_PATIENCE_S * 1000))
        assert publisher.replay_endpoint is not None
        asking.connect(publisher.replay_endpoint)
        asking.send_multipart([b"", (1).to_bytes(8, "big")])
        found = []
        while (frames := asking.recv_multipart()[1:])[1]:
            found.append((int.from_bytes(frames[0], "big"), msgspec.msgpack.decode(frames[1])[1][0]["block_hashes"]))
        assert found == [(1, [1]), (2, [2])]
        assert int.from_bytes(frames[0], "big", signed=True) == -1


def test_a_request_that_is_none_does_not_end_the_answers(publisher: Publisher) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, int(_PATIENCE_S * 1000))
        assert publisher.replay_endpoint is not None
        asking.connect(publisher.replay_endpoint)
        for wrong in ([b""], [b"", b"short"], [b"", bytes(8), b""]):
            asking.send_multipart(wrong)
        asking.send_multipart([b"", bytes(8)])
        assert asking.recv_multipart() == [b"", b"\xff" * 8, b""]


def test_replicas_have_addresses_of_their_own() -> None:
    assert with_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert with_rank("tcp://[::1]:5557", 2) == "tcp://[::1]:5559"
    assert with_rank("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"


def test_addresses_of_both_kinds_are_reached() -> None:
    """A machine without IPv6 has one of them."""
    for host in ("127.0.0.1", "[::1]") if _has_ipv6() else ("127.0.0.1",):
        at = f"tcp://{host}:*"  # any port
        publisher = Publisher(KVEventsOptions(kv_events_endpoint=at, kv_events_replay_endpoint=at), Encoder(1))
        publisher.publish(block(7))
        subscriber, heard = listen(publisher, replay_endpoint=publisher.replay_endpoint)
        assert heard.wait_for(7) == [7]
        subscriber.close()
        publisher.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_an_address_that_is_taken_is_named(publisher: Publisher, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(InvalidArgument, match=f"kv_events_endpoint: tcp://127.0.0.1:{port}: .*in use"):
            Publisher(KVEventsOptions(kv_events_endpoint=f"tcp://127.0.0.1:{port}"), Encoder(1))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kv_events_endpoint": "5557"}, "kv_events_endpoint: '5557' is neither"),
        ({"kv_events_endpoint": "tcp://*"}, "neither"),
        ({"kv_events_endpoint": "tcp://*:0"}, "neither"),
        ({"kv_events_endpoint": "ipc://"}, "neither"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_replay_endpoint": "tcp://*:1"}, "kv_events_replay_endpoint: "),
        ({"kv_events_replay_endpoint": "tcp://*:5558"}, "requires kv_events_endpoint"),
    ],
)
def test_addresses_that_cannot_be_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        KVEventsOptions(**given).check()


def test_what_waits_is_told_before_the_end(tmp_path: Path) -> None:
    publisher = Publisher(options(tmp_path), Encoder(1))
    subscriber, heard = listen(publisher, replay_endpoint=publisher.replay_endpoint)
    end = tell_until_heard(publisher, heard, 0)
    for number in range(end, end + 200):
        publisher.publish(block(number))
    publisher.close()
    publisher.close()
    assert not publisher.publish(block(0)), "nobody is told any more"
    assert [one for one in heard.wait_for(end + 199) if one is not None][-1] == end + 199
    subscriber.close()


def test_a_server_that_sends_what_it_kept_again_and_again_is_not_read_for_ever(tmp_path):
    heard, context = Heard(), zmq.Context()
    tells, answers = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    tells.bind(f"ipc://{tmp_path}/e")
    answers.bind(f"ipc://{tmp_path}/r")
    with closing(Subscriber(f"ipc://{tmp_path}/e", heard.take, replay_endpoint=f"ipc://{tmp_path}/r")) as subscriber:
        who, _, first = answers.recv_multipart()
        assert int.from_bytes(first, "big") == 0
        for number in (0, 1, 1, 0):  # and so on, as often as it likes
            message = Encoder(1).encode(block(number), 0.0)
            answers.send_multipart((who, b"", number.to_bytes(8, "big"), message))
        assert heard.wait_for(1) == [0, 1]
        deadline = time.monotonic() + _PATIENCE_S
        while not subscriber.is_heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert subscriber.is_heard
    context.destroy(linger=0)
