"""Deviations of a run from the plan's estimates, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_contact import estimates, summary
from benchmarks.first_contact.driver import CELLS
from jpaged.hardware import Hardware


def compare(folder: Path) -> int:
    """Print measured and estimated values of a run; return 1 if the device is not in the table of `jpaged plan`."""
    lines = summary.read(folder / CELLS)
    device = summary.cells_of(lines, "device").get("devices", {})
    hardware = estimates.find(device.get("hardware"))
    if hardware is None:
        print(f"{device.get('kind', 'the device')} is not in the table of jpaged plan: there are no estimates")
        return 1
    print(f"{device['kind']}, estimates for {hardware.name}")
    print("\n".join(table(deviations(lines, hardware))))
    return 0


def deviations(lines: Sequence[Mapping[str, Any]], hardware: Hardware) -> Iterator[tuple[str, str, float, float]]:
    """Yield (cell, name, measured, estimated) for every value that the plan estimates."""
    for check in dict.fromkeys(line["check"] for line in lines if "check" in line):
        for name, cell in summary.cells_of(lines, check).items():
            for value, measured, estimated in estimates.estimate_of(cell, hardware):
                yield f"{check}, {name}", value, measured, estimated


def table(rows: Iterator[tuple[str, str, float, float]]) -> list[str]:
    """Return one line per value; the last column is measured over estimated, less 1."""
    found = [f"{'cell':<34} {'value':<20} {'measured':>11} {'estimated':>11} {'deviation':>9}"]
    for cell, name, measured, estimated in rows:
        found.append(f"{cell:<34} {name:<20} {measured:>11.4g} {estimated:>11.4g} {measured / estimated - 1:>+9.0%}")
    return found
