"""Timing of dispatches, and the callbacks of the features that observe them.

    schedule    dispatch n + 1    wait for n ──── results of n    process n
    └─ begin_s of n + 1           └─ host waits ─┘└─ end_s of n

One timer measures each dispatch once. Features that depend on these times get them with the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jpaged.engine.executor import Executor, StepInputs, StepOutputs
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.sequence import Group


class StepTiming(NamedTuple):
    """Size and duration of a dispatch. `StepTimer` makes it when the results arrive.

    Attributes:
        inputs: inputs of the first step.
        num_tokens: tokens of each step.
        num_steps: executed steps.
        begin_s: when the host started to prepare it.
        end_s: when its results arrived.
        seconds: time from the later of `begin_s` and the end of the previous dispatch to `end_s`.
    """

    inputs: StepInputs
    num_tokens: int
    num_steps: int
    begin_s: float
    end_s: float
    seconds: float

    @property
    def num_padded(self) -> int:
        """Tokens of each step, padded to a bucket."""
        return len(self.inputs.token_ids_t)

    @property
    def num_pairs(self) -> int:
        """See `StepInputs.num_pairs`."""
        return self.inputs.num_pairs


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
    on_scheduled: list[Callable[[Schedule], None]] = field(default_factory=list)
    on_dispatched: list[Callable[[Schedule, StepInputs], None]] = field(default_factory=list)
    on_results: list[Callable[[Schedule, StepOutputs, StepTiming], None]] = field(default_factory=list)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    on_request_finished: list[Callable[[Group], None]] = field(default_factory=list)


class Pulse:
    """Stall detector: time since the last progress while requests are pending.

    Written by the engine thread, readable from any thread.

        requests   ├── in flight ───────────────────────────┤
        steps      │ end   end   end              (hangs)      now
                                 └───── seconds_without ──────┘

    Args:
        stall_s: seconds without progress that count as a stall.
    """

    def __init__(self, clock: Callable[[], float], stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._num_stalls = 0
        self._since_s: float | None = None  # None while there is no work
        self._awaited_s: float | None = None  # start of the wait for a step of the device

    def begin(self) -> None:
        """Record that requests are pending from now on."""
        self._since_s = self._clock()

    def beat(self, now_s: float) -> None:
        """Record progress."""
        since_s = self._since_s
        if since_s is not None:
            self._num_stalls += now_s - since_s >= self._stall_s
            self._since_s = now_s

    def rest(self) -> None:
        """Record that no request is pending any more."""
        self.beat(self._clock())
        self._since_s = None

    def begin_wait(self, now_s: float) -> None:
        """Record that the host waits for a step: that counts as work, even if its requests were dropped."""
        self._awaited_s = now_s

    def end_wait(self) -> None:
        """Record the end of that wait."""
        self._awaited_s = None

    @property
    def seconds_without(self) -> float:
        """Seconds since the last progress; 0 while no request is pending."""
        since_s, awaited_s = self._since_s, self._awaited_s
        since_s = awaited_s if since_s is None else since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    @property
    def is_stalled(self) -> bool:
        """True if requests are pending without progress for at least the stall time."""
        return self.seconds_without >= self._stall_s

    @property
    def num_stalls(self) -> int:
        """Number of stalls, including a current one."""
        return self._num_stalls + self.is_stalled


class StepTimer:
    """Timer of one loop's steps. Called by the engine thread alone.

    The device is idle from the time at which the host, which polls between its own work, sees it done:

        dispatch n     device is done     seen done     dispatch n + 1
                                              └──── idle ────┘

    Args:
        pulse: gets the waits for the device, and the steps with progress.
    """

    def __init__(self, executor: Executor[Any, Any], clock: Callable[[], float], pulse: Pulse) -> None:
        self._executor = executor
        self._clock = clock
        self._pulse = pulse
        self._begin_s = 0.0  # of the current step
        self._wait_s = self._idle_s = 0.0  # of the current step
        self._waiting_since_s = 0.0
        self._last_end_s = 0.0  # of a dispatch
        self._idle_since_s: float | None = None
        self._newest: Any = None  # the last dispatch in the device's queue; None once it was seen done

    def begin_step(self) -> float:
        """Begin a step; return the time."""
        self._begin_s = now_s = self._clock()
        self._wait_s = self._idle_s = 0.0
        self._look_at_device(now_s)
        return now_s

    def end_idle(self) -> None:
        """End the idle time of the device: call it right before a dispatch."""
        now_s = self._clock()
        self._look_at_device(now_s)
        if self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = None

    def set_newest(self, handle: Any) -> None:
        """Set the last dispatch in the device's queue; None if it cannot be polled."""
        self._newest = handle

    def start_s(self, begin_s: float) -> float:
        """Return when the device could start a dispatch: when it was prepared, and the previous one had ended."""
        return max(begin_s, self._last_end_s)

    def add_wait(self, seconds: float) -> None:
        """Count seconds in which the host waited for the device between `begin_step` and `end_step`."""
        self._wait_s += seconds

    def begin_wait(self) -> None:
        """Begin to wait for the results of a dispatch."""
        self._waiting_since_s = self._clock()
        self._pulse.begin_wait(self._waiting_since_s)

    def end_wait(self, schedule: Schedule, inputs: StepInputs, begin_s: float, handle: Any) -> StepTiming:
        """Return the timing of the dispatch whose results have arrived."""
        self._pulse.end_wait()
        end_s = self._clock()
        self._wait_s += end_s - self._waiting_since_s
        if handle is self._newest:
            self._newest = None
            self._note_done(end_s)
        seconds, self._last_end_s = end_s - self.start_s(begin_s), end_s
        return StepTiming(inputs, schedule.num_tokens, schedule.num_steps, begin_s, end_s, seconds)

    def end_step(self) -> tuple[float, float]:
        """End a step with progress. Return its host time without waits, and the idle time that it ended."""
        now_s = self._clock()
        self._pulse.beat(now_s)
        return now_s - self._begin_s - self._wait_s, self._idle_s

    def rest(self) -> None:
        """Record that no request waits for the device, which then is not idle."""
        self._newest = self._idle_since_s = None

    def _look_at_device(self, now_s: float) -> None:
        """Check whether the newest dispatch has run: from then on the device is idle."""
        if self._newest is not None and self._executor.is_done(self._newest):
            self._newest = None
            self._note_done(now_s)

    def _note_done(self, now_s: float) -> None:
        if self._idle_since_s is None:
            self._idle_since_s = now_s
