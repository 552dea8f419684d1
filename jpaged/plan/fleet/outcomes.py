"""Results of a day: latencies, goodput under goals, cache hits, cost, the effect of failures, and plots of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.plan.fleet.day import QUARTERS, Day, Totals
from jpaged.plan.fleet.routing import Rule


@dataclass(frozen=True, slots=True)
class LatencyGoals:
    """Latency goals; a turn is good if it meets both.

    Attributes:
        ttft_s: from arrival to the first token.
        itl_s: mean time between two tokens of the answer.
    """

    ttft_s: float
    itl_s: float


class TurnEnd(NamedTuple):
    """Result of one turn, as seen by its client.

    Attributes:
        num_cached: tokens of the prompt that the first replica had cached.
        num_cut: number of replicas that stopped while it ran.
        num_again: tokens that were recomputed because of that.
        away_s: total time from these stops to the next token.
    """

    arrival_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    num_tokens: int
    num_cached: int
    num_cut: int
    num_again: int
    away_s: float
    session: int
    turn: int


class Moment(NamedTuple):
    """State of the fleet in a window that begins at `at_s`."""

    at_s: float
    num_ready: int
    num_starting: int
    num_waiting: int
    num_in_flight: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a whole day.

    Attributes:
        ends: every turn that began.
        lives: counters of the replicas of each place.
        elapsed_s: simulated time until the last turn ended.
        usd: price of all places while they were billed; None without prices.
        num_skipped: turns that would have started after the end of the day.
        wall_s, cpu_s: duration of the simulation.
    """

    day: Day
    rule: Rule
    ends: tuple[TurnEnd, ...]
    moments: tuple[Moment, ...]
    lives: tuple[Totals, ...]
    elapsed_s: float
    replica_hours: float
    usd: float | None
    num_failures: int
    num_drains: int
    num_skipped: int
    wall_s: float
    cpu_s: float

    @property
    def totals(self) -> Totals:
        """Sum of the counters of all replicas."""
        total = Totals()
        for one in self.lives:
            total = total.plus(one)
        return total


def ttft_s(ends: Sequence[TurnEnd]) -> NDArray[np.float64]:
    """Return the seconds to the first token of each turn."""
    return np.array([end.first_token_s - end.arrival_s for end in ends])


def itl_s(ends: Sequence[TurnEnd]) -> NDArray[np.float64]:
    """Return the mean seconds between two tokens of each turn; 0 for a single token."""
    return np.array([(end.end_s - end.first_token_s) / max(1, end.num_tokens - 1) for end in ends])


def are_good(ends: Sequence[TurnEnd], goals: LatencyGoals) -> NDArray[np.bool_]:
    """Return which turns meet both goals."""
    good: NDArray[np.bool_] = (ttft_s(ends) <= goals.ttft_s) & (itl_s(ends) <= goals.itl_s)
    return good


def summary(outcome: Outcome, goals: LatencyGoals) -> dict[str, Any]:
    """Return the numbers of a day; names contain their units. The duration of the simulation is not included."""
    ends, totals = outcome.ends, outcome.totals
    good = are_good(ends, goals)
    num_tokens, num_good_tokens = (
        sum(end.num_tokens for end in ends),
        sum(end.num_tokens for end, is_good in zip(ends, good, strict=True) if is_good),
    )
    busy_s = np.array([one.busy_s for one in outcome.lives])
    found: dict[str, Any] = {
        "router": outcome.rule,
        "num_turns": len(ends),
        "num_turns_beyond_the_day": outcome.num_skipped,
        "elapsed_s": outcome.elapsed_s,
        "requests_per_s": len(ends) / outcome.elapsed_s,
        "output_tokens_per_s": num_tokens / outcome.elapsed_s,
        "good_percent": 100 * float(good.mean()) if ends else 0.0,
        "goodput_requests_per_s": int(good.sum()) / outcome.elapsed_s,
        **_spread("ttft", ttft_s(ends)),
        **_spread("itl", itl_s(ends)),
        "prefix_hit_percent": 100 * totals.num_prefix_hit_tokens / max(1, totals.num_prefix_query_tokens),
        "host_hit_percent": 100 * totals.num_host_hit_tokens / max(1, totals.num_prefix_query_tokens),
        "preemptions": totals.num_preemptions,
        "busy_percent": 100 * float(busy_s.sum()) / max(1e-9, 3600 * outcome.replica_hours),
        "busiest_over_mean": float(busy_s.max() / busy_s.mean()) if busy_s.any() else 0.0,
        "replica_hours": outcome.replica_hours,
        "usd": outcome.usd,
        "usd_per_million_tokens": _per_million(outcome.usd, num_tokens),
        "usd_per_million_good_tokens": _per_million(outcome.usd, num_good_tokens),
        "num_steps": totals.num_steps,
        "num_output_tokens": num_tokens,
    }
    return found | {"interruptions": interruptions(outcome, good)}


