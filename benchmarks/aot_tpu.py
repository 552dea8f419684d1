"""Compiles whole models for TPUs on a machine without one, and records what each program takes.

    make aot && python -m benchmarks.aot_tpu [--only PART_OF_A_CELL [--update]]

For every cell (see `benchmarks.tpu_programs`): seconds to compile, memory of one device, and whether anything of the
size of the pool or of a weight is copied. Nothing runs, so nothing here is a speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, save
from benchmarks.tpu_programs import OPTIONS, ProgramResult, compile_cells, library

_GIB, _MIB = 1 << 30, 1 << 20
_SLICES = {
    "v5e": ("1x1", "2x2", "2x4"),
    "v6e": ("1x1", "2x2", "2x4"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2"),
    "tpu7x": ("1x1x1", "2x2x1", "2x2x2"),
}
"""The topologies of each generation: slices of 1, 4 and 8 chips."""


def cells() -> list[str]:
    """Every cell of the table: all steps where one chip has the whole model, decoding where several share it."""
    found = []
    for generation, (one, four, eight) in _SLICES.items():
        found += [f"llama-3-8b@{generation}:{one}#forward[64],forward[512],sample[64]"]
        found += [f"llama-3-8b@{generation}:{shape}#forward[64]" for shape in (four, eight)]
        # Its 40 heads divide among 8 devices, which are 4 chips of TPU7x.
        found += [f"opt-13b@{generation}:{shape}#forward[64]" for shape in (one, four)]
        found += [f"llama-3-70b@{generation}:{eight}#forward[64]"]
    found += ["llama-3-70b@v6e:2x4#forward[512],sample[64]", "llama-3-8b@v6e:2x4#copy[8],swap_out[8],swap_in[8]"]
    found += ["llama-3-70b@v6e:2x4#forward[256]", "llama-3-70b@v6e:2x4#forward[2048]"]
    found += [f"deepseek-v2-lite+{parallel}@v6e:2x2#forward[64]" for parallel in ("ep", "dp")]
    return [*found, *(f"llama-3-8b@{topology}/xla#forward[64]" for topology in ("v6e:1x1", "v6e:2x4"))]


def table(results: Sequence[ProgramResult]) -> Table:
    """The results, one program a row."""
    shown = Table(title="Compiled for TPUs without one; memory of one device in GiB, working memory in MiB")
    for name in ("cell", "program", "devices", "attention", "weights", "pool", "all", "work", "copies", "CPU s", "s"):
        shown.add_column(name, justify="left" if name in ("cell", "program", "attention") else "right")
    for result in results:
        gib = (result.weight_bytes / _GIB, result.pool_bytes / _GIB)
        if result.report is None:
            memory = (*(f"{value:.2f}" for value in gib), "[red]does not fit[/]", "", "")
        else:
            total = f"{result.report.total_bytes / _GIB:.2f}"
            work = f"{result.report.temp_bytes / _MIB:.1f}"
            memory = (*(f"{value:.2f}" for value in gib), total, work, ", ".join(result.made) or "none")
        seconds = f"{result.compile_cpu_s:.1f}", f"{result.compile_s:.1f}"
        shown.add_row(
            result.cell, result.program.replace("[", "\\["), str(result.num_devices), result.backend, *memory, *seconds
        )
    return shown


def update(programs: Sequence[Mapping[str, Any]]) -> None:
    """Replace programs of the record by others of the same cells; new ones come last."""
    record = json.loads((RESULTS / "aot_tpu.json").read_text())
    by_name = {(one["cell"], one["program"]): one for one in (*record["programs"], *programs)}
    kept = {name: record[name] for name in ("jax", "jaxlib", "libtpu", "options")}
    save("aot_tpu", record["command"], {**kept, "programs": list(by_name.values())})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compile whole models for TPUs that are not here, and record what each program takes."
    )
    parser.add_argument("--only", default="", help="compile the cells that contain this, and record nothing")
    parser.add_argument("--update", action="store_true", help="with --only: replace these cells in the record")
    chosen = parser.parse_args()
    versions = {"jax": version("jax"), "jaxlib": version("jaxlib"), "libtpu": _libtpu_version()}
    console, results = Console(), []
    for cell in cells():
        if chosen.only in cell:
            console.print(f"compiling {cell}", markup=False, highlight=False)
            results += compile_cells(cell)
        if not chosen.only:
            found = [dataclasses.asdict(result) for result in results]
            save("aot_tpu", "python -m benchmarks.aot_tpu", {**versions, "options": OPTIONS, "programs": found})
    if chosen.update:
        update([dataclasses.asdict(result) for result in results])
    console.print(table(results))


def _libtpu_version() -> str:
    folders = sorted(library().parent.parent.glob("libtpu-*.dist-info"))
    return folders[0].name.removeprefix("libtpu-").removesuffix(".dist-info") if folders else "unknown"


if __name__ == "__main__":
    main()
