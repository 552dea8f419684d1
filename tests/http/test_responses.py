"""/v1/responses with the real openai client, whole and streamed, of a model whose answers are known."""

import asyncio
import json
from typing import Any

import httpx2
import openai
import pydantic
import pytest

from jpaged.client import AsyncClient
from jpaged.errors import InvalidArgument
from jpaged.openai.responses import LOGPROBS, parse_responses_request
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.testing import FakeExecutor, scripted
from jpaged.types import SamplingParams
from tests.server.harness import Harness, eventually, running

QWEN = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
ARGUMENTS = '{"city": "Zürich 🏔"}'
CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
    for name, arguments in (("weather", ARGUMENTS), ("now", "{}"))
)
TEXT = f"<think>\nLook.\n</think>\n\nSo: {CALLS}"
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "now", "description": "The time.", "strict": None},
]


def serving(*texts: str, **options: Any) -> Any:
    executor = scripted(*(texts or (TEXT,)))(num_blocks=4096, max_model_len=1024)
    return running(executor=executor, answer_format=QWEN, http_port=0, **options)


def openai_of(harness: Harness) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=0)


def told(response: Any) -> list[tuple[Any, ...]]:
    """The items of a response, without their ids."""
    found: list[tuple[Any, ...]] = []
    for item in response.output:
        if item.type == "reasoning":
            found.append(("reasoning", "".join(part.text for part in item.content), item.status))
        elif item.type == "message":
            found.append(("message", "".join(part.text for part in item.content), item.status))
        else:
            found.append(("call", item.name, item.arguments, item.status))
    return found


EXPECTED = [
    ("reasoning", "Look.", "completed"),
    ("message", "So: ", "completed"),
    ("call", "weather", ARGUMENTS, "completed"),
    ("call", "now", "{}", "completed"),
]


