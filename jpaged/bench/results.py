"""Result files: vLLM's keys, and the machine, versions and workload; comparison of two files, and plots of a sweep.

A comparison shows the ratio of every common metric, and differences in conditions. Files are those of `jpaged bench`
and of vLLM's benchmarks, which have the same keys. A file with several runs (a sweep of rates) is compared run by run,
at the common rates. Plots show latencies and throughput against the request rate.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jpaged import json_text
from jpaged.bench.datasets import DatasetOptions
from jpaged.bench.load_generator import ArrivalProcess
from jpaged.bench.metrics import LATENCIES
from jpaged.errors import InvalidArgument
from jpaged.version import __version__

_LIBRARIES = ("numpy", "jax", "jaxlib", "grpcio", "httpx2")


def machine() -> dict[str, object]:
    """Return what the numbers depend on except the code; `usable_cpus` are those that this process may run on."""
    return {
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jpaged": __version__,
        **{name: text for name in _LIBRARIES if (text := _version(name))},
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


_PREFIXES = {
    "random": "random_",
    "prefix_repetition": "prefix_repetition_",
    "sharegpt": "sharegpt_",
    "custom": "custom_",
    "multi_turn": "multi_turn_",
    "trace": "trace_",
}


def parse_metadata(words: Sequence[str]) -> dict[str, str]:
    """Parse `version=1 tp=2` into a dictionary.

    Raises:
        InvalidArgument: a word has no `=`.
    """
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise InvalidArgument("--metadata", f"{word!r} is not KEY=VALUE")
        found[key] = value
    return found


def header(benchmark: str, seed: int) -> dict[str, Any]:
    """Return the first fields of every result."""
    date = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return {"benchmark": benchmark, "date": date, "seed": seed, "machine": machine()}


def workload(options: DatasetOptions) -> dict[str, Any]:
    """Return the options that determine a data set's requests: equal ones mean equal requests."""
    prefix = _PREFIXES[options.dataset_name]
    others = tuple(other for other in _PREFIXES.values() if other != prefix)
    fields = {name: value for name, value in asdict(options).items() if not name.startswith(others)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


def rate_word(rate: float) -> float | str:
    """Return a rate as JSON stores it."""
    return "inf" if math.isinf(rate) else rate


def speed_word(arrivals: ArrivalProcess) -> str:
    """Return the arrival process as a part of a file name."""
    if (ramp := arrivals.ramp) is None:
        return f"{arrivals.rate}qps"
    return f"ramp-up-{ramp.strategy}-{ramp.start_rps:g}qps-{ramp.end_rps:g}qps"


def result_path(
    folder: Path | None, filename: str | None, *, label: str, speed: str, max_concurrency: int | None, model: str
) -> Path:
    """Return the path for `--save-result`: `filename`, or label, speed, concurrency, model and time, as in vLLM."""
    if filename is None:
        concurrency = "" if max_concurrency is None else f"-concurrency{max_concurrency}"
        name = re.sub(r"[^\w.-]", "_", Path(model).name or "model")
        filename = f"{label}-{speed}{concurrency}-{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return (folder or Path()) / filename


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON; the folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text.dumps(dict(result), indent=2) + "\n")


# For these metrics greater is better; for times and seconds it is worse.
_RATES = ("_throughput", "_per_second", "_goodput", "_per_s", "mbu", "mfu", "share_of_limit", "cached_share")
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
class RunComparison:
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


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> RunComparison:
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
    return RunComparison(tuple(ratios), tuple(differences))


def get_runs(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
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
            f"a plot requires matplotlib: pip install 'jpaged[bench]' ({error})",
        ) from error
    if path.suffix not in _FORMATS:
        raise InvalidArgument("--plot", f"{path} does not end with one of {', '.join(_FORMATS)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidArgument("--plot", f"{path} is a folder, or in none")


def draw(series: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str) -> None:
    """Write one panel for each latency, and one for output tokens per second.

    Runs with turns get a row of panels below: time to first token, cached share and computed tokens of each turn.

    Args:
        series: runs of each curve, by its name in the legend.
        path: .png (160 dpi), .svg or .pdf.
        title: title above all panels.
    """
    from matplotlib.figure import Figure

    runs = [run for curve in series.values() for run in curve]
    names = [name for name in LATENCIES if any(f"median_{name}_ms" in run for run in runs)]
    panels = {key: word for key, word in _TURN_PANELS.items() if any(key in row for row in _turns(runs))}
    num_rows = 2 if panels else 1
    figure = Figure(figsize=(4.6 * (len(names) + 1), 4.2 * num_rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes, *below = figure.subplots(num_rows, max(len(names) + 1, len(panels)), squeeze=False)
    for ax in axes[len(names) + 1 :]:
        ax.remove()
    axes = axes[: len(names) + 1]
    if panels:
        _draw_turns(series, panels, below[0])
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


_TURN_PANELS: Mapping[str, str] = {
    "median_ttft_ms": "median TTFT, ms",
    "cached_share": "cached share of the prompt",
    "mean_computed_tokens": "computed tokens",
}


def _turns(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for run in runs for row in run.get("turns") or []]


def _draw_turns(series: Mapping[str, Sequence[Mapping[str, Any]]], panels: Mapping[str, str], axes: Any) -> None:
    """Draw each quantity of `panels` over the turns, a curve for each run."""
    for ax, (key, words) in zip(axes, panels.items(), strict=False):
        for label, curve in series.items():
            for run in curve:
                rows = [row for row in run.get("turns") or [] if key in row]
                shown = f"{run['request_rate']} requests/s" if len(series) == 1 else f"{label}, {run['request_rate']}/s"
                ax.plot(
                    [row["turn"] for row in rows], [row[key] for row in rows], marker="o", markersize=3, label=shown
                )
        ax.set_ylabel(words)
        ax.set_xlabel("turn")
        ax.set_ylim(bottom=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, frameon=False)
    for ax in axes[len(panels) :]:
        ax.remove()


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
