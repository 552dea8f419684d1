"""Masks for steps that are under way: what the host gives to a program between its forward passes and its samples.

    device   forward 0 ─ sample 0 ─ forward 1 ─ sample 1 ─ ...
    host     give ─────┘       └ wait ─ give ─┘       └ wait ─ ...

So rows with grammars make several steps in one dispatch, as those without do, and the host comes in between for their
masks alone.
"""

from __future__ import annotations

import enum
from typing import Protocol

from jpaged.engine.executor.shapes import I32, Bool


class Verdict(enum.IntEnum):
    """What becomes of a step that is given its masks, and of those behind it."""

    VOID = 0  # it is not made, for the feed was closed: the step before was the last
    LAST = 1
    GOES_ON = 2


class MaskFeed(Protocol):
    """Feeds one dispatch."""

    def give(self, mask_rw: I32, verdict: Verdict) -> None:
        """Gives the next step its masks: `EditInputs.mask_rw`, of as many rows as the dispatch was padded to."""
        ...

    def wait(self) -> tuple[I32, Bool] | None:
        """The tokens of the step that was given masks last, and which are sound, `[R]` each; None where it failed."""
        ...

    def close(self) -> None:
        """Ends it; a step that waits for masks is void. Idempotent."""
        ...