def test_allowed_tools_are_all_that_the_model_sees() -> None:
    def chosen(tools: list[Any], mode: str = "auto") -> Any:
        choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
        parsed = parse_responses_request({"input": "a", "tools": TOOLS, "tool_choice": choice})
        options = parsed.job.prompts[0].chat_options
        assert parsed.echoed["tool_choice"] == choice and len(parsed.echoed["tools"]) == len(TOOLS)
        return [tool.name for tool in options.tools], options.choice.mode.value

    now = {"type": "function", "name": "now"}
    assert chosen([now]) == (["now"], "auto")
    assert chosen([now], "required") == (["now"], "required")
    assert chosen([{"type": "web_search"}]) == ([], "none")
    for wrong, field in (
        ([{**now, "name": "later"}], r"tool_choice.tools\[0\].name"),
        ([{**now, "name": ["now"]}], r"tool_choice.tools\[0\].name"),
        (["now"], r"tool_choice.tools\[0\]"),
        ([], "tool_choice.tools"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{field}: "):
            chosen(wrong)


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns() -> None:
    turns = [{"role": role, "content": f"{i} " + "x" * 8} for i in range(6) for role in ("user", "assistant")]
    items = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "last"}]
    body = {"input": items, "max_output_tokens": 8}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        refused = await client.post("/v1/responses", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        answer = (await client.post("/v1/responses", json={**body, "truncation": "auto"})).json()
        assert answer["truncation"] == "auto" and 60 < answer["usage"]["input_tokens"] <= 120
        counts = []
        for num in range(1, 6):  # the longest conversation of whole turns that fits
            kept = {"input": [items[0], *items[-1 - 2 * num :]]}
            counted = await client.post("/v1/responses/input_tokens", json=kept)
            counts.append(counted.json()["input_tokens"])
        assert answer["usage"]["input_tokens"] == max(count for count in counts if count <= 120)
        one = {"input": [{"role": "user", "content": "y" * 500}], "truncation": "auto"}
        assert (await client.post("/v1/responses", json=one)).status_code == 400


async def test_what_is_thought_said_and_called_are_items() -> None:
    async with serving() as harness, openai_of(harness) as client:
        response = await client.responses.create(
            model="fake", input="Weather?", tools=TOOLS, temperature=0, metadata={"job": "one"}, user="me"
        )
        assert told(response) == EXPECTED
        assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
        assert response.output_text == "So: " and response.id.startswith("resp_")
        assert response.metadata == {"job": "one"} and response.user == "me"
        assert [tool.to_dict()["name"] for tool in response.tools] == [
            "weather",
            "now",
        ] and response.tool_choice == "auto"
        usage = response.usage
        assert usage is not None and usage.output_tokens == len(TEXT.encode()) + 1
        assert usage.output_tokens_details.reasoning_tokens == len("Look.")
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert response.to_dict()["store"] is True


@pytest.mark.long
async def test_a_stream_tells_the_same_item_by_item() -> None:
    async with serving(max_messages_per_second=1_000_000) as harness, openai_of(harness) as client:
        asked: dict[str, Any] = {"model": "fake", "input": "Weather?", "tools": TOOLS, "temperature": 0}
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
        text = ["response.output_item.added", "response.content_part.added"]
        done = ["response.content_part.done", "response.output_item.done"]
        call = [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        assert once[2:-1] == [
            *(*text, "response.reasoning_text.delta", "response.reasoning_text.done", *done),
            *(*text, "response.output_text.delta", "response.output_text.done", *done),
            *call * 2,
        ]
        last = events[-1].response
        assert told(last) == EXPECTED
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "So: "
        usage = (await client.responses.create(**asked)).usage
        assert usage is not None and last.usage.output_tokens_details == usage.output_tokens_details
        assert (last.usage.input_tokens, last.usage.output_tokens) == (usage.input_tokens, usage.output_tokens)


@pytest.mark.long
async def test_the_packages_own_stream_and_parse_work() -> None:
    async with serving() as harness, openai_of(harness) as client:
        async with client.responses.stream(model="fake", input="Weather?", tools=TOOLS, temperature=0) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[-1] == "response.completed" and told(final) == EXPECTED

    class Place(pydantic.BaseModel):
        city: str

    async with serving('{"city": "Bern"}') as harness, openai_of(harness) as client:
        parsed = await client.responses.parse(model="fake", input="Where?", text_format=Place, temperature=0)
        assert parsed.output_parsed == Place(city="Bern")
        assert parsed.text is not None and parsed.text.format is not None and parsed.text.format.type == "json_schema"


@pytest.mark.long
async def test_the_synchronous_client_gets_the_same() -> None:
    async with serving() as harness:

        def ask() -> list[Any]:
            with openai.OpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=0) as client:
                whole = client.responses.create(model="fake", input="Weather?", tools=TOOLS, temperature=0)
                with client.responses.stream(model="fake", input="Weather?", tools=TOOLS, temperature=0) as stream:
                    return [told(whole), told(stream.get_final_response())]

        assert await asyncio.to_thread(ask) == [EXPECTED, EXPECTED]


async def test_a_conversation_goes_back_whole() -> None:
    async with serving(TEXT) as harness, openai_of(harness) as client:
        asked: dict[str, Any] = {"model": "fake", "tools": TOOLS, "temperature": 0, "instructions": "Be brief."}
        first = await client.responses.create(**asked, input=[{"role": "user", "content": "Weather?"}])
        output = [item.to_dict() for item in first.output]
        call_ids = [item["call_id"] for item in output if item["type"] == "function_call"]
        answers = [{"type": "function_call_output", "call_id": one, "output": "sun"} for one in call_ids]
        again: list[Any] = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            *output,
            *answers,
        ]
        second = await client.responses.create(**asked, input=again)
        # The same conversation in the words of chats has as many tokens, and so has what the chat template made of it.
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in output
            if item["type"] == "function_call"
        ]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "So: ", "reasoning_content": "Look.", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": one, "content": "sun"} for one in call_ids),
        ]
        tools = [{"type": "function", "function": {k: v for k, v in one.items() if k != "type"}} for one in TOOLS]
        async with AsyncClient(harness.target) as ours:
            greedy = SamplingParams(max_tokens=4, temperature=0.0)
            chat = await ours.chat(messages, greedy, tools=tools)
        assert second.usage is not None and second.usage.input_tokens == chat.usage.prompt_tokens


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with serving("a long story") as harness, openai_of(harness) as client:
        asked: dict[str, Any] = {"model": "fake", "input": "Tell", "max_output_tokens": 4, "temperature": 0}
        whole = await client.responses.create(**asked)
        assert whole.status == "incomplete" and told(whole) == [("message", "a lo", "incomplete")]
        assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert events[-1].type == "response.incomplete" and told(events[-1].response) == told(whole)


