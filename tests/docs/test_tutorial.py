"""The tutorial does what it says: its commands are run as they stand there, on ports that are free."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes import ROOT

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
_BLOCK = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<name>[\w.]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
PORTS = ("50051", "8000")


def blocks(kind: str) -> list[re.Match[str]]:
    return [block for block in _BLOCK.finditer(TUTORIAL) if block["kind"] == kind]


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def on_free_ports(text: str, ports: dict[str, int]) -> str:
    return re.sub(r"\b(50051|8000)\b", lambda match: str(ports[match[0]]), text)


def test_every_program_of_the_tutorial_is_run_in_it():
    programs = [block["name"] for block in blocks("python")]
    assert len(programs) == len(set(programs)) > 0
    script = "\n".join(block["text"] for block in blocks("bash"))
    assert [name for name in programs if f"python {name}" not in script] == []
    assert {block["kind"] for block in _BLOCK.finditer(TUTORIAL)} == {"bash", "python", "console"}


@pytest.mark.long
def test_the_tutorial_ends_in_a_served_observed_and_drained_model(tmp_path: Path):
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    for block in blocks("python"):
        (tmp_path / block["name"]).write_text(on_free_ports(block["text"], ports))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, words in {"jpaged": "-m jpaged", "python": ""}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (commands / name).chmod(0o755)
    script = "\n".join(f"echo '=== {i}'\n{block['text']}" for i, block in enumerate(blocks("bash")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f"trap 'kill $(jobs -p) 2>/dev/null || :' EXIT\n{on_free_ports(script, ports)}",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    told = dict(re.findall(r"^=== (\d+)\n(.*?)(?=^=== |\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    said = [told[str(i)] for i in range(len(told))]
    expected = (
        r"^jpaged \d.*No problem found that prevents `jpaged serve demo`",
        r"3 streams, \d+ tokens in",
        r"SERVING$",
        r"\w+ \w+ \w+",
        r"\[3\] '.*blocks at the peak: \d+",
        r'"demo".*"text_completion".*data: \[DONE\]',
        r"\w+ \w+ \w+",
        r"^1$",
        r"vllm:num_requests_running\{.*vllm:generation_tokens_total\{\S+ [1-9]",
        r"TTFT.*vllm:num_preemptions_total\{",
        r"^stopped$",
    )
    for text, pattern in zip(said, expected, strict=True):
        assert re.search(pattern, text.strip(), re.DOTALL), (pattern, text)
    for name in ("load.json", "pool.json"):
        assert isinstance(json.loads((tmp_path / name).read_text()), dict)
