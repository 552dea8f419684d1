"""The demo model over HTTP, asked by the openai package, with nothing in between that is not what a server runs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from jpaged.build import build
from jpaged.client import Client
from jpaged.config import EngineConfig
from jpaged.server.lifecycle import Server
from jpaged.types import SamplingParams

pytestmark = pytest.mark.long

MESSAGES: Any = [{"role": "user", "content": "Tell me a story."}]


class Weather(BaseModel):
    """What an answer is to hold."""

    sky: Literal["clear", "grey"]
    is_warm: bool


@contextmanager
def serving_demo() -> Iterator[Server]:
    """A server of the demo model, on a thread of its own."""
    config = EngineConfig.load({"port": 0, "http_port": 0, "max_model_len": 256, "max_num_seqs": 4, "num_blocks": 64})
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    ready = asyncio.run_coroutine_threadsafe(_started(config), loop).result(timeout=600)
    server, run = ready
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.request_stop)
        assert asyncio.run_coroutine_threadsafe(_ended(run), loop).result(timeout=60) == 0
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _started(config: EngineConfig) -> tuple[Server, asyncio.Task[int]]:
    loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    server = Server(
        config, lambda progress: build(config, progress), on_serving=lambda port, model: loaded.set_result(None)
    )
    await server.start()
    run = asyncio.create_task(server.run())
    await asyncio.wait((loaded, run), return_when=asyncio.FIRST_COMPLETED)
    return server, run


async def _ended(run: asyncio.Task[int]) -> int:
    return await run


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_demo() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_http_and_grpc_say_the_same(server: Server, client: openai.OpenAI) -> None:
    how: Any = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
    over_http = client.completions.create(model="demo", prompt="Once upon", **how)
    streamed = client.completions.create(model="demo", prompt="Once upon", stream=True, **how)
    with Client(f"127.0.0.1:{server._port}") as ours:
        output = ours.complete("Once upon", SamplingParams(**how))
        said = ours.chat(MESSAGES, SamplingParams(**how))
    assert over_http.choices[0].text == output.outputs[0].text
    assert "".join(chunk.choices[0].text for chunk in streamed) == output.outputs[0].text
    chat = client.chat.completions.create(model="demo", messages=MESSAGES, **how)
    assert chat.choices[0].message.content == said.outputs[0].text


def test_an_answer_is_an_object_of_the_class_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Weather, max_tokens=200, temperature=0.0, frequency_penalty=2.0
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(
        model="demo", messages=MESSAGES, response_format=Weather, max_tokens=200, temperature=0.0, frequency_penalty=2.0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_a_grammar_that_cannot_be_names_what_the_caller_gave(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        )
    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt="x", extra_body={"structured_outputs": {"regex": "("}})
    assert refused.value.param == "structured_outputs.regex"


def test_an_echo_tells_how_likely_a_prompt_is(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "Once upon a time" and logprobs is not None
    values = logprobs.token_logprobs or []
    assert values[0] is None and all(value <= 0 for value in values[1:])
    assert "".join(logprobs.tokens or []).endswith("a time")
