"""Runs Python scripts in forks of a process that has imported what takes long, and nothing of ours.

    tests ──"{script, words, folder}"──> this file as a program ──fork──> exec(script), in the folder
          <────────pid, exit code────────

A script finds the modules of its folder. Pytest, jax and Pallas take 2 s of processor time to import, and hundreds of
faults are planted, each in a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_KNOWN = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # its plugins
PYTEST = f"import sys, pytest; sys.exit(pytest.main(['-W', '{_KNOWN}', *sys.argv[1:]]))"
_IMPORTED = (
    "pytest",
    "hypothesis",
    "pytest_asyncio",
    "xdist",
    "jaxtyping",
    "jax.numpy",
    "jax.experimental.topologies",
    "jax.experimental.pallas.mosaic_gpu",
    "jax.experimental.pallas.tpu",
    "jax.experimental.pallas.triton",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script ended: its exit code, negative for a signal, None where it took too long; and what it printed."""

    code: int | None
    output: str


class Forks:
    """The process that forks."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: str, words: Sequence[str], folder: Path, limit_s: float) -> Ended:
        """Waits until a script of these words has ended in a folder; what takes longer than the limit is killed."""
        with tempfile.TemporaryDirectory(prefix="jpaged-fork-") as place:
            printed = Path(place, "printed")
            printed.touch()
            asked = {"script": script, "words": list(words), "folder": str(folder), "printed": str(printed)}
            pid, code = self._ask(asked), None
            if select.select([self._answers], [], [], limit_s)[0]:
                code = self._answer()
            else:
                os.kill(pid, signal.SIGKILL)
                self._answer()
            return Ended(code, printed.read_text(errors="replace"))

    @property
    def _answers(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _ask(self, asked: Mapping[str, object]) -> int:
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> int:
        line = self._answers.readline()
        assert line, "the process that forks has ended"
        return int(line)

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def forks() -> Forks:
    """The forks of this process, made once and ended with it."""
    made = Forks()
    atexit.register(made.close)
    return made


def _run(asked: dict[str, str | list[str]]) -> None:
    """What a fork does: it never returns."""
    code: object = 1
    try:
        with open(str(asked["printed"]), "w") as printed:
            for number in (0, 1, 2):
                os.dup2(printed.fileno(), number)
        os.chdir(str(asked["folder"]))
        sys.path.insert(0, str(asked["folder"]))
        os.environ["PYTHONPATH"] = str(asked["folder"])
        sys.argv = ["-c", *asked["words"]]
        exec(str(asked["script"]), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


def main() -> None:
    sys.path.pop(0)  # this file's folder
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        with warnings.catch_warnings():
            # jax has no threads before it has a device.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
            pid = os.fork()
        if pid == 0:
            _run(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
