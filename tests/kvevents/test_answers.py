"""Who has missed something is answered as it reads; who does not read costs little, and keeps nobody from asking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from jpaged.kvevents import publisher as publisher_module
from jpaged.kvevents.encoding import Encoder
from jpaged.kvevents.publisher import Publisher
from jpaged.pool import Change
from tests.kvevents.test_sockets import block, options

_PATIENCE_S = 60.0


class Big(Encoder):
    """An encoder of long messages."""

    def encode(self, changes: Sequence[Change], time_s: float) -> bytes:
        return bytes(_BIG_BYTES)


_BIG_BYTES = 40_000


class Asker:
    """Who asks for what was missed, and reads when it likes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher) -> None:
        assert publisher.replay_endpoint is not None
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(1)
        self._socket.setsockopt(zmq.RCVTIMEO, int(_PATIENCE_S * 1000))
        self._socket.connect(publisher.replay_endpoint)

    def ask(self, first: int = 0) -> None:
        self._socket.send_multipart([b"", first.to_bytes(8, "big")])

    def has_some(self) -> bool:
        return bool(self._socket.poll(1))

    def wait_for_some(self) -> None:
        assert self._socket.poll(int(_PATIENCE_S * 1000))

    def numbers(self) -> list[int]:
        found: list[int] = []
        while (frames := self._socket.recv_multipart())[2]:
            found.append(int.from_bytes(frames[1], "big"))
        return found


def keep(publisher: Publisher, begin: int, end: int) -> None:
    """Tells so many messages, and waits until they are kept."""
    for number in range(begin, end):
        assert publisher.publish(block(number))
    until(lambda: next(reversed(publisher._kept), None) == publisher._next - 1)


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.fixture
def asker() -> Iterator[Callable[[Publisher], Asker]]:
    """Makes one, which is closed at the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Asker] = []

    def make(publisher: Publisher) -> Asker:
        made.append(Asker(context, publisher))
        return made[-1]

    yield make
    context.destroy(linger=0)


def test_who_asks_and_does_not_read_has_little_kept_for_it(tmp_path: Path, asker: Any) -> None:
    """What it is sent later is what is kept then; others that ask meanwhile are told everything."""
    with closing(Publisher(options(tmp_path, kv_events_buffer=400), Big(1))) as publisher:
        keep(publisher, 0, 400)
        lazy, other = asker(publisher), asker(publisher)
        lazy.ask()
        lazy.wait_for_some()
        other.ask(3)
        assert other.numbers() == [*range(3, 400)]
        keep(publisher, 400, 800)
        found = lazy.numbers()
        assert found == [*range(len(found))]
        assert 0 < len(found) < 200
        lazy.ask(700)
        other.ask(1 << 63)
        assert (lazy.numbers(), other.numbers()) == ([*range(700, 800)], [])
        lazy.ask(790)
        lazy.ask(795)
        assert (lazy.numbers(), lazy.numbers()) == ([*range(790, 800)], [*range(795, 800)])


def test_those_that_ask_and_do_not_read_keep_nobody_from_asking(
    tmp_path: Path, asker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_ANSWERS", 2)
    monkeypatch.setattr(publisher_module, "_STALLED_S", 0.05)
    with closing(Publisher(options(tmp_path, kv_events_buffer=300), Big(1))) as publisher:
        keep(publisher, 0, 300)
        most = 0
        lazy = [asker(publisher) for _ in range(5)]
        for one in lazy:
            one.ask()
        for one in lazy:
            one.wait_for_some()
        other = asker(publisher)
        other.ask(299)
        while not other.has_some():
            most = max(most, len(publisher._answers))
        assert other.numbers() == [299]
        assert most <= 2


def test_what_is_kept_has_so_many_bytes(tmp_path: Path, asker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_KEPT_BYTES", 5 * _BIG_BYTES // 2)
    with closing(Publisher(options(tmp_path), Big(1))) as publisher:
        keep(publisher, 0, 10)
        one = asker(publisher)
        one.ask()
        assert one.numbers() == [8, 9]
