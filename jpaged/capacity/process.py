"""Compilation in one child process per target, which isolates the environment and crashes of the compiler.

libtpu 0.0.42 has been seen to crash (signal 11, for tpu7x) while two programs were compiled concurrently. If a signal
ends a child, it is restarted with one program at a time.
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
    """Compile in a child and wait for the plan; retry if its compiler crashed.

    Args:
        question: what to compile.
        say: called with progress messages, one line each.

    Raises:
        JpagedError: the child reported an error, or died.
    """
    try:
        return _ask(question, say)
    except _Crashed as crash:
        say(f"the compiler crashed (signal {crash.number}): retrying with one program at a time")
    try:
        return _ask(dataclasses.replace(question, num_threads=1), say)
    except _Crashed as crash:
        raise InternalError(
            f"{question.target}: the compiler process crashed twice, by signal {crash.number}: {crash.last}"
        ) from crash


class _Crashed(Exception):
    """A signal ended the child."""

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
            with contextlib.suppress(BrokenPipeError):  # the child has ended: its exit code gives the reason
                child.stdin.write(json_text.dumps(asdict(question)))
                child.stdin.close()
            found = _read(child.stdout, say)
        except BaseException:
            child.kill()
            raise
        code = child.wait()
        if found is None:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["no output"])[-1]
            if code < 0:
                raise _Crashed(-code, last)
            raise InternalError(f"{question.target}: the compiler process exited with code {code}: {last}")
    return found


def _read(lines: IO[str], say: Callable[[str], None]) -> CompiledPlan | None:
    """Return the result from the output of a child; None if there is none."""
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
    """Decode a value that the child process wrote."""
    return pickle.loads(base64.b64decode(text))
