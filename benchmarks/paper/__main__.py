"""Makes the tables and figures of the paper's evaluation under benchmarks/paper/results.

python -m benchmarks.paper                     all of them
python -m benchmarks.paper f12 f13 --jobs 2    some of them, in two processes
python -m benchmarks.paper --afresh            without what an interrupted or an earlier run kept in .points
python -m benchmarks.paper --figures-only      the pictures again, from the tables that are there
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from benchmarks.paper import blocks, memory, plots, rates, sharing
from benchmarks.paper.runner import KEPT, Runner
from benchmarks.paper.table import Table

FIGURES: dict[str, Callable[[Runner], Sequence[Table]]] = {
    "f2": lambda runner: [memory.pool_shares(runner)],
    "f11": lambda runner: [memory.request_lengths()],
    "f13": lambda runner: [memory.batched_requests(runner)],
    "f14": lambda runner: [sharing.several_sequences(runner)],
    "f15": lambda runner: [sharing.shared_blocks(runner)],
    "f16": lambda runner: [sharing.shared_prefix(runner)],
    "f17": lambda runner: [sharing.chatbot(runner)],
    "f18": lambda runner: [blocks.block_sizes(runner)],
    "f19": lambda runner: [blocks.preemption_costs(), blocks.preemption_end_to_end(runner)],
    "f12": lambda runner: [rates.sustained(runner), rates.latency_curves(runner)],
}


def main() -> None:
    """Runs the figures that were asked for, the quickest first."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description="Make the tables and figures of the paper's evaluation."
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--afresh", action="store_true", help="measure every point again")
    parser.add_argument("--figures-only", action="store_true", help="draw from the tables that are there")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.figures if name not in FIGURES]
    if unknown or arguments.jobs < 1:
        parser.error(f"no such figure: {', '.join(unknown)}" if unknown else f"--jobs {arguments.jobs} is below 1")
    if not arguments.figures_only:
        runner = Runner(arguments.jobs, None if arguments.afresh else KEPT)
        for name in arguments.figures or FIGURES:
            begin_s = time.perf_counter()
            for table in FIGURES[name](runner):
                table.save()
                print(f"{table}\n", flush=True)
            print(f"{name}: {time.perf_counter() - begin_s:.0f} s\n", flush=True)
    plots.draw_all()


if __name__ == "__main__":
    main()
