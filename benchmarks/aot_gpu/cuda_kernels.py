"""Compiles the kernels of CUDA C++ for each kind of GPU without one, and records what the assembler made of them.

python -m benchmarks.aot_gpu.cuda_kernels [--accept]

The library is built in place, so that the cases of `benchmarks.aot_gpu` which call it can be compiled next. The record
is what the next run is held to: a kernel that takes more registers or shared memory, or spills more, fails the run and
leaves the record as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.metadata import version
from typing import Any

import jax.numpy as jnp

from benchmarks import record
from benchmarks.aot_gpu.gate import MARGIN
from jpaged.kernels.cpu.build import find_headers
from jpaged.kernels.cuda_library import LIBRARY, compile_library, find_nvcc
from jpaged.kernels.matmul.triton.grouped import STORED
from jpaged.kernels.paged_attention.cpu import NUMBERS

NAME = "cuda_kernels"
ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
"""Compute capabilities without the dot: A100, RTX 3090, L4, H100 and H200, B200, RTX 5090."""

_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_ATTENTION = re.compile(r"attend_items\w*?\d(F32|F16|BF16)ELNS_6NumberE(\d)ELi(\d+)ELi\d+E")
_PRODUCT = re.compile(r"multiply_tile\w*?\d(F32|F16|BF16)ELNS\w*?_6StoredE(\d)ELi(\d+)E")
_PRODUCT_ROWS = 16
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Kernels = dict[str, dict[str, dict[str, int]]]
"""For each architecture: registers, spilled_bytes and shared_bytes of each kernel."""


def read_report(output: str) -> Kernels:
    """Read the assembler's report.

    Attention has a kernel for each type of queries and pool, and size of heads; products have one for each type of rows
    and numbers, and number of rows.
    """
    found: Kernels = {}
    for symbol, architecture, stores, loads, registers, rest in _ENTRY.findall(output):
        name = "merge"
        if kind := _ATTENTION.search(symbol):
            stored = NUMBERS[int(kind[2])]
            if kind[1] == "F32":  # any type of this size
                stored = f"{8 * jnp.dtype(stored).itemsize}bits"
            name = f"{_DTYPES[kind[1]]}-{stored}-{kind[3]}"
        elif kind := _PRODUCT.search(symbol):
            name = f"product-{_DTYPES[kind[1]]}-{STORED[int(kind[2])] or 'plain'}-{_PRODUCT_ROWS * int(kind[3])}"
        shared = re.search(r"(\d+) bytes smem", rest)
        found.setdefault(architecture, {})[name] = {
            "registers": int(registers),
            "spilled_bytes": int(stores) + int(loads),
            "shared_bytes": int(shared[1]) if shared else 0,
        }
    return found


def regressions(found: Kernels, recorded: Kernels) -> list[str]:
    """Return what got worse, in words; nothing is held where nothing was recorded."""
    failures = []
    for architecture, kernels in recorded.items():
        for name, before in kernels.items():
            kernel = found.get(architecture, {}).get(name)
            if kernel is None:
                failures.append(f"sm_{architecture} {name} was not compiled")
                continue
            for what, number in before.items():
                if kernel[what] > number * MARGIN:
                    failures.append(f"sm_{architecture} {name}: {what} {kernel[what]}; {number} are recorded")
    return failures


def recorded() -> Kernels:
    """Return the kernels of the record; none if there is no record."""
    path = record.RESULTS / f"{NAME}.json"
    kernels: Kernels = json.loads(path.read_text())["kernels"] if path.exists() else {}
    return kernels


def main() -> int:
    """Build the library, and hold its kernels to the record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aot_gpu.cuda_kernels",
        description="Compile the kernels of CUDA C++ for each kind of GPU, and record what the assembler made of them.",
    )
    parser.add_argument("--accept", action="store_true", help="hold nothing to the record, but write it again")
    options = parser.parse_args()
    output = compile_library(LIBRARY, find_nvcc(), find_headers(), ARCHITECTURES, ("-Xptxas", "-v"))
    report = read_report(output)
    found = {architecture: report[architecture] for architecture in ARCHITECTURES}
    for architecture, kernels in found.items():
        for name, kernel in kernels.items():
            print(f"sm_{architecture:<3} {name:<28} " + "  ".join(f"{what} {n}" for what, n in kernel.items()))
    failures = [] if options.accept else regressions(found, recorded())
    print(*failures, sep="\n")
    if failures:
        return 1
    versions: dict[str, Any] = {name: version(name) for name in ("jaxlib", "nvidia-cuda-nvcc")}
    print(record.save(NAME, "make aot-gpu", {"versions": versions, "kernels": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
