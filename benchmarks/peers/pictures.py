"""The records of all models as one picture: ratios to each peer, and the two servers under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.peers.peers import OURS, PEERS, SERVE, START
from benchmarks.peers.ratios import ratios
from benchmarks.peers.serving import AT_ONCE
from benchmarks.peers.table import ABOUT, timed

mpl.use("Agg")

_DPI = 160
_COLORS = {
    OURS: "#0072b2",
    "vllm": "#d55e00",
    "vllm-zentorch": "#e69f00",
    "transformers": "#999999",
    "llama.cpp": "#009e73",
}
_TICKS = (0.5, 1, 2, 5, 10, 20)
_WIDTH = 0.8
"""Width of a group of bars; the groups are 1 apart."""


def draw(records: Mapping[str, Mapping], path: Path) -> None:
    """Writes the picture, a PNG: `records` by model, as `__main__` saved them."""
    served = [record["rows"][SERVE]["points"] for record in records.values() if _has_servers(record)]
    figure = Figure(figsize=(13 if served else 9, 4.4), layout="constrained")
    widths = [3, 1, 1] if served else [1]
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    _bars(axes[0], records)
    if served:
        _servers(axes[1], served[0], "median_tpot_ms", "ms a token, half of the requests")
        _servers(axes[2], served[0], "output_throughput", "tokens/s")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    figure.savefig(path, dpi=_DPI)


def _bars(ax: Axes, records: Mapping[str, Mapping]) -> None:
    """Draws how many times as fast jpaged is, a group for each workload."""
    groups = [
        (f"{model} {name}", ratios(timed(record["rows"][name])))
        for model, record in records.items()
        for name in ABOUT
        if name in record["rows"] and name != START
    ]
    peers = [name for name in PEERS if any(name in group for _, group in groups)]
    width = _WIDTH / max(len(peers), 1)
    for number, peer in enumerate(peers):
        places = [(place, group[peer]) for place, (_, group) in enumerate(groups) if peer in group]
        x = [place + (number - (len(peers) - 1) / 2) * width for place, _ in places]
        bars = ax.bar(x, [ratio for _, ratio in places], width, label=peer, color=_COLORS[peer])
        ax.bar_label(bars, fmt="%.2g", fontsize=6, padding=1)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_yscale("log")
    ax.set_yticks(_TICKS)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xticks(range(len(groups)), [label for label, _ in groups])
    ax.set_title("times as fast as each peer, by the clock", fontsize=10)
    ax.legend(fontsize=8, frameon=False)


def _servers(ax: Axes, points: Mapping[str, Sequence[Mapping]], key: str, label: str) -> None:
    """Draws one number of both servers against the rate of requests."""
    for name, every in points.items():
        paced = sorted((p for p in every if p["rate"] != AT_ONCE), key=lambda point: float(point["rate"]))
        x = [float(point["rate"]) for point in paced]
        ax.plot(x, [p[key] for p in paced], color=_COLORS[name], marker="o", markersize=3, label=f"{name}'s server")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("requests/s sent", fontsize=8)
    ax.set_title(label, fontsize=10)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False)


def _has_servers(record: Mapping) -> bool:
    return any(record["rows"].get(SERVE, {}).get("points", {}).values())
