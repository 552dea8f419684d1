"""Plots of a sweep: latencies and throughput against the request rate."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.bench.metrics import LATENCIES
from jpaged.errors import InvalidArgument

_DPI = 160
_PERCENTILE = re.compile(r"p([\d.]+)_(\w+)_ms")
_MEDIAN = 50.0
_STYLES = ("-", "--", ":", "-.")
_BEYOND = 1.2
_FORMATS = (".png", ".svg", ".pdf")


def require_drawable(path: Path) -> None:
    """Check that a plot can be written, before anything is measured.

    Raises:
        InvalidArgument: matplotlib is missing, or the path is not that of a picture.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise InvalidArgument(
            "--plot",
            f"a picture needs matplotlib, of the extra `bench`: pip install 'jpaged[bench]' ({error})",
        ) from error
    if path.suffix not in _FORMATS:
        raise InvalidArgument("--plot", f"{path} does not end with one of {', '.join(_FORMATS)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidArgument("--plot", f"{path} is a folder, or in none")


def draw(series: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str) -> None:
    """Write one panel for each latency, and one for output tokens per second.

    Args:
        series: runs of each curve, by its name in the legend.
        path: .png (160 dpi), .svg or .pdf.
        title: title above all panels.
    """
    from matplotlib.figure import Figure

    runs = [run for curve in series.values() for run in curve]
    names = [name for name in LATENCIES if any(f"median_{name}_ms" in run for run in runs)]
    figure = Figure(figsize=(4.6 * (len(names) + 1), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(names) + 1, squeeze=False)[0]
    places = _places(runs)
    for number, (label, curve) in enumerate(series.items()):
        ordered = sorted(curve, key=lambda run: places[run["request_rate"]])
        x = [places[run["request_rate"]] for run in ordered]
        for ax, name in zip(axes, names, strict=False):
            for style, (key, word) in zip(_STYLES, _keys(curve, name), strict=False):
                y = [run[key] for run in ordered]
                shown = word if len(series) == 1 else f"{label}, {word}"
                ax.plot(x, y, style, color=f"C{number}", marker="o", markersize=3, label=shown)
        y = [run["output_throughput"] for run in ordered]
        axes[-1].plot(x, y, color=f"C{number}", marker="o", markersize=3, label=label)
    for ax, name in zip(axes, names, strict=False):
        ax.set_ylabel(f"{name.upper()}, ms")
        ax.set_title(LATENCIES[name], fontsize=10)
    axes[-1].set_ylabel("output tokens/s")
    axes[-1].set_title("output throughput", fontsize=10)
    for ax in axes:
        ax.set_ylim(bottom=0)
        ax.set_xticks(list(places.values()), [f"{rate:g}" if rate != "inf" else "inf" for rate in places])
        ax.set_xlabel("requests/s sent")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=_DPI)


def _keys(curve: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, str]]:
    """Return the median and the highest percentiles of a latency that all runs have: keys and labels."""
    matches = [match for key in curve[0] if (match := _PERCENTILE.fullmatch(key)) and match[2] == name]
    above = sorted((float(match[1]), match[0]) for match in matches if float(match[1]) > _MEDIAN)
    found = [(f"median_{name}_ms", "median"), *((key, f"p{percentile:g}") for percentile, key in above)]
    return [(key, word) for key, word in found if all(key in run for run in curve)]


def _places(runs: Sequence[Mapping[str, Any]]) -> dict[float | str, float]:
    """Return the x position of each rate: the rate; for inf, right of all others, or the rate it reached."""
    rates = sorted({float(run["request_rate"]) for run in runs if run["request_rate"] != "inf"})
    places: dict[float | str, float] = {rate: rate for rate in rates}
    if any(run["request_rate"] == "inf" for run in runs):
        reached = max(run["request_throughput"] for run in runs if run["request_rate"] == "inf")
        places["inf"] = _BEYOND * rates[-1] if rates else reached
    return places
