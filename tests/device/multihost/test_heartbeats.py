"""A process that is gone without a word is missed, and who is awake is not; exit codes say whose fault it was."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator

import pytest

from jpaged.device.multihost.channel import Channel, MessageKind
from jpaged.device.multihost.handshake import Follower, Leader
from jpaged.device.multihost.heartbeats import Heartbeats, HeartbeatTimes, Silences
from jpaged.distributed_env import MultiHost
from jpaged.errors import InternalError, InvalidArgument, ProcessLost
from tests.device.multihost.test_executor import Owner, pair

TIMES = HeartbeatTimes(interval_s=1.0, timeout_s=5.0)
QUICK = HeartbeatTimes(interval_s=0.02, timeout_s=1.0)
"""A hundred looks go by before somebody is lost: in these a thread that is well has had its turn."""
PATIENT = HeartbeatTimes(interval_s=0.05, timeout_s=1e6)
SECOND = MultiHost("a:1", 3, 1, "a test")


@pytest.fixture
def pairs() -> Iterator[Callable[[], tuple[Channel, Channel]]]:
    """Connects two ends each time, which are closed in the end."""
    opened: list[Channel] = []

    def connect() -> tuple[Channel, Channel]:
        both = pair()
        opened.extend(both)
        return both

    yield connect
    for channel in opened:
        channel.close()


def test_who_is_silent_for_too_long_is_lost_once():
    silences = Silences([1, 2], TIMES, 100.0)
    lost = []
    for half_s in range(1, 30):
        silences.heard(2)
        lost += [(half_s / 2, process) for process in silences.look(100.0 + half_s / 2)]
    assert lost == [(5.0, 1)]


def test_a_sign_of_life_begins_a_silence_anew():
    silences = Silences([1], TIMES, 0.0)
    for half_s in range(1, 100):
        if half_s % 9 == 0:  # each four seconds and a half
            silences.heard(1)
        assert silences.look(half_s / 2) == []


def test_a_process_that_was_stopped_itself_misses_nobody_when_it_goes_on():
    silences = Silences([1], TIMES, 0.0)
    assert silences.look(1000.0) == []
    silences.heard(1)
    assert silences.look(1000.5) == []


def test_signs_of_life_are_sent_while_nothing_else_is(pairs):
    a, b = pairs()
    Heartbeats({1: a}, PATIENT, lambda process: None)
    assert [b.receive() for _ in range(3)] == [(MessageKind.HEARTBEAT, bytearray())] * 3


def fill(channel: Channel) -> None:
    """Sends until the other end, which does not read, takes no more."""
    channel._socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while channel._socket.send(b"\0" * 65536):
            """There was room."""
    channel._socket.setblocking(True)


def test_results_and_digests_reach_whoever_takes_them(pairs):
    a, b = pairs()
    leader, received = Leader({1: a}, Owner()), queue.Queue[object]()
    leader.take_results(received.put, 1)
    leader.take_digests(lambda *message: received.put(message), [1])
    b.send(MessageKind.RESULT, b"tokens")
    assert received.get(timeout=60) == b"tokens"
    b.send(MessageKind.DIGEST, b"inputs")
    assert received.get(timeout=60) == (1, b"inputs")


def test_the_leader_ends_all_when_one_is_silent_and_reads_nothing(pairs):
    (first, follower), (second, _) = pairs(), pairs()
    owner = Owner()
    fill(second)
    leader = Leader({1: first, 2: second}, owner)
    Heartbeats({0: follower}, QUICK, lambda process: None)
    leader.listen_for_heartbeats(QUICK)
    assert owner.has_heard.wait(60)
    (failure,) = owner.failures
    assert isinstance(failure, ProcessLost)
    told = next(payload for kind, payload in iter(follower.receive, None) if kind is MessageKind.FAILED)
    assert told.decode() == str(failure)
    assert str(failure) == "process 2 of 3 is lost: no message for 1 s (heartbeat_timeout)"


def test_a_follower_ends_when_nothing_comes_from_process_0(pairs):
    _, b = pairs()
    ends: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    follower = Follower(b, SECOND, lambda code, why: ends.put((code, why)))
    follower.listen_for_heartbeats(QUICK)
    assert ends.get(timeout=60) == (
        4,
        "process 1 of 3 exits: process 0 is lost: no message for 1 s (heartbeat_timeout)",
    )
    assert not follower.is_ready(1e6)


def test_signs_of_life_are_nothing_to_run(pairs):
    a, b = pairs()
    follower = Follower(b, SECOND, lambda code, why: None)
    messages = follower.follow()
    a.send(MessageKind.HEARTBEAT)
    a.send(MessageKind.STEP, b"one")
    assert next(messages) == (MessageKind.STEP, bytearray(b"one"))
    a.send(MessageKind.END)


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        (InvalidArgument("dtype", "is another"), None, 1),
        (InternalError("a collective broke"), None, 1),
        (RuntimeError("a collective broke"), "process 2 of 3 is lost", 4),
    ],
)
def test_the_exit_code_says_whether_a_process_failed_or_another_one(error, told, code, pairs, monkeypatch):
    monkeypatch.setattr("jpaged.device.multihost.handshake._BLAME_S", 0.0 if told is None else 60.0)
    a, b = pairs()
    ends: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    follower = Follower(b, SECOND, lambda code, why: ends.put((code, why)))
    if told is not None:
        a.send(MessageKind.FAILED, told.encode())
    follower.report(error)
    assert follower.exit_code == code
    if told is None:
        assert a.receive()[0] is MessageKind.FAILED
        a.send(MessageKind.FAILED, b"process 1 of 3 failed")  # which process 0 tells all of them
    assert ends.get(timeout=60)[0] == code


def test_a_follower_is_ready_once_it_follows_and_while_nothing_takes_too_long(pairs):
    a, b = pairs()
    follower = Follower(b, SECOND, lambda code, why: None)
    assert not follower.is_ready(1e6)
    messages = follower.follow()
    a.send(MessageKind.STEP, b"one")
    next(messages)
    assert follower.is_ready(1e6)
    begun_s = time.monotonic()
    while time.monotonic() <= begun_s:
        """The clock moves."""
    assert not follower.is_ready(0.0)
    a.send(MessageKind.END)
    next(messages)
    assert not follower.is_ready(1e6)
