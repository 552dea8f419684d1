"""Devices, kernels and the model, checked by a child process with a timeout, because a check may hang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged import json_text
from jpaged.cli.doctor.child import STAGES
from jpaged.cli.doctor.finding import Finding, in_bytes
from jpaged.config import child_environment

_COMMAND = (sys.executable, "-m", "jpaged.cli.doctor.child")
_ASKED: Mapping[str, str] = {
    "devices": "listing JAX devices",
    "kernels": "loading the CPU kernels",
    "model": "reading the model's config and tokenizer",
}
_INSTRUCTIONS: Mapping[str, str] = {
    "avx512bf16": "AVX-512 with bfloat16",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "baseline": "no wide vectors",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Results of the child.

    Attributes:
        found: results by stage, in the order of STAGES.
        end: how it ended before completing all stages; None if it completed.
    """

    found: Mapping[str, Mapping[str, Any]]
    end: str | None


def ask(options: Mapping[str, Any], timeout_s: float, command: Sequence[str] = _COMMAND) -> Answer:
    """Run the child and collect its output until it ends or times out."""
    environment = child_environment({"HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    ) as child:
        try:
            said, problems = child.communicate(json_text.dumps(dict(options)), timeout=timeout_s)
            end = None
        except subprocess.TimeoutExpired:
            child.kill()
            said, problems = child.communicate()
            end = f"no answer within {timeout_s:g} s"
    found: dict[str, Mapping[str, Any]] = {}
    for line in said.splitlines():
        if line.startswith("{"):  # libraries may print, too
            found.update(json.loads(line))
    is_whole = len(found) == len(STAGES) or any("error" in one for one in found.values())
    if end is None and not is_whole:
        last = problems.strip().splitlines()[-1:] or ["no output"]
        end = f"the process exited with code {child.returncode}: {last[0]}"
    return Answer(found, None if is_whole else end)


def findings(answer: Answer) -> Iterator[Finding]:
    """Yield the findings of the child's results."""
    tell = {"devices": _devices, "kernels": _kernels, "model": _model}
    for stage in STAGES:
        if stage in answer.found:
            yield from tell[stage](answer.found[stage])
        elif answer.end is not None:
            note = f"while {_ASKED[stage]}: {answer.end}"
            remedy = "JAX_PLATFORMS=cpu ignores accelerators; --timeout waits longer"
            yield Finding(stage, stage, "stop", "unknown", note, remedy)
            return


def _devices(found: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        yield Finding("devices", "devices", "stop", "none", found["error"], "JAX_PLATFORMS=cpu ignores accelerators")
        return
    known = f", {found['hardware']} in the hardware table" if found["hardware"] else ""
    yield Finding("devices", found["platform"], "ok", f"{found['num_devices']} x {found['device_kind']}{known}")
    memory = f"{in_bytes(found['available_bytes'])} free of {in_bytes(found['physical_bytes'])}"
    yield Finding("devices", "host memory", "ok", memory)


def _kernels(found: Mapping[str, Any]) -> Iterator[Finding]:
    name, build = "CPU kernels", "python -m jpaged.kernels.cpu.build"
    if "error" in found or "missing" in found:
        reason = found.get("missing", found.get("error"))
        note = f"{reason}; CPUs run XLA's operations instead, which is slower"
        yield Finding("kernels", name, "off", "not found", note, build)
        return
    yield Finding("kernels", name, "ok", found["library"])
    for what in ("attention", "products"):
        vectors = found[what]
        yield Finding("kernels", what, "ok", f"{vectors} ({_INSTRUCTIONS.get(vectors, vectors)})")


def _model(found: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        if found["kind"] == "NotFound" and "the hub" in found["error"]:
            note = "not on this machine: `jpaged serve` would download it (not tried here)"
            yield Finding("model", "model", "warn", "not found", note)
        else:
            yield Finding("model", "model", "stop", "cannot be served", found["error"])
        return
    yield Finding("model", "architecture", "ok", found["architecture"])
    for name in ("dtype", "attention_backend", "linear_backend", "kv_cache_dtype", "max_model_len"):
        yield Finding("model", name, "ok", str(found[name]))
    for line in found["passed_over"]:
        yield Finding("model", "passed over", "warn", line)
    steps = f"{found['max_num_seqs']} rows, {found['max_num_batched_tokens']} tokens, blocks of {found['block_size']}"
    yield Finding("model", "a step", "ok", steps)
    yield _memory(found["weight_bytes"], found["memory_bytes"], found["memory_utilization"])


def _memory(weight_bytes: int, memory_bytes: int | None, share: float) -> Finding:
    if memory_bytes is None:
        return Finding(
            "model", "memory", "ok", f"weights {in_bytes(weight_bytes)}; the device does not report its memory"
        )
    value = f"weights {in_bytes(weight_bytes)}; jpaged may use {share:g} of {in_bytes(memory_bytes)}"
    if weight_bytes < share * memory_bytes:
        return Finding("model", "memory", "ok", value)
    note = "the weights alone do not fit"
    remedy = "a smaller --dtype or --quantization, a larger --tensor-parallel-size, or another machine: `jpaged plan`"
    return Finding("model", "memory", "stop", value, note, remedy)
