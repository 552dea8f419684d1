"""OpenAI's own client of a server in this process, and the texts of what it should say."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from jpaged.testing import ByteTokenizer, expected_tokens
from tests.server.harness import Harness, running

CHAT: Any = [{"role": "user", "content": "hey"}]
CHAT_TEXT = "user: hey\nassistant: "
GREEDY: Any = {"model": "fake", "temperature": 0.0}
PAST_THE_END: Any = {"ignore_eos": True}


@asynccontextmanager
async def asking(*, max_retries: int = 0, **options: Any) -> AsyncIterator[tuple[Harness, openai.AsyncOpenAI]]:
    """A server and OpenAI's client of it."""
    async with (
        running(http_port=0, **options) as harness,
        openai.AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=max_retries) as client,
    ):
        yield harness, client


def text_of(prompt: str, num_tokens: int) -> str:
    """What the fake model says to a prompt, greedily."""
    return ByteTokenizer().decode(expected_tokens(list(prompt.encode()), num_tokens))
