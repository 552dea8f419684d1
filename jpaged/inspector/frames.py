"""Frames: snapshots of KV pools as viewers get them, and their wire format. Plain values and numpy.

The states of blocks are packed into one number each, [N + 1] of them with the null block first:

    31 ............. 11 | 10 ....... 3 | 2 ... 0
    request (21 bits)     tables (8)     kind

The request is the oldest one whose tables hold the block, given by the low bits of the request number. Up to 2**21
consecutive requests have different values.

A frame is JSON with the changes since the previous frame; a reader has the full state after each:

    whole    base null        the full state
    change   base 16          the difference from frame 16; readable only with the state after that frame

Changed cells are encoded as runs of equal ones: [first, count, cell] as little-endian uint32 in base64. A changed table
is sent from its first difference on. Requests, queues and totals are always complete.
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpaged import json_text
from jpaged.pool import I32, U8, PoolEvent, PoolSnapshot, RequestSnapshot

U32 = NDArray[np.uint32]

_COUNT_SHIFT, _OWNER_SHIFT = 3, 11
MOST_COUNTED = 255
"""Maximum of the table count; it also stands for more."""
OWNER_MASK = (1 << (32 - _OWNER_SHIFT)) - 1


class BlockState(enum.IntEnum):
    """State of a block."""

    FREE = 0
    CACHED = 1
    HELD = 2
    PINNED = 3
    ASIDE = 4
    RESERVED = 5


def pack_cells(picture: PoolSnapshot) -> U32:
    """Return the packed states of the device blocks."""
    tables = [[table for chain in one.chains for table in chain.tables] for one in picture.occupants]
    marks = picture.marks
    cells = _cells(picture.num_blocks, marks.cached, picture.occupants, tables, pinned=marks.pinned)
    free = (cells & 7) <= BlockState.CACHED
    reserved = np.zeros(len(cells), bool)
    reserved[marks.reserved] = True
    cells[reserved & free] = BlockState.RESERVED
    cells[marks.withheld] = BlockState.ASIDE
    cells[0] = 0
    return cells


def pack_host_cells(picture: PoolSnapshot) -> U32:
    """Return the packed states of the host memory blocks."""
    tables = [[table for chain in one.chains for table in chain.host_tables] for one in picture.occupants]
    return _cells(picture.num_host_blocks, picture.marks.host_cached, picture.occupants, tables)


def unpack(cells: U32) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the kind, the number of tables and the request of each block."""
    mask, most = np.uint32(7), np.uint32(MOST_COUNTED)
    return cells & mask, (cells >> np.uint32(_COUNT_SHIFT)) & most, cells >> np.uint32(_OWNER_SHIFT)


def _cells(
    num_blocks: int,
    cached: U8,
    occupants: Iterable[RequestSnapshot],
    tables: list[list[I32]],
    pinned: I32 | None = None,
) -> U32:
    none = np.zeros(0, np.int32)
    pins = none if pinned is None else pinned
    owners = np.zeros(num_blocks + 1, np.uint32)
    every = []
    for one, of_one in sorted(zip(occupants, tables, strict=True), key=lambda pair: -pair[0].number):
        if of_one:
            held = np.concatenate(of_one)
            owners[held] = one.number & OWNER_MASK  # the oldest comes last
            every.append(held)
    held = np.concatenate(every) if every else none
    of_sequences = np.bincount(held, minlength=num_blocks + 1).astype(np.uint32)
    of_pins = np.bincount(pins, minlength=num_blocks + 1).astype(np.uint32)
    kinds = cached.astype(np.uint32)
    kinds[of_pins > 0] = BlockState.PINNED
    kinds[of_sequences > 0] = BlockState.HELD
    counts = np.minimum(of_sequences + of_pins, MOST_COUNTED)
    cells = kinds | counts << _COUNT_SHIFT | owners << _OWNER_SHIFT
    cells[0] = 0
    return cells


_MAX_TOLD = 200
"""Maximum number of past events in a whole frame."""

_TableKey = tuple[int, int, int, bool]
"""A request's number, the index of its sequence, the KV group, and True for host memory."""


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded frame; `base` is the number of the frame that it changes, None for a whole one."""

    number: int
    base: int | None
    data: bytes


@dataclass(slots=True)
class _Known:
    """The last state sent of one pool."""

    picture: PoolSnapshot
    cells: U32
    host_cells: U32
    tables: dict[_TableKey, I32]
    recent: list[PoolEvent] = field(default_factory=list)


class FrameWriter:
    """Writes consecutive frames of a server's pools; callers must not use it from two threads at once."""

    def __init__(self) -> None:
        self.number = 0
        self._known: list[_Known] = []

    def change(self, pictures: Sequence[PoolSnapshot]) -> Frame:
        """Encode the next snapshots, of all pools, as a frame of changes from the previous ones."""
        before: Sequence[_Known | None] = self._known or [None] * len(pictures)
        after = [_known(picture, old) for picture, old in zip(pictures, before, strict=True)]
        pools = [_pool(new, old) for new, old in zip(after, before, strict=True)]
        base = self.number if self._known else None
        self._known, self.number = after, self.number + 1
        return _frame(self.number, base, pools)

    def whole(self) -> Frame:
        """Return the last snapshots as a whole frame, for a new viewer."""
        return _frame(self.number, None, [_pool(known, None) for known in self._known])


def _known(picture: PoolSnapshot, old: _Known | None) -> _Known:
    recent = [*([] if old is None else old.recent), *picture.happenings][-_MAX_TOLD:]
    return _Known(picture, pack_cells(picture), pack_host_cells(picture), _tables(picture.occupants), recent)


