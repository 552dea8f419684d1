"""The subcommand `bench startup`: time from a server's start to its first answer, cold and warm, by phase."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jpaged.bench import results
from jpaged.bench.cli.flags import add_output_json, require_range, require_writable
from jpaged.cli.serve import LISTENING
from jpaged.cli.server_process import ServerProcess, startup_texts, unwinding_at_sigterm
from jpaged.cli.startup import StartupReport
from jpaged.client import Client
from jpaged.errors import Unavailable

DESCRIPTION = """\
Measure the time from the start of `jpaged serve` until it answers requests, cold and warm.

    jpaged bench startup
    jpaged bench startup --model ./model --num-iters-cold 1 -- --max-num-seqs 32

A cold start has no compiled programs in the cache; a warm start reuses those of the previous start. Each start is a
new process, timed from outside. Flags of `jpaged serve` follow after --. Result keys are vLLM's.
"""

_PERCENTAGES = (10, 25, 50, 75, 90, 99)
_STEP = re.compile(r"\[ *[\d.]+ s\] (?P<what>\w+)")
_READY = "ready on "
_PHASES = {"steps": "planning", "compiled": "compilation"}
"""First word of a progress line -> the phase that it ends, if named differently."""
_END_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server.

    Attributes:
        ready_s: seconds until it answered requests.
        phases_s: seconds of each phase, in order; they add up to `ready_s`.
    """

    ready_s: float
    phases_s: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for MODEL, the numbers of starts, and the result file."""
    parser.add_argument("--model", default="demo", metavar="MODEL", help="model to serve (default: demo)")
    for name, default, text in (
        ("--num-iters-cold", 3, "cold starts"),
        ("--num-iters-warmup", 1, "starts that fill the compiled-program cache, not counted"),
        ("--num-iters-warm", 3, "warm starts"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add_output_json(parser)
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="flags for `jpaged serve`")


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers, and write them if requested."""
    require_range("--num-iters-cold", arguments.num_iters_cold, 0)
    require_range("--num-iters-warmup", arguments.num_iters_warmup, 1)
    require_range("--num-iters-warm", arguments.num_iters_warm, 0)
    require_writable("--output-json", arguments.output_json)
    report = StartupReport(sys.stderr)
    with unwinding_at_sigterm():
        cold = []
        for number in range(arguments.num_iters_cold):
            with tempfile.TemporaryDirectory(prefix="jpaged-bench-") as cache:
                cold.append(timed_start(arguments.model, arguments.server_flags, cache))
            report.progress("cold starts", number + 1, arguments.num_iters_cold)
        warm = []
        with tempfile.TemporaryDirectory(prefix="jpaged-bench-") as cache:
            for number in range(-arguments.num_iters_warmup, arguments.num_iters_warm):
                start = timed_start(arguments.model, arguments.server_flags, cache)
                if number >= 0:
                    warm.append(start)
                    report.progress("warm starts", number + 1, arguments.num_iters_warm)
    result = results.header("startup", 0) | {"model_id": arguments.model, "server_flags": arguments.server_flags}
    for temperature, starts in (("cold", cold), ("warm", warm)):
        if starts:
            result |= summarize(temperature, starts)
    Console().print(_table(arguments.model, {"cold": cold, "warm": warm}))
    if arguments.output_json is not None:
        results.write(arguments.output_json, result)
    return 0


def timed_start(model: str, flags: list[str], cache: str) -> Start:
    """Start a server and end it once it is ready.

    Raises:
        Unavailable: it ended early; includes its last output.
    """
    server = ServerProcess.start(model, ["--http-port", "0", *flags], {"JPAGED_CACHE_DIR": str(Path(cache))})
    try:
        with Client(server.target()) as client:
            for _ in startup_texts(client, server):
                continue
    except Unavailable as error:
        server.stop(_END_PATIENCE_S)
        raise Unavailable("\n".join([f"{model}: {error}; its last output:", *server.last_lines])) from error
    finally:
        server.stop()
    return read_start(server.lines)


def read_start(lines: Iterable[tuple[float, str]]) -> Start:
    """Return the phases of a start, from the lines that the server printed and their times.

    A phase ends with the last line that names it. The first is the interpreter's start until the port is open, the
    second the imports until the first progress line.
    """
    ends: dict[str, float] = {}
    ready_s = 0.0
    for seconds, line in lines:
        if line.startswith(LISTENING):
            ends["process"] = seconds
        elif line.startswith(_READY):
            ready_s = seconds
            break
        elif match := _STEP.match(line):
            ends.setdefault("imports", seconds)
            phase = _PHASES.get(match["what"], match["what"])
            ends.pop(phase, None)
            ends[phase] = seconds
    ends["opening"] = ready_s
    phases, before_s = {}, 0.0
    for name, end_s in ends.items():
        phases[name] = end_s - before_s
        before_s = end_s
    return Start(ready_s, phases)


def summarize(temperature: str, starts: list[Start]) -> dict[str, Any]:
    """Return vLLM's keys for one temperature (cold or warm), and the mean seconds of each phase."""
    times = [start.ready_s for start in starts]
    names = dict.fromkeys(name for start in starts for name in start.phases_s)
    compilations = [start.phases_s.get("compilation", 0.0) for start in starts]
    return {
        f"avg_{temperature}_compilation_time": float(np.mean(compilations)),
        f"{temperature}_compilation_times": compilations,
        f"avg_{temperature}_startup_time": float(np.mean(times)),
        f"{temperature}_startup_times": times,
        f"{temperature}_startup_percentiles": {str(p): float(np.percentile(times, p)) for p in _PERCENTAGES},
        f"{temperature}_startup_phases": {name: _mean_s(starts, name) for name in names},
    }


def _mean_s(starts: list[Start], phase: str) -> float:
    return float(np.mean([start.phases_s.get(phase, 0.0) for start in starts]))


def _table(model: str, temperatures: dict[str, list[Start]]) -> Table:
    table = Table(title=f"seconds until {model} answers, means", title_justify="left")
    table.add_column("phase")
    shown = {name: starts for name, starts in temperatures.items() if starts}
    for name, starts in shown.items():
        table.add_column(f"{name} ({len(starts)})", justify="right")
    for phase in dict.fromkeys(name for starts in shown.values() for start in starts for name in start.phases_s):
        table.add_row(phase, *(f"{_mean_s(starts, phase):.2f}" for starts in shown.values()))
    table.add_section()
    table.add_row("ready", *(f"{np.mean([start.ready_s for start in starts]):.2f}" for starts in shown.values()))
    return table
