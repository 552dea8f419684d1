"""Whether the engine gets on: stalled from --stall-timeout on, hung from --step-timeout on.

    seconds without a step    0 ...... stall_timeout ...... step_timeout
                              serving  stalled: not ready   hung: the server ends, with the stacks of its threads

A stall is seen as it is, and passes. A hang ends the process, so only time counts in which this one was awake: one that
was stopped, or whose machine was, has a step that looks long when it goes on.
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
"""Between two looks no more time counts than this: they are five a second."""


class EngineState(enum.Enum):
    """What a look has found."""

    GOES_ON = "goes on"
    STALLS = "stalls"
    HANGS = "hangs"


class ProgressWatch:
    """Is told of an engine again and again, and says how it gets on."""

    def __init__(self, options: TimeoutOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s, self._hang_s = options.stall_timeout, options.step_timeout
        self._clock = clock
        self._looked_s = clock()
        self._waited_s = 0.0

    def look(self, seconds: float) -> EngineState:
        """Say how it gets on that has had work, and no step that ended, for so many seconds."""
        now_s = self._clock()
        since_look_s, self._looked_s = min(now_s - self._looked_s, _MAX_LOOK_S), now_s
        self._waited_s = min(seconds, self._waited_s + since_look_s)
        if self._hang_s and self._waited_s >= self._hang_s:
            return EngineState.HANGS
        return EngineState.STALLS if seconds >= self._stall_s else EngineState.GOES_ON

    def why(self) -> EngineHung:
        """Return what is told of a hang."""
        return EngineHung(f"no step has ended for {self._hang_s:g} s (step_timeout): the engine hangs, the server ends")


def show_stacks() -> None:
    """Write where every thread is to stderr, also those that are inside of C."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
