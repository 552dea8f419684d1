"""Steady state of a trace, in which the system neither fills nor drains.

    requests  | filling |            window            | draining |
                        first token of a fifth of them  first token of the last

A request's first token marks its admission, in order of arrival. Between the two marks a saturated system always has a
queue, so it admits as fast as it finishes requests: the rate that it sustains. Below that rate the same marks bound the
arrivals. Static batches are admitted whole, so both marks are the beginnings of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

FILLING_SHARE = 0.2
"""Share of the requests that come before the window: of a trace of 25 batches the first five."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of a step in the executor.

    Attributes:
        kv_tokens: sum of the rows' context lengths.
        num_table_blocks: blocks in its rows' tables; a shared block counts once per table.
        num_used_blocks: distinct blocks among them; 0 unless the trace can share.
        is_flops_bound: its FLOPs took longer than its bytes.
    """

    kv_tokens: int
    num_table_blocks: int
    num_used_blocks: int
    is_flops_bound: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One observed step.

    Attributes:
        num_batched: requests that ran in it.
        num_waiting: requests that waited for rows or blocks when it had ended.
        num_first_tokens: requests that got their first token from it.
        num_sampled: tokens that it sampled.
    """

    begin_s: float
    seconds: float
    num_batched: int
    num_waiting: int
    num_first_tokens: int
    num_sampled: int
    seen: Seen


@dataclass(frozen=True, slots=True)
class Window:
    """An interval of simulated time, without its end."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that begin in the window."""
        return [step for step in steps if self.begin_s <= step.begin_s < self.end_s]


def steady_window(steps: Sequence[Step]) -> Window:
    """Return the time from when a fifth of the requests have their first token until the last one has it."""
    return window([step.begin_s + step.seconds for step in steps for _ in range(step.num_first_tokens)])


def window(times_s: Sequence[float], filling_share: float = FILLING_SHARE) -> Window:
    """Return the time from when this share of the events has passed to the last of them."""
    ordered = sorted(times_s)
    return Window(ordered[int(filling_share * len(ordered))], ordered[-1])


def mean(steps: Sequence[Step], value: Callable[[Step], float]) -> float:
    """Return a mean over the time in which steps ran; 0 without steps."""
    seconds = sum(step.seconds for step in steps)
    return sum(value(step) * step.seconds for step in steps) / seconds if seconds else 0.0


def requests_per_s(steps: Sequence[Step], within: Window, num_requests: int) -> float:
    """Return the window's share of all sampled tokens, as requests per second.

    Counting tokens instead of ends removes noise: whether long requests happened to end in the window.
    """
    sampled = sum(step.num_sampled for step in within.steps(steps)) / sum(step.num_sampled for step in steps)
    return sampled * num_requests / within.seconds


def queue_growth_per_s(steps: Sequence[Step]) -> float:
    """Return the slope of the least-squares line of the number of waiting requests, with steps weighted by seconds."""
    times_s = np.array([step.begin_s for step in steps])
    weights, waiting = np.array([step.seconds for step in steps]), np.array([step.num_waiting for step in steps], float)
    times_s -= np.average(times_s, weights=weights)
    spread = float(np.sum(weights * times_s**2))
    return float(np.sum(weights * times_s * waiting)) / spread if spread else 0.0


def queue_grows(steps: Sequence[Step], within: Window) -> bool:
    """Return True if the queue grows by more than a batch in the window and is never empty in the last quarter."""
    some = within.steps(steps)
    late = Window(within.end_s - within.seconds / 4, within.end_s).steps(steps)
    if not late or any(step.num_waiting == 0 for step in late):
        return False
    return queue_growth_per_s(some) * within.seconds > mean(some, lambda step: step.num_batched)
