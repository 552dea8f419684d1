"""Runs the scalar side of a compiled TPU program: which bundles run how often, and when blocks of keys arrive.

The loops of a kernel, their lengths and which branch is taken are decided by integers in scalar memory and registers.
They are followed here exactly; what vectors hold is not. A bundle takes one cycle, and a wait for a DMA as long as the
memory is behind: it moves `bytes_per_cycle`, one DMA after another, each `latency` cycles after it was started at the
earliest. Other stalls are not known: the real time can only be longer.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tpu_cycles.program import Block, Instruction, Program

GRANULE_BYTES = 32
"""The unit of a DMA's size and of addresses outside of scalar memory."""

_TILE = (8, 128)
_STEP_NUMBERS = 128
"""Numbers of 32 bits that a DMA with a stride moves at once: it counts steps in them."""
_MASK, _SIGN = 0xFFFFFFFF, 0x80000000
_MOST_CYCLES = 200_000_000
_OPERAND = re.compile(r"inlined_call_operand\.(<[^>]*>|\w+) \[shape: (\w+)\[([\d,]*)\], index: (\d+), kind: (\w+)")
_LABELLED = re.compile(r"/\*(\w+)=\*/([^,]+)")
_PREDICATED = re.compile(r"\((!?)(%p[\w.]+)(?:, (%?[\w.]+))?\),?")

_BINARY = {
    "sadd.s32": "({0} + {1}) & M",
    "ssub.s32": "({0} - {1}) & M",
    "smul.u32": "({0} * {1}) & M",
    "smul.s32": "({0} * {1}) & M",
    "smulhi.u32": "({0} * {1}) >> 32",
    "sand.u32": "{0} & {1}",
    "sor.u32": "{0} | {1}",
    "sxor.u32": "{0} ^ {1}",
    "sshll.u32": "({0} << ({1} & 31)) & M",
    "sshrl.u32": "{0} >> ({1} & 31)",
    "sshra.s32": "(({0} ^ S) - S >> ({1} & 31)) & M",
    "smin.u32": "least({0}, {1})",
    "smax.u32": "most({0}, {1})",
    "smin.s32": "least({0} ^ S, {1} ^ S) ^ S",
    "smax.s32": "most({0} ^ S, {1} ^ S) ^ S",
    "pand": "{0} & {1}",
    "por": "either({0}, {1})",
    "pxor": "{0} ^ {1}",
    "pnand": "1 ^ ({0} & {1})",
    "pnor": "1 ^ either({0}, {1})",
}
_UNARY = {"smov": "{0}", "smov.u32": "{0}", "pmov": "{0}", "pneg": "1 ^ {0}"}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class LostTrack(ValueError):
    """The program cannot be followed; the message says which instruction decided on what is not known."""


class _Unknown:
    """A number that vectors or addresses decide. Whatever is made of it is unknown too; no branch may ask for it."""

    def _same(self, *_: Any) -> _Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __or__ = __ror__ = _same
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __and__(self, other: Any) -> Any:
        return 0 if isinstance(other, int) and other == 0 else self

    __rand__ = __and__

    def __bool__(self) -> bool:
        raise LostTrack("a branch, predicate or address")


_UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True, eq=False)
class Place(_Unknown):
    """An address: so far behind the beginning of an allocation or an operand, in the units of its memory."""

    base: str
    offset: int = 0

    def __add__(self, other: Any) -> Any:
        return Place(self.base, self.offset + _signed(other)) if isinstance(other, int) else _UNKNOWN

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return Place(self.base, self.offset - _signed(other)) if isinstance(other, int) else _UNKNOWN

    def __and__(self, other: Any) -> Any:
        return self if isinstance(other, int) and other == _MASK else _UNKNOWN

    __rand__ = __and__

    def __lshift__(self, other: Any) -> Any:
        return Place(self.base, self.offset << other) if isinstance(other, int) else _UNKNOWN

    def __rshift__(self, other: Any) -> Any:
        return Place(self.base, self.offset >> other) if isinstance(other, int) else _UNKNOWN


def _signed(number: int) -> int:
    return (number ^ _SIGN) - _SIGN


