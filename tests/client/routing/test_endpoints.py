"""Which server a call goes to: one that is there, where its beginning is known, and that is not busier than others."""

import asyncio
import itertools
from collections import Counter
from typing import Any

import grpc
import pytest

from jpaged._proto.v1 import control_pb2
from jpaged.client import AsyncClient, Client, convert
from jpaged.client.routing.endpoints import SERVING, Endpoint, Endpoints, get_key
from jpaged.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound, PermissionDenied, Unavailable
from jpaged.testing import FakeExecutor, VirtualClock
from jpaged.types import Prompt, SamplingParams
from tests.server.harness import eventually, running

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class Rig:
    """Servers that are not there, a clock that is turned, and the questions that are asked."""

    def __init__(self, num_servers: int) -> None:
        self.clock = VirtualClock()
        self.asked: list[tuple[str, str]] = []
        channels = [grpc.insecure_channel("127.0.0.1:1") for _ in range(num_servers)]
        self.all = [Endpoint(f"server{i}:1", channel) for i, channel in enumerate(channels)]
        self.endpoints = Endpoints(self.all, lambda one, question: self.asked.append((one.name, question)), self.clock)

    def enter(self, text: str | None = None) -> Endpoint:
        return self.endpoints.enter(None if text is None else text.encode())

    def call(self, text: str | None = None) -> str:
        """Where a call goes that has ended before the next one begins."""
        endpoint = self.enter(text)
        self.endpoints.leave(endpoint)
        return endpoint.name


def key(prompt: Prompt, **fields: Any) -> bytes | None:
    sampling = SamplingParams(cache_salt=fields.pop("cache_salt", ""))
    return get_key(convert.generate_request(prompt, sampling, request_id=None, model=None, **fields))


def test_prompts_that_begin_alike_have_one_key():
    long = "You are a helpful assistant. " * 100
    assert key(Prompt(text=long + "a")) == key(Prompt(text=long + "b")) != key(Prompt(text="b"))
    ids = tuple(range(1000))
    assert key(Prompt(token_ids=(*ids, 1))) == key(Prompt(token_ids=(*ids, 2))) != key(Prompt(token_ids=(5, *ids)))
    chats = [({"role": "system", "content": long}, {"role": "user", "content": text}) for text in "ab"]
    assert key(Prompt(messages=chats[0])) == key(Prompt(messages=chats[1])) != key(Prompt(messages=chats[0][1:]))
    text = Prompt(text="a")
    assert len({key(text), key(text, adapter="x"), key(text, cache_salt="x")}) == 3
    assert get_key(control_pb2.GetLoadRequest()) is None


@pytest.mark.parametrize("field", ["adapter", "cache_salt"])
def test_options_of_calls_must_be_whole_characters(field: str) -> None:
    options: dict[str, Any] = {field: "x\udcff"}
    with pytest.raises(InvalidArgument, match=f"{field}: is not UTF-8"):
        convert.score_call("a", ["b"], convert.CallOptions(**options))


def test_one_that_does_not_say_how_busy_it_is_is_passed_over_where_others_are_there():
    rig = Rig(2)
    silent, other = rig.all
    rig.endpoints.handle_answer(silent, "load", None, DeadlineExceeded("silent"))
    assert {rig.call(f"prompt {i}") for i in range(8)} == {other.name}
    rig.endpoints.note_absence(other)
    assert rig.call() == silent.name
    rig.endpoints.note_answer(other)
    rig.endpoints.note_answer(silent)
    assert {rig.call(f"prompt {i}") for i in range(8)} == {silent.name, other.name}
    rig.endpoints.handle_answer(silent, "load", None, DeadlineExceeded("silent"))
    rig.clock.advance(60)
    assert {rig.call(f"prompt {i}") for i in range(8)} == {silent.name, other.name}


def test_one_beginning_goes_to_one_server_and_many_are_shared_out():
    rig = Rig(4)
    where = {f"prompt {i}": rig.call(f"prompt {i}") for i in range(400)}
    assert all(rig.call(text) == name for text, name in where.items())
    counts = Counter(where.values())
    assert len(counts) == 4
    assert min(counts.values()) > 60


