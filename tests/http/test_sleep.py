"""vLLM's paths that pause generation and release device memory."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from jpaged.testing import FakeExecutor
from tests.server.harness import eventually, running

BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 6, "temperature": 0.0}


def states(metrics: str) -> dict[str, float]:
    """The sleep states in Prometheus' format."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    return {line.partition('sleep_state="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_a_server_sleeps_and_wakes_up() -> None:
    executor = FakeExecutor()
    harnesses = running(http_port=0, executor=executor, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        text = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        for level, state in ((1, "weights_offloaded"), (2, "discard_all")):
            answer = await client.post(f"/sleep?level={level}")
            assert (answer.status_code, answer.json()) == (200, {"status": "sleeping", "level": level})
            assert executor.sleep_level == level
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert states((await client.get("/metrics")).text) == {
                name: float(name == state) for name in ("awake", "weights_offloaded", "discard_all")
            }
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503 and "asleep" in refused.json()["error"]["message"]
            assert (await client.get("/health")).status_code == 200
            answer = await client.post("/wake_up?tags=weights")
            assert answer.json() == {"status": "sleeping", "tags": ["weights"]}
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await client.post("/resume")).status_code == 503
            answer = await client.post("/wake_up")
            assert answer.json() == {"status": "awake", "tags": None}
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
            assert states((await client.get("/metrics")).text)["awake"] == 1.0
            assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == text


async def test_generation_is_paused_and_resumed() -> None:
    harnesses = running(http_port=0, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        text = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        for mode in ("abort", "wait"):
            answer = await client.post(f"/pause?mode={mode}&clear_cache=false")
            assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            assert (await client.post("/v1/completions", json=BODY)).status_code == 503
            assert (await client.post("/resume")).json() == {"status": "resumed"}
            assert (await client.get("/is_paused")).json() == {"is_paused": False}
        await client.post("/pause?mode=keep")
        later = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await eventually(lambda: harness.num_open_calls == 1)
        assert not later.done()
        await client.post("/resume")
        assert (await later).json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=x", "level"),
        ("/sleep?mode=stop", "mode"),
        ("/pause?mode=stop", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/wake_up?tags=weight", "tags"),
    ],
)
async def test_parameters_that_cannot_be_are_refused(path: str, field: str) -> None:
    harnesses = running(http_port=0, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        refused = await client.post(path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert (await client.get("/is_paused")).json() == {"is_paused": False}


async def test_without_the_option_and_for_pages_of_other_sites_there_are_none() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/pause"), ("GET", "/is_sleeping")):
            refused = await client.request(method, path)
            assert refused.status_code == 501 and "--enable-sleep-mode" in refused.json()["error"]["message"]
        assert "engine_sleep_state" not in (await client.get("/metrics")).text
        refused = await client.post("/sleep", headers={"origin": "https://example.org"})
        assert refused.status_code == 403
