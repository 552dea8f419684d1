"""A command of ours as a process of its own, followed by what it prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jpaged.client import Client
from jpaged.server_load import Load

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 300.0
"""For a machine that others use as well; what does not come fails all the same."""


class Process:
    """A running command whose stderr is read as it comes."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def find(self, pattern: str) -> re.Match[str] | None:
        return next((m for line in list(self.lines) if (m := re.search(pattern, line))), None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line like this; fails with all lines when the process ended without it."""
        with self._news:
            self._news.wait_for(lambda: self.find(pattern) or not self._reader.is_alive(), timeout=WAIT_S)
        match = self.find(pattern)
        assert match is not None, "".join(self.lines)
        return match

    def wait(self) -> int:
        """The exit code."""
        code = self.popen.wait(timeout=WAIT_S)
        self._reader.join()
        assert self.popen.stderr is not None
        self.popen.stderr.close()
        return code

    def end(self, number: signal.Signals) -> int:
        """Sends a signal; the exit code."""
        self.popen.send_signal(number)
        return self.wait()


def load_at_rest(client: Client) -> Load:
    """What a server says of itself once nothing runs or waits, which is after the last message of the last request."""
    until_s = time.monotonic() + WAIT_S
    while True:
        load = client.load()
        if not (load.num_running or load.num_waiting or load.num_swapped):
            return load
        assert time.monotonic() < until_s, load
        time.sleep(0.01)


def run_with_ray(folder: Path, script: str, timeout_s: float) -> list[str]:
    """Run a script in the environment that has Ray; return the lines that it prints."""
    python = Path(sys.prefix) / "ray" / "bin" / "python"
    assert python.exists(), "make test-long installs Ray there"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [python, script], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
