"""Anthropic's own package against /v1/messages, in the environment of `make callers`."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.site.vllm_fields import ANTHROPIC, ANTHROPIC_VERSION
from jpaged.testing import scripted
from tests.http.test_messages import QWEN, TEXT
from tests.server.harness import running

pytestmark = pytest.mark.long

PYTHON = Path(sys.prefix) / "callers" / "bin" / "python"
CALLS = Path(__file__).with_name("anthropic_calls.py")
BLOCK_SIZE = 16


async def called(*words: str) -> Any:
    """What the calls print."""
    environment = {**os.environ, "PYTHONPATH": "", "NO_PROXY": "*"}
    process = await asyncio.create_subprocess_exec(
        PYTHON, CALLS, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-6000:]
    return json.loads(out)


def serving(*texts: str, **options: Any) -> Any:
    executor = scripted(*(texts or (TEXT,)))(num_blocks=4096, max_model_len=16_384)
    return running(executor=executor, answer_format=QWEN, http_port=0, **options)


async def test_the_recorded_fields_are_those_of_the_package() -> None:
    requirements = (CALLS.parent / "requirements.txt").read_text()
    assert f"anthropic=={ANTHROPIC_VERSION}\n" in requirements
    recorded = {place: sorted(names.split()) for place, names in ANTHROPIC.items()}
    assert await called("fields") == recorded


async def test_every_way_of_asking_gets_the_same_message() -> None:
    async with serving() as harness:
        found, kinds, num_tokens, usage, again, models = await called("messages", harness.http_url)
    assert len(found) == 5 and all(one == found[0] for one in found)
    assert [block["type"] for block in found[0]["content"]] == ["thinking", "text", "tool_use"]
    assert found[0]["stop_reason"] == "tool_use" and found[0]["content"][2]["input"] == {"city": "Zürich 🏔"}
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]] == [
        *("message_start", *block * 3, "message_delta", "message_stop"),
    ]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    assert again["cache_read_input_tokens"] >= num_tokens - 2 * BLOCK_SIZE
    assert models == ["fake"]


async def test_errors_have_the_classes_of_the_package() -> None:
    async with serving() as harness:
        found = await called("errors", harness.http_url)
    missing, wrong = (
        ["NotFoundError", 404, "not_found_error"],
        ["BadRequestError", 400, "invalid_request_error"],
    )
    assert found == [missing] * 2 + [wrong] * 4


async def test_an_agent_reads_its_earlier_turns_from_the_cache() -> None:
    call = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "a.py"}}\n</tool_call>'
    async with serving(f"<think>\nLook.\n</think>\n\nI read it. {call}") as harness:
        found = await called("claude_code", harness.http_url)
    assert len(found) == 6
    before = 0
    for counted, fresh, created, read, stop_reason in found:
        assert (fresh + created + read, stop_reason) == (counted, "tool_use")
        assert read >= before - 2 * BLOCK_SIZE
        before = counted
    assert found[-1][3] > 1000
