"""Commands that need no model import neither jax nor the server: they start in the time of a shell command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMANDS = [
    ["--help"],
    ["health", "127.0.0.1:1", "--timeout", "0.1"],
    ["batch", "-i", "missing.jsonl", "-o", "out.jsonl", "--target", "127.0.0.1:1"],
    ["route", "--help"],
    ["top", "--help"],
    ["completion", "bash"],
]
HEAVY = (
    *("jax", "jaxlib", "flax", "transformers", "tokenizers", "llguidance", "starlette", "uvicorn"),
    *("jpaged.server.lifecycle", "jpaged.device"),
)
RUN = f"""
import contextlib, io, sys
from jpaged.cli.main import main
commands = {COMMANDS!r}
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    codes = [main(words) for words in commands]
assert all(code in (0, 1, 2) for code in codes), codes
found = [name for name in {HEAVY!r} if name in sys.modules]
assert not found, found
"""


def test_commands_without_a_model_import_neither_jax_nor_a_server(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
