"""Batch files against a real server: every line once, also over crashes."""

import asyncio
import errno
import fcntl
import gzip
import json
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.client import batch
from jpaged.client.batch import BatchOptions, BatchSummary, run_batch
from jpaged.client.results import PASSING, OutputError, Results, failure_in
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.server import servicer
from jpaged.service.service import Service
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.testing import ByteTokenizer, FakeExecutor, expected_tokens
from tests.server.harness import eventually, running
from tests.service.test_token_bytes import byte_fallback

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def write_input(path: Path, bodies: list[tuple[str, dict[str, Any]]]) -> Path:
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def simple(count: int, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    fixed = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, **body}
    return [(COMPLETIONS, {"prompt": f"prompt {i}", **fixed}) for i in range(count)]


def results(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n")[:-1]]
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
        (COMPLETIONS, {"prompt_embeds": "A" * 5000}),
    ]
    source, target = write_input(tmp_path / "in", bodies), tmp_path / "out"
    seen: list[BatchSummary] = []
    async with running() as harness:
        summary = await run_batch(BatchOptions(source, target, harness.target, max_concurrency=4), seen.append)
    found = results(target)
    assert found.keys() == {f"c{i}" for i in range(12)}
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
    assert error_in(found["c6"])["message"] == "echo: True is not supported in a file"
    assert found["c7"]["response"]["status_code"] == 404 and error_in(found["c7"])["code"] == "model_not_found"
    for name in ("c9", "c10"):
        choices = found[name]["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] != choices[1]["text"]
    assert found["c9"]["response"]["body"]["usage"]["completion_tokens"] == 12
    assert "over max_model_len (128)" in error_in(found["c8"])["message"]
    assert len(refused := error_in(found["c11"])["message"]) < 200 and "is not supported in a file" in refused
    assert (error_in(found["c8"])["code"], error_in(found["c8"])["param"]) == ("context_length_exceeded", "prompt")
    assert (summary.num_succeeded, summary.num_failed, summary.num_skipped) == (8, 4, 0)
    assert seen[-1] == summary
    assert summary.completion_tokens == sum(
        line["response"]["body"]["usage"]["completion_tokens"] for line in found.values() if failure_in(line) is None
    )


async def test_a_line_may_name_an_alias_of_the_model(tmp_path: Path) -> None:
    bodies = simple(1, model="further") + simple(1, model="other")
    source, target = write_input(tmp_path / "in", bodies), tmp_path / "out"
    async with running(served_model_aliases=["further"]) as harness:
        await run_batch(BatchOptions(source, target, harness.target), ignore)
    found = results(target)
    assert (found["c0"]["response"]["status_code"], found["c1"]["response"]["status_code"]) == (200, 404)


def fallback_folder(tmp_path: Path) -> Path:
    """A folder of a tokenizer as SentencePiece makes them: bytes are tokens, and the first word has no space."""
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "tokenizer.json").write_text(byte_fallback().to_str())
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("name", ["bytes", "demo", "fallback"])
async def test_bytes_of_tokens_are_those_of_http(tmp_path: Path, name: str) -> None:
    folders = {"demo": FOLDER, "fallback": tmp_path}
    tokenizer: Any = ByteTokenizer()
    if name in folders:
        fallback_folder(tmp_path)
        tokenizer = HuggingFaceTokenizer(folders[name])
    how = {"max_tokens": 60, "temperature": 2.0, "seed": 5, "ignore_eos": True, "logprobs": 2, "prompt": [70, 71]}
    asked = [how, how | {"skip_special_tokens": False}, how | {"logprobs": 0, "seed": 6, "prompt": [5]}]
    source, target = write_input(tmp_path / "in", [(COMPLETIONS, body) for body in asked]), tmp_path / "out"
    executor = FakeExecutor(vocab_size=tokenizer.vocab_size)
    async with (
        running(executor=executor, tokenizer=tokenizer, http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        await run_batch(BatchOptions(source, target, harness.target), ignore)
        answers = [(await client.post(COMPLETIONS, json=body)).json() for body in asked]
    found = results(target)
    for number, answer in enumerate(answers):
        written = found[f"c{number}"]["response"]["body"]["choices"][0]
        assert written == answer["choices"][0]
        assert len(written["logprobs"]["bytes"]) == 60
        assert any("\ufffd" in token for token in written["logprobs"]["tokens"])


async def test_an_older_server_returns_texts_of_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def detokenized(service: Service, message: inference_pb2.DetokenizeRequest) -> Any:
        text = await service.detokenize(message.token_ids, skip_special_tokens=message.skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    monkeypatch.setattr(servicer, "detokenized", detokenized)
    how = {"max_tokens": 4, "temperature": 2.0, "seed": 5, "ignore_eos": True, "logprobs": 0}
    bodies = [{"prompt": "x", **how, "allowed_token_ids": [token_id]} for token_id in (0xC3, 104)]
    source, target = write_input(tmp_path / "in", [(COMPLETIONS, body) for body in bodies]), tmp_path / "out"
    async with running() as harness:
        await run_batch(BatchOptions(source, target, harness.target), ignore)
    found = [results(target)[name]["response"]["body"]["choices"][0]["logprobs"] for name in ("c0", "c1")]
    assert [one["bytes"] for one in found] == [[None] * 4, [[104]] * 4]
    assert [one["tokens"] for one in found] == [["\ufffd"] * 4, ["h"] * 4]


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
    executor = FakeExecutor(max_num_seqs=4)
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
    assert error_in(results(target)["c0"])["code"] == "DEADLINE_EXCEEDED"


@pytest.mark.long
async def test_a_server_that_goes_away_ends_the_run_and_the_next_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_MAX_TRIES", 2)
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
        ('{"custom_id": "stranger", "response": {}, "error": null}\n', "line 1: custom_id 'stranger' is not in the"),
        ('{"custom_id": ["c0"], "response": {}, "error": null}\n', "line 1: is not a line of batch output"),
        ('{"custom_id": "c0", "response": null, "error": null}\n', "line 1: is not a line of batch output"),
        ('{"custom_id": "c0", "method": "POST", "body": {}}\n', "line 1: is not a line of batch output"),
        ("nonsense\n", "line 1: is not a line of batch output"),
        ('{"id": 1}\n', "line 1: is not a line of batch output"),
        ("notes without an end", "line 1: is not a line of batch output"),
    ],
)
async def test_an_output_that_is_another_batchs_is_left_alone(tmp_path, text, message):
    source, target = write_input(tmp_path / "in", simple(2)), tmp_path / "out"
    target.write_text(text)
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        await run_batch(BatchOptions(source, target, "127.0.0.1:1"), ignore)
    assert target.read_text() == text


async def test_the_input_is_no_output(tmp_path):
    source = write_input(tmp_path / "in", simple(2))
    text = source.read_text()
    (tmp_path / "link").symlink_to(source)
    for path in (source, tmp_path / "link"):
        with pytest.raises(InvalidArgument, match=f"--output: {path} is the input"):
            await run_batch(BatchOptions(source, path, "127.0.0.1:1"), ignore)
    assert source.read_text() == text


@pytest.mark.parametrize(
    ("name", "value"), [("max_concurrency", 0), ("timeout_s", 0.0), ("timeout_s", math.nan), ("timeout_s", math.inf)]
)
def test_options_out_of_bounds_are_named(name, value):
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidArgument, match=r"--(max-concurrency|timeout): "):
        BatchOptions(Path("in"), Path("out"), "x:1", **options)


