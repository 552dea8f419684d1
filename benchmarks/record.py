"""A measurement's record: what was measured, on which machine, with which versions, as JSON beside the code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from jpaged import json_text
from jpaged.bench.results import machine

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

__all__ = ["PAGE", "RESULTS", "machine", "put_on_page", "save"]


def save(name: str, command: str, results: Mapping[str, object]) -> Path:
    """Writes results/<name>.json and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    when = time.strftime("%Y-%m-%d", time.gmtime())
    record = {"command": command, "date": when, "machine": machine(), **results}
    path.write_text(json_text.dumps(record, indent=2) + "\n")
    return path


def put_on_page(texts: Mapping[str, str]) -> None:
    """Writes each text between its marks in docs/performance.md: `<!-- name: begin -->` and `<!-- name: end -->`."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in texts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(page, encoding="utf-8")
