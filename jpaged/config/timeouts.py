"""Timeouts of requests, steps and stalls."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config.option import option
from jpaged.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TimeoutOptions:
    """Timeouts of requests, and of an engine without progress."""

    default_deadline: float | None = option(
        None, "deadline of requests that set none; unlimited if unset", low=0.001, high=1e7, unit="s"
    )
    max_deadline: float | None = option(
        None,
        "maximum deadline of any request; unlimited if unset",
        low=0.001,
        high=1e7,
        unit="s",
    )
    queue_timeout: float | None = option(
        None,
        "maximum wait for the first step; later the request is refused with RESOURCE_EXHAUSTED; unlimited if unset",
        low=0.001,
        high=1e7,
        unit="s",
    )
    refuse_late: bool = option(
        True,
        "refuse a request immediately with DEADLINE_EXCEEDED if it could not finish in time even at the fastest "
        "measured step times",
    )
    stall_timeout: float = option(
        30.0,
        "time without a completed step, with work pending, after which health reports NOT_SERVING until steps "
        "complete again",
        low=0.05,
        high=1e7,
        unit="s",
    )
    step_timeout: float = option(
        300.0,
        "step duration after which the engine counts as hung: open calls fail with UNAVAILABLE, all thread stacks "
        "go to stderr, and the process exits with code 3; 0 waits forever",
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
