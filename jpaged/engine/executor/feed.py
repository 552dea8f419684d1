"""Mask channel: the host sends token masks to a running program between its forward passes and its samples.

    device   forward 0 ─ sample 0 ─ forward 1 ─ sample 1 ─ ...
    host     give ─────┘       └ wait ─ give ─┘       └ wait ─ ...

Rows with grammars thus run several steps in one dispatch, like rows without, and the host works between them only for
the masks.
"""

from __future__ import annotations

import enum
from typing import Protocol

from jpaged.engine.executor.shapes import I32, Bool


class Verdict(enum.IntEnum):
    """Directive to a step that waits for masks, and to the steps after it."""

    VOID = 0  # the step is not executed, because the feed was closed: the previous step was the last
    LAST = 1
    GOES_ON = 2


class MaskFeed(Protocol):
    """Channel of one dispatch."""

    def give(self, mask_rw: I32, verdict: Verdict) -> None:
        """Send the next step its masks: `EditInputs.mask_rw`, with the padded number of rows of the dispatch."""
        ...

    def wait(self) -> tuple[I32, Bool] | None:
        """Return the tokens of the last step with masks, and which are finite, `[R]` each; None if it failed."""
        ...

    def close(self) -> None:
        """Close the channel; a step that waits for masks is not executed. Idempotent."""
        ...
