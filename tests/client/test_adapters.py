"""Adapters are loaded and let go while requests run; a request names its own."""

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest

from jpaged._proto.v1 import control_pb2
from jpaged.client import AdapterInfo, AsyncClient, Client, convert
from jpaged.client.batch import BatchOptions, run_batch
from jpaged.client.convert import UnaryCall
from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied, Unavailable, Unsupported
from jpaged.service import service
from jpaged.testing import expected_tokens, with_adapters
from jpaged.types import SamplingParams
from tests.server import harness as rig
from tests.server.harness import eventually, running

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = "once upon a time there was"


def executor():
    return with_adapters(2)()


def tokens_of(weight=0, prompt=PROMPT, num_tokens=4):
    return tuple(expected_tokens(prompt.encode(), num_tokens, weight=weight))


@pytest.fixture
def files(tmp_path):
    for name, weight in {"a": "5", "b": "9", "c": "60", "bad": "no number"}.items():
        (tmp_path / name).write_text(weight)
    return tmp_path


async def test_a_request_runs_with_the_adapter_that_it_names(files):
    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        assert await client.list_adapters() == ()
        for name in "abc":
            assert await client.load_adapter(name, str(files / name)) == 1
        assert await client.list_adapters() == tuple(AdapterInfo(name, str(files / name), 1) for name in "abc")
        outputs = await asyncio.gather(*(client.complete(PROMPT, GREEDY, adapter=name) for name in ("a", "", "b", "c")))
        assert [output.outputs[0].token_ids for output in outputs] == [tokens_of(weight) for weight in (5, 0, 9, 60)]
        chunks = [chunk async for chunk in client.generate(PROMPT, GREEDY, adapter="b")]
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == tokens_of(9)


async def test_who_has_an_adapter_keeps_it_when_it_is_unloaded(files):
    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        await client.load_adapter("a", str(files / "a"))
        harness.faults.hold_after(2)
        long = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        first = asyncio.create_task(client.complete(PROMPT, long, adapter="a"))
        await eventually(lambda: not harness.faults.gate.is_set())
        await client.unload_adapter("a")
        with pytest.raises(NotFound, match="adapter: no adapter 'a' is loaded"):
            await client.complete(PROMPT, GREEDY, adapter="a")
        await client.load_adapter("a", str(files / "b"))  # the name is free: it is another adapter now
        harness.faults.release()
        assert (await first).outputs[0].token_ids == tokens_of(5, num_tokens=20)
        second = await client.complete(PROMPT, GREEDY, adapter="a")
        assert second.outputs[0].token_ids == tokens_of(9)
        assert second.usage.cached_tokens == 0


async def test_what_cannot_be_loaded_says_why(files):
    async with (
        running(executor=executor(), max_cpu_loras=2, max_loras=2) as harness,
        AsyncClient(harness.target) as client,
    ):
        await client.load_adapter("a", str(files / "a"))
        with pytest.raises(AlreadyExists, match="'a' is loaded"):
            await client.load_adapter("a", str(files / "b"))
        with pytest.raises(InvalidArgument, match=r"path: .*nowhere cannot be read: .*No such file"):
            await client.load_adapter("b", str(files / "nowhere"))
        with pytest.raises(InvalidArgument, match=r"path: .*bad holds no number"):
            await client.load_adapter("b", str(files / "bad"))
        with pytest.raises(InvalidArgument, match="path: is empty"):
            await client.load_adapter("b", "")
        with pytest.raises(InvalidArgument, match="name: 'ü' is not 1 to 128"):
            await client.load_adapter("ü", str(files / "b"))
        await client.load_adapter("b", str(files / "b"))  # whose name was not taken by what failed
        with pytest.raises(NotFound, match="name: no adapter 'c' is loaded"):
            await client.unload_adapter("c")
        with pytest.raises(NotFound, match="'c'"):
            await client.pin_prefix("p", PROMPT, adapter="c")


async def test_adapters_that_left_host_memory_are_read_again(files):
    async with (
        running(executor=executor(), max_cpu_loras=2, max_loras=2) as harness,
        AsyncClient(harness.target) as client,
    ):
        adapters = harness.serving.adapters
        for name in "abc":
            await client.load_adapter(name, str(files / name))
        assert (len(await client.list_adapters()), adapters.num_in_memory()) == (3, 2)
        outputs = await asyncio.gather(*(client.complete(PROMPT, GREEDY, adapter=name) for name in "abcabc"))
        assert [output.outputs[0].token_ids for output in outputs] == [tokens_of(weight) for weight in (5, 9, 60)] * 2
        assert adapters.num_in_memory() == 2
        for name, change in {"d": None, "e": "7"}.items():
            (files / name).write_text("6")
            for loaded in (name, f"{name}1", f"{name}2"):
                await client.load_adapter(loaded, str(files / name))
            (files / name).unlink()
            problem = r"adapter: the files of 'd', which left host memory, cannot be read again: .*No such file"
            if change is not None:
                (files / name).write_text(change)
                problem = "adapter: the files of 'e', which left host memory, have changed since it was loaded"
            with pytest.raises(NotFound, match=problem):
                await client.complete(PROMPT, GREEDY, adapter=name)
        assert (await client.complete(PROMPT, GREEDY, adapter="c")).outputs[0].token_ids == tokens_of(60)


