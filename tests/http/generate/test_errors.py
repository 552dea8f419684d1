"""Errors as OpenAI's client raises them, and whether it tries again."""

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from jpaged.testing import FakeExecutor
from tests.http.generate.asking import CHAT, GREEDY, PAST_THE_END, asking, text_of
from tests.server.harness import eventually, running


async def test_each_error_is_the_one_of_its_kind() -> None:
    async with asking() as (_, client):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="fake", messages=CHAT, top_p=3)
        assert (bad.value.param, bad.value.code, bad.value.type) == (
            "top_p",
            "INVALID_ARGUMENT",
            "invalid_request_error",
        )
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError, match="'other' is not served; 'fake' is") as other:
            await client.chat.completions.create(model="other", messages=CHAT)
        assert other.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError) as other:
            await client.models.retrieve("other")
        assert other.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError) as other:
            await client.embeddings.create(model="other", input="x")
        assert other.value.code == "model_not_found"
        with pytest.raises(
            openai.NotFoundError, match="POST /v1/responses/compact is not served: send a normal request"
        ):
            await client.responses.compact(model="fake", input="a")
        with pytest.raises(openai.NotFoundError, match="POST /v1/audio/speech is not served: models take text"):
            await client.audio.speech.create(model="fake", voice="x", input="y")
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(prompt="x" * 200, **GREEDY)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
        long_chat: Any = [{"role": "user", "content": "x" * 200}]
        limits: list[Any] = [{}, {"max_tokens": 5}, {"max_completion_tokens": 5}]
        for how in limits:
            with pytest.raises(openai.BadRequestError) as long:
                await client.chat.completions.create(messages=long_chat, **how, **GREEDY)
            assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
        for name in ("max_tokens", "max_completion_tokens"):
            more: dict[str, Any] = {name: 500}
            with pytest.raises(
                openai.BadRequestError, match=rf"{name}: \d+ prompt tokens and 500 to .* \(128\)"
            ) as long:
                await client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **more, **GREEDY)
            assert (long.value.code, long.value.param) == ("context_length_exceeded", name)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(prompt="x", max_tokens=500, **GREEDY)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
        with pytest.raises(openai.BadRequestError) as long:
            await client.responses.create(model="fake", input="x", max_output_tokens=500)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_output_tokens")
        with pytest.raises(openai.BadRequestError) as long:
            await client.responses.create(model="fake", input="x" * 200)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.BadRequestError) as long:
            await client.embeddings.create(model="fake", input="x" * 200)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
        many: Any = {"prompt": ["x", "x" * 200], "max_tokens": 5, **GREEDY}
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(**many)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt[1]")
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(prompt="x" * (2 << 20), **GREEDY)
        assert (large.value.status_code, large.value.param) == (413, "body")


async def test_a_full_queue_is_a_rate_limit_that_says_when_to_come_back() -> None:
    executor = FakeExecutor(max_num_seqs=1)
    async with asking(executor=executor, max_num_seqs=1, max_num_queued_reqs=1) as (harness, client):
        harness.faults.gate.clear()
        how: Any = {"prompt": "hello", "max_tokens": 8, "extra_body": PAST_THE_END, **GREEDY}
        running_calls = [asyncio.create_task(client.completions.create(**how)) for _ in range(2)]
        await eventually(lambda: harness.serving.engine.is_full)
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(stream=True, **how)
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert int(full.value.response.headers["retry-after-ms"]) > 0
        harness.faults.release()
        assert [one.choices[0].text for one in await asyncio.gather(*running_calls)] == [text_of("hello", 8)] * 2


async def test_openais_client_comes_back_by_itself_when_there_is_a_place() -> None:
    executor = FakeExecutor(max_num_seqs=1)
    async with asking(executor=executor, max_num_seqs=1, max_num_queued_reqs=1, max_retries=5) as (harness, client):
        harness.faults.gate.clear()
        how: Any = {"prompt": "hello", "max_tokens": 8, "extra_body": PAST_THE_END, **GREEDY}
        calls = [asyncio.create_task(client.completions.create(**how)) for _ in range(2)]
        await eventually(lambda: harness.serving.engine.is_full)
        refused = asyncio.create_task(client.completions.create(**how))
        await eventually(lambda: harness.server._service._num_calls == 2)
        harness.faults.release()
        texts = [one.choices[0].text for one in await asyncio.gather(*calls, refused)]
        assert texts == [text_of("hello", 8)] * 3


async def test_what_can_never_work_is_not_tried_again() -> None:
    async with asking(max_retries=3) as (harness, client):
        harness.faults.nan_token_ids = frozenset(b"e")
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(prompt="hello", max_tokens=4, **GREEDY)
        assert failed.value.response.headers["x-should-retry"] == "false"
        assert harness.serving.engine.num_ended_by_reason()["error"] == 1


async def test_a_client_that_does_not_wait_any_longer_ends_its_request() -> None:
    async with asking() as (harness, client):
        harness.faults.gate.clear()
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).completions.create(prompt="hello", max_tokens=99, **GREEDY)
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)


async def test_methods_that_are_not_here_say_which_are() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        answer = await client.get("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["error"]["param"] is None
        assert (await client.head("/health")).status_code == 200
        assert (await client.options("/v1/completions")).status_code == 405


async def test_pages_of_other_origins_may_ask_where_the_operator_says_so() -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with (
        running(http_port=0, http_cors_origins=["https://page.example"]) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        answer = await client.options("/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        answer = await client.get("/health", headers={"origin": "https://page.example"})
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        other = await client.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_a_fault_of_ours_is_a_status_and_tells_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking() as (harness, client):
        monkeypatch.setattr(harness.serving.input_processor, "make_request", lambda **given: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as failed:
            await client.completions.create(prompt="hello", max_tokens=4, **GREEDY)
        assert failed.value.code == "INTERNAL_ERROR"


async def test_a_path_of_other_servers_is_answered_with_what_to_use() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for path, text in {
            "/v1/conversations/conv_1/items": "conversations are not stored",
            "/v1/chat/completions/render": "use `/tokenize` and `/detokenize`",
            "/reset_mm_cache": "encoded images are found by their content",
        }.items():
            answer = await client.post(path, json={})
            assert answer.status_code == 404
            assert f"POST {path} is not served: {text}" in answer.json()["error"]["message"]
        assert "there is no POST /v1/conversation" in (await client.post("/v1/conversation", json={})).text
