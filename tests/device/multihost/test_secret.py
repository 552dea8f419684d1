"""Processes that meet: who knows the secret is taken, and nobody else can hold up or end those who do."""

from __future__ import annotations

import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from jpaged.config import EngineConfig
from jpaged.device.multihost import handshake
from jpaged.device.multihost.channel import Channel, MessageKind, connect, listen, prove
from jpaged.device.multihost.handshake import gather
from jpaged.distributed_env import MultiHost
from jpaged.errors import InvalidArgument, Unavailable

SECRET, OTHER = b"the secret of a cluster", b"the secret of another"
FACTS = {"x": "1"}
TWO = MultiHost("127.0.0.1:0", 2, 0, "a test")
Address = tuple[str, int]


@contextmanager
def gathering(secret: bytes | None) -> Iterator[tuple[Address, Future[dict[int, Channel]]]]:
    """Process 0 of two, which waits for the other."""
    with ThreadPoolExecutor(1) as pool, listen("127.0.0.1", 0) as listener:
        found = pool.submit(gather, listener, FACTS, TWO, 60.0, secret)
        yield listener.getsockname(), found
        for channel in found.result(60).values():
            channel.close()


@contextmanager
def connected(address: Address) -> Iterator[Channel]:
    channel = connect(*address, 10.0)
    try:
        yield channel
    finally:
        channel.close()


def come(address: Address, secret: bytes | None) -> Channel:
    """Join as process 1."""
    channel = connect(*address, 10.0)
    if secret is not None:
        prove(channel, secret)
    channel.send_json(MessageKind.HELLO, {"process_id": 1, "facts": FACTS})
    return channel


@pytest.mark.parametrize("secret", [None, SECRET])
def test_whoever_knows_the_secret_is_taken(secret: bytes | None) -> None:
    with gathering(secret) as (address, found):
        channel = come(address, secret)
        assert sorted(found.result(60)) == [1]
        channel.close()