def test_a_server_that_goes_moves_what_it_had_and_nothing_else():
    rig = Rig(4)
    where = {f"prompt {i}": rig.call(f"prompt {i}") for i in range(200)}
    gone = rig.all[0]
    rig.endpoints.note_absence(gone)
    moved = {text: rig.call(text) for text in where}
    assert all(moved[text] == name for text, name in where.items() if name != gone.name)
    assert gone.name not in moved.values()
    rig.endpoints.note_answer(gone)
    assert {text: rig.call(text) for text in where} == where


def test_a_server_that_is_ahead_of_the_others_is_passed_over():
    rig = Rig(3)
    counts = Counter(rig.enter("the same").name for _ in range(60))
    assert len(counts) == 3
    assert max(counts.values()) < 40
    assert max(counts.values()) > 20  # it is kept together as far as that goes


def test_calls_without_a_prompt_go_to_the_least_busy_in_turn():
    rig = Rig(3)
    assert Counter(rig.enter().name for _ in range(30)) == {one.name: 10 for one in rig.all}
    rig.endpoints.leave(rig.all[1])
    assert rig.enter().name == rig.all[1].name


def test_what_servers_tell_of_other_clients_counts():
    rig = Rig(2)
    rig.call()
    assert sorted(rig.asked) == [("server0:1", "load"), ("server1:1", "load")]
    rig.endpoints.handle_answer(rig.all[0], "load", control_pb2.GetLoadResponse(num_running=9, num_waiting=3), None)
    assert {rig.call() for _ in range(5)} == {"server1:1"}
    rig.endpoints.handle_answer(rig.all[1], "load", None, PermissionDenied("no"))
    assert len(rig.asked) == 2  # not before a while has passed
    rig.clock.advance(1.5)
    rig.call()
    assert len(rig.asked) == 4
    rig.endpoints.handle_answer(rig.all[0], "load", control_pb2.GetLoadResponse(), None)
    rig.endpoints.handle_answer(rig.all[1], "load", None, Unavailable("gone"))
    assert {rig.call() for _ in range(5)} == {"server0:1"}


def test_a_server_that_was_away_is_asked_how_it_is_before_it_has_calls_again():
    rig = Rig(2)
    gone, other = rig.all
    rig.call()
    for one in rig.all:
        rig.endpoints.handle_answer(one, "load", control_pb2.GetLoadResponse(), None)
    rig.asked.clear()
    rig.endpoints.note_absence(gone)
    assert rig.call() == other.name
    assert rig.asked == []
    rig.clock.advance(0.9)
    assert rig.call() == other.name
    assert rig.asked == [(gone.name, "health")]
    rig.call()
    assert len(rig.asked) == 1  # the answer is waited for
    rig.endpoints.handle_answer(gone, "health", None, Unavailable("still"))
    rig.clock.advance(0.9)
    assert rig.call() == other.name
    health = type("Answer", (), {"status": SERVING})
    rig.endpoints.handle_answer(gone, "health", health, None)
    assert {rig.call() for _ in range(4)} == {gone.name, other.name}


def test_where_none_is_there_the_one_that_has_been_left_longest_is_tried():
    rig = Rig(3)
    tried = []
    for _ in range(6):
        tried.append(rig.call("x"))
        rig.endpoints.note_absence(next(one for one in rig.all if one.name == tried[-1]))
        rig.clock.advance(20.0)
    assert len(set(tried[:3])) == 3
    assert len(set(tried[3:])) == 3
    assert not rig.endpoints.has_open()


def test_calls_that_end_together_are_one_absence():
    rig = Rig(2)
    for _ in range(50):
        rig.endpoints.note_absence(rig.all[0])
    assert rig.all[0].away_until_s < rig.clock() + 1.0


def test_a_full_server_has_no_calls_before_it_said():
    rig = Rig(2)
    rig.endpoints.note_full(rig.all[0], 3.0, is_for_all=True)
    assert {rig.call() for _ in range(4)} == {rig.all[1].name}
    rig.endpoints.note_full(rig.all[1], 3.0, is_for_all=True)
    assert not rig.endpoints.has_open()
    assert rig.call() in {one.name for one in rig.all}
    rig.clock.advance(3.1)
    assert rig.endpoints.has_open()
    assert {rig.call() for _ in range(4)} == {one.name for one in rig.all}


def test_a_single_server_is_asked_nothing():
    rig = Rig(1)
    for _ in range(3):
        rig.call("x")
        rig.endpoints.note_absence(rig.all[0])
        rig.clock.advance(10.0)
    assert rig.asked == []


