"""Every fault that an executor can have, over HTTP: before a stream has begun, in its middle, and without one."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from jpaged.testing import FakeExecutor, Faults, expected_tokens
from tests.server.harness import eventually, running

HELLO: dict[str, Any] = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": 20}
FAULTS = {
    "fail_at_first_step": Faults(fail_at_step=0),
    "fail_later": Faults(fail_at_step=6),
    "nan_in_the_prompt": Faults(nan_token_ids=frozenset(b"e")),
    "nan_later": Faults(nan_token_ids=frozenset(expected_tokens(list(b"hello"), 3)[2:])),  # once it is read back
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ["hello", "hello"]])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_is_told_and_the_server_is_as_healthy_as_it_is(name: str, prompt: Any, stream: bool) -> None:
    faults = Faults(fail_at_step=FAULTS[name].fail_at_step, nan_token_ids=FAULTS[name].nan_token_ids)
    ends_server, has_begun = faults.fail_at_step is not None, name.endswith("later")
    executor = FakeExecutor(faults=faults)
    async with (
        running(http_port=0, executor=executor) as harness,
        httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as client,
    ):
        answer = await client.post("/v1/completions", json={**HELLO, "prompt": prompt, "stream": stream})
        if stream and has_begun:
            assert answer.status_code == 200
            events = answer.text.split("\n\n")
            assert json.loads(events[0].removeprefix("data: "))["choices"]
            error = json.loads(events[-2].removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "INTERNAL_ERROR")
        if ends_server:
            async with asyncio.timeout(300):
                assert await asyncio.shield(harness.run) == 1
            return
        assert (await client.get("/health")).status_code == 200
        await eventually(lambda: harness.num_blocks_used == 0)
        harness.faults.nan_token_ids = frozenset()
        assert (await client.post("/v1/completions", json=HELLO)).status_code == 200


async def test_health_turns_before_the_port_closes_when_the_engine_has_died() -> None:
    executor = FakeExecutor(faults=Faults(fail_at_step=2))
    async with (
        running(http_port=0, executor=executor) as harness,
        httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        failed = await client.post("/v1/completions", json=HELLO)
        assert failed.status_code == 500
        codes = set()
        try:
            while True:
                codes.add((await client.get("/health")).status_code)
        except httpx2.TransportError:  # it is gone
            assert codes <= {200, 503}
        assert await asyncio.shield(harness.run) == 1
        assert harness.server.state.stage.value == "failed"
