"""Images in chats over HTTP. Those of the fake model are rows of tokens, so that a chat with an image equals a text."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from jpaged.testing import FakeVision, with_embeds
from tests.http.generate.asking import GREEDY, PAST_THE_END, asking, text_of

SIZE = FakeVision.patch_size
LONG: Any = {"max_model_len": 128, "num_blocks": 64}


def png(*rows: str, kind: str = "PNG") -> bytes:
    """A picture whose patches are the letters of these rows."""
    letters = np.array([list(row.encode()) for row in rows], np.uint8)
    pixels = np.repeat(np.kron(letters, np.ones((SIZE, SIZE), np.uint8))[..., None], 3, axis=2)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


def data_uri(*rows: str) -> str:
    return "data:image/png;base64," + base64.b64encode(png(*rows)).decode()


def seeing(**options: Any) -> Any:
    """A server of the fake model with a vision encoder."""
    return asking(executor=with_embeds()(**LONG), vision=options.pop("vision", None) or FakeVision(), **options)


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


async def say(client: openai.AsyncOpenAI, parts: Any, num_tokens: int = 8, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": parts}]
    words = {**GREEDY, "max_tokens": num_tokens, **fields}
    return await client.chat.completions.create(messages=messages, extra_body=PAST_THE_END, **words)


def expected(parts: Sequence[str], num_tokens: int = 8) -> str:
    return text_of(f"user: {''.join(parts)}\nassistant: ", num_tokens)


@pytest.mark.parametrize("given", ["text", "object", "detail"])
async def test_an_image_takes_the_place_of_its_part(given: str) -> None:
    url: Any = {"text": data_uri("ab", "cd"), "object": {"url": data_uri("ab", "cd")}}.get(given)
    url = url or {"url": data_uri("ab", "cd"), "detail": "low"}
    async with seeing() as (_, client):
        answer = await say(client, [{"type": "text", "text": "see "}, image(url), {"type": "text", "text": " now"}])
        assert answer.choices[0].message.content == expected(["see ", "ab\ncd\n", " now"])
        assert answer.usage.prompt_tokens == len("user: see ab\ncd\n now\nassistant: ")
