"""Makes the tables and figures of the paper's evaluation under benchmarks/paper/results.

python -m benchmarks.paper                     all of them
python -m benchmarks.paper f12 f13 --jobs 2    some of them, in two processes
python -m benchmarks.paper --figures-only      the pictures again, from the tables that are there
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from benchmarks.paper import blocks, memory, plots, rates
from benchmarks.paper.point import Runner
from benchmarks.paper.table import Table

FIGURES: dict[str, Callable[[Runner], Sequence[Table]]] = {
    "f2": lambda runner: [memory.slot_shares(runner)],
    "f12": rates.latency_curves,
    "f13": lambda runner: [memory.batched_requests(runner)],
    "f14": lambda runner: [rates.several_sequences(runner)],
    "f15": lambda runner: [memory.shared_blocks(runner)],
    "f16": lambda runner: [rates.shared_prefix(runner)],
    "f17": lambda runner: [rates.chatbot(runner)],
    "f18": lambda runner: [blocks.block_sizes(runner)],
    "f19": lambda runner: [blocks.preemption_costs(), blocks.preemption_end_to_end(runner)],
}


def main() -> None:
    """Runs the figures that were asked for, in the order of the paper."""
    parser = argparse.ArgumentParser(description="Make the tables and figures of the paper's evaluation.")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--figures-only", action="store_true", help="draw from the tables that are there")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.figures if name not in FIGURES]
    if unknown or arguments.jobs < 1:
        parser.error(f"no such figure: {', '.join(unknown)}" if unknown else f"--jobs {arguments.jobs} is below 1")
    if not arguments.figures_only:
        runner = Runner(arguments.jobs)
        for name in arguments.figures or FIGURES:
            begin_s = time.perf_counter()
            for table in FIGURES[name](runner):
                table.save()
                print(f"{table}\n", flush=True)
            print(f"{name}: {time.perf_counter() - begin_s:.0f} s\n", flush=True)
    plots.draw_all()


if __name__ == "__main__":
    main()
