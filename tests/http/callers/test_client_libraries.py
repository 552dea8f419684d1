"""Client libraries that others wrote, unmodified, against the demo model and a scripted one (`make callers`)."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.http.callers.test_callers import ENVIRONMENT
from tests.http.callers.weather_server import ANSWER, serve_weather
from tests.processes import WAIT_S
from tests.server.harness import eventually, request

FOLDER = Path(__file__).with_name("clients")
PYTHON = Path(sys.prefix) / "callers-clients" / "bin" / "python"
NODE_PROGRAMS = {
    "ai_sdk": (FOLDER / "ai_sdk_calls.mjs", "callers-node"),
    "promptfoo": (FOLDER.with_name("promptfoo") / "promptfoo_calls.mjs", "callers-promptfoo"),
}
"""Calls of a client in JavaScript, and the environment with its packages."""
PROMPT = "Tell me a story about a cat."
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 16, "temperature": 0}
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "NO_PROXY": "*", "PYTHONPATH": ""}
NUM_CONCURRENT = 4
RESPONSES = ("responses", "responses stream")
AGENTS = ("agent", "responses agent")
CHATS = ("chat", "usage", "stream", "async")
CALLS: dict[str, tuple[str, ...]] = {
    "litellm": (*CHATS, "completion", "tool", "schema", "responses", "messages", "agent", "embeddings"),
    "langchain_openai": (*CHATS, "completion", "tool", "schema", *RESPONSES, *AGENTS, "embeddings"),
    "langchain_anthropic": ("messages", "usage", "stream", "async", "tool", "schema", "agent"),
    "llama_index": (*CHATS, "completion", "agent", "embeddings"),
    "pydantic_ai": (*CHATS, "tool", "schema", "responses", *AGENTS),
    "openai_agents": ("chat", "usage", "async", "schema", "responses", *AGENTS, "responses agent stream"),
    "instructor": ("tool", "tool stream", "async tool", "schema", "messages tool"),
    "dspy": ("chat", "usage", "async", "predict"),
    "ai_sdk": (*CHATS, "stream usage", "tool", "schema", *RESPONSES, *AGENTS, "embeddings"),
    "promptfoo": (
        "chat",
        "usage",
        "stream",
        "completion",
        "tool",
        "schema",
        "responses",
        "messages",
        "ollama",
        "similar",
    ),
}
"""The kinds of calls of each client."""


@pytest.fixture(scope="module")
def expected(served: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """What OpenAI's own package gets, by kind of call."""
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **GREEDY)
        text, usage = chat.choices[0].message.content, chat.usage
        assert text and usage
        counts = [usage.prompt_tokens, usage.completion_tokens]
        found: dict[str, Any] = dict.fromkeys(("chat", "stream", "messages", "ollama", *RESPONSES), text)
        found |= {"usage": counts, "stream usage": counts, "async": [text] * NUM_CONCURRENT}
        found |= dict.fromkeys((*AGENTS, "responses agent stream", "predict"), ANSWER)
        found["completion"] = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
        vectors = client.embeddings.create(model="demo", input=["a cat", "a dog"], encoding_format="float")
        found["embeddings"] = cat, dog = [one.embedding for one in vectors.data]
        yield {**found, "similar": np.dot(cat, dog) / (np.linalg.norm(cat) * np.linalg.norm(dog))}


def is_times(value: Any) -> bool:
    """Return True if a value follows the schema of the calls."""
    return value in ({"times": 1}, {"times": 2})


async def call(name: str, *urls: str) -> dict[str, Any]:
    """Return what the calls of a client print."""
    words = [str(PYTHON), str(FOLDER / "sdk_calls.py"), name]
    packages = ""
    if name in NODE_PROGRAMS:
        node = shutil.which("node")
        assert node, "node was not found"
        program, environment = NODE_PROGRAMS[name]
        words, packages = [node, str(program)], str(Path(sys.prefix) / environment / "node_modules")
    process = await asyncio.create_subprocess_exec(
        *words,
        *urls,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**ENVIRONMENT, **OFFLINE, "NODE_MODULES": packages, "PATH": os.environ["PATH"]},
    )
    out, err = await asyncio.wait_for(process.communicate(), 2 * WAIT_S)
    assert process.returncode == 0, err.decode()[-6000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])  # LiteLLM prints before
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name == "promptfoo" else pytest.mark.long) for name in CALLS]
)
async def test_a_client_gets_what_openai_s_package_gets(
    served: tuple[str, str],
    expected: dict[str, Any],
    name: str,
) -> None:
    async with serve_weather() as harness:
        found = await call(name, served[1], harness.http_url)
    assert set(found) == set(CALLS[name])
    for kind, value in found.items():
        if kind == "embeddings":
            for vector, theirs in zip(value, expected[kind], strict=True):
                assert vector == pytest.approx(theirs, abs=1e-4)
        elif kind == "similar":
            assert value == pytest.approx(expected[kind], abs=1e-4)
        elif kind in ("tool", "messages tool"):
            assert is_times(value[1] if kind == "tool" else value), (kind, value)
            assert kind != "tool" or value[0] == "play"
        elif kind in ("schema", "tool stream"):
            assert is_times(value), (kind, value)
        elif kind == "async tool":
            assert len(value) == NUM_CONCURRENT and all(map(is_times, value))
        else:
            assert value == expected[kind], kind


async def read_all(call: Any) -> list[Any]:
    """Return all messages of a call."""
    return [message async for message in call]


@pytest.mark.long
async def test_clients_retry_while_the_queue_is_full() -> None:
    async with serve_weather(max_num_seqs=1, max_num_queued_reqs=1) as harness:
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), str(FOLDER / "sdk_calls.py"), "retries", harness.http_url, harness.http_url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**ENVIRONMENT, **OFFLINE, "OPENAI_LOG": "debug", "ANTHROPIC_LOG": "debug"},
            limit=2**24,
        )
        assert process.stdin and process.stdout and process.stderr
        log = await asyncio.wait_for(process.stderr.readuntil(b"imported\n"), WAIT_S)
        harness.faults.hold_after(0)
        calls = [asyncio.ensure_future(read_all(harness.inference.Generate(request())))]
        await eventually(lambda: harness.executor.num_steps > 0)
        calls.append(asyncio.ensure_future(read_all(harness.inference.Generate(request()))))
        await eventually(lambda: harness.serving.engine.is_full)
        process.stdin.write(b"\n")
        num_rejected = 0
        while num_rejected < 3 and (line := await asyncio.wait_for(process.stderr.readline(), WAIT_S)):
            log += line
            num_rejected += b"HTTP Response:" in line and b'"429' in line
        harness.faults.release()
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
        assert num_rejected == 3 and process.returncode == 0, (log + err).decode()[-6000:]
        answers = json.loads(out.splitlines()[-1])
        assert answers == dict.fromkeys(("langchain_openai", "langchain_anthropic", "litellm"), ANSWER)
        assert all(messages[-1].HasField("finish") for messages in await asyncio.gather(*calls))