@pytest.mark.parametrize("target", [[], ["127.0.0.1:1", "127.0.0.1:1"], ["127.0.0.1:1", "nowhere"]])
def test_servers_are_named_well(target):
    with pytest.raises(InvalidArgument, match="target"):
        Client(target)


class Threaded:
    """`Client` in the shape of `AsyncClient`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: asyncio.to_thread(getattr(self._client, name), *args, **keywords)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_several_servers_are_one_client(kind):
    async with running(executor=FakeExecutor(num_blocks=256)) as first, running() as second:
        targets = [first.target, second.target]
        made = AsyncClient(targets) if kind == "async" else Client(targets)
        client: Any = made if isinstance(made, AsyncClient) else Threaded(made)
        await client.wait_until_ready(60)
        for i in range(24):
            assert (await client.complete(f"prompt {i}", GREEDY)).outputs[0].token_ids

        def loads() -> list[int]:
            return [one.serving.engine.load().num_generation_tokens for one in (first, second)]

        await eventually(lambda: sum(loads()) == 24 * 8)
        assert min(loads()) > 0
        assert (await client.model_info()).name == "fake"
        assert await client.detokenize(await client.tokenize("so")) == "so"
        assert len(await client.score("a", ["b", "c"])) == 2
        assert await client.pin_prefix("p", "a long enough prefix") > 0
        for one in (first, second):
            async with AsyncClient(one.target) as direct:
                with pytest.raises(AlreadyExists):
                    await direct.pin_prefix("p", "a long enough prefix")
        await client.unpin_prefix("p")
        with pytest.raises(NotFound):
            await client.unpin_prefix("p")
        for one in (first, second):
            one.faults.hold_after(2)
        running_ = [asyncio.ensure_future(client.complete(f"{i}", GREEDY, request_id=f"{i}")) for i in range(3)]
        await eventually(lambda: first.num_open_calls + second.num_open_calls == 3)
        for i in range(3):
            await client.abort(f"{i}")
        with pytest.raises(NotFound):
            await client.abort("nobody")
        for one in (first, second):
            one.faults.release()
        outputs = await asyncio.gather(*running_)
        assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
        await client.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_request_is_aborted_where_it_runs_though_another_server_is_not_there(kind):
    async with running(executor=FakeExecutor(num_blocks=256)) as harness:
        async with running() as gone:
            nowhere = gone.target
        made = (AsyncClient if kind == "async" else Client)([nowhere, harness.target])
        client: Any = made if isinstance(made, AsyncClient) else Threaded(made)
        harness.faults.hold_after(2)
        output = asyncio.ensure_future(client.complete("x", GREEDY, request_id="r"))
        await eventually(lambda: harness.num_open_calls == 1)
        await client.abort("r")
        with pytest.raises(Unavailable):  # the one that is not there may have it
            await client.abort("nobody")
        harness.faults.release()
        assert (await output).outputs[0].finish_reason == "abort"
        await client.close()


@pytest.mark.long
async def test_a_server_that_is_not_there_costs_nothing_but_a_look():
    async with running() as harness:
        async with running() as gone:
            nowhere = gone.target
        async with AsyncClient([nowhere, harness.target]) as client:
            outputs = await asyncio.gather(*(client.complete(f"prompt {i}", GREEDY) for i in range(20)))
            assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
        port = int(nowhere.partition(":")[2])
        async with AsyncClient([nowhere, harness.target]) as client:
            await client.complete("x", GREEDY)
            async with running(port=port) as again:
                for i in itertools.count():
                    await client.complete(f"prompt {i}", GREEDY)
                    if again.serving.engine.load().num_generation_tokens:
                        break


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_servers_are_asked_for_their_load(kind, monkeypatch):
    answered: list[tuple[str, Any]] = []
    take = Endpoints.handle_answer

    def handle_answer(endpoints: Any, endpoint: Any, question: Any, answer: Any, error: Any) -> None:
        answered.append((question, error))
        take(endpoints, endpoint, question, answer, error)

    monkeypatch.setattr(Endpoints, "handle_answer", handle_answer)
    async with running() as first, running() as second:
        targets = [first.target, second.target]
        made = AsyncClient(targets) if kind == "async" else Client(targets)
        client: Any = made if isinstance(made, AsyncClient) else Threaded(made)
        await client.complete("prompt", GREEDY)
        await eventually(lambda: answered.count(("load", None)) >= 2)
        await client.close()
