"""Tools and reasoning over HTTP, with the openai package's helpers, of a model whose answers are known."""

from typing import Any

import pytest

from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.testing import scripted
from tests.http.generate.asking import GREEDY, asking

QWEN = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
ARGUMENTS = '{"city": "Zürich 🏔"}'
CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
    for name, arguments in (("weather", ARGUMENTS), ("now", "{}"))
)
TEXT = f"<think>\nLook.\n</think>\n\nSo: {CALLS}"
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
USER: Any = {"role": "user", "content": "Weather?"}
HOW: Any = {"max_tokens": 400, "tools": TOOLS, **GREEDY}


def scripting(*texts: str, **options: Any) -> Any:
    executor = scripted(*(texts or (TEXT,)))(num_blocks=4096, max_model_len=1024)
    return asking(executor=executor, answer_format=QWEN, **options)


def told(message: Any) -> tuple[Any, ...]:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content, message.reasoning_content, calls


EXPECTED = ("So: ", "Look.", [("weather", ARGUMENTS), ("now", "{}")])


@pytest.mark.long
async def test_calls_and_reasoning_stand_beside_the_content() -> None:
    async with scripting() as (_, client):
        answer = await client.chat.completions.create(messages=[USER], **HOW)
        assert told(answer.choices[0].message) == EXPECTED
        assert answer.choices[0].finish_reason == "tool_calls"
        none = await client.chat.completions.create(messages=[USER], tool_choice="none", **HOW)
        assert (none.choices[0].message.tool_calls, none.choices[0].finish_reason) == (None, "stop")


async def test_a_call_alone_has_no_content() -> None:
    async with scripting(CALLS) as (_, client):
        answer = await client.chat.completions.create(messages=[USER], **HOW)
        assert answer.choices[0].message.content is None
        assert len(answer.choices[0].message.tool_calls or ()) == 2


@pytest.mark.long
async def test_pieces_come_in_openais_order_and_make_the_same() -> None:
    async with scripting(max_messages_per_second=1_000_000) as (_, client):
        stream = await client.chat.completions.create(
            messages=[USER], stream=True, stream_options={"include_usage": True}, **HOW
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("tool_calls") == 1
        deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks[:-1]]
        thought = [i for i, delta in enumerate(deltas) if getattr(delta, "reasoning_content", None)]
        said = [i for i, delta in enumerate(deltas) if delta.content]
        called = [i for i, delta in enumerate(deltas) if delta.tool_calls]
        assert deltas[0].role == "assistant" and 0 < min(thought) <= max(thought) <= min(said)
        assert max(said) <= min(called)
        pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
        begun = [piece for piece in pieces if piece.id is not None]
        assert [(piece.index, piece.function.name, piece.type) for piece in begun] == [
            (0, "weather", "function"),
            (1, "now", "function"),
        ]
        arguments = ["".join(one.function.arguments for one in pieces if one.index == index) for index in (0, 1)]
        assert arguments == [ARGUMENTS, "{}"]


async def test_openais_stream_helper_puts_it_together() -> None:
    async with scripting() as (_, client):
        async with client.chat.completions.stream(messages=[USER], **HOW) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert told(final.choices[0].message) == EXPECTED
        assert final.choices[0].finish_reason == "tool_calls"
        assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= kinds


@pytest.mark.long
async def test_a_conversation_goes_on_with_the_messages_as_the_client_has_them() -> None:
    async with scripting() as (_, client):
        first = (await client.chat.completions.create(messages=[USER], **HOW)).choices[0].message
        async with client.chat.completions.stream(messages=[USER], **HOW) as stream:
            helped = (await stream.get_final_completion()).choices[0].message
        for answer in (first, helped):
            calls = answer.tool_calls or []
            results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
            turns: Any = [USER, answer, *results]
            again = await client.chat.completions.create(messages=turns, **HOW)
            assert again.usage is not None and again.usage.prompt_tokens > 200


@pytest.mark.long
async def test_a_named_function_and_several_answers() -> None:
    async with scripting(TEXT, "<think>no</think>Hello", max_num_seqs=4) as (_, client):
        more: Any = HOW | {"n": 2, "temperature": 1.0, "seed": 1}
        answer = await client.chat.completions.create(messages=[USER], **more)
        assert [told(one.message) for one in answer.choices] == [EXPECTED, ("Hello", "no", [])]
        parts: dict[int, str] = {0: "", 1: ""}
        async for chunk in await client.chat.completions.create(messages=[USER], stream=True, **more):
            parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert sorted(parts.values()) == ["Hello", "So: "]
