"""Replicas: each the real engine with the simulator's executor, simulated one window at a time by worker processes.

    coordinator  ──Window──>  worker 0: replicas 0, 2, 4 ...       each runs independently of the others
                 ──Window──>  worker 1: replicas 1, 3, 5 ...
                 <─Report───

A worker is this process or a separate one. Workers make no decisions, so their number does not affect the results. A
replica without work costs nothing.

The executor runs several decode steps in one dispatch if the result is the same:

    single steps   | s | s | s | s | arrival | s ...       the results at an arrival, or when a row ends, are the same
    one dispatch   | s   s   s   s | arrival | s ...

The engine chooses the number of steps as for any device (`MultiStepPolicy`), up to a maximum set before each dispatch.
The maximum is the number of steps that surely end before the next arrival: until then no row is added, so the rows of
the last step bound the time. A dispatch stops when a row ends, so that every request has its first token and its end at
the same time as with single steps.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.executor import I32, Geometry, SamplingInputs, StepInputs, StepOutputs
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InternalError
from jpaged.plan.cost import StepLoad
from jpaged.plan.fleet.day import Attempt, Change, Ended, PoolLoad, Totals, get_prompt
from jpaged.plan.simulator.deployment import SimulatedDeployment, Times
from jpaged.plan.simulator.simulation import SimulatedExecutor
from jpaged.testing.fake_steps import VirtualClock
from jpaged.types import FinishReason, OutputEvent, Request, SamplingParams

MAX_STEPS = 64
"""Maximum steps of a dispatch: more save nothing, because tokens are processed one by one."""


class BulkExecutor(SimulatedExecutor):
    """Implements `jpaged.engine.executor.Executor`, for rows that need only tokens.

    Attributes:
        busy_s: simulated seconds of all steps so far.
    """

    def __init__(
        self, deployment: SimulatedDeployment, clock: VirtualClock, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        super().__init__(deployment, clock, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._times: Times = deployment if deployment.drawn is None else deployment.drawn(clock)
        self.busy_s = 0.0
        self._geometries = _with_steps(self.geometry)
        self.geometry = self._geometries[0]
        self._num_rows = self._num_kv_tokens = 0

    def look(self, until_s: float) -> None:
        """Limit the next dispatch to the steps that surely end before a time: the next arrival, or the window's end."""
        self.geometry = self._geometries[self._num_sure_steps(until_s - self._clock()) - 1]

    def forward(self, inputs: StepInputs) -> NDArray[np.int32]:
        """Advance the clock by the whole step. Return the lengths of the rows' contexts."""
        num_rows = inputs.num_rows
        query_lens = np.diff(inputs.query_starts_s1[: num_rows + 1])
        kv_lens = inputs.kv_lens_s[:num_rows]
        is_decoding = query_lens == 1
        num_kv_tokens, num_decoding = int(kv_lens.sum()), int(is_decoding.sum())
        if num_decoding == num_rows:
            load = _decoding(num_rows, num_kv_tokens)
        else:
            load = StepLoad(
                num_rows=num_rows,
                num_tokens=inputs.num_tokens,
                num_kv_tokens=num_kv_tokens,
                num_pairs=inputs.num_pairs,
                num_decoding=num_decoding,
                num_decoding_kv_tokens=int(kv_lens[is_decoding].sum()),
            )
        self._take(self._times.step_s(load))
        self._num_rows, self._num_kv_tokens = num_rows, num_kv_tokens
        return kv_lens

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> StepOutputs:
        """Advance the clock by all steps: the tokens end no row."""
        num_rows = inputs.num_rows
        num_kv_tokens = int(inputs.kv_lens_s[:num_rows].sum())
        for step in range(num_steps):
            self._take(self._times.step_s(_decoding(num_rows, num_kv_tokens + step * num_rows)))
        self._num_rows, self._num_kv_tokens = num_rows, num_kv_tokens + (num_steps - 1) * num_rows
        shape = len(ending_token_ids_rx), num_steps
        return StepOutputs(np.zeros(shape, np.int32), np.ones(shape, np.bool_))

    def _take(self, seconds: float) -> None:
        self._clock.advance(seconds)
        self.busy_s += seconds

    def _num_sure_steps(self, seconds: float) -> int:
        """Return the number of steps that the last step's rows surely complete in that time; 1 if unknown."""
        num_rows, most = self._num_rows, MAX_STEPS if self._times is self._deployment else 1
        while num_rows and most > 1:
            longest_s = self._deployment.step_s(_decoding(num_rows, self._num_kv_tokens + most * num_rows))
            sure = min(most, int(seconds / longest_s))
            if sure == most or sure >= most // 2:
                return max(1, sure)
            most //= 2
        return 1


