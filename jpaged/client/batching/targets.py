"""Several servers of one model that share the lines of a batch. Each server pulls lines when it has capacity.

    Lines ──take──> Target: a window of calls in flight ──> a result
       ^────return──── it is full, or lost

The window is the number of rows that the server reports. A slow server has free capacity less often, and so gets fewer
lines; near the end it takes no line that the others would finish sooner. A line is in one place at any time, so that it
gets one result.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from jpaged.client.channel import Backoff
from jpaged.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    JpagedError,
    PermissionDenied,
    TryLater,
    Unavailable,
    Unsupported,
)
from jpaged.load import Load
from jpaged.openai.lines import Line
from jpaged.types import ModelInfo

LOST = (Unavailable, Cancelled)
"""Errors of calls whose server ends or is unreachable."""
ELSEWHERE = (TryLater, *LOST)
"""After these errors another server, or the same one later, can run the line."""

_ROWS_FACTOR = 2
"""Calls per row: the next request waits for the row while an answer is sent."""
_LATENCY_SHARE = 0.2
"""Weight of the newest answer in the moving average of a server's latency."""
_MAX_TRIES = 8
"""Number of consecutive failures after which a server counts as gone."""
_MAX_LOSSES = 2 * _MAX_TRIES
"""Number of servers that a line may lose before it fails: the line may be what crashes them."""
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 15.0
_LOAD_INTERVAL_S = 1.0
_MEET_TIMEOUT_S = 30.0
_SCHEME = re.compile(r"[a-z0-9-]+:[^0-9,]|ipv[46]:")