@pytest.mark.parametrize(
    ("wanted", "brought", "problem"),
    [
        (SECRET, OTHER, "is not process 0: it does not have the secret"),
        (None, SECRET, "it has a secret .cluster_secret_file., but process 0 has none"),
    ],
)
def test_another_secret_is_told_to_both(
    wanted: bytes | None, brought: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with gathering(wanted) as (address, found):
        with connected(address) as channel, pytest.raises(Unavailable, match=problem):
            prove(channel, brought)
        while "which is not one of this server's processes: " not in caplog.text:
            time.sleep(0.01)
        come(address, wanted).close()
        assert sorted(found.result(60)) == [1]


def test_one_without_the_secret_is_told_what_is_wanted() -> None:
    with gathering(SECRET) as (address, _):
        stranger = come(address, None)
        kind, why = stranger.receive()
        assert (kind, bytes(why)) == (
            MessageKind.FAILED,
            b"it has no secret, but process 0 requires one (cluster_secret_file)",
        )
        stranger.close()
        come(address, SECRET).close()


def test_a_proof_is_of_no_use_to_whoever_overheard_it() -> None:
    """Neither a second time, nor sent back to whoever made it."""
    with gathering(SECRET) as (address, _):
        with connected(address) as channel:
            channel.send(MessageKind.JOIN, bytes(32))
            kind, payload = channel.receive()
            assert kind is MessageKind.CHALLENGE
            channel.send(MessageKind.PROOF, bytes(payload[32:]))
            kind, why = channel.receive()
            assert (kind, bytes(why)) == (MessageKind.FAILED, b"it does not have the secret (cluster_secret_file)")
        come(address, SECRET).close()


def test_one_that_only_listens_where_process_0_should_be_learns_nothing_and_is_found_out() -> None:
    with (
        listen("127.0.0.1", 0) as impostor,
        ThreadPoolExecutor(1) as pool,
        connected(impostor.getsockname()) as channel,
    ):
        proving = pool.submit(prove, channel, SECRET)
        accepted = Channel(impostor.accept()[0], "x")
        kind, nonce = accepted.receive()
        assert (kind, len(nonce)) == (MessageKind.JOIN, 32)
        accepted.send(MessageKind.CHALLENGE, bytes(64))
        with pytest.raises(Unavailable, match="is not process 0"):
            proving.result(60)
        accepted.close()


NESTED = b"[" * 100_000
BEYOND = b'{"process_id": 1e999, "facts": {}}'
STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "says nothing": lambda end: None,
    "speaks HTTP": lambda end: end.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "goes away": lambda end: end.close(),
    "stops in the middle": lambda end: end.sendall(struct.pack("<IB", 1000, MessageKind.HELLO) + b"{"),
    "promises a lot": lambda end: end.sendall(struct.pack("<IB", 1 << 28, MessageKind.HELLO)),
    "sends a short nonce": lambda end: end.sendall(struct.pack("<IB", 1, MessageKind.JOIN) + b"x"),
    "sends what is nested": lambda end: end.sendall(struct.pack("<IB", len(NESTED), MessageKind.HELLO) + NESTED),
    "sends no JSON": lambda end: end.sendall(struct.pack("<IB", 1, MessageKind.HELLO) + b"x"),
    "sends another message": lambda end: end.sendall(struct.pack("<IB", 0, MessageKind.END)),
    "has a number beyond all": lambda end: end.sendall(struct.pack("<IB", len(BEYOND), MessageKind.HELLO) + BEYOND),
    "sends other JSON": lambda end: end.sendall(struct.pack("<IB", 2, MessageKind.HELLO) + b"{}"),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_stranger_holds_up_nobody(stranger: str, secret: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_GREETING_S", 10_000.0)
    with gathering(secret) as (address, found):
        ends = [socket.create_connection(address) for _ in range(3)]
        for end in ends:
            STRANGERS[stranger](end)
        channel = come(address, secret)
        assert sorted(found.result(60)) == [1]
        for end in ends:
            end.close()
        channel.close()


def test_more_strangers_than_are_greeted_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_MAX_GREETED", 4)
    with gathering(SECRET) as (address, found):
        ends = [socket.create_connection(address) for _ in range(20)]
        channel = come(address, SECRET)
        assert sorted(found.result(60)) == [1]
        assert ends[0].recv(1) == b""
        for end in ends:
            end.close()
        channel.close()


def test_one_that_speaks_a_byte_at_a_time_has_the_same_time_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_GREETING_S", 0.2)
    with gathering(None) as (address, _):
        slow = socket.create_connection(address)
        slow.sendall(struct.pack("<IB", 1 << 19, MessageKind.HELLO))
        slow.settimeout(0.02)
        is_open = True
        while is_open:  # each byte comes well in time
            with suppress(TimeoutError):
                try:
                    slow.sendall(b"x")
                    is_open = slow.recv(1) != b""
                except ConnectionError:
                    is_open = False
        slow.close()
        monkeypatch.setattr(handshake, "_GREETING_S", 60.0)
        come(address, None).close()


def test_the_secret_is_in_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPAGED_CLUSTER_SECRET", raising=False)
    assert EngineConfig.load({}).cluster_secret() is None
    monkeypatch.setenv("JPAGED_CLUSTER_SECRET", "from the environment")
    assert EngineConfig.load({}).cluster_secret() == b"from the environment"
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    config = EngineConfig.load({"cluster_secret_file": str(path)})
    assert config.cluster_secret() == SECRET
    path.write_text("short\n")
    with pytest.raises(
        InvalidArgument, match=r"cluster_secret_file: .* has a secret of 5 bytes, below the limit of 16"
    ):
        config.cluster_secret()
    path.unlink()
    with pytest.raises(InvalidArgument, match=r"cluster_secret_file: .* cannot be read: No such file"):
        config.cluster_secret()
    monkeypatch.setenv("JPAGED_CLUSTER_SECRET", "short")
    with pytest.raises(InvalidArgument, match="JPAGED_CLUSTER_SECRET: has a secret of 5 bytes"):
        EngineConfig.load({}).cluster_secret()


@pytest.mark.parametrize(
    "hello",
    [
        {"process_id": 2, "facts": FACTS},
        {"process_id": 0, "facts": FACTS},
        {"process_id": -1, "facts": FACTS},
        {"process_id": True, "facts": FACTS},
        {"process_id": 1.0, "facts": FACTS},
        {"process_id": "1", "facts": FACTS},
        {"process_id": 1, "facts": {}},
        {"process_id": 1, "facts": {"x": "1", "y": "2"}},
        {"process_id": 1, "facts": {"x": 1}},
        {"process_id": 1, "facts": [["x", "1"]]},
        {"process_id": 1},
        {},
    ],
)
def test_a_hello_of_another_kind_does_not_end_the_start(hello: dict[str, object]) -> None:
    with gathering(None) as (address, found):
        with connected(address) as stranger:
            stranger.send_json(MessageKind.HELLO, hello)
            with suppress(EOFError):
                assert stranger.receive()[0] is MessageKind.FAILED
        come(address, None).close()
        assert sorted(found.result(60)) == [1]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_stranger_has_4_kib_for_a_message(secret: bytes | None) -> None:
    with gathering(secret) as (address, found):
        with socket.create_connection(address) as stranger:
            stranger.sendall(struct.pack("<IB", 4097, MessageKind.HELLO))
            assert stranger.recv(1) == b""
        come(address, secret).close()
        assert sorted(found.result(60)) == [1]


@contextmanager
def in_place_of_process_0(answer: bytes) -> Iterator[Address]:
    """Listen where process 0 should be, and answer whoever comes with some bytes, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        ends: list[socket.socket] = []

        def take() -> None:
            end, _ = listener.accept()
            ends.append(end)
            end.sendall(answer)

        taken = pool.submit(take)
        yield listener.getsockname()
        taken.result(60)
        for end in ends:
            end.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", r"did not answer within 1 s \(join_timeout\)"),
        (struct.pack("<IB", 1 << 28, MessageKind.WELCOME), "sent an invalid message"),
        (struct.pack("<IB", 4097, MessageKind.WELCOME), "sent an invalid message"),
        (struct.pack("<IB", 10, MessageKind.WELCOME) + b"{", r"did not answer within 1 s \(join_timeout\)"),
        (struct.pack("<IB", 2, MessageKind.WELCOME) + b"{}", "process 0"),
    ],
)
def test_a_process_does_not_wait_for_a_stranger_in_place_of_process_0(
    answer: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_BLAME_S", 0.05)
    config = EngineConfig.load({"join_timeout": 1.0})
    with in_place_of_process_0(answer) as (host, port):
        multihost = MultiHost(f"{host}:{port}", 2, 1, "a test")
        with pytest.raises(Unavailable, match=problem):
            handshake.follow(config, multihost, lambda text: None, lambda code, why: None)


def test_memory_for_a_message_is_taken_as_it_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: Address = listener.getsockname()
        channel = connect(*address, 10.0)
        end, _ = listener.accept()
    channel.trust()
    end.sendall(struct.pack("<IB", 1 << 28, MessageKind.STEP) + b"x")
    end.close()
    tracemalloc.start()
    try:
        with pytest.raises(EOFError):
            channel.receive()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        channel.close()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_long_difference_still_names_its_field(secret: bytes | None) -> None:
    facts = {"x": "1" * 3000}
    with ThreadPoolExecutor(1) as pool, listen("127.0.0.1", 0) as listener:
        address: Address = listener.getsockname()
        found = pool.submit(gather, listener, facts, TWO, 60.0, secret)
        with connected(address) as channel:
            if secret is not None:
                prove(channel, secret)
            channel.send_json(MessageKind.HELLO, {"process_id": 1, "facts": {"x": "2" * 3000}})
            with pytest.raises(Unavailable, match=r"^x: is 111"):
                channel.receive_json(MessageKind.WELCOME)
        if secret is not None:
            with pytest.raises(InvalidArgument, match="must be equal"):
                found.result(60)
            return
        with connected(address) as right:  # without a secret, the start goes on
            right.send_json(MessageKind.HELLO, {"process_id": 1, "facts": facts})
            for channel in found.result(60).values():
                channel.close()
