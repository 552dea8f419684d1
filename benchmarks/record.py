"""A measurement's record: what was measured, on which machine, with which versions, as JSON beside the code."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import jpaged
from jpaged import json_text

RESULTS = Path(__file__).parent / "results"
_LIBRARIES = ("numpy",)


def machine() -> dict[str, object]:
    """What the numbers depend on besides the code."""
    return {
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jpaged": jpaged.__version__,
        **{name: version(name) for name in _LIBRARIES},
    }


def save(name: str, command: str, results: Mapping[str, object]) -> Path:
    """Writes results/<name>.json and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    when = time.strftime("%Y-%m-%d", time.gmtime())
    record = {"command": command, "date": when, "machine": machine(), **results}
    path.write_text(json_text.dumps(record, indent=2) + "\n")
    return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
