"""Several servers of one model that share the lines of a batch. Each pulls what it can run; nothing is dealt out.

    Lines ──take──> Target: a window of calls in flight ──> a result
      ^───give back─── it is full, or lost

A window is the places that the server says it has. A server that is slow has a place free less often, and so gets less;
near the end it takes no line that the others would have answered sooner. A line is in one place at any time, so that
it has one result.
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
"""How calls end whose server ends or is not there: it cuts them in either way."""
ELSEWHERE = (TryLater, *LOST)
"""After these another server, or the same one later, runs the same line."""

_ROWS_FACTOR = 2
"""Calls a row: while one answer is on its way, another request waits for the row."""
_LATENCY_SHARE = 0.2
"""What the newest answer counts in the mean of a server's times."""
_MAX_TRIES = 8
"""So often in turn a server is lost, or asked in vain, before it counts as gone."""
_MAX_LOSSES = 2 * _MAX_TRIES
"""So often a line may lose the server that ran it: it may be the line that ends them."""
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 15.0
_LOAD_INTERVAL_S = 1.0
_MEET_TIMEOUT_S = 30.0
_SCHEME = re.compile(r"[a-z0-9-]+:[^0-9,]|ipv[46]:")


def targets_in(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the servers that are named, one or several (with commas between them) in a text.

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
    """Return how many calls a server is to have in flight at most, at least 1.

    Args:
        load: what it says of itself.
        num_open: calls that are in flight to it from here; the others that it runs or queues are somebody else's.
        max_concurrency: the most it may ever be.
    """
    num_others = max(0, load.num_running + load.num_waiting - num_open)
    return max(1, min(max_concurrency, _ROWS_FACTOR * load.max_num_seqs - num_others))


class Server(Protocol):
    """What a server tells of itself."""

    async def model_info(self) -> ModelInfo: ...

    async def load(self) -> Load: ...


_S = TypeVar("_S", bound=Server)


class Lines:
    """The lines that wait to be run, and how many are being run.

    Args:
        lines: read when they are taken.
        num_lines: how many there are at most.
    """

    def __init__(self, lines: Iterator[Line], num_lines: int) -> None:
        self._lines = lines
        self._num_unread = num_lines
        self._returned: deque[Line] = deque()
        self._num_open = 0
        self._num_losses: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Lines that nobody runs, at most."""
        return len(self._returned) + self._num_unread

    @property
    def is_done(self) -> bool:
        """Whether every line has its result."""
        return not self.num_waiting and not self._num_open

    def take(self) -> Line | None:
        """Return a line to run, those that came back first; None when none waits."""
        if self._returned:
            line: Line | None = self._returned.popleft()
        else:
            line = next(self._lines, None)
            self._num_unread = 0 if line is None else self._num_unread - 1
        self._num_open += line is not None
        return line

    def give_back(self, line: Line) -> None:
        """Have it run again."""
        self._num_open -= 1
        self._returned.append(line)

    def note_loss(self, line: Line) -> int:
        """Return how often it has lost the server that ran it."""
        self._num_losses[line.custom_id] += 1
        return self._num_losses[line.custom_id]

    def finish(self) -> None:
        """Note that one has its result."""
        self._num_open -= 1


class Target(Generic[_S]):
    """One server: whether it is there, how many calls it may have, and how long it takes for one.

    Args:
        max_concurrency: calls in flight at most, whatever it says of itself.
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
        """How many calls it may have in flight: no more than it has rows before its first answer has told its speed."""
        return self._window if self.latency_s is not None else min(self._window, self._num_rows)

    @property
    def answers_per_s(self) -> float:
        """How many lines it answers in a second with its window full; 0 before the first."""
        return self.window / max(self.latency_s, 1e-9) if self.latency_s is not None else 0.0

    def pause_left_s(self, now_s: float) -> float:
        """Return how long it is to be left alone, after its queue was full or it was not there."""
        return max(0.0, self._paused_until_s - now_s)

    def is_open(self, now_s: float) -> bool:
        """Whether it is there and takes calls, as far as one knows."""
        return self.is_there and not self.pause_left_s(now_s)

    def note_model(self, model: ModelInfo) -> None:
        """It is there, and serves this."""
        self.model, self.is_there = model, True

    def note_load(self, load: Load) -> None:
        """Size the window by what it says."""
        self._num_rows = max(1, min(self._max_concurrency, load.max_num_seqs))
        self._window = window_of(load, self.num_open, self._max_concurrency)

    def note_answer(self, took_s: float | None) -> None:
        """It has answered a line; None is no time to judge it by."""
        self.num_answered += 1
        if took_s is not None:
            newest = _LATENCY_SHARE if self.latency_s is not None else 1.0
            self.latency_s = newest * took_s + (1 - newest) * (self.latency_s or 0.0)
        self.num_absences = 0
        self._pauses, self._absences = _backoff(), _backoff()

    def note_full(self, now_s: float, retry_after_s: float) -> None:
        """Its queue was full: it has fewer calls from now on, and none before the time that it names."""
        self._window = max(1, self.num_open - 1)
        if not self.pause_left_s(now_s):
            self._paused_until_s = now_s + self._pauses.next_s(retry_after_s)

    def note_absence(self, now_s: float) -> None:
        """It is not there, or does not take calls: it is asked again after a while, which grows until it answers."""
        self.is_there = False
        self.num_absences += 1
        self._paused_until_s = now_s + self._absences.next_s()


class Targets(Generic[_S]):
    """All servers of a run.

    Args:
        servers: by the names that errors call them by.
        max_concurrency: calls in flight to each at most.
        on_retry: told whenever a line, or a question to a server, is tried again.
    """

    def __init__(self, servers: Mapping[str, _S], max_concurrency: int, on_retry: Callable[[], None]) -> None:
        self._targets = [Target(name, server, max_concurrency) for name, server in servers.items()]
        self._on_retry = on_retry
        self._failure: Exception | None = None
        self._changed = _Signal()

    @property
    def num_answered(self) -> dict[str, int]:
        """How many lines each has answered, by name."""
        return {target.name: target.num_answered for target in self._targets}

    async def meet(self) -> ModelInfo:
        """Ask all which model they serve, and wait for one where none is there; return the model.

        Raises:
            InvalidArgument: two serve different ones.
            Unavailable: none was there, however often they were asked.
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
            lines: what to run.
            answer: runs a line on a server and keeps its result; returns whether the server ran it, and did not refuse
                it at once. What it raises of `ELSEWHERE` gives the line back, anything else ends the run.
            fail: keeps the failure of a line whose servers were lost again and again.

        Raises:
            InvalidArgument: a server that came later serves another model.
            Unavailable: all are gone.
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
        except BaseExceptionGroup as errors:  # the first has cancelled all else
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
            if lines.is_done:  # nobody's answer will tell: those that were left were no requests
                self._changed.fire()
            await self._changed.wait(target.pause_left_s(_now_s()) or None)

    def _may_take(self, target: Target[_S], num_waiting: int) -> bool:
        """Whether a server has a place, and would answer before the others had run all lines that wait."""
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
        """Ask a server which model it has, and how busy it is."""
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
            raise Unavailable(str(self._failure) or f"no answer in {_MEET_TIMEOUT_S:.0f} s") from self._failure

    async def _watch(self, target: Target[_S]) -> None:
        while True:
            await asyncio.sleep(_LOAD_INTERVAL_S)
            if target.is_there:
                await self._measure(target)
                self._changed.fire()

    async def _measure(self, target: Target[_S]) -> None:
        """Ask a server for its load; where it tells none (a proxy does not), the window stays at its limit."""
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
    """Wakes all that wait whenever something has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next change, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


def _backoff() -> Backoff:
    return Backoff(_FIRST_BACKOFF_S, 2.0, _MAX_BACKOFF_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
