"""Completions and chats in one piece and in chunks, as the openai package asks for them and reads them."""

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from jpaged.client import AsyncClient
from jpaged.testing import FakeExecutor, with_adapters
from jpaged.types import SamplingParams
from tests.http.generate.asking import CHAT, CHAT_TEXT, GREEDY, PAST_THE_END, asking, text_of
from tests.server.harness import running


async def test_a_completion_is_what_the_model_says() -> None:
    async with asking() as (_, client):
        answer = await client.completions.create(prompt="hello", max_tokens=8, extra_body=PAST_THE_END, **GREEDY)
        assert [one.text for one in answer.choices] == [text_of("hello", 8)]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
        assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
        without = await client.completions.create(prompt="hello", extra_body=PAST_THE_END, **GREEDY)
        assert without.usage is not None and without.usage.completion_tokens == 123  # up to the model's length


def test_the_client_of_threads_is_answered_alike() -> None:
    def ask(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(prompt="hello", max_tokens=8, extra_body=PAST_THE_END, **GREEDY)
            stream = client.chat.completions.create(
                messages=CHAT, max_tokens=8, extra_body=PAST_THE_END, stream=True, **GREEDY
            )
            return whole.choices[0].text, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async def run() -> tuple[str, str]:
        async with running(http_port=0) as harness:
            return await asyncio.to_thread(ask, harness.http_url)

    assert asyncio.run(run()) == (text_of("hello", 8), text_of(CHAT_TEXT, 8))


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("options", [None, {"include_usage": True}, CONTINUOUS])
async def test_a_streamed_completion_is_the_same_in_pieces(options: Any) -> None:
    async with asking() as (_, client):
        more = {} if options is None else {"stream_options": options}
        stream = await client.completions.create(
            prompt="hello", max_tokens=8, extra_body=PAST_THE_END, stream=True, **more, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        told = [chunk for chunk in chunks if chunk.choices]
        assert "".join(chunk.choices[0].text for chunk in told) == text_of("hello", 8)
        assert [chunk.choices[0].finish_reason for chunk in told if chunk.choices[0].finish_reason] == ["length"]
        assert len({chunk.id for chunk in chunks}) == 1
        usages = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        if options == CONTINUOUS:
            assert len(usages) == len(told) + 1 and usages == sorted(usages) and usages[-1] == 8
        else:
            assert usages == ([] if options is None else [8])
            assert [bool(chunk.choices) for chunk in chunks].count(False) == len(usages)


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
        assert whole.choices[0].message.content == text_of(CHAT_TEXT, 8)
        assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_a_chat_without_a_limit_fills_what_is_left(num_samples: int) -> None:
    executor = FakeExecutor(num_blocks=40)  # 160 tokens: one sequence may have all of 128, three may not
    async with asking(executor=executor) as (_, client):
        answer = await client.chat.completions.create(
            messages=CHAT, n=num_samples, extra_body=PAST_THE_END, **(GREEDY | {"temperature": 1.0})
        )
        assert answer.usage is not None
        each = answer.usage.completion_tokens // num_samples
        assert [one.finish_reason for one in answer.choices] == ["length"] * num_samples
        prompt = answer.usage.prompt_tokens
        assert prompt + each == 128 if num_samples == 1 else 128 > prompt + each > 40
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(messages=CHAT, extra_body={"min_tokens": 200}, **GREEDY)
        assert (refused.value.param, refused.value.code) == ("min_tokens", "context_length_exceeded")
        least = await client.chat.completions.create(messages=CHAT, extra_body={"min_tokens": 50}, **GREEDY)
        assert least.usage is not None and least.usage.completion_tokens >= 50


async def test_several_prompts_are_choices_in_the_order_of_prompts() -> None:
    prompts: Any = ["hello", "x", "other"]
    ids: Any = [list(one.encode()) for one in prompts]
    async with asking() as (_, client):
        how: Any = {"max_tokens": 6, "n": 2, "extra_body": PAST_THE_END, **GREEDY}
        for given in (prompts, ids):
            answer = await client.completions.create(prompt=given, **how)
            assert [one.index for one in answer.choices] == list(range(6))
            assert [one.text for one in answer.choices] == [text_of(one, 6) for one in prompts for _ in range(2)]
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 36)
        texts = dict.fromkeys(range(6), "")
        async for chunk in await client.completions.create(prompt=prompts, stream=True, **how):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert list(texts.values()) == [text_of(one, 6) for one in prompts for _ in range(2)]
        one = await client.completions.create(prompt=ids[0], **(how | {"n": 1}))
        assert [choice.text for choice in one.choices] == [text_of("hello", 6)]


async def test_more_prompts_than_the_queue_has_places_are_all_answered() -> None:
    executor = FakeExecutor(max_num_seqs=2)
    async with asking(executor=executor, max_num_seqs=2, max_num_queued_reqs=1) as (_, client):
        prompts = [f"prompt {number}" for number in range(12)]
        answer = await client.completions.create(prompt=prompts, max_tokens=4, extra_body=PAST_THE_END, **GREEDY)
        assert [one.text for one in answer.choices] == [text_of(one, 4) for one in prompts]
        texts = dict.fromkeys(range(12), "")
        stream = await client.completions.create(
            prompt=prompts, max_tokens=4, extra_body=PAST_THE_END, stream=True, **GREEDY
        )
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert list(texts.values()) == [text_of(one, 4) for one in prompts]


async def test_one_wrong_prompt_of_several_is_named() -> None:
    async with asking() as (harness, client):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(prompt=[[1], [2], [999]], stream=stream, **GREEDY)
            assert refused.value.param == "prompt[2]" and "999" in str(refused.value)
        assert harness.num_open_calls == 0


async def test_a_seed_brings_the_same_tokens_over_http_and_grpc() -> None:
    async with asking() as (harness, client):
        answer = await client.completions.create(
            model="fake", prompt="hello", max_tokens=8, seed=7, temperature=0.9, n=2, extra_body=PAST_THE_END
        )
        sampling = SamplingParams(max_tokens=8, seed=7, temperature=0.9, n=2, ignore_eos=True)
        async with AsyncClient(harness.target) as ours:
            output = await ours.complete("hello", sampling)
        assert [one.text for one in answer.choices] == [one.text for one in output.outputs]


async def test_what_openai_does_not_have_is_asked_for_by_its_name() -> None:
    async with asking() as (_, client):
        told: Any = await client.completions.create(
            prompt="hello",
            max_tokens=4,
            extra_body={"return_token_ids": True, "prompt_logprobs": 1, **PAST_THE_END},
            **GREEDY,
        )
        choice = told.choices[0].model_dump()
        assert choice["prompt_token_ids"] == list(b"hello") and len(choice["token_ids"]) == 4
        assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 5
        beams = await client.completions.create(
            model="fake", prompt="hello", max_tokens=4, n=2, extra_body={"beam_width": 2, **PAST_THE_END}
        )
        assert len(beams.choices) == 2
        stopped = await client.completions.create(
            prompt="hello", max_tokens=8, stop=text_of("hello", 3)[-1], extra_body=PAST_THE_END, **GREEDY
        )
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (text_of("hello", 3)[:-1], "stop")
        ended: Any = await client.completions.create(
            prompt="hello", max_tokens=8, extra_body={"stop_token_ids": [choice["token_ids"][2]]}, **GREEDY
        )
        assert (ended.choices[0].finish_reason, ended.choices[0].stop_reason) == ("stop", choice["token_ids"][2])


async def test_ids_of_tokens_are_told_as_they_come() -> None:
    async with asking() as (_, client):
        more: Any = {"stream": True, "extra_body": {"return_token_ids": True, **PAST_THE_END}, **GREEDY}
        chunks: list[Any] = [one async for one in await client.completions.create(prompt="hello", max_tokens=6, **more)]
        assert chunks[0].choices[0].prompt_token_ids == list(b"hello")
        whole: Any = await client.completions.create(prompt="hello", max_tokens=6, **(more | {"stream": False}))
        told = [token_id for chunk in chunks[1:] for token_id in chunk.choices[0].token_ids]
        assert told == whole.choices[0].token_ids
        chat: list[Any] = [
            one async for one in await client.chat.completions.create(messages=CHAT, max_tokens=6, **more)
        ]
        assert chat[0].prompt_token_ids == list(CHAT_TEXT.encode())
        assert sum(len(chunk.choices[0].token_ids) for chunk in chat[1:]) == 6


async def test_a_model_that_is_an_adapters_name_selects_it(tmp_path: Any) -> None:
    path = tmp_path / "weight"
    path.write_text("3")
    executor = with_adapters(2)()
    async with asking(executor=executor, enable_lora=True) as (harness, client):
        for name in ("three", "other"):
            harness.serving.adapters.load(name, str(path))
        how: Any = {"prompt": "hello", "max_tokens": 6, "temperature": 0.0}
        named = await client.completions.create(model="three", extra_body=PAST_THE_END, **how)
        asked = await client.completions.create(model="fake", extra_body={"adapter": "three", **PAST_THE_END}, **how)
        assert named.choices[0].text == asked.choices[0].text != text_of("hello", 6)
        assert (named.model, asked.model) == ("three", "fake")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="three", extra_body={"adapter": "other"}, **how)
        assert refused.value.param == "adapter"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="four", **how)