def _select(predicate: Any, yes: Any, no: Any) -> Any:
    if isinstance(predicate, _Unknown):
        return _UNKNOWN
    return yes if predicate else no


def _either(a: Any, b: Any) -> Any:
    """Whether one of two predicates holds: one is enough, whatever the other is."""
    return 1 if any(isinstance(one, int) and one == 1 for one in (a, b)) else a | b


def _least(a: Any, b: Any) -> Any:
    return _select(a < b, a, b)


def _most(a: Any, b: Any) -> Any:
    return _select(a < b, b, a)


@dataclass(frozen=True, slots=True)
class Memory:
    """What lies outside of the core.

    Attributes:
        bytes_per_cycle: that it moves.
        latency: cycles from a DMA's start until its first byte.
    """

    bytes_per_cycle: float
    latency: float


@dataclass(slots=True)
class Run:
    """What a program did.

    Attributes:
        counts: how often each block ran.
        num_cycles: until the end, waits included.
        num_stalled: of these, spent waiting for DMAs.
        pool_bytes: read from the pool by DMAs.
        num_fetches: DMAs that read them.
        num_turns: how often a product followed a wait for such a DMA: chunks.
    """

    counts: list[int]
    num_cycles: float = 0.0
    num_stalled: float = 0.0
    pool_bytes: int = 0
    num_fetches: int = 0
    num_turns: int = 0


