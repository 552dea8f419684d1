"""Lines of the log: JSON where it is asked for, one for each request, and never a word of a prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from jpaged.telemetry.logs import RepeatLimit, TextFormatter, set_up_logs
from tests.server.harness import collect, failure_of, request, running


class Log:
    """What was written to standard error."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture, self._text = capture, ""

    def getvalue(self) -> str:
        self._text += self._capture.readouterr().err
        return self._text


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    root = logging.getLogger()
    before = list(root.handlers), root.level, logging.getLogger("jpaged.requests").level
    yield Log(capsys)
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in before[0]:
        root.addHandler(handler)
    root.setLevel(before[1])
    logging.getLogger("jpaged.requests").setLevel(before[2])


def lines_of(log: Log) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


async def test_a_request_is_a_line_of_json_without_its_text(log: Log) -> None:
    set_up_logs("json", has_requests=True)
    async with running(enable_log_requests=True) as harness:
        metadata = (("x-jpaged-tenant", "them"),)
        asked = request("a secret", request_id="mine")
        messages = await collect(harness.inference.Generate(asked, metadata=metadata))
        await failure_of(harness.inference.Generate(request("a secret", stop=["a secret" * 1000])))
    done, refused = [line for line in lines_of(log) if line["logger"] == "jpaged.requests"]
    assert (done["request_id"], done["tenant"], done["face"], done["status"]) == ("mine", "them", "grpc", "OK")
    assert (done["prompt_tokens"], done["completion_tokens"]) == (8, messages[-1].usage.completion_tokens)
    assert {"queue_s", "prefill_s", "decode_s", "duration_s"} <= done.keys()
    assert (refused["status"], refused["reason"]) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert "secret" not in log.getvalue()


async def test_a_request_over_http_tells_for_whom_it_is(log: Log) -> None:
    set_up_logs("json", has_requests=True)
    body = {"prompt": "a secret", "max_tokens": 2, "user": "ann"}
    async with (
        running(enable_log_requests=True, http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        await client.post("/v1/completions", json=body | {"prompt": ["a secret", "a secret"]})
    one, several = [line for line in lines_of(log) if line["logger"] == "jpaged.requests"]
    assert (one["request_id"], one["user"], one["face"], one["operation"]) == ("mine", "ann", "http", "text_completion")
    assert (several["user"], several["prompt_tokens"]) == ("ann", 16)
    assert "secret" not in log.getvalue()


async def test_requests_are_no_lines_unless_they_are_asked_for(log: Log) -> None:
    set_up_logs("text", has_requests=False)
    async with running() as harness:
        await collect(harness.inference.Generate(request()))
    assert log.getvalue() == ""


async def test_what_a_caller_says_is_one_value_of_one_line(log: Log) -> None:
    set_up_logs("text", has_requests=True)
    body = {"prompt": "x", "max_tokens": 2, "user": 'ann status=OK\n"2026"'}
    async with (
        running(enable_log_requests=True, http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    (line,) = [line for line in log.getvalue().splitlines() if "jpaged.requests" in line]
    assert r' user="ann status=OK\n\"2026\"" ' in line
    assert "face=http" in line


def test_an_error_is_one_line_of_json_with_its_trace(log: Log) -> None:
    set_up_logs("json", has_requests=False)
    try:
        raise ValueError("it is wrong")
    except ValueError:
        logging.getLogger("jpaged.x").exception("it %s", "failed")
    (line,) = lines_of(log)
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "jpaged.x", "it failed")
    assert "ValueError: it is wrong" in line["trace"]


def record(message: str, created_s: float, name: str = "jpaged.x") -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "x.py", 1, message, (), None)
    made.created = created_s
    return made


def written(limit: RepeatLimit, lines: list[logging.LogRecord]) -> list[str]:
    return [TextFormatter().format(line).partition(": ")[2] for line in lines if limit.filter(line)]


def test_lines_that_repeat_are_limited_and_the_dropped_are_counted() -> None:
    limit = RepeatLimit()
    first = written(limit, [record("it failed", 100.0) for _ in range(300)])
    assert first == ["it failed"] * 49 + ["it failed [more lines like this are dropped for a while]"]
    assert written(limit, [record("another", 100.0)]) == ["another"]
    assert written(limit, [record("it failed", 110.0)] * 2) == [
        "it failed [250 lines like this were dropped]",
        "it failed",
    ]


def test_lines_with_a_trace_are_limited_to_fewer() -> None:
    lines = [record("it failed", 100.0) for _ in range(20)]
    for line in lines:
        line.exc_info = (ValueError, ValueError("wrong"), None)
    assert len(written(RepeatLimit(), lines)) == 5


def test_lines_of_requests_are_not_limited() -> None:
    assert len(written(RepeatLimit(), [record("request %s", 100.0, "jpaged.requests")] * 500)) == 500


def test_templates_without_end_take_no_memory_without_end() -> None:
    limit = RepeatLimit()
    written(limit, [record(f"it failed {index}", 100.0) for index in range(5000)])
    assert len(limit._budgets) == 1000


@pytest.mark.parametrize("form", ["text", "json"])
def test_control_characters_neither_forge_a_line_nor_reach_a_terminal(log: Log, form: str) -> None:
    set_up_logs(form, has_requests=False)
    try:
        raise ValueError("\x1b[2J of a peer\r")
    except ValueError:
        logging.getLogger("jpaged.x").exception("it failed: %s", "a\n2026 ERROR\x1b]0;title\x07\x9b1m\u202e")
    text = log.getvalue()
    assert not set(text) & set("\x1b\r\x07\x9b\u202e")
    assert not any(line.startswith("2026 ERROR") for line in text.splitlines())


def test_text_is_as_it_was(log: Log) -> None:
    set_up_logs("text", has_requests=True)
    logging.getLogger("jpaged.x").warning("it is late")
    assert log.getvalue().rstrip().endswith("WARNING jpaged.x: it is late")
