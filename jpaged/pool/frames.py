"""Pictures -> frames: JSON that says what has changed since the frame before.

    whole    base null        everything, as if nothing had been before
    change   base 16          what differs from frame 16; only who has that one can read it

Cells that have changed are runs of equal ones: [first, how many, cell] as little-endian uint32 in base64. A table that
has changed is told from its first place that differs. Of requests, queues and totals a frame has all.
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
"""Happenings that a whole frame tells again."""

_TableKey = tuple[int, int, int, bool]
"""A request's number, the index of its sequence, the KV group, and whether it is in host memory."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as it is sent; `base` is the number of the one that it changes, None for a whole one."""

    number: int
    base: int | None
    data: bytes


@dataclass(slots=True)
class _Known:
    """What was last told of one pool."""

    picture: PoolPicture
    cells: U32
    host_cells: U32
    tables: dict[_TableKey, I32]
    recent: list[Happening] = field(default_factory=list)


class FrameWriter:
    """Writes frames of the pools of a server, one after the other; a thread at a time may ask."""

    def __init__(self) -> None:
        self.number = 0
        self._known: list[_Known] = []

    def change(self, pictures: Sequence[PoolPicture]) -> Frame:
        """Takes the next pictures, of all pools, and returns the frame from the ones before to them."""
        before: Sequence[_Known | None] = self._known or [None] * len(pictures)
        after = [_known(picture, old) for picture, old in zip(pictures, before, strict=True)]
        pools = [_pool(new, old) for new, old in zip(after, before, strict=True)]
        base = self.number if self._known else None
        self._known, self.number = after, self.number + 1
        return _frame(self.number, base, pools)

    def whole(self) -> Frame:
        """The last pictures, for who has seen none before."""
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
    """The runs of equal cells among those that have changed."""
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
    """The tables that differ: whose, the first place that does, and what is there from it on; none where one is gone.

    Those of a sequence that has left are not told of, which went with it.
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