async def test_logprobs_are_told_where_they_are_included() -> None:
    async with serving("ab") as harness, openai_of(harness) as client:
        asked: dict[str, Any] = {
            "model": "fake",
            "input": "Say",
            "temperature": 0,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        whole = await client.responses.create(**asked)
        logprobs = whole.output[0].content[0].logprobs
        assert [one.token for one in logprobs] == ["a", "b", "<eos>"] and len(logprobs[0].top_logprobs) == 2
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert events[-1].response.output[0].content[0].logprobs == logprobs


async def test_an_error_in_the_middle_ends_the_stream_as_failed() -> None:
    executor = FakeExecutor()
    async with running(executor=executor, http_port=0) as harness, openai_of(harness) as client:
        executor.faults.hold_after(2)
        stream = await client.responses.create(
            model="fake", input="hi", max_output_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == 3:
                harness.serving.engine.fail(RuntimeError("the device is gone"))
                executor.faults.release()
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed" and events[-1].response.error is not None


async def test_a_reader_that_leaves_ends_its_request() -> None:
    async with running(http_port=0) as harness, openai_of(harness) as client:
        harness.faults.hold_after(3)
        stream = await client.responses.create(
            model="fake", input="hi", max_output_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert harness.num_open_calls == 1
        await stream.close()
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)


USER = {"role": "user", "content": "hi"}


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "a", "previous_response_id": 7}, "previous_response_id", "not a string"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"input": "a", "background": True, "store": False}, "background", "`store` is true"),
        ({"input": "a", "truncation": "most"}, "truncation", "'auto' or 'disabled'"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, None, ""),
        ({"input": "a", "tools": ["web_search"]}, "tools[0]", "an object with a type"),
        ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice", "of the client"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", ""),
        ({"input": "a", "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode", "'auto'"),
        ({"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto", "x": 1}}, "tool_choice.x", "mode"),
        ({"input": "a", "max_tool_calls": 3}, None, ""),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "include": ["surprise"]}, "include", "logprobs"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "include"),
        ({"input": "a", "reasoning": {"summary": "detailed"}}, None, ""),
        ({"input": "a", "reasoning": {"summary": "long"}}, "reasoning.summary", "concise"),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"input": "a", "text": {"verbosity": "none"}}, "text.verbosity", "low, medium, high"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", ""),
        ({"input": "a", "max_output_tokens": 4000}, "max_output_tokens", "over max_model_len"),
        ({"input": "a", "max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"input": "a", "n": 2}, "n", "one output"),
        ({"input": "a", "temperature": -1}, "temperature", ""),
        (
            {"input": "a", "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "False",
        ),
        ({"input": "a", "metadata": {"a": 1}}, "metadata.a", ""),
        ({"input": "a", "surprise": 1}, None, ""),
        ({}, "input", ""),
        ({"input": []}, "input", ""),
        ({"input": [USER, {"type": "item_reference"}]}, "input[1].id", "not a string"),
        ({"input": [USER, {"type": "compaction", "encrypted_content": "x"}]}, "input[1].type", "reasoning"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
            "the model reads only text",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", ""),
        ({"input": [USER, {"type": "reasoning", "summary": []}, USER]}, None, ""),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}, USER]}, None, ""),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id", ""),
    ],
)
async def test_what_cannot_be_honoured_says_why(body: dict[str, Any], param: str | None, words: str) -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        answer = await client.post("/v1/responses", json={"max_output_tokens": 4, **body})
        if param is None:
            assert answer.status_code == 200, answer.text
            return
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert words in error["message"]


async def test_an_answer_can_be_sent_back_as_a_body() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        given = {"model": "fake", "input": "hi", "max_output_tokens": 4, "temperature": 0.0, "include": [LOGPROBS]}
        first = (await client.post("/v1/responses", json=given)).json()
        answers = {"id", "object", "created_at", "status", "error", "incomplete_details", "output", "usage"}
        again = await client.post("/v1/responses", json={**first, **given} | dict.fromkeys(answers))
        assert again.status_code == 200, again.text
        assert again.json()["output"][0]["content"] == first["output"][0]["content"]


async def test_nothing_is_stored() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 4, "store": False})
        assert answer.json()["store"] is False
        counted = await client.post("/v1/responses/input_tokens", json={"model": "fake", "input": "abc"})
        whole = await client.post("/v1/responses", json={"model": "fake", "input": "abc"})
        assert counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": whole.json()["usage"]["input_tokens"],
        }
        wrong = await client.post("/v1/responses/input_tokens", json={"model": "other", "input": "abc"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        missing = await client.get(f"/v1/responses/{answer.json()['id']}")
        assert missing.status_code == 404 and "never stored" in missing.json()["error"]["message"]


async def test_events_are_named_on_the_wire() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        body = {"input": "hi", "max_output_tokens": 2, "stream": True}
        answer = await client.post("/v1/responses", json=body)
        blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
        for name, data in blocks:
            assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
