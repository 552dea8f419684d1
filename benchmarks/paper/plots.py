"""The tables as pictures: bars with the paper's number beside ours, curves by request rate and by block size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.point import LABELS
from benchmarks.paper.table import RESULTS

mpl.use("Agg")

# One colour and mark a system, in every picture; told apart without colour as well.
_STYLES = {
    "paged": ("#0072b2", "o"),
    "oracle": ("#009e73", "s"),
    "pow2": ("#e69f00", "^"),
    "max": ("#d55e00", "v"),
    "static": ("#7f7f7f", "x"),
    "jpaged": ("#56b4e9", "D"),
    "shared": ("#cc79a7", "P"),
}
_PAPER = {"facecolor": "white", "edgecolor": "#444444", "hatch": "//"}
_SYSTEMS = {label: name for name, label in LABELS.items()}
_MAX_LATENCY_S = 1.0

Row = dict[str, Any]


def draw_all() -> None:
    """Draws every table that there is."""
    for name, draw in _PICTURES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            figure = draw(json.loads(path.read_text())["rows"])
            figure.savefig(RESULTS / f"{name}.png", dpi=80)


def _canvas(title: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (8, 4)) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    return figure, axes


def _bars(ax: Axes, names: list[str], paper: list[float | None], ours: list[float], colors: list[str]) -> None:
    """Two bars a name: the paper's, hatched, and ours."""
    for i, (theirs, value, color) in enumerate(zip(paper, ours, colors, strict=True)):
        if theirs is not None:
            ax.bar(i - 0.2, theirs, 0.38, **_PAPER)  # type: ignore[arg-type]
            ax.text(i - 0.2, theirs, f"{theirs:g}", ha="center", va="bottom", fontsize=7)
        ax.bar(i + 0.2, value, 0.38, color=color)
        ax.text(i + 0.2, value, f"{value:.3g}", ha="center", va="bottom", fontsize=7)
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.bar(0, 0, **_PAPER, label="paper")  # type: ignore[arg-type]
    ax.bar(0, 0, color="#0072b2", label="jpaged, simulated")
    ax.legend(fontsize=7, frameon=False)


def _color(row: Row) -> str:
    return _STYLES[_SYSTEMS[row["system"]]][0]


def _slot_share(rows: list[Row]) -> Figure:
    figure, axes = _canvas("F2  reserved KV slots that hold tokens (OPT-13B, ShareGPT, 2 requests/s)")
    ax = axes[0, 0]
    names = [_SYSTEMS[row["system"]] for row in rows]
    _bars(ax, names, [row["paper"] for row in rows], [row["ours"] for row in rows], [_color(row) for row in rows])
    places = [i + 0.2 for i in range(len(rows))]
    ax.plot(places, [row["of_pool"] for row in rows], "D", color="white", markeredgecolor="black", markersize=6)
    ax.plot([], [], "D", color="white", markeredgecolor="black", markersize=6, label="ours, of the whole pool")
    ax.legend(fontsize=7, frameon=False, loc="upper left")
    ax.set_ylabel("percent", fontsize=8)
    return figure


def _batched(rows: list[Row]) -> Figure:
    figure, axes = _canvas("F13  requests in a batch (OPT-13B); ours saturated", 1, 2, (10, 4))
    for ax, workload in zip(axes[0], ("sharegpt", "alpaca"), strict=True):
        some = [row for row in rows if row["workload"] == workload]
        names = [_SYSTEMS[row["system"]] for row in some]
        ours = [row["ours_saturated"] for row in some]
        _bars(ax, names, [row["paper"] for row in some], ours, [_color(row) for row in some])
        ax.set_title(workload, fontsize=9)
    return figure


def _latency(rows: list[Row]) -> Figure:
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    figure, axes = _canvas("F12  mean normalized latency (s/token) against request rate", 2, 3, (12, 6.5))
    for ax, panel in zip(axes.flat, panels, strict=False):
        for name, label in LABELS.items():
            some = sorted(
                (row["requests_per_s"], row["normalized_latency_s"])
                for row in rows
                if row["panel"] == panel and row["system"] == label
            )
            if some:
                color, mark = _STYLES[name]
                ax.plot(*zip(*some, strict=True), color=color, marker=mark, markersize=4, linewidth=1.2, label=name)
        ax.set_title(panel, fontsize=9)
        ax.set_xscale("log")
        ax.set_ylim(0, _MAX_LATENCY_S)
        ax.set_xlabel("requests/s", fontsize=8)
    axes[0, 0].legend(fontsize=7, frameon=False)
    return figure


def _sustained(rows: list[Row]) -> Figure:
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    figure, axes = _canvas("F12  how many times a baseline's request rate paged memory sustains", size=(10, 4))
    ax = axes[0, 0]
    for k, name in enumerate(("oracle", "pow2", "max", "static")):
        values = [
            row["paged_over_it"]
            for panel in panels
            for row in rows
            if row["panel"] == panel and row["system"] == LABELS[name]
        ]
        bars = ax.bar(
            [i + 0.2 * (k - 1.5) for i in range(len(panels))], values, 0.19, color=_STYLES[name][0], label=name
        )
        ax.bar_label(bars, fmt="%.3g", fontsize=7)
    ax.axhspan(1.7, 2.7, color=_STYLES["oracle"][0], alpha=0.15, label="paper, over oracle (ShareGPT)")
    ax.axhspan(2.7, 8.0, color=_STYLES["max"][0], alpha=0.10, label="paper, over max (ShareGPT)")
    ax.axhline(22, color=_STYLES["static"][0], linestyle=":", label="paper, over static (most)")
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_yscale("log")
    ax.set_xticks(range(len(panels)), panels, fontsize=8)
    ax.legend(fontsize=7, frameon=False, ncols=2)
    return figure