def interruptions(outcome: Outcome, good: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the effects of failures and drains: turns that were cut, recomputed tokens, and interruption times."""
    cut = np.array([end.num_cut > 0 for end in outcome.ends], np.bool_)
    away_s = np.array([end.away_s for end in outcome.ends if end.num_cut])
    return {
        "num_failures": outcome.num_failures,
        "num_drains": outcome.num_drains,
        "num_turns_cut": int(cut.sum()),
        "tokens_computed_again": sum(end.num_again for end in outcome.ends),
        "mean_standstill_s": float(away_s.mean()) if away_s.size else 0.0,
        "max_standstill_s": float(away_s.max()) if away_s.size else 0.0,
        "good_of_cut_percent": 100 * float(good[cut].mean()) if cut.any() else None,
        "good_of_others_percent": 100 * float(good[~cut].mean()) if (~cut).any() else None,
    }


def curve(outcome: Outcome, goals: LatencyGoals) -> dict[str, list[float]]:
    """Return series per quarter of an hour: turn rates by arrival time, and means of the fleet's state."""
    width_s = outcome.day.seconds / QUARTERS
    count = max(QUARTERS, int(outcome.moments[-1].at_s / width_s) + 1)
    quarters = np.array([int(end.arrival_s / width_s) for end in outcome.ends], np.int64)
    good = are_good(outcome.ends, goals)
    moments = np.array(outcome.moments, np.float64).reshape(-1, len(Moment._fields))
    places = (moments[:, 0] / width_s).astype(np.int64)
    weights = np.bincount(places, minlength=count)
    last = np.maximum(0, np.searchsorted(places, np.arange(count), side="right") - 1)

    def mean(column: int) -> list[float]:
        sums = np.bincount(places, moments[:, column], count)
        # A quarter in which no window begins gets the values of the window that covers it.
        return np.where(weights > 0, sums / np.maximum(1, weights), moments[last, column]).tolist()

    arrived = np.bincount(quarters, minlength=count)
    return {
        "hour": [24 * quarter / QUARTERS for quarter in range(count)],
        "arrived_per_s": (arrived / width_s).tolist(),
        "good_per_s": (np.bincount(quarters[good], minlength=count) / width_s).tolist(),
        "ready": mean(1),
        "starting": mean(2),
        "waiting": mean(3),
        "in_flight": mean(4),
    }


def _spread(name: str, values_s: NDArray[np.float64]) -> dict[str, float]:
    if not values_s.size:
        return {}
    percentiles = {f"{name}_p{p}_ms": 1e3 * float(np.percentile(values_s, p)) for p in (50, 90, 99)}
    return {f"{name}_mean_ms": 1e3 * float(values_s.mean()), **percentiles}


def _per_million(usd: float | None, num_tokens: int) -> float | None:
    return None if usd is None or not num_tokens else usd / num_tokens * 1e6


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