def error_in(line: dict[str, Any]) -> dict[str, Any]:
    error: dict[str, Any] = line["response"]["body"]["error"]
    return error


@pytest.mark.parametrize("status", [499, 500, 503, 504, 400, 404, 413, 429, 501])
def test_the_status_of_a_failed_line_tells_if_it_runs_again(status: int) -> None:
    body = {"error": {"code": "X"}}
    code = failure_in({"response": {"status_code": status, "body": body}, "error": None})
    assert (code in PASSING) == (status in (499, 500, 503, 504))
    assert failure_in({"response": {"status_code": 200, "body": {}}, "error": None}) is None


async def test_gzip_is_read_and_written_and_resumed(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz"
    plain = write_input(tmp_path / "in", [*simple(3), (COMPLETIONS, {"prompt": "x", "temperature": -1})])
    source.write_bytes(gzip.compress(plain.read_bytes()))

    def lines() -> list[dict[str, Any]]:
        return [json.loads(text) for text in gzip.decompress(target.read_bytes()).splitlines()]

    async with running() as harness:
        options = BatchOptions(source, target, harness.target)
        summary = await run_batch(options, ignore)
        assert (summary.num_succeeded, summary.num_failed) == (3, 1)
        first = lines()
        assert sorted(line["custom_id"] for line in first) == ["c0", "c1", "c2", "c3"]
        target.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in first[:2])))
        summary = await run_batch(options, ignore)
        assert summary.num_skipped == 2 and len(lines()) == 4
        await run_batch(BatchOptions(source, tmp_path / "out", harness.target), ignore)
        assert len(results(tmp_path / "out")) == 4
        assert sorted(os.listdir(tmp_path)) == ["in", "in.jsonl.gz", "out", "out.jsonl.gz"]
        torn = target.read_bytes()[:-9]
        target.write_bytes(torn)
        with pytest.raises(InvalidArgument, match="cannot be decompressed"):
            await run_batch(options, ignore)
        assert target.read_bytes() == torn
        source.write_bytes(source.read_bytes()[:-9])
        with pytest.raises(InvalidArgument, match=r"--input: .* cannot be decompressed"):
            await run_batch(options, ignore)


