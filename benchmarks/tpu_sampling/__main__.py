"""Prints the cycles of sampling on TPUs.

    make aot && python -m benchmarks.tpu_sampling [--generation v6e] [--rows 256] [--vocab 128256] [--record]

`--record` writes the cases into what `jpaged plan` reads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from benchmarks.tpu_sampling.count import KINDS, TOPOLOGIES, Loops, compile_here, compiled, cycles
from jpaged.engine.executor import Detail

RECORDED = Path(__file__).resolve().parents[2] / "jpaged" / "plan" / "cycles.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Counts the cycles of sampling on TPUs.")
    parser.add_argument("--generation", choices=TOPOLOGIES, action="append", help="all by default")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--record", action="store_true", help="write the cases into jpaged/plan/cycles.json")
    parser.add_argument("--compile", nargs=4, metavar=("GENERATION", "ROWS", "VOCAB", "DETAIL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compile:
        generation, rows, vocab, detail = options.compile
        print(compile_here(generation, int(rows), int(vocab), Detail[detail]))
        return
    table = Table(title=f"Sampling {options.rows} rows of {options.vocab} logits: thousands of cycles")
    for name in ("TPU", *KINDS, "spills"):
        table.add_column(name, justify="right")
    entries = []
    for generation in options.generation or TOPOLOGIES:
        with tempfile.TemporaryDirectory() as folder:
            program, _ = compiled(generation, options.rows, options.vocab, Detail.TOKENS, Path(folder))
        loops = Loops.of(program)
        counted = {kind: cycles(loops, kind, options.rows, options.vocab) for kind in KINDS}
        table.add_row(generation, *(f"{number / 1e3:.0f}" for number in counted.values()), str(program.num_spills))
        case = {"generation": generation, "vocab": options.vocab, "rows": options.rows}
        entries += [{**case, "what": kind, "cycles": number} for kind, number in counted.items()]
    Console().print(table)
    save("tpu_sampling", "python -m benchmarks.tpu_sampling", {"jax": version("jax"), "sampling": entries})
    if options.record:
        known = json.loads(RECORDED.read_text(encoding="utf-8"))
        keys = {tuple(list(entry.values())[:4]) for entry in entries}
        kept = [entry for entry in known["sampling"] if tuple(list(entry.values())[:4]) not in keys]
        known["sampling"] = [*kept, *entries]
        RECORDED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
