"""What a compiled program takes, and which large arrays it makes, read off the compiler's own account.

A step must not copy its pool or its weights. Neither a test of numbers nor a small model shows that it does: the
compiled program's text does, on any machine that can compile it.

    report = ProgramReport.of(executable)
    report.alias_bytes == layout.num_bytes                      the donated pool is the pool that comes back
    report.temp_bytes < ...                                     and nothing of its size stands beside it
    made_arrays(executable, {math.prod(layout.shape)}) == []    no instruction makes a second one, even for a moment
    [one.dims for one in collectives(executable)]               what devices exchange, and in which loops
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

# They pass arrays on, or work on the one that they are given.
_PASSING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "opt-barrier"}
_IN_PLACE = {"scatter", "dynamic-update-slice"}

_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{$")
_ARRAY = re.compile(r"\w+\[(?P<dims>[\d,]*)\](?P<layout>\{[^}]*\})?")
_OPERANDS = re.compile(r"%([\w.\-]+)")
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
_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """A program's memory as the compiler states it, in bytes of one device.

    Attributes:
        argument_bytes: of all arguments, padded as the device lays them out.
        output_bytes: of all results, those that are arguments updated in place included.
        alias_bytes: of the results that are arguments updated in place.
        temp_bytes: working memory besides.
        code_bytes: of the program itself.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @classmethod
    def of(cls, executable: jax.stages.Compiled) -> ProgramReport:
        """Reads the compiler's account; of a backend that gives none, nothing is known and nothing is counted."""
        memory = executable.memory_analysis()
        if memory is None:
            return cls(0, 0, 0, 0, 0)
        return cls(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """What the device's memory must have free for one call, arguments included."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


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
    computations = _computations(text)
    fused = {found.called for body in computations.values() for found in body if found.opcode == "fusion"}
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


@dataclass(frozen=True, slots=True)
class Collective:
    """A place in a program where devices exchange arrays.

    The compiler may combine several exchanges into one instruction: each of its arrays is one that the model asks for.

    Attributes:
        opcode: such as `all-reduce`; that of an asynchronous one is without `-start`.
        dims: the shape of each array that comes of it.
        num_bytes: of those arrays together, on one device.
        loop_trips: how often each loop around it runs, outermost first; None for one that does not say.
        instruction: its name in the program's text.
    """

    opcode: str
    dims: tuple[tuple[int, ...], ...]
    num_bytes: int
    loop_trips: tuple[int | None, ...]
    instruction: str


def collectives(executable: jax.stages.Compiled) -> list[Collective]:
    """Every exchange between devices in a program, those in loops, branches and fusions included."""
    return list(collectives_in(executable.as_text() or ""))


def collectives_in(text: str) -> Iterator[Collective]:
    """`collectives` of a program's text. What is called from two places is there twice."""
    computations = _computations(text)
    called = {name for body in computations.values() for found in body for name in found.all_called}
    for name in computations:
        if name not in called:
            yield from _collectives_from(name, computations, ())


def _collectives_from(
    name: str, computations: Mapping[str, Sequence[_Instruction]], loop_trips: tuple[int | None, ...]
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


def _exchanged(instruction: _Instruction) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes of each result; what starts an exchange may give its operands before, and counters after."""
    arrays = []
    for array in _TYPED_ARRAY.finditer(instruction.type):
        dims = tuple(int(size) for size in array["dims"].split(",") if size)
        bits = 8 if array["kind"] == "pred" else int(array["bits"] or 0)
        arrays.append((dims, array["kind"], -(-math.prod(dims) * bits // 8)))
    if instruction.opcode in ("all-gather-start", "collective-permute-start", "all-to-all-start"):
        arrays = [array for array in arrays if array[:2] != ((), "u")]
        arrays = arrays[len(arrays) // 2 :]
    return [(dims, size) for dims, kind, size in arrays if kind != "token"]


def _trips(loop: _Instruction, computations: Mapping[str, Sequence[_Instruction]]) -> int | None:
    """As the compiler notes it, or the one constant that the counter is compared with."""
    if known := _KNOWN_TRIPS.search(loop.line.replace("\\", "")):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line)
    lines = [found.line for found in computations.get(condition[1], ())] if condition else []
    limits = [constant[1] for line in lines if (constant := _CONSTANT.search(line))]
    counts_up = any("direction=LT" in line for line in lines)
    return int(limits[0]) if counts_up and len(limits) == 1 else None


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    type: str
    line: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return _OPERANDS.findall(self.line.partition(f" {self.opcode}(")[2])

    @property
    def all_called(self) -> list[str]:
        """Every computation that it runs, a reduction's operator included."""
        return [name for match in _CALLED.finditer(self.line) for name in _OPERANDS.findall(match["names"])]

    @property
    def called(self) -> str | None:
        match = re.search(r"calls=%?([\w.\-]+)", self.line)
        return match[1] if match else None


def _computations(text: str) -> dict[str, list[_Instruction]]:
    computations: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            body = computations.setdefault(header["name"], [])
        elif found := _INSTRUCTION.match(line):
            body.append(_Instruction(found["name"], found["opcode"], found["type"], line, found["root"] is not None))
    return computations


def _maker(instruction: _Instruction, index: int, computations: Mapping[str, Sequence[_Instruction]]) -> str | None:
    """The operation that makes one result of an instruction; None where it is an operand updated in place."""
    if instruction.opcode == "custom-call":
        aliased = _ALIASED.search(instruction.line)
        outputs = re.findall(r"\{(\d*)\}:", aliased[1]) if aliased else []
        return None if str(index) in outputs or "" in outputs else "custom-call"
    if instruction.opcode != "fusion":
        return instruction.opcode
    inside = {found.name: found for found in computations.get(instruction.called or "", ())}
    made = next((found for found in inside.values() if found.is_root), None)
    while made is not None and made.opcode in ("tuple", "bitcast"):
        operands = made.operands
        made = inside.get(operands[index if made.opcode == "tuple" else 0])
    if made is None:
        return "fusion"
    return None if made.opcode in _IN_PLACE | {"parameter"} else made.opcode
