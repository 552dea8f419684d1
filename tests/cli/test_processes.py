"""Whole processes: `jpaged serve` and `jpaged demo` as a user runs them, over a fake model."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged.cli import demo, server_process
from jpaged.cli.main import main
from jpaged.client import Client
from jpaged.errors import Cancelled, DeadlineExceeded, InternalError, InvalidArgument, Unavailable
from jpaged.server.lifecycle import Server
from jpaged.types import SamplingParams
from tests.processes import ROOT, Process

FAKE = ("-m", "tests.cli.fake_jpaged", "serve")


@pytest.fixture
def serve() -> Iterator[Process]:
    process = Process((*FAKE, "fake-model", "--port", "0"))
    yield process
    if process.popen.poll() is None:
        process.end(signal.SIGKILL)


@pytest.mark.long
def test_a_server_pins_a_prefix_and_answers_prometheus(tmp_path):
    (tmp_path / "prefix.txt").write_text("once upon a time")
    process = Process(
        (*FAKE, "fake-model", "--port", "0", "--pin-prefix", str(tmp_path / "prefix.txt"), "--metrics-port", "0")
    )
    try:
        process.wait_for(r"16 tokens of .*prefix\.txt pinned")
        url = process.wait_for(r"metrics on (http://127\.0\.0\.1:\d+/metrics)$").group(1)
        process.wait_for(r"^ready on")
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert 'jpaged:blocks_referenced{model_name="fake"} 4.0' in answer.read().decode()
        assert process.end(signal.SIGTERM) == 0
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_server_says_what_it_does_and_ends_on_a_signal(serve, number):
    address = serve.wait_for(r"^listening on (127\.0\.0\.1:\d+), loading fake-model$").group(1)
    serve.wait_for(r"weights: 2 of 2")
    serve.wait_for(r"^  model = fake-model$")
    serve.wait_for(rf"^ready on {address}$")
    with Client(address) as client:
        assert client.complete("hello", SamplingParams(max_tokens=3)).usage.prompt_tokens == 5
        stream = client.generate("hello", SamplingParams(max_tokens=300, temperature=0, ignore_eos=True))
        next(stream)
        serve.popen.send_signal(number)
        chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 300
    assert serve.wait() == 0
    assert not any("Traceback" in line for line in serve.lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("broken", "model: broken is not a folder"),
        ("unreadable", "/models/unreadable: Permission denied"),
        ("strange", "a bug in jpaged: TypeError: unsupported operand (JPAGED_TRACEBACK=1 shows where)"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(model, message):
    process = Process((*FAKE, model, "--port", "0"))
    assert process.wait() == 1
    assert any(f"the server is shutting down: {message}" in line for line in process.lines)
    assert not any("Traceback" in line for line in process.lines)


@pytest.mark.long
def test_an_engine_that_dies_ends_the_process():
    process = Process((*FAKE, "dies", "--port", "0"))
    address = process.wait_for(r"^ready on (.*)$").group(1)
    with Client(address) as client, pytest.raises((InternalError, Unavailable)):
        client.complete("hello", SamplingParams(max_tokens=50, ignore_eos=True))
    assert process.wait() == 1


def test_signals_are_handled_before_a_port_is_opened(monkeypatch):
    class Recorded(Server):
        def stop_on_signals(self) -> None:
            order.append("stop_on_signals")

        async def start(self) -> int:
            order.append("start")
            raise InvalidArgument("port", "cannot be bound")

    order: list[str] = []
    monkeypatch.setattr("jpaged.server.lifecycle.Server", Recorded)
    assert main(["serve", "demo", "--port", "0"]) == 2
    assert order == ["stop_on_signals", "start"]


@pytest.mark.long
def test_a_port_in_use_is_one_line_and_exit_code_2(serve):
    port = serve.wait_for(r"^ready on .*:(\d+)$").group(1)
    second = Process(("-m", "jpaged", "serve", "demo", "--port", port))
    assert second.wait() == 2
    assert len(second.lines) == 1, second.lines
    assert f"--port: 127.0.0.1:{port} cannot be bound: Address already in use" in second.lines[0]
    assert serve.end(signal.SIGTERM) == 0


def test_batch_runs_a_file_and_says_how_it_went(serve, tmp_path, capsys):
    address = serve.wait_for(r"^ready on (.*)$").group(1)
    good = '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}\n'
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(good % "a" + good % "b")
    words = ["batch", "-i", str(source), "-o", str(target), "--target", address]
    assert main(words) == 0
    assert "2 requests: 2 succeeded, 0 failed" in capsys.readouterr().err
    source.write_text(source.read_text() + good.replace("max_tokens", "maximum") % "c")
    assert main(words) == 1
    assert "3 requests: 0 succeeded, 1 failed, 2 kept from before" in capsys.readouterr().err
    source.write_text(good % "a" + good % "a")
    assert main(words) == 2
    assert "line 2: custom_id: 'a' is also that of line 1" in capsys.readouterr().err
    assert serve.end(signal.SIGTERM) == 0


@pytest.fixture
def fake_server(monkeypatch):
    """`jpaged demo` starts the fake in the place of the real program."""

    def command(model: str, flags: list[str]) -> list[str]:
        return [sys.executable, *FAKE, model, "--port", "0", *flags]

    monkeypatch.setattr(server_process, "command", command)
    monkeypatch.chdir(ROOT)


def test_the_demo_streams_and_prints_one_table(fake_server, capsys):
    assert main(["demo"]) == 0
    said = capsys.readouterr()
    assert {f"[{i}]" for i in range(1, 7)} <= {line.partition(" ")[0] for line in said.out.splitlines()}
    for row in ("tokens per second", "time to first token", "peak KV blocks in use", "reserved KV slots that held"):
        assert said.out.count(row) == 1
    assert said.err == ""


@pytest.mark.long
def test_the_demo_says_why_its_server_did_not_start(fake_server, capsys):
    assert main(["demo", "broken"]) == 1
    assert "broken is not a folder" in capsys.readouterr().err


LAST_WORDS = """
import sys
print("listening on 127.0.0.1:1, loading nothing", file=sys.stderr)
print(*(f"line {i}" for i in range(2000)), "the reason", sep="\\n", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("error", [Cancelled("CANCELLED"), InternalError("RST_STREAM"), Unavailable("gone"), None])
def test_the_demo_tells_its_servers_last_words_whatever_the_client_was_told(monkeypatch, capsys, error):
    class Told:
        """A client whose calls the end of the server has cut, each in the same way."""

        def __init__(self, target: str) -> None:
            assert target == "127.0.0.1:1"

        def wait_until_ready(self, timeout_s: float) -> None:
            raise error or DeadlineExceeded("not yet")

        def server_info(self) -> None:
            raise error or Unavailable("gone")

        def __enter__(self):
            return self

        def __exit__(self, *failure: object) -> None:
            """Nothing to close."""

    monkeypatch.setattr(demo, "Client", Told)
    monkeypatch.setattr(server_process, "command", lambda model, flags: [sys.executable, "-c", LAST_WORDS])
    assert main(["demo"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "jpaged demo: the server exited before it was ready"
    assert said[1] == "jpaged demo: the server exited with code 7; its last output:"
    assert said[-2:] == ["line 1999", "the reason"]


@pytest.mark.long
def test_a_demo_whose_server_dies_fails(fake_server, capsys):
    assert main(["demo", "dies"]) == 1
    assert "a stream failed" in capsys.readouterr().err


DEMO = """
import sys
from jpaged.cli import main, server_process
server_process.command = lambda model, flags: [sys.executable, *sys.argv[1:], model, "--port", "0", *flags]
sys.exit(main.main(["demo"]))
"""


@pytest.mark.long
def test_a_demo_that_is_told_to_end_takes_its_server_along():
    command = [sys.executable, "-c", DEMO, *FAKE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()  # its server is there
            (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
            assert not Path(f"/proc/{server}").exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