def _tables(occupants: Sequence[RequestSnapshot]) -> dict[_TableKey, I32]:
    return {
        (one.number, chain.sequence, kv_group, is_host): table
        for one in occupants
        for chain in one.chains
        for is_host, tables in ((False, chain.tables), (True, chain.host_tables))
        for kv_group, table in enumerate(tables)
        if len(table)
    }


def _frame(number: int, base: int | None, pools: list[dict[str, Any]]) -> Frame:
    text = json_text.dumps({"number": number, "base": base, "pools": pools}, separators=(",", ":"))
    return Frame(number, base, text.encode())


def _pool(new: _Known, old: _Known | None) -> dict[str, Any]:
    picture = new.picture
    present = {(one.number, chain.sequence) for one in picture.occupants for chain in one.chains}
    happenings = new.recent if old is None else picture.happenings
    return {
        "time_s": round(picture.time_s, 4),
        "num_blocks": picture.num_blocks,
        "num_host_blocks": picture.num_host_blocks,
        "block_size": picture.block_size,
        "num_kv_groups": picture.num_kv_groups,
        "limit": picture.limit,
        "cells": _runs(new.cells, None if old is None else old.cells),
        "host_cells": _runs(new.host_cells, None if old is None else old.host_cells),
        "requests": [_request(one) for one in picture.occupants],
        "num_waiting": picture.num_waiting,
        "tables": _changed(new.tables, {} if old is None else old.tables, present),
        "happenings": [_happening(one) for one in happenings],
        "totals": dict(picture.totals),
    }


def _request(one: RequestSnapshot) -> dict[str, Any]:
    return {
        "number": one.number,
        "id": one.request_id,
        "status": one.status,
        "prompt": one.num_prompt_tokens,
        "cached": one.num_cached_tokens,
        "preemptions": one.num_preemptions,
        "sequences": [[chain.sequence, chain.num_tokens] for chain in one.chains],
    }


def _happening(one: PoolEvent) -> list[Any]:
    return [one.number, one.kind, one.request, one.count, list(one.blocks), one.why]


def _runs(cells: U32, before: U32 | None) -> str:
    """Encode the changed cells as runs of equal ones."""
    changed = np.flatnonzero(cells if before is None else cells != before)
    if not len(changed):
        return ""
    values = cells[changed]
    begins = np.flatnonzero((np.diff(changed, prepend=-2) != 1) | (np.diff(values, prepend=values[0]) != 0))
    lens = np.diff(begins, append=len(changed))
    runs = np.stack([changed[begins], lens, values[begins]], axis=1)
    return base64.b64encode(runs.astype("<u4").tobytes()).decode()


def _changed(
    tables: dict[_TableKey, I32], before: dict[_TableKey, I32], present: set[tuple[int, int]]
) -> list[list[Any]]:
    """Return the changed tables: key, index of the first difference, and the blocks from there; none if removed.

    Tables of a removed sequence are omitted, because the reader drops them with it.
    """
    changed: list[list[Any]] = []
    for key, table in tables.items():
        old = before.get(key)
        start = 0 if old is None else _first_difference(table, old)
        if old is None or start < max(len(table), len(old)):
            changed.append([*key[:3], int(key[3]), start, table[start:].tolist()])
    gone = [key for key in before.keys() - tables.keys() if key[:2] in present]
    return changed + [[*key[:3], int(key[3]), 0, []] for key in sorted(gone)]


def _first_difference(left: I32, right: I32) -> int:
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


@dataclass(slots=True)
class PoolView:
    """A viewer's state of one pool.

    Attributes:
        last: the other fields of the last frame, as decoded.
        tables: by number of the request, index of the sequence, KV group, and True for host memory.
    """

    last: dict[str, Any]
    cells: U32
    host_cells: U32
    tables: dict[_TableKey, list[int]] = field(default_factory=dict)


class FrameReader:
    """Follows frames.

    Attributes:
        number: number of the last frame; None before the first.
        pools: state after that frame.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.pools: list[PoolView] = []

    def take(self, data: bytes | str) -> None:
        """Apply the next frame.

        Raises:
            ValueError: the frame changes another one than the last.
        """
        frame = json.loads(data)
        if frame["base"] is None:
            self.pools = [
                PoolView(
                    pool, np.zeros(pool["num_blocks"] + 1, np.uint32), np.zeros(pool["num_host_blocks"] + 1, np.uint32)
                )
                for pool in frame["pools"]
            ]
        elif frame["base"] != self.number:
            raise ValueError(f"frame {frame['number']} changes frame {frame['base']}, the last was {self.number}")
        self.number = frame["number"]
        for view, pool in zip(self.pools, frame["pools"], strict=True):
            view.last = pool
            _apply(view.cells, pool["cells"])
            _apply(view.host_cells, pool["host_cells"])
            for number, index, kv_group, is_host, start, block_ids in pool["tables"]:
                key = number, index, kv_group, bool(is_host)
                view.tables[key] = view.tables.get(key, [])[:start] + block_ids
            present = {(one["number"], index) for one in pool["requests"] for index, _ in one["sequences"]}
            view.tables = {key: table for key, table in view.tables.items() if table and key[:2] in present}


def _apply(cells: U32, runs: str) -> None:
    for first, count, value in np.frombuffer(base64.b64decode(runs), "<u4").reshape(-1, 3):
        cells[first : first + count] = value
