"""Compiles every case, each in a process of its own, and records what became of them.

python -m benchmarks.aot_gpu [--only PART_OF_NAME] [--save FOLDER] [--jobs N] [--accept]

The record is also what the next run is held to: a kernel that spills, that fits a processor less often, or that runs
more instructions for the same products fails its case, and the record stays as it is (`gate.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.aot_gpu import gate, sass
from benchmarks.aot_gpu.assembler import report
from benchmarks.aot_gpu.cases import CASES, Case
from benchmarks.aot_gpu.judge import judge, kernels

_ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13")
_LIMIT_S = 900
_ENVIRONMENT = os.environ | {
    "JAX_PLATFORMS": "cpu",
    **{f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "SASS")},
}


def run(case: Case, folder: Path | None, recorded: dict[str, Any]) -> dict[str, Any]:
    """The case's result, or how its process ended; `recorded` is the result of before that it is held to."""
    command = [sys.executable, "-m", "benchmarks.aot_gpu.compile_case", case.name]
    command += [] if folder is None else [str(folder / f"{case.name}.bin")]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as dump:
        environment = _ENVIRONMENT | {"XLA_FLAGS": f"--xla_dump_to={dump}"}
        try:
            done = subprocess.run(
                command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return {"failures": [f"not done after {_LIMIT_S} s"]}
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            return {"failures": [f"the process ended with {done.returncode}: {done.stderr[-1500:]}"]}
        output = done.stdout + report(Path(dump))
        found = {"gpu": case.gpu} | json.loads(lines[-1]) | kernels(output)
    found["sass"] = sass.kernels(output, case.gpu)
    found["failures"] = judge(found, case.expected_error) + gate.regressions(found["sass"], recorded.get("sass", []))
    found.pop("limits", None)
    return {**found, "wall_s": round(time.monotonic() - begin, 1), "versions": _versions()}


def _line(case: Case, result: dict[str, Any]) -> str:
    if result["failures"]:
        return f"FAILED   {case.name}\n         " + "\n         ".join(result["failures"])
    if "error" in result:
        return f"refused  {case.name}: {result['error'][:150]}"
    kernels = "  ".join(
        f"registers {kernel['registers']}, shared {kernel['shared_bytes'] >> 10} KiB, "
        f"{kernel['blocks_per_processor']} x {kernel['threads']} threads, instructions a product "
        + (" ".join(f"{loop['instructions'] / loop['products']:.0f}" for loop in kernel["loops"]) or "-")
        for kernel in result["sass"]
    )
    kernels = kernels or f"registers {', '.join(map(str, result['registers'])) or '-'}"
    return f"compiled {case.name:<64} temp {result['temp_bytes'] / 2**20:8.2f} MiB  {kernels}"


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
    parser.add_argument("--only", default="", help="cases whose name has this part; the record keeps the others")
    parser.add_argument("--save", type=Path, help="a folder for the executables, as jax serialises them")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--accept", action="store_true", help="hold nothing to the record, but write it again")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    if not any(name.startswith("jax-cuda") for name in _versions()):
        parser.error("jax has no CUDA packages here: make aot-gpu installs them")
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    recorded = _recorded()
    held = {} if options.accept else recorded
    results = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda case: run(case, options.save, held.get(case.name, {})), cases)
        for case, result in zip(cases, runs, strict=True):
            results[case.name] = result
            print(_line(case, result), flush=True)
    num_failed = sum(bool(result["failures"]) for result in results.values())
    print(f"{len(cases) - num_failed} of {len(cases)} cases are as they should be")
    good = {name: result for name, result in results.items() if not result["failures"]}
    kept = {case.name: recorded[case.name] for case in CASES if case.name in recorded}
    print(record.save("aot_gpu", "make aot-gpu", {"device": "NVIDIA H200", "cases": kept | good}))
    return 1 if num_failed else 0


def _recorded() -> dict[str, Any]:
    """What became of the cases before, by their names."""
    path = record.RESULTS / "aot_gpu.json"
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    return cases


if __name__ == "__main__":
    sys.exit(main())
