"""A measurement's record: what was measured, on which machine, with which versions, as JSON beside the code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from jpaged import json_text
from jpaged.bench.machine import machine

RESULTS = Path(__file__).parent / "results"

__all__ = ["RESULTS", "machine", "save"]


def save(name: str, command: str, results: Mapping[str, object]) -> Path:
    """Writes results/<name>.json and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    when = time.strftime("%Y-%m-%d", time.gmtime())
    record = {"command": command, "date": when, "machine": machine(), **results}
    path.write_text(json_text.dumps(record, indent=2) + "\n")
    return path
