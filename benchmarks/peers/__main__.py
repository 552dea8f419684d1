"""Measure jpaged beside its peers, each on the same core, in turns.

    make bench-peers                                      all of it
    make bench-peers ARGS='--models S --workloads W5'     one row
    make bench-peers ARGS='--table'                       the table again, from what was measured

The first run installs the peers into .venv-peers: 7 GB, and about 15 minutes of two cores. Each row that was measured
replaces that of the record (benchmarks/results/peers_<model>.json); benchmarks/results/peers.md is the table of all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import limits, pictures, rounds, serving, table, workloads
from benchmarks.peers.checkpoints import SHAPES, Shape, make_files
from benchmarks.peers.environments import CannotInstall, Home, install, is_installed
from benchmarks.peers.peers import OURS, PEERS, SERVE, START
from benchmarks.peers.rounds import Plan, Rounds
from benchmarks.peers.session import ROOT, require_taskset
from benchmarks.record import RESULTS, machine
from jpaged import json_text

COMMAND = "make bench-peers"
RATES = "hf"
"""The environment whose PyTorch measures the core."""


class CannotMeasure(Exception):
    """Something that no peer could do without."""


def arguments() -> argparse.Namespace:
    """Reads the command line; what is out of its limits ends with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measure jpaged beside its peers, each on the same core, in turns.",
    )
    others = [name for name in PEERS if name != OURS]
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--peers", nargs="+", choices=others, default=others, help="beside jpaged (all)")
    parser.add_argument("--models", nargs="+", choices=[*SHAPES], default=[*SHAPES], help="(S M)")
    every = (START, *workloads.WORKLOADS, SERVE)
    parser.add_argument("--workloads", nargs="+", choices=every, help="(of S all, of M W5 and T1)")
    parser.add_argument("--repeats", type=_positive, help="turns of each peer (2 to 5, by the length of a workload)")
    parser.add_argument("--core", type=int, choices=cores, default=cores[-1], help="where all run (the last)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-peers", help="of the environments (.venv-peers)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where records and table go (benchmarks/results)")
    parser.add_argument("--install-only", action="store_true", help="measure nothing")
    parser.add_argument("--table", action="store_true", help="write the table from the records alone")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    home = Home(options.folder.resolve())
    try:
        if not options.table:
            _measure_all(options, home)
        if not options.install_only:
            _write_table(options.results)
    except CannotMeasure as error:
        raise SystemExit(f"error: {error}") from error


def _measure_all(options: argparse.Namespace, home: Home) -> None:
    plans = [
        Plan(
            SHAPES[model],
            [OURS, *(name for name in PEERS if name in options.peers)],
            options.workloads or rounds.WORKLOADS[model],
            options.repeats,
            options.core,
        )
        for model in options.models
    ]
    minutes = sum(plan.expected_s() for plan in plans) / 60
    _say(f"measuring takes about {max(1, round(minutes))} minutes on a quiet machine, besides what is installed first")
    require_taskset()
    missing = _install(plans[0].peers, home)
    for plan in plans:
        _make_inputs(plan, home, missing)
    if options.install_only:
        return
    rates = _rates(home, options.core)
    for plan in plans:
        _measure(plan, missing, home, options.results, rates)


def _install(names: Sequence[str], home: Home) -> dict[str, str]:
    """Makes the environments; returns the peers that cannot be had, and why."""
    missing, reasons = {}, {}
    for name in names:
        environment = PEERS[name].environment
        if environment not in reasons:
            try:
                install(home, environment, _say)
                reasons[environment] = ""
            except CannotInstall as error:
                reasons[environment] = f"could not be installed: {error}"
                _say(f"{name} {reasons[environment]}")
        if reasons[environment]:
            missing[name] = reasons[environment]
    return missing


def _make_inputs(plan: Plan, home: Home, missing: dict[str, str]) -> None:
    shape = plan.shape
    has_llama_cpp = "llama.cpp" in plan.peers and "llama.cpp" not in missing
    make_files(shape, home, ("",) if has_llama_cpp else (), _say)
    for workload in plan.in_turns:
        if workload != START:
            workloads.write(rounds.workload_path(home, shape.name, workload), workloads.make(shape.name, workload))


def _rates(home: Home, core: int) -> dict[str, Any] | None:
    """Measures the core, where PyTorch is installed: without it the table has no limits."""
    if not is_installed(home, RATES):
        _say("no limits: they are measured by PyTorch, which comes with the peer transformers")
        return None
    python = home.python(RATES)
    command = ["taskset", "-c", str(core), str(python), "-P", "-m", "benchmarks.peers.workers.rates"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True)
    return json.loads(answer.stdout)


def _measure(plan: Plan, missing: dict[str, str], home: Home, results: Path, rates: dict[str, Any] | None) -> None:
    _require_memory(plan)
    about_run = {"command": COMMAND, "commit": _commit(), "seed": workloads.SEED, "core": plan.core}
    with Rounds(plan, missing, home, _say) as turns:
        for workload in plan.in_turns:
            before = _moment()
            cells = turns.measure(workload)
            row = rounds.row(plan, workload, cells, turns.about)
            _save(plan.shape, results, workload, {**before, **about_run, **row}, rates)
    if SERVE in plan.workloads:
        before = _moment()
        row = serving.measure(plan.shape, missing, home, plan.core, _say)
        _save(plan.shape, results, SERVE, {**before, **about_run, **row}, rates)


def _save(shape: Shape, results: Path, workload: str, row: dict, rates: dict[str, Any] | None) -> None:
    """Puts a row into the record of a model, and those rates that are greater than before."""
    path = _record_path(results, shape.name)
    empty = {"model": shape.name, "dtype": shape.dtype, "rows": {}}
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty
    record["rows"][workload] = row
    if rates is not None:
        record["rates"] = limits.greatest(rates, record.get("rates", rates))
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text.dumps(record, indent=2) + "\n")
    _say(f"{workload} is in {path}")


def _write_table(results: Path) -> None:
    """Writes the table of all records, and prints it; their picture lies beside it.

    Raises:
        CannotMeasure: there is no record.
    """
    paths = {model: _record_path(results, model) for model in SHAPES}
    records = {model: json.loads(path.read_text()) for model, path in paths.items() if path.exists()}
    if not records:
        raise CannotMeasure(f"{results} has no record of {', '.join(path.name for path in paths.values())}")
    page = table.markdown(records)
    (results / "peers.md").write_text(page)
    pictures.draw(records, results / "peers.png")
    print(page)


def _record_path(results: Path, model: str) -> Path:
    return results / f"peers_{model}.json"


def _require_memory(plan: Plan) -> None:
    """Refuses to start more than fits: the machine would end one of them.

    Raises:
        CannotMeasure: names what is needed and what is free.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if (needs := plan.needs_bytes()) > available:
        raise CannotMeasure(
            f"{', '.join(plan.peers)} beside each other need {needs / 2**30:.1f} GiB for {plan.shape.name} and "
            f"{available / 2**30:.1f} GiB are free: name fewer --peers"
        )


def _moment() -> dict[str, object]:
    """When it is, and how the machine is before a row is measured."""
    return {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "machine": machine()}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range: must be >= 1")
    return number


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()
