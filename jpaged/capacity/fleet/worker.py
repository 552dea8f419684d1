"""A subset of the replicas, simulated one window at a time, in this process or a separate one.

    coordinator  ──Window──>  worker 0: replicas 0, 2, 4 ...       each runs independently of the others
                 ──Window──>  worker 1: replicas 1, 3, 5 ...
                 <─Report───

Workers make no decisions, so their number does not affect the results. A replica without work costs nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

from jpaged.capacity.fleet.attempts import Attempt, Change, Ended, PoolLoad, Totals
from jpaged.capacity.fleet.replica import Replica
from jpaged.capacity.simulator.deployment import Deployment
from jpaged.config import EngineConfig
from jpaged.errors import InternalError


@dataclass(frozen=True, slots=True)
class Window:
    """Changes and arrivals in an interval of time.

    Attributes:
        begin_s: time of the changes; every replica has been simulated up to it.
        attempts: by place, each place's by arrival.
    """

    begin_s: float
    until_s: float
    changes: tuple[Change, ...] = ()
    attempts: dict[int, list[Attempt]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a window.

    Attributes:
        loads: of the replicas that had work in it.
        lives: counters of the replicas that were stopped.
    """

    ended: tuple[Ended, ...]
    loads: dict[int, PoolLoad]
    lives: dict[int, Totals]


@dataclass(frozen=True, slots=True)
class Closing:
    """Final results of a worker: counters of the replicas, and its processor time."""

    lives: dict[int, Totals]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Pool:
    """Kind of replicas: their deployment and options."""

    deployment: Deployment
    options: EngineConfig


class Replicas:
    """A worker's replicas.

    Args:
        checks: check for lost blocks after every window.
    """

    def __init__(self, pools: Sequence[Pool], *, checks: bool = False) -> None:
        self._pools = pools
        self._checks = checks
        self._replicas: dict[int, Replica] = {}
        self._busy = dict[int, Replica]()
        self._begin_cpu_s = time.process_time()

    def run(self, window: Window) -> Report:
        """Simulate all replicas to the end of a window."""
        ended, lives = list[Ended](), dict[int, Totals]()
        for change in window.changes:
            if change.kind == "begin":
                if change.place in self._replicas:
                    raise InternalError(f"replica {change.place} is to start but exists")
                pool = self._pools[change.pool]
                self._replicas[change.place] = Replica(change.place, pool.deployment, pool.options, window.begin_s)
            else:
                replica = self._replicas.pop(change.place)
                self._busy.pop(change.place, None)
                replica.kill(window.begin_s)
                ended += replica.take_ended()
                lives[change.place] = replica.totals
        for place, attempts in window.attempts.items():
            replica = self._busy[place] = self._replicas[place]
            replica.give(attempts)
        loads = {}
        for place, replica in list(self._busy.items()):
            replica.advance(window.until_s)
            if self._checks:
                replica.check()
            ended += replica.take_ended()
            loads[place] = replica.load
            if replica.is_idle:
                del self._busy[place]
        return Report(tuple(ended), loads, lives)

    def close(self) -> Closing:
        """Return the final counters and processor time."""
        lives = {place: replica.totals for place, replica in self._replicas.items()}
        return Closing(lives, time.process_time() - self._begin_cpu_s)


class Worker(Protocol):
    """Protocol of replicas in this process or another."""

    def send(self, window: Window) -> None:
        """Start a window."""

    def receive(self) -> Report:
        """Wait for the report of the window."""

    def close(self) -> Closing:
        """Stop all replicas."""


class LocalWorker:
    """Replicas in this process."""

    def __init__(self, pools: Sequence[Pool], *, checks: bool = False) -> None:
        self._replicas = Replicas(pools, checks=checks)
        self._report = Report((), {}, {})

    def send(self, window: Window) -> None:
        self._report = self._replicas.run(window)

    def receive(self) -> Report:
        return self._report

    def close(self) -> Closing:
        return self._replicas.close()


class ProcessWorker:
    """Replicas in a separate process, which ends with this one."""

    def __init__(self, pools: Sequence[Pool], *, checks: bool = False) -> None:
        context = multiprocessing.get_context("spawn")  # fork would copy library threads in a broken state
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, pools, checks), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, window: Window) -> None:
        """Start a window.

        Raises:
            InternalError: the process has ended.
        """
        try:
            self._connection.send(window)
        except OSError:
            raise self._gone() from None

    def receive(self) -> Report:
        """Wait for the report of the window.

        Raises:
            InternalError: the process has ended.
        """
        report = self._answer()
        if not isinstance(report, Report):
            raise InternalError(f"a worker answered a window with {type(report).__name__}")
        return report

    def close(self) -> Closing:
        self._connection.send(None)
        closing = self._answer()
        self._process.join()
        self._connection.close()
        if not isinstance(closing, Closing):
            raise InternalError(f"a worker answered its end with {type(closing).__name__}")
        return closing

    def _answer(self) -> object:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _gone(self) -> InternalError:
        self._process.join()
        return InternalError(f"a worker process exited with code {self._process.exitcode}")


def make_workers(num_processes: int, pools: Sequence[Pool], *, checks: bool = False) -> list[Worker]:
    """Return one worker per process, or a single worker in this process."""
    if num_processes == 1:
        return [LocalWorker(pools, checks=checks)]
    return [ProcessWorker(pools, checks=checks) for _ in range(num_processes)]


def _serve(connection: Connection, pools: Sequence[Pool], checks: bool) -> None:
    """Main function of a worker process: ends when the coordinator closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted coordinator ends this process by its pipe
    replicas = Replicas(pools, checks=checks)
    gc.freeze()
    try:
        while (window := connection.recv()) is not None:
            connection.send(replicas.run(window))
        connection.send(replicas.close())
    except (EOFError, BrokenPipeError):
        """The coordinator is gone."""
    except Exception as error:  # sent to the coordinator, which raises it
        connection.send(error)