def failed(custom_id: str, code: str, **more: Any) -> str:
    error = {"code": code, "message": "earlier"}
    return json.dumps({"id": "x", "custom_id": custom_id, "response": None, "error": error, **more}) + "\n"


async def test_a_second_run_runs_again_what_may_pass_and_keeps_what_never_will(tmp_path):
    source, target = write_input(tmp_path / "in", simple(12)), tmp_path / "out"
    stays = ["INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"]
    codes = [*sorted(PASSING), *stays]
    target.write_text("".join(failed(f"c{i}", code) for i, code in enumerate(codes)))
    target.chmod(0o640)
    async with running() as harness:
        options = BatchOptions(source, target, harness.target)
        summary = await run_batch(options, ignore)
        assert (summary.num_skipped, summary.num_failed_before, summary.num_succeeded) == (4, 4, 8)
        assert summary.has_failures
        found = results(target)
        assert found.keys() == {f"c{i}" for i in range(12)}
        assert [line["error"]["code"] for line in found.values() if line["error"]] == stays
        assert target.stat().st_mode & 0o777 == 0o640
        whole = target.read_bytes()
        again = await run_batch(options, ignore)
        assert (again.num_skipped, again.num_failed_before, again.has_failures) == (12, 4, True)
        assert target.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


async def test_failures_stay_while_the_server_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_MAX_TRIES", 1)
    source, target = write_input(tmp_path / "in", simple(2)), tmp_path / "out"
    target.write_text(failed("c0", "DEADLINE_EXCEEDED"))
    with pytest.raises(Unavailable):
        await run_batch(BatchOptions(source, target, "127.0.0.1:1"), ignore)
    assert target.read_text() == failed("c0", "DEADLINE_EXCEEDED")


async def test_an_id_that_two_runs_wrote_keeps_one_line_the_one_that_succeeded(tmp_path):
    source, target = write_input(tmp_path / "in", simple(2)), tmp_path / "out"
    async with running() as harness:
        options = BatchOptions(source, target, harness.target)
        await run_batch(options, ignore)
        whole = target.read_text()
        target.write_text(failed("c0", "INVALID_ARGUMENT") + whole + whole)
        assert (await run_batch(options, ignore)).num_skipped == 2
        assert target.read_text() == whole


async def test_bad_lines_are_failed_lines_among_the_others(tmp_path):
    source, target = write_input(tmp_path / "in", simple(2)), tmp_path / "out"
    bad = [
        "nonsense",
        "[" * 200_000,
        '{"custom_id": "half", "method": "POST", "url": "/v1/completions", "body": {"prompt": "\\ud800"}}',
        '{"custom_id": "\\udc00", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}',
        '{"custom_id": "huge", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 1%s}}'
        % ("0" * 400),
    ]
    source.write_text(source.read_text() + "\n".join(bad))
    async with running() as harness:
        options = BatchOptions(source, target, harness.target)
        for num_skipped in (0, 5):  # those without an id are written anew
            summary = await run_batch(options, ignore)
            assert (summary.num_lines, summary.num_skipped) == (7, num_skipped)
            lines = [json.loads(text) for text in target.read_text().split("\n")[:-1]]
            codes = [(line["custom_id"], failure_in(line)) for line in lines]
            expected: list[Any] = [(name, "INVALID_ARGUMENT") for name in ("half", "\udc00", "huge", None, None)]
            assert sorted(codes, key=str) == sorted([("c0", None), ("c1", None), *expected], key=str)
            assert summary.has_failures


async def test_texts_with_other_line_ends_are_taken_up_again(tmp_path):
    tokenizer = ByteTokenizer()
    ends = "a\u2028b\u2029c\x85d"
    vars(tokenizer)["decode"] = lambda token_ids, *, skip_special_tokens=True: ends[: len(token_ids)]
    source, target = write_input(tmp_path / "in", simple(2)), tmp_path / "out"
    source.write_text(source.read_text().replace("prompt 0", ends))
    async with running(tokenizer=tokenizer) as harness:
        options = BatchOptions(source, target, harness.target)
        assert (await run_batch(options, ignore)).num_succeeded == 2
        assert "\u2028" in target.read_text(encoding="utf-8")
        assert (await run_batch(options, ignore)).num_skipped == 2
    assert len(results(target)) == 2


