"""What somebody who watches a pool sees of it, and how that goes over a wire. Plain values and numpy.

picture.py  a pool between two steps: blocks, tables, queues, what has happened
cells.py    a block as one number: what it is, who holds it, how many tables do
frames.py   pictures -> frames: what has changed since the one before
reader.py   frames -> the whole again
"""

from jpaged.pool.cells import Kind, cells_of, host_cells_of, unpack
from jpaged.pool.frames import Frame, FrameWriter
from jpaged.pool.picture import Chain, Happening, MemoryMarks, Occupant, PoolPicture
from jpaged.pool.reader import FrameReader, PoolView

__all__ = [
    "Chain",
    "Frame",
    "FrameReader",
    "FrameWriter",
    "Happening",
    "Kind",
    "MemoryMarks",
    "Occupant",
    "PoolPicture",
    "PoolView",
    "cells_of",
    "host_cells_of",
    "unpack",
]
