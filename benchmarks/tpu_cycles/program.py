"""A compiled TPU program as libtpu writes it down at the end: VLIW bundles, and the jumps between them.

libtpu names the targets of jumps by regions and says in a comment where each begins:

    0xbc   : > { %21855 = sbr.rel (%p21957_p9) target = $region282  ;;  ... } /* Start region 281 */
    0xbd   :  {}                                                        behind a jump the next bundles still run
    0xc1 LB: >> { %26381 = dma.done.wait [#allocation8], 2048 } /* Start region 288 */

A bundle takes a cycle at least. A block is what runs from its first bundle to its last, whatever happens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:LB|LH|PF|PB|LE|CT)?\s*:[\s>]*(\{.*)", re.DOTALL)
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_REGION_END = re.compile(r"(?<!/)End region (\d+)")
_COMMENT = re.compile(r"/\*(?!\w+=\*/).*?\*/", re.DOTALL)  # all but the names of operands, as in /*src=*/%s1
_CORE = re.compile(r"= sld \[smem:\[(#allocation\d+)\]\]\s*/\* (?:megacore )?core id")
_INSTRUCTION = re.compile(r"(?:(%\S+) = )?([a-zA-Z][\w.]*(?:<[^>]*>)?)\s*(.*)", re.DOTALL)
_JUMP = re.compile(r"(?:\((!?)(%[\w.]+)\) )?target = \$region(\d+)")
_CONTROL = re.compile(r"s(br|call|return|jmp)\b")
_MOST_DELAYED = 6
_ALWAYS_DELAYED = 4
_MATRIX_UNITS = ("MXU", "MATMUL", "MATPUSH", "MATRES")


class UnreadableProgram(ValueError):
    """What libtpu wrote is not what this reader knows; the message says what and where."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation of a bundle: `result = name operands`, as text without comments."""

    result: str
    name: str
    operands: str


@dataclass(frozen=True, slots=True)
class Jump:
    """What ends a block: it goes to bundle `target` if the predicate holds (`is_negated`: does not), else on.

    Attributes:
        bundle: that has it; a few more run before it is taken.
        predicate: name of it, or "" where the jump is always taken.
        is_negated: whether the predicate is.
        target: bundle.
        target_end: last bundle of the region that begins there, or None.
    """

    bundle: int
    predicate: str
    is_negated: bool
    target: int
    target_end: int | None


@dataclass(frozen=True, slots=True)
class Block:
    """Bundles `begin` to `end`, one behind the last, which run one after another."""

    begin: int
    end: int
    jump: Jump | None


@dataclass(frozen=True, slots=True)
class Program:
    """All of one kernel.

    Attributes:
        name: of the kernel.
        bundles: their instructions.
        blocks: in order, without gaps.
        uses_matrix_units: of each bundle.
        num_fills: vector registers loaded back, as the program is written (in a loop: once).
        num_spills: vector registers stored for want of room, alike.
        core_place: where the number of the core lies, of two that share a device; "" where nothing asks for it.
        aliases: operands that are the same memory, by each's index: an argument that is updated, and the result.
    """

    name: str
    bundles: tuple[tuple[Instruction, ...], ...]
    blocks: tuple[Block, ...]
    uses_matrix_units: tuple[bool, ...]
    num_fills: int
    num_spills: int
    core_place: str
    aliases: Mapping[int, tuple[int, ...]]


def read(folder: Path, name: str) -> Program:
    """The program of the kernel whose name begins so, from a folder that libtpu dumped into.

    Raises:
        UnreadableProgram: there is none or there are several, or it is not understood.
    """
    bundles = _one(folder, f"*-{name}*-final_bundles.txt")
    uses = _one(folder, f"*-{name}*-final_hlo-static-per-bundle-utilization.txt")
    return parse(name, bundles.read_text(), uses.read_text())


def parse(name: str, bundles_text: str, uses_text: str) -> Program:
    """The program in the texts of the two files."""
    texts = _bundle_texts(name, bundles_text)
    units, uses = _uses(name, uses_text)
    if len(uses) != len(texts):
        raise UnreadableProgram(f"{name}: {len(texts)} bundles, and the use of units of {len(uses)}")
    starts = {int(region): i for i, text in enumerate(texts) for region in _REGION.findall(text)}
    starts = _ends(bundles_text, len(texts)) | starts
    ends = {int(region): i for i, text in enumerate(texts) for region in _REGION_END.findall(text)}
    bundles = tuple(tuple(_instructions(text)) for text in texts)
    jumps = [
        _jump(name, i, one, starts, ends) for i, bundle in enumerate(bundles) for one in bundle if _is_control(one)
    ]
    blocks = _blocks(name, len(bundles), jumps, list(starts.values()))
    matrix = [units.index(unit) for unit in _MATRIX_UNITS if unit in units]
    if not matrix:
        raise UnreadableProgram(f"{name}: none of the units {', '.join(units)} is known as a matrix unit")

    def total(unit: str) -> int:
        return sum(row[units.index(unit)] for row in uses)

    return Program(
        name=name,
        bundles=bundles,
        blocks=tuple(blocks),
        uses_matrix_units=tuple(any(row[i] for i in matrix) for row in uses),
        num_fills=total("VLOAD:FILL"),
        num_spills=total("VSTORE:SPILL"),
        core_place=next(iter(_CORE.findall(bundles_text)), ""),
        aliases=dict(_aliases(bundles_text)),
    )