async def test_a_message_over_grpcs_limit_is_a_failed_line(tmp_path):
    source, target = write_input(tmp_path / "in", [(COMPLETIONS, {"prompt": "x" * (17 << 20)})]), tmp_path / "out"
    async with running() as harness:
        summary = await run_batch(BatchOptions(source, target, harness.target), ignore)
    assert (summary.num_failed, summary.num_retries) == (1, 0)
    assert error_in(results(target)["c0"])["code"] == "LIMIT_EXCEEDED"


async def test_two_runs_never_share_an_output(tmp_path):
    source, target = write_input(tmp_path / "in", simple(4)), tmp_path / "out"
    (tmp_path / "link").symlink_to(target)
    async with running() as harness:
        harness.faults.gate.clear()
        first = asyncio.create_task(run_batch(BatchOptions(source, target, harness.target), ignore))
        await eventually(lambda: harness.num_open_calls == 4)
        for path in (target, tmp_path / "link"):
            with pytest.raises(OutputError, match=f"is being written by process {os.getpid()} on "):
                await run_batch(BatchOptions(source, path, harness.target), ignore)
        harness.faults.release()
        assert (await first).num_succeeded == 4
        assert (await run_batch(BatchOptions(source, tmp_path / "link", harness.target), ignore)).num_skipped == 4
    assert len(results(target)) == 4


def test_a_lock_that_is_removed_while_it_is_taken_is_not_a_lock(tmp_path, monkeypatch):
    output, flock, removed = Results(tmp_path / "out", ()), fcntl.flock, list[Path]()

    def remove_the_first(lock: int, operation: int) -> None:
        if not removed:
            removed.append(output.lock_path)
            output.lock_path.unlink()  # as a run does that ends between open and flock
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", remove_the_first)
    with output:
        assert removed == [output.lock_path]
        with pytest.raises(OutputError, match="is being written by process"), Results(tmp_path / "out", ()):
            pass


def test_a_lock_that_a_dead_process_left_holds_nobody_up(tmp_path):
    (tmp_path / "out.lock").write_text("process 1 on elsewhere")
    with Results(tmp_path / "out", {"a"}) as output:
        assert output.finished == set()
    assert not (tmp_path / "out.lock").exists()


class FullDisk:
    """Stands in the place of os.write: room for so many bytes, and then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def __call__(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(file, data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("can_truncate", [True, False])
async def test_a_full_disk_ends_the_run_and_the_next_goes_on_exactly(tmp_path, monkeypatch, can_truncate):
    source, target = write_input(tmp_path / "in", simple(4)), tmp_path / "out"
    async with running() as harness:
        options = BatchOptions(source, target, harness.target, max_concurrency=1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", FullDisk(1000))
            if not can_truncate:
                refuse = OSError(errno.EIO, "Input/output error")
                patched.setattr(os, "ftruncate", Mock(side_effect=[None, None, refuse]))
            with pytest.raises(OutputError, match=r"--output: .*out cannot be written: No space left on device"):
                await run_batch(options, ignore)
        assert target.read_bytes().endswith(b"\n") == can_truncate
        whole = target.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        summary = await run_batch(options, ignore)
        assert summary.num_skipped == whole.count(b"\n") > 0
        assert target.read_bytes().startswith(whole)
    assert results(target).keys() == {"c0", "c1", "c2", "c3"}


async def test_a_rewrite_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    source, target = write_input(tmp_path / "in", simple(2)), tmp_path / "out"
    text = failed("c0", "UNAVAILABLE") + failed("c1", "NOT_FOUND")
    target.write_text(text)
    async with running() as harness:
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(OutputError, match="cannot be rewritten: No space left"):
            await run_batch(BatchOptions(source, target, harness.target), ignore)
    assert target.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("name", [".", "/dev/full"])
def test_an_output_that_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(InvalidArgument, match=r"--output: .* is not a regular file"), Results(tmp_path / name, set()):
        pass


@pytest.mark.parametrize(
    "target", ["127.0.0.1:99999", "127.0.0.1:0", "localhost", ":50051", "[::1]:65536", "a b:1", ""]
)
def test_a_target_that_grpc_would_take_for_another_is_refused(target):
    with pytest.raises(InvalidArgument, match=r"^--target: .* is not HOST:PORT with a port from 1 to 65535"):
        BatchOptions(Path("in"), Path("out"), target)