def _several(rows: list[Row]) -> Figure:
    figure, axes = _canvas(
        "F14  requests/s sustained with several sequences a request (OPT-13B, Alpaca)", 1, 2, (10, 4)
    )
    for ax, kind in zip(axes[0], ("parallel", "beam"), strict=True):
        some = [row for row in rows if row["kind"] in ("one", kind)]
        for name in ("paged", "oracle", "pow2", "max"):
            color, mark = _STYLES[name]
            ax.plot([row["size"] for row in some], [row[name] for row in some], color=color, marker=mark, label=name)
        ax.set_title({"parallel": "parallel sampling", "beam": "beam search"}[kind], fontsize=9)
        ax.set_xlabel("sequences a request", fontsize=8)
        ax.set_xticks([row["size"] for row in some])
        ax.set_yscale("log")
    axes[0, 0].legend(fontsize=7, frameon=False)
    return figure


def _shared(rows: list[Row]) -> Figure:
    figure, axes = _canvas("F15  blocks saved by sharing, percent (OPT-13B)", 1, 2, (10, 4))
    for ax, workload in zip(axes[0], ("alpaca", "sharegpt"), strict=True):
        some = [row for row in rows if row["workload"] == workload]
        names = [f"{row['kind']} {row['size']}" for row in some]
        colors = [_STYLES["paged" if row["kind"] == "parallel" else "shared"][0] for row in some]
        _bars(ax, names, [row["paper"] for row in some], [row["ours"] for row in some], colors)
        ax.set_title(workload, fontsize=9)
    return figure


def _prefix(rows: list[Row]) -> Figure:
    figure, axes = _canvas(
        "F16  requests/s over reserve-oracle with a shared prefix (LLaMA-13B, translation)", 1, 2, (10, 4)
    )
    for ax, shots in zip(axes[0], (1, 5), strict=True):
        some = [row for row in rows if row["shots"] == shots]
        names = ["oracle", "paged", "prefix\nshared", "jpaged"]
        colors = [_STYLES[name][0] for name in ("oracle", "paged", "shared", "jpaged")]
        _bars(ax, names, [row["paper"] for row in some], [row["over_oracle"] for row in some], colors)
        ax.set_title(f"prefix of {some[0]['prefix_tokens']} tokens", fontsize=9)
    return figure


def _chatbot(rows: list[Row]) -> Figure:
    figure, axes = _canvas("F17  paged over each baseline, as a chatbot (OPT-13B)")
    some = [row for row in rows if row["paged_over_it"] is not None]
    names = [_SYSTEMS[row["system"]] for row in some]
    values = [row["paged_over_it"] for row in some]
    _bars(axes[0, 0], names, [row["paper"] for row in some], values, [_color(row) for row in some])
    return figure


def _block_size(rows: list[Row]) -> Figure:
    series = (("sharegpt_latency_s", "ShareGPT", "paged"), ("alpaca_latency_s", "Alpaca", "shared"))
    return _by_block_size("F18b  mean normalized latency by block size (OPT-13B)", "s/token", rows, series)


def _preemption_cost(rows: list[Row]) -> Figure:
    series = (("swap_both_ms", "swap out and in", "max"), ("recompute_ms", "recompute", "paged"))
    return _by_block_size("F19a  preempting a sequence of 500 tokens (OPT-13B)", "ms", rows, series)


def _preemption_latency(rows: list[Row]) -> Figure:
    series = (
        ("swap_latency_s", "swap", "max"),
        ("recompute_latency_s", "recompute", "paged"),
        ("jpaged_auto_latency_s", "auto (jpaged)", "jpaged"),
    )
    return _by_block_size("F19b  mean normalized latency by preemption (OPT-13B, ShareGPT)", "s/token", rows, series)


def _by_block_size(title: str, unit: str, rows: list[Row], series: tuple[tuple[str, str, str], ...]) -> Figure:
    figure, axes = _canvas(title)
    ax = axes[0, 0]
    sizes = [row["block_size"] for row in rows]
    for column, label, style in series:
        color, mark = _STYLES[style]
        ax.plot(sizes, [row[column] for row in rows], color=color, marker=mark, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set_xlabel("block size", fontsize=8)
    ax.set_ylabel(unit, fontsize=8)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8, frameon=False)
    return figure


_PICTURES: dict[str, Callable[[list[Row]], Figure]] = {
    "f02_slot_share": _slot_share,
    "f12_sustained": _sustained,
    "f12_latency": _latency,
    "f13_batched_requests": _batched,
    "f14_several_sequences": _several,
    "f15_shared_blocks": _shared,
    "f16_shared_prefix": _prefix,
    "f17_chatbot": _chatbot,
    "f18_block_size": _block_size,
    "f19a_preemption_cost": _preemption_cost,
    "f19b_preemption_latency": _preemption_latency,
}
