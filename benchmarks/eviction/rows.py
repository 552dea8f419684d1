"""What was measured, as rows; their spread over seeds, and the tables of docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

BOUND = "bound"


def values(rows: Sequence[Row], trace: str, num_blocks: int, policy: str, name: str) -> list[float]:
    """A number of a policy, of each seed."""
    wanted = {"trace": trace, "num_blocks": num_blocks, "policy": policy}
    return [row[name] for row in rows if all(row[key] == value for key, value in wanted.items())]


def spread(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The mean, the least and the most."""
    return statistics.fmean(numbers), min(numbers), max(numbers)


def table(rows: Sequence[Row]) -> str:
    """Share of prefill seconds saved, by trace, pool and policy: the mean over seeds, and how far they are apart."""
    policies = _in_order(row["policy"] for row in rows)
    lines = [
        "| trace | blocks | " + " | ".join(policies) + " |",
        "|---|---|" + "---|" * len(policies),
    ]
    for trace in _in_order(row["trace"] for row in rows):
        for num_blocks in _in_order(row["num_blocks"] for row in rows if row["trace"] == trace):
            cells = [_cell(values(rows, trace, num_blocks, policy, "saved_share")) for policy in policies]
            lines.append(f"| {trace} | {num_blocks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def seconds_table(rows: Sequence[Row], costs: Mapping[str, float]) -> str:
    """Seconds of prefill that hits save on a device with these costs, by trace, pool and policy: means over seeds."""
    rows = [row for row in rows if "num_hit_blocks" in row]
    policies = _in_order(row["policy"] for row in rows)
    lines = ["| trace | blocks | " + " | ".join(policies) + " |", "|---|---|" + "---|" * len(policies)]
    for trace, num_blocks in _in_order((row["trace"], row["num_blocks"]) for row in rows):
        cells = []
        for policy in policies:
            blocks = values(rows, trace, num_blocks, policy, "num_hit_blocks")
            places = values(rows, trace, num_blocks, policy, "sum_of_places")
            saved = [n * costs["first_s"] + p * costs["further_s"] for n, p in zip(blocks, places, strict=True)]
            cells.append(f"{statistics.fmean(saved):.1f}" if saved else "")
        lines.append(f"| {trace} | {num_blocks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def decision_table(rows: Sequence[Row]) -> str:
    """Microseconds of decisions, by policy and pool."""
    lines = ["| policy | blocks | a block's turn, us | a choice, us | the longest, us |", "|---|---|---|---|---|"]
    for row in rows:
        numbers = [f"{row[name]:.1f}" for name in ("turn_us", "choice_us", "longest_us")]
        lines.append(f"| {row['policy']} | {row['num_blocks']} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def _cell(numbers: Sequence[float]) -> str:
    if not numbers:
        return ""
    mean, low, high = spread(numbers)
    return f"{100 * mean:.1f}" + (f" ± {50 * (high - low):.1f}" if len(numbers) > 1 else "")


def _in_order(names: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(names))


def gains(rows: Sequence[Row], policy: str) -> list[Row]:
    """By how much a policy saves more than least recently used does, in points, for each trace and pool."""
    found = []
    for trace, num_blocks in _in_order((row["trace"], row["num_blocks"]) for row in rows):
        ours = values(rows, trace, num_blocks, policy, "saved_share")
        lru = values(rows, trace, num_blocks, "lru", "saved_share")
        if ours and lru:
            points = [100 * (a - b) for a, b in zip(ours, lru, strict=True)]
            found.append(
                {"trace": trace, "num_blocks": num_blocks, "points": statistics.fmean(points), "least": min(points)}
            )
    return found
