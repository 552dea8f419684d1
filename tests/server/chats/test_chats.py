"""Chats with tools and reasoning, from client to engine and back, of a model whose answers are known."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from jpaged._proto.v1 import inference_pb2
from jpaged.chat import ChatAnswer, ToolCall
from jpaged.client import AsyncClient, Client
from jpaged.client.batch import BatchOptions, run_batch
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.llm import LLM
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.testing import scripted
from jpaged.types import RequestOutput, SamplingParams
from tests.server import harness as harness_module
from tests.server.harness import MODEL, error_details, failure_of, make_serving, running

QWEN = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
ARGUMENTS = '{"city": "Zürich 🏔"}'
CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
    for name, arguments in (("weather", ARGUMENTS), ("now", "{}"))
)
TEXT = f"<think>\nLook.\n</think>\n\nSo: {CALLS}"
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
USER = {"role": "user", "content": "Weather?"}
GREEDY = SamplingParams(max_tokens=400, temperature=0.0)
EXPECTED = ("So: ", "Look.", [("weather", ARGUMENTS), ("now", "{}")], "tool_calls")


def serving(*texts: str, answer_format: AnswerFormat | None = QWEN, **options: Any) -> Any:
    executor = scripted(*(texts or (TEXT,)))(num_blocks=4096, max_model_len=1024)
    return running(executor=executor, answer_format=answer_format, **options)


def told(output: RequestOutput, index: int = 0) -> tuple[Any, ...]:
    one = output.outputs[index]
    assert len({call.id for call in one.tool_calls}) == len(one.tool_calls)
    assert all(call.id.startswith("call_") for call in one.tool_calls)
    return one.text, one.reasoning_content, [(c.name, c.arguments) for c in one.tool_calls], one.finish_reason


@pytest.mark.long
async def test_a_chat_comes_back_whole_and_in_parts():
    async with serving(max_messages_per_second=1_000_000) as harness:
        client = AsyncClient(harness.target)
        whole = await client.chat([USER], GREEDY, tools=TOOLS)
        assert told(whole) == EXPECTED
        assert whole.usage.completion_tokens == len(TEXT.encode()) + 1
        chunks = [chunk async for chunk in client.stream_chat([USER], GREEDY, tools=TOOLS)]
        pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
        calls = ChatAnswer.of(pieces).tool_calls
        parts = "".join(one.text for one in chunks), "".join(one.reasoning_content for one in chunks)
        assert (*parts, [(call.name, call.arguments) for call in calls], chunks[-1].finish_reason) == EXPECTED
        assert sum(len(chunk.token_ids) for chunk in chunks) == whole.usage.completion_tokens
        assert [piece.name for piece in pieces if piece.id is not None] == ["weather", "now"]
        assert len([chunk for chunk in chunks if chunk.finish]) == 1


@pytest.mark.long
def test_a_client_of_threads_and_an_llm_answer_alike(monkeypatch):
    async def run() -> Any:
        async with serving() as harness:
            with Client(harness.target) as client:
                return await asyncio.to_thread(client.chat, [USER], GREEDY, tools=TOOLS)

    assert told(asyncio.run(run())) == EXPECTED
    executor = scripted(TEXT)(num_blocks=4096, max_model_len=1024)
    build = "jpaged.local_model.build"
    monkeypatch.setattr(build, lambda config, *_, **__: make_serving(executor, config, answer_format=QWEN))
    with LLM() as llm:
        outputs = llm.chat([[USER], [USER]], GREEDY, tools=TOOLS, use_tqdm=False)
        assert [told(output) for output in outputs] == [EXPECTED] * 2
        (plain,) = llm.chat([USER], GREEDY, tools=TOOLS, tool_choice="none", use_tqdm=False)
        assert told(plain) == (f"So: {CALLS}", "Look.", [], "stop")
        with pytest.raises(InvalidArgument, match=r"^tool_choise: is not known; tools, tool_choice"):
            llm.chat([USER], GREEDY, tool_choise="none")  # type: ignore[call-arg]


@pytest.mark.long
async def test_an_answer_that_is_cut_at_any_byte_is_told_apart_in_both_forms():
    text = '<think>x</think>a<tool_call>{"name":"f","arguments":{"é":1}}</tool_call>'
    tools, data = [{"function": {"name": "f"}}], text.encode()
    async with serving(text, max_messages_per_second=1_000_000) as harness:
        client = AsyncClient(harness.target)

        async def check(end: int) -> None:
            sampling = SamplingParams(max_tokens=end, temperature=0.0)
            whole = (await client.chat([USER], sampling, tools=tools)).outputs[0]
            stream = client.stream_chat([USER], sampling, tools=tools)
            chunks = [chunk async for chunk in stream]
            parser = QWEN.parser(is_open=False)
            expected = ChatAnswer.of([*parser.push(data[:end].decode(errors="replace")), *parser.finish()])
            calls = ChatAnswer.of(piece for chunk in chunks for piece in chunk.tool_calls).tool_calls
            streamed = ("".join(c.text for c in chunks), "".join(c.reasoning_content for c in chunks), unnamed(calls))
            assert streamed == (expected.content, expected.reasoning, unnamed(expected.tool_calls))
            assert (whole.text, whole.reasoning_content, unnamed(whole.tool_calls)) == streamed
            assert (whole.finish_reason, chunks[-1].finish_reason) == ("length", "length")

        for start in range(1, len(data) + 1, 8):
            await asyncio.gather(*(check(end) for end in range(start, min(start + 8, len(data) + 1))))


def unnamed(calls: tuple[ToolCall, ...]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


async def test_each_sequence_has_calls_of_its_own():
    async with serving(TEXT, "<think>no</think>Hello", max_num_seqs=4) as harness:
        output = await AsyncClient(harness.target).chat(
            [USER], SamplingParams(max_tokens=400, n=2, seed=1), tools=TOOLS
        )
        assert told(output) == EXPECTED
        assert told(output, 1) == ("Hello", "no", [], "stop")


async def test_reasoning_comes_apart_without_tools_and_can_be_left_out():
    async with serving("<think>so</think>Hello") as harness:
        client = AsyncClient(harness.target)
        assert told(await client.chat([USER], GREEDY)) == ("Hello", "so", [], "stop")
        assert told(await client.chat([USER], GREEDY, reasoning={"include": False})) == ("Hello", "", [], "stop")
        as_text = await client.complete("user: Weather?\nassistant: ", GREEDY)
        assert as_text.outputs[0].text == "<think>so</think>Hello"
        chat = await client.complete(messages=[USER], sampling=GREEDY)
        assert told(chat) == ("Hello", "so", [], "stop")


@pytest.mark.long
async def test_a_conversation_goes_on_with_what_was_called():
    async with serving() as harness:
        client = AsyncClient(harness.target)
        first = (await client.chat([USER], GREEDY, tools=TOOLS)).outputs[0]
        calls = [call.as_json() for call in first.tool_calls]
        turns: list[dict[str, Any]] = [
            USER,
            {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"},
        ]
        output = await client.chat(turns, GREEDY, tools=TOOLS)
        text = await client.detokenize(output.prompt_token_ids)
        assert text.count('"name": "weather", "arguments": {"city": "Z') == 1
        assert text.endswith("tool: sunny\nassistant: ")
        assert told(output) == EXPECTED


async def test_tools_that_may_not_be_called_are_not_shown():
    async with serving() as harness:
        client = AsyncClient(harness.target)
        plain = await client.tokenize(messages=[USER])
        output = await client.chat([USER], GREEDY, tools=TOOLS, tool_choice="none")
        assert output.prompt_token_ids == plain
        assert told(output) == (f"So: {CALLS}", "Look.", [], "stop")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}]}, "chat.tools[0].name"),
    ({"tools": [{"name": "a b"}]}, "chat.tools[0].name"),
    ({"tools": [{"name": "f"}, {"name": "f"}]}, "chat.tools[1].name"),
    ({"tools": [{"name": f"f{i}"} for i in range(513)]}, "chat.tools"),
    ({"tools": [{"name": "f", "description": "x" * 65_600}]}, "chat.tools[0].description"),
    ({"tools": [{"name": "f", "parameters": "{"}]}, "chat.tools[0].parameters"),
    ({"tools": [{"name": "f", "parameters": "[]"}]}, "chat.tools[0].parameters"),
    ({"tools": [{"name": "f", "parameters": '{"a":' * 65 + "1" + "}" * 65}]}, "chat.tools[0].parameters"),
    ({"tools": [{"name": "f", "parameters": '{"a":' * 50_000}]}, "chat.tools[0].parameters"),
    ({"tools": [{"name": "f", "parameters": json.dumps({"a": "x" * 65_600})}]}, "chat.tools[0].parameters"),
    ({"tool_choice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}}, "chat.tool_choice"),
    ({"tool_choice": {"mode": 9}}, "chat.tool_choice.mode"),
    ({"tool_choice": {"name": "f"}}, "chat.tool_choice.mode"),
    ({"tools": [{"name": "f"}], "tool_choice": {"mode": "TOOL_CHOICE_MODE_NAMED", "name": "g"}}, "chat.tool_choice"),
    ({"tools": [{"name": "f"}], "tool_choice": {"mode": "TOOL_CHOICE_MODE_AUTO", "name": "f"}}, "chat.tool_choice"),
    ({"chat_template_kwargs": "x"}, "chat.chat_template_kwargs"),
    ({"chat_template_kwargs": '{"a b": 1}'}, "chat.chat_template_kwargs"),
    ({"chat_template_kwargs": json.dumps({"a": "x" * 17_000})}, "chat.chat_template_kwargs"),
    ({"reasoning": {"effort": ""}}, "chat.reasoning.effort"),
    ({"reasoning": {"thinking_token_budget": (1 << 20) + 1}}, "chat.reasoning.thinking_token_budget"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "chat.messages[0].tool_call_id"),
    ({"documents": ["[]"]}, "chat.documents[0]"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "chat.continue_final_message"),
    ({"messages": [{"role": "user", "content": "x", "name": "x" * 257}]}, "chat.messages[0].name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}] * 129}]},
        "chat.messages[0].tool_calls",
    ),
]


async def test_what_is_wrong_with_a_chat_is_named():
    async with serving() as harness:
        for fields, field in BAD:
            chat = ParseDict({"messages": [USER], **fields}, inference_pb2.ChatPrompt())
            error = await failure_of(harness.inference.Generate(inference_pb2.GenerateRequest(chat=chat)))
            assert error.code().name == "INVALID_ARGUMENT", (field, error.details())
            assert error_details(error)["BadRequest"].field_violations[0].field == field
        assert harness.num_blocks_used == 0


async def test_what_this_server_cannot_do_is_said():
    async with serving(answer_format=None) as harness:
        client = AsyncClient(harness.target)
        for words, message in (
            ({"tools": TOOLS}, "tools: .*--tool-call-parser"),
            ({"reasoning": {"include": False}}, "reasoning.include: .*--reasoning-parser"),
            ({"reasoning": {"thinking_token_budget": 5}}, "reasoning.thinking_token_budget: "),
        ):
            with pytest.raises(Unsupported, match=message):
                await client.chat([USER], GREEDY, **words)
        assert told(await client.chat([USER], GREEDY, tools=TOOLS, tool_choice="none")) == (TEXT, "", [], "stop")


async def test_a_client_refuses_what_it_cannot_send():
    client = AsyncClient("127.0.0.1:1")
    for messages, field in (
        ([{"role": "user", "content": "x", "more": 1}], "messages[0].more"),
        ([{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            client.stream_chat(messages)
        assert raised.value.field == field
    with pytest.raises(InvalidArgument, match=r"^tools\[0\].function.name"):
        client.stream_chat([USER], tools=[{"function": {"name": "a b"}}])


@pytest.mark.long
async def test_a_batch_file_has_calls_in_openais_form(tmp_path, monkeypatch):
    monkeypatch.setattr(harness_module, "MODEL", replace(MODEL, max_model_len=1024))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0}
    bodies = [body, {**body, "max_tokens": 300}, {**body, "tools": [], "include_reasoning": False}]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": one}
        for i, one in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with serving() as harness:
        await run_batch(BatchOptions(source, target, harness.target), lambda summary: None)
    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    for name in ("0", "1"):
        (choice,) = answers[name]["response"]["body"]["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == ("So: ", "Look.")
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": ARGUMENTS},
            {"name": "now", "arguments": "{}"},
        ]
    (choice,) = answers["2"]["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": f"So: {CALLS}", "reasoning": None}


async def test_clients_are_told_which_formats_are_read():
    async with serving() as harness:
        info = await AsyncClient(harness.target).model_info()
        assert (info.tool_call_parser, info.reasoning_parser) == ("fake-calls", "fake-thoughts")
