"""What a benchmark writes: vLLM's keys, and the machine, versions and workload that they were measured with."""

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
    """`version=1 tp=2` -> a dictionary.

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
    """What every result begins with."""
    date = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return {"benchmark": benchmark, "date": date, "seed": seed, "machine": machine()}


def workload(options: DatasetOptions) -> dict[str, Any]:
    """The fields of a data set that shape its requests: two runs with the same ones sent the same."""
    prefix = _PREFIXES[options.dataset_name]
    others = tuple(other for other in _PREFIXES.values() if other != prefix)
    fields = {name: value for name, value in asdict(options).items() if not name.startswith(others)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


def rate_word(rate: float) -> float | str:
    """A rate as JSON has it."""
    return "inf" if math.isinf(rate) else rate


def speed_word(arrivals: Arrivals) -> str:
    """How requests arrive, as a part of a file's name."""
    if (ramp := arrivals.ramp) is None:
        return f"{arrivals.rate}qps"
    return f"ramp-up-{ramp.strategy}-{ramp.start_rps:g}qps-{ramp.end_rps:g}qps"


def result_path(
    folder: Path | None, filename: str | None, *, label: str, speed: str, max_concurrency: int | None, model: str
) -> Path:
    """Where `--save-result` writes: `filename`, else a name of label, speed, concurrency, model and time, as vLLM's."""
    if filename is None:
        concurrency = "" if max_concurrency is None else f"-concurrency{max_concurrency}"
        name = re.sub(r"[^\w.-]", "_", Path(model).name or "model")
        filename = f"{label}-{speed}{concurrency}-{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return (folder or Path()) / filename


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result as JSON; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text.dumps(dict(result), indent=2) + "\n")
