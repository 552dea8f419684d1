"""Connections of the HTTP port that do nothing are few and end; those who work are served whatever others do."""

import asyncio
import contextlib
import json
import socket

import httpx2
import pytest

from jpaged.errors import InvalidArgument
from jpaged.http import port
from tests.server.harness import Harness, eventually, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def opened(harness: Harness) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert harness.server.http_port is not None
    return await asyncio.open_connection("127.0.0.1", harness.server.http_port)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side ends the connection; fails after 300 s."""
    found = b""
    async with asyncio.timeout(300):
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(4096):
                found += part
    return found


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", HEAD, HEAD + b"content-length: 100\r\n\r\n{", HEAD + b"\r\n"], ids=range(5)
)
async def test_one_that_sends_nothing_more_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "REQUEST_TIMEOUT_S", 0.2)
    async with running(http_port=0, connection_idle_timeout=0.3) as harness:
        reader, writer = await opened(harness)
        writer.write(sent)
        answer = await rest(reader)
        assert not answer or answer.startswith(b"HTTP/1.1 400")  # the last is a request without a body
        writer.close()
        await eventually(lambda: harness.num_open_calls == 0)


async def test_an_idle_one_is_closed_and_one_with_a_request_is_not() -> None:
    async with running(http_port=0, connection_idle_timeout=0.2) as harness:
        harness.faults.hold_after(3)
        reader, writer = await opened(harness)
        body = json.dumps({"prompt": "x", "max_tokens": 20, "stream": True, "ignore_eos": True}).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        idle, other = await opened(harness)
        other.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await rest(idle)).startswith(b"HTTP/1.1 200")  # and it is closed then, in longer than the other waits
        harness.faults.release()
        assert b"data: [DONE]" in await rest(reader)
        for one in (writer, other):
            one.close()


def test_what_is_written_to_a_connection_leaves_at_once() -> None:
    with (
        port._listen("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_no_more_than_the_limit_and_those_who_are_there_are_served() -> None:
    async with (
        running(http_port=0, max_connections=3) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        others = [await opened(harness) for _ in range(10)]
        answers = [asyncio.create_task(rest(reader)) for reader, _ in others]
        await eventually(lambda: sum(task.done() for task in answers) == 8)
        refused = [task.result() for task in answers if task.done()]
        assert all(one.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in one for one in refused)
        assert (await client.get("/health")).status_code == 200
        for _, writer in others:
            writer.close()
        await asyncio.gather(*answers)
        await eventually(lambda: len(harness.server._http._server.server_state.connections) == 1)  # type: ignore[union-attr]
        reader, writer = await opened(harness)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["tls", "version", "http2"],
)
async def test_bytes_that_are_no_http_are_told_so(sent: bytes) -> None:
    async with running(http_port=0) as harness:
        reader, writer = await opened(harness)
        writer.write(sent)
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        error = json.loads(body)["error"]
        assert head.startswith(b"HTTP/1.1 400") and error["param"] == "request"
        assert ("gRPC clients connect to the port of --port" in error["message"]) == sent.startswith(b"PRI")
        writer.close()


@pytest.mark.parametrize("part", [b"x: " + b"y" * 1000 + b"\r\n", b"x" * 1000])
async def test_a_head_without_an_end_is_refused(part: bytes) -> None:
    async with running(http_port=0) as harness:
        reader, writer = await opened(harness)
        writer.write(b"GET /" if part.startswith(b"xx") else b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(part)
                await writer.drain()
        assert (await rest(reader)).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_client_that_leaves_within_its_body_leaves_nothing() -> None:
    async with running(http_port=0) as harness:
        _, writer = await opened(harness)
        writer.write(HEAD + b"content-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        state = harness.server._http._server.server_state  # type: ignore[union-attr]
        await eventually(lambda: not state.connections and not state.tasks)


async def test_probes_are_answered_over_the_limit_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "PROBE_TIMEOUT_S", 60.0)
    async with running(http_port=0, max_connections=4) as harness:
        idle = [await opened(harness) for _ in range(4 + port.MAX_PROBES + 20)]
        for path, status in ((b"/livez", 200), (b"/readyz?x=1", 200), (b"/health", 200), (b"/v1/models", 503)):
            reader, writer = await opened(harness)
            writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            assert (await rest(reader)).startswith(b"HTTP/1.1 %d" % status), path
            writer.close()
        reader, writer = await opened(harness)
        writer.write(HEAD + b"content-length: 2\r\n\r\n{}")
        assert (await rest(reader)).startswith(b"HTTP/1.1 503")
        writer.close()
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(
    "head",
    [b"a: " + b"b" * (80 << 10), b"a:b\r\n" * (20 << 10), b"a" * (80 << 10), b"a:\r\n" * (20 << 10)],
    ids=range(4),
)
@pytest.mark.parametrize("ends", [True, False])
async def test_a_head_of_more_than_64_kib_is_refused_however_many_lines_it_has(head: bytes, ends: bool) -> None:
    async with running(http_port=0) as harness:
        reader, writer = await opened(harness)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + (b"\r\n\r\n" if ends else b""))
        assert (await rest(reader)).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_http_is_on_by_default_and_takes_the_next_free_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as free:
        taken, next_port = other.getsockname()[1], free.getsockname()[1]
        free.close()
        monkeypatch.setattr(port, "DEFAULT_PORTS", (taken, next_port))
        async with running(enable_http=True) as harness:
            assert harness.server.http_port == next_port
            assert f"port {taken} is taken: the OpenAI API listens on port {next_port}" in caplog.text
            with pytest.raises(InvalidArgument, match=f"http_port: all ports from {taken} to {next_port} are taken"):
                async with running(enable_http=True):
                    raise AssertionError
        with pytest.raises(InvalidArgument, match=f"http_port: cannot listen on port {taken} of 127.0.0.1"):
            async with running(http_port=taken):
                raise AssertionError


async def test_a_default_port_is_not_that_of_another_option(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = first.getsockname()[1], second.getsockname()[1]
    monkeypatch.setattr(port, "DEFAULT_PORTS", ports)
    async with running(enable_http=True, metrics_port=ports[0]) as harness:
        assert (harness.server.http_port, harness.server.metrics_port) == (ports[1], ports[0])
