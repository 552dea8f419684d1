"""Holds what the assembler makes of our kernels to what it made before: a regression is an error."""

from __future__ import annotations

from typing import Any

MARGIN = 1.05
"""What another version of the compiler may add."""

_PER_PRODUCT = ("instructions", "conversions", "powers", "shared_accesses", "barriers")
_AT_MOST = ("shared_bytes", "local_accesses")


def regressions(found: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> list[str]:
    """What got worse, in words.

    Args:
        found: kernels as `sass.kernels` gives them.
        recorded: the same of before; nothing is held where nothing was recorded.
    """
    if not recorded:
        return []
    if len(found) < len(recorded):
        return [f"{len(found)} kernels could be read; {len(recorded)} are recorded: is nvdisasm there?"]
    failures = []
    for number, (kernel, before) in enumerate(zip(found, recorded, strict=False)):
        failures += [f"kernel {number}: {failure}" for failure in _regressions(kernel, before)]
    return failures


def _regressions(kernel: dict[str, Any], before: dict[str, Any]) -> list[str]:
    failures = []
    for name in _AT_MOST:
        if kernel[name] > before[name] * MARGIN:
            failures.append(f"{name} {kernel[name]}; {before[name]} are recorded")
    warps, warps_before = (x["blocks_per_processor"] * x["threads"] // 32 for x in (kernel, before))
    if warps < warps_before:
        failures.append(f"{warps} warps fit a processor; {warps_before} are recorded")
    if before["loops"] and not kernel["loops"]:
        return [*failures, "no loop with products of the tensor core"]
    for number, (loop, loop_before) in enumerate(zip(kernel["loops"], before["loops"], strict=False)):
        for name in _PER_PRODUCT:
            now, then = (x[name] / x["products"] for x in (loop, loop_before))
            if now > then * MARGIN:
                what = f"{now:.2f} {name} for a product of 64 x 64 x 16 in loop {number}"
                failures.append(f"{what}; {then:.2f} are recorded")
    return failures
