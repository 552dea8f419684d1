"""Whatever a body holds, it is answered, or refused with a status of 400 to 499 or 501: never as a fault of ours."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from jpaged.errors import InvalidArgument
from jpaged.json_text import check_values
from jpaged.openai.request import chat_job, completion_job
from jpaged.openai.response_input import build_messages
from jpaged.sampling_params import request_fields
from tests.server.harness import running

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 3, 2**63, 2**70, 0.5, -1e300, "", "x", "\ud800", [], [1], [-1], ["a"], [[]], [None]),
    *({}, {"a": 1}, {"type": "x"}, {"1": 2}, [{}], [{"a": []}], {"type": "json_schema"}, ["a"] * 300),
]
OF_BOTH = ["model", "adapter", "stream", "stream_options", "return_token_ids", "user", "response_format", "logprobs"]
OF_BOTH += ["store", "metadata", "unknown", *(one.name for one in request_fields())]
OF_CHATS = ["messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning"]
OF_CHATS += ["reasoning_effort", "include_reasoning", "top_logprobs", "max_completion_tokens", "modalities"]
INSIDE: list[tuple[str, Any]] = [
    ("structured_outputs", {name: value})
    for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern", "x")
    for value in VALUES
]
INSIDE += [
    ("messages", [{"role": "user", "content": "x"} | {name: value}])
    for name in ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "x")
    for value in VALUES
]
INSIDE += [
    ("tools", [{"type": "function", "function": {"name": "f"} | {name: value}}])
    for name in ("name", "description", "parameters", "strict", "x")
    for value in VALUES
]
INSIDE += [
    ("response_format", {"type": "json_schema", "json_schema": {"name": "n", name: value}})
    for name in ("schema", "strict", "name")
    for value in VALUES
]
INSIDE += [("stream_options", {name: value}) for name in ("include_usage", "x") for value in VALUES]


def bodies(path: str) -> Iterator[dict[str, Any]]:
    own, plain = ("chat" in path, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]})
    plain = plain if own else {"max_tokens": 1, "prompt": "x"}
    for name in [*OF_BOTH, *(OF_CHATS if own else ["prompt", "echo", "suffix"])]:
        for value in VALUES:
            yield {**plain, name: value}
    for name, value in INSIDE:
        if own or name not in ("messages", "tools"):
            yield {**plain, name: value}


ITEMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"role": "user", "content": "x"}, ("type", "role", "content")),
    ({"type": "reasoning", "content": []}, ("summary", "content")),
    ({"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}, ("call_id", "name", "arguments")),
    ({"type": "function_call_output", "call_id": "a", "output": "x"}, ("call_id", "output")),
]


def test_no_item_of_an_input_is_a_fault_of_ours() -> None:
    parts = [{"type": "input_text", "text": "x"} | {name: value} for name in ("type", "text") for value in VALUES]
    items = [item | {name: value} for item, names in ITEMS for name in names for value in VALUES]
    refused = []
    for item in [*items, *({"role": "user", "content": [part]} for part in parts)]:
        try:
            build_messages([item], None)
        except InvalidArgument as error:
            refused.append(error.field)
    assert len(refused) > 200 and all(name.startswith("input[0]") for name in refused)


def test_a_long_name_is_not_held_for_each_value_below_it() -> None:
    body = {"a" * 100_000: {str(i): i for i in range(1000)}}  # whole paths would be 100 MB
    tracemalloc.start()
    try:
        check_values("body", body)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    with pytest.raises(InvalidArgument) as caught:
        check_values("body", {"a" * 100_000: {"b": 2**70}})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("path", [pytest.param("/v1/completions", marks=pytest.mark.long), "/v1/chat/completions"])
async def test_no_body_is_a_fault_of_ours(path: str) -> None:
    read = chat_job if "chat" in path else completion_job
    understood, num_refused = [], 0
    for body in bodies(path):
        try:
            check_values("body", body)
            read(body)
        except InvalidArgument:
            num_refused += 1
        else:
            understood.append(body)
    assert num_refused > 500 and len(understood) > 100
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as client:
        free, wrong = asyncio.Semaphore(8), []

        async def ask(body: dict[str, Any]) -> None:
            async with free:
                answer = await client.post(path, json=body)
            if answer.status_code != 200 and (answer.status_code >= 500 and answer.status_code != 501):
                wrong.append((answer.status_code, body, answer.text))
            elif answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        await asyncio.gather(*(ask(body) for body in understood))
        assert not wrong


async def test_what_is_no_object_of_json_is_refused() -> None:
    contents = [b"", b"{", b"[]", b"1", b"\xff", b'{"prompt": NaN}', b'{"a": ' + b"[" * 9999, b'{"x": 1e999}']
    contents.append(b'{"prompt": "\\ud800"}')
    as_json = {"content-type": "application/json; charset=utf-8"}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for content in contents:
            answer = await client.post("/v1/completions", content=content, headers=as_json)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_ARGUMENT")
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = await client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-type")


TOLD_TWICE = {"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": 1}
OF_PARTS = {"role": "user", "content": [{"type": "x"}]}


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("path", "body", "param", "hint"),
    [
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix", "infilling is not supported"),
        ("/v1/completions", {"prompt": "x", "repetition_detection": {}}, "repetition_detection", "max_tokens"),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": {"a": 1, "b": 1}},
            "logit_bias",
            "'a', 'b' are not token ids",
        ),
        ("/v1/completions", {"prompt": "x", "suffix": "y", "audio": {}}, "suffix", "audio: is not supported"),
        (
            "/v1/completions",
            {"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": 2},
            "prompt_logprobs",
            "echo",
        ),
        ("/v1/completions", {"prompt": ["x", 1]}, "prompt[1]", "neither"),
        ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt", "1024"),
        ("/v1/completions", {"prompt": [300]}, "prompt", "256"),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 999}, "max_tokens", "max_model_len"),
        ("/v1/completions", {"functions": [{"name": "f"}]}, "functions", "tools"),
        ("/v1/chat/completions", {"store": "yes"}, "store", "bool"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
        ("/v1/chat/completions", {"max_completion_tokens": 999}, "max_completion_tokens", "max_model_len"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            "messages[0].content",
            "text",
        ),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ("/v1/chat/completions", {"user": "x" * 513}, "user", "512"),
    ],
)
async def test_what_cannot_be_honoured_is_named_and_told_what_is_instead(
    path: str, body: dict[str, Any], param: str, hint: str
) -> None:
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        answer = await client.post(path, json=plain | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert error["message"].startswith(f"{param}: ") and hint in error["message"]


async def test_values_that_change_nothing_pass() -> None:
    neutral = {"user": "me", "store": False, "service_tier": "auto", "metadata": {}, "top_k": None, "logit_bias": {}}
    of_chats = {"modalities": ["text"], "verbosity": "medium", "tools": [], "response_format": {"type": "text"}}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        body = {"prompt": "x", "max_tokens": 1, "suffix": "", **neutral}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
        body = {"messages": messages, "max_tokens": 1, **neutral, **of_chats}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
