"""One child process a target: it compiles with an environment of its own, and takes its compiler's crashes with it.

libtpu 0.0.42 has been seen to crash (signal 11, for tpu7x) while two programs were compiled side by side. A child that
a signal ends is asked again, for one program at a time.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from jpaged import errors, json_text
from jpaged.capacity.compiled import CompiledPlan, Question
from jpaged.capacity.target import find_target
from jpaged.config import child_environment, tpu_library
from jpaged.device.aot.tpu import compiler_environment, find_library
from jpaged.errors import InternalError, InvalidArgument

_GPU_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}


def compile_plan(question: Question, say: Callable[[str], None]) -> CompiledPlan:
    """Asks a child, and waits; asks again where its compiler crashed.

    Args:
        question: what to compile.
        say: told what happens, a line at a time.

    Raises:
        JpagedError: what the child says is wrong, or that it died.
    """
    try:
        return _ask(question, say)
    except _Crashed as crash:
        say(f"the compiler crashed (signal {crash.number}): again, one program at a time")
    try:
        return _ask(dataclasses.replace(question, num_threads=1), say)
    except _Crashed as crash:
        raise InternalError(
            f"{question.target}: the process that compiles was ended twice, by signal {crash.number}: {crash.last}"
        ) from crash


class _Crashed(Exception):
    """A child was ended by a signal."""

    def __init__(self, number: int, last: str) -> None:
        super().__init__(number, last)
        self.number, self.last = number, last


def _ask(question: Question, say: Callable[[str], None]) -> CompiledPlan:
    is_tpu = find_target(question.target).platform == "tpu"
    variables = compiler_environment(find_library(tpu_library())) if is_tpu else _GPU_ENVIRONMENT
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            [sys.executable, "-m", "jpaged.capacity"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=child_environment(variables),
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code says how
                child.stdin.write(json_text.dumps(asdict(question)))
                child.stdin.close()
            found = _read(child.stdout, say)
        except BaseException:
            child.kill()
            raise
        code = child.wait()
        if found is None:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
            if code < 0:
                raise _Crashed(-code, last)
            raise InternalError(f"{question.target}: the process that compiles ended with {code}: {last}")
    return found


def _read(lines: IO[str], say: Callable[[str], None]) -> CompiledPlan | None:
    """The result among what a child prints; None if it ends without one."""
    found: CompiledPlan | None = None
    for line in lines:
        kind, _, rest = line.rstrip("\n").partition(" ")
        if kind == "progress":
            say(rest)
        elif kind == "error":
            name, *arguments = _decoded(rest)
            raise InvalidArgument(*arguments) if name == "InvalidArgument" else getattr(errors, name)(*arguments)
        elif kind == "result":
            found = _decoded(rest)
    return found


def _decoded(text: str) -> Any:
    """Reads a value that our own child wrote."""
    return pickle.loads(base64.b64decode(text))
