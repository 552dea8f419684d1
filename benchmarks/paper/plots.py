"""The tables as pictures: bars with the paper's number beside ours, curves by request rate and by block size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.canvas import (
    DPI,
    SMALL,
    STYLES,
    SYSTEMS,
    Row,
    bar_of_paper,
    bars,
    canvas,
    color,
    label_axes,
    legend,
    times,
    whiskers,
)
from benchmarks.paper.rates import BASELINES, PAPER_RATIOS, PAPER_STATIC
from benchmarks.paper.table import RESULTS

_LATENCY_S = 0.25
_NAMES = {"sharegpt": "ShareGPT", "alpaca": "Alpaca", "parallel": "parallel sampling", "beam": "beam search"}


def draw_all(folder: Path = RESULTS) -> None:
    """Draws every table that there is."""
    for name, draw in _PICTURES.items():
        path = folder / f"{name}.json"
        if path.exists():
            draw(json.loads(path.read_text())["rows"]).savefig(folder / f"{name}.png", dpi=DPI)


def _pool_shares(rows: list[Row]) -> Figure:
    figure, axes = canvas("F2  what the slots of the pool are (OPT-13B, ShareGPT): hatched the paper, grey ours")
    ax = axes[0, 0]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    for i, system in enumerate(systems):
        paper = ours = 0.0
        for row in (row for row in rows if row["system"] == system):
            if row["paper"] is not None:
                bar_of_paper(ax, i - 0.2, row["paper"], bottom=paper)
                _inside(ax, i - 0.2, paper, row["paper"], "black")
                paper += row["paper"]
            ax.bar(i + 0.2, row["ours"], 0.38, bottom=ours, color=color(row["part"]), edgecolor="white")
            _inside(ax, i + 0.2, ours, row["ours"], "white" if row["part"] in ("tokens", "reserved") else "black")
            ours += row["ours"]
    for part, what in (
        ("tokens", "tokens"),
        ("reserved", "will be written"),
        ("internal", "never written"),
        ("external", "no region"),
    ):
        ax.bar(0, 0, color=color(part), label=f"{part}: {what}" if what != part else part)
    ax.set_xticks(range(len(systems)), [SYSTEMS[system] for system in systems], fontsize=8)
    label_axes(ax, "", "share of the pool's slots (%)")
    _legend_beside(ax)
    return figure


def _inside(ax: Axes, place: float, bottom: float, value: float, shade: str) -> None:
    if value >= 3:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5} if shade == "black" else None
        ax.text(
            place, bottom + value / 2, f"{value:.1f}", ha="center", va="center", fontsize=SMALL, color=shade, bbox=box
        )


def _lengths(rows: list[Row]) -> Figure:
    figure, axes = canvas("F11  lengths of prompts and outputs", 1, 2, (10, 4))
    for ax, workload in zip(axes[0], ("sharegpt", "alpaca"), strict=True):
        some = [row for row in rows if row["workload"] == workload]
        ours, names = [row["mean"] for row in some], [f"{row['kind']}, mean" for row in some]
        bars(ax, names, [row["paper_mean"] for row in some], ours, [color(workload)] * len(some))
        for i, row in enumerate(some):
            ax.plot([i + 0.3] * 2, [row["p10"], row["p90"]], color="black", marker="_", markersize=8, linewidth=1)
            ax.plot([i + 0.3], [row["p50"]], "D", color="white", markeredgecolor="black", markersize=5)
        ax.plot([], [], "D-", color="black", markerfacecolor="white", label="10 to 90 percent of them, and the median")
        ax.set_title(_NAMES[workload], fontsize=9)
        label_axes(ax, "", "tokens")
        legend(ax)
    return figure


def _batched(rows: list[Row]) -> Figure:
    figure, axes = canvas("F13  requests in a batch (OPT-13B); ours saturated", 1, 2, (10, 4))
    for ax, workload in zip(axes[0], ("sharegpt", "alpaca"), strict=True):
        some = [row for row in rows if row["workload"] == workload]
        names = [SYSTEMS[row["system"]] for row in some]
        ours, tops = ([row[column] for row in some] for column in ("saturated", "saturated_high"))
        bars(ax, names, [row["paper"] for row in some], ours, [color(name) for name in names], tops)
        whiskers(ax, [i + 0.2 for i in range(len(some))], some, "saturated")
        at_rate = [(i + 0.2, row["at_rate"]) for i, row in enumerate(some) if row["at_rate"] is not None]
        if at_rate:
            ax.plot(*zip(*at_rate, strict=True), "D", color="white", markeredgecolor="black", markersize=6)
        ax.plot([], [], "D", color="white", markeredgecolor="black", label=f"ours, at {some[0]['rate_per_s']:g}/s")
        ax.set_title(f"{_NAMES[workload]}; the paper's at {some[0]['rate_per_s']:g} requests/s", fontsize=9)
        label_axes(ax, "", "requests in a batch")
        legend(ax)
    return figure


def _latency(rows: list[Row]) -> Figure:
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    columns = 3
    figure, axes = canvas(
        "F12  latency against request rate: points where no queue grows, dotted lines at the rate sustained",
        -(-len(panels) // columns),
        columns,
        (13, 3.4 * -(-len(panels) // columns)),
    )
    for ax, panel in zip(axes.flat, panels, strict=False):
        knees = {
            name: _curve(ax, [r for r in rows if r["panel"] == panel and SYSTEMS[r["system"]] == name], name)
            for name in dict.fromkeys(SYSTEMS[r["system"]] for r in rows if r["panel"] == panel)
        }
        end = 1.35 * knees["paged"]
        if "sharegpt" in panel:
            end = max(end, 1.02 * PAPER_RATIOS["oracle"][1] * knees["oracle"])
            for (name, (low, high)), height in zip(PAPER_RATIOS.items(), (0.93, 0.82), strict=True):
                if name not in knees:
                    continue
                span = [low * knees[name], high * knees[name]]
                ax.plot(
                    span, [height * _LATENCY_S] * 2, color=color(name), linewidth=5, alpha=0.35, solid_capstyle="butt"
                )
        ax.set_title(panel, fontsize=9)
        ax.set_xlim(0, end)
        ax.set_ylim(0, _LATENCY_S)
        label_axes(ax, "request rate (requests/s)", "normalized latency (s/token)")
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    axes[0, 0].plot([], [], color="black", linewidth=0.6, linestyle="--", label="on to the rate sustained")
    for name, what in (("oracle", "1.7 to 2.7 times oracle"), ("max", "2.7 to 8 times max, cut off")):
        axes[0, 0].plot([], [], color=color(name), linewidth=5, alpha=0.35, label=f"paper: {what}")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8, frameon=False
    )
    return figure


def _curve(ax: Axes, rows: list[Row], name: str) -> float:
    """Draws a system's points up to its knee; returns the rate that it sustains."""
    shade, mark = STYLES[name]
    points = [
        (row["requests_per_s"], row["normalized_latency_s"])
        for row in rows
        if row["share"] < 1 and not row["queue_grows"]
    ]
    knee = float(rows[-1]["requests_per_s"] / rows[-1]["share"])
    if points:
        ax.plot(*zip(*points, strict=True), color=shade, marker=mark, markersize=4, linewidth=1.2, label=name)
        ax.plot([points[-1][0], knee], [points[-1][1], _LATENCY_S], color=shade, linewidth=0.6, linestyle="--")
    ax.axvline(knee, color=shade, linewidth=0.9, linestyle=":")
    return knee


