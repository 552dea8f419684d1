"""Frames -> the full state that a viewer has after each frame."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jpaged.pool.cells import U32

_TableKey = tuple[int, int, int, bool]


@dataclass(slots=True)
class PoolView:
    """A viewer's state of one pool.

    Attributes:
        told: the other fields of the last frame, as decoded.
        tables: by number of the request, index of the sequence, KV group, and True for host memory.
    """

    told: dict[str, Any]
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
            view.told = pool
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
