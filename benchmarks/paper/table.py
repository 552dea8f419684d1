"""A result as a table: the paper's number beside ours, as CSV, as JSON and on the terminal."""

from __future__ import annotations

import csv
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import jpaged
from jpaged import json_text

RESULTS = Path(__file__).parent / "results"

Cell = str | float | int | None


@dataclass(slots=True)
class Table:
    """One table of results; every row has the same columns.

    Attributes:
        name: of its files, "f12_sustained".
        title: what it shows.
        notes: where ours differs from the paper's, and why.
        settings: what it takes to make it again.
    """

    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    settings: Mapping[str, Cell] = field(default_factory=dict)
    rows: list[dict[str, Cell]] = field(default_factory=list)

    def add(self, **cells: Cell) -> None:
        """Adds a row: ours to four digits, the paper's numbers as it prints them."""
        self.rows.append({name: cell if name.startswith("paper") else _rounded(cell) for name, cell in cells.items()})

    def save(self, folder: Path = RESULTS) -> None:
        """Writes <name>.csv and <name>.json."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        versions = {"jpaged": jpaged.__version__, "python": platform.python_version(), "numpy": version("numpy")}
        record = {
            "title": self.title,
            "settings": self.settings,
            "versions": versions,
            "notes": self.notes,
            "rows": self.rows,
        }
        (folder / f"{self.name}.json").write_text(json_text.dumps(record, indent=2) + "\n")

    def __str__(self) -> str:
        columns = list(self.rows[0])
        cells = [columns, *([_text(row[column]) for column in columns] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([self.title, *(f"  {line.rstrip()}" for line in lines), *(f"  * {n}" for n in self.notes)])


def _rounded(cell: Cell) -> Cell:
    return float(f"{cell:.4g}") if isinstance(cell, float) else cell


def _text(cell: Cell) -> str:
    return "-" if cell is None else str(cell)
