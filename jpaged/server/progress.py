"""Watchdog of the engine: stalled after --stall-timeout, hung after --step-timeout.

    seconds without a step    0 ...... stall_timeout ...... step_timeout
                              serving  stalled: not ready   hung: the server ends, with all threads' stacks

A stall is reported as observed, and may pass. A hang ends the process, so it counts only time in which this process was
awake: after a stop of the process or its machine, a step looks long.
"""

from __future__ import annotations

import enum
import faulthandler
import sys
import time
from collections.abc import Callable

from jpaged.config import TimeoutOptions
from jpaged.errors import EngineHung

_MAX_LOOK_S = 2.0
"""Maximum time counted between two looks, of which there are five a second."""


class EngineState(enum.Enum):
    """Result of a look."""

    GOES_ON = "goes on"
    STALLS = "stalls"
    HANGS = "hangs"


class ProgressWatch:
    """Judges the engine's progress in repeated looks."""

    def __init__(self, options: TimeoutOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s, self._hang_s = options.stall_timeout, options.step_timeout
        self._clock = clock
        self._looked_s = clock()
        self._waited_s = 0.0

    def look(self, seconds: float) -> EngineState:
        """Return the state of an engine that has had work for `seconds` without completing a step."""
        now_s = self._clock()
        since_look_s, self._looked_s = min(now_s - self._looked_s, _MAX_LOOK_S), now_s
        self._waited_s = min(seconds, self._waited_s + since_look_s)
        if self._hang_s and self._waited_s >= self._hang_s:
            return EngineState.HANGS
        return EngineState.STALLS if seconds >= self._stall_s else EngineState.GOES_ON

    def why(self) -> EngineHung:
        """Return the error of a hang."""
        return EngineHung(
            f"no step has completed for {self._hang_s:g} s (step_timeout): the engine hangs, so the server exits"
        )


def show_stacks() -> None:
    """Write the stack of every thread to stderr, including threads inside C code."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
