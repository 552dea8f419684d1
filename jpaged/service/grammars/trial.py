"""Trial compile of a grammar in a fork with limits of time, memory and stack.

A compile cannot be interrupted, and it may overflow its stack or exhaust memory, which ends the process. A grammar that
survives its trial also compiles in the server, which needs the same time and memory and has more stack.

    server ──first the vocabulary, then grammars──> child ──fork──> compiles, fills one mask, ends
           <──error, and bytes of memory────────────      <──────
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from llguidance import LLMatcher

from jpaged import json_text
from jpaged.service.grammars.limits import library_limits
from jpaged.service.grammars.vocabulary import Vocabulary, VocabularySpec

_HEAD = struct.Struct(">I")
_STATM = Path("/proc/self/statm")
_PANIC = "panic: "


def main() -> int:
    """Answer questions until the server closes the socket."""
    with socket.socket(fileno=sys.stdin.fileno()) as connection, connection.makefile("rb") as questions:
        try:
            spec = receive(questions)
            vocabulary = Vocabulary(VocabularySpec(spec["tokenizer"], spec["vocab_size"], tuple(spec["eos_token_ids"])))
            while True:
                send(connection, _answer(vocabulary, receive(questions)))
        except (EOFError, ConnectionError):
            return 0


def send(connection: socket.socket, value: dict[str, Any]) -> None:
    """Send one message."""
    payload = json_text.dumps(value).encode()
    connection.sendall(_HEAD.pack(len(payload)) + payload)


def receive(messages: IO[bytes]) -> dict[str, Any]:
    """Read one message from a socket's file. Blocks.

    Raises:
        EOFError: the peer has closed.
        TimeoutError: the socket's timeout has passed.
    """
    (length,) = _HEAD.unpack(_read(messages, _HEAD.size))
    return dict(json.loads(_read(messages, length)))


def _read(messages: IO[bytes], count: int) -> bytes:
    content = messages.read(count)
    if len(content) < count:
        raise EOFError
    return content


def _answer(vocabulary: Vocabulary, question: dict[str, Any]) -> dict[str, Any]:
    """Fork, and return the outcome: `error` as text (None on success), and `num_bytes` of memory."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            os.close(reader)
            answer = _limited(question, vocabulary)
            with open(writer, "wb") as pipe:
                pipe.write(json_text.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(process, 0)
    if content:
        return dict(json.loads(content))
    return {"error": _last_words(os.waitstatus_to_exitcode(status), question), "num_bytes": 0}


def _limited(question: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """Compile, and fill a mask, on threads with small stacks; exceeding a limit ends the process."""
    before = _pages()
    if before is not None:
        size = before[0] + question["memory_bytes"]
        with contextlib.suppress(ValueError, OSError):  # a lower limit that is already set is fine
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.close(2)  # the parent reports an abnormal exit itself, so drop the library's stderr
    signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])  # the signal's default action ends the process
    tokenizer, grammar = vocabulary.tokenizer, question["grammar"]
    matcher = _on_thread(
        question["compile_stack_bytes"],
        lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=library_limits()),
    )
    if not matcher.is_error():
        _on_thread(question["mask_stack_bytes"], matcher.compute_bitmask)
    after = _pages()
    grown = 0 if before is None or after is None else max(0, after[1] - before[1])
    return {"error": _condensed(matcher.get_error()) or None, "num_bytes": grown}


def _on_thread(stack_bytes: int, run: Callable[[], Any]) -> Any:
    said: list[Any] = []
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=lambda: said.append(run()))
    thread.start()
    thread.join()
    return said[0]


def _condensed(error: str) -> str:
    """Return an error without the library's internal details of a panic."""
    if error.startswith("NoExtension"):
        return "no text matches it"
    return error.partition("\n<")[0] if not error.startswith(_PANIC) else "it is too large for the compiler"


def _pages() -> tuple[int, int] | None:
    """Return the bytes of the address space and of resident memory; None if the system does not report them."""
    if not _STATM.exists():
        return None
    size, resident = _STATM.read_text().split()[:2]
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _last_words(code: int, question: dict[str, Any]) -> str:
    if code == -signal.SIGPROF:
        return f"it needs more than {question['cpu_s']:g} s of processor time to compile"
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return "it is too large for the compiler, or nested too deep"
    return f"it needs more than {question['memory_bytes'] >> 20} MiB of memory to compile"
