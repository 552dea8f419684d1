"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first_contact import driver
from benchmarks.first_contact.checks import CHECKS

DESCRIPTION = """\
Run the first checks on an accelerator, in one command that ends in time and keeps its results.

    python -m benchmarks.first_contact --pack first-contact       with a network: source and missing packages
    cd first-contact && PYTHONPATH=$PWD:$PWD/site python3 -m benchmarks.first_contact --out "$OUT" --seconds 460
    python -m benchmarks.first_contact --compare DIR              deviations from the plan's estimates
    python -m benchmarks.first_contact --out DIR --platform cpu   a rehearsal with tiny sizes

Exit code 1: a check did not end, a number was wrong, or a cell is missing; summary.txt lists them.
"""
_MIN_SECONDS = 30.0
_TINY_PATIENCE = 20
"""Factor of the limits of tiny sizes, which rehearse on machines that may be busy."""
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_contact",
        description=DESCRIPTION,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="run the checks, and write the results to this folder")
    what.add_argument("--pack", type=Path, metavar="DIR", help="write source and packages for another machine")
    what.add_argument("--compare", type=Path, metavar="DIR", help="compare results with the plan's estimates")
    parser.add_argument("--seconds", type=float, default=460.0, metavar="S", help="time of the run (default: 460)")
    parser.add_argument("--platform", choices=_PLATFORMS, help="platform of the devices (default: jax chooses)")
    parser.add_argument(
        "--size", choices=("full", "tiny"), help="sizes of the cells (default: tiny with --platform cpu, else full)"
    )
    parser.add_argument("--checks", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.compare is not None:
        from benchmarks.first_contact.compare import compare

        return compare(arguments.compare)
    if arguments.pack is not None:
        from benchmarks.first_contact.pack import pack

        return pack(arguments.pack)
    if not arguments.seconds >= _MIN_SECONDS:
        parser.error(f"--seconds {arguments.seconds:g} is below the minimum of {_MIN_SECONDS:g}")
    names = [check.name for check in CHECKS]
    for name in arguments.checks or ():
        if name not in names:
            parser.error(f"--checks: {name!r} is not one of {', '.join(names)}")
    size = arguments.size or ("tiny" if arguments.platform == "cpu" else "full")
    chosen = [check for check in CHECKS if check.name in (arguments.checks or names)]
    if size == "tiny":
        chosen = [dataclasses.replace(check, limit_s=check.limit_s * _TINY_PATIENCE) for check in chosen]
    settings = driver.Settings(arguments.out, arguments.seconds, size, _PLATFORMS.get(arguments.platform))
    return driver.run(chosen, settings)


if __name__ == "__main__":
    sys.exit(main())
