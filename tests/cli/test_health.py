"""`jpaged health` tells a server that serves from one that loads, drains or is not there."""

import asyncio
import socket
import threading
import time

import pytest

from jpaged.cli.main import main
from jpaged.config import EngineConfig
from jpaged.server.lifecycle import SERVICE_NAMES, Server
from jpaged.testing import FakeExecutor
from tests.server.harness import make_serving, request, running


async def ask(*words: str) -> int:
    return await asyncio.to_thread(main, ["health", *words])


@pytest.mark.parametrize("service", ["", *SERVICE_NAMES])
async def test_a_server_that_serves_is_exit_code_0(capsys, service):
    async with running() as harness:
        assert await ask(harness.target, "--service", service) == 0
        assert capsys.readouterr().out == f"{harness.target}: SERVING\n"


async def test_a_server_that_loads_is_exit_code_1(capsys):
    release, config = threading.Event(), EngineConfig.load({"port": 0})

    def load(progress):
        release.wait()
        return make_serving(FakeExecutor(), config)

    server = Server(config, load)
    port = await server.start()
    run = asyncio.create_task(server.run())
    assert await ask(f"127.0.0.1:{port}") == 1
    assert capsys.readouterr().out == f"127.0.0.1:{port}: NOT_SERVING\n"
    release.set()
    server.request_stop()
    assert await run == 0


async def test_a_server_that_drains_is_exit_code_1(capsys):
    async with running() as harness:
        harness.faults.hold_after(3)
        call = harness.inference.Generate(request(max_tokens=100))
        await call.read()
        harness.server.request_stop()
        until_s = time.monotonic() + 60
        while await ask(harness.target) == 0:
            assert time.monotonic() < until_s
        assert capsys.readouterr().out.endswith(f"{harness.target}: NOT_SERVING\n")
        call.cancel()


async def test_an_unknown_service_is_exit_code_1(capsys):
    async with running() as harness:
        assert await ask(harness.target, "--service", "no.such.Service") == 1
        assert harness.target in capsys.readouterr().out


def test_nobody_there_is_exit_code_1(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["health", f"127.0.0.1:{port}"]) == 1
    assert "127.0.0.1" in capsys.readouterr().out


def test_one_that_never_answers_is_exit_code_1_in_time(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        assert main(["health", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.3"]) == 1
        assert time.monotonic() - began_s < 60  # a hang, on a machine however busy


def test_a_timeout_of_nothing_is_refused(capsys):
    assert main(["health", "--timeout", "0"]) == 2
    assert "--timeout: 0.0 is not a finite number above 0" in capsys.readouterr().err
