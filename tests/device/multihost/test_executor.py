"""What processes say to each other: encoded, compared, and refused where it is not alike."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jpaged import build as build_module
from jpaged.config import EngineConfig
from jpaged.device.mesh import CONTENTS_SPEC, serving_mesh
from jpaged.device.multihost import handshake
from jpaged.device.multihost.channel import Channel, MessageKind, connect, hold_port, listen, prove
from jpaged.device.multihost.executor import (
    HEADS,
    DigestCheck,
    RemoteReplica,
    compute_digest,
    decode,
    decode_outputs,
    encode,
    encode_outputs,
)
from jpaged.device.multihost.handshake import Leader, follow, gather, get_facts, require_same
from jpaged.device.transfers import AddressableShards
from jpaged.distributed_env import MultiHost
from jpaged.engine.executor import StepOutputs
from jpaged.engine.executor.aux_io import AuxOutputs
from jpaged.errors import InternalError, InvalidArgument, JpagedError, Unavailable

TOKENS = np.asarray([3, 1, 4], np.int32)
MULTIHOST = MultiHost("127.0.0.1:0", 3, 0, "a test")
SECRET = b"the secret of a cluster"


def pair() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return Channel(accepted, "b:2"), Channel(ours, "a:1")


class Owner:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.failures: list[JpagedError] = []
        self.has_heard = threading.Event()

    def fail(self, error: JpagedError) -> None:
        self.failures.append(error)
        self.has_heard.set()

    def drain(self) -> None:
        self.has_heard.set()


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("num_words", [0, 1, 40])
def test_a_message_arrives_as_it_was_sent(kind, num_words):
    head = tuple(2**40 + i for i in range(len(HEADS[kind])))
    words = np.arange(num_words, dtype=np.int32) - 4
    payload = bytearray(b"".join(encode(kind, *head, words=words)))
    got_head, got = decode(kind, payload)
    assert got_head == head
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, words)


def test_messages_keep_their_order_and_their_ends():
    a, b = pair()
    a.send(MessageKind.STEP, b"one", b"two")
    a.send(MessageKind.END)
    assert b.receive() == (MessageKind.STEP, bytearray(b"onetwo"))
    assert b.receive() == (MessageKind.END, bytearray())
    a.close()
    with pytest.raises(EOFError, match="the connection to a:1 was closed"):
        b.receive()
    b.close()
    with pytest.raises(ConnectionError, match="cannot send to a:1: "):
        b.send(MessageKind.END)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x01\x00\x00\x00\xffx"])
def test_what_is_no_message_ends_the_line(garbage):
    a, b = pair()
    a._socket.sendall(garbage)
    with pytest.raises(EOFError, match="a:1 sent an invalid message"):
        b.receive()
    a.close()
    b.close()


def test_a_port_that_is_held_goes_to_nobody_else():
    with hold_port("localhost") as holder:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen("localhost", port)


def test_an_address_where_nobody_answers_is_named():
    with hold_port("127.0.0.1") as holder:
        port = holder.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"process 0 did not answer at 127.0.0.1:{port} for 0.1 s"):
            connect("127.0.0.1", port, 0.1)


# --- digests ----------------------------------------------------------------------------------------------------------


def payload(number: int, tokens: np.ndarray = TOKENS, told: bytes = b"step") -> bytes:
    return number.to_bytes(8, "little") + compute_digest([told], tokens)


@pytest.mark.parametrize("is_own_first", [True, False])
def test_a_step_is_confirmed_when_all_have_sampled_the_same(is_own_first):
    check = DigestCheck(2)
    if is_own_first:
        check.add_own(1, (b"step",), TOKENS)
    check.add(1, payload(1))
    check.add(2, payload(1))
    if not is_own_first:
        check.add_own(1, (b"step",), TOKENS)
    assert check.num_unconfirmed == 0
    check.add_own(2, (b"step",), TOKENS)
    check.add(2, payload(2))
    assert check.num_unconfirmed == 1
    assert not check.wait(0, 0.0)


@pytest.mark.parametrize("is_own_first", [True, False])
@pytest.mark.parametrize("wrong", [payload(7, TOKENS + 1), payload(7, told=b"another step")])
def test_a_difference_names_the_step_and_the_process(is_own_first, wrong):
    check = DigestCheck(2)
    message = "step 7: the program or tokens of process 2 differ from those of process 0"
    check.add(1, payload(7))
    if is_own_first:
        check.add_own(7, (b"step",), TOKENS)
        with pytest.raises(InternalError, match=message):
            check.add(2, wrong)
    else:
        check.add(2, wrong)
        with pytest.raises(InternalError, match=message):
            check.add_own(7, (b"step",), TOKENS)


def test_outputs_travel_as_they_are():
    steps = StepOutputs(TOKENS.reshape(-1, 1).astype(np.int32), np.ones((TOKENS.size, 1), np.bool_))
    found = decode_outputs(StepOutputs, bytearray(b"".join(encode_outputs(steps))))
    np.testing.assert_array_equal(found.token_ids_rn, steps.token_ids_rn)
    np.testing.assert_array_equal(found.is_finite_rn, steps.is_finite_rn)
    assert found.logprobs_rn is None
    told = AuxOutputs(all_logprobs_rv=np.array([[-np.inf, -1.5]], np.float32), ranks_r=np.array([3], np.int32))
    got = decode_outputs(AuxOutputs, bytearray(b"".join(encode_outputs(told))))
    np.testing.assert_array_equal(got.all_logprobs_rv, told.all_logprobs_rv)
    np.testing.assert_array_equal(got.ranks_r, told.ranks_r)
    assert got.hidden_re is None


def test_a_wait_for_results_ends_when_a_process_is_lost():
    leader = types.SimpleNamespace(failure=None, take_results=lambda put, process: None)
    replica = RemoteReplica(cast("Any", None), cast("Any", leader), 1)
    leader.failure = Unavailable("process 1 of 2 is lost")
    with pytest.raises(Unavailable, match="process 1 of 2 is lost"):
        replica.collect(None)


# --- starting ---------------------------------------------------------------------------------------------------------


def test_facts_are_those_that_have_to_be_alike():
    mine = get_facts(EngineConfig.load({"block_size": 8, "port": 1}), MULTIHOST)
    require_same(mine, get_facts(EngineConfig.load({"block_size": 8, "port": 2}), MULTIHOST), 1)
    other = get_facts(EngineConfig.load({"block_size": 32}), MULTIHOST)
    with pytest.raises(InvalidArgument, match="block_size: is 8 in process 0 and 32 in process 1"):
        require_same(mine, other, 1)
    assert {"jax version", "jaxlib version", "jpaged version", "num_processes", "seed", "model"} <= mine.keys()
    assert not {"coordinator", "process_id", "join_timeout", "host", "port"} & mine.keys()


def hello(address: tuple[str, int], process: int, facts: dict[str, str], secret: bytes | None = None) -> Channel:
    channel = connect(*address, 10.0)
    if secret is not None:
        prove(channel, secret)
    channel.send_json(MessageKind.HELLO, {"process_id": process, "facts": facts})
    return channel


def test_strangers_are_turned_away_and_the_missing_are_named(caplog):
    facts = {"x": "1"}
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        stranger = socket.create_connection(address)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        first = hello(address, 2, facts)
        with pytest.raises(Unavailable, match=r"process 1 of 3 did not join within 0\.5 s"):
            gather(listener, facts, MULTIHOST, 0.5)
        kind, why = first.receive()
        assert kind is MessageKind.FAILED
        assert b"process 1 of 3 did not join" in why
        assert f"refused a connection from 127.0.0.1:{stranger.getsockname()[1]}, which" in caplog.text
        stranger.close()
        first.close()


def test_all_processes_come_in_any_order():
    facts = {"x": "1"}
    with listen("127.0.0.1", 0) as listener:
        others = [hello(listener.getsockname(), process, facts) for process in (2, 1)]
        channels = gather(listener, facts, MULTIHOST, 10.0)
    assert sorted(channels) == [1, 2]
    for channel in (*others, *channels.values()):
        channel.close()


@pytest.mark.parametrize(
    ("second", "facts", "message"),
    [(1, {"x": "1"}, "process_id: 1 joined twice"), (2, {"x": "2"}, "x: is 1 in process 0 and 2 in process 2")],
)
def test_processes_with_a_secret_that_cannot_be_together_are_all_told(second, facts, message):
    """In whichever order they have said who they are."""
    with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        gathering = pool.submit(gather, listener, {"x": "1"}, MULTIHOST, 10.0, SECRET)
        address = listener.getsockname()
        others = [hello(address, 1, {"x": "1"}, SECRET), hello(address, second, facts, SECRET)]
        for other in others:
            stack.callback(other.close)
        with pytest.raises(InvalidArgument, match=message):
            gathering.result(10.0)
        assert [other.receive()[0] for other in others] == [MessageKind.FAILED] * 2


def test_without_a_secret_a_process_that_differs_is_refused_and_the_right_one_awaited():
    right = {"x": "1"}
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        address: tuple[str, int] = listener.getsockname()
        gathering = pool.submit(gather, listener, right, MULTIHOST, 60.0)
        wrong = hello(address, 2, {"x": "2"})
        stack.callback(wrong.close)
        kind, why = wrong.receive()
        assert (kind, bytes(why)) == (
            MessageKind.FAILED,
            b"x: is 1 in process 0 and 2 in process 2; they must be equal",
        )
        for process in (2, 1):
            stack.callback(hello(address, process, right).close)
        channels = gathering.result(60.0)
        assert sorted(channels) == [1, 2]
        for channel in channels.values():
            channel.close()


def test_without_a_secret_a_second_process_of_a_number_is_refused_and_the_others_awaited(caplog):
    right = {"x": "1"}
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        address: tuple[str, int] = listener.getsockname()
        gathering = pool.submit(gather, listener, right, MULTIHOST, 60.0)
        twice = [hello(address, 1, right) for _ in range(2)]
        for other in twice:
            stack.callback(other.close)
        while "process_id: 1 joined twice" not in caplog.text:
            time.sleep(0.01)
        stack.callback(hello(address, 2, right).close)
        channels = gathering.result(60.0)
        channels[1].send_json(MessageKind.WELCOME, {"port": 1})
        assert {other.receive()[0] for other in twice} == {MessageKind.FAILED, MessageKind.WELCOME}
        for channel in channels.values():
            channel.close()


def test_the_reason_for_a_refusal_is_named_when_no_other_process_comes():
    with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        for process, value in ((1, "1"), (2, "2")):
            stack.callback(hello(listener.getsockname(), process, {"x": value}).close)
        message = "process 2 of 3 did not join within 0.5 s (join_timeout); x: is 1 in process 0 and 2 in process 2"
        with pytest.raises(Unavailable, match=re.escape(message)):
            gather(listener, {"x": "1"}, MULTIHOST, 0.5)


def test_a_process_that_comes_after_one_that_cannot_be_here_is_told_too(monkeypatch):
    monkeypatch.setattr(handshake, "_FAREWELL_S", 60.0)
    facts = {"x": "1"}
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        address: tuple[str, int] = listener.getsockname()
        late = connect(*address, 10.0)
        stack.callback(late.close)
        gathering = pool.submit(gather, listener, facts, MULTIHOST, 10.0, SECRET)
        prove(late, SECRET)
        different = hello(address, 2, {"x": "2"}, SECRET)
        stack.callback(different.close)
        assert different.receive()[0] is MessageKind.FAILED
        late.send_json(MessageKind.HELLO, {"process_id": 1, "facts": facts})
        kind, why = late.receive()
        assert (kind, bytes(why)) == (
            MessageKind.FAILED,
            b"x: is 1 in process 0 and 2 in process 2; they must be equal",
        )
        with pytest.raises(InvalidArgument, match="x: is 1 in process 0"):
            gathering.result(10.0)


def test_a_process_that_process_0_hangs_up_on_is_told_its_address():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        place = MultiHost(f"127.0.0.1:{port}", 2, 1, "a test")
        with ThreadPoolExecutor(1) as pool:
            end = pool.submit(follow, EngineConfig(), place, lambda line: None, lambda code, why: None)
            listener.accept()[0].close()
            with pytest.raises(
                Unavailable, match=rf"process 0 at 127\.0\.0\.1:{port} exited before all processes joined: "
            ):
                end.result(10.0)


# --- the leader -------------------------------------------------------------------------------------------------------


def test_a_leader_settles_for_the_least_and_ends_the_others_well():
    (a, other), owner = pair(), Owner()
    leader = Leader({1: a}, owner)
    other.send(MessageKind.FACTS, (7).to_bytes(8, "little"))
    assert leader.least(9) == 7
    assert other.receive() == (MessageKind.SETTLED, bytearray((7).to_bytes(8, "little")))
    other.send(MessageKind.SHUTDOWN_REQUEST)
    assert owner.has_heard.wait(10.0)

    def end_well() -> None:
        assert other.receive()[0] is MessageKind.END
        other.close()

    thread = threading.Thread(target=end_well)
    thread.start()
    assert leader.end(10.0)
    thread.join()
    assert owner.failures == []
    a.close()


@pytest.fixture
def has_ended_anyway(monkeypatch) -> threading.Event:
    """Set where a leader would end the process, which it does at once."""
    event = threading.Event()
    monkeypatch.setattr(handshake, "END_GRACE_S", 0.0)
    monkeypatch.setattr(Leader, "_end_anyway", lambda leader: event.set())
    return event


def test_a_process_that_is_gone_is_named_with_its_address(has_ended_anyway):
    (a, other), owner = pair(), Owner()
    Leader({1: a}, owner)
    other.close()
    assert owner.has_heard.wait(10.0)
    assert [str(failure) for failure in owner.failures] == ["process 1 of 2 is lost: the connection to b:2 was closed"]
    assert has_ended_anyway.wait(10.0)
    a.close()


def test_nothing_can_be_sent_to_a_process_whose_last_word_is_not_lost(has_ended_anyway):
    (a, other), owner = pair(), Owner()
    leader = Leader({1: a}, owner)
    a._socket.shutdown(socket.SHUT_WR)
    threading.Timer(0.1, other.send, (MessageKind.FAILED, b"a fault")).start()
    with pytest.raises(Unavailable, match="process 1 of 2 failed: a fault"):
        leader.send(MessageKind.STEP)
    assert owner.has_heard.wait(10.0)
    assert [str(failure) for failure in owner.failures] == ["process 1 of 2 failed: a fault"]
    assert has_ended_anyway.wait(10.0)
    other.close()
    assert leader.end(10.0)
    a.close()


def test_nothing_can_be_sent_to_a_process_that_says_nothing(has_ended_anyway, monkeypatch):
    (a, other), owner = pair(), Owner()
    monkeypatch.setattr(handshake, "_BLAME_S", 0.01)
    leader = Leader({1: a}, owner)
    a._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(Unavailable, match="process 1 of 2 is lost: cannot send to b:2: "):
        leader.send(MessageKind.STEP)
    assert owner.failures == [leader.failure]
    assert has_ended_anyway.wait(10.0)
    other.close()
    assert leader.end(10.0)
    a.close()


def test_findings_that_differ_are_named_to_all():
    (a, other), owner = pair(), Owner()
    leader = Leader({1: a}, owner)
    other.send_json(MessageKind.FACTS, {"attention_backend": "xla"})
    with pytest.raises(InvalidArgument, match="attention_backend: is cpu in process 0 and xla in process 1"):
        leader.agree({"attention_backend": "cpu"})
    assert other.receive()[0] is MessageKind.FAILED
    assert not leader.end(0.0)
    other.close()
    a.close()


# --- parts ------------------------------------------------------------------------------------------------------------


def test_where_all_devices_are_ours_local_parts_are_the_whole():
    sharding = NamedSharding(serving_mesh(4), CONTENTS_SPEC)
    parts, whole = AddressableShards(sharding), np.arange(2 * 3 * 4 * 8 * 2, dtype=np.int32).reshape(2, 3, 4, 8, 2)
    assert parts.shape(whole.shape) == whole.shape
    np.testing.assert_array_equal(parts.to_host(jax.device_put(whole, sharding)), whole)
    assert parts.to_devices(whole, whole.shape) is whole


def test_a_process_takes_steps_when_all_processes_are_warm(monkeypatch):
    """Replicas without a process in common do not wait for each other in their programs."""
    events: list[str] = []
    executor = types.SimpleNamespace(warm_up=lambda progress: events.append("warm"))
    follower = cast("Any", types.SimpleNamespace(agree=lambda facts: events.append(f"agreed on {sorted(facts)}")))
    source = types.SimpleNamespace(pooler=types.SimpleNamespace(max_len=None))
    monkeypatch.setattr(build_module, "_place", lambda *args, **options: (source, None, []))
    monkeypatch.setattr(build_module, "_make_executors", lambda *args: [executor])
    monkeypatch.setattr(build_module, "_findings", lambda *args: {"dtype": "float32"})
    monkeypatch.setattr(build_module, "run_steps", lambda *args, **options: events.append("steps"))
    build_module.follow(EngineConfig.load({"model": "demo"}), lambda what, done, total: None, follower)
    assert events == ["agreed on ['dtype']", "warm", "agreed on []", "steps"]
