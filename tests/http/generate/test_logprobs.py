"""Log-probabilities: of what is said, of the prompt in front of it, whole and in chunks."""

import codecs
from typing import Any

import openai
import pytest

from tests.http.generate.asking import CHAT, GREEDY, PAST_THE_END, asking, text_of


async def test_a_completion_tells_them_of_its_tokens() -> None:
    async with asking() as (_, client):
        how: Any = {"prompt": "hello", "max_tokens": 4, "logprobs": 2, "extra_body": PAST_THE_END, **GREEDY}
        logprobs = (await client.completions.create(**how)).choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
        assert logprobs.text_offset == [0, 1, 2, 3] and len(logprobs.tokens) == 4
        assert logprobs.top_logprobs is not None and all(len(top) == 2 for top in logprobs.top_logprobs)
        assert [top[token] for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True)] == (
            logprobs.token_logprobs
        )
        gathered: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        async for chunk in await client.completions.create(stream=True, **how):
            for name in gathered:
                gathered[name] += getattr(chunk.choices[0].logprobs, name)
        assert gathered == {name: getattr(logprobs, name) for name in gathered}


async def test_answers_have_log_probabilities_after_truncation_and_entropies() -> None:
    async with asking() as (_, client):
        fields: Any = {"max_tokens": 4, "extra_body": {**PAST_THE_END, "sampling_logprobs": True}, **GREEDY}
        answer = await client.completions.create(prompt="hello", **fields)
        told: Any = answer.choices[0].logprobs
        assert told.sampling_logprobs == [0.0] * 4 and told.entropies == pytest.approx([told.entropies[0]] * 4)
        chat = await client.chat.completions.create(messages=CHAT, **fields)
        contents: Any = chat.choices[0].logprobs
        assert [one.sampling_logprob for one in contents.content] == [0.0] * 4
        assert [one.entropy for one in contents.content] == pytest.approx(told.entropies)
        fields["extra_body"]["min_tokens"] = 2
        with pytest.raises(openai.BadRequestError, match="min_tokens: 2 is out of range: must be 0 with sampling_log"):
            await client.completions.create(prompt="hello", **fields)


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
async def test_an_echo_stands_in_front_with_its_own(prompt: Any) -> None:
    async with asking() as (_, client):
        how: Any = {"prompt": prompt, "max_tokens": 4, "echo": True, "extra_body": PAST_THE_END, **GREEDY}
        plain = await client.completions.create(**how)
        assert plain.choices[0].text == "hello" + text_of("hello", 4) and plain.choices[0].logprobs is None
        told = (await client.completions.create(logprobs=1, **how)).choices[0]
        assert told.text == plain.choices[0].text and told.logprobs is not None
        tokens, values = told.logprobs.tokens or [], told.logprobs.token_logprobs or []
        assert "".join(tokens[:5]) == "hello" and len(tokens) == 9
        assert values[0] is None and all(value < 0 for value in values[1:])
        assert told.logprobs.top_logprobs is not None and told.logprobs.top_logprobs[0] is None
        assert told.logprobs.text_offset == list(range(9))
        text, streamed = "", list[Any]()
        async for chunk in await client.completions.create(logprobs=1, stream=True, **how):
            text += chunk.choices[0].text
            streamed += (chunk.choices[0].logprobs.token_logprobs or []) if chunk.choices[0].logprobs else []
        assert (text, streamed) == (told.text, values)


async def test_a_prompt_alone_is_told_with_max_tokens_of_0() -> None:
    async with asking() as (_, client):
        how: Any = {"prompt": ["hello", "other"], "max_tokens": 0, "logprobs": 1, "echo": True, **GREEDY}
        answer = await client.completions.create(**how)
        assert [one.text for one in answer.choices] == ["hello", "other"]
        assert [one.finish_reason for one in answer.choices] == ["length", "length"]
        assert all(one.logprobs is not None and len(one.logprobs.tokens or []) == 5 for one in answer.choices)
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, 10)
        texts, usage = {0: "", 1: ""}, None
        stream = await client.completions.create(stream=True, stream_options={"include_usage": True}, **how)
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage or usage
        assert texts == {0: "hello", 1: "other"} and usage is not None and usage.completion_tokens == 0
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(**(how | {"echo": False}))
        assert refused.value.param == "max_tokens"


async def test_a_chat_tells_them_of_its_tokens() -> None:
    async with asking() as (_, client):
        how: Any = {"messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, **GREEDY}
        logprobs = (await client.chat.completions.create(extra_body=PAST_THE_END, **how)).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 4
        assert [one.top_logprobs[0].token for one in logprobs.content] == [one.token for one in logprobs.content]
        streamed = list[Any]()
        async for chunk in await client.chat.completions.create(stream=True, extra_body=PAST_THE_END, **how):
            told = chunk.choices[0].logprobs
            streamed += (told.content or []) if told is not None else []
        assert [one.model_dump() for one in streamed] == [one.model_dump() for one in logprobs.content]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**(how | {"top_logprobs": 99}))
        assert refused.value.param == "top_logprobs"


