"""What was counted before, by the version of libtpu, and what of it is worse or better now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, save
from benchmarks.tpu_cycles.cases import LATENCY_S
from jpaged import json_text

NAME = "tpu_cycles"
BEFORE = "tpu_cycles_before"
"""The numbers of the kernels that those of today replaced."""
EXPERTS = "tpu_experts"
"""The numbers of the kernel of experts."""
MARGIN = 0.03
"""What a number may differ by from the one that was recorded with the same version."""
NEW_MARGIN = 0.10
"""What it may be worse by with a version that was not recorded, beside the pinned one's numbers."""

PLANNED = Path(__file__).resolve().parents[2] / "jpaged" / "plan" / "cycles.json"
_CASE = ("generation", "num_kv_heads", "group", "head_dim", "kv_dtype", "block_size")
_DECODE = ("chunk_bytes", "compute_per_mib", "issue_per_block", "wait_per_chunk", "per_row")
_SLACK: Mapping[str, float] = {
    "cycles_per_mib": 2,
    "compute_per_mib": 2,
    "issue_per_block": 1,
    "wait_per_chunk": 2,
    "per_row": 8,
    "per_256x256_head": 2,
    "prompt_cycles": 100,
    "kernel_cycles": 500,
    "rest_cycles": 2500,
    "num_fills": 8,
    "num_spills": 8,
}
"""The numbers that are held, and what they may differ by besides the margin; less of each is better."""

Numbers = Mapping[str, Any]


def read(name: str = NAME) -> dict[str, dict[str, Numbers]]:
    """The numbers of each version of libtpu, by the case; nothing where nothing was recorded."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text())["libtpu"]
    return {version: {one["case"]: one for one in numbers} for version, numbers in found.items()}


def record(version: str, numbers: Sequence[Numbers], name: str = NAME) -> None:
    """Keeps these, in place of the same cases' of the same version."""
    kept = read(name)
    kept[version] = {**kept.get(version, {}), **{one["case"]: one for one in numbers}}
    found = {key: [cases[case] for case in sorted(cases)] for key, cases in sorted(kept.items())}
    assumed = {"dma_latency_s": LATENCY_S, "bandwidth_and_clock": "jpaged/hardware.py"}
    command = f"python -m benchmarks.tpu_cycles {'--experts ' if name == EXPERTS else ''}--record"
    save(name, command, {"assumed": assumed, "libtpu": found})


def record_for_plans(numbers: Sequence[Numbers]) -> None:
    """Writes what `jpaged plan` reads of them: plan/cycles.json, whose other cases stay."""
    kept = json.loads(PLANNED.read_text()) if PLANNED.exists() else {"decode": [], "chunks": [], "sampling": []}
    for key, kind, names in (("decode", "decode", _DECODE), ("chunks", "prefill", ("per_256x256_head",))):
        ours = [one for one in numbers if one["kind"] == kind]
        # A row's share is what is left at no context: chunks that are not full may make it less than nothing.
        kept[key] = [
            {name: max(0, one[name]) if name == "per_row" else one[name] for name in (*_CASE, *names)} for one in ours
        ]
    PLANNED.write_text(json_text.dumps(kept, indent=1) + "\n")


def differences(
    before: Mapping[str, Numbers], after: Sequence[Numbers], margin: float, *, says_better: bool
) -> Iterator[str]:
    """One line for each number that is not what was recorded.

    Args:
        before: by case.
        after: of some of these cases.
        margin: the share that a number may differ by.
        says_better: whether what is better is told too.
    """
    for now in after:
        was = before.get(now["case"])
        if was is None:
            yield f"{now['case']}: never recorded"
            continue
        for name, slack in _SLACK.items():
            if name not in now:
                continue
            allowed = max(margin * abs(was[name]), slack)
            if now[name] > was[name] + allowed:
                yield f"{now['case']}: {name} is worse: {was[name]:g} before, {now[name]:g} now"
            elif now[name] < was[name] - allowed and says_better:
                yield f"{now['case']}: {name} is better: {was[name]:g} before, {now[name]:g} now"
