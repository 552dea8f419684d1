"""Connections that do nothing are few and end; those who work are served whatever others do to the port."""

import asyncio
import contextlib
import resource
import socket
import sys
import threading
import types
import urllib.request
from typing import Any

import pytest

from jpaged._proto.v1 import control_pb2
from jpaged.client import Client
from jpaged.errors import InvalidArgument
from jpaged.http import port
from jpaged.server import grpc_server as grpc_port
from jpaged.telemetry import scrapes
from jpaged.types import SamplingParams
from tests.server.connections.raw_http2 import GOAWAY, Connection, message
from tests.server.harness import collect, eventually, request, running

INFO = b"/jpaged.v1.ControlService/GetServerInfo"


async def is_closed(reader):
    """Whether the other side ends the connection; fails after 300 s."""
    async with asyncio.timeout(300):
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        return True


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def metrics_threads():
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


async def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(grpc_port, "HANDSHAKE_TIMEOUT_S", 0.3)
    async with running() as harness:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        assert await is_closed(reader)
        writer.close()


async def test_a_connection_without_a_call_is_closed_and_one_with_a_call_is_not():
    async with running(connection_idle_timeout=1.0) as harness:
        harness.faults.hold_after(3)
        call = harness.inference.Generate(request(max_tokens=20))
        first = await call.read()
        async with Connection(harness.port) as connection, asyncio.timeout(300):
            await connection.status(connection.begin(INFO, message(b"")))
            while (await connection.read())[0] != GOAWAY:
                pass
            assert await is_closed(connection.reader)
        harness.faults.release()
        assert [first, *await collect(call)][-1].usage.completion_tokens == 20
        await harness.control.GetLoad(control_pb2.GetLoadRequest())  # the client opens another


async def test_no_more_connections_than_the_limit_and_those_who_are_there_are_served():
    async with running(max_connections=3) as harness:
        await harness.control.GetLoad(control_pb2.GetLoadRequest())
        others = [await asyncio.open_connection("127.0.0.1", harness.port) for _ in range(20)]
        ended = [asyncio.create_task(is_closed(reader)) for reader, _ in others]
        await eventually(lambda: sum(task.done() for task in ended) >= 18)
        assert (await collect(harness.inference.Generate(request(max_tokens=9))))[-1].usage.completion_tokens == 9
        for _, writer in others:
            writer.close()
        await asyncio.gather(*ended)
        async with asyncio.timeout(300):
            while True:  # until the server has seen that they are gone
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    async with Connection(harness.port) as connection:
                        assert (await connection.status(connection.begin(INFO, message(b""))))[0] == 0
                        return


def test_connections_stay_below_what_the_process_may_open(monkeypatch, caplog):
    for limit, expected in ((1024, 512), (100, 50), (1, 1), (resource.RLIM_INFINITY, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert grpc_port._max_connections(512) == expected
    assert "max_connections is 50, not 512: the process may open 100 files" in caplog.text


def test_http_connections_are_at_most_a_quarter_of_the_files(monkeypatch, caplog):
    for limit, expected in ((4096, 512), (2048, 512), (100, 25), (1, 1), (resource.RLIM_INFINITY, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert port.num_connections(512) == expected
    assert "accepts 25 connections, not 512: the process may open 100 files" in caplog.text


def test_a_port_that_grpc_does_not_bind_is_named():
    unbound: Any = types.SimpleNamespace(add_insecure_port=lambda address: 0)
    with pytest.raises(InvalidArgument, match=r"port: 127\.0\.0\.1:0 cannot be bound"):
        grpc_port.bind(unbound, "port", "127.0.0.1", 0, None)


@pytest.mark.long
async def test_idle_connections_do_not_keep_a_scrape_from_its_answer():
    async with running(metrics_port=0) as harness:
        port = harness.server.metrics_port
        before = metrics_threads()
        with contextlib.ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(3):
                assert "jpaged:steps_total" in await asyncio.to_thread(scrape, port)
            assert metrics_threads() - before <= scrapes.MAX_CONNECTIONS


async def test_a_scrape_that_asks_nothing_is_cut_off_and_nothing_is_logged(monkeypatch, capfd, caplog):
    monkeypatch.setattr(scrapes._Handler, "timeout", 0.2)
    async with running(metrics_port=0) as harness:
        for content in (b"", b"GET /met", b"\xff\xff\r\n\r\n", b"GET /" + b"x" * 70000):
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.server.metrics_port)
            writer.write(content)
            assert await is_closed(reader)
            writer.close()
        assert "jpaged:steps_total" in await asyncio.to_thread(scrape, harness.server.metrics_port)
    assert capfd.readouterr().err == ""
    assert caplog.text == ""


SERVER = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
from tests.server.harness import running

async def main():
    async with running(metrics_port=0) as harness:
        print(harness.port, harness.server.metrics_port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("num_files", [40, 64])
async def test_with_no_file_left_those_who_are_connected_are_served_on(num_files):
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVER.replace("FILES", str(num_files)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    async with asyncio.timeout(120):
        port, metrics_port = map(int, (await child.stdout.readline()).split())

        def ask(client):
            sampling = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
            return client.complete("hello", sampling).usage.completion_tokens

        def attack():
            with Client(f"127.0.0.1:{port}", timeout_s=60) as client, contextlib.ExitStack() as idle:
                assert ask(client) == 50
                for target in (metrics_port, port) * 150:
                    with contextlib.suppress(OSError):
                        idle.enter_context(socket.create_connection(("127.0.0.1", target), timeout=5))
                assert [ask(client) for _ in range(5)] == [50] * 5
                assert "jpaged:steps_total" in scrape(metrics_port)
            with Client(f"127.0.0.1:{port}", timeout_s=60) as client:
                assert ask(client) == 50

        await asyncio.to_thread(attack)
        child.stdin.close()
        assert await child.wait() == 0
