"""Days on a fleet in simulated time, and the simulator beside real processes; recorded one by one, and gone on with.

routers      1000 replicas, each router
busy         as many requests as make queues, each router
failures     the same day without failures, with them, and with drains
mixes        the same day on fleets of other devices, with prices
autoscaling  an hour for a day, by the rules of deploy/
check        servers of the small model, at 2 and 4 replicas, beside simulated ones

python -m benchmarks.fleet [NAME ...] [--again]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.fleet.check import compare
from benchmarks.fleet.page import page_texts
from benchmarks.record import RESULTS, put_on_page, save
from jpaged.cli.main import main as jpaged
from jpaged.plan.fleet.outcomes import draw
from jpaged.plan.fleet.routing import RULES, Rule

NAME = "fleet"
_BUSY = ("--replicas", "50", "--rate", "450")
_PAIRED = ("--replicas", "100", "--rate", "500", "--cold-start", "10")
DAYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "routers": {rule: ("--day", "20", "--router", rule) for rule in RULES},
    "busy": {rule: (*_BUSY, "--router", rule) for rule in RULES},
    "failures": {
        "calm": _PAIRED,
        "20 failures": (*_PAIRED, "--failures", "20"),
        "20 drains": (*_PAIRED, "--drains", "20"),
    },
    "mixes": {
        "100 v6e": ("--topology", "v6e:1x1=100", "--rate", "500", "--price", "v6e=2.7"),
        "100 h100": ("--topology", "h100=100", "--rate", "500", "--price", "h100=3"),
        "50 v6e, 50 h100": (
            *("--topology", "v6e:1x1=50", "--topology", "h100=50", "--rate", "500"),
            *("--price", "v6e=2.7,h100=3"),
        ),
        "60 h100": ("--topology", "h100=60", "--rate", "500", "--price", "h100=3"),
    },
    "autoscaling": {
        "2 to 8": (
            *("--replicas", "8", "--day", "3600", "--rate", "12", "--window", "1", "--max-num-seqs", "4"),
            *("--autoscale", "deploy", "--price", "v6e=2.7", "--thinking", "20"),
        ),
        "8": (
            *("--replicas", "8", "--day", "3600", "--rate", "12", "--window", "1", "--max-num-seqs", "4"),
            *("--price", "v6e=2.7", "--thinking", "20"),
        ),
    },
}
CHECKS = ((2, 4.0), (4, 6.0))
"""Replicas, and requests a second that two cores carry with them."""
_CHECK_S, _CHECK_SEEDS = 30.0, range(10)
_CHECK_RULE: Rule = "prefix+load"


def main() -> None:
    """Runs what is not recorded, and writes it down after each run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description="Days on a fleet in simulated time, and the simulator beside real processes.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which (default: all)")
    parser.add_argument(
        "--again",
        action="store_true",
        help="forget what is recorded of these first; one that was stopped goes on without it",
    )
    arguments = parser.parse_args()
    names = arguments.names or [*DAYS, "check"]
    for name in names:
        if name not in (*DAYS, "check"):
            parser.error(f"{name} is not one of {', '.join((*DAYS, 'check'))}")
    record = _recorded()
    if arguments.again:  # forgotten now, so that a run that is stopped goes on without --again
        record = {name: done for name, done in record.items() if name not in names}
        save(NAME, "python -m benchmarks.fleet", record)
    for name in names:
        done = dict(record.get(name, {}))
        for label, result in _missing(name, done):
            done[label] = result
            record[name] = done
            save(NAME, "python -m benchmarks.fleet", record)
            print(f"{name}: {label}", flush=True)
        if name in DAYS:
            draw([run | {"label": label} for label, run in done.items()], RESULTS / f"{NAME}_{name}.png", _title(name))
    put_on_page(page_texts(record))


def _missing(name: str, done: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is not done yet, each as soon as it is."""
    if name == "check":
        for num_replicas, rate_per_s in CHECKS:
            if str(num_replicas) not in done:
                yield str(num_replicas), compare(num_replicas, rate_per_s, _CHECK_S, _CHECK_RULE, _CHECK_SEEDS)
        return
    for label, words in DAYS[name].items():
        if label not in done:
            yield label, _simulate(words)


def _simulate(words: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        if code := jpaged(["bench", "fleet", *words, "--output-json", str(path)]):
            raise SystemExit(code)
        result = json.loads(path.read_text())
    (run,) = result["runs"]
    return {"command": " ".join(("jpaged bench fleet", *words)), "setting": result["setting"], **run}


def _recorded() -> dict[str, Any]:
    path = RESULTS / f"{NAME}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: found[name] for name in (*DAYS, "check") if name in found}


def _title(name: str) -> str:
    (word, *_) = DAYS[name].values()
    return f"{name}: jpaged bench fleet {' '.join(word)}"


if __name__ == "__main__":
    main()
