"""The picture: shares of prefill saved over the size of the pool, a panel a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.eviction.rows import BOUND, Row, spread, values

mpl.use("Agg")

_DPI = 160
_STYLES = {
    "lru": ("#0072b2", "o", "-"),
    "lfu": ("#7f7f7f", "x", "-"),
    "2q": ("#e69f00", "^", "-"),
    "worth": ("#d55e00", "s", "-"),
    "hindsight": ("#009e73", "", "--"),
    BOUND: ("#1a1a1a", "", ":"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the mean over seeds of each policy, and from the least to the most of them."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure = Figure(figsize=(3.4 * len(traces), 3.6), layout="constrained")
    figure.suptitle("Prefill seconds that cached prefixes save, by policy of eviction", fontsize=11)
    for ax, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        sizes = sorted({row["num_blocks"] for row in rows if row["trace"] == trace})
        for policy, (color, mark, line) in _STYLES.items():
            found = [spread(values(rows, trace, n, policy, "saved_share")) for n in sizes if _has(rows, trace, policy)]
            if found:
                means, lows, highs = ([100 * one[part] for one in found] for part in range(3))
                ax.plot(sizes, means, line, color=color, marker=mark or None, markersize=4, label=policy)
                ax.fill_between(sizes, lows, highs, color=color, alpha=0.15, linewidth=0)
        ax.set_title(trace, fontsize=10)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.set_ylim(0, 100)
        ax.set_xlabel("blocks of 16 tokens", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    figure.axes[0].set_ylabel("share of prefill seconds saved, %", fontsize=8)
    figure.axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=_DPI)


def _has(rows: Sequence[Row], trace: str, policy: str) -> bool:
    return any(row["trace"] == trace and row["policy"] == policy for row in rows)
