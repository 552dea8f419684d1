"""Numbers computed from a frame: blocks by kind, tokens per second, requests by state."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from jpaged.pool import FrameReader, Kind, PoolView, unpack

_WINDOW_S = 1.5
_NUM_KEPT = 240


class Rate:
    """Tokens per second, from counters.

    Attributes:
        history: rates over about a tenth of a second each, the latest last.
    """

    def __init__(self) -> None:
        self.history: deque[float] = deque(maxlen=_NUM_KEPT)
        self._points: deque[tuple[float, int]] = deque()

    def take(self, reader: FrameReader) -> None:
        """Add the counts of a frame."""
        now_s = max(pool.told["time_s"] for pool in reader.pools)
        num_tokens = sum(pool.told["totals"]["num_generation_tokens"] for pool in reader.pools)
        if self._points and now_s <= self._points[-1][0]:
            return
        if self._points:
            then_s, before = self._points[-1]
            self.history.append((num_tokens - before) / (now_s - then_s))
        self._points.append((now_s, num_tokens))
        while len(self._points) > 2 and self._points[0][0] < now_s - _WINDOW_S:
            self._points.popleft()

    @property
    def now(self) -> float:
        """Mean over about the last second."""
        if len(self._points) < 2:
            return 0.0
        (then_s, before), (now_s, num_tokens) = self._points[0], self._points[-1]
        return (num_tokens - before) / (now_s - then_s)


def census(pool: PoolView) -> dict[str, int]:
    """Return the number of blocks of each kind."""
    counts = np.bincount(unpack(pool.cells)[0][1:], minlength=len(Kind))
    return {kind.name.lower(): int(counts[kind]) for kind in Kind}


def summary(reader: FrameReader, rate: Rate) -> dict[str, Any]:
    """Return everything except single blocks and events."""
    pools = [
        {
            "num_blocks": pool.told["num_blocks"],
            "block_size": pool.told["block_size"],
            "limit": pool.told["limit"],
            "blocks": census(pool),
            "num_host_blocks": pool.told["num_host_blocks"],
            "host_blocks_held": int(np.count_nonzero(unpack(pool.host_cells)[0] == Kind.HELD)),
            "num_waiting": pool.told["num_waiting"],
            "requests": pool.told["requests"],
            "totals": pool.told["totals"],
        }
        for pool in reader.pools
    ]
    return {"tokens_per_second": round(rate.now, 1), "pools": pools}


def line(reader: FrameReader, rate: Rate) -> str:
    """Return the same in one line, for all pools together."""
    counts = [census(pool) for pool in reader.pools]
    held = sum(count["held"] + count["pinned"] for count in counts)
    cached = sum(count["cached"] for count in counts)
    limit = sum(pool.told["limit"] for pool in reader.pools)
    states = [one["status"] for pool in reader.pools for one in pool.told["requests"]]
    waiting = sum(pool.told["num_waiting"] for pool in reader.pools)
    totals = [pool.told["totals"] for pool in reader.pools]
    preemptions = sum(total["num_preemptions"] for total in totals)
    copies = sum(total["num_copies_on_write"] for total in totals)
    queues = f"{states.count('running')} running, {states.count('swapped')} swapped, {waiting} waiting"
    return (
        f"{rate.now:.0f} tokens/s, {held} of {limit} blocks in use, {cached} cached, {queues}, "
        f"{preemptions} preemptions, {copies} copies on write"
    )
