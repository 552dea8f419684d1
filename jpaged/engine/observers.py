"""Callbacks of the features that observe steps, and the timing that they get with the results of a dispatch.

schedule    dispatch n + 1    wait for n ──── results of n    process n
└─ begin_s of n + 1           └─ host waits ─┘└─ end_s of n
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.engine.executor import StepInputs, StepOutputs
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.sequence import SequenceGroup


class StepTiming(NamedTuple):
    """Size and duration of a dispatch. `jpaged.engine.stats.StepTimer` makes it when the results arrive.

    Attributes:
        inputs: inputs of the first step.
        num_tokens: tokens of each step.
        num_padded: the same, padded to a bucket.
        num_steps: executed steps.
        begin_s: when the host started to prepare it.
        end_s: when its results arrived.
        seconds: time from the later of `begin_s` and the end of the previous dispatch to `end_s`.
    """

    inputs: StepInputs
    num_tokens: int
    num_padded: int
    num_steps: int
    begin_s: float
    end_s: float
    seconds: float


@dataclass(slots=True)
class StepObservers:
    """Callbacks of the features that are on, each list in order of its calls. A feature that is off has none.

    Attributes:
        on_begin: a step begins, at this time.
        on_scheduled: a step was scheduled, and nothing of it is dispatched.
        on_dispatched: a step with rows is in flight.
        on_results: the results of a dispatch were processed.
        on_end: a step ended, and its counters can be read.
        on_request_finished: a request has had its last event.
    """

    on_begin: list[Callable[[float], None]] = field(default_factory=list)
    on_scheduled: list[Callable[[SchedulerOutput], None]] = field(default_factory=list)
    on_dispatched: list[Callable[[SchedulerOutput, StepInputs], None]] = field(default_factory=list)
    on_results: list[Callable[[SchedulerOutput, StepOutputs, StepTiming], None]] = field(default_factory=list)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    on_request_finished: list[Callable[[SequenceGroup], None]] = field(default_factory=list)
