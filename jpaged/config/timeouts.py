"""Timeouts of requests, steps and stalls."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config.option import option
from jpaged.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TimeoutOptions:
    """Timeouts of requests, and of an engine without progress."""

    default_deadline: float | None = option(
        None, "time that a request has whose caller names none; no limit when left out", low=0.001, high=1e7, unit="s"
    )
    max_deadline: float | None = option(
        None,
        "time that a request has at most, whatever its caller says; no limit when left out",
        low=0.001,
        high=1e7,
        unit="s",
    )
    queue_timeout: float | None = option(
        None,
        "a request that waits so long for its first step is refused with RESOURCE_EXHAUSTED; no limit when left out",
        low=0.001,
        high=1e7,
        unit="s",
    )
    refuse_late: bool = option(
        True,
        "refuse a request at once, with DEADLINE_EXCEEDED, when steps at the quickest that they were measured at could "
        "not end it before its deadline",
    )
    stall_timeout: float = option(
        30.0,
        "with work and without a step for so long the server says NOT_SERVING, until steps end again",
        low=0.05,
        high=1e7,
        unit="s",
    )
    step_timeout: float = option(
        300.0,
        "a step that takes so long hangs: open calls get UNAVAILABLE, the stacks of all threads go to stderr, and the "
        "process ends with exit code 3; 0 waits for ever",
        low=0.0,
        high=1e7,
        unit="s",
    )

    def check(self) -> None:
        """Check the timeouts against each other.

        Raises:
            InvalidArgument: one exceeds another.
        """
        default_s, most_s = self.default_deadline, self.max_deadline
        if default_s is not None and most_s is not None and default_s > most_s:
            raise InvalidArgument("default_deadline", f"{default_s:g} s is above max_deadline ({most_s:g} s)")
        if 0 < self.step_timeout < self.stall_timeout:
            raise InvalidArgument(
                "step_timeout", f"{self.step_timeout:g} s is below stall_timeout ({self.stall_timeout:g} s)"
            )
