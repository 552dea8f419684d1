"""What processes have to settle between them while each makes its executor."""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """How the executors of several processes come to the same sizes."""

    def least(self, value: int) -> int:
        """The smallest of what all processes say. Every process asks, in the same order, and waits for the others."""
        ...


class Alone:
    """The agreement of one process with itself."""

    def least(self, value: int) -> int:
        return value