def _one(folder: Path, pattern: str) -> Path:
    found = [path for path in folder.glob(pattern) if "schedule-analysis" not in path.name]
    if len(found) != 1:
        raise UnreadableProgram(f"{folder} has {len(found)} files {pattern}; libtpu names them after the kernels")
    return found[0]


def _bundle_texts(name: str, text: str) -> list[str]:
    texts: list[str] = []
    for line in text.splitlines():
        if found := _BUNDLE.match(line):
            if (address := int(found[1], 16)) != len(texts):
                raise UnreadableProgram(f"{name}: bundle {address:#x} where {len(texts):#x} is expected")
            texts.append(found[2])
        elif texts:
            texts[-1] += "\n" + line
    if not texts:
        raise UnreadableProgram(f"{name}: no bundle in {len(text)} characters")
    return texts


def _uses(name: str, text: str) -> tuple[list[str], list[list[int]]]:
    head, mark, table = text.partition("== UTILIZATION:")
    units = [unit.strip() for line in head.splitlines() if "," in line for unit in line.split(",")]
    for unit in ("VLOAD:FILL", "VSTORE:SPILL"):
        if unit not in units or not mark:
            raise UnreadableProgram(
                f"{name}: the use of units does not have {unit}, but {', '.join(units) or 'nothing'}"
            )
    return units, [[int(number) for number in line.split()] for line in table.splitlines() if line.strip()]


def _aliases(text: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    for indices in {tuple(map(int, found.split(","))) for found in re.findall(r"may-alias: \{([\d,]+)\}", text)}:
        yield from ((index, indices) for index in indices)


def _ends(text: str, num_bundles: int) -> dict[int, int]:
    """Regions that are jumped to: those that begin nowhere are the program's end."""
    return {int(region): num_bundles for region in re.findall(r"target = \$region(\d+)", text)}


def _instructions(text: str) -> list[Instruction]:
    body = _COMMENT.sub("", text).strip().removeprefix("{").rstrip()
    found = []
    for part in body.removesuffix("}").split(";;"):
        if one := _INSTRUCTION.match(part.strip()):
            found.append(Instruction(one[1] or "", one[2], one[3].strip().removesuffix("}").strip()))
    return found


def _is_control(instruction: Instruction) -> bool:
    return _CONTROL.match(instruction.name) is not None


def _jump(name: str, bundle: int, instruction: Instruction, starts: dict[int, int], ends: dict[int, int]) -> Jump:
    found = _JUMP.fullmatch(instruction.operands)
    if instruction.name != "sbr.rel" or found is None or int(found[3]) not in starts:
        raise UnreadableProgram(
            f"{name}, bundle {bundle:#x}: the jump `{instruction.name} {instruction.operands}` is not understood"
        )
    region = int(found[3])
    return Jump(bundle, found[2] or "", found[1] == "!", starts[region], ends.get(region))


def _blocks(name: str, num_bundles: int, jumps: Sequence[Jump], regions: Sequence[int]) -> list[Block]:
    ends: dict[int, Jump] = {}
    limits = sorted({num_bundles, *regions, *(jump.target for jump in jumps), *(jump.bundle for jump in jumps)})
    # Nothing but a jump's own bundles lies between it and a region that follows at once: as many as the core waits for
    # (four of a v5 or v6, six of a tpu7x), or on a tpu7x fewer. Where none follows at once there are as many. One may
    # also follow a little later, which is not to be taken for a core that waits longer.
    gaps = [limits[bisect_right(limits, jump.bundle)] - jump.bundle - 1 for jump in jumps]
    least, most = min(gaps, default=0), max((gap for gap in gaps if gap <= _MOST_DELAYED), default=0)
    most = least if least >= _ALWAYS_DELAYED else most
    if jumps and not most:
        raise UnreadableProgram(f"{name}: no jump is followed by a region within {_MOST_DELAYED} bundles")
    is_short = least < most
    for jump, gap in zip(jumps, gaps, strict=True):
        # What lies behind the end of a loop that is jumped back to runs once.
        is_loop = is_short and jump.target <= jump.bundle <= (jump.target_end or 0)
        left = (jump.target_end or 0) - jump.bundle if is_loop else most
        ends[jump.bundle + 1 + min(gap, left, most)] = jump
    bounds = sorted({0, num_bundles, *(jump.target for jump in jumps), *(end for end in ends if end < num_bundles)})
    blocks = [Block(begin, end, ends.get(end)) for begin, end in pairwise(bounds)]
    for block in blocks:
        if block.jump is not None and block.jump.bundle < block.begin:
            raise UnreadableProgram(f"{name}: {block.begin:#x} is jumped to, between a jump and its end")
    return blocks
