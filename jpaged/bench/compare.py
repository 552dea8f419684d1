"""Comparison of two result files: the ratio of every common metric, and differences in conditions.

Files are those of `jpaged bench` and of vLLM's benchmarks, which have the same keys. A file with several runs (a sweep
of rates) is compared run by run, at the common rates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.errors import InvalidArgument

# For these metrics greater is better; for times and seconds it is worse.
_RATES = ("_throughput", "_per_second", "_goodput", "_per_s", "mbu", "mfu", "share_of_limit")
_TIMES = ("_ms", "duration", "elapsed_time", "avg_latency", "std_latency", "_time")
_COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "total_num_tokens", "num_requests")
_CONDITIONS = (
    "benchmark",
    "model_id",
    "dtype",
    "seed",
    "num_prompts",
    "burstiness",
    "max_concurrency",
    "ramp_up_strategy",
    "ramp_up_start_rps",
    "ramp_up_end_rps",
    "batch_size",
    "input_len",
    "output_len",
    "n",
)
_MACHINE = ("processor", "usable_cpus", "system")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One metric of two runs.

    Attributes:
        is_better: True if B is better; None if they are equal, or if the metric has no better direction.
    """

    rate: str
    metric: str
    a: float
    b: float
    is_better: bool | None

    @property
    def ratio(self) -> float | None:
        """Return B over A; None if A is 0."""
        return self.b / self.a if self.a else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All metrics of two files.

    Attributes:
        differences: reasons why the two are not comparable, a sentence each.
    """

    ratios: tuple[Ratio, ...]
    differences: tuple[str, ...]


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        InvalidArgument: it cannot be read, or is not a result.
    """
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument("FILE", f"{path} cannot be read: {error}") from error
    if not isinstance(result, dict):
        raise InvalidArgument("FILE", f"{path} is not a result: no JSON object")
    if not any(_metrics(run) for run in _runs(result).values()):
        raise InvalidArgument("FILE", f"{path} is not a result: it has no metric")
    return result


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare two results."""
    runs_a, runs_b = _runs(a), _runs(b)
    differences = _differences(a, b)
    rates = [rate for rate in runs_a if rate in runs_b]
    if len(runs_a) == len(runs_b) == 1 and not rates:
        (rate_a,), (rate_b,) = runs_a, runs_b
        differences.append(f"request_rate: {rate_a} and {rate_b}")
        runs_b, rates = {rate_a: runs_b[rate_b]}, [rate_a]
    only = [rate for rate in (*runs_a, *runs_b) if rate not in rates]
    if only:
        differences.append(f"request rates that one of them alone has: {', '.join(only)}")
    ratios = []
    for rate in rates:
        metrics_a, metrics_b = _metrics(runs_a[rate]), _metrics(runs_b[rate])
        for name in [name for name in metrics_a if name in metrics_b]:
            ratios.append(Ratio(rate, name, metrics_a[name], metrics_b[name], _better(name, metrics_a, metrics_b)))
        for name in _COUNTS:
            left, right = runs_a[rate].get(name), runs_b[rate].get(name)
            if left != right and None not in (left, right):
                differences.append(f"{name}{_at(rate)}: {left} and {right}")
    return Comparison(tuple(ratios), tuple(differences))


def runs_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs of a result that have a request rate."""
    return [run for rate, run in _runs(result).items() if rate]


def _runs(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the runs of a result by request rate; the key is empty if there is no rate."""
    runs = result.get("runs")
    several = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else [result]
    return {str(run.get("request_rate", "")): run for run in several}


def _metrics(run: Mapping[str, Any]) -> dict[str, float]:
    numbers = {
        name: float(value)
        for name, value in run.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name: value for name, value in numbers.items() if name.endswith((*_RATES, *_TIMES))}


def _better(name: str, a: Mapping[str, float], b: Mapping[str, float]) -> bool | None:
    if a[name] == b[name] or name.startswith(("std_", "limit_")):
        return None
    return (b[name] > a[name]) is name.endswith(_RATES)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the conditions in both results that differ. Different backends may name one model differently."""
    skipped = {"model_id"} if a.get("backend") != b.get("backend") else set()
    pairs = [(name, a.get(name), b.get(name)) for name in _CONDITIONS if name not in skipped]
    for section, names in (("workload", None), ("machine", _MACHINE)):
        left, right = a.get(section), b.get(section)
        if isinstance(left, dict) and isinstance(right, dict):
            both = [name for name in left if name in right and (names is None or name in names)]
            pairs += [(f"{section}.{name}", left[name], right[name]) for name in both]
    seen = {name for name, _, _ in pairs if "." not in name}
    return [
        f"{name}: {left} and {right}"
        for name, left, right in pairs
        if left != right and None not in (left, right) and name.removeprefix("workload.") not in seen - {name}
    ]


def _at(rate: str) -> str:
    return f" at {rate}/s" if rate else ""
