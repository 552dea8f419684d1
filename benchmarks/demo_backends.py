"""The demo model end to end with each attention backend of this machine: tokens a second, in turns, medians.

taskset -c 0 python -m benchmarks.demo_backends
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from jpaged.llm import LLM
from jpaged.types import SamplingParams

NUM_TURNS = 5
MAX_TOKENS = 160


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_backends",
        description="The demo model end to end with each attention backend of this machine.",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--backend", nargs="+", default=["xla", "cpu"], help="first is the base (default: xla cpu)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="(default: 1 8 32)")
    arguments = parser.parse_args()
    rates: dict[str, dict[int, list[float]]] = {name: {n: [] for n in arguments.batch} for name in arguments.backend}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM("demo", attention_backend=name, wait_for_all_programs=True))
            for name in arguments.backend
        }
        for turn in range(NUM_TURNS + 1):
            for batch in arguments.batch:
                for name, llm in llms.items():
                    found = tokens_per_s(llm, batch)
                    if turn > 0:  # the first one touches memory for the first time
                        rates[name][batch].append(found)
    base = arguments.backend[0]
    rows = []
    table = Table(title="demo model, tokens/s", title_justify="left")
    for title in ("rows", *arguments.backend, f"over {base}"):
        table.add_column(title, justify="right")
    for batch in arguments.batch:
        medians = {name: statistics.median(rates[name][batch]) for name in arguments.backend}
        ratios = {name: medians[name] / medians[base] for name in arguments.backend}
        best = max(ratios.values())
        table.add_row(str(batch), *(f"{medians[name]:.0f}" for name in arguments.backend), f"{best:.2f}")
        rows.append({"batch": batch, "tokens_per_s": medians, "over_base": ratios})
    Console().print(table)
    facts = {"num_cpus_used": len(os.sched_getaffinity(0)), "max_tokens": MAX_TOKENS, "turns": NUM_TURNS}
    print(save("demo_backends", "python -m benchmarks.demo_backends", {**facts, "rows": rows}))


def tokens_per_s(llm: LLM, batch: int) -> float:
    """Generated tokens over the whole time, prompts included; the stories differ and go on to the same length."""
    prompts = [f"Once upon a time there was a number {i}" for i in range(batch)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True) for i in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs) / seconds


if __name__ == "__main__":
    main()
