"""vLLM's paths that pause generation and release device memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save

from jpaged.service import service
from jpaged.testing import FakeExecutor, expected_tokens
from tests.server.harness import eventually, running

UPDATES: dict[str, dict[str, Any]] = {
    "/update_weights": {"path": "/nowhere"},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
}
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
        body = {**BODY, "prompt": "a prompt of several blocks of tokens"}
        for clears, is_cached in (("0", True), ("false", True), ("1", False), ("true", False)):
            await client.post("/v1/completions", json=body)
            await client.post(f"/pause?clear_cache={clears}")
            await client.post("/resume")
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is is_cached, clears
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
        for path, body in UPDATES.items():
            refused = await client.post(path, json=body)
            assert refused.status_code == 501 and "--enable-sleep-mode" in refused.json()["error"]["message"]
        assert "engine_sleep_state" not in (await client.get("/metrics")).text
        refused = await client.post("/sleep", headers={"origin": "https://example.org"})
        assert refused.status_code == 403


async def test_weights_are_replaced_and_answers_name_their_version(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("7")
    path, prompt = str(tmp_path / "weights"), [3, 4, 5]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0.0, "return_token_ids": True}
    harnesses = running(http_port=0, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def check(version: str, weight: int) -> None:
            assert (await client.get("/weight_version")).json() == {"weight_version": version}
            (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
            assert choice["token_ids"] == expected_tokens(prompt, 6, weight=weight)
            assert choice["weight_versions"] == [{"version": version, "num_tokens": 6}]
            streamed = (await client.post("/v1/completions", json={**body, "stream": True})).text
            assert streamed.count("weight_versions") == 1 and f'"version":"{version}"' in streamed
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            (choice,) = (await client.post("/v1/chat/completions", json=chat)).json()["choices"]
            assert choice["weight_versions"] == [{"version": version, "num_tokens": 2}]

        await check("0", 0)
        answer = await client.post("/update_weights", json={"path": path, "mode": "wait", "version": "step 1"})
        assert (answer.status_code, answer.json()["weight_version"]) == (200, "step 1")
        await check("step 1", 7)
        (tmp_path / "weights").write_text("9")
        given = {"model_path": path, "abort_all_requests": True, "flush_cache": True}
        assert (await client.post("/update_weights_from_disk", json=given)).json()["success"] is True
        await check("2", 9)
        metrics = (await client.get("/metrics")).text
        assert 'jpaged:weight_updates_total{model_name="fake"} 2.0' in metrics


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/update_weights", {}, "path"),
        ("/update_weights", {"path": "/nowhere"}, "path"),
        ("/update_weights", {"path": "/nowhere", "mode": "stop"}, "mode"),
        ("/update_weights", {"path": "/nowhere", "version": [1]}, "version"),
        ("/update_weights_from_disk", {"path": "/nowhere"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/nowhere", "load_format": "dummy"}, "load_format"),
        ("/update_weights_from_disk", {"model_path": "/nowhere", "flush_cache": False}, "flush_cache"),
    ],
)
async def test_updates_that_cannot_be_are_refused(path: str, body: dict[str, Any], field: str) -> None:
    harnesses = running(http_port=0, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert (await client.get("/weight_version")).json() == {"weight_version": "0"}


async def test_a_client_that_disconnects_leaves_no_upload(caplog: pytest.LogCaptureFixture) -> None:
    content, kind = save({"weight": np.array([7])}), {"content-type": "application/octet-stream"}
    harnesses = running(http_port=0, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        lines = ("POST /update_weights HTTP/1.1", "host: a", f"content-type: {kind['content-type']}")
        head = "\r\n".join((*lines, f"content-length: {len(content)}", "", "")).encode()
        writer.write(head + content[:20])
        await writer.drain()

        async def send() -> int:
            return (await client.post("/update_weights", content=content, headers=kind)).status_code

        while await send() == 200:  # until the server has read the other head
            pass
        writer.close()
        while await send() == 503:
            pass
        assert (await client.get("/weight_version")).json() != {"weight_version": "0"}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_sends_no_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is released and another client can send, although the connection stays open."""
    content, kind = save({"weight": np.array([7])}), {"content-type": "application/octet-stream"}
    monkeypatch.setattr(service, "_UPLOAD_TIMEOUT_S", 0.01)

    harnesses = running(http_port=0, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        lines = ("POST /update_weights HTTP/1.1", "host: a", f"content-type: {kind['content-type']}")
        head = "\r\n".join((*lines, f"content-length: {len(content)}", "", "")).encode()
        writer.write(head + content[:20])
        answer = await reader.readuntil(b"seconds")
        assert b" 504 " in answer.splitlines()[0] and b"no part of the weights arrived for 0.01" in answer
        monkeypatch.undo()
        assert (await client.post("/update_weights", content=content, headers=kind)).status_code == 200
        writer.close()


async def test_weights_are_sent_in_the_body() -> None:
    """A file of safetensors replaces the weights; one that ends early, or is not of the model, changes nothing."""
    content, kind = save({"weight": np.array([7])}), {"content-type": "application/octet-stream"}
    prompt = [3, 4, 5]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0.0, "return_token_ids": True}

    async def part_by_part() -> AsyncIterator[bytes]:
        for begin in range(0, len(content), 7):
            yield content[begin : begin + 7]

    harnesses = running(http_port=0, enable_sleep_mode=True)
    async with harnesses as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def send(given: Any, query: str = "") -> httpx2.Response:
            return await client.post(f"/update_weights{query}", content=given, headers=kind)

        for wrong in (content[:-1], content + b"x", b"", save({"other": np.array([7])}), b"{}"):
            refused = await send(wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data")
        for query, field in (("?mode=stop", "mode"), ("?version=", "version")):
            refused = await send(b"", query)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert (await client.get("/weight_version")).json() == {"weight_version": "0"}
        answer = await send(part_by_part(), "?mode=wait&version=step")
        assert (answer.status_code, answer.json()["weight_version"]) == (200, "step")
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert choice["token_ids"] == expected_tokens(prompt, 6, weight=7)
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        assert (await client.post("/update_weights", content=content, headers=kind)).status_code == 501