def targets_in(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the servers that are named, one or several (separated by commas) in a text.

    Raises:
        InvalidArgument: one is named twice.
    """
    names: list[str] = []
    for text in texts:
        names += [text] if _SCHEME.match(text) else [name.strip() for name in text.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument("--target", f"{name} is given twice")
    return tuple(names)


def window_of(load: Load, num_open: int, max_concurrency: int) -> int:
    """Return the maximum number of calls in flight to a server, at least 1.

    Args:
        load: load that the server reports.
        num_open: calls in flight from this client; the server's other requests belong to other clients.
        max_concurrency: upper limit.
    """
    num_others = max(0, load.num_running + load.num_waiting - num_open)
    return max(1, min(max_concurrency, _ROWS_FACTOR * load.max_num_seqs - num_others))


class Server(Protocol):
    """Information that a server reports."""

    async def model_info(self) -> ModelInfo: ...

    async def load(self) -> Load: ...


_S = TypeVar("_S", bound=Server)


class Lines:
    """The lines that wait to be run, and the number of lines being run.

    Args:
        lines: read lazily, when they are taken.
        num_lines: maximum number of lines.
    """

    def __init__(self, lines: Iterator[Line], num_lines: int) -> None:
        self._lines = lines
        self._num_unread = num_lines
        self._returned: deque[Line] = deque()
        self._num_open = 0
        self._num_losses: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Upper bound of the lines that wait."""
        return len(self._returned) + self._num_unread

    @property
    def is_done(self) -> bool:
        """True if every line has its result."""
        return not self.num_waiting and not self._num_open

    def take(self) -> Line | None:
        """Return a line to run, returned ones first; None if none waits."""
        if self._returned:
            line: Line | None = self._returned.popleft()
        else:
            line = next(self._lines, None)
            self._num_unread = 0 if line is None else self._num_unread - 1
        self._num_open += line is not None
        return line

    def give_back(self, line: Line) -> None:
        """Put a line back, to run it again."""
        self._num_open -= 1
        self._returned.append(line)

    def note_loss(self, line: Line) -> int:
        """Return the number of servers lost while running this line."""
        self._num_losses[line.custom_id] += 1
        return self._num_losses[line.custom_id]

    def finish(self) -> None:
        """Record that a line has its result."""
        self._num_open -= 1


class Target(Generic[_S]):
    """One server: availability, window of calls and latency.

    Args:
        max_concurrency: maximum calls in flight, whatever the server reports.
    """

    def __init__(self, name: str, server: _S, max_concurrency: int) -> None:
        self.name = name
        self.server = server
        self.model: ModelInfo | None = None
        self.is_there = False
        self.num_absences = 0
        self.num_open = 0
        self.num_answered = 0
        self.latency_s: float | None = None
        self._max_concurrency = max_concurrency
        self._window = self._num_rows = max_concurrency
        self._paused_until_s = 0.0
        self._pauses = self._absences = _backoff()

    @property
    def window(self) -> int:
        """Allowed calls in flight; until the first answer shows the latency, at most the number of rows."""
        return self._window if self.latency_s is not None else min(self._window, self._num_rows)

    @property
    def answers_per_s(self) -> float:
        """Lines that it answers per second with its window full; 0 before the first answer."""
        return self.window / max(self.latency_s, 1e-9) if self.latency_s is not None else 0.0

    def pause_left_s(self, now_s: float) -> float:
        """Return the remaining backoff after a full queue or a failure."""
        return max(0.0, self._paused_until_s - now_s)

    def is_open(self, now_s: float) -> bool:
        """Return True if it is believed to be available and accepting calls."""
        return self.is_there and not self.pause_left_s(now_s)

    def note_model(self, model: ModelInfo) -> None:
        """Record that it is available, and its model."""
        self.model, self.is_there = model, True

    def note_load(self, load: Load) -> None:
        """Set the window by its load."""
        self._num_rows = max(1, min(self._max_concurrency, load.max_num_seqs))
        self._window = window_of(load, self.num_open, self._max_concurrency)

    def note_answer(self, took_s: float | None) -> None:
        """Record an answer; `took_s` is None if it should not count for the latency."""
        self.num_answered += 1
        if took_s is not None:
            newest = _LATENCY_SHARE if self.latency_s is not None else 1.0
            self.latency_s = newest * took_s + (1 - newest) * (self.latency_s or 0.0)
        self.num_absences = 0
        self._pauses, self._absences = _backoff(), _backoff()

    def note_full(self, now_s: float, retry_after_s: float) -> None:
        """Shrink the window after a full queue, and pause until the server's retry time."""
        self._window = max(1, self.num_open - 1)
        if not self.pause_left_s(now_s):
            self._paused_until_s = now_s + self._pauses.next_s(retry_after_s)

    def note_absence(self, now_s: float) -> None:
        """Record that it is unavailable, and back off exponentially until it answers."""
        self.is_there = False
        self.num_absences += 1
        self._paused_until_s = now_s + self._absences.next_s()


class Targets(Generic[_S]):
    """All servers of a run.

    Args:
        servers: by the names used in errors.
        max_concurrency: maximum calls in flight per server.
        on_retry: called whenever a line, or a query of a server, is retried.
    """

    def __init__(self, servers: Mapping[str, _S], max_concurrency: int, on_retry: Callable[[], None]) -> None:
        self._targets = [Target(name, server, max_concurrency) for name, server in servers.items()]
        self._on_retry = on_retry
        self._failure: Exception | None = None
        self._changed = _Signal()

    @property
    def num_answered(self) -> dict[str, int]:
        """Number of lines answered by each server, by name."""
        return {target.name: target.num_answered for target in self._targets}

    async def meet(self) -> ModelInfo:
        """Query the model of all servers, and wait for one if none is available; return the model.

        Raises:
            InvalidArgument: two servers have different models.
            Unavailable: none was available after all retries.
        """
        while True:
            await asyncio.gather(*(self._meet(target) for target in self._targets))
            self._require_one_model()
            for target in self._targets:
                if target.model is not None:
                    return target.model
            self._require_one_left()
            self._on_retry()
            await asyncio.sleep(min(target.pause_left_s(_now_s()) for target in self._targets))

    async def run(
        self, lines: Lines, answer: Callable[[_S, Line], Awaitable[bool]], fail: Callable[[Line, JpagedError], None]
    ) -> None:
        """Run lines until each has its result.

        Args:
            lines: the lines to run.
            answer: runs a line on a server and stores its result; returns True if the server ran it and did not refuse
                it at once. An error of `ELSEWHERE` returns the line to the queue, any other error ends the run.
            fail: stores the failure of a line whose servers were lost repeatedly.

        Raises:
            InvalidArgument: a server that became available later has another model.
            Unavailable: all servers are gone.
        """
        try:
            async with asyncio.TaskGroup() as group:

                async def call(target: Target[_S], line: Line) -> None:
                    await self._call(target, line, lines, answer, fail)

                def begin(target: Target[_S], line: Line) -> None:
                    target.num_open += 1
                    group.create_task(call(target, line))

                helpers = [group.create_task(self._pull(target, lines, begin)) for target in self._targets]
                helpers += [group.create_task(self._watch(target)) for target in self._targets]
                while not lines.is_done:
                    await self._changed.wait()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as errors:  # the first has cancelled all others
            raise errors.exceptions[0] from None

    async def _pull(self, target: Target[_S], lines: Lines, begin: Callable[[Target[_S], Line], None]) -> None:
        while True:
            if not target.is_there:
                self._require_one_left()
                await asyncio.sleep(target.pause_left_s(_now_s()))
                await self._meet(target)
                self._require_one_model()
                continue
            while self._may_take(target, lines.num_waiting) and (line := lines.take()) is not None:
                begin(target, line)
            if lines.is_done:  # the remaining lines were invalid, so no answer will signal the end
                self._changed.fire()
            await self._changed.wait(target.pause_left_s(_now_s()) or None)

    def _may_take(self, target: Target[_S], num_waiting: int) -> bool:
        """Return True if a server has capacity, and would answer before the others finish all waiting lines."""
        now_s = _now_s()
        if not (target.is_open(now_s) and target.num_open < target.window):
            return False
        others = [other for other in self._targets if other is not target and other.is_open(now_s)]
        latencies_s = [other.latency_s for other in others if other.latency_s is not None]
        if target.latency_s is None or not latencies_s:
            return True
        others_s = min(latencies_s) + num_waiting / sum(other.answers_per_s for other in others)
        return target.latency_s <= others_s

    async def _call(
        self,
        target: Target[_S],
        line: Line,
        lines: Lines,
        answer: Callable[[_S, Line], Awaitable[bool]],
        fail: Callable[[Line, JpagedError], None],
    ) -> None:
        began_s = _now_s()
        try:
            has_run = await answer(target.server, line)
        except TryLater as error:
            target.note_full(_now_s(), error.retry_after_s)
            self._run_again(line, lines)
        except LOST as error:
            if target.is_there:
                target.note_absence(_now_s())
                self._failure = error
            if lines.note_loss(line) < _MAX_LOSSES:
                self._run_again(line, lines)
            else:
                fail(line, error)
                lines.finish()
        else:
            target.note_answer(_now_s() - began_s if has_run else None)
            lines.finish()
        finally:
            target.num_open -= 1
            self._changed.fire()

    def _run_again(self, line: Line, lines: Lines) -> None:
        lines.give_back(line)
        self._on_retry()

    async def _meet(self, target: Target[_S]) -> None:
        """Query a server's model and load."""
        try:
            async with asyncio.timeout(_MEET_TIMEOUT_S):
                target.note_model(await target.server.model_info())
        except (*ELSEWHERE, DeadlineExceeded, TimeoutError) as error:
            target.note_absence(_now_s())
            self._failure = error
        else:
            await self._measure(target)

    def _require_one_left(self) -> None:
        if all(target.num_absences >= _MAX_TRIES for target in self._targets):
            raise Unavailable(str(self._failure) or f"no response within {_MEET_TIMEOUT_S:.0f} s") from self._failure

    async def _watch(self, target: Target[_S]) -> None:
        while True:
            await asyncio.sleep(_LOAD_INTERVAL_S)
            if target.is_there:
                await self._measure(target)
                self._changed.fire()

    async def _measure(self, target: Target[_S]) -> None:
        """Query a server's load; if it reports none (as a proxy), the window stays at its limit."""
        with contextlib.suppress(*ELSEWHERE, DeadlineExceeded, PermissionDenied, Unsupported, TimeoutError):
            async with asyncio.timeout(_MEET_TIMEOUT_S):
                target.note_load(await target.server.load())

    def _require_one_model(self) -> None:
        met = [(target.name, target.model) for target in self._targets if target.model is not None]
        for name, model in met[1:]:
            first = met[0][1]
            differences = [
                f"{one.name} is {getattr(model, one.name)!r}, not {getattr(first, one.name)!r}"
                for one in dataclasses.fields(ModelInfo)
                if getattr(model, one.name) != getattr(first, one.name)
            ]
            if differences:
                raise InvalidArgument(
                    "--target", f"{name} serves another model than {met[0][0]}: {'; '.join(differences)}"
                )


class _Signal:
    """Wakes all waiters at every change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next change, or for the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


def _backoff() -> Backoff:
    return Backoff(_FIRST_BACKOFF_S, 2.0, _MAX_BACKOFF_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