def _decoding(num_rows: int, num_kv_tokens: int) -> StepLoad:
    return StepLoad(num_rows, num_rows, num_kv_tokens, num_kv_tokens, num_rows, num_kv_tokens)


def _with_steps(geometry: Geometry) -> list[Geometry]:
    """Return the geometries with a maximum of 1, 2, ... steps per dispatch."""
    buckets = dataclasses.replace(geometry.buckets, decodes=geometry.buckets.rows)
    return [dataclasses.replace(geometry, max_num_steps=most, buckets=buckets) for most in range(1, MAX_STEPS + 1)]


class SimulatedReplica:
    """Serves attempts in simulated time.

    Args:
        place: its index among the replicas.
        options: engine options, with both sizes of a step, `overlap` off, and `num_scheduler_steps` -1, so that the
            executor chooses the number of steps of a dispatch.
    """

    def __init__(
        self, place: int, deployment: SimulatedDeployment, options: EngineConfig, begin_s: float = 0.0
    ) -> None:
        scheduler = options.scheduler
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        self.place = place
        self._clock = VirtualClock(begin_s)
        self._executor = BulkExecutor(
            deployment,
            self._clock,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        vocab_size = deployment.model.config.vocab_size
        self._engine = Engine(self._executor, NoTokenizer(vocab_size), options, clock=self._clock)
        self._coming = deque[Attempt]()
        self._in_flight: dict[int, Attempt] = {}
        self._ended: list[Ended] = []

    @property
    def is_idle(self) -> bool:
        """True if no attempt is in flight or to come."""
        return not (self._in_flight or self._coming)

    @property
    def load(self) -> PoolLoad:
        """Load after its last step."""
        load = self._engine.load()
        return PoolLoad(load.num_running, load.num_waiting, load.num_blocks_used)

    @property
    def totals(self) -> Totals:
        """Counters so far."""
        load = self._engine.load()
        return Totals(
            self._executor.busy_s + self._executor.copy_s + self._executor.swap_s,
            load.num_steps,
            load.num_generation_tokens,
            load.num_prefix_query_tokens,
            load.num_prefix_hit_tokens,
            load.num_host_hit_tokens,
            load.num_preemptions,
            load.num_recomputed_tokens,
        )

    def give(self, attempts: list[Attempt]) -> None:
        """Add attempts that arrive later, in order of arrival and after all earlier ones."""
        self._coming.extend(attempts)

    def advance(self, until_s: float) -> None:
        """Run every step that begins before a time; the last may end after it."""
        coming, clock, engine = self._coming, self._clock, self._engine
        while True:
            while coming and coming[0].arrival_s <= clock():
                self._submit(coming.popleft())
            if clock() >= until_s:
                return
            self._executor.look(min(until_s, coming[0].arrival_s) if coming else until_s)
            if engine.step():
                continue
            if self._in_flight:
                raise InternalError(f"{len(self._in_flight)} requests are in flight but the engine is idle")
            if not coming:
                return
            clock.advance(max(0.0, coming[0].arrival_s - clock()))

    def kill(self, at_s: float) -> None:
        """Stop at a time that it has been simulated to: everything in flight is cut off.

        Tokens of a step that ends after that time are dropped.
        """
        for number in list(self._in_flight):
            self._engine.abort(str(number))
        self._engine.step()
        for attempt in self._coming:
            self._ended.append(Ended(at_s, attempt.number, self.place, None, 0, 0, is_whole=False))
        self._coming.clear()
        self._ended = [cut_at(ended, at_s) for ended in self._ended]

    def take_ended(self) -> list[Ended]:
        """Return and clear the attempts that have ended."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Raise InternalError if the memory has lost a block or shares one by mistake."""
        self._engine.check()

    def _submit(self, attempt: Attempt) -> None:
        sampling = SamplingParams(max_tokens=attempt.num_tokens_left, ignore_eos=True, temperature=1.0)
        request = Request(
            request_id=str(attempt.number),
            prompt_token_ids=get_prompt(attempt),
            sampling=sampling,
            tenant=str(attempt.session.tenant),
            is_non_streaming=True,
        )
        self._in_flight[attempt.number] = attempt
        self._engine.submit(request, partial(self._take, attempt.number))

    def _take(self, number: int, event: OutputEvent) -> None:
        if event.error is not None:
            raise event.error
        if not event.is_last:
            return
        attempt = self._in_flight.pop(number)
        is_cut = event.finish is None or event.finish.reason is FinishReason.ABORT
        times, usage = event.times, event.usage
        first_s, last_s = (None, None) if times is None else (times.first_token_s, times.last_token_s)
        ended = Ended(
            self._clock() if last_s is None else last_s,
            number,
            self.place,
            first_s,
            usage.completion_tokens,
            usage.cached_tokens,
            is_whole=not is_cut,
        )
        if ended.is_whole and ended.num_tokens != attempt.num_tokens_left:
            raise InternalError(f"attempt {number} has {ended.num_tokens} of {attempt.num_tokens_left} tokens")
        self._ended.append(ended)


def cut_at(ended: Ended, at_s: float) -> Ended:
    """Return the end of an attempt whose replica stops at a time, without the token of an unfinished step."""
    is_late = ended.num_tokens > 0 and ended.end_s > at_s
    if ended.is_whole and not is_late:
        return ended
    num_tokens = ended.num_tokens - is_late
    first_token_s = ended.first_token_s if num_tokens else None
    return Ended(at_s, ended.number, ended.place, first_token_s, num_tokens, ended.num_cached, is_whole=False)


@dataclass(frozen=True, slots=True)
class FleetWindow:
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
class WorkerResults:
    """Final results of a worker: counters of the replicas, and its processor time."""

    lives: dict[int, Totals]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """Kind of replicas: their deployment and options."""

    deployment: SimulatedDeployment
    options: EngineConfig


class WorkerReplicas:
    """A worker's replicas.

    Args:
        checks: check for lost blocks after every window.
    """

    def __init__(self, pools: Sequence[ReplicaPool], *, checks: bool = False) -> None:
        self._pools = pools
        self._checks = checks
        self._replicas: dict[int, SimulatedReplica] = {}
        self._busy = dict[int, SimulatedReplica]()
        self._begin_cpu_s = time.process_time()

    def run(self, window: FleetWindow) -> Report:
        """Simulate all replicas to the end of a window."""
        ended, lives = list[Ended](), dict[int, Totals]()
        for change in window.changes:
            if change.kind == "begin":
                if change.place in self._replicas:
                    raise InternalError(f"replica {change.place} is to start but exists")
                pool = self._pools[change.pool]
                self._replicas[change.place] = SimulatedReplica(
                    change.place, pool.deployment, pool.options, window.begin_s
                )
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

    def close(self) -> WorkerResults:
        """Return the final counters and processor time."""
        lives = {place: replica.totals for place, replica in self._replicas.items()}
        return WorkerResults(lives, time.process_time() - self._begin_cpu_s)


class Worker(Protocol):
    """Protocol of replicas in this process or another."""

    def send(self, window: FleetWindow) -> None:
        """Start a window."""

    def receive(self) -> Report:
        """Wait for the report of the window."""

    def close(self) -> WorkerResults:
        """Stop all replicas."""


class LocalWorker:
    """Replicas in this process."""

    def __init__(self, pools: Sequence[ReplicaPool], *, checks: bool = False) -> None:
        self._replicas = WorkerReplicas(pools, checks=checks)
        self._report = Report((), {}, {})

    def send(self, window: FleetWindow) -> None:
        self._report = self._replicas.run(window)

    def receive(self) -> Report:
        return self._report

    def close(self) -> WorkerResults:
        return self._replicas.close()


class ProcessWorker:
    """Replicas in a separate process, which ends with this one."""

    def __init__(self, pools: Sequence[ReplicaPool], *, checks: bool = False) -> None:
        context = multiprocessing.get_context("spawn")  # fork would copy library threads in a broken state
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, pools, checks), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, window: FleetWindow) -> None:
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

    def close(self) -> WorkerResults:
        self._connection.send(None)
        closing = self._answer()
        self._process.join()
        self._connection.close()
        if not isinstance(closing, WorkerResults):
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


def make_workers(num_processes: int, pools: Sequence[ReplicaPool], *, checks: bool = False) -> list[Worker]:
    """Return one worker per process, or a single worker in this process."""
    if num_processes == 1:
        return [LocalWorker(pools, checks=checks)]
    return [ProcessWorker(pools, checks=checks) for _ in range(num_processes)]


def _serve(connection: Connection, pools: Sequence[ReplicaPool], checks: bool) -> None:
    """Main function of a worker process: ends when the coordinator closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted coordinator ends this process by its pipe
    replicas = WorkerReplicas(pools, checks=checks)
    gc.freeze()
    try:
        while (window := connection.recv()) is not None:
            connection.send(replicas.run(window))
        connection.send(replicas.close())
    except (EOFError, BrokenPipeError):
        """The coordinator is gone."""
    except Exception as error:  # sent to the coordinator, which raises it
        connection.send(error)