class Machine:
    """A core that runs one program on given operands.

    Args:
        program: to run.
        operands: by index, those in scalar memory as numbers; others may be missing.
        pool: the index of the operand that holds keys and values.
        memory: its speed.
        core: which of two cores of a device.
    """

    def __init__(
        self, program: Program, operands: Mapping[int, np.ndarray], pool: int, memory: Memory, core: int = 0
    ) -> None:
        self._program, self._operands, self._memory = program, operands, memory
        self._pool = {f"operand {index}" for index in (pool, *program.aliases.get(pool, ()))}
        self._smem: dict[tuple[str, int], Any] = {(program.core_place, 0): core} if program.core_place else {}
        self._integers: dict[str, np.ndarray] = {}
        self._flags: defaultdict[tuple[str, int], deque[list[float]]] = defaultdict(deque)
        self._memory_is_free, self._now, self._has_waited = 0.0, 0.0, False
        self._run = Run([0] * len(program.blocks))

    def run(self) -> Run:
        """Runs it from the first bundle to the last.

        Raises:
            LostTrack: it cannot be followed.
        """
        blocks = self._program.blocks
        number = {block.begin: i for i, block in enumerate(blocks)}
        names = _Names(self._program)
        bodies = [self._body(block, names) for block in blocks]
        multiplies = [any(self._program.uses_matrix_units[block.begin : block.end]) for block in blocks]
        lengths, counts = [block.end - block.begin for block in blocks], self._run.counts
        registers: list[Any] = [_UNKNOWN] * names.num
        i = 0
        while i < len(blocks):
            counts[i] += 1
            if multiplies[i] and self._has_waited:
                self._run.num_turns, self._has_waited = self._run.num_turns + 1, False
            target = bodies[i](registers)
            self._now += lengths[i]
            i = i + 1 if target is None else number.get(target, len(blocks))
            if self._now > _MOST_CYCLES:
                raise LostTrack(f"{self._program.name}: runs for more than {_MOST_CYCLES} cycles")
        self._run.num_cycles = self._now
        return self._run

    def _body(self, block: Block, names: _Names) -> Callable[[list[Any]], int | None]:
        """The block as a Python function from registers to the bundle that it jumps to, or None."""
        lines, jump = [], block.jump
        for i in range(block.begin, block.end):
            # All of a bundle read before any of it writes.
            found = [line for one in self._program.bundles[i] for line in _translated(one, names, i - block.begin)]
            writes = [line.split(" = ", 1) for line in found if line.startswith("r[")]
            acts = [line for line in found if not line.startswith("r[")]
            if jump is not None and jump.bundle == i:
                predicate = names.value(jump.predicate) if jump.predicate else "1"
                lines.append(f"taken = {predicate} {'==' if jump.is_negated else '!='} 0")
            if len(writes) == 1 and not acts:
                lines.append(" = ".join(writes[0]))
            elif writes:
                lines.append("new = " + "".join(f"({value}), " for _, value in writes))
                lines += acts
                lines.append("".join(f"{place}, " for place, _ in writes) + "= new")
            else:
                lines += acts
        lines.append(f"return {jump.target} if taken else None" if jump is not None else "return None")
        source = "def body(r):\n" + "\n".join(f"    {line}" for line in lines)
        scope: dict[str, Any] = {
            "M": _MASK, "S": _SIGN, "select": _select, "least": _least, "most": _most, "either": _either,
            "Place": Place, "unknown": _UNKNOWN, "operand": self._operand,
            "load": self._load, "store": self._store, "start": self._start, "wait": self._wait, "signal": self._signal,
        }  # fmt: skip
        exec(compile(source, f"<{self._program.name} {block.begin:#x}>", "exec"), scope)
        body: Callable[[list[Any]], int | None] = scope["body"]

        def guarded(registers: list[Any]) -> int | None:
            try:
                return body(registers)
            except LostTrack as error:
                trace = error.__traceback__
                while trace is not None and trace.tb_frame.f_code is not body.__code__:
                    trace = trace.tb_next
                line = "" if trace is None else source.splitlines()[trace.tb_lineno - 1].strip()
                raise LostTrack(
                    f"{self._program.name}, from bundle {block.begin:#x}: {error} is not known: `{line}`"
                ) from error

        return guarded

    def _operand(self, space: str, index: int) -> Any:
        if space == "<no memory space>":
            return int(self._operands[index].reshape(-1)[0]) & _MASK
        return Place(f"operand {index}")

    def _load(self, place: Any) -> Any:
        return self._smem.get((place.base, place.offset), _UNKNOWN) if isinstance(place, Place) else _UNKNOWN

    def _store(self, place: Any, value: Any, predicate: Any) -> None:
        """Where nothing says whether it happens, as behind the barrier of two cores, nothing is known of the place."""
        is_sure = not isinstance(predicate, _Unknown)
        if is_sure and not predicate:
            return
        if not isinstance(place, Place):
            raise LostTrack("the address of a scalar store")
        self._smem[place.base, place.offset] = value if is_sure else _UNKNOWN

    def _start(
        self, source: Any, size: Any, target: Any, flag: Any, kind: str, after: int, stride: Any, num_steps: Any
    ) -> None:
        if not isinstance(size, int) or not isinstance(flag, Place):
            raise LostTrack(f"the size or the semaphore of a {kind}")
        num_bytes = size * GRANULE_BYTES
        if kind.endswith("_to_smem"):
            self._fill(source, num_bytes, target, stride, num_steps)
        begin = self._now + after + self._memory.latency
        is_far = "hbm" in kind or kind == "dma.general"
        if is_far:
            begin = self._memory_is_free = max(begin, self._memory_is_free) + num_bytes / self._memory.bytes_per_cycle
        if is_pool := isinstance(source, Place) and source.base in self._pool:
            self._run.pool_bytes, self._run.num_fetches = self._run.pool_bytes + num_bytes, self._run.num_fetches + 1
        self._flags[flag.base, flag.offset].append([begin, size, is_pool])

    def _fill(self, source: Any, num_bytes: int, target: Any, stride: Any, num_steps: Any) -> None:
        """Copies an operand's integers into scalar memory; beyond its end lies what pads it.

        Where it has a stride, so many steps of 512 bytes follow each other, and the next begin a stride behind them.
        """
        if not isinstance(source, Place) or not isinstance(target, Place):
            raise LostTrack("the address of a DMA to scalar memory")
        operand = self._operands.get(int(source.base.removeprefix("operand ")))
        if operand is None:
            raise LostTrack(f"{source.base}, which is read into scalar memory but not known")
        if source.base not in self._integers:
            self._integers[source.base] = _as_it_lies(operand)
        numbers, begin = self._integers[source.base], source.offset * GRANULE_BYTES // 4
        num_numbers = num_bytes // 4 if stride is None else num_steps * _STEP_NUMBERS
        stride_numbers = 0 if stride is None else stride * GRANULE_BYTES // 4
        for i in range(num_bytes // 4):
            place = begin + i // num_numbers * stride_numbers + i % num_numbers
            number = numbers[place].item() if place < len(numbers) else None
            if number is not None:
                self._smem[target.base, target.offset + i] = number & _MASK if isinstance(number, int) else _UNKNOWN

    def _signal(self, flag: Any, size: Any) -> None:
        """Adds to a semaphore what no DMA brings: the part of a window beyond an array, or a copy within the core."""
        if isinstance(flag, Place) and isinstance(size, int) and _signed(size) > 0:
            self._flags[flag.base, flag.offset].append([self._now, size, False])

    def _wait(self, flag: Any, size: Any, after: int) -> None:
        if not isinstance(size, int) or not isinstance(flag, Place):
            raise LostTrack("the size or the semaphore of a wait")
        started, left, ready = self._flags[flag.base, flag.offset], size, 0.0
        is_pool = False
        while left > 0:
            if not started:
                raise LostTrack(f"what a wait for {left * GRANULE_BYTES} bytes more than were started waits for")
            first = started[0]
            taken = min(left, first[1])
            ready, left, first[1] = max(ready, first[0]), int(left - taken), first[1] - taken
            is_pool |= bool(first[2])
            if first[1] == 0:
                started.popleft()
        if is_pool:
            self._has_waited = True
        stalled = max(0.0, ready - self._now - after)
        self._now += stalled
        self._run.num_stalled += stalled


def _as_it_lies(operand: np.ndarray) -> np.ndarray:
    """The numbers of an operand in the order of their addresses: what has two axes lies in tiles of 8 x 128."""
    if operand.ndim < 2:
        return operand.reshape(-1)
    if operand.ndim > 2 or operand.shape[0] < _TILE[0]:
        raise LostTrack(f"an operand of the shape {operand.shape} that is read into scalar memory")
    tiles = np.pad(operand, [(0, -size % tile) for size, tile in zip(operand.shape, _TILE, strict=True)])
    rows, columns = (size // tile for size, tile in zip(tiles.shape, _TILE, strict=True))
    return tiles.reshape(rows, _TILE[0], columns, _TILE[1]).swapaxes(1, 2).reshape(-1)


class _Names:
    """Registers of a program as places of a list; what has two names, as at the head of a loop, has one place."""

    def __init__(self, program: Program) -> None:
        same: dict[str, str] = {}
        for bundle in program.bundles:
            for one in bundle:
                if _is_name(one):
                    for other in re.findall(r"%[\w.]+", one.operands):
                        same[self._first(same, other)] = self._first(same, one.result)
        self._same, self._places = same, dict[str, int]()
        self._decisive = self._deciding(program)

    def _deciding(self, program: Program) -> set[str]:
        """The names whose values reach a jump, a store, a DMA or a wait, unlike those of checks of bounds."""
        read_by: dict[str, set[str]] = {}
        found: set[str] = set()
        for one in (one for bundle in program.bundles for one in bundle):
            read = {self._first(self._same, name) for name in re.findall(r"%[sp]\w+", one.operands)}
            if one.name.startswith(("sbr", "sst", "dma.", "vsyncadd")):
                found |= read
            elif one.result and not _is_name(one):
                read_by.setdefault(self._first(self._same, one.result), set()).update(read)
        left = list(found)
        while left:
            new = read_by.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    def decides(self, name: str) -> bool:
        return self._first(self._same, name) in self._decisive

    @staticmethod
    def _first(same: Mapping[str, str], name: str) -> str:
        while (other := same.get(name, name)) != name:
            name = other
        return name

    @property
    def num(self) -> int:
        return len(self._places)

    def place(self, name: str) -> str:
        return f"r[{self._places.setdefault(self._first(self._same, name), len(self._places))}]"

    def value(self, text: str) -> str:
        """An operand as Python."""
        text = text.rpartition("*/")[2].strip()
        if text.startswith("["):
            return self.address(text[1:-1])
        text = text.partition(" ")[0]  # behind it: the allocation that an address is within
        if text.startswith("%"):
            return self.place(text)
        if text.startswith("!%"):
            return f"(1 ^ {self.place(text[1:])})"
        try:
            return str(int(text, 0) & _MASK)
        except ValueError:
            return "unknown"

    def address(self, text: str) -> str:
        """`#allocation12 + %s3 + $0x1` as Python."""
        parts = []
        for part in text.split(" + "):
            if part.startswith("#"):
                parts.append(f"Place({part!r})")
            else:
                parts.append(self.value(part.removeprefix("$")))
        return " + ".join(parts)


def _translated(one: Instruction, names: _Names, after: int) -> Iterator[str]:
    """What an instruction does to scalar registers, scalar memory and DMAs, as lines of Python."""
    predicate, otherwise, operands = "", "", one.operands.removeprefix("[thread:$0]").lstrip()
    if found := _PREDICATED.search(operands):
        predicate = f"{names.value(found[2])} {'==' if found[1] else '!='} 0"
        otherwise, operands = found[3] or "", (operands[: found.start()] + operands[found.end() :]).strip()
    if one.name.startswith("dma.done.wait"):
        flag, size = (names.value(part) for part in operands.split(",")[:2])
        yield _guarded(predicate, f"wait({flag}, {size}, {after})")
    elif one.name == "vsyncadd":
        flag, size = (names.value(part) for part in operands.split(",")[:2])
        yield _guarded(predicate, f"signal({flag}, {size})")
    elif one.name.startswith("dma."):
        yield _guarded(predicate, _dma(one.name, operands, names, after))
    elif one.name == "sst":
        place, _, value = operands.partition("]] ")
        arguments = names.address(place.removeprefix("[smem:[")), names.value(value), predicate or "1"
        yield f"store({', '.join(arguments)})"
    elif re.match(r"%[sp]\d", one.result) and not _is_name(one) and names.decides(one.result):
        value = _value(one.name, operands, names)
        if predicate:
            value = f"select({predicate}, {value}, {names.value(otherwise) if otherwise else names.place(one.result)})"
        yield f"{names.place(one.result)} = {value}"


def _is_name(one: Instruction) -> bool:
    """Whether it moves nothing: its result is its operands' register under another name."""
    return one.name.endswith("phi") or one.name.startswith("int_to_ptr")


def _guarded(predicate: str, line: str) -> str:
    return f"if {predicate}: {line}" if predicate else line


def _dma(name: str, operands: str, names: _Names, after: int) -> str:
    labels = {label: names.value(value.strip()) for label, value in _LABELLED.findall(operands)}
    source, target = name.removeprefix("dma.").split("_to_") if "_to_" in name else ("src", "dst")
    try:
        ends = labels[source], labels["size_in_granules"], labels[target], labels["dst_syncflagno"]
    except KeyError as missing:
        raise LostTrack(f"a {name} without {missing}, but with {', '.join(labels) or 'no names'}") from missing
    strides = (labels.get(label, "None") for label in ("src_stride", "steps_per_stride"))
    return f"start({', '.join(ends)}, {name!r}, {after}, {', '.join(strides)})"


def _value(name: str, operands: str, names: _Names) -> str:
    if name.startswith("inlined_call_operand"):
        found = _OPERAND.match(f"{name} {operands}")
        return f"operand({found[1]!r}, {found[4]})" if found else "unknown"
    if name == "sld":
        return f"load({names.address(operands.removeprefix('[smem:[').partition(']]')[0])})"
    parts = [names.value(part) for part in _split(operands)]
    if name.startswith("scalar_lea"):
        return f"{parts[0]} + {parts[1]}"
    if name == "scalar_select":
        return f"select({parts[0]}, {parts[1]}, {parts[2]})"
    if name.startswith("scmp."):
        _, comparison, kind, *_ = name.split(".")
        if comparison not in _COMPARED or kind not in ("s32", "u32"):
            return "unknown"
        turned = "({0} ^ S)" if kind == "s32" else "{0}"
        a, b = (turned.format(part) for part in parts)
        return f"({a} {_COMPARED[comparison]} {b}) + 0"
    form = (_BINARY if len(parts) == 2 else _UNARY).get(name, "unknown")
    return form.format(*parts)


def _split(operands: str) -> Sequence[str]:
    return [part for part in (part.strip() for part in operands.split(",")) if part]
