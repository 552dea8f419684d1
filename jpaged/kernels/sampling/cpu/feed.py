"""Masks that the host supplies to a running program, and the tokens that it samples with them; see feed.h."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jpaged.kernels.cpu.library import library

_TIMEOUT_MS = 50


@dataclass(slots=True)
class Feed:
    """An open mask channel. Used by one thread at a time, except for `interrupt`.

    Attributes:
        number: its name for a program; above 0.
        num_rows: rows of the masks (R).
        num_words: words of a mask (W); 0 for a program that waits for no masks, which only `interrupt` affects.
    """

    number: int
    num_rows: int
    num_words: int

    @classmethod
    def open(cls, num_rows: int, num_words: int) -> Feed:
        """Open a channel for a program that is about to start."""
        return cls(_functions().jpaged_feed_open(num_rows, num_words), num_rows, num_words)

    def give(self, mask_rw: NDArray[np.int32], verdict: int) -> None:
        """Send the masks of the next step, which are copied.

        Raises:
            ValueError: they have another shape or type.
        """
        if mask_rw.shape != (self.num_rows, self.num_words) or mask_rw.dtype != np.int32:
            raise ValueError(f"masks are {mask_rw.dtype}{mask_rw.shape}, not int32{(self.num_rows, self.num_words)}")
        _functions().jpaged_feed_give(self.number, np.ascontiguousarray(mask_rw).ctypes.data, verdict)

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]] | None:
        """Return the sampled tokens of the latest step with masks, and whether logits were finite, `[R]` each.

        Return None on timeout.
        """
        drawn_2r = np.empty((2, self.num_rows), np.int32)
        if not _functions().jpaged_feed_wait(self.number, drawn_2r.ctypes.data, _TIMEOUT_MS):
            return None
        return drawn_2r[0], drawn_2r[1] != 0

    def interrupt(self) -> None:
        """Let the current step of a program without masks be the last. Thread-safe; no-op if the channel is closed."""
        _functions().jpaged_feed_interrupt(self.number)

    def num_steps(self) -> int:
        """Return the number of executed steps of a program without masks that has ended; 0 if the channel is closed."""
        return int(_functions().jpaged_feed_num_steps(self.number))

    def close(self) -> None:
        """Close the channel: a waiting step becomes void. Idempotent."""
        _functions().jpaged_feed_close(self.number)


@functools.cache
def _functions() -> ctypes.CDLL:
    found = library()
    if isinstance(found, str):
        raise OSError(found)
    number, pointer, size = ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64
    found.jpaged_feed_open.argtypes, found.jpaged_feed_open.restype = (size, size), number
    found.jpaged_feed_give.argtypes, found.jpaged_feed_give.restype = (number, pointer, number), ctypes.c_bool
    found.jpaged_feed_wait.argtypes, found.jpaged_feed_wait.restype = (number, pointer, size), ctypes.c_bool
    found.jpaged_feed_interrupt.argtypes, found.jpaged_feed_interrupt.restype = (number,), ctypes.c_bool
    found.jpaged_feed_num_steps.argtypes, found.jpaged_feed_num_steps.restype = (number,), size
    found.jpaged_feed_close.argtypes, found.jpaged_feed_close.restype = (number,), None
    return found
