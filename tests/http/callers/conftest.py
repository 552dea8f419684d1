"""Servers of the demo model that the callers share: a run starts each once."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import Process

NUM_BLOCKS = 1024
TEMPLATE = """{%- for m in messages -%}
<|{{ m.role if m.role in ('system', 'assistant') else 'user' }}|>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor -%}
{%- if m.role == 'assistant' %}<|endoftext|>{% endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""The demo's own, and turns with tools."""


class DemoServer(NamedTuple):
    """The addresses of a server: gRPC, HTTP, KV events and their replay."""

    address: str
    url: str
    kv_events: str
    kv_replay: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def serve(template: Path) -> Iterator[DemoServer]:
    """Run a server, and end it without an error."""
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    words = ["-m", "jpaged", "serve", "demo", "--dtype", "float32", "--port", "0", "--http-port", "0"]
    words += ["--num-blocks", str(NUM_BLOCKS), "--chat-template", str(template)]
    process = Process([*words, "--kv-events-endpoint", endpoints[0], "--kv-events-replay-endpoint", endpoints[1]])
    try:
        url = process.wait_for(r"OpenAI's API on (http://\S+)/v1").group(1)
        yield DemoServer(process.wait_for(r"^ready on (\S+)$").group(1), url, *endpoints)
        assert process.end(signal.SIGTERM) == 0
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="session")
def demo(template: Path) -> Iterator[DemoServer]:
    yield from serve(template)


@pytest.fixture(scope="session")
def second_demo(template: Path) -> Iterator[DemoServer]:
    yield from serve(template)


@pytest.fixture(scope="session")
def served(demo: DemoServer) -> tuple[str, str]:
    """The addresses over gRPC and HTTP."""
    return demo.address, demo.url
