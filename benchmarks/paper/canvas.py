"""What the pictures have in common: a thing has one colour in all of them, and the paper's bars stand beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.paper.point import LABELS

mpl.use("Agg")

DPI = 160
STYLES = {
    "paged": ("#0072b2", "o"),
    "oracle": ("#009e73", "s"),
    "pow2": ("#e69f00", "^"),
    "max": ("#d55e00", "v"),
    "static": ("#7f7f7f", "x"),
    "shared": ("#cc79a7", "P"),
    "jpaged": ("#56b4e9", "D"),
    # What is not a system.
    "sharegpt": ("#332288", "o"),
    "alpaca": ("#882255", "s"),
    "parallel": ("#999933", "^"),
    "beam": ("#aa4499", "v"),
    "swap": ("#661100", "s"),
    "recompute": ("#117733", "o"),
    "paper": ("#444444", "*"),
    "tokens": ("#1a1a1a", ""),
    "reserved": ("#6b6b6b", ""),
    "internal": ("#ababab", ""),
    "external": ("#e3e3e3", ""),
}
"""(colour, mark) by name; told apart without colour as well."""
SYSTEMS = {label: name for name, label in LABELS.items()}
SMALL = 7
Row = dict[str, Any]


def canvas(title: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (8, 4)) -> tuple[Figure, Any]:
    """A figure and its axes, [rows, columns]."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    return figure, axes


def color(name: str) -> str:
    return STYLES[name][0]


def times(ax: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic axis of ratios."""
    ax.set_yscale("log")
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_minor_formatter(NullFormatter())


def legend(ax: Axes, **options: Any) -> None:
    ax.legend(fontsize=SMALL, frameon=False, **options)


def label_axes(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=8)
    ax.set_ylabel(y, fontsize=8)


def bars(
    ax: Axes,
    names: Sequence[str],
    paper: Sequence[float | None],
    ours: Sequence[float],
    colors: Sequence[str],
    tops: Sequence[float] | None = None,
) -> None:
    """Two bars a name: the paper's, hatched, and ours, with its number above `tops`, where a whisker ends."""
    for i, (theirs, value, shade, top) in enumerate(zip(paper, ours, colors, tops or ours, strict=True)):
        if theirs is not None:
            bar_of_paper(ax, i - 0.2, theirs)
            ax.text(i - 0.2, theirs, f"{theirs:g}", ha="center", va="bottom", fontsize=SMALL)
        ax.bar(i + 0.2, value, 0.38, color=shade)
        ax.text(i + 0.2, top, f"{value:.3g}", ha="center", va="bottom", fontsize=SMALL)
    ax.set_xticks(range(len(names)), names, fontsize=8)
    bar_of_paper(ax, 0, 0, label="paper")
    ax.bar(0, 0, color="#bbbbbb", label="ours (coloured)")
    legend(ax)


def bar_of_paper(ax: Axes, place: float, value: float, *, bottom: float = 0.0, label: str = "") -> None:
    ax.bar(
        place, value, 0.38, bottom=bottom, facecolor="white", edgecolor=color("paper"), hatch="//", label=label or None
    )


def whiskers(ax: Axes, places: Sequence[float], rows: Sequence[Row], name: str) -> None:
    """From the lowest of the seeds to the highest."""
    low = [row[name] - row[f"{name}_low"] for row in rows]
    high = [row[f"{name}_high"] - row[name] for row in rows]
    ax.errorbar(places, [row[name] for row in rows], [low, high], fmt="none", ecolor="black", capsize=2, linewidth=0.8)
