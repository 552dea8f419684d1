"""Trial compile of a grammar in a fork with limits of time, memory and stack.

A compile cannot be interrupted, and it may overflow its stack or exhaust memory, which ends the process. A grammar that
survives its trial also compiles in the server, which needs the same time and memory and has more stack.

    server ──first the vocabulary, then grammars──> child ──fork──> compiles, fills one mask, ends
           <──error, and bytes of memory────────────      <──────

The first grammar starts the child. It is kept warm, and restarted if it has ended. `GrammarLimits` has the limits of a
compile and of a step.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from llguidance import LLMatcher, LLParserLimits

from jpaged import json_text
from jpaged.errors import Unavailable
from jpaged.service.chat.sandbox import ModuleProcess, read_exactly
from jpaged.service.structured_output.vocabulary import Vocabulary, VocabularySpec


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of the compiler.

    Attributes:
        cpu_s: processor time of one compile; a schema of 100 properties takes 10 ms.
        memory_bytes: memory of one compile.
        compile_stack_bytes: stack of a trial's compile, half of the stack of the compiler's threads.
        mask_stack_bytes: stack of a trial's mask, half of the stack of the library's threads, which fill masks later.
        max_depth: nesting of a schema; the library's own reader stops at 128.
        max_waiting: compiles that wait or run; more are refused.
        num_threads: concurrent compiles, each with a trial process.
        max_entries: grammars and refusals in the cache.
        max_bytes: memory of the cached grammars, as measured by trials.
    """

    cpu_s: float = 3.0
    memory_bytes: int = 256 << 20
    compile_stack_bytes: int = 8 << 20
    mask_stack_bytes: int = 1 << 20
    max_depth: int = 64
    max_waiting: int = 256
    num_threads: int = 2
    max_entries: int = 1024
    max_bytes: int = 512 << 20


def library_limits() -> LLParserLimits:
    """Return the library's own limits, including those of a step: 200,000 units of lexing take about 15 ms.

    The library's default of 250,000 lexer states takes up to 0.5 GB for one request.
    """
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


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
    (length,) = _HEAD.unpack(read_exactly(messages, _HEAD.size))
    return dict(json.loads(read_exactly(messages, length)))


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
        self._child: _TrialChild | None = None

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
                    self._child = _TrialChild(self._spec)
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


class _TrialChild(ModuleProcess):
    """The process, with a vocabulary."""

    def __init__(self, spec: VocabularySpec) -> None:
        super().__init__("jpaged.service.structured_output.sandbox", _START_TIMEOUT_S)
        send(self.connection, asdict(spec))

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and wait for the answer; raise OSError or EOFError on failure."""
        send(self.connection, question)
        return receive(self.answers)


if __name__ == "__main__":
    sys.exit(main())
