"""Which large arrays a compiled program makes, read off its text.

A step must not copy its pool or its weights. Neither a test of numbers nor a small model shows that it does: the
compiled program's text does, on any machine that can compile it.

    made_arrays(executable, {math.prod(layout.shape)}) == []    no instruction makes a second pool, even for a moment
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from jpaged.device.aot.deployment import Instruction, parse_computations

# They pass arrays on, or work on the one that they are given.
_PASSING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "opt-barrier"}
_IN_PLACE = {"scatter", "dynamic-update-slice"}
_ARRAY = re.compile(r"\w+\[(?P<dims>[\d,]*)\](?P<layout>\{[^}]*\})?")
_OPERANDS = re.compile(r"%([\w.\-]+)")
_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")


@dataclass(frozen=True, slots=True)
class MadeArray:
    """An array that an instruction writes to the device's main memory.

    Attributes:
        opcode: what makes it; of a fusion, the last operation inside.
        dims: its shape.
        instruction: the instruction's name in the program's text.
    """

    opcode: str
    dims: tuple[int, ...]
    instruction: str


def made_arrays(executable: jax.stages.Compiled, sizes: Collection[int]) -> list[MadeArray]:
    """The arrays of these sizes that instructions make, other than by updating one in place.

    What is inside of a fusion is never written; what goes to memory on the chip (a prefetch) is no copy.

    Args:
        executable: the compiled program.
        sizes: numbers of elements: of the pool, of a weight, of one layer's part of either.
    """
    return list(made_arrays_in(executable.as_text() or "", sizes))


def made_arrays_in(text: str, sizes: Collection[int]) -> Iterator[MadeArray]:
    """`made_arrays` of a program's text: of what `Compiled.as_text` gives."""
    computations = parse_computations(text)
    fused = {_fused_in(found) for body in computations.values() for found in body if found.opcode == "fusion"}
    for name, body in computations.items():
        for instruction in body if name not in fused else ():
            if instruction.opcode in _PASSING | _IN_PLACE or instruction.opcode.endswith("-done"):
                continue
            if instruction.opcode.endswith("-start") and instruction.opcode != "copy-start":
                continue  # the computation that it calls is looked at by itself
            arrays = list(_ARRAY.finditer(instruction.type))
            for index, array in enumerate(arrays[:1] if instruction.opcode == "copy-start" else arrays):
                dims = tuple(int(size) for size in array["dims"].split(",") if size)
                if math.prod(dims) not in sizes or "S(" in (array["layout"] or ""):
                    continue
                opcode = _maker(instruction, index, computations)
                if opcode is not None:
                    yield MadeArray(opcode, dims, instruction.name)


def _maker(instruction: Instruction, index: int, computations: Mapping[str, Sequence[Instruction]]) -> str | None:
    """The operation that makes one result of an instruction; None where it is an operand updated in place."""
    if instruction.opcode == "custom-call":
        aliased = _ALIASED.search(instruction.line)
        outputs = re.findall(r"\{(\d*)\}:", aliased[1]) if aliased else []
        return None if str(index) in outputs or "" in outputs else "custom-call"
    if instruction.opcode != "fusion":
        return instruction.opcode
    inside = {found.name: found for found in computations.get(_fused_in(instruction), ())}
    made = next((found for found in inside.values() if found.line.lstrip().startswith("ROOT ")), None)
    while made is not None and made.opcode in ("tuple", "bitcast"):
        operands = _OPERANDS.findall(made.line.partition(f" {made.opcode}(")[2])
        made = inside.get(operands[index if made.opcode == "tuple" else 0])
    if made is None:
        return "fusion"
    return None if made.opcode in _IN_PLACE | {"parameter"} else made.opcode


def _fused_in(fusion: Instruction) -> str:
    """The computation that a fusion runs."""
    match = re.search(r"calls=%?([\w.\-]+)", fusion.line)
    return match[1] if match else ""
