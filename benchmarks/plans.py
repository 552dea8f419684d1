"""Plans Llama 3.1 on TPU slices, and writes the table into docs/performance.md.

    make aot && python -m benchmarks.plans [--only TOPOLOGY] [--table] [--all-programs]

`--table` writes the table again from what was recorded. Each plan is a call of `jpaged plan`, which compiles the
programs that decide; with `--all-programs` every one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, save

_ROOT = Path(__file__).resolve().parents[1]
_PAGE = _ROOT / "docs" / "performance.md"
_BEGIN, _END = "<!-- plans: begin -->", "<!-- plans: end -->"
_GIB = 1 << 30
_OPTIONS = ("--max-model-len", "8192", "--input-len", "1024", "--output-len", "256")
CELLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("llama-3.1-8b", topology, ()) for topology in ("v5e:2x2", "v6e:1x1", "v6e:2x4", "v5p:2x2x1", "tpu7x:2x2x1")),
    *(("llama-3.1-70b", topology, ()) for topology in ("v6e:2x4", "v5p:2x2x2")),
    ("llama-3.1-70b", "v6e:2x4", ("--num-blocks", "10000")),
)
"""Model, topology, and options besides."""


def command(model: str, topology: str, more: Sequence[str]) -> list[str]:
    return ["jpaged", "plan", model, "--topology", topology, *_OPTIONS, *more, "--json"]


def plan(model: str, topology: str, more: Sequence[str]) -> dict[str, Any]:
    """What `jpaged plan` says; what does not fit is a plan too."""
    words = command(model, topology, more)
    print(" ".join(words), flush=True)
    done = subprocess.run([sys.executable, "-m", *words], cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}")
    (found,) = json.loads(done.stdout)["plans"]
    return {"command": " ".join(words), **found}


def table(plans: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a plan a row."""
    rows = [
        "| model | topology | devices a copy | weights | pool | programs | blocks | sequences of 1024 + 256 "
        "| decode step | prefill step | output tokens/s | compiled | compile time |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(_row(found) for found in plans)])


def _row(found: Mapping[str, Any]) -> str:
    memory = found["memory_of_one_device"]
    programs = memory["programs"]
    taken = "-" if programs is None else f"{sum(programs.values()) / _GIB:.2f} GiB"
    cells = [
        found["model"],
        found["topology"],
        str(found["tensor_parallel_size"]),
        f"{memory['weight_bytes'] / _GIB:.2f} GiB",
        f"{memory['pool_bytes'] / _GIB:.2f} GiB",
        taken,
        str(found["num_blocks"]),
    ]
    if found["fits"]:
        one = found["estimates"][0]
        cells += [
            f"{one['num_fitting']} ({one['num_running']} run)",
            f"{one['decode_s'] * 1e3:.2f} ms",
            f"{one['prefill_s'] * 1e3:.2f} ms",
            f"{found['slice_tokens_per_s']:.0f}",
        ]
    else:
        over = f"{-memory['free_bytes'] / _GIB:.2f} GiB over"
        cells += [f"does not fit: {over}, {found['most_blocks']} blocks would", "-", "-", "-"]
    cells.append(f"{len(found['compiled_programs'])} of {found['num_programs']}")
    cells.append(f"{found['compile_seconds']:.0f} s")
    return f"| {' | '.join(cells)} |"


def write_table(plans: Sequence[Mapping[str, Any]]) -> None:
    """Between its marks on the page."""
    before, rest = _PAGE.read_text(encoding="utf-8").split(_BEGIN)
    after = rest.split(_END)[1]
    _PAGE.write_text(f"{before}{_BEGIN}\n{table(plans)}\n{_END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Plan Llama 3.1 on TPU slices, and write the table into docs/performance.md."
    )
    parser.add_argument("--only", default="", help="plan for this topology, and record nothing")
    parser.add_argument("--table", action="store_true", help="write the table from the record, and plan nothing")
    parser.add_argument("--all-programs", action="store_true", help="compile every program of each plan")
    chosen = parser.parse_args()
    if chosen.table:
        write_table(json.loads((RESULTS / "plans.json").read_text())["plans"])
        return
    plans = []
    for model, topology, more in CELLS:
        if chosen.only in topology:
            plans.append(plan(model, topology, (*more, *(["--all-programs"] if chosen.all_programs else []))))
            if not chosen.only:
                save("plans", "python -m benchmarks.plans", {"plans": plans})
    if chosen.only:
        print(table(plans))
    else:
        write_table(plans)


if __name__ == "__main__":
    main()
