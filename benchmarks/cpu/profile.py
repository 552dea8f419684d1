"""Where the processor's time goes while `LLM.generate` runs a workload, by what is computed: samples of Linux's perf.

    taskset -c 0 python -m benchmarks.cpu.profile [--models S M] [--workloads W1 T1 W5] [--least 8]

The workloads and models are those of `make bench-peers`. Programs are compiled and the workload has run once when perf
begins to look at the process; it then runs again until the seconds asked for are over.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers import checkpoints, workloads
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.peers import OURS, PEERS, options_for
from benchmarks.peers.workers.protocol import Settings
from benchmarks.record import save

PARTS = (
    ("products", r"product::.*multiply"),
    ("norms, RoPE, activations, sums", r"product::"),
    ("sampling", r"[Ss]ampling|draw|\bscan\b"),
    ("attention", r"libjpaged_cpu"),
    ("other operations of XLA", r"\[JIT\]|libjax_common"),
    ("Python", r"libpython|umath|_multiarray"),
    ("libraries and kernel", r""),
)
"""Names of parts and what the library and symbol of theirs match; the first that does."""
_FREQUENCY_HZ = 499
_LINE = re.compile(r"^\s*(?P<share>[\d.]+)%\s+(?P<samples>\d+)\s+(?P<where>.+)$")


def part_of(where: str) -> str:
    """Returns the part that a library and symbol, as perf prints them, belong to."""
    return next(name for name, pattern in PARTS if re.search(pattern, where))


def shares(lines: Iterable[str]) -> dict[str, float]:
    """Returns each part's share of the samples in a report of perf with their numbers."""
    counts: Counter[str] = Counter()
    for line in lines:
        if match := _LINE.match(line):
            counts[part_of(match["where"])] += int(match["samples"])
    total = counts.total()
    return {name: round(counts[name] / total, 4) for name, _ in PARTS if counts[name]}


def run(model: str, workload: str, folder: str, least_s: float) -> None:
    """Runs a workload until the seconds are over, after a line that says that it begins."""
    from benchmarks.peers.workers.jpaged_offline import Jpaged

    jobs, shape = workloads.make(model, workload), SHAPES[model]
    worker = Jpaged(Settings(folder, shape.dtype, min(os.sched_getaffinity(0)), options_for(PEERS[OURS], shape)))

    def generate() -> None:
        worker.forget()
        worker.run(jobs)

    generate()
    print("ready", flush=True)
    sys.stdin.readline()  # perf looks on
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < least_s:
        generate()
    print("done", flush=True)
    sys.stdin.readline()  # it no longer does


def profile(model: str, workload: str, folder: Path, least_s: float) -> dict[str, float]:
    """Returns each part's share of the samples of one workload.

    Raises:
        SystemExit: the workload did not run.
    """
    command = [sys.executable, "-m", "benchmarks.cpu.profile", "--run", model, workload, str(folder)]
    data = folder / f"{workload}.perf"
    with subprocess.Popen(
        [*command, "--least", str(least_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def await_line(expected: str) -> None:
            if (line := next((one for one in child.stdout or () if one.strip() == expected), None)) is None:
                raise SystemExit(f"{model} {workload} ended with {child.wait()} before it was {expected}: {line}")

        await_line("ready")
        record = ["perf", "record", "--quiet", "-F", str(_FREQUENCY_HZ), "-o", str(data), "-p", str(child.pid)]
        with subprocess.Popen(record, stderr=subprocess.DEVNULL) as perf:
            time.sleep(1)
            child.stdin.write("\n")
            child.stdin.flush()
            await_line("done")
            perf.send_signal(signal.SIGINT)
        child.stdin.write("\n")
        child.stdin.flush()
    report = ["perf", "report", "-i", str(data), "--stdio", "--no-children", "-n", "--sort", "dso,symbol"]
    told = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    return shares(told.splitlines())


def main() -> None:
    """Profiles the workloads and writes results/cpu_profile.json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.profile", description="Say what workloads spend a CPU's time on."
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["S", "M"], help="(%(default)s)")
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=workloads.WORKLOADS,
        default=["W1", "W2", "W3", "T1", "W5"],
        help="of M only T1 and W5 (%(default)s)",
    )
    parser.add_argument("--least", type=float, default=8.0, metavar="SECONDS", help="of a profile (%(default)s)")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        model, workload, folder = options.run
        run(model, workload, folder, options.least)
        return
    if shutil.which("perf") is None:
        raise SystemExit("perf was not found: Debian has it in linux-perf")
    found: dict[str, dict[str, float]] = {}
    console = Console()
    for model in options.models:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / model
            checkpoints.make(SHAPES[model], folder)
            for workload in options.workloads if model == "S" else [w for w in options.workloads if w in {"T1", "W5"}]:
                found[f"{model} {workload}"] = profile(model, workload, folder, options.least)
    table = Table("workload", *(name for name, _ in PARTS))
    for name, parts in found.items():
        table.add_row(name, *(f"{parts.get(part, 0):.1%}" for part, _ in PARTS))
    console.print(table)
    command = " ".join(["python -m benchmarks.cpu.profile", *sys.argv[1:]])
    print(f"written to {save('cpu_profile', command, {'shares': found})}")


if __name__ == "__main__":
    main()
