"""A `jpaged serve` as a child process: started on a free port, awaited, ended with this process."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jpaged.cli.serve import LISTENING
from jpaged.client import Client
from jpaged.config import child_environment
from jpaged.errors import DeadlineExceeded, JpagedError, Unavailable

NO_HTTP = "--no-enable-http"
START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_LOOK_S = 0.3
"""Interval of checks of a starting server."""
_NUM_LAST_LINES = 30
_MAX_LINES = 2000


@dataclass(slots=True)
class ServerProcess:
    """A `jpaged serve` on a free port, and its output.

    Attributes:
        lines: (seconds since the start, line), the latest ones.
    """

    process: subprocess.Popen[str]
    lines: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_MAX_LINES))
    address: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    listener: threading.Thread | None = None
    start_s: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, model: str, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> ServerProcess:
        """Start a server of `model` with these flags, and these additional environment variables."""
        start_s = time.monotonic()
        process = subprocess.Popen(
            command(model, flags),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=child_environment(environment or {}),
        )
        server = cls(process, start_s=start_s)
        server.listener = threading.Thread(target=server._listen, daemon=True)
        server.listener.start()
        return server

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_s

    @property
    def last_lines(self) -> list[str]:
        """The last lines of output."""
        return [line for _, line in self.lines][-_NUM_LAST_LINES:]

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            self.lines.append((self.elapsed_s, line.rstrip()))
            if line.startswith(LISTENING):
                self.address.put(line.removeprefix(LISTENING).partition(",")[0].strip())
        self.address.put(None)

    def target(self) -> str:
        """Wait for the address at which the server listens.

        Raises:
            Unavailable: the server exited before it was listening.
            DeadlineExceeded: it did not listen in time.
        """
        try:
            address = self.address.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise DeadlineExceeded(f"the server was not listening after {START_TIMEOUT_S:g} s") from None
        if address is None:
            raise Unavailable("the server exited before it was listening")
        return address

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the server to end; return False on timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, patience_s: float = 0.0) -> int:
        """End it by SIGTERM, read the remaining output and return its exit code.

        Args:
            patience_s: time for a server that may already be ending, before the signal.
        """
        if not self.has_ended(patience_s):
            self.process.send_signal(signal.SIGTERM)
            if not self.has_ended(_STOP_TIMEOUT_S):
                self.process.kill()
        code = self.process.wait()
        if self.listener is not None:
            self.listener.join()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


def command(model: str, flags: Sequence[str]) -> list[str]:
    """Return the command that starts a server of `model` on a free port; HTTP is off unless the flags name its port."""
    has_http = any(flag.partition("=")[0] == "--http-port" for flag in flags)
    return [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", *([] if has_http else [NO_HTTP]), *flags]


def startup_texts(client: Client, server: ServerProcess) -> Iterator[str]:
    """Yield the startup progress, a few times a second, until the server is ready.

    Raises:
        Unavailable: the server exited before it was ready.
        DeadlineExceeded: it was not ready in time.
    """
    while not _is_ready(client):
        if server.has_ended(_LOOK_S):
            raise Unavailable("the server exited before it was ready")
        if server.elapsed_s > START_TIMEOUT_S:
            raise DeadlineExceeded(f"the server was not ready after {START_TIMEOUT_S:g} s")
        yield _startup_text(client)


def _startup_text(client: Client) -> str:
    try:
        startup = client.server_info().startup
    except JpagedError:  # as above
        startup = None
    if startup is None:
        return "starting the server"
    what, done, total = startup
    return f"starting the server: {what}" + (f", {done} of {total}" if total > 1 else "")


def _is_ready(client: Client) -> bool:
    """Return True if the server is ready; failed calls count as not ready, because the process's end has the reason."""
    try:
        client.wait_until_ready(_LOOK_S)
    except JpagedError:
        return False
    return True


@contextlib.contextmanager
def unwinding_at_sigterm() -> Iterator[None]:
    """Make SIGTERM run every `finally`: otherwise it would end only this process, and its server would continue."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
