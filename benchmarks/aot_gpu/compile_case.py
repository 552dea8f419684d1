"""Compiles one case in this process and prints what became of it, as one line of JSON.

    python -m benchmarks.aot_gpu.compile_case NAME [SAVED_FILE]

A process of its own, since a wrong architecture ends it, and since the compiler's own reports go to its output.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import serialize

from benchmarks.aot_gpu.cases import CASES, Case
from benchmarks.aot_gpu.copies import made_of_weights
from benchmarks.aot_gpu.program import Program
from jpaged import json_text
from jpaged.device.aot.topology import compile_only_gpus
from jpaged.device.mesh import build_mesh

_COPIES = {"copy", "copy-start", "dynamic-slice", "transpose", "convert", "concatenate", "pad", "gather", "broadcast"}
_KERNEL = re.compile(r'op_name="[^"]*/(\w+)/(?:pallas_call|mpmd_map)"')
"""The name of a kernel of Pallas Triton or Mosaic, before that of jax's primitive which calls it."""


def compile_case(case: Case, saved: Path | None) -> dict[str, Any]:
    """What the compiler made of the case, and what it was allowed as `limits`."""
    begin = time.monotonic()
    try:
        program = case.lower(build_mesh(compile_only_gpus(1, case.gpu)))
        lowered = time.monotonic()
        compiled = program.lowered.compile()
    except Exception as error:
        return {"error": re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")}
    found: dict[str, Any] = {"lower_s": round(lowered - begin, 1), "compile_s": round(time.monotonic() - lowered, 1)}
    found |= _memory(compiled)
    text = compiled.as_text() or ""
    found["big_copies"] = _big_copies(text, program)
    found["calls"] = calls(text)
    found["host_waits"] = host_waits(text)
    if program.has_weights:
        found["big_copies"] += made_of_weights(text, program.pool_shape)
    found["pool_writes"] = pool_writes(text, program.pool_shape)
    if saved is not None:
        saved.write_bytes(serialize(compiled)[0])
        found["saved_bytes"] = saved.stat().st_size
    limits = {
        "pool_bytes": program.pool_bytes,
        "max_temp_bytes": program.max_temp_bytes,
        "num_kernels": program.num_kernels,
        "num_writes": program.num_writes,
        "calls": dict(program.calls),
    }
    return {**found, "limits": limits}


def calls(text: str) -> dict[str, int]:
    """How often a program calls each kernel: those of Pallas by their names, others by what XLA calls them."""
    targets = (re.search(r'custom_call_target="([^"]+)"', line) for line in text.splitlines())
    names = (_KERNEL.search(target.string) or target for target in targets if target)
    return dict(sorted(Counter(name[1] for name in names).items()))


def host_waits(text: str) -> list[str]:
    """Return the branches of a program, and its loops without a known number of turns.

    XLA's runtime for GPUs copies the predicate of each to the host, which waits for it.
    """
    found = re.findall(r"^\s*(?:ROOT )?%(\S+) = .*? (conditional|while)\((.*)$", text, re.MULTILINE)
    return [f"{kind} {name}" for name, kind, rest in found if kind == "conditional" or "known_trip_count" not in rest]


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    memory = compiled.memory_analysis()
    if memory is None:
        return {}
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def _big_copies(text: str, program: Program) -> list[str]:
    """Operations of the program that copy the pool or a weight."""
    shapes = {program.pool_shape, (program.pool_shape[0] * program.pool_shape[1], *program.pool_shape[2:])}
    found = []
    for line in text.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\]\S* ([a-z-]+)\(", line)
        if match and match[2] in _COPIES:
            shape = tuple(int(n) for n in match[1].split(","))
            if shape in shapes or tuple(sorted(n for n in shape if n > 1)) in program.weight_shapes:
                found.append(f"{match[2]} {shape}")
    return found


def pool_writes(text: str, pool_shape: tuple[int, ...]) -> int:
    """Counts the launches whose result is the pool: those outside of the fusions, which XLA lists by themselves."""
    shape = ",".join(map(str, pool_shape))
    outside = re.sub(r"(?ms)^%fused_.*?^}", "", text)
    return len(re.findall(rf"= \(?\w+\[{shape}\]\S* (?:fusion|scatter|dynamic-update-slice)\(", outside))


def main() -> int:
    """Compiles the case that the command line names."""
    name, *saved = sys.argv[1:]
    (case,) = (case for case in CASES if case.name == name)
    print(json_text.dumps(compile_case(case, Path(saved[0]) if saved else None)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
