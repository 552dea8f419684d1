"""Rounds in which the peers take turns, A B A B, on the same core: what slows the machine slows all of them.

All peers are started and stay; of the waiting ones none takes processor time. A peer that fails is started again for
the next workload, and its cell says why it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import Shape
from benchmarks.peers.environments import Home
from benchmarks.peers.peers import OURS, PEERS, SERVE, SERVE_EXPECTED_S, START, options_for
from benchmarks.peers.ratios import agreement
from benchmarks.peers.session import PeerFailed, Run, Session
from benchmarks.peers.workloads import Job, digest, make

WORKLOADS = {"S": (START, "W5", "W4", "W2", "W3", "T1", "W1", SERVE), "M": ("W5", "T1")}
"""What is measured of each model unless others are named, the short ones first."""
REPEATS = {START: 2, "W5": 5, "W4": 3, "W2": 3, "W3": 3, "T1": 2, "W1": 2}
CANNOT = "has no beam search"
SLACK = 10.0
"""A run may take so many times what is expected before it is cut off,"""
LEAST_LIMIT_S = 120.0
"""and so long in any case."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.

    Attributes:
        peers: their names, ours among them.
        workloads: of this model, and `start`.
        repeats: turns of each peer at each workload; None is `REPEATS`.
        core: on which all run.
    """

    shape: Shape
    peers: Sequence[str]
    workloads: Sequence[str]
    repeats: int | None
    core: int

    @property
    def in_turns(self) -> list[str]:
        """The workloads that peers run in turns, one session each."""
        return [workload for workload in self.workloads if workload != SERVE]

    def num_rounds(self, workload: str) -> int:
        return REPEATS[workload] if self.repeats is None else self.repeats

    def expected_s(self) -> float:
        """Returns about how long all of it takes on a core of 2023; every session has one start before it is timed."""
        total = SERVE_EXPECTED_S if SERVE in self.workloads else 0.0
        for name in self.peers:
            expected = PEERS[name].expected_s[self.shape.name]
            total += expected[START] or 0.0
            for workload in self.in_turns:
                total += self.num_rounds(workload) * (expected[workload] or 0.0)
        return total

    def needs_bytes(self) -> int:
        """Returns the memory that all peers take beside each other."""
        weights = sum(1 for _ in self.peers) * self.shape.num_parameters_read * self.shape.bytes_per_value
        return weights + sum(PEERS[name].needs_bytes for name in self.peers)


@dataclass(slots=True)
class Cell:
    """What one peer took for one workload, turn by turn; `missing` says why there is less than asked for."""

    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    outputs: list[list[list[int]]] = field(default_factory=list)
    missing: str = ""

    def add(self, run: Run) -> None:
        self.wall_s.append(run.wall_s)
        self.processor_s.append(run.processor_s)
        self.ttft_s.extend(run.ttft_s)
        self.tpot_s.extend(run.tpot_s)
        self.counts = run.counts
        self.outputs = self.outputs or run.outputs


class Rounds:
    """The sessions of one plan, and what they took.

    Args:
        plan: what to measure.
        missing: peers that could not be installed, and why.
        home: where environments, models and workloads are.
        report: told a line of each turn.
    """

    def __init__(self, plan: Plan, missing: dict[str, str], home: Home, report: Callable[[str], None]) -> None:
        self._plan = plan
        self._missing = missing
        self._home = home
        self._report = report
        self._sessions: dict[str, Session] = {}
        self.about: dict[str, dict] = {}

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._sessions):
            self._sessions.pop(name).close()

    def measure(self, workload: str) -> dict[str, Cell]:
        """Returns what each peer took for a workload."""
        cells = {name: Cell(missing=self._missing.get(name, "")) for name in self._plan.peers}
        if workload == START:
            self._start_in_turns(cells)
        else:
            self._run_in_turns(workload, cells)
        return cells

    def _start_in_turns(self, cells: dict[str, Cell]) -> None:
        for turn in range(1 + self._plan.num_rounds(START)):
            for name, cell in cells.items():
                if cell.missing:
                    continue
                if old := self._sessions.pop(name, None):
                    old.close()
                try:
                    ready_s = self._session(name).ready_s
                except PeerFailed as error:
                    cell.missing = str(error)
                    continue
                self._report(
                    f"{name} was ready after {ready_s:.2f} s{'' if turn else ' (the first start: not counted)'}"
                )
                if turn:
                    cell.wall_s.append(ready_s)

    def _run_in_turns(self, workload: str, cells: dict[str, Cell]) -> None:
        model = self._plan.shape.name
        path = workload_path(self._home, model, workload)
        limits_s = {name: PEERS[name].expected_s[model][workload] for name in cells}
        for turn in range(self._plan.num_rounds(workload)):
            for name, cell in cells.items():
                if limits_s[name] is None:
                    cell.missing = cell.missing or CANNOT
                if cell.missing:
                    continue
                limit_s = LEAST_LIMIT_S + SLACK * (limits_s[name] or 0.0)
                try:
                    session = self._session(name)
                    if not turn:
                        session.run(path, limit_s=limit_s, is_warm_up=True)
                    run = session.run(path, limit_s=limit_s)
                except PeerFailed as error:
                    cell.missing = str(error)
                    self._sessions.pop(name, None)
                    self._report(f"{workload} {name}: {error}")
                    continue
                cell.add(run)
                self._report(f"{workload} {name}: {run.wall_s:.2f} s, processor {run.processor_s:.2f} s")

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            plan = self._plan
            session = Session(PEERS[name], plan.shape, self._home, plan.core)
            self._sessions[name] = session
            self.about[name] = session.about
        return self._sessions[name]


def row(plan: Plan, workload: str, cells: dict[str, Cell], about: dict[str, dict]) -> dict[str, Any]:
    """Returns a row of the record: what was run, and of each peer what it took."""
    jobs = [] if workload == START else make(plan.shape.name, workload)
    ours = cells.get(OURS, Cell()).outputs
    is_greedy = bool(jobs) and all(job.temperature == 0 for job in jobs)
    peers = {}
    for name, cell in cells.items():
        entry: dict[str, object] = {"options": options_for(PEERS[name], plan.shape), "about": about.get(name, {})}
        for value in ("wall_s", "processor_s", "counts", "missing"):
            if measured := getattr(cell, value):
                entry[value] = measured
        for value in ("ttft_s", "tpot_s"):
            if measured := sorted(getattr(cell, value)):
                entry[f"{value[:4]}_p50_s"] = measured[len(measured) // 2]
        if is_greedy and cell.outputs and ours and name != OURS:
            equal = agreement(ours, cell.outputs)
            entry["agreement"] = {key: getattr(equal, key) for key in equal.__slots__}
        peers[name] = entry
    return {**_about_jobs(jobs), "num_rounds": plan.num_rounds(workload), "peers": peers}


def _about_jobs(jobs: Sequence[Job]) -> dict[str, object]:
    if not jobs:
        return {}
    return {
        "num_jobs": len(jobs),
        "num_prompt_tokens": sum(len(job.prompt) for job in jobs),
        "num_output_tokens": sum(job.num_output_tokens for job in jobs),
        "digest": digest(jobs),
    }


def workload_path(home: Home, model: str, workload: str) -> Path:
    """Returns where a workload's jobs are written."""
    return home.folder / "jobs" / f"{model}_{workload}.jsonl"
