"""Snapshots -> frames: JSON with the changes since the previous frame.

    whole    base null        the full state
    change   base 16          the difference from frame 16; readable only with the state after that frame

Changed cells are encoded as runs of equal ones: [first, count, cell] as little-endian uint32 in base64. A changed table
is sent from its first difference on. Requests, queues and totals are always complete.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jpaged import json_text
from jpaged.pool.cells import U32, cells_of, host_cells_of
from jpaged.pool.picture import I32, Happening, Occupant, PoolPicture

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

    picture: PoolPicture
    cells: U32
    host_cells: U32
    tables: dict[_TableKey, I32]
    recent: list[Happening] = field(default_factory=list)


class FrameWriter:
    """Writes consecutive frames of a server's pools; callers must not use it from two threads at once."""

    def __init__(self) -> None:
        self.number = 0
        self._known: list[_Known] = []

    def change(self, pictures: Sequence[PoolPicture]) -> Frame:
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


def _known(picture: PoolPicture, old: _Known | None) -> _Known:
    recent = [*([] if old is None else old.recent), *picture.happenings][-_MAX_TOLD:]
    return _Known(picture, cells_of(picture), host_cells_of(picture), _tables(picture.occupants), recent)


def _tables(occupants: Sequence[Occupant]) -> dict[_TableKey, I32]:
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


def _request(one: Occupant) -> dict[str, Any]:
    return {
        "number": one.number,
        "id": one.request_id,
        "status": one.status,
        "prompt": one.num_prompt_tokens,
        "cached": one.num_cached_tokens,
        "preemptions": one.num_preemptions,
        "sequences": [[chain.sequence, chain.num_tokens] for chain in one.chains],
    }


def _happening(one: Happening) -> list[Any]:
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
