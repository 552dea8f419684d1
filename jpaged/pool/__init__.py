"""Snapshots of a KV pool for viewers, and their wire format. Plain values and numpy.

picture.py  a pool between two steps: blocks, tables, queues, events
changes.py  KV cache events: blocks stored and removed
cells.py    a block packed into one number: its kind, request, and number of tables
frames.py   snapshots -> frames: the changes since the previous one
reader.py   frames -> the full state
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
