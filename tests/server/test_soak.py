"""Mixed load on two servers, one of which is killed: the benchmark, for long enough to see that all of it holds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_every_text_is_as_undisturbed_while_a_server_is_killed_again_and_again(tmp_path):
    asked = ("--requests", "300", "--min-kills", "2", "--kill-every", "2", "--cases", "24", "--logs", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.soak", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
