"""Arrays that a program makes of its weights: read off the compiled text, by what each instruction is given."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from jpaged.device.aot.deployment import Instruction, parse_computations

_LEAST = 1 << 20
"""Numbers of a matrix that is worth looking for."""
_SHARE = 0.9
"""What a copy has of its matrix, in numbers, at least."""
_NAMES_ONLY = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "call", "conditional", "opt-barrier"}
_ARRAY = re.compile(r"[a-z]\w*\[([\d,]+)\]")
_OPERANDS = re.compile(r"%([\w.\-]+)")
_PRODUCT = re.compile(r" (?:dot|ragged-dot|scaled-dot|convolution)\(")


def made_of_weights(text: str, pool_shape: tuple[int, ...]) -> list[str]:
    """Instructions, products aside, that write an array as large as a matrix of the weights that they read.

    What a fusion has inside lies in registers, and is no array. Of experts one matrix counts.
    """
    computations = parse_computations(text)
    fused = {name for body in computations.values() for one in body if _is_fused(one) for name in one.all_called}
    multiplies = {name for name, body in computations.items() if any(_PRODUCT.search(one.line) for one in body)}
    entry = re.search(r"(?m)^ENTRY %?([\w.\-]+)", text)
    if entry is None:
        return []
    pool_size = math.prod(pool_shape)
    weights = {
        shape
        for one in computations[entry[1]]
        if one.opcode == "parameter"
        for shape in _shapes(one)
        if math.prod(shape) >= _LEAST and math.prod(shape) != pool_size
    }
    return [
        f"{one.opcode} {one.name} makes {max(_shapes(one), key=math.prod)}"
        for name, body in computations.items()
        if name not in fused
        for one in _copies(body, weights, multiplies)
    ]


def _copies(body: list[Instruction], weights: set[tuple[int, ...]], multiplies: set[str]) -> Iterator[Instruction]:
    sizes: dict[str, int] = {}
    for one in body:
        shapes = _shapes(one)
        given = one.line.partition(f" {one.opcode}(")[2].partition(")")[0]
        read = [sizes[name] for name in _OPERANDS.findall(given) if name in sizes]
        if one.opcode in ("parameter", "get-tuple-element") and len(shapes) == 1 and shapes[0] in weights:
            sizes[one.name] = max(_LEAST, math.prod(shapes[0][-2:]))
        elif one.opcode == "bitcast" and read:
            sizes[one.name] = read[0]
        if one.opcode in _NAMES_ONLY or one.opcode == "custom-call" or not multiplies.isdisjoint(one.all_called):
            continue
        if read and shapes and max(map(math.prod, shapes)) >= _SHARE * min(read):
            yield one


def _is_fused(one: Instruction) -> bool:
    return one.opcode not in ("while", "call", "conditional", "async-start")


def _shapes(one: Instruction) -> list[tuple[int, ...]]:
    return [tuple(map(int, dims.split(","))) for dims in _ARRAY.findall(one.type)]
