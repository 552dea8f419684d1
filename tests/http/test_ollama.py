"""Ollama's API: bodies as chats and completions, answers whole and as lines, and facts about the model."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from docs.site.links import ROOT
from jpaged.chat import ToolCallPiece
from jpaged.errors import InvalidArgument
from jpaged.ollama import (
    EMBED_URL,
    OF_CHATS,
    ROWS,
    OllamaLines,
    OllamaRequest,
    embeddings_body,
    parse_chat_request,
    parse_embed_request,
    parse_embeddings_request,
    parse_generate_request,
    parse_show_request,
    with_tag,
    without_tag,
)
from jpaged.openai.request import Job, LenientBody
from jpaged.testing import FakeExecutor, scripted
from jpaged.types import FinishReason, OutputEvent, RequestTimes, SamplingParams, SequenceFinish, Usage
from tests.access.test_keys import FILE, TOKEN
from tests.http.test_messages import ARGUMENTS, QWEN, TEXT
from tests.server.harness import running

USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
CHAT: dict[str, Any] = {"model": "fake", "messages": [USER], "options": {"temperature": 0, "num_predict": 200}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Ask.", "parameters": {"type": "object"}},
}
CALL = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}


def executor() -> FakeExecutor:
    return scripted(TEXT)(num_blocks=512, max_model_len=2048)


def messages_in(**body: Any) -> list[Mapping[str, Any]]:
    return list(parse_chat_request({**CHAT, **body}).job.prompts[0].messages or ())


def sampling_in(**options: Any) -> SamplingParams:
    return parse_chat_request({**CHAT, "options": options}).job.sampling


def lines_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_a_chat_is_answered_whole_and_in_lines() -> None:
    body = {**CHAT, "tools": [WEATHER], "think": True}
    async with (
        running(executor=executor(), answer_format=QWEN, http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        streamed = await client.post("/api/chat", json={**body, "model": "fake:latest"})
        assert streamed.headers["content-type"] == "application/x-ndjson"
        *parts, end = lines_in(streamed.text)
        whole = (await client.post("/api/chat", json={**body, "stream": False})).json()
    assert {one["model"] for one in parts} == {"fake:latest"} and whole["model"] == "fake"
    assert not any(one["done"] for one in parts) and end["done"] and whole["done"]
    assert all(one["created_at"].endswith("Z") for one in (*parts, end, whole))
    joined = {name: "".join(one["message"].get(name, "") for one in parts) for name in ("content", "thinking")}
    assert joined == {name: whole["message"][name] for name in joined} == {"content": "So: ", "thinking": "Look."}
    calls = [call for one in parts for call in one["message"].get("tool_calls", ())]
    for found in (calls, whole["message"]["tool_calls"]):
        assert [one["function"] for one in found] == [
            {"index": 0, "name": "weather", "arguments": json.loads(ARGUMENTS)}
        ]
    counts = ("prompt_eval_count", "eval_count", "done_reason")
    assert [end[name] for name in counts] == [whole[name] for name in counts]
    for one in (end, whole):
        assert one["done_reason"] == "stop" and one["eval_count"] > 0
        assert one["total_duration"] >= one["eval_duration"] >= 0 and one["load_duration"] == 0


async def test_a_prompt_is_a_chat_of_one_turn_or_raw_text() -> None:
    body = {"model": "fake", "prompt": "ab", "stream": False, "options": {"num_predict": 4, "temperature": 0}}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        raw = (await client.post("/api/generate", json={**body, "raw": True, "logprobs": True})).json()
        plain = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "logprobs": 0}
        expected = (await client.post("/v1/completions", json=plain)).json()
        assert raw["response"] == expected["choices"][0]["text"]
        assert raw["prompt_eval_count"] == 2 and raw["eval_count"] == 4 and raw["done_reason"] == "length"
        assert [one["logprob"] for one in raw["logprobs"]] == expected["choices"][0]["logprobs"]["token_logprobs"]
        lines = lines_in((await client.post("/api/generate", json={**body, "raw": True, "stream": True})).text)
        assert "".join(one["response"] for one in lines) == raw["response"]
        chat = (await client.post("/api/generate", json={**body, "system": "Be brief."})).json()
        assert chat["prompt_eval_count"] > len("abBe brief.")
        for loading in ({"model": "fake"}, {"model": "fake", "keep_alive": 0}):
            answer = (await client.post("/api/generate", json=loading)).json()
            assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")
        answer = (await client.post("/api/chat", json={"model": "fake", "messages": []})).json()
        assert answer["done_reason"] == "load" and answer["message"]["content"] == ""


async def test_embeddings_have_length_one_and_long_inputs_are_cut() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        raw = (await client.post("/v1/embeddings", json={"input": ["one", "three"]})).json()["data"]
        found = (await client.post("/api/embed", json={"model": "fake", "input": ["one", "three"]})).json()
        for vector, one in zip(found["embeddings"], raw, strict=True):
            length = math.hypot(*one["embedding"])
            assert vector == pytest.approx([value / length for value in one["embedding"]])
        assert found["model"] == "fake" and found["prompt_eval_count"] == 8
        alone = (await client.post("/api/embeddings", json={"model": "fake", "prompt": "one"})).json()
        assert alone == {"embedding": raw[0]["embedding"]}
        long = {"model": "fake", "input": "a" * 500}
        cut = (await client.post("/api/embed", json=long)).json()
        assert cut["prompt_eval_count"] == 128
        refused = await client.post("/api/embed", json={**long, "truncate": False})
        assert refused.status_code == 400 and refused.json()["error"].startswith("input: ")
        for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
            refused = await client.post(path, json={"model": "fake", field: "a" * 300_000})
            assert refused.status_code == 400 and refused.json()["error"].startswith(f"{field}: 300000 bytes"), path
        assert (await client.post("/api/embed", json={"model": "fake", "input": ""})).json()["embeddings"] == []
        assert (await client.post("/api/embeddings", json={"model": "fake"})).json() == {"embedding": []}


async def test_bodies_have_any_type_except_from_pages_of_other_sites() -> None:
    body = json.dumps({"model": "fake", "prompt": "ab", "stream": False, "options": {"num_predict": 2}})
    form = {"content-type": "application/x-www-form-urlencoded"}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for headers in (form, {"content-type": "text/plain"}, {}):
            answer = await client.post("/api/generate", content=body, headers=headers)
            assert answer.status_code == 200 and answer.json()["eval_count"] == 2, headers
        page = {"origin": "https://other.example"}
        refused = await client.post("/api/generate", content=body, headers={**form, **page})
        assert refused.status_code == 400 and refused.json()["error"].startswith("content-type: ")
        answer = await client.post("/api/generate", content=body, headers={**page, "content-type": "application/json"})
        assert answer.status_code == 200
        assert (await client.post("/v1/completions", content=body, headers=form)).status_code == 400


async def test_a_long_chat_loses_its_oldest_turns() -> None:
    system = {"role": "developer", "content": "s" * 20}
    turns = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 20}] * 3
    body = {**CHAT, "messages": [system, *turns, USER], "options": {"num_predict": 2}, "stream": False}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        kept = (await client.post("/api/chat", json={**body, "messages": [system, USER], "truncate": False})).json()
        answer = await client.post("/api/chat", json=body)
        assert answer.status_code == 200 and answer.json()["prompt_eval_count"] == kept["prompt_eval_count"]
        refused = await client.post("/api/chat", json={**body, "truncate": False})
        assert refused.status_code == 400 and refused.json()["error"].startswith("messages: "), refused.text
        streamed = lines_in((await client.post("/api/chat", json={**body, "stream": True})).text)
        assert streamed[-1]["prompt_eval_count"] == answer.json()["prompt_eval_count"]


async def test_the_model_is_listed_and_described() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        (listed,) = (await client.get("/api/tags")).json()["models"]
        assert listed["name"] == listed["model"] == "fake:latest" and len(listed["digest"]) == 64
        (loaded,) = (await client.get("/api/ps")).json()["models"]
        assert loaded["digest"] == listed["digest"] and loaded["context_length"] == 128
        assert loaded["expires_at"].startswith("9999-12-31T")
        for body in ({"model": "fake"}, {"name": "fake:latest", "verbose": True}):
            shown = (await client.post("/api/show", json=body)).json()
            assert shown["model_info"]["FakeForCausalLM.context_length"] == 128
            assert shown["model_info"]["FakeForCausalLM.embedding_length"] == 3
            assert shown["capabilities"] == ["completion", "embedding", "tools", "thinking"]
        version = (await client.get("/api/version")).json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # the minimum of GitHub Copilot
        assert (await client.head("/")).status_code == 200


async def test_a_model_that_is_served_needs_no_pull() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for body in ({"model": "fake"}, {"name": "fake:latest", "insecure": False, "stream": True}):
            answer = await client.post("/api/pull", json=body)
            assert answer.headers["content-type"] == "application/x-ndjson"
            assert lines_in(answer.text) == [{"status": "success"}]
        answer = await client.post("/api/pull", json={"model": "fake", "stream": False})
        assert answer.json() == {"status": "success"}


async def test_errors_are_one_text(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(FILE)
    async with (
        running(http_port=0, api_keys=str(keys)) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        refused = await client.post("/api/chat", json=CHAT)
        assert refused.status_code == 401 and list(refused.json()) == ["error"]
        client.headers["authorization"] = f"Bearer {TOKEN}"
        for path, body, status, problem in (
            ("/api/chat", {**CHAT, "model": "other"}, 404, "'other' is not served"),
            ("/api/chat", {**CHAT, "options": {"mirostat": 2}}, 400, "options.mirostat: 2 is not supported, only 0"),
            ("/api/chat", {**CHAT, "options": {"temperature": -1}}, 400, "options.temperature: "),
            ("/api/chat", {**CHAT, "options": {"num_predict": -3}}, 400, "options.num_predict: "),
            ("/api/chat", {**CHAT, "messages": [{**USER, "content": "a" * 500}]}, 400, "messages: "),
            ("/api/generate", {"model": "fake", "prompt": "a", "context": [1]}, 400, "context: "),
            ("/api/show", {"model": "other"}, 404, "model 'other' not found"),
            ("/api/pull", {"model": "other"}, 404, "model 'other' not found; this server has fake"),
            ("/api/pull", {"insecure": True}, 400, "model: is missing"),
            ("/api/create", {"model": "fake"}, 404, "there is no POST /api/create"),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == status and list(answer.json()) == ["error"], answer.text
            assert problem in answer.json()["error"], answer.text
        ignored = await client.post("/api/chat", json={**CHAT, "stream": False, "options": {"seeed": 1}, "colour": 1})
        assert ignored.headers["x-jpaged-ignored-fields"] == "colour, options.seeed"


async def test_an_error_in_a_stream_is_its_last_line() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        harness.faults.fail_at_step = 3
        answer = await client.post("/api/chat", json=CHAT, timeout=30)
        lines = lines_in(answer.text)
        assert answer.status_code == 200 and "done" in lines[0] and list(lines[-1]) == ["error"]
        await asyncio.wait((harness.run,))


def test_options_are_parameters_of_sampling() -> None:
    options = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.1, "num_predict": 9}
    sampling = sampling_in(**options, presence_penalty=0.5, frequency_penalty=0.25, stop="x", temperature=0.5)
    expected = SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        max_tokens=1,
        stop=("x",),
    )
    assert sampling == expected
    for given, limit in ((9, 9), (1_000_000, 1_000_000), (-2, None), (-1, None), (0, None)):
        (prompt,) = parse_chat_request({**CHAT, "options": {"num_predict": given}}).job.prompts
        assert prompt.fills_length and prompt.max_filled == limit
    assert sampling_in(num_ctx=4096, num_gpu=99, use_mmap=True, repeat_last_n=64, typical_p=1.0) == sampling_in()


def test_bodies_of_the_client_in_go_are_accepted() -> None:
    chat = {"model": "fake", "messages": [USER], "format": None, "options": None}
    assert parse_chat_request(chat).job.sampling == sampling_in()
    prompt = {"model": "fake", "prompt": "a", "suffix": "", "system": "", "template": "", "format": None}
    assert parse_generate_request({**prompt, "options": None}).job.sampling == sampling_in()
    assert parse_embed_request({"model": "fake", "input": "a", "options": None}).job is not None
    assert parse_embeddings_request({"model": "fake", "prompt": "a", "options": None}).job is not None
    shown = {"model": "fake", "system": "", "template": "", "verbose": False, "options": None, "name": ""}
    assert parse_show_request(shown) == "fake"


def test_whole_numbers_may_be_written_with_a_fraction() -> None:
    assert sampling_in(top_k=5.0, num_ctx=4096.0) == sampling_in(top_k=5)
    (prompt,) = parse_chat_request({**CHAT, "options": {"num_predict": 9.0}}).job.prompts
    assert prompt.max_filled == 9
    with pytest.raises(InvalidArgument, match=r"options\.num_ctx: 8\.5 is not of type int"):
        sampling_in(num_ctx=8.5)


def test_calls_are_counted_before_results_are_matched_with_them() -> None:
    result = {"role": "tool", "tool_name": "other", "content": "x"}
    messages = [{"role": "assistant", "tool_calls": [CALL] * 129}, *[result] * 1000]
    with pytest.raises(InvalidArgument, match=r"messages\[0\].tool_calls: 129 calls; at most 128"):
        parse_chat_request({**CHAT, "messages": messages})


def test_errors_of_raw_prompts_name_top_logprobs() -> None:
    parsed = parse_generate_request({"model": "fake", "prompt": "a", "raw": True, "logprobs": True, "top_logprobs": 9})
    assert parsed.job.sampling.logprobs == 9 and parsed.job.names["logprobs"] == "top_logprobs"


def test_messages_have_calls_with_ids_that_results_refer_to() -> None:
    calls = [CALL, {"id": "mine", "function": {"index": 1, "name": "time", "arguments": {}}}]
    results = [
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
        {"role": "tool", "content": "late"},
    ]
    turn = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}
    user, assistant, *told = messages_in(messages=[USER, turn, *results])
    assert user == USER and assistant["reasoning_content"] == "Hm."
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1_0", "mine"]
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich"}'
    assert [one.get("tool_call_id") for one in told] == ["mine", "call_1_0", None]
    assert [one.get("name") for one in told] == ["time", "weather", None]


def test_formats_and_thinking() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    plain = parse_chat_request({**CHAT, "format": ""}).job.sampling
    assert plain.structured_outputs is None
    for given, kind in (("json", "json_object"), (schema, "json")):
        structured = parse_chat_request({**CHAT, "format": given}).job.sampling.structured_outputs
        assert structured is not None and structured.kind.value == kind
        assert structured.disable_additional_properties is (kind == "json")
    raw = parse_generate_request({"model": "fake", "prompt": "a", "raw": True, "format": schema}).job.sampling
    assert raw.structured_outputs == structured

    def reasoning(think: Any, **how: Any) -> Any:
        options = parse_chat_request({**CHAT, "think": think}, **how).job.prompts[0].chat_options
        assert options.reasoning.enabled is None  # it requires a switch in the template
        switches = set(options.template_kwargs.items())
        return switches, options.reasoning.effort, options.reasoning.include

    on, off = {("enable_thinking", True), ("thinking", True)}, {("enable_thinking", False), ("thinking", False)}
    assert reasoning(True) == (on, None, True) and reasoning("high") == (on, "high", True)
    assert reasoning(False) == (off, None, False) and reasoning(None) == (set(), None, True)
    assert reasoning(False, can_think=False) == (set(), None, True)
    with pytest.raises(InvalidArgument, match="think: is not supported: the model's reasoning format is unknown"):
        reasoning(True, can_think=False)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"model": ""}, "model: is missing"),
        ({"messages": "a"}, "messages: must be a list"),
        ({"messages": [{**USER, "images": "aGk="}]}, r"messages\[0\].images: 'aGk=' is not a list"),
        ({"messages": [{**USER, "images": ["a", 3]}]}, r"messages\[0\].images\[1\]: 3 is not an image in base64"),
        ({"images": ["aGk="]}, "images: .* is not supported, only .*: send them in messages"),
        ({"messages": ["a"]}, r"messages\[0\]: must be an object"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        ({"options": 3}, "options: must be an object"),
        ({"options": {"stop": 3}}, "options.stop: 3 is not a list"),
        ({"options": {"num_ctx": "a"}}, "options.num_ctx: 'a' is not of type int"),
        ({"options": {"wild": 1}}, "options.wild: is not supported"),
        ({"format": "xml"}, "format: 'xml' is neither 'json' nor a JSON schema"),
        ({"format": 3}, "format: 3 is neither"),
        ({"think": "deep"}, "think: 'deep' is not true, false or one of"),
        ({"stream": "yes"}, "stream: 'yes' is not true or false"),
        ({"truncate": "no"}, "truncate: 'no' is not true or false"),
        ({"messages": [{**USER, "thinking": [3]}]}, r"messages\[0\].thinking: \[3\] is not a string"),
        ({"messages": [{**USER, "tool_name": 3}]}, r"messages\[0\].tool_name: 3 is not a string"),
        ({"top_logprobs": 3}, "top_logprobs: needs logprobs"),
    ],
)
def test_what_a_chat_cannot_have_is_named(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{problem}"):
        parse_chat_request({**CHAT, **body})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"suffix": "a"}, "suffix: 'a' is not supported, only '': infilling"),
        ({"template": "a"}, "template: 'a' is not supported"),
        ({"truncate": "yes"}, "truncate: 'yes' is not of type bool"),
        ({"width": 3}, "width: 3 is not supported, only 0: the server makes no images"),
        ({"raw": True, "system": "a"}, "system: needs a chat template"),
        ({"raw": True, "think": True}, "think: is not supported with raw"),
        ({"prompt": 3}, "prompt: 3 is not a string"),
    ],
)
def test_what_a_prompt_cannot_have_is_named(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{problem}"):
        parse_generate_request({"model": "fake", "prompt": "a", **body})


def test_defaults_of_ollama_have_no_effect() -> None:
    plain: dict[str, Any] = {"model": "fake", "prompt": "a"}
    written = {"truncate": True, "shift": True, "suffix": "", "template": "", "context": [], "images": [], "width": 0}
    assert parse_generate_request({**plain, **written}) == parse_generate_request(plain)
    assert parse_chat_request({**CHAT, "shift": True, "keep_alive": -1}) == parse_chat_request(CHAT)


def test_a_model_without_a_chat_template_takes_raw_prompts() -> None:
    parsed = parse_generate_request({"model": "fake", "prompt": "a"}, has_template=False)
    assert parsed.job.prompts[0].text == "a" and parsed.job.streaming is not None


def test_other_bodies() -> None:
    wrong: tuple[dict[str, Any], ...] = ({"input": 3}, {"input": [3]}, {"input": "a", "dimensions": -1})
    for body in wrong:
        with pytest.raises(InvalidArgument, match=r"^(input|dimensions)"):
            parse_embed_request({"model": "fake", **body})
    sampled = {"top_k": 1, "temperature": 0.1, "stop": ["a"], "num_predict": 3}
    assert parse_embed_request({"model": "fake", "input": "a", "options": sampled}).job is not None
    with pytest.raises(InvalidArgument, match="prompt"):
        parse_embeddings_request({"model": "fake", "prompt": ["a"]})
    with pytest.raises(InvalidArgument, match="model: is missing"):
        parse_show_request({"verbose": True})
    parsed = parse_embed_request({"model": "fake:latest", "input": "a", "dimensions": 2}, served=("fake",))
    assert parsed.job is not None and parsed.job.how.model == "fake"
    body = embeddings_body(parsed, [(3.0, 4.0, 9.0)], num_tokens=1, began_s=0.0)
    assert list(body["embeddings"]) == [[0.6, 0.8]]


def test_names_have_a_tag_that_may_be_left_out() -> None:
    assert without_tag("a:latest", ("a",)) == without_tag("a", ("a",)) == "a"
    assert without_tag("a:latest", ("a:latest",)) == "a:latest"
    assert with_tag("org/a") == "org/a:latest" and with_tag("a:7b") == "a:7b"


def test_unknown_fields_of_a_lenient_body_are_noted() -> None:
    body = LenientBody({**CHAT, "nickname": 1, "options": {"wild": 1}, "messages": [{**USER, "mood": "good"}]})
    assert parse_chat_request(body).job.prompts[0].messages == (USER,)
    assert set(body.ignored) == {"nickname", "options.wild", "messages.mood"}
    assert {"options.num_ctx", "keep_alive"} <= ROWS[EMBED_URL].keys()


def test_the_page_names_every_option_and_refused_field() -> None:
    page = (ROOT / "docs" / "ollama.md").read_text()
    names = {name.removeprefix("options.") for rows in ROWS.values() for name in rows if name.startswith("options.")}
    refused = ("images", "suffix", "context", "template", "width", "height", "steps", "truncate", "shift")
    for name in (*names - {"options"}, *refused, *sampling_names()):
        assert f"`{name}`" in page, name


def sampling_names() -> set[str]:
    return {name.removeprefix("options.") for name in OF_CHATS if name.startswith("options.")}


def test_a_call_is_one_line_when_it_is_complete() -> None:
    request = OllamaRequest(Job(SamplingParams(), ()), "fake", is_chat=True)
    lines = OllamaLines(request, lambda token_id: pytest.fail("no log-probabilities"), began_s=0.0)

    def event(*pieces: ToolCallPiece, **more: Any) -> list[dict[str, Any]]:
        return lines_in(lines.of(OutputEvent("a", tool_calls=pieces, **more)).decode())

    assert event(ToolCallPiece(0, "", "id0", "weather"), ToolCallPiece(0, '{"a"')) == []
    (first,) = event(ToolCallPiece(0, ": 1}"), ToolCallPiece(1, "[", "id1", "time"))
    assert first["message"]["tool_calls"] == [
        {"id": "id0", "function": {"index": 0, "name": "weather", "arguments": {"a": 1}}}
    ]
    times = RequestTimes(1.0, 2.0, 2.5, 4.0)
    finish = SequenceFinish(FinishReason.TOOL_CALLS)
    second, end = event(finish=finish, is_last=True, times=times, usage=Usage(3, 9, 0))
    assert second["message"]["tool_calls"] == [
        {"id": "id1", "function": {"index": 1, "name": "time", "arguments": {"arguments": "["}}}
    ]
    assert (end["prompt_eval_duration"], end["eval_duration"]) == (500_000_000, 1_500_000_000)
    assert (end["done_reason"], end["prompt_eval_count"], end["eval_count"]) == ("stop", 3, 9)
