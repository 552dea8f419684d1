"""Where the processor time of a batch goes, a phase of the engine's thread at a time; the rest is of other threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from jpaged.device.executor import JaxExecutor
from jpaged.engine import runners
from jpaged.engine.results import ResultProcessor
from jpaged.engine.scheduler.scheduler import Scheduler

_PHASES: dict[str, tuple[tuple[Any, str], ...]] = {
    "decide": ((Scheduler, "schedule"), (runners, "build_step_inputs"), (runners, "build_sampling_inputs")),
    "start programs": tuple((JaxExecutor, verb) for verb in ("forward", "sample", "decode")),
    "collect": ((JaxExecutor, "collect"),),
    "process tokens": ((ResultProcessor, "process_step"),),
    "make masks": ((ResultProcessor, "narrow"),),
}
"""What is timed of the engine's thread; none of them calls another."""
REST, OTHERS = "rest of the thread", "device and masks"


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds of processor time of each phase of what runs inside, filled in at its end."""
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        for phase, places in _PHASES.items():
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), seconds, phase)))
        begin_s, begin_thread_s = time.process_time(), time.thread_time()
        yield seconds
        thread_s, total_s = time.thread_time() - begin_thread_s, time.process_time() - begin_s
    seconds[REST] = thread_s - sum(seconds.values())
    seconds[OTHERS] = total_s - thread_s


def _timed(call: Callable[..., Any], seconds: dict[str, float], phase: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **fields: Any) -> Any:
        begin_s = time.thread_time()
        try:
            return call(*args, **fields)
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.thread_time() - begin_s

    return timed
