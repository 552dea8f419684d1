"""Counts the attention kernels' cycles for TPUs that are not here: `python -m benchmarks.tpu_cycles`.

make aot && python -m benchmarks.tpu_cycles [--libtpu PATH] [--experts] [--only PART_OF_A_CASE] [--record]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.record import put_on_page
from benchmarks.tpu_cycles import experts, recorded
from benchmarks.tpu_cycles.cases import gate, table
from benchmarks.tpu_cycles.counting import counted, version
from benchmarks.tpu_cycles.table import decode_table, page_tables, prefill_table
from jpaged.device.aot.topology import find_library


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu_cycles", description="Count the cycles of the TPU attention kernels."
    )
    parser.add_argument("--libtpu", type=Path, help="the libtpu.so that compiles (default: that of `make aot`)")
    parser.add_argument("--only", default="", help="count the cases that contain this, as v6e/decode/8x4x128/")
    parser.add_argument("--gate", action="store_true", help="count the cases that the test holds, and no others")
    parser.add_argument("--experts", action="store_true", help="count the kernel of experts instead")
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the numbers, those of the pinned libtpu for plans too, and write the tables of docs/performance.md",
    )
    chosen = parser.parse_args()
    libtpu = find_library(chosen.libtpu)
    if chosen.experts:
        count_experts(libtpu, chosen.only, is_recorded=chosen.record)
        return
    cases = [case for case in (gate() if chosen.gate else table()) if chosen.only in str(case)]
    if not cases:
        parser.error(f"no case contains {chosen.only!r}; they are written as {next(iter(table()))}")
    console, numbers = Console(width=None if sys.stdout.isatty() else 160), []
    for one in counted(cases, libtpu):
        numbers.append(one)
        console.print(f"{len(numbers)} of {len(cases)}: {one['case']}", markup=False, highlight=False)
        if chosen.record:
            recorded.record(version(libtpu), [one])
    if chosen.record and chosen.libtpu is None:
        recorded.record_for_plans(list(recorded.read()[version(libtpu)].values()))
    if chosen.record:
        pinned = version(find_library(None))
        put_on_page({"cycles": page_tables(recorded.read(recorded.BEFORE), recorded.read(), pinned)})
    console.print(decode_table(numbers, version(libtpu)))
    console.print(prefill_table(numbers, version(libtpu)))


def count_experts(libtpu: Path, only: str, *, is_recorded: bool) -> None:
    found = []
    for one in counted([case for case in experts.gate() if only in str(case)], libtpu):
        found.append(one)
        if is_recorded:
            recorded.record(version(libtpu), [one], recorded.EXPERTS)
    sys.stdout.write(experts.experts_table({one["case"]: one for one in found}) + "\n")
    if is_recorded:
        table = experts.experts_table(recorded.read(recorded.EXPERTS)[version(find_library(None))])
        put_on_page({experts.KIND: table})


if __name__ == "__main__":
    main()
