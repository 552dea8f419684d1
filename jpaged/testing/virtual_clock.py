"""A clock that only moves by calls."""

from __future__ import annotations


class VirtualClock:
    """Returns the time in seconds when called; only `advance` moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time runs forward: {seconds} s is below 0")
        self._now_s += seconds
