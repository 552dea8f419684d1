"""The process of one check: `python -m benchmarks.first_contact.child`, started by the driver.

A stack of all threads is printed before the limit and after a crash. The process ends without waiting for threads that
still compile.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks.first_contact.cells import MAX_COMPILING, Cells

_STACK_S = 1.0
"""Seconds before the limit at which the stacks are printed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_contact.child", description="Run one check.")
    parser.add_argument("--target", required=True, help="module:function of the check")
    parser.add_argument("--name", required=True, help="name of the check")
    parser.add_argument("--cells", type=Path, required=True, help="file to append lines to")
    parser.add_argument("--limit", type=float, required=True, help="seconds until the process is killed")
    parser.add_argument("--size", choices=("full", "tiny"), required=True, help="sizes of the cells")
    parser.add_argument("--skip", default=[], type=json.loads, help="cells not to run, as JSON")
    parser.add_argument("--threads", type=int, default=MAX_COMPILING, help="programs that compile at once")
    arguments = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, arguments.limit - _STACK_S))
    module, _, function = arguments.target.partition(":")
    cells = Cells(arguments.name, arguments.cells, arguments.limit, arguments.skip, arguments.threads)
    getattr(importlib.import_module(module), function)(cells, arguments.size)
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
