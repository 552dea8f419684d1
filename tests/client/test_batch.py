"""Batch files against a real server: every line once, also over crashes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.client import batch
from jpaged.client.batch import BatchOptions, BatchSummary, run_batch
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.testing import FakeExecutor, expected_tokens
from tests.server.harness import eventually, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def write_input(path: Path, bodies: list[tuple[str, dict[str, Any]]]) -> Path:
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def simple(count: int, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    fixed = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, **body}
    return [(COMPLETIONS, {"prompt": f"prompt {i}", **fixed}) for i in range(count)]


def results(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def ignore(summary: BatchSummary) -> None:
    """Takes progress that a test does not look at."""


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(batch, "_FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(batch, "_MAX_BACKOFF_S", 0.01)


async def test_every_line_gets_its_answer(tmp_path):
    bodies = [
        *simple(3),
        (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, "model": "fake"}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}),
        (COMPLETIONS, {"prompt": "x", "echo": True}),
        (COMPLETIONS, {"prompt": "x", "model": "other"}),
        (COMPLETIONS, {"prompt": "x" * 500}),
        (COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 3, "seed": 1, "max_tokens": 4, "ignore_eos": True}),
        (COMPLETIONS, {"prompt": "x", "n": 2, "beam_width": 3, "length_penalty": 0.5, "max_tokens": 4}),
    ]
    source, target = write_input(tmp_path / "in", bodies), tmp_path / "out"
    seen: list[BatchSummary] = []
    async with running() as harness:
        summary = await run_batch(BatchOptions(source, target, harness.target, max_concurrency=4), seen.append)
    found = results(target)
    assert found.keys() == {f"c{i}" for i in range(11)}
    for i in range(3):
        choice = found[f"c{i}"]["response"]["body"]["choices"][0]
        tokens = expected_tokens(list(f"prompt {i}".encode()), 6)
        assert choice["text"] == bytes(t for t in tokens if t < 256).decode(errors="replace")
        assert choice["finish_reason"] == "length"
    logprobs = found["c3"]["response"]["body"]["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 3
    assert found["c4"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    usage = found["c5"]["response"]["body"]["usage"]
    assert usage["total_tokens"] == 128  # no max_tokens in a chat: up to the model's length
    assert found["c6"]["error"] == {
        "code": "INVALID_ARGUMENT",
        "message": "body.echo: True is not supported: only False is",
    }
    assert found["c7"]["error"]["code"] == "NOT_FOUND"
    for name in ("c9", "c10"):
        choices = found[name]["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] != choices[1]["text"]
    assert found["c9"]["response"]["body"]["usage"]["completion_tokens"] == 12
    assert "over max_model_len (128)" in found["c8"]["error"]["message"]
    assert (summary.num_succeeded, summary.num_failed, summary.num_skipped) == (8, 3, 0)
    assert seen[-1] == summary
    assert summary.completion_tokens == sum(
        line["response"]["body"]["usage"]["completion_tokens"] for line in found.values() if line["response"]
    )


async def test_a_second_run_goes_on_where_the_first_was_torn(tmp_path):
    source, target = write_input(tmp_path / "in", simple(6)), tmp_path / "out"
    async with running() as harness:
        options = BatchOptions(source, target, harness.target, max_concurrency=1)
        await run_batch(options, ignore)
        whole = target.read_text().splitlines(keepends=True)
        target.write_text("".join(whole[:3]) + whole[3][:40])
        summary = await run_batch(options, ignore)
        assert (summary.num_skipped, summary.num_succeeded) == (3, 3)
        assert results(target).keys() == {f"c{i}" for i in range(6)}
        assert target.read_text().splitlines(keepends=True)[:3] == whole[:3]
        again = await run_batch(options, ignore)
        assert (again.num_skipped, again.num_succeeded, again.num_done) == (6, 0, 6)


async def test_a_full_queue_is_waited_for(tmp_path):
    source, target = write_input(tmp_path / "in", simple(30)), tmp_path / "out"
    executor = FakeExecutor(max_num_seqs=1)
    async with running(executor=executor, max_num_queued_reqs=1) as harness:
        summary = await run_batch(BatchOptions(source, target, harness.target, max_concurrency=20), ignore)
    assert summary.num_succeeded == 30
    assert summary.num_retries > 0


async def test_concurrency_is_bounded(tmp_path):
    source, target = write_input(tmp_path / "in", simple(12)), tmp_path / "out"
    async with running() as harness:
        harness.faults.gate.clear()
        run = asyncio.create_task(run_batch(BatchOptions(source, target, harness.target, max_concurrency=3), ignore))
        await eventually(lambda: harness.num_open_calls >= 3)
        assert harness.num_open_calls == 3
        harness.faults.release()
        assert (await run).num_succeeded == 12


async def test_a_request_that_takes_too_long_is_a_failed_line(tmp_path):
    source, target = write_input(tmp_path / "in", simple(1)), tmp_path / "out"
    async with running() as harness:
        harness.faults.gate.clear()
        summary = await run_batch(BatchOptions(source, target, harness.target, timeout_s=0.2), ignore)
    assert summary.num_failed == 1
    assert results(target)["c0"]["error"]["code"] == "DEADLINE_EXCEEDED"


async def test_a_server_that_goes_away_ends_the_run_and_the_next_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_MAX_UNAVAILABLE_TRIES", 2)
    source, target = write_input(tmp_path / "in", simple(20)), tmp_path / "out"
    async with running() as harness:

        def stop_after_five(summary: BatchSummary) -> None:
            if summary.num_succeeded == 5:
                harness.server.request_stop()

        with pytest.raises(Unavailable):
            await run_batch(BatchOptions(source, target, harness.target, max_concurrency=2), stop_after_five)
    num_done = len(results(target))
    assert 5 <= num_done < 20
    async with running() as harness:
        summary = await run_batch(BatchOptions(source, target, harness.target), ignore)
    assert (summary.num_skipped, summary.num_succeeded) == (num_done, 20 - num_done)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"custom_id": "stranger"}\n', "line 1: custom_id 'stranger' is not in the input"),
        ("nonsense\n", "line 1: is not a line of batch output"),
        ('{"id": 1}\n', "line 1: is not a line of batch output"),
    ],
)
async def test_an_output_that_is_another_batchs_is_left_alone(tmp_path, text, message):
    source, target = write_input(tmp_path / "in", simple(2)), tmp_path / "out"
    target.write_text(text)
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        await run_batch(BatchOptions(source, target, "127.0.0.1:1"), ignore)
    assert target.read_text() == text


@pytest.mark.parametrize(("name", "value"), [("max_concurrency", 0), ("timeout_s", 0.0)])
def test_options_out_of_bounds_are_named(name, value):
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidArgument, match=r"--(max-concurrency|timeout): "):
        BatchOptions(Path("in"), Path("out"), "x", **options)
