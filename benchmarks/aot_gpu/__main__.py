"""Compiles every case, each in a process of its own, and records what became of them.

python -m benchmarks.aot_gpu [--only PART_OF_NAME] [--save FOLDER] [--jobs N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.aot_gpu.cases import CASES, Case
from benchmarks.aot_gpu.judge import judge, kernels

_ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13")
_LIMIT_S = 900
_ENVIRONMENT = os.environ | {
    "JAX_PLATFORMS": "cpu",
    **{f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "RESOURCES")},
}


def run(case: Case, folder: Path | None) -> dict[str, Any]:
    """The case's result, or how its process ended."""
    command = [sys.executable, "-m", "benchmarks.aot_gpu.compile_case", case.name]
    command += [] if folder is None else [str(folder / f"{case.name}.bin")]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=_ENVIRONMENT, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"failures": [f"not done after {_LIMIT_S} s"]}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failures": [f"the process ended with {done.returncode}: {done.stderr[-1500:]}"]}
    found = json.loads(lines[-1]) | kernels(done.stdout)
    found["failures"] = judge(found, case.expected_error)
    found.pop("limits", None)
    return {**found, "wall_s": round(time.monotonic() - begin, 1)}


def _line(case: Case, result: dict[str, Any]) -> str:
    if result["failures"]:
        return f"FAILED   {case.name}\n         " + "\n         ".join(result["failures"])
    if "error" in result:
        return f"refused  {case.name}: {result['error'][:150]}"
    registers = ",".join(map(str, result["registers"])) or "-"
    shared = ",".join(str(n // 1024) for n in result["shared_bytes"]) or "-"
    sizes = f"temp {result['temp_bytes'] / 2**20:8.2f} MiB  registers {registers:>7}  shared {shared:>7} KiB"
    return f"compiled {case.name:<64} {sizes}  {result['compile_s']:6.1f} s"


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Runs the cases that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aot_gpu",
        description="Compile every case, each in a process of its own, and record what became of them.",
    )
    parser.add_argument("--only", default="", help="cases whose name has this part; the record is not written then")
    parser.add_argument("--save", type=Path, help="a folder for the executables, as jax serialises them")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    if not any(name.startswith("jax-cuda") for name in _versions()):
        parser.error("jax has no CUDA packages here: make aot-gpu installs them")
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    results = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for case, result in zip(cases, pool.map(lambda case: run(case, options.save), cases), strict=True):
            results[case.name] = result
            print(_line(case, result), flush=True)
    num_failed = sum(bool(result["failures"]) for result in results.values())
    print(f"{len(cases) - num_failed} of {len(cases)} cases are as they should be")
    if not options.only:
        print(
            record.save("aot_gpu", "make aot-gpu", {"versions": _versions(), "device": "NVIDIA H200", "cases": results})
        )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
