"""Plots of fleet simulations: arrivals and goodput, the state of the fleet, and a comparison of routers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MAX_TICKS = 10
_DPI = 160


def draw(runs: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write a figure with the day's series and a comparison of the runs.

    Args:
        runs: results of `jpaged bench fleet`, each with its `curve`.
        path: .png (160 dpi), .svg or .pdf.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 7.0), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(2, 3)
    _draw_rates(axes[0][0], runs)
    _draw_series(axes[0][1], runs, "waiting", "requests waiting for rows or blocks")
    _draw_replicas(axes[0][2], runs)
    _draw_bars(axes[1][0], runs, ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"), "time to first token, ms")
    _draw_bars(axes[1][1], runs, ("itl_p50_ms", "itl_p90_ms", "itl_p99_ms"), "mean time between tokens, ms")
    _draw_bars(axes[1][2], runs, ("prefix_hit_percent", "good_percent", "busy_percent"), "percent")
    figure.savefig(path, dpi=_DPI)


def _draw_rates(ax: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    curve = runs[0]["curve"]
    ax.fill_between(curve["hour"], curve["arrived_per_s"], color="0.85", label="arrived")
    for number, run in enumerate(runs):
        ax.plot(run["curve"]["hour"], run["curve"]["good_per_s"], color=f"C{number}", lw=1, label=_name(run))
    _finish(ax, "requests/s, total and within the goals")


def _draw_series(ax: Any, runs: Sequence[Mapping[str, Any]], key: str, title: str) -> None:
    for number, run in enumerate(runs):
        ax.plot(run["curve"]["hour"], run["curve"][key], color=f"C{number}", lw=1, label=_name(run))
    _finish(ax, title)


def _draw_replicas(ax: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    for number, run in enumerate(runs):
        curve = run["curve"]
        ax.plot(curve["hour"], curve["ready"], color=f"C{number}", lw=1, label=f"{_name(run)}: ready")
        if not any(curve["starting"]):
            continue
        both = [ready + starting for ready, starting in zip(curve["ready"], curve["starting"], strict=True)]
        ax.plot(curve["hour"], both, color=f"C{number}", lw=1, ls=":", label="and starting")
    _finish(ax, "replicas")


def _draw_bars(ax: Any, runs: Sequence[Mapping[str, Any]], keys: Sequence[str], title: str) -> None:
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        places = [place + number * width for place in range(len(keys))]
        bars = ax.bar(places, [run[key] for key in keys], width, color=f"C{number}", label=_name(run))
        ax.bar_label(bars, fmt="%.3g", fontsize=6)
    ax.set_xticks([place + 0.4 - width / 2 for place in range(len(keys))])
    ax.set_xticklabels([key.removesuffix("_ms").removesuffix("_percent").replace("_", " ") for key in keys])
    ax.set_title(title, fontsize=9)
    ax.margins(y=0.3)  # room for the legend above all bars
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=7, loc="upper center", ncols=2)


def _name(run: Mapping[str, Any]) -> str:
    return str(run.get("label") or run["router"])


def _finish(ax: Any, title: str) -> None:
    from matplotlib.ticker import MultipleLocator

    ax.set_title(title, fontsize=9)
    ax.set_xlabel("hour of the day; after the line, pending requests finish")
    ax.axvline(24, color="0.6", lw=0.8, ls=":")
    ax.set_xlim(0, None)
    ax.xaxis.set_major_locator(MultipleLocator(6 * math.ceil(ax.get_xlim()[1] / _MAX_TICKS / 6)))
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=7)
