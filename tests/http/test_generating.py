"""Completions and chats, as the openai package asks for them and reads them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from jpaged.testing import ByteTokenizer, expected_tokens
from tests.server.harness import Harness, running

CHAT: Any = [{"role": "user", "content": "hey"}]
GREEDY: Any = {"model": "fake", "temperature": 0.0}
PAST_THE_END = {"ignore_eos": True}


@asynccontextmanager
async def asking(**options: Any) -> AsyncIterator[tuple[Harness, openai.AsyncOpenAI]]:
    """A server and OpenAI's client of it, which tries nothing twice."""
    async with (
        running(http_port=0, **options) as harness,
        openai.AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield harness, client


def text_of(prompt: str, num_tokens: int) -> str:
    """What the fake model says to a prompt, greedily."""
    return ByteTokenizer().decode(expected_tokens(list(prompt.encode()), num_tokens))


async def test_a_completion_is_what_the_model_says() -> None:
    async with asking() as (_, client):
        answer = await client.completions.create(prompt="hello", max_tokens=8, extra_body=PAST_THE_END, **GREEDY)
        assert [one.text for one in answer.choices] == [text_of("hello", 8)]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_completion_is_the_same_in_pieces(include_usage: bool) -> None:
    async with asking() as (_, client):
        stream = await client.completions.create(
            prompt="hello",
            max_tokens=8,
            extra_body=PAST_THE_END,
            stream=True,
            stream_options={"include_usage": include_usage},
            **GREEDY,
        )
        chunks = [chunk async for chunk in stream]
        told = [chunk for chunk in chunks if chunk.choices]
        assert "".join(chunk.choices[0].text for chunk in told) == text_of("hello", 8)
        assert [chunk.choices[0].finish_reason for chunk in told if chunk.choices[0].finish_reason] == ["length"]
        usages = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert usages == ([8] if include_usage else [])
        assert len({chunk.id for chunk in chunks}) == 1


async def test_a_streamed_chat_begins_with_its_role() -> None:
    async with asking() as (_, client):
        stream = await client.chat.completions.create(
            messages=CHAT, max_tokens=8, extra_body=PAST_THE_END, stream=True, **GREEDY
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert (deltas[0].role, deltas[0].content) == ("assistant", "")
        assert {delta.role for delta in deltas[1:]} == {None}
        whole = await client.chat.completions.create(messages=CHAT, max_tokens=8, extra_body=PAST_THE_END, **GREEDY)
        assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
        assert whole.choices[0].message.content == text_of("user: hey\nassistant: ", 8)
