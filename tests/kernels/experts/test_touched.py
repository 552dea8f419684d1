"""What a decode of one row reads: the matrices of the experts that it is sent to, and not a byte of the others."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize("who", ["cpu", "tiles"])
def test_a_row_reads_no_expert_but_its_own(who: str) -> None:
    """Behind the first row one is sent to an expert that may not be read: it is seen that reading would have shown."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.kernels.experts.guarded", who]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout == "unread\n", ended.stderr
    assert ended.returncode == -signal.SIGSEGV
