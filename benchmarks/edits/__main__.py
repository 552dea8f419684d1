"""Decodes the demo model on one core: rows without edits with two trees of code, and rows with edits with this one.

    git worktree add ../before COMMIT     a tree from before there were edits, with its CPU kernels built in it
    taskset -c 0 python -m benchmarks.edits --before ../before [--rows 1 8 32] [--turns 15]

One process for each tree; they take turns, A B B A, and the medians of the turns count, in processor's time, which a
busy machine changes little. The ratio is the median of those of each turn. `1 step` decodes a step at a time, as
batches with an edited row do; `open_batch_call` as many in a dispatch as a server takes by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.edits.ways import EDITED, PLAIN
from benchmarks.record import save

ROOT, WORKER = Path(__file__).parents[2], Path(__file__).with_name("worker.py")
STEPS = {0: "several", 1: "1 step"}
LIMIT = 1.02
"""What rows without edits may cost of what they cost before."""


class Tree:
    """A process with one tree's code."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def step_s(self, asked: dict[str, Any]) -> float:
        """Processor's seconds of a step."""
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return float(self._answer()["step_s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{WORKER} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows without edits in both trees, in milliseconds of processor's time a step.

    Attributes:
        ratio: the median of the ratios of each turn, after over before.
        quartiles: of those ratios.
    """

    way: str
    rows: int
    steps: str
    before_ms: float
    after_ms: float
    ratio: float
    quartiles: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """Rows of which some are edited, in milliseconds of processor's time a step, beside greedy rows of the same tree.

    Attributes:
        greedy_ms: all rows greedy and none edited, a step at a time.
        several_ms: those with several steps in a dispatch, which edited rows have not.
    """

    way: str
    rows: int
    num_edited: int
    step_ms: float
    greedy_ms: float
    several_ms: float


def compare(before: Tree, after: Tree, all_rows: list[int], num_turns: int) -> list[Comparison]:
    """Every plain way in both trees."""
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for turn in range(-1, num_turns):
        for way, fields in PLAIN.items():
            for rows in all_rows:
                for steps in STEPS:
                    asked = {"way": fields, "rows": rows, "num_edited": rows, "steps": steps}
                    trees = (before, after) if turn % 2 else (after, before)
                    times = {tree: tree.step_s(asked) for tree in trees}
                    if turn >= 0:
                        found[way, rows, steps].append((times[before], times[after]))
    results = []
    for (way, rows, steps), pairs in found.items():
        before_ms, after_ms = (1e3 * median(times) for times in zip(*pairs, strict=True))
        ratios = [pair[1] / pair[0] for pair in pairs]
        low, ratio, high = quantiles(ratios, n=4)
        results.append(Comparison(way, rows, STEPS[steps], before_ms, after_ms, ratio, (low, high)))
    return results


def costs(tree: Tree, all_rows: list[int], num_turns: int) -> list[Cost]:
    """Every way that edits, of all rows and of one among them."""
    found: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for turn in range(-1, num_turns):
        for rows in all_rows:
            cases = [("greedy", PLAIN["greedy"], rows, steps) for steps in STEPS]
            cases += [(way, fields, num, 0) for way, fields in EDITED.items() for num in sorted({1, rows})]
            for way, fields, num_edited, steps in cases:
                asked = {"way": fields, "rows": rows, "num_edited": num_edited, "steps": steps}
                step_s = tree.step_s(asked)
                if turn >= 0:
                    found[way, rows, num_edited, steps].append(step_s)
    times = {case: 1e3 * median(values) for case, values in found.items()}
    return [
        Cost(way, rows, num, time, times["greedy", rows, rows, 1], times["greedy", rows, rows, 0])
        for (way, rows, num, _), time in times.items()
        if way != "greedy"
    ]


def show(comparisons: list[Comparison], measured: list[Cost]) -> None:
    table = Table("way", "rows", "steps", "before ms", "after ms", "ratio", "quartiles", title="rows without edits")
    for one in comparisons:
        low, high = one.quartiles
        numbers = f"{one.before_ms:.3f}", f"{one.after_ms:.3f}", f"{one.ratio:.3f}", f"{low:.3f} to {high:.3f}"
        table.add_row(one.way, str(one.rows), one.steps, *numbers)
    Console().print(table)
    table = Table("way", "rows", "edited", "ms", "greedy, 1 step", "greedy, several", title="rows with edits")
    for cost in measured:
        costs_ms = f"{cost.step_ms:.3f}", f"{cost.greedy_ms:.3f}", f"{cost.several_ms:.3f}"
        table.add_row(cost.way, str(cost.rows), str(cost.num_edited), *costs_ms)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.edits", description="What edits cost rows that have them, and rows that do not."
    )
    parser.add_argument("--before", type=Path, required=True, help="a tree from before there were edits")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    before, after = Tree(options.before.resolve()), Tree(ROOT)
    comparisons = compare(before, after, options.rows, options.turns)
    before.close()
    measured = costs(after, options.rows, max(3, options.turns // 3))
    after.close()
    show(comparisons, measured)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=options.before, capture_output=True, text=True, check=True
    )
    ratio = median(one.ratio for one in comparisons)
    facts = {"before": commit.stdout.strip(), "num_turns": options.turns, "unit": "milliseconds of processor time"}
    results = {"median_ratio": ratio, "limit": LIMIT, "plain": [asdict(one) for one in comparisons]}
    path = save(
        "edits",
        "taskset -c 0 python -m benchmarks.edits --before TREE",
        {**facts, **results, "edited": [asdict(one) for one in measured]},
    )
    print(f"median ratio {ratio:.3f}, the limit is {LIMIT}; saved to {path}")


if __name__ == "__main__":
    main()
