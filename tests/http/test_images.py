"""Images in chats over HTTP. Those of the fake model are rows of tokens, so that a chat with an image equals a text."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from PIL import Image

from jpaged.testing import FakeVision, with_embeds
from tests.http.generate.asking import GREEDY, PAST_THE_END, asking, text_of
from tests.service.broken_images import broken

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


async def test_other_apis_take_the_same_image() -> None:
    """Anthropic's blocks, also in results of tools, and items of Responses give the tokens of the same text."""
    async with seeing() as (harness, client), httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as http:
        picture = base64.b64encode(png("ab")).decode()
        source = {"type": "base64", "media_type": "image/png", "data": picture}
        block = {"type": "image", "source": source}
        url = {"type": "image", "source": {"type": "url", "url": data_uri("ab")}}
        for shown in (block, url):
            body = {"model": "fake", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
            content = [{"type": "text", "text": "see "}, shown, {"type": "text", "text": " now"}]
            answer = (await http.post("/v1/messages", json={**body, "messages": [user(content)]})).json()
            assert answer["content"][0]["text"] == expected(["see ", "ab\n", " now"])
            use = {"type": "tool_use", "id": "call00001", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "call00001", "content": [shown], "is_error": True}
            talk = [user("x"), {"role": "assistant", "content": [use]}, user([result])]
            answer = (await http.post("/v1/messages", json={**body, "messages": talk})).json()
            text = 'user: x\nassistant: {"name": "look", "arguments": {}}\ntool: Error: ab\n\nassistant: '
            assert answer["content"][0]["text"] == text_of(text, 8)
        short = {"model": "fake", "stream": False, "options": {"num_predict": 8, "temperature": 0.0}}
        seen = {"role": "user", "content": "see", "images": [picture]}
        answer = (await http.post("/api/chat", json={**short, "messages": [seen]})).json()
        assert expected(["ab\n", "see"]).startswith(answer["message"]["content"]) and answer["eval_count"]
        answer = (await http.post("/api/generate", json={**short, "prompt": "see", "images": [picture]})).json()
        assert expected(["ab\n", "see"]).startswith(answer["response"]) and answer["eval_count"]
        refused = await http.post("/api/chat", json={**short, "messages": [{**seen, "images": ["aGk="]}]})
        assert "messages[0].images[0]: is not a picture" in refused.text
        assert "vision" in (await http.post("/api/show", json={"model": "fake"})).json()["capabilities"]
        item = {"type": "input_image", "image_url": data_uri("ab"), "detail": "auto"}
        given: Any = [user([{"type": "input_text", "text": "see "}, item])]
        response = await client.responses.create(
            model="fake", input=given, temperature=0.0, max_output_tokens=8, extra_body=PAST_THE_END
        )
        assert response.output_text == expected(["see ", "ab\n"])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


WRONG_PARTS: list[tuple[Any, str]] = [
    (image("data:image/png;base64,AAAA"), "content[0].image_url: is not a picture in one of the formats PNG"),
    (image("data:image/png;base64,A*AA"), "content[0].image_url: is not base64"),
    (image("data:image/png;base64"), "content[0].image_url: is a data URI without a comma"),
    (image({"detail": "low"}), "content[0].image_url.url: is missing"),
    (image({"url": "data:,", "size": 3}), "content[0].image_url.size: is not supported; url is"),
    (image(7), "content[0].image_url: must be a string or an object with a url"),
    (image("https://example.com/a.png"), "content[0].image_url: is a URL, which needs the option allowed_media_d"),
    (image("file:///etc/passwd"), "content[0].image_url: names a file, which needs the option allowed_local_med"),
    (image("gopher://a/b"), "content[0].image_url: 'gopher://a/b' is neither a data URI nor a URL"),
    (image(data_uri("a" * 65)), "content[0].image_url: has 65 patches; at most 64"),
    ({"type": "input_image", "file_id": "f"}, "content[0].file_id: is not supported; image_url is"),
    ({"type": "image", "image": "x", "url": "y"}, "content[0].image: is given together with url"),
    ({"type": "video_url", "video_url": "x"}, "messages[0].content"),
]


async def test_an_image_that_cannot_be_read_is_named() -> None:
    async with seeing() as (_, client):
        for part, problem in WRONG_PARTS:
            with pytest.raises(openai.BadRequestError) as caught:
                await say(client, [part])
            assert problem in caught.value.body["message"]  # type: ignore[index]


async def test_images_over_the_limits_are_named() -> None:
    async with seeing(limit_mm_per_prompt="image=2") as (_, client):
        with pytest.raises(openai.BadRequestError, match=r"2 placeholders of images .* do not match 1 images"):
            await say(client, [{"type": "text", "text": "\x01"}, image(data_uri("a"))])
        with pytest.raises(openai.BadRequestError, match=r"content\[2\].image_url: is image 3 of 3; .* allows 2"):
            await say(client, [image(data_uri("a"))] * 3)
        tall = image(data_uri(*"a" * 64))
        with pytest.raises(openai.BadRequestError, match=r"8 x 512 pixels takes 128 tokens, with those .* 256, over"):
            await say(client, [tall, tall])


async def test_images_are_counted_in_usage_and_metrics() -> None:
    async with seeing(metrics_port=0) as (harness, client), httpx2.AsyncClient(timeout=60) as http:
        for cached in (0, 16):
            answer = await say(client, [image(data_uri("abcd")), image(data_uri("e"))])
            details = answer.usage.prompt_tokens_details
            assert details.model_dump()["multimodal_tokens"] == {"image": 7}
            assert details.cached_tokens >= cached
        plain = await say(client, "hey")
        assert "multimodal_tokens" not in plain.usage.prompt_tokens_details.model_dump()
        scraped = (await http.get(f"{harness.http_url}/metrics")).text
        for name, value in (
            ("vllm:mm_cache_queries_total", 4),
            ("vllm:mm_cache_hits_total", 2),
            ("jpaged:image_prompt_tokens_total", 14),
            ("jpaged:images_encoded_total", 2),
            ("jpaged:image_cache_bytes", 5 * 2 * 4),
        ):
            assert f'{name}{{model_name="fake"}} {float(value)}' in scraped


async def test_other_images_in_the_same_places_share_no_blocks() -> None:
    async with seeing() as (_, client):
        for letters in ("abcdefgh", "abcdefgx", "xbcdefgh", "abcdefgh"):
            answer = await say(client, [image(data_uri(letters))])
            assert answer.choices[0].message.content == expected([f"{letters}\n"])


async def test_the_tokens_of_images_are_counted() -> None:
    """As in a prompt; vectors of placeholders would mean nothing, and are refused."""
    async with seeing() as (harness, _), httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as http:
        picture, num_tokens = image(data_uri("ab", "cd")), len("user: see ab\ncd\n\nassistant: ")
        messages = [user([{"type": "text", "text": "see "}, picture])]
        answer = (await http.post("/tokenize", json={"messages": messages})).json()
        assert (answer["count"], len(answer["tokens"])) == (num_tokens, num_tokens)
        block = {"type": "image", "source": {"type": "url", "url": data_uri("ab", "cd")}}
        given = [user([{"type": "text", "text": "see "}, block])]
        answer = (await http.post("/v1/messages/count_tokens", json={"model": "fake", "messages": given})).json()
        assert answer == {"input_tokens": num_tokens}
        item = {"type": "input_image", "image_url": data_uri("ab", "cd")}
        body = {"model": "fake", "input": [user([{"type": "input_text", "text": "see "}, item])]}
        answer = (await http.post("/v1/responses/input_tokens", json=body)).json()
        assert answer["input_tokens"] == num_tokens
        answer = (await http.post("/tokenize", json={"messages": [user([image("data:,x")])]})).json()
        assert answer["error"]["message"].startswith("messages[0].content[0].image_url: is not a picture")
        answer = (await http.post("/v1/embeddings", json={"model": "fake", "messages": messages})).json()
        assert "messages[0].content[1].image_url: is an image: this method takes only text" in str(answer)


async def test_a_wrong_image_of_a_block_is_named() -> None:
    async with seeing() as (harness, _), httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as http:
        block = {"type": "image", "source": {"type": "base64", "data": "A*AA"}}
        body = {"model": "fake", "max_tokens": 8, "messages": [user([block])]}
        answer = (await http.post("/v1/messages", json=body)).json()
        assert answer["error"]["message"].startswith("messages[0].content[0].source.data: is not base64")


@pytest.mark.long
async def test_a_batch_without_max_tokens_takes_images(tmp_path: Path) -> None:
    async with seeing(batch_dir=str(tmp_path)) as (_, client):
        words = {**GREEDY, "messages": [user([image(data_uri("ab"))])], "model": "fake"}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": words}
        file = await client.files.create(file=json.dumps(line).encode(), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 1
        assert batch.output_file_id is not None
        answer = json.loads((await client.files.content(batch.output_file_id)).text)["response"]["body"]
        assert answer["choices"][0]["message"]["content"].startswith(expected(["ab\n"]))


@pytest.mark.long
async def test_three_hundred_broken_files_are_refused_while_others_are_answered() -> None:
    """Each is a 400 that names the part, or a picture after all; memory is returned, and nothing waits for ever."""
    before, num_refused = resident_bytes(), 0
    async with seeing(max_request_size=16.0) as (_, client):

        async def send(content: bytes) -> bool:
            uri = "data:image/png;base64," + base64.b64encode(content).decode()
            try:
                await say(client, [image(uri)], num_tokens=1)
            except openai.BadRequestError as error:
                return "messages[0].content[0].image_url" in error.message
            return False

        files = list(broken(300))
        for start in range(0, len(files), 20):
            answers = await asyncio.gather(*map(send, files[start : start + 20]), say(client, "hey"))
            assert answers[-1].choices[0].message.content == text_of("user: hey\nassistant: ", 8)
            num_refused += sum(answers[:-1])
        assert num_refused >= 200
        assert resident_bytes() - before < 256 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
