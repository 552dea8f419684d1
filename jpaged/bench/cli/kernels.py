"""The subcommand `bench kernels`: times of the attention kernels."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.table import Table

from jpaged import json_text
from jpaged.cli.options import to_flag
from jpaged.config import Backend
from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.kernels.paged_attention.measure import Cell, Measurement, Survey

DESCRIPTION = """\
Time the attention kernels of this device: paged against contiguous, and against the limit of the device.

    jpaged bench kernels
    jpaged bench kernels --shape llama-3-8b --context 2048 32768 --block-size 16 64 --backend pallas-gpu --plot a.png

Decode runs one query per sequence, prefill the last 2048 tokens of a prompt. "limit" is the fraction of the maximum
that the measured bandwidth (decode) or matrix-product rate (prefill) allows; "in order" is the same kernel with
consecutive blocks; "contiguous" is jax.nn.dot_product_attention over dense keys and values, and "ratio" is
paged over contiguous.
"""

_MAX_COUNT = 2**31 - 1
_CONTEXTS = (64, 256, 1024, 2048, 8192, 32768)
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments that choose the cells of the table."""
    parser.add_argument(
        "--shape", default="llama-3-8b", help="model whose attention heads are used (default: llama-3-8b)"
    )
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="(default: bfloat16)")
    backends = ("auto", *get_args(Backend))
    parser.add_argument("--backend", choices=backends, default="auto", help="attention kernels (default: auto)")
    parser.add_argument("--kind", choices=("decode", "prefill"), nargs="+", default=["decode", "prefill"])
    parser.add_argument(
        "--num-seqs", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="sequences per decode step"
    )
    parser.add_argument("--context", type=int, nargs="+", default=list(_CONTEXTS), metavar="N", help="tokens")
    parser.add_argument("--block-size", type=int, nargs="+", default=list(_BLOCK_SIZES), metavar="N", help="tokens")
    parser.add_argument(
        "--max-gib", type=float, default=8.0, metavar="GIB", help="skip cells with more keys and values than this"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the table (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")


def run(arguments: argparse.Namespace) -> int:
    """Measure cell by cell, and print the table at the end."""
    from jpaged.kernels.paged_attention.measure import SHAPES, survey

    console = Console()
    _check(arguments, tuple(SHAPES))
    max_bytes = int(arguments.max_gib * 2**30)
    found = survey(list(_cells(arguments)), arguments.shape, arguments.dtype, arguments.backend, max_bytes)
    facts = found.device
    console.print(
        f"{facts.kind}, jax {facts.jax_version}: copies {facts.limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {facts.limits.flops_per_s / 1e12:.2f} TFLOP/s in {arguments.dtype}"
    )
    console.print(_table(found.rows, arguments.shape))
    for cell, reason in found.left_out:
        console.print(f"skipped {_name(cell)}: {reason}", highlight=False)
    if arguments.json is not None:
        arguments.json.write_text(json_text.dumps(_record(found, arguments), indent=2) + "\n")
    if arguments.plot is not None:
        _draw(found.rows, f"{facts.kind}, {arguments.shape}, {arguments.dtype}", arguments.plot)
    return 0 if found.rows else 1


def _record(found: Survey, arguments: argparse.Namespace) -> dict[str, object]:
    rows = [{**asdict(m), "limit_share": m.limit_share, "over_contiguous": m.over_contiguous} for m in found.rows]
    left_out = [f"{_name(cell)}: {reason}" for cell, reason in found.left_out]
    asked = {"shape": arguments.shape, "dtype": arguments.dtype}
    return {**asdict(found.device), **asked, "rows": rows, "left_out": left_out}


def _check(arguments: argparse.Namespace, shapes: tuple[str, ...]) -> None:
    if arguments.shape not in shapes:
        raise InvalidArgument("--shape", f"{arguments.shape!r} is not one of {', '.join(shapes)}")
    for name in ("num_seqs", "context", "block_size"):
        for value in getattr(arguments, name):
            if not 1 <= value <= _MAX_COUNT:
                raise InvalidArgument(to_flag(name), f"{value} is out of range: must be from 1 to {_MAX_COUNT}")
    if not (arguments.max_gib > 0 and math.isfinite(arguments.max_gib)):
        raise InvalidArgument("--max-gib", f"{arguments.max_gib} is not a finite number above 0")
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InvalidArgument(flag, f"{path} is a folder, or its folder does not exist")


def _cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    from jpaged.kernels.paged_attention.measure import Cell

    for kind in arguments.kind:
        for num_seqs in arguments.num_seqs if kind == "decode" else (1,):
            for context in arguments.context:
                for block_size in arguments.block_size:
                    yield Cell(kind, num_seqs, context, block_size)


def _name(cell: Cell) -> str:
    return f"{cell.kind} of {cell.num_seqs} x {cell.context}, blocks of {cell.block_size}"


def _table(found: Sequence[Measurement], title: str) -> Table:
    """Return a table of times in milliseconds."""
    table = Table(title=f"paged attention, {title}: milliseconds of one layer", title_justify="left")
    for name in ("kind", "backend"):
        table.add_column(name)
    for name in ("rows", "context", "block", "paged", "in order", "contiguous", "ratio", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for m in found:
        contiguous = "-" if m.contiguous_s is None else f"{m.contiguous_s * 1e3:.3f}"
        ratio = "-" if m.over_contiguous is None else f"{m.over_contiguous:.2f}"
        counts = (m.cell.num_seqs, m.cell.context, m.cell.block_size)
        times = (f"{m.paged_s * 1e3:.3f}", f"{m.in_order_s * 1e3:.3f}", contiguous, ratio, f"{m.limit_share:.0%}")
        table.add_row(m.cell.kind, m.backend, *map(str, counts), *times)
    return table


def _draw(found: Sequence[Measurement], title: str, path: Path) -> None:
    """Plot the share of the limit by context: a curve per block size, a panel per kind and number of rows."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        problem = f"a plot requires matplotlib: pip install 'jpaged[bench]' ({error})"
        raise InvalidArgument("plot", problem) from error
    panels = sorted({(m.cell.kind, m.cell.num_seqs) for m in found})
    figure = Figure(figsize=(4.5 * max(1, len(panels)), 4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for ax, panel in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=False):
        here = [m for m in found if (m.cell.kind, m.cell.num_seqs) == panel]
        for block_size in sorted({m.cell.block_size for m in here}):
            curve = sorted((m.cell.context, 100 * m.limit_share) for m in here if m.cell.block_size == block_size)
            ax.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=f"blocks of {block_size}")
        ax.set_xscale("log", base=2)
        ax.set_ylim(0, 105)
        ax.set_title(f"{panel[0]}, {panel[1]} rows", fontsize=10)
        ax.set_xlabel("context, tokens")
        ax.set_ylabel("share of the device's limit, %")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
