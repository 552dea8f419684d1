"""The subcommand `bench compare`: two results side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jpaged import json_text
from jpaged.bench import results
from jpaged.bench.results import RunComparison, compare, get_runs, read_result
from jpaged.errors import InvalidArgument

DESCRIPTION = """\
Compare two result files metric by metric, from `jpaged bench` or vLLM's benchmarks, which use the same keys.

    jpaged bench compare before.json after.json

The ratio is B over A. Settings that make the two results incomparable are printed to stderr, with exit code 1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the two files."""
    parser.add_argument("a", type=Path, metavar="A", help="result file")
    parser.add_argument("b", type=Path, metavar="B", help="another")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the sweeps of both against the request rate (.png)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return 1 if the two were not measured under the same conditions."""
    a, b = read_result(arguments.a), read_result(arguments.b)
    if arguments.plot is not None:
        results.require_drawable(arguments.plot)
        if not (get_runs(a) and get_runs(b)):
            raise InvalidArgument("--plot", "draws results of `bench serve`, which have a request rate")
        names = f"A: {arguments.a.stem}", f"B: {arguments.b.stem}"
        results.draw(dict(zip(names, (get_runs(a), get_runs(b)), strict=True)), arguments.plot, " and ".join(names))
    found = compare(a, b)
    if arguments.json:
        print(json_text.dumps(_record(found)))
    else:
        Console().print(_table(found, arguments.a.name, arguments.b.name))
    for difference in found.differences:
        print(f"not comparable: {difference}", file=sys.stderr)
    return 1 if found.differences else 0


def _record(found: RunComparison) -> dict[str, object]:
    ratios = [{"request_rate": r.rate, "metric": r.metric, "a": r.a, "b": r.b, "ratio": r.ratio} for r in found.ratios]
    return {"ratios": ratios, "differences": list(found.differences)}


def _table(found: RunComparison, a: str, b: str) -> Table:
    table = Table(title=f"A = {a}, B = {b}", title_justify="left")
    has_rates = any(ratio.rate for ratio in found.ratios)
    for name in (*(("requests/s",) if has_rates else ()), "metric"):
        table.add_column(name)
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right")
    table.add_column("B is")
    for ratio in found.ratios:
        verdict = {True: "better", False: "worse", None: ""}[ratio.is_better]
        cells = (f"{ratio.a:.4g}", f"{ratio.b:.4g}", "-" if ratio.ratio is None else f"{ratio.ratio:.3f}", verdict)
        table.add_row(*((ratio.rate,) if has_rates else ()), ratio.metric, *cells)
    return table