async def test_lines_of_a_batch_name_adapters(files):
    turns = [{"role": "user", "content": "hi"}]
    chat: dict[str, Any] = {"messages": turns, "adapter": "a", "temperature": 0, "ignore_eos": True}
    bodies = [
        ("completions", {"prompt": PROMPT, "adapter": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True}),
        ("completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}),
        ("chat/completions", chat),
        ("completions", {"prompt": PROMPT, "adapter": "b"}),
        ("completions", {"prompt": PROMPT, "adapter": 7}),
    ]
    source, target = files / "in.jsonl", files / "out.jsonl"
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": f"/v1/{url}", "body": body}
        for i, (url, body) in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        await client.load_adapter("a", str(files / "a"))
        await run_batch(BatchOptions(source, target, harness.target), lambda summary: None)
        (expected,) = (await client.complete(messages=turns, sampling=GREEDY, adapter="a")).outputs
    found = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    texts = [bytes(token for token in tokens_of(weight) if token < 256).decode(errors="replace") for weight in (5, 0)]
    assert [found[name]["response"]["body"]["choices"][0]["text"] for name in "01"] == texts
    content = found["2"]["response"]["body"]["choices"][0]["message"]["content"]
    assert content.startswith(expected.text)
    errors = [found[name]["response"]["body"]["error"] for name in "34"]
    assert (errors[0]["code"], errors[0]["message"]) == ("NOT_FOUND", "adapter: no adapter 'b' is loaded")
    assert errors[1]["message"] == "adapter: 7 is not a string"


async def test_where_there_are_none_every_call_says_so():
    async with running() as harness, AsyncClient(harness.target) as client:
        for call in (
            client.complete(PROMPT, GREEDY, adapter="a"),
            client.load_adapter("a", "path"),
            client.unload_adapter("a"),
        ):
            with pytest.raises(Unsupported, match=r"adapters are off: set enable_lora .--enable-lora."):
                await call
        assert await client.list_adapters() == ()


async def test_without_control_nobody_loads(files):
    async with running(executor=executor(), disable_control=True) as harness, AsyncClient(harness.target) as client:
        for call in (client.load_adapter("a", str(files / "a")), client.unload_adapter("a")):
            with pytest.raises(PermissionDenied, match="disable_control"):
                await call


async def test_a_prefix_is_pinned_for_an_adapter(files):
    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        await client.load_adapter("a", str(files / "a"))
        assert await client.pin_prefix("p", PROMPT, adapter="a") == 24
        assert (await client.complete(PROMPT, GREEDY)).usage.cached_tokens == 0
        assert (await client.complete(PROMPT, GREEDY, adapter="a")).usage.cached_tokens >= 24


async def test_files_are_read_off_the_event_loop_and_the_name_is_taken_meanwhile(files, monkeypatch):
    begun, may_end, threads = threading.Event(), threading.Event(), []

    def slow(path):
        threads.append(threading.current_thread())
        begun.set()
        assert may_end.wait(60)
        return read(path)

    read = rig.read_fake
    monkeypatch.setattr(rig, "read_fake", slow)
    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        loading = asyncio.create_task(client.load_adapter("a", str(files / "a")))
        await eventually(begun.is_set)
        assert (await client.complete(PROMPT, GREEDY)).outputs[0].token_ids == tokens_of()
        assert await client.list_adapters() == ()
        with pytest.raises(NotFound):
            await client.complete(PROMPT, GREEDY, adapter="a")
        with pytest.raises(NotFound):
            await client.unload_adapter("a")
        may_end.set()
        assert await loading == 1
        assert threads[0] is not threading.main_thread()


async def test_the_threaded_client_speaks_of_adapters_too(files):
    async with running(executor=executor()) as harness:

        def speak():
            with Client(harness.target) as client:
                client.load_adapter("a", str(files / "a"))
                names = [adapter.name for adapter in client.list_adapters()]
                output = client.complete(PROMPT, GREEDY, adapter="a")
                client.unload_adapter("a")
                return names, output.outputs[0].token_ids, client.list_adapters()

        assert await asyncio.to_thread(speak) == (["a"], tokens_of(5), ())


async def test_weights_are_replaced_by_those_of_a_path_of_the_server(files):
    async with running(enable_sleep_mode=True) as harness, AsyncClient(harness.target) as client:
        assert (await client.model_info()).weight_version == "0"
        assert await client.update_weights(str(files / "a"), mode="wait", version=100) == "100"
        assert (await client.model_info()).weight_version == "100"
        result = await client.complete(PROMPT, GREEDY)
        (output,) = result.outputs
        assert output.token_ids == tokens_of(5) and result.weight_version == "100"
        assert (output.weight_version, output.weight_versions) == ("100", (("100", 4),))
        with pytest.raises(InvalidArgument, match=r"path: .*nothing"):
            await client.update_weights(str(files / "nothing"))
        unknown: Any = "stop"
        with pytest.raises(InvalidArgument, match="mode: 'stop' is not one of keep, wait, abort"):
            await client.update_weights(str(files / "a"), mode=unknown)

        def update() -> str:
            with Client(harness.target) as client:
                return client.update_weights(str(files / "b"))

        assert await asyncio.to_thread(update) == "2"
    async with running() as harness, AsyncClient(harness.target) as client:
        with pytest.raises(Unsupported, match=r"updating weights is off: .*--enable-sleep-mode"):
            await client.update_weights(str(files / "a"))


WEIGHT = {"weight": np.array([5])}


async def test_weights_are_replaced_by_arrays_that_are_sent() -> None:
    async with running(enable_sleep_mode=True) as harness, AsyncClient(harness.target) as client:
        assert await client.update_weights(WEIGHT, mode="wait", version="sent") == "sent"
        assert (await client.complete(PROMPT, GREEDY)).outputs[0].token_ids == tokens_of(5)

        def update() -> str:
            with Client(harness.target) as client:
                return client.update_weights([("weight", np.array([7]))])

        assert await asyncio.to_thread(update) == "2"
        assert (await client.complete(PROMPT, GREEDY)).outputs[0].token_ids == tokens_of(7)
        with pytest.raises(InvalidArgument, match=r"data: .* is not a FakeUpdate"):
            await client.update_weights({"other": np.array([7])})
        with pytest.raises(InvalidArgument, match=r"data: .* is not a FakeUpdate"):  # several messages
            await client.update_weights({"weight": np.zeros(1 << 18)})
        with pytest.raises(InvalidArgument, match=r"weights: tensor weight is a str of type ''"):
            await client.update_weights({"weight": "x"})
        with pytest.raises(InvalidArgument, match=r"weights: tensor weight occurs twice"):
            await client.update_weights([("weight", np.array([7]))] * 2)
        assert await client.update_weights(WEIGHT) == "3"  # nothing is left of those that were refused


async def test_an_update_whose_answer_was_lost_is_repeated() -> None:
    """Calls with the same upload return one version, also at once; the name can be used again for others."""
    *parts, last = convert.send_weights_calls(WEIGHT, "keep", None)
    async with running(enable_sleep_mode=True) as harness, AsyncClient(harness.target) as client:
        for part in parts:
            await client._run(part)
        assert {*await asyncio.gather(client._run(last), client._run(last))} == {"1"}
        assert await client._run(last) == "1"
        for part in parts:
            await client._run(part)
        assert await client._run(last) == "2"


@pytest.mark.long
async def test_another_client_waits_until_weights_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops halfway changes nothing, and another one may send after a while."""
    monkeypatch.setattr(convert, "_PART_BYTES", 20)
    first, *_, last = convert.send_weights_calls(WEIGHT, "keep", None)
    async with running(enable_sleep_mode=True) as harness, AsyncClient(harness.target) as client:
        assert await client._run(first) == await client._run(first) == 20
        with pytest.raises(Unavailable, match="another client sends weights"):
            await client.update_weights(WEIGHT, version="second")
        with pytest.raises(InvalidArgument, match="data: ends after 20 bytes"):
            await client._run(last)
        with pytest.raises(NotFound, match="upload: no weights were sent as"):
            await client._run(last)
        await client._run(first)
        monkeypatch.setattr(service, "_UPLOAD_TIMEOUT_S", 0.0)
        await client._run(first)  # drops them at once
        with pytest.raises(NotFound, match="upload: no weights were sent as"):
            await client._run(last)
        monkeypatch.undo()
        assert await client.update_weights(WEIGHT, version="second") == "second"
        with pytest.raises(InvalidArgument, match="upload"):
            await client._run(UnaryCall("SendWeights", control_pb2.SendWeightsRequest(data=b"x"), lambda one: one))
        both = control_pb2.UpdateWeightsRequest(path="a", upload="b")
        with pytest.raises(InvalidArgument, match="upload: conflicts with path"):
            await client._run(UnaryCall("UpdateWeights", both, lambda one: one))
    async with running() as harness, AsyncClient(harness.target) as client:
        with pytest.raises(Unsupported, match=r"updating weights is off: .*--enable-sleep-mode"):
            await client.update_weights(WEIGHT)