async def test_adapters_are_loaded_and_unloaded_by_the_paths_of_vllm(tmp_path: Any) -> None:
    path = tmp_path / "three"
    path.write_text("3")
    harnesses = running(http_port=0, enable_lora=True, executor=with_adapters(2)())
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        loaded = {"lora_name": "three", "lora_path": str(path)}
        for body, status in (
            ({"lora_name": "three"}, 400),
            ({**loaded, "load_inplace": "yes"}, 400),
            ({**loaded, "lora_path": str(tmp_path / "none")}, 400),
            ({**loaded, "lora_int_id": 3, "load_inplace": False}, 200),
            (loaded, 400),
            ({**loaded, "load_inplace": True}, 200),
        ):
            answer = await client.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == status, (body, answer.text)
            if status == 400:
                assert answer.json()["error"]["param"] in ("lora_name", "lora_path", "load_inplace")
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["fake", "three"]
        for status in (200, 404):
            answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "three"})
            assert answer.status_code == status
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["fake"]


async def test_the_prefix_cache_is_reset() -> None:
    how = {"prompt": "hello " * 8, "max_tokens": 1}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        cached = []
        for _ in range(2):
            for _ in range(2):
                usage = (await client.post("/v1/completions", json=how)).json()["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert (await client.post("/reset_prefix_cache?reset_external=false")).status_code == 200
        assert (await client.post("/reset_prefix_cache?reset_running_requests=true")).status_code == 400
        foreign = await client.post("/reset_prefix_cache", headers={"origin": "https://example.org"})
        assert foreign.status_code == 403
    assert cached[0] == cached[2] == 0 < cached[1] == cached[3]


async def test_control_can_be_turned_off() -> None:
    without_control = running(http_port=0, disable_control=True)
    async with without_control as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 403
