"""The pool over HTTP: as it is, once or ten times a second, to many watchers at once; and made smaller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.requests import Request

from jpaged.inspector.dashboard import MAX_WATCHERS, PoolLimitSetter, SnapshotBroadcaster, is_local
from jpaged.inspector.frames import BlockState, FrameReader, unpack
from jpaged.service.service import Service, Stage
from jpaged.testing import FakeExecutor
from tests.server.harness import Harness, eventually, request, running


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Harness, httpx2.AsyncClient]]:
    executor = FakeExecutor(num_blocks=40, block_size=4, num_host_blocks=20)
    async with (
        running(executor=executor, http_port=0, **options) as harness,
        httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as client,
    ):
        yield harness, client


async def frames(response: httpx2.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def kinds_of(reader: FrameReader) -> list[int]:
    return np.bincount(unpack(reader.pools[0].cells)[0][1:], minlength=6).tolist()


async def test_the_page_is_there_and_asks_nobody_else_for_anything() -> None:
    async with served() as (_, client):
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "http" not in policy
        for name in ("page.css", "page.js", "wire.js", "grid.js", "view.js", "play.js", "colours.js"):
            part = await client.get(f"/page/{name}")
            assert part.status_code == 200 and "https://" not in part.text
        assert (await client.get("/page/about")).json()["model"] == "fake"
        assert (await client.get("/page/..%2fpaths.py")).status_code == 404


async def test_a_frame_is_the_whole_pool() -> None:
    async with served() as (harness, client):
        await _all(harness.inference.Generate(request("x" * 9, n=3, temperature=1.0)))
        reader = FrameReader()
        reader.take((await client.get("/page/frame")).content)
        held = kinds_of(reader)
        assert sum(held) == 40 and held[BlockState.HELD] == 0 and held[BlockState.CACHED] > 0
        assert reader.pools[0].last["totals"]["num_generation_tokens"] == 3 * 8


async def test_a_stream_says_that_nothing_comes_of_an_engine_that_hangs_and_goes_on_afterwards() -> None:
    async with served() as (harness, client), client.stream("GET", "/page/events") as response:
        lines = response.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            """The first frame."""
        harness.faults.gate.clear()
        messages = asyncio.ensure_future(_all(harness.inference.Generate(request())))
        while await anext(lines) != ": nothing new":
            """Frames from before."""
        harness.faults.release()
        while '"end"' not in await anext(lines):
            """Frames until the request has ended."""
        await messages


async def test_a_stream_follows_the_pool_until_it_is_empty_again() -> None:
    async with served() as (harness, client):
        async with client.stream("GET", "/page/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            reader, seen, texts = FrameReader(), set[str](), frames(response)
            reader.take(await anext(texts))
            call = harness.inference.Generate(request("secret", request_id="mine", n=3, temperature=1.0, max_tokens=30))
            messages = asyncio.ensure_future(_all(call))
            async for text in texts:
                assert "secret" not in text
                reader.take(text)
                told = reader.pools[0].last
                seen |= {kind for _, kind, *_ in told["happenings"]}
                if "end" in seen and kinds_of(reader)[BlockState.HELD] == 0:
                    break
            await messages
        assert {"admission", "fork", "copy_on_write", "end"} <= seen


async def _all(call: Any) -> list[Any]:
    return [message async for message in call]


async def test_watchers_are_bounded_and_nothing_looks_when_the_last_has_gone() -> None:
    async with served() as (harness, client):
        hub = SnapshotBroadcaster(harness.server._service)
        with ExitStack() as stack:
            watchers = [stack.enter_context(hub.watching()) for _ in range(MAX_WATCHERS)]
            with pytest.raises(Exception, match=f"{MAX_WATCHERS} clients watch the pool"), hub.watching():
                raise AssertionError("too many were let in")
            first = [await watcher.next() for watcher in watchers]
            assert len({id(frame) for frame in first}) <= 3  # written once, not for each
            assert hub._looking is not None
        assert hub._looking is None
        assert (await client.get("/page/frame")).status_code == 200


async def test_who_is_slow_misses_frames_and_gets_the_whole() -> None:
    async with served() as (harness, _):
        hub = SnapshotBroadcaster(harness.server._service)
        with hub.watching() as quick, hub.watching() as slow:
            reader, late = FrameReader(), FrameReader()
            first = await slow.next()
            assert first is not None
            late.take(first.data)
            for number in range(3):
                await _all(harness.inference.Generate(request(f"prompt {number}")))
                while (frame := await quick.next()) is None or not _has_ended(reader, frame.data, number + 1):
                    """Looks on."""
            frame = await slow.next()
            assert frame is not None and frame.base is None
            late.take(frame.data)
            assert late.number == reader.number
            assert (late.pools[0].cells == reader.pools[0].cells).all()


def _has_ended(reader: FrameReader, data: bytes, num_requests: int) -> bool:
    reader.take(data)
    return reader.pools[0].last["totals"]["num_requests_ended"] == num_requests


async def test_streams_end_with_the_server() -> None:
    async with served() as (harness, client), client.stream("GET", "/page/events") as response:
        texts = frames(response)
        await anext(texts)
        harness.server.request_stop()
        async with asyncio.timeout(300):
            [_ async for _ in texts]
        await harness.run
        assert harness.server.state.stage is Stage.DRAINING


async def test_nobody_watches_a_server_that_loads() -> None:
    async with served() as (harness, _):
        state = type(harness.server.state)(harness.serving.config)
        with pytest.raises(Exception, match="is starting"), SnapshotBroadcaster(Service(state)).watching():
            raise AssertionError("there is nothing to see")


async def test_a_pool_is_made_smaller_and_whole_again() -> None:
    async with served() as (harness, client):
        reader = FrameReader()
        answer = await client.post("/page/limit", json={"blocks": 12})
        assert answer.json() == {"blocks": 12, "blocks_in_use": 0}
        reader.take((await client.get("/page/frame")).content)
        assert kinds_of(reader)[BlockState.ASIDE] == 28
        assert reader.pools[0].last["limit"] == 12
        assert unpack(reader.pools[0].cells)[0][1:13].tolist() == [BlockState.FREE] * 12
        assert (await client.post("/page/limit", json={"blocks": None})).status_code == 200
        reader.take((await client.get("/page/frame")).content)
        assert kinds_of(reader)[BlockState.ASIDE] == 0
        assert harness.serving.engine.load().num_blocks_used == 0


REFUSED = [
    (b'{"blocks": 0}', "from 1 to 40"),
    (b'{"blocks": 41}', "from 1 to 40"),
    (b'{"blocks": 1.5}', "neither a whole number nor null"),
    (b'{"blocks": true}', "neither a whole number nor null"),
    (b'{"block": 4}', "unknown field"),
    (b"{}", "is missing"),
    (b"[]", "is not a JSON object"),
    (b'{"blocks": "many"}', "neither a whole number nor null"),
]


@pytest.mark.parametrize(("body", "problem"), REFUSED, ids=lambda value: str(value)[:24])
async def test_a_limit_that_cannot_be_is_refused(body: bytes, problem: str) -> None:
    async with served() as (_, client):
        answer = await client.post("/page/limit", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert problem in answer.json()["error"]["message"]


async def test_a_form_of_another_site_and_a_server_without_control_set_no_limit() -> None:
    async with served() as (_, client):
        answer = await client.post("/page/limit", content=b'{"blocks": 4}', headers={"Content-Type": "text/plain"})
        assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]
    async with served(disable_control=True) as (_, client):
        assert (await client.get("/page/about")).json()["can_limit"] is False
        assert (await client.post("/page/limit", json={"blocks": 4})).status_code == 403


async def test_of_two_limits_at_once_the_later_holds() -> None:
    async with served() as (harness, client):
        harness.faults.hold_after(4)
        calls = [harness.inference.Generate(request("x" * 9, max_tokens=20)) for _ in range(5)]
        messages = [asyncio.ensure_future(_all(call)) for call in calls]
        await eventually(lambda: not harness.faults.gate.is_set())
        limits = PoolLimitSetter(harness.server._service)
        earlier = asyncio.ensure_future(limits.limit({"blocks": 8}))
        later = asyncio.ensure_future(limits.limit({"blocks": None}))
        await asyncio.sleep(0)  # both have asked
        harness.faults.release()
        assert (await earlier)["blocks"] == 8
        assert await later == {"blocks": None, "blocks_in_use": 0}
        await asyncio.gather(*messages)
        reader = FrameReader()
        reader.take((await client.get("/page/frame")).content)
        assert reader.pools[0].last["limit"] == 40


async def test_a_limit_is_logged_and_exported_and_ends_when_its_page_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jpaged.inspector.dashboard.LEASE_S", 1.0)
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def exported() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return float(next(line for line in lines if line.startswith("jpaged:pool_limit_blocks{")).split()[-1])

        whole = await exported()
        assert whole == harness.serving.engine.load().num_blocks
        assert (await client.post("/page/limit", json={"blocks": 40})).status_code == 200
        assert await exported() == 40
        assert "live page: 40 blocks of each pool are usable, by 127.0.0.1:" in caplog.text
        await eventually(lambda: harness.serving.engine.inspector.limited_to is None)
        assert await exported() == whole
        assert "live page: all blocks of the pool are usable again, by a page that has been closed" in caplog.text
        await eventually(lambda: harness.serving.engine.load().num_blocks_free == whole)


async def test_a_limit_needs_a_key_for_control_or_a_loopback_address() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        header = {"x-forwarded-for": "203.0.113.7"}
        assert (await client.get("/page/about", headers=header)).json()["can_limit"] is False
        refused = await client.post("/page/limit", json={"blocks": 40}, headers=header)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "PERMISSION_DENIED")
        assert harness.serving.engine.inspector.limited_to is None
    for host, expected in (("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.7", False)):
        request = Request({"type": "http", "headers": [], "client": (host, 1)})
        assert is_local(request) is expected
