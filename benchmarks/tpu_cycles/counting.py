"""Starts the process that counts, with a libtpu and a folder for what it writes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tpu_cycles.cases import Case
from benchmarks.tpu_cycles.experts import ExpertsCase
from jpaged.device.aot.topology import compiler_environment

ROOT = Path(__file__).resolve().parents[2]
MARK = "CYCLES "
"""Before a line of numbers: jax and libtpu print others."""
_DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_"
"""What makes libtpu write only its last passes: 4 MB of the 200 that it has to say about an attention call."""


class CountingFailed(RuntimeError):
    """The process that counts ended before its last case; the message has the end of what it said."""


def counted(cases: Sequence[Case | ExpertsCase], libtpu: Path) -> Iterator[dict[str, Any]]:
    """Each case's numbers (see `count.count`), as it is counted.

    Raises:
        CountingFailed: a case could not be compiled or followed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        environment = {
            **os.environ,
            **compiler_environment(libtpu),
            "LIBTPU_INIT_ARGS": _DUMP.format(folder),
            "TPU_STDERR_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-m", "benchmarks.tpu_cycles.count", folder, *map(str, cases)]
        num_done = 0
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    num_done += 1
                    yield json.loads(line.removeprefix(MARK))
        if process.returncode or num_done < len(cases):
            errors.seek(0)
            raise CountingFailed(
                f"{cases[min(num_done, len(cases) - 1)]} was not counted with {libtpu}; the process ended with "
                f"{process.returncode}:\n{errors.read()[-3000:]}"
            )


def version(libtpu: Path) -> str:
    """The version of a libtpu.so, as the folder that pip puts beside its own says."""
    folders = sorted(libtpu.parent.parent.glob("libtpu-*.dist-info"))
    return folders[0].name.removeprefix("libtpu-").removesuffix(".dist-info") if folders else "unknown"
