"""The child process that tries grammars: started by the first grammar, kept warm, restarted if it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Any

from jpaged.errors import Unavailable
from jpaged.service.grammars.limits import GrammarLimits
from jpaged.service.grammars.trial import receive, send
from jpaged.service.grammars.vocabulary import VocabularySpec

_START_TIMEOUT_S = 120.0
"""Timeout that guards against a process that never gets to run; it comes in addition to the limit of a compile."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a trial.

    Attributes:
        error: why the grammar is invalid or exceeds a limit; None if it compiles.
        num_bytes: memory that it took.
    """

    error: str | None
    num_bytes: int


class TrialProcess:
    """Tries one grammar at a time. Thread-safe."""

    def __init__(self, spec: VocabularySpec, limits: GrammarLimits) -> None:
        self._spec = spec
        self._limits = limits
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def run(self, grammar: str) -> Trial:
        """Compile a grammar in the library's format, within the limits.

        Raises:
            Unavailable: the process cannot be started, or died.
        """
        limits = self._limits
        question = {
            "grammar": grammar,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "compile_stack_bytes": limits.compile_stack_bytes,
            "mask_stack_bytes": limits.mask_stack_bytes,
        }
        with self._lock:
            try:
                if self._child is None:
                    self._child = _Child(self._spec)
                answer = self._child.ask(question)
            except (OSError, EOFError) as error:
                self._end()
                raise Unavailable(f"the process that tests grammars did not answer: {error!r}") from error
        return Trial(answer["error"], answer["num_bytes"])

    def close(self) -> None:
        """End the process; a later grammar starts another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None


class _Child:
    """One process, and the server's end of the socket. `end` runs when the object is garbage-collected."""

    def __init__(self, spec: VocabularySpec) -> None:
        with contextlib.ExitStack() as opened:
            ours, theirs = socket.socketpair()
            self._connection = opened.enter_context(ours)
            self._connection.settimeout(_START_TIMEOUT_S)
            self._answers = opened.enter_context(ours.makefile("rb"))
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "jpaged.service.grammars"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the server, which drains; forks end with the group
                )
            self.end = weakref.finalize(self, _end, process, opened.pop_all())
        send(self._connection, asdict(spec))

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and wait for the answer; raise OSError or EOFError on failure."""
        send(self._connection, question)
        return receive(self._answers)


def _end(process: subprocess.Popen[bytes], open_files: contextlib.ExitStack) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    open_files.close()
