"""Collectives of a compiled program, and the loops around them, parsed from its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{$")
_NAMES = re.compile(r"%([\w.\-]+)")
_TYPED_ARRAY = re.compile(r"(?P<kind>[a-z]+)(?P<bits>\d*)\w*\[(?P<dims>[\d,]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|called_computations|branch_computations)"
    r"=\{?(?P<names>%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
}
_KNOWN_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r" constant\((\d+)\)")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation in a program's text.

    The compiler may combine several exchanges into one instruction; each array of it is one exchange of the model.

    Attributes:
        opcode: such as `all-reduce`; for an asynchronous one without `-start`.
        dims: the shape of each result array.
        num_bytes: of those arrays together, on one device.
        loop_trips: trip count of each enclosing loop, outermost first; None if unknown.
        instruction: the instruction's name in the program's text.
    """

    opcode: str
    dims: tuple[tuple[int, ...], ...]
    num_bytes: int
    loop_trips: tuple[int | None, ...]
    instruction: str


def collectives(executable: jax.stages.Compiled) -> list[Collective]:
    """Return every collective of a program, including those in loops, branches and fusions."""
    return list(collectives_in(executable.as_text() or ""))


def collectives_in(text: str) -> Iterator[Collective]:
    """Yield the collectives of a program's text. A computation called from two places is yielded twice."""
    computations = computations_of(text)
    called = {name for body in computations.values() for found in body for name in found.all_called}
    for name in computations:
        if name not in called:
            yield from _collectives_from(name, computations, ())


def _collectives_from(
    name: str, computations: Mapping[str, Sequence[Instruction]], loop_trips: tuple[int | None, ...]
) -> Iterator[Collective]:
    for found in computations.get(name, ()):
        opcode = found.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES:
            arrays = _exchanged(found)
            dims = tuple(dims for dims, _ in arrays)
            yield Collective(opcode, dims, sum(size for _, size in arrays), loop_trips, found.name)
        inner = (*loop_trips, _trips(found, computations)) if found.opcode == "while" else loop_trips
        for callee in found.all_called:
            yield from _collectives_from(callee, computations, inner)


def _exchanged(instruction: Instruction) -> list[tuple[tuple[int, ...], int]]:
    """Return shape and bytes of each result of a collective.

    The result of an asynchronous start may also list its operands first, and counters last.
    """
    arrays = []
    for array in _TYPED_ARRAY.finditer(instruction.type):
        dims = tuple(int(size) for size in array["dims"].split(",") if size)
        bits = 8 if array["kind"] == "pred" else int(array["bits"] or 0)
        arrays.append((dims, array["kind"], -(-math.prod(dims) * bits // 8)))
    if instruction.opcode in ("all-gather-start", "collective-permute-start", "all-to-all-start"):
        arrays = [array for array in arrays if array[:2] != ((), "u")]
        arrays = arrays[len(arrays) // 2 :]
    return [(dims, size) for dims, kind, size in arrays if kind != "token"]


def _trips(loop: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> int | None:
    """Return a loop's trip count; None if unknown.

    It comes from the compiler's annotation, or from the only constant that the counter is compared with.
    """
    if known := _KNOWN_TRIPS.search(loop.line.replace("\\", "")):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line)
    lines = [found.line for found in computations.get(condition[1], ())] if condition else []
    limits = [constant[1] for line in lines if (constant := _CONSTANT.search(line))]
    counts_up = any("direction=LT" in line for line in lines)
    return int(limits[0]) if counts_up and len(limits) == 1 else None


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a program's text."""

    name: str
    opcode: str
    type: str
    line: str

    @property
    def all_called(self) -> list[str]:
        """Every computation that it calls, including the operator of a reduction."""
        return [name for match in _CALLED.finditer(self.line) for name in _NAMES.findall(match["names"])]


def computations_of(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each computation of a program's text."""
    computations: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            body = computations.setdefault(header["name"], [])
        elif found := _INSTRUCTION.match(line):
            body.append(Instruction(found["name"], found["opcode"], found["type"], line))
    return computations
