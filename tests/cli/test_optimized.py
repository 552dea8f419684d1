"""Under `python -OO`, which drops docstrings and asserts, the command line says and does the same."""

import signal
import subprocess
import sys

import pytest

from jpaged.bench.cli import BENCHMARKS
from jpaged.cli.main import COMMANDS
from jpaged.client import Client
from jpaged.types import SamplingParams
from tests.processes import ROOT, Process

WORDS = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHMARKS)]
PROGRAM = f"""
from jpaged.cli.main import main
raise SystemExit(sum(main([*words, "--help"]) for words in {WORDS}))
"""


def help_texts(*flags: str) -> str:
    command = [sys.executable, *flags, "-c", PROGRAM]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_every_help_text_is_the_same_without_docstrings():
    assert help_texts("-OO") == help_texts()


@pytest.mark.long  # everything that a server imports is compiled for this level once more
def test_a_server_without_docstrings_and_asserts_streams_and_ends():
    sizes = ("--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--num-blocks", "64")
    server = Process(("-OO", "-m", "jpaged", "serve", "demo", "--port", "0", *sizes))
    try:
        address = server.wait_for(r"^ready on (.*)$").group(1)
        with Client(address) as client:
            done = client.complete("Once upon a time", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert done.usage.completion_tokens == 4
        assert server.end(signal.SIGTERM) == 0
    finally:
        if server.popen.poll() is None:
            server.end(signal.SIGKILL)
