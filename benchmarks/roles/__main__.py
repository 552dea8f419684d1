"""TTFT and ITL of prefill and decode on servers of their own, against mixed batching on the same two processes.

    mixed    two servers that do both; a request goes to the one with the fewest open
    apart    one that prefills and one that decodes; requests go to the latter
    rate     a share of what two servers carry that do both, which is measured first, for each shape

Both are asked for the same: the same prompts at the same times for a seed. A cell that is in the results already, with
the same numbers asked for, is not measured again. Each server has a processor of its own; clients share them.

    python -m benchmarks.roles [--model demo|S|M] [--shapes 900+32 512+128 128+256] [--loads 0.2 0.5 0.8] [--seeds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import SHAPES, make
from benchmarks.record import RESULTS, put_on_page, save
from benchmarks.roles.load import Shape, drive
from benchmarks.roles.servers import WAYS, hit_tokens, two

NAME = "roles"
_COLUMNS = ("mean", "p50", "p90", "p99")


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[str]:
    """The demo, or a model of `benchmarks.peers` made anew."""
    if name == "demo":
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        make(SHAPES[name], Path(folder))
        yield folder


def capacity(targets: Sequence[str], shape: Shape) -> float:
    """Requests a second that two servers carry that are asked for more than they can."""
    count = 16
    return count / asyncio.run(drive(targets, shape, 1e6, count, seed=99)).wall_s


def measure(arguments: argparse.Namespace, report: Any) -> None:
    """Measures every cell that is not there; saves after each."""
    cells, capacities = _found(arguments)
    shapes = [Shape.parse(word) for word in arguments.shapes]
    with model_folder(arguments.model) as model:
        for way in WAYS:
            wanted = [cell for cell in _cells(arguments, shapes) if not _key(way, cell) & cells.keys()]
            if not wanted:
                continue
            with two(way, model, arguments.processors) as targets:
                for shape in shapes:
                    asyncio.run(drive(targets, shape, 4.0, 4, seed=98))
                    if str(shape) not in capacities:
                        capacities[str(shape)] = round(capacity(targets, shape), 3)
                        report(f"{shape}: two servers carry {capacities[str(shape)]} requests/s")
                for shape, load, seed in wanted:
                    rate = load * capacities[str(shape)]
                    count = max(8, min(arguments.max_requests, round(rate * arguments.seconds)))
                    before = hit_tokens(targets)
                    seen = asyncio.run(drive(targets, shape, rate, count, seed))
                    numbers = {**seen.numbers(), "num_requests": count, "rate": round(rate, 3)}
                    numbers["hit_tokens"] = hit_tokens(targets) - before
                    cells[_name(way, (shape, load, seed))] = numbers
                    report(f"{_name(way, (shape, load, seed))}: {numbers}")
                    _save(arguments, cells, capacities)
    _save(arguments, cells, capacities)


def table(cells: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each shape and load: means over seeds, and behind ± half of the range."""
    groups: dict[tuple[str, str, str], list[Mapping[str, float]]] = {}
    for name, numbers in cells.items():
        way, shape, load, _ = name.split(" ")
        groups.setdefault((shape, load, way), []).append(numbers)
    head = "| tokens | load | servers | " + " | ".join(f"TTFT {one}" for one in _COLUMNS)
    lines = [head + " | " + " | ".join(f"ITL {one}" for one in _COLUMNS) + " |", "|" + "---|" * (3 + 2 * len(_COLUMNS))]
    for shape, load, way in sorted(groups, key=lambda key: (key[0], float(key[1]), WAYS.index(key[2]))):
        runs = groups[shape, load, way]
        values = [_spread(runs, f"{what}_{one}_ms") for what in ("ttft", "itl") for one in _COLUMNS]
        lines.append(f"| {shape} | {float(load):.0%} | {way} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def _spread(runs: Sequence[Mapping[str, float]], key: str) -> str:
    values = [run[key] for run in runs]
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):.3g} ± {half:.2g}"


def _cells(arguments: argparse.Namespace, shapes: Sequence[Shape]) -> list[tuple[Shape, float, int]]:
    return [(shape, load, seed) for shape in shapes for load in arguments.loads for seed in range(arguments.seeds)]


def _name(way: str, cell: tuple[Shape, float, int]) -> str:
    shape, load, seed = cell
    return f"{way} {shape} {load:g} {seed}"


def _key(way: str, cell: tuple[Shape, float, int]) -> set[str]:
    return {_name(way, cell)}


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"model": arguments.model, "seconds": arguments.seconds, "max_requests": arguments.max_requests}


def _found(arguments: argparse.Namespace) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    path = RESULTS / f"{NAME}.json"
    if path.exists() and not arguments.anew:
        record = json.loads(path.read_text())
        if record["asked"] == _asked(arguments):
            return record["cells"], record["capacities"]
    return {}, {}


def _save(arguments: argparse.Namespace, cells: Mapping[str, Any], capacities: Mapping[str, float]) -> None:
    record = {"asked": _asked(arguments), "note": arguments.note, "capacities": capacities, "cells": cells}
    save(NAME, arguments.command, record)


def main() -> None:
    """Measures, saves results/roles.json, and puts the table on docs/performance.md."""
    parser = argparse.ArgumentParser(description="Measure roles against mixed batching on the same two processes.")
    parser.add_argument("--model", choices=("demo", *SHAPES), default="S")
    parser.add_argument("--shapes", nargs="+", default=["900+32", "512+128", "128+256"], metavar="I+O")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.2, 0.5, 0.8], metavar="SHARE")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of arrivals in a run (default: 20)")
    parser.add_argument("--max-requests", type=int, default=200, metavar="N", help="of a run (default: 200)")
    processors = sorted(os.sched_getaffinity(0))
    parser.add_argument("--processors", nargs=2, type=int, default=[processors[0], processors[-1]], metavar="CPU")
    parser.add_argument("--note", default="", metavar="TEXT", help="what else is to be said of the machine")
    parser.add_argument("--anew", action="store_true", help="measure also what is there")
    arguments = parser.parse_args()
    arguments.command = f"python -m benchmarks.roles --model {arguments.model}"
    began_s = time.perf_counter()
    measure(arguments, lambda text: print(f"{time.perf_counter() - began_s:7.1f} s  {text}", flush=True))
    cells, _ = _found(argparse.Namespace(**{**vars(arguments), "anew": False}))
    put_on_page({NAME: table(cells)})
    print(table(cells))


if __name__ == "__main__":
    main()
