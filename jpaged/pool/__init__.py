"""What somebody who watches a pool sees of it, and how that goes over a wire. Plain values and numpy.

picture.py  a pool between two steps: blocks, tables, queues, what has happened
changes.py  what blocks begin and cease to hold
cells.py    a block as one number: what it is, who holds it, how many tables do
frames.py   pictures -> frames: what has changed since the one before
reader.py   frames -> the whole again
"""

from jpaged.pool.cells import Kind, cells_of, host_cells_of, unpack
from jpaged.pool.changes import Change, Owner, Removed, Stored, Tier
from jpaged.pool.frames import Frame, FrameWriter
from jpaged.pool.picture import Chain, Happening, MemoryMarks, Occupant, PoolPicture
from jpaged.pool.reader import FrameReader, PoolView

__all__ = [
    "Chain",
    "Change",
    "Frame",
    "FrameReader",
    "FrameWriter",
    "Happening",
    "Kind",
    "MemoryMarks",
    "Occupant",
    "Owner",
    "PoolPicture",
    "PoolView",
    "Removed",
    "Stored",
    "Tier",
    "cells_of",
    "host_cells_of",
    "unpack",
]