def _sustained(rows: list[Row]) -> Figure:
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    figure, axes = canvas("F12  how many times a baseline's request rate paged memory sustains", size=(12, 5))
    ax = axes[0, 0]
    for k, name in enumerate(BASELINES):
        some = [row for row in rows if SYSTEMS[row["system"]] == name]
        places = [i + 0.22 * (k - 1.5) for i in range(len(panels))]
        ax.bar(places, [row["paged_over_it"] for row in some], 0.16, color=color(name), label=name)
        whiskers(ax, places, some, "paged_over_it")
        for place, row in zip(places, some, strict=True):
            top = 1.02 * row["paged_over_it_high"]
            ax.text(place, top, f"{row['paged_over_it']:.3g}", ha="center", va="bottom", fontsize=SMALL)
        low_high = PAPER_RATIOS.get(name, (PAPER_STATIC, PAPER_STATIC) if name == "static" else None)
        for i, panel in enumerate(panels):
            if low_high and "sharegpt" in panel:
                ax.plot([places[i] - 0.11] * 2, low_high, "_-", color=color("paper"), markersize=6, linewidth=2)
    ax.plot([], [], "_-", color=color("paper"), linewidth=2, label="paper's range over its models; most over static")
    ax.axhline(1, color="black", linewidth=0.8)
    times(ax, (1, 2, 3, 5, 10, 20, 40))
    ax.set_xticks(range(len(panels)), panels, fontsize=8)
    label_axes(ax, "", "paged / baseline (times)")
    legend(ax, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    return figure


def _several(rows: list[Row]) -> Figure:
    figure, axes = canvas(
        "F14  paged memory's rate over a baseline's, by sequences a request (OPT-13B, Alpaca)", 1, 2, (10, 4)
    )
    for ax, kind in zip(axes[0], ("parallel", "beam"), strict=True):
        some = [row for row in rows if row["kind"] in ("one", kind)]
        sizes = [row["size"] for row in some]
        for name in ("oracle", "pow2", "max"):
            shade, mark = STYLES[name]
            ax.plot(sizes, [row["paged"] / row[name] for row in some], color=shade, marker=mark, label=f"over {name}")
        paper = [(row["size"], row["paper"]) for row in some if row["paper"] is not None]
        ax.plot(
            *zip(*paper, strict=True),
            STYLES["paper"][1],
            color=color("paper"),
            markersize=10,
            label="paper, over oracle",
        )
        ax.set_title(_NAMES[kind], fontsize=9)
        ax.set_xticks(sizes)
        times(ax, (1, 2, 3, 5, 10, 20, 30))
        label_axes(ax, "sequences a request", "paged / baseline (times)")
        legend(ax)
    return figure


def _shared(rows: list[Row]) -> Figure:
    figure, axes = canvas("F15  blocks saved by sharing (OPT-13B)", 1, 2, (10, 4))
    for ax, workload in zip(axes[0], ("alpaca", "sharegpt"), strict=True):
        some = [row for row in rows if row["workload"] == workload]
        names = [f"{row['kind']} {row['size']}" for row in some]
        shades = [color(row["kind"]) for row in some]
        bars(ax, names, [row["paper"] for row in some], [row["ours"] for row in some], shades)
        demo = [(i + 0.2, row["demo"]) for i, row in enumerate(some) if row["demo"] is not None]
        if demo:
            ax.plot(*zip(*demo, strict=True), "D", color="white", markeredgecolor="black", label="the demo model")
            legend(ax)
        ax.set_title(_NAMES[workload], fontsize=9)
        label_axes(ax, "", "blocks saved (%)")
    return figure


def _prefix(rows: list[Row]) -> Figure:
    figure, axes = canvas(
        "F16  rate over reserve-oracle's with a shared prefix (LLaMA-13B, translation)", 1, 2, (10, 4)
    )
    for ax, shots in zip(axes[0], (1, 5), strict=True):
        some = [row for row in rows if row["shots"] == shots]
        names = ["oracle", "paged", "shared", "jpaged"]
        shades = [color(name) for name in names]
        shown = ["oracle", "paged,\nnothing shared", "paged,\nprefix shared", "jpaged"]
        bars(ax, shown, [row["paper"] for row in some], [row["over_oracle"] for row in some], shades)
        ax.set_title(f"prefix of {some[0]['prefix_tokens']} tokens", fontsize=9)
        label_axes(ax, "", "requests/s, relative to oracle (times)")
    return figure


def _chatbot(rows: list[Row]) -> Figure:
    figure, axes = canvas("F17  paged memory's rate over each baseline's, as a chatbot (OPT-13B)")
    ax, name = axes[0, 0], "paged_over_it"
    some = [row for row in rows if row[name] is not None]
    names = [SYSTEMS[row["system"]] for row in some]
    ours, tops = ([row[column] for row in some] for column in (name, f"{name}_high"))
    bars(ax, names, [row["paper"] for row in some], ours, [color(one) for one in names], tops)
    whiskers(ax, [i + 0.2 for i in range(len(some))], some, name)
    ax.set_ylim(0, 2.6)
    label_axes(ax, "", "paged / baseline (times)")
    return figure


def _kernel(rows: list[Row]) -> Figure:
    figure, axes = canvas("F18a  what attention over blocks of 16 costs more than over contiguous memory")
    ax = axes[0, 0]
    batches = sorted({row["num_rows"] for row in rows})
    contexts = sorted({row["context"] for row in rows})
    for num_rows, place, hatch in zip(batches, (-0.2, 0.2), ("", ".."), strict=True):
        more = [row["more_percent"] for row in rows if row["num_rows"] == num_rows]
        places = [i + place for i in range(len(contexts))]
        label = f"ours, {num_rows} sequences (C++ kernel, OPT-13B's heads, one core)"
        held = ax.bar(places, more, 0.38, color=color("paged"), hatch=hatch, edgecolor="white", label=label)
        ax.bar_label(held, fmt="%.1f", fontsize=SMALL)
    span = ax.axhspan(20, 26, facecolor="white", edgecolor=color("paper"), hatch="//", label="paper (A100), 20 to 26")
    span.set_zorder(0)
    ax.set_xticks(range(len(contexts)), [str(context) for context in contexts])
    ax.set_ylim(0, 30)
    label_axes(ax, "context (tokens)", "added latency (%)")
    ax.legend(fontsize=SMALL, frameon=False, loc="center left")
    return figure


def _block_size(rows: list[Row]) -> Figure:
    title = "F18b  latency by block size, at 0.7 of what blocks of 16 sustain (OPT-13B)"
    series = {name: (f"{name}_latency_s", _NAMES[name]) for name in ("sharegpt", "alpaca")}
    figure = _by_block_size(title, "normalized latency (s/token)", rows, series)
    _mark_of_paper(figure.axes[0], 16, 128, 0.97, "sharegpt", "paper: best on ShareGPT")
    _mark_of_paper(figure.axes[0], 16, 32, 0.92, "alpaca", "paper: best on Alpaca")
    return figure


def _preemption_cost(rows: list[Row]) -> Figure:
    series = {"swap": ("swap_both_ms", "swap out and in"), "recompute": ("recompute_ms", "recompute")}
    return _by_block_size("F19a  preempting a sequence of 500 tokens (OPT-13B)", "time (ms)", rows, series)


def _preemption_latency(rows: list[Row]) -> Figure:
    title = "F19b  latency by preemption, pool of 8000 slots (OPT-13B, ShareGPT)"
    series = {name: (f"{name}_latency_s", name) for name in ("swap", "recompute")}
    figure = _by_block_size(title, "normalized latency (s/token)", rows, series)
    _mark_of_paper(figure.axes[0], 16, 64, 0.95, "paper", "paper: both alike")
    return figure


def _mark_of_paper(ax: Axes, first: int, last: int, height: float, name: str, label: str) -> None:
    """A bar over the block sizes that the paper's text names."""
    shade = color(name)
    place = ax.get_ylim()[1] * height
    ax.plot([first, last], [place, place], color=shade, linewidth=5, alpha=0.35, solid_capstyle="butt", label=label)
    _legend_beside(ax)


def _legend_beside(ax: Axes) -> None:
    legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _by_block_size(title: str, unit: str, rows: list[Row], series: dict[str, tuple[str, str]]) -> Figure:
    """Lines by block size; they leave the picture where a queue grew."""
    figure, axes = canvas(title)
    ax = axes[0, 0]
    sizes = [row["block_size"] for row in rows]
    tops: list[float] = [
        row[f"{column}_high" if f"{column}_high" in row else column]
        for name, (column, _) in series.items()
        for row in rows
        if not row.get(f"{name}_growing")
    ]
    ax.set_ylim(0, 1.25 * max(tops))
    for i, (name, (column, label)) in enumerate(series.items()):
        shade, mark = STYLES[name]
        places = [size * 1.06**i for size in sizes]
        ax.plot(places, [row[column] for row in rows], color=shade, marker=mark, label=label)
        if f"{column}_low" in rows[0]:
            whiskers(ax, places, rows, column)
        for row in rows:
            if row.get(f"{name}_growing"):
                left = row["block_size"] < 32
                place = (row["block_size"] * (1.1 if left else 0.8), ax.get_ylim()[1] * (0.18 - 0.08 * i))
                text = f"{label}: the queue grew\nfor {row[f'{name}_growing']} of 3 seeds"
                side = "left" if left else "right"
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                ax.annotate(text, place, color=shade, fontsize=SMALL, ha=side, va="top", bbox=box)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    label_axes(ax, "block size (tokens)", unit)
    _legend_beside(ax)
    return figure


_PICTURES: dict[str, Callable[[list[Row]], Figure]] = {
    "f02_pool_shares": _pool_shares,
    "f11_lengths": _lengths,
    "f12_sustained": _sustained,
    "f12_latency": _latency,
    "f13_batched_requests": _batched,
    "f14_several_sequences": _several,
    "f15_shared_blocks": _shared,
    "f16_shared_prefix": _prefix,
    "f17_chatbot": _chatbot,
    "f18a_kernel": _kernel,
    "f18_block_size": _block_size,
    "f19a_preemption_cost": _preemption_cost,
    "f19b_preemption_latency": _preemption_latency,
}
