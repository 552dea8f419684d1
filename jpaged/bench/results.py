"""Result files: vLLM's keys, and the machine, versions and workload."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jpaged import json_text
from jpaged.bench.arrivals import Arrivals
from jpaged.bench.datasets import DatasetOptions
from jpaged.bench.machine import machine
from jpaged.errors import InvalidArgument

_PREFIXES = {
    "random": "random_",
    "prefix_repetition": "prefix_repetition_",
    "sharegpt": "sharegpt_",
    "custom": "custom_",
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


def speed_word(arrivals: Arrivals) -> str:
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