@pytest.mark.parametrize("length", [128, 127])
async def test_a_prompt_of_the_whole_context_is_told(length: int) -> None:
    async with asking() as (_, client):
        text = "".join(chr(97 + i % 26) for i in range(length))
        how: Any = {"prompt": text, "max_tokens": 0, "logprobs": 1, "echo": True, **GREEDY}
        choice = (await client.completions.create(**how)).choices[0]
        assert choice.text == text and choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or []) == length
        streamed = ""
        async for chunk in await client.completions.create(stream=True, **how):
            streamed += "".join(one.text for one in chunk.choices)
        assert streamed == text
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(**(how | {"prompt": text + "x" * 2}))
        assert long.value.code == "context_length_exceeded"


@pytest.mark.long
async def test_a_completion_without_a_limit_fills_the_context() -> None:
    async with asking() as (_, client):
        how: Any = {"prompt": ["hello", list(b"hi")], "extra_body": PAST_THE_END, **GREEDY}
        answer = await client.completions.create(**how)
        assert answer.usage is not None and answer.usage.total_tokens == 2 * 128
        assert [one.finish_reason for one in answer.choices] == ["length", "length"]
        answer = await client.completions.create(**(how | {"max_tokens": None}))
        assert answer.usage is not None and answer.usage.total_tokens == 2 * 128


def text_of_bytes(parts: list[list[int]]) -> str:
    return b"".join(map(bytes, parts)).decode(errors="replace")


def offsets_of(parts: list[list[int]]) -> list[int]:
    """Where each begins: after the characters that are whole before it."""
    found, decoder, count = [], codecs.getincrementaldecoder("utf-8")("replace"), 0
    for part in parts:
        found.append(count)
        count += len(decoder.decode(bytes(part)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_bytes_of_tokens_make_the_text_of_a_completion_and_offsets_count_its_characters(
    is_streamed: bool,
) -> None:
    async with asking() as (_, client):
        for echo, prompt in ((False, "hello"), (True, "h€é"), (True, list("x😀".encode()))):
            how: Any = {"prompt": prompt, "max_tokens": 60, "logprobs": 2, "echo": echo, **GREEDY}
            how["extra_body"] = PAST_THE_END | {"allowed_token_ids": list(range(256))}
            how["temperature"], how["seed"] = 2.0, 5
            text, parts, offsets = "", list[list[int]](), list[int]()
            choices: list[Any] = []
            if is_streamed:
                async for chunk in await client.completions.create(stream=True, **how):
                    choices += chunk.choices
            else:
                choices += (await client.completions.create(**how)).choices
            for choice in choices:
                text += choice.text
                if choice.logprobs is not None:
                    parts += choice.logprobs.bytes
                    offsets += choice.logprobs.text_offset
            assert text_of_bytes(parts) == text and len(parts) >= 60
            assert offsets == offsets_of(parts) and "\ufffd" in text


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_bytes_of_tokens_make_the_text_of_a_chat(is_streamed: bool) -> None:
    async with asking() as (_, client):
        how: Any = {"messages": CHAT, "max_tokens": 60, "logprobs": True, "top_logprobs": 2, **GREEDY}
        how["extra_body"] = PAST_THE_END | {"allowed_token_ids": list(range(256))}
        how["temperature"], how["seed"] = 2.0, 5
        text, entries = "", list[Any]()
        if is_streamed:
            async for chunk in await client.chat.completions.create(stream=True, **how):
                choice = chunk.choices[0]
                text += choice.delta.content or ""
                entries += (choice.logprobs.content or []) if choice.logprobs is not None else []
        else:
            whole = (await client.chat.completions.create(**how)).choices[0]
            assert whole.logprobs is not None
            text, entries = whole.message.content or "", whole.logprobs.content or []
        assert text_of_bytes([entry.bytes for entry in entries]) == text and len(entries) == 60
        assert all(len(top.bytes) == 1 for entry in entries for top in entry.top_logprobs)


async def test_a_prompt_that_ends_inside_a_character_begins_the_text() -> None:
    async with asking() as (_, client):
        prompt = list("x😀".encode())[:-1]
        how: Any = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, **GREEDY}
        how["extra_body"] = PAST_THE_END | {"allowed_token_ids": ["😀".encode()[-1]]}
        choice = (await client.completions.create(**how)).choices[0]
        assert choice.text == "😀" and choice.logprobs is not None
        assert choice.logprobs.bytes == [[0x80]] and choice.logprobs.text_offset == [0]
        echoed = (await client.completions.create(echo=True, **how)).choices[0]
        assert echoed.text == "x😀"
        streamed = ""
        async for chunk in await client.completions.create(echo=True, stream=True, **how):
            streamed += "".join(one.text for one in chunk.choices)
        assert streamed == "x😀"
