"""Proxies of the environment and of options: which connections use one, and what errors call it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.cli.main import main
from jpaged.client import Client
from jpaged.client.channel import check_health, is_local, open_channel, proxy_for, proxy_name
from jpaged.client.errors import translated
from jpaged.config import EngineConfig
from jpaged.errors import DeadlineExceeded, InvalidArgument, Unavailable
from jpaged.peers import Prefills
from jpaged.service.handoff import BlockFormat
from jpaged.types import Request, SamplingParams
from tests.route.rig import routed
from tests.server.harness import eventually

ELSEWHERE = "192.0.2.1:50051"
"""An address of documentation: nothing is there."""


class Refusing(http.server.BaseHTTPRequestHandler):
    """A proxy that connects to nothing, and keeps what it was asked for."""

    asked: list[str]

    def do_CONNECT(self) -> None:
        self.asked.append(self.path)
        self.send_error(403)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


class Proxy:
    """A proxy on a thread of its own, by its URL, and the targets that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        handler = type("Handler", (Refusing,), {"asked": self.asked})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that the environment names."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    made = Proxy()
    monkeypatch.setenv("http_proxy", f"http://user:secret@{made.address}")
    yield made
    made.stop()


@pytest.mark.parametrize(
    "target",
    [
        *(
            "localhost:1",
            "LOCALHOST:1",
            "a.localhost:1",
            "127.0.0.1:1",
            "127.8.9.10:1",
            "[::1]:1",
            "0.0.0.0:1",
            "[::]:1",
        ),
        *("dns:localhost:1", "dns:///127.0.0.1:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "unix:/tmp/socket"),
        *("http://127.0.0.1:1", "http://localhost:1/", "https://[::1]:1"),
    ],
)
def test_loopback_has_no_proxy(target: str, proxy: Proxy) -> None:
    assert is_local(target)
    assert proxy_for(target, None) == proxy_for(target, f"http://{proxy.address}") == ""


@pytest.mark.parametrize(
    "target", [ELSEWHERE, "localhost.example:1", "dns:///name:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "[2001:db8::1]:1"]
)
def test_other_addresses_have_that_of_the_environment_or_of_the_option(target: str, proxy: Proxy) -> None:
    assert proxy_name(target, None) == f"http://{proxy.address}"
    assert proxy_for(target, "http://other:3128") == "http://other:3128"
    assert proxy_for(target, "none") == ""


@pytest.mark.parametrize("excluded", ["192.0.2.0/24", "a,192.0.2.1", " 2.1 "])
def test_no_proxy_excludes_hosts_as_it_does_in_grpc(
    excluded: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", excluded)
    assert proxy_for(ELSEWHERE, None) == ""
    assert proxy_for("192.168.0.1:1", None) != ""
    with pytest.raises((Unavailable, DeadlineExceeded)) as failed:
        check_health(ELSEWHERE, timeout_s=0.2)
    assert "proxy" not in str(failed.value)
    assert not proxy.asked


@pytest.mark.parametrize("value", ["", "proxy", "proxy:1", "https://proxy:1", "http://proxy", "http://proxy:x"])
def test_a_proxy_that_is_none_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"proxy: .*HOST:PORT"):
        Client(ELSEWHERE, proxy=value)
    assert main(["health", ELSEWHERE, "--proxy", value]) == 2


def test_a_server_on_this_machine_answers_whatever_the_environment_has(proxy: Proxy) -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Serving(health_pb2_grpc.HealthServicer):
        def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(Serving(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert check_health(f"localhost:{port}", timeout_s=60) == "SERVING"
        assert main(["health", f"127.0.0.1:{port}", "--timeout", "60"]) == 0
    finally:
        server.stop(None).wait()
    assert not proxy.asked


def test_errors_name_the_proxy_without_its_password(proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unavailable, match=rf"\(through the proxy http://{proxy.address}\)"):
        check_health(ELSEWHERE, timeout_s=60)
    with Client(ELSEWHERE, timeout_s=60) as client, pytest.raises(Unavailable, match=f"proxy http://{proxy.address}"):
        client.model_info()
    with Client(ELSEWHERE) as client, pytest.raises(DeadlineExceeded, match=f"proxy http://{proxy.address}"):
        client.wait_until_ready(0.05)
    assert main(["health", ELSEWHERE]) == 1
    shown = capsys.readouterr().out
    assert f"the proxy http://{proxy.address}" in shown
    assert "secret" not in shown
    assert set(proxy.asked) == {ELSEWHERE}


def test_the_option_takes_the_place_of_the_environment(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match=f"proxy http://{proxy.address}"):
        check_health(ELSEWHERE, timeout_s=60, proxy=f"http://{proxy.address}")
    assert proxy.asked == [ELSEWHERE]
    with open_channel(grpc, ELSEWHERE, None, proxy="none") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            health.Check(health_pb2.HealthCheckRequest(), timeout=0.2)
    assert "proxy" not in str(translated(failed.value))
    assert proxy.asked == [ELSEWHERE]


def test_errors_of_saved_prefixes_name_the_proxy(proxy: Proxy) -> None:
    with Client(ELSEWHERE) as client, pytest.raises(Unavailable, match=f"proxy http://{proxy.address}"):
        list(client.prefixes.save("a story"))


async def test_a_router_names_the_proxy_of_a_server_that_it_does_not_reach(proxy: Proxy) -> None:
    async with routed(ELSEWHERE, wait_for=0) as made:
        await eventually(lambda: "403" in made.states().get(ELSEWHERE, ""))
        assert made.states()[ELSEWHERE].endswith(f"(through the proxy http://{proxy.address})")


async def test_a_server_names_the_proxy_of_a_prefill_server_that_it_does_not_reach(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    options = EngineConfig.load({"role": "decode", "prefill_target": (ELSEWHERE,)}).roles
    prefills = Prefills(options)
    try:
        with pytest.raises(Unavailable, match=f"proxy http://{proxy.address}"):
            await prefills.ask(Request("a", (1, 2), SamplingParams()), 0, BlockFormat(b"", 16), 60.0, 60.0)
    finally:
        await prefills.close()
    assert f"{ELSEWHERE} is unreachable (through the proxy http://{proxy.address})" in caplog.text
