"""A day on a fleet: replicas in simulated time, a router, failures, drains and an autoscaler.

    sessions ──turns──> router ──attempts──> worker processes ──ended──> outcomes, next turns, retries elsewhere
                           ^    requests sent and seen to end, a window old    │
                           └───────────────────────────────────────────────────┘

Time advances in windows. At the start of a window the coordinator processes everything that has ended, starts and stops
replicas, and sends each request that arrives within the window to a replica. Then every worker simulates its replicas
to the end of the window. Events in a window affect other replicas only in the next one: the window is the delay with
which routers see load, and the reason why workers need not wait for each other (conservative synchronization). All
random numbers are generated here, from the seed.

A run of one replica with its share of the day forecasts the simulation's duration on this machine.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jpaged.errors import InternalError
from jpaged.plan.fleet.autoscaler import Autoscaler, Autoscaling, Gauges
from jpaged.plan.fleet.day import Attempt, Change, Day, Ended, PoolLoad, Session, Totals
from jpaged.plan.fleet.outcomes import Moment, Outcome, TurnEnd
from jpaged.plan.fleet.replica import FleetWindow, ReplicaPool, Worker, cut_at, make_workers
from jpaged.plan.fleet.routing import FleetRouter, Rule
from jpaged.plan.fleet.topology import Pods, PodState, PoolKind

_MAX_DAYS = 10
"""Days after which a simulation with unfinished requests counts as endless."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of a fleet simulation.

    Attributes:
        window_s: simulated seconds: the maximum age of the router's state, and the delay until a client that was cut
            off retries elsewhere.
        num_processes: number of processes that hold the replicas; 1 is this one.
        num_failures, num_drains: number over the day, at random times, of ready replicas.
        drain_s: time limit of a drain.
        autoscaling: None keeps all replicas.
        checks: check for lost blocks in every replica after every window.
        replays: see `Attempt`.
    """

    rule: Rule
    seed: int = 0
    window_s: float = 0.25
    num_processes: int = 1
    num_failures: int = 0
    num_drains: int = 0
    drain_s: float = 60.0
    autoscaling: Autoscaling | None = None
    checks: bool = False
    replays: bool = True


@dataclass(slots=True)
class _Turn:
    """A turn that has begun and not ended."""

    session: Session
    number: int
    arrival_s: float
    first_token_s: float | None = None
    num_generated: int = 0
    num_cut: int = 0
    num_again: int = 0
    num_cached: int = 0
    cut_s: float | None = None
    away_s: float = 0.0


class SimulatedFleet:
    """Coordinator of a simulated day.

    Args:
        pools: a deployment and options for each kind of replica.
        kinds: cost of each kind.
        kind_of: index of the kind of each place.
    """

    def __init__(
        self,
        pools: Sequence[ReplicaPool],
        kinds: Sequence[PoolKind],
        kind_of: Sequence[int],
        day: Day,
        sessions: Sequence[Session],
        options: FleetOptions,
    ) -> None:
        self._day, self._options = day, options
        self._pods = Pods(kinds, kind_of)
        self._workers: list[Worker] = make_workers(options.num_processes, pools, checks=options.checks)
        self._router = FleetRouter(options.rule, len(kind_of), options.seed)
        self._sessions, self._num_begun = sessions, 0
        # Heap of future events: time, a tie-breaker, and a turn that begins or continues.
        self._coming: list[tuple[float, int, _Turn]] = []
        self._ended: list[Ended] = []
        self._running: dict[int, tuple[_Turn, Attempt]] = {}
        self._num_attempts = self._num_turns = 0
        self._loads: dict[int, PoolLoad] = {}
        self._lives = [Totals() for _ in kind_of]
        self._ready: list[int] = []
        self._changes: list[Change] = []
        scaling = options.autoscaling
        if scaling is not None:
            scaling = replace(scaling, max_replicas=min(scaling.max_replicas, len(kind_of)))
        self._autoscaler = None if scaling is None else Autoscaler(scaling)
        self._gauges = None if scaling is None else Gauges(scaling.scrape_s, scaling.mean_s)
        self._events = self._draw_events()
        self._ends: list[TurnEnd] = []
        self._moments: list[Moment] = []
        self._num_failures = self._num_drains = self._num_skipped = 0

    def run(self, told: Callable[[float], None] = lambda now_s: None) -> Outcome:
        """Run every turn that begins within the day, to its end.

        Args:
            told: called with the time at each window.

        Raises:
            InternalError: a turn was lost, or does not end.
        """
        begin_s, begin_cpu_s, now_s = time.perf_counter(), time.process_time(), 0.0
        scaling = self._options.autoscaling
        first = len(self._pods) if scaling is None else scaling.min_replicas
        for place in range(first):
            self._start(place, 0.0, is_warm=True)
        window = 0
        while True:
            now_s = window * self._options.window_s  # no accumulated rounding
            self._begin_window(now_s)
            if self._is_over(now_s):
                break
            self._run_window(now_s, (window + 1) * self._options.window_s)
            told(now_s)
            window += 1
        closings = [worker.close() for worker in self._workers]
        for closing in closings:
            for place, totals in closing.lives.items():
                self._lives[place] = self._lives[place].plus(totals)
        if len(self._ends) != self._num_turns:
            raise InternalError(f"{self._num_turns} turns began but {len(self._ends)} ended")
        cpu_s = time.process_time() - begin_cpu_s
        if self._options.num_processes > 1:
            cpu_s += sum(closing.cpu_s for closing in closings)
        return Outcome(
            day=self._day,
            rule=self._options.rule,
            ends=tuple(self._ends),
            moments=tuple(self._moments),
            lives=tuple(self._lives),
            elapsed_s=now_s,
            replica_hours=self._pods.replica_hours(now_s),
            usd=self._pods.usd(now_s),
            num_failures=self._num_failures,
            num_drains=self._num_drains,
            num_skipped=self._num_skipped,
            wall_s=time.perf_counter() - begin_s,
            cpu_s=cpu_s,
        )

    # --- a window ---------------------------------------------------------------------------------------------------

    def _begin_window(self, now_s: float) -> None:
        """Process everything that has happened by now, and apply the changes of now."""
        while self._ended and self._ended[0].end_s <= now_s:
            self._take(heapq.heappop(self._ended), now_s)
        for place in self._pods.become_ready(now_s):
            self._changes.append(Change(place, "begin", self._pods.kind_of[place]))
            self._router.begin(place)
        while self._events and self._events[-1][0] <= now_s:
            self._happen(*self._events.pop(), now_s)
        self._scale(now_s)
        for place in self._pods.where(PodState.DRAINING):
            if not self._router.num_busy(place) or self._pods.is_over(place, now_s):
                self._end(place, now_s)
        self._ready = self._pods.where(PodState.READY)
        self._router.use(self._ready)

    def _run_window(self, now_s: float, until_s: float) -> None:
        attempts = self._place(now_s, until_s)
        count = len(self._workers)
        windows = [
            FleetWindow(
                now_s,
                until_s,
                tuple(change for change in self._changes if change.place % count == number),
                {place: given for place, given in attempts.items() if place % count == number},
            )
            for number in range(count)
        ]
        self._changes.clear()
        for worker, window in zip(self._workers, windows, strict=True):
            worker.send(window)
        for worker in self._workers:
            report = worker.receive()
            for ended in report.ended:
                heapq.heappush(self._ended, ended)
            self._loads.update(report.loads)
            for place, totals in report.lives.items():
                self._lives[place] = self._lives[place].plus(totals)
        num_starting = len(self._pods.where(PodState.STARTING))
        num_waiting = sum(self._loads[place].num_waiting for place in self._ready if place in self._loads)
        self._moments.append(Moment(now_s, len(self._ready), num_starting, num_waiting, len(self._running)))

    def _is_over(self, now_s: float) -> bool:
        if now_s > (1 + _MAX_DAYS) * max(self._day.seconds, 86_400.0):
            raise InternalError(
                f"the simulation is stuck: {len(self._running)} turns in flight, {len(self._coming)} pending"
            )
        has_begun = self._num_begun == len(self._sessions)
        return has_begun and not (self._coming or self._running or self._ended or self._changes)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _place(self, now_s: float, until_s: float) -> dict[int, list[Attempt]]:
        """Send the requests that arrive within the window to replicas, in order of arrival."""
        sessions = self._sessions
        while self._num_begun < len(sessions) and sessions[self._num_begun].begin_s < until_s:
            session = sessions[self._num_begun]
            self._begin_turn(session, 0, session.begin_s)
            self._num_begun += 1
        placed: dict[int, list[Attempt]] = {}
        while self._coming and self._coming[0][0] < until_s:
            arrival_s, _, turn = heapq.heappop(self._coming)
            if not self._ready:
                self._come(until_s, turn)  # no replica is ready
                continue
            attempt = Attempt(
                self._num_attempts,
                turn.session,
                turn.number,
                max(arrival_s, now_s),
                turn.num_generated,
                self._options.replays,
            )
            self._num_attempts += 1
            self._running[attempt.number] = turn, attempt
            placed.setdefault(self._router.send(attempt), []).append(attempt)
        return placed

    def _begin_turn(self, session: Session, number: int, at_s: float) -> None:
        self._num_turns += 1
        self._come(at_s, _Turn(session, number, at_s))

    def _come(self, at_s: float, turn: _Turn) -> None:
        """Schedule a turn, or its retry; a session has one at a time."""
        heapq.heappush(self._coming, (at_s, turn.session.number, turn))

    def _take(self, ended: Ended, now_s: float) -> None:
        """Process the end of an attempt: finish its turn, or retry it elsewhere."""
        turn, attempt = self._running.pop(ended.number)
        self._router.ended(ended.place)
        if turn.first_token_s is None:
            turn.first_token_s = ended.first_token_s
        if turn.num_cut == 0:
            turn.num_cached = ended.num_cached
        elif ended.first_token_s is not None and turn.cut_s is not None:
            turn.away_s += ended.first_token_s - turn.cut_s
            turn.num_again += attempt.prompt_tokens - ended.num_cached
            turn.cut_s = None
        turn.num_generated += ended.num_tokens
        left = turn.session.answered[turn.number] - turn.num_generated
        if left and not ended.is_whole:
            turn.num_cut += 1
            turn.cut_s = ended.end_s if turn.cut_s is None else turn.cut_s
            self._come(now_s, turn)
            return
        self._finish(turn, ended)

    def _finish(self, turn: _Turn, ended: Ended) -> None:
        session, day = turn.session, self._day
        if turn.first_token_s is None or turn.num_generated != session.answered[turn.number]:
            raise InternalError(f"turn {turn.number} of session {session.number} ended without all of its tokens")
        end = TurnEnd(
            turn.arrival_s,
            turn.first_token_s,
            ended.end_s,
            session.prompt_tokens(turn.number),
            turn.num_generated,
            turn.num_cached,
            turn.num_cut,
            turn.num_again,
            turn.away_s,
            session.number,
            turn.number,
        )
        self._ends.append(end)
        later = turn.number + 1
        if later < len(session.said):
            at_s = ended.end_s + session.thinking_s[turn.number]
            if at_s < day.seconds:
                self._begin_turn(session, later, at_s)
            else:
                self._num_skipped += len(session.said) - later

    # --- replicas ---------------------------------------------------------------------------------------------------

    def _start(self, place: int, now_s: float, *, is_warm: bool = False) -> None:
        self._pods.start(place, now_s, is_warm=is_warm)
        self._loads.pop(place, None)

    def _end(self, place: int, now_s: float) -> None:
        """Stop a draining pod, and everything that it still has in flight."""
        self._kill(place, now_s)
        if self._pods.end(place, now_s):
            self._start(place, now_s)

    def _kill(self, place: int, now_s: float) -> None:
        """Stop a replica: attempts reported to end later have not ended."""
        self._changes.append(Change(place, "kill"))
        self._router.end(place)
        mine = [ended for ended in self._ended if ended.place == place]
        if mine:
            self._ended = [ended for ended in self._ended if ended.place != place]
            self._ended += [cut_at(ended, now_s) for ended in mine]
            heapq.heapify(self._ended)

    def _draw_events(self) -> list[tuple[float, str]]:
        """Generate the failures and drains, with the next one last."""
        options, generator = self._options, np.random.default_rng([self._options.seed, 2])
        kinds = ["fail"] * options.num_failures + ["drain"] * options.num_drains
        times_s = generator.random(len(kinds)) * self._day.seconds
        return sorted(((float(at_s), kind) for at_s, kind in zip(times_s, kinds, strict=True)), reverse=True)

    def _happen(self, at_s: float, kind: str, now_s: float) -> None:
        """Apply a failure or drain to a random ready replica, if any."""
        ready = self._pods.where(PodState.READY)
        if not ready:
            return
        place = ready[int(np.random.default_rng([self._options.seed, 3, int(at_s * 1e6)]).integers(len(ready)))]
        if kind == "drain":
            self._num_drains += 1
            self._pods.drain(place, now_s + self._options.drain_s, restarts=True)
        elif not any(change.place == place for change in self._changes):  # one that starts now has nothing to lose
            self._num_failures += 1
            self._kill(place, now_s)
            self._start(place, now_s)

    def _scale(self, now_s: float) -> None:
        scaler, gauges, scaling = self._autoscaler, self._gauges, self._options.autoscaling
        if scaler is None or gauges is None or scaling is None:
            return
        pods = self._pods
        if gauges.is_due(now_s):
            none = PoolLoad(0, 0, 0)
            loads = {place: self._loads.get(place, none) for place in pods.where(PodState.READY)}
            gauges.read({place: float(getattr(load, scaling.metric)) for place, load in loads.items()})
        if not scaler.is_due(now_s):
            return
        here = [*pods.restarting(), *pods.where(PodState.READY, PodState.STARTING)]
        wanted = scaler.decide(now_s, gauges.means(pods.where(PodState.READY)), len(here))
        for place in pods.where(PodState.EMPTY)[: max(0, wanted - len(here))]:
            self._start(place, now_s)
        # As a ReplicaSet does: pods that are not ready first, then the newest.
        here.sort(key=lambda place: (pods.state(place) is PodState.READY, -pods.since_s(place), -place))
        for place in here[: max(0, len(here) - wanted)]:
            if pods.state(place) is PodState.DRAINING:
                pods.follow_by_none(place)
            elif pods.state(place) is PodState.STARTING:
                pods.end(place, now_s)
            else:
                pods.drain(place, now_s + scaling.drain_s, restarts=False)


_SAMPLE = 40
_SAMPLE_S = 120.0
"""Conversations of the trial run, and the maximum delay of their starts after the first."""
_PLACED_S, _PLACED_AMONG_S = 5e-5, 4e-7
"""Seconds to place a request, and for each replica to choose from, which matters with many."""
_WINDOW_S, _WINDOW_OF_S = 2e-4, 5e-7
"""Seconds per window, and per replica in it."""
_BYTES, _BYTES_PER_TOKEN, _BYTES_PER_PROCESS = 3e5, 24.0, 2.3e8
"""Memory of a replica, of each token in its pool, and of a process: as measured, with blocks of 64."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected cost of a simulation.

    Attributes:
        num_turns: turns that begin within the day.
        wall_s: seconds, with one processor per process.
        memory_bytes: maximum, when all pools are full of prefixes.
    """

    num_turns: int
    wall_s: float
    memory_bytes: float


def forecast(
    pools: Sequence[ReplicaPool],
    kinds: Sequence[PoolKind],
    kind_of: Sequence[int],
    day: Day,
    sessions: Sequence[Session],
    options: FleetOptions,
) -> Forecast:
    """Run one replica of the most common kind, which takes less than a second, and extrapolate.

    Args:
        sessions: at least one.
    """
    share = [one for one in sessions[:: len(kind_of)] if one.begin_s <= sessions[0].begin_s + _SAMPLE_S][:_SAMPLE]
    most = max(range(len(kinds)), key=kind_of.count)
    alone = FleetOptions("least-load", seed=options.seed, window_s=options.window_s, replays=options.replays)
    tried = SimulatedFleet([pools[most]], [kinds[most]], [0], day, share, alone).run()
    num_turns = round(len(tried.ends) / len(share) * len(sessions))
    num_processes = min(options.num_processes, len(kind_of))
    num_windows = tried.elapsed_s / options.window_s + day.seconds / options.window_s
    wall_s = (
        tried.cpu_s / len(tried.ends) * num_turns / num_processes
        + num_turns * (_PLACED_S + _PLACED_AMONG_S * len(kind_of))
        + num_windows * (_WINDOW_S + _WINDOW_OF_S * len(kind_of))
    )
    memory_bytes = num_processes * _BYTES_PER_PROCESS + sum(
        _BYTES + _BYTES_PER_TOKEN * kinds[kind].capacity for kind in kind_of
    )
    return Forecast(num_turns, wall_s, memory_bytes)
