"""Block states packed into one number each, [N + 1] of them with the null block first.

    31 ............. 11 | 10 ....... 3 | 2 ... 0
    request (21 bits)     tables (8)     kind

The request is the oldest one whose tables hold the block, given by the low bits of the request number. Up to 2**21
consecutive requests have different values.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from jpaged.pool.picture import I32, U8, Occupant, PoolPicture

U32 = NDArray[np.uint32]

_COUNT_SHIFT, _OWNER_SHIFT = 3, 11
MOST_COUNTED = 255
"""Maximum of the table count; it also stands for more."""
OWNER_MASK = (1 << (32 - _OWNER_SHIFT)) - 1


class Kind(enum.IntEnum):
    """State of a block."""

    FREE = 0
    CACHED = 1
    HELD = 2
    PINNED = 3
    ASIDE = 4
    RESERVED = 5


def cells_of(picture: PoolPicture) -> U32:
    """Return the packed states of the device blocks."""
    tables = [[table for chain in one.chains for table in chain.tables] for one in picture.occupants]
    marks = picture.marks
    cells = _cells(picture.num_blocks, marks.cached, picture.occupants, tables, pinned=marks.pinned)
    free = (cells & 7) <= Kind.CACHED
    reserved = np.zeros(len(cells), bool)
    reserved[marks.reserved] = True
    cells[reserved & free] = Kind.RESERVED
    cells[marks.aside] = Kind.ASIDE
    cells[0] = 0
    return cells


def host_cells_of(picture: PoolPicture) -> U32:
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
    occupants: Iterable[Occupant],
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
    kinds[of_pins > 0] = Kind.PINNED
    kinds[of_sequences > 0] = Kind.HELD
    counts = np.minimum(of_sequences + of_pins, MOST_COUNTED)
    cells = kinds | counts << _COUNT_SHIFT | owners << _OWNER_SHIFT
    cells[0] = 0
    return cells
