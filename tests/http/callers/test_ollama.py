"""Ollama's own package against /api/chat and the paths next to it, in the environment of `make callers`."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.http.test_messages import ARGUMENTS, QWEN
from tests.http.test_ollama import executor
from tests.server.harness import running

pytestmark = pytest.mark.long

PYTHON = Path(sys.prefix) / "callers" / "bin" / "python"
CALLS = Path(__file__).with_name("ollama_calls.py")


async def called(name: str, **options: Any) -> Any:
    """What the calls print."""
    environment = {**os.environ, "PYTHONPATH": "", "NO_PROXY": "*"}
    async with running(http_port=0, **options) as harness:
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, CALLS, name, harness.http_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-6000:]
    return json.loads(out)


async def test_every_way_of_asking_gets_the_same_chat() -> None:
    found, has_grown = await called("chats", executor=executor(), answer_format=QWEN)
    assert len(found) == 4 and all(one == found[0] for one in found) and has_grown
    text, thought, calls, reason, *counts = found[0]
    assert (text, thought, reason) == ("So: ", "Look.", "stop") and all(counts)
    assert calls == [{"name": "weather", "arguments": json.loads(ARGUMENTS)}]


async def test_prompts_and_vectors() -> None:
    assert await called("prompts") == [[True, 4, "length", 4, 2], [4, "load"]]
    assert await called("vectors") == [[3, 3], 3]


async def test_the_model_is_listed_and_described() -> None:
    name, is_same, length, capabilities, num_facts, pulled = await called("models")
    assert (name, is_same, length, pulled) == ("fake:latest", True, 128, "success")
    assert {"completion", "embedding"} <= set(capabilities) and num_facts > 5


async def test_errors_have_the_class_of_the_package() -> None:
    found = await called("errors")
    assert [status for status, _ in found] == [404, 404, 400, 400, 404]
    assert "images" in found[2][1] and found[3][1].startswith("options.mirostat: ")
