"""What a compiled program does, read off its text."""

from __future__ import annotations

import math
import re

import jax

IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion", "while", "call", "dynamic-update-slice"}


def pool_sized_operations(executable: jax.stages.Compiled, num_elements: int) -> set[str]:
    """Operations that make an array of so many elements, other than those that work in place."""
    found = set()
    for line in (executable.as_text() or "").splitlines():
        match = re.search(r"= \w+\[([\d,]*)\](?:\{[^}]*\})? ([a-z-]+)\(", line)
        if match and math.prod(int(n) for n in match[1].split(",") if n) == num_elements:
            found.add(match[2])
    return found - IN_PLACE
