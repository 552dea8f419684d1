"""Child process that renders chat templates: started in advance, kept warm, restarted if it has ended.

Server and child exchange frames over a socket: one byte of kind, four of length, UTF-8.

server ──QUESTION or RARE_QUESTION (JSON)───────> child
       <──RENDERED, RAISED, FAILED, OVER or LONG──
       ──TEMPLATE────────────────────────────────>
       <──NAMES (JSON) or FAILED──────────────────
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from jpaged import json_text
from jpaged.errors import Unavailable

_HEAD = struct.Struct(">cI")


class FrameKind(enum.Enum):
    """Content of a frame."""

    QUESTION = b"q"
    """Template, variables, messages, tools and limits, as JSON."""
    RARE_QUESTION = b"Q"
    """The same, with integers over 64 bits or unpaired surrogates, for Python's own reader of JSON."""
    TEMPLATE = b"s"
    """A template; the child replies with its variables."""
    NAMES = b"n"
    """The variables that a template reads before it sets them, as JSON."""
    RENDERED = b"t"
    """The text."""
    RAISED = b"r"
    """The message that the template raised by `raise_exception`."""
    FAILED = b"f"
    """The error that running it raised."""
    OVER = b"o"
    """The memory limit that it exceeded."""
    LONG = b"l"
    """The number of bytes rendered, which is over the limit."""


def send(connection: socket.socket, kind: FrameKind, text: str | bytes) -> None:
    """Send one frame."""
    payload = text.encode() if isinstance(text, str) else text
    connection.sendall(_HEAD.pack(kind.value, len(payload)) + payload)


def receive(frames: IO[bytes]) -> tuple[FrameKind, str]:
    """Read one frame from a socket's file. Blocks.

    Raises:
        EOFError: the peer has closed.
        TimeoutError: the socket's timeout has passed.
    """
    kind, length = _HEAD.unpack(read_exactly(frames, _HEAD.size))
    return FrameKind(kind), read_exactly(frames, length).decode()


def read_exactly(frames: IO[bytes], count: int) -> bytes:
    """Read some bytes from a socket's file; raise EOFError if the peer has closed."""
    content = frames.read(count)
    if len(content) < count:
        raise EOFError
    return content


class ModuleProcess:
    """A process that runs a module of the package, with a socket as its stdin.

    Both end when `end` is called, or when the object is garbage-collected.

    Args:
        timeout_s: of each send and receive; these raise TimeoutError.
        stderr: a file descriptor.
    """

    def __init__(self, module: str, timeout_s: float, stderr: int = subprocess.DEVNULL) -> None:
        with contextlib.ExitStack() as opened:
            ours, theirs = socket.socketpair()
            self.connection = opened.enter_context(ours)
            self.connection.settimeout(timeout_s)
            self.answers = opened.enter_context(ours.makefile("rb"))
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,  # Ctrl-C is for the server, which drains; forks end with the group
                )
            self.end = weakref.finalize(self, _end, self.process, opened.pop_all())


def _end(process: subprocess.Popen[bytes], open_files: contextlib.ExitStack) -> None:
    if process.returncode is None:  # otherwise its number may be that of another process
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: an ended one on macOS
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    open_files.close()


CPU_S = 2.0
"""Processor time that one rendering may take; a long conversation takes a hundredth of it."""
MEMORY_BYTES = 256 << 20
"""Memory that rendering may take on top of the process's memory at its start."""
_ANSWER_TIMEOUT_S = 180.0
"""Timeout of one answer, including the child's start: guards against a process that never gets to run."""
_MAX_SAID_BYTES = 1 << 20


class OutOfTimeError(Exception):
    """A template exceeded CPU_S, which ended its process."""


class TemplateProcess:
    """Renders one conversation at a time. Thread-safe; starts its process at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child = _TemplateChild()

    def render(
        self,
        template: str,
        variables: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        max_bytes: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> tuple[FrameKind, str]:
        """Return the text, or the reason why there is none.

        Args:
            layout: `documents`, `add_generation_prompt` and `continue_final_message` of transformers' function.

        Raises:
            OutOfTimeError: the template exceeded its processor time.
            Unavailable: the process died, or did not answer.
            TypeError, ValueError: the messages are not JSON-serializable.
        """
        question = {
            "template": template,
            "variables": variables,
            "messages": messages,
            "tools": tools,
            "layout": {"add_generation_prompt": True, **(layout or {})},
            "max_bytes": max_bytes,
        }
        if (fast := json_text.encode_plain(question)) is not None:
            return self._ask(FrameKind.QUESTION, fast)
        return self._ask(FrameKind.RARE_QUESTION, json_text.dumps(question))

    def names(self, template: str) -> tuple[FrameKind, str]:
        """Return the variables that a template reads before it sets them, as JSON, or why they cannot be found.

        Raises:
            OutOfTimeError, Unavailable: as in `render`.
        """
        return self._ask(FrameKind.TEMPLATE, template)

    def _ask(self, kind: FrameKind, text: str | bytes) -> tuple[FrameKind, str]:
        with self._lock:
            if self._child.process.poll() is not None:
                self._start_again()
            child = self._child
            try:
                return child.ask(kind, text)
            except (OSError, EOFError) as error:
                reason = child.reason(error)
                self._start_again()
                raise reason from error

    def _start_again(self) -> None:
        self._child.end()
        try:
            self._child = _TemplateChild()
        except OSError as error:
            raise Unavailable(f"the process that renders chat templates cannot be started: {error}") from error


@functools.cache
def template_process() -> TemplateProcess:
    """Return the process-wide singleton, started by the first call. It renders for every tokenizer."""
    return TemplateProcess()


class _TemplateChild(ModuleProcess):
    """The process, and its stderr."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as said:
            super().__init__("jpaged.service.chat", _ANSWER_TIMEOUT_S, said.fileno())
            self._said = os.dup(said.fileno())
        weakref.finalize(self, os.close, self._said)

    def ask(self, kind: FrameKind, text: str | bytes) -> tuple[FrameKind, str]:
        """Send a question and wait for the answer; raise OSError or EOFError on failure."""
        send(self.connection, kind, text)
        return receive(self.answers)

    def reason(self, error: Exception) -> Exception:
        """Return the error that explains why the process gave no answer."""
        if isinstance(error, TimeoutError):
            return Unavailable(f"the process that renders chat templates did not answer within {_ANSWER_TIMEOUT_S} s")
        code = self.process.wait()
        if code == -signal.SIGPROF:
            return OutOfTimeError()
        said = os.pread(self._said, _MAX_SAID_BYTES, 0).decode(errors="replace").strip()
        last = (said.splitlines() or ["no output"])[-1]
        return Unavailable(f"the process that renders chat templates exited with code {code}: {last}")
