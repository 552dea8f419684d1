"""Pictures of a sweep: latencies and throughput against the request rate."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.bench.metrics import LATENCIES
from jpaged.errors import InvalidArgument

_DPI = 160
_CURVE = re.compile(r"(mean|median|p[\d.]+)_(\w+)_ms")
_FORMATS = (".png", ".svg", ".pdf")


def require_drawable(path: Path) -> None:
    """Refuses a picture that could not be written, before anything is measured.

    Raises:
        InvalidArgument: matplotlib is missing, or the path is no picture's.
    """
    try:
        import matplotlib  # noqa: F401
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
    """Writes one panel for each latency, and one of output tokens a second.

    Args:
        series: the runs of each curve, by its name in the legend.
        path: .png (160 dpi), .svg or .pdf.
        title: above all panels.
    """
    from matplotlib.figure import Figure

    runs = [run for curve in series.values() for run in curve]
    names = [name for name in LATENCIES if any(f"mean_{name}_ms" in run for run in runs)]
    figure = Figure(figsize=(4.6 * (len(names) + 1), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(names) + 1, squeeze=False)[0]
    for ax, name in zip(axes, names, strict=False):
        for label, curve in series.items():
            for key in _keys(curve, name):
                word = label if key.startswith("median") else f"{label}, {key.partition('_')[0]}"
                style = "-" if key.startswith("median") else "--"
                ax.plot(_rates(curve), [run[key] for run in curve], style, marker="o", markersize=3, label=word)
        ax.set_ylabel(f"{name.upper()}, ms")
        ax.set_title(LATENCIES[name], fontsize=10)
        ax.set_ylim(bottom=0)
    for label, curve in series.items():
        axes[-1].plot(_rates(curve), [run["output_throughput"] for run in curve], marker="o", markersize=3, label=label)
    axes[-1].set_ylabel("output tokens/s")
    axes[-1].set_title("output throughput", fontsize=10)
    axes[-1].set_ylim(bottom=0)
    for ax in axes:
        ax.set_xlabel("requests/s sent")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=_DPI)


def _keys(curve: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """The median and the percentiles of a latency that every run has."""
    found = [key for key in curve[0] if (match := _CURVE.fullmatch(key)) and match[2] == name]
    return [key for key in found if not key.startswith("mean") and all(key in run for run in curve)]


def _rates(curve: Sequence[Mapping[str, Any]]) -> list[float]:
    """The rates that were asked for; a run that sent all at once is drawn at the rate that it reached."""
    return [run["request_throughput"] if run["request_rate"] == "inf" else float(run["request_rate"]) for run in curve]
