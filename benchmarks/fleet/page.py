"""The tables of docs/performance.md that `python -m benchmarks.fleet` writes."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

_COLUMNS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "routers": (
        ("goodput, requests/s", "goodput_requests_per_s"),
        ("good", "good_percent"),
        ("TTFT p50 / p90 / p99, ms", "ttft"),
        ("ITL p50 / p90 / p99, ms", "itl"),
        ("hits", "prefix_hit_percent"),
        ("busiest over mean", "busiest_over_mean"),
    ),
    "failures": (
        ("good", "good_percent"),
        ("TTFT p50 / p90 / p99, ms", "ttft"),
        ("turns cut off", "num_turns_cut"),
        ("tokens computed again", "tokens_computed_again"),
        ("standstill, mean and most, s", "standstill"),
        ("good of those cut off", "good_of_cut_percent"),
        ("hits", "prefix_hit_percent"),
    ),
    "money": (
        ("goodput, requests/s", "goodput_requests_per_s"),
        ("good", "good_percent"),
        ("TTFT p50 / p90 / p99, ms", "ttft"),
        ("ITL p50 / p90 / p99, ms", "itl"),
        ("busy", "busy_percent"),
        ("replica hours", "replica_hours"),
        ("USD a million tokens", "usd_per_million_tokens"),
        ("of good turns alone", "usd_per_million_good_tokens"),
    ),
}
_KINDS = {"routers": "routers", "busy": "routers", "failures": "failures", "mixes": "money", "autoscaling": "money"}
_SIDES = ("real", "simulated", "apart_percent")


def page_texts(record: Mapping[str, Any]) -> dict[str, str]:
    """Each table, and its picture, by the name of its marks."""
    texts = {}
    for name in (*_KINDS, "check"):
        if name not in record:
            texts[f"fleet-{name}"] = f"Not recorded yet: `python -m benchmarks.fleet {name}`."
        elif name == "check":
            texts["fleet-check"] = _check(record[name])
        else:
            picture = f"[Drawn over the day](../benchmarks/results/fleet_{name}.png)."
            texts[f"fleet-{name}"] = f"{_table(record[name], _COLUMNS[_KINDS[name]])}\n\n{picture}"
    return texts


def _table(runs: Mapping[str, Any], columns: tuple[tuple[str, str], ...]) -> str:
    lines = ["| | " + " | ".join(title for title, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, run in runs.items():
        lines.append(f"| {label} | " + " | ".join(_cell(run, key) for _, key in columns) + " |")
    return "\n".join(lines)


def _cell(run: Mapping[str, Any], key: str) -> str:
    interruptions = run["interruptions"]
    if key in ("ttft", "itl"):
        return " / ".join(f"{run[f'{key}_p{percent}_ms']:.1f}" for percent in (50, 90, 99))
    if key == "standstill":
        return f"{interruptions['mean_standstill_s']:.2f}, {interruptions['max_standstill_s']:.2f}"
    value = run[key] if key in run else interruptions[key]
    if value is None:
        return "-"
    if key.endswith("percent"):
        return f"{value:.1f}%"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def _check(runs: Mapping[str, Any]) -> str:
    names = {
        "requests_per_s": "requests/s",
        "tokens_per_s": "tokens/s",
        "ttft_mean_ms": "TTFT mean, ms",
        "ttft_p90_ms": "TTFT p90, ms",
        "itl_mean_ms": "ITL mean, ms",
        "itl_p90_ms": "ITL p90, ms",
        "hit_percent": "hits, %",
    }
    lines = ["| replicas | | processes | simulated | apart | least and most |", "|---" * 6 + "|"]
    for label, check in runs.items():
        for key, name in names.items():
            real, ours, apart = ([day[side][key] for day in check["days"]] for side in _SIDES)
            cells = (
                f"{mean(real):.2f} | {mean(ours):.2f} | {mean(apart):+.1f}% | {min(apart):+.1f}%, {max(apart):+.1f}%"
            )
            lines.append(f"| {label} | {name} | {cells} |")
    return "\n".join(lines)
