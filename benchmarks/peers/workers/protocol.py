"""The worker's side of the pipe: a line of JSON for each order, and one for each answer.

    runner -> {"workload": "/folder/S_W1.jsonl", "is_warm_up": false}
    worker -> {"wall_s": 33.1, "processor_s": 33.0, "outputs": [[[5, 7, ...]]], "ttft_s": [...], "tpot_s": [...]}

The first answer comes without an order, when requests can be taken. What a peer prints goes to its log. A
peer that fails ends its process; its log says why.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.peers.workloads import Job, read, shortened


@dataclass(frozen=True, slots=True)
class Settings:
    """What the runner asks of a worker.

    Attributes:
        folder: the checkpoint's; of llama.cpp the GGUF file.
        dtype: float32 or bfloat16, of weights and computation; auto is the peer's default.
        core: the one that the peer may use, or several as a list for taskset.
        options: the peer's own, by the names of its library.
    """

    folder: str
    dtype: str
    core: int | str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One run of a workload.

    Attributes:
        outputs: token ids by job and sequence.
        wall_s: seconds from the first request to the last token.
        ttft_s: seconds to each job's first token, where the peer says.
        tpot_s: seconds between a job's tokens, where the peer says.
        counts: what the peer counted.
    """

    outputs: list[list[list[int]]]
    wall_s: float
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """A peer that is ready."""

    def about(self) -> dict[str, object]:
        """Versions and what else a reader wants to know; `ready_s` where its start is not this process's."""

    def forget(self) -> None:
        """Drops what is cached of earlier prompts."""

    def run(self, jobs: list[Job]) -> Answer:
        """Answers all jobs, given at once."""

    def processor_s(self) -> float:
        """Processor seconds of the peer so far."""

    def close(self) -> None:
        """Ends it."""


def serve(open_engine: Callable[[Settings], Engine]) -> None:
    """Opens the peer as the command line says and answers orders until there are no more."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = open_engine(Settings(**json.loads(sys.argv[1])))
    try:
        _tell(pipe, engine.about())
        for line in sys.stdin:
            order = json.loads(line)
            jobs = read(Path(order["workload"]))
            if order["is_warm_up"]:
                jobs = shortened(jobs)
            engine.forget()
            begin_s = engine.processor_s()
            answer = engine.run(jobs)
            processor_s = engine.processor_s() - begin_s
            check_lengths(jobs, answer.outputs)
            fields = {name: getattr(answer, name) for name in ("outputs", "wall_s", "ttft_s", "tpot_s", "counts")}
            _tell(pipe, {**fields, "processor_s": processor_s})
    finally:
        engine.close()


def check_lengths(jobs: list[Job], outputs: list[list[list[int]]]) -> None:
    """Refuses outputs that are not the jobs': a peer that does less must not look faster.

    Raises:
        ValueError: names the job, and how many sequences or tokens came back.
    """
    for index, (job, sequences) in enumerate(zip(jobs, outputs, strict=True)):
        if len(sequences) != job.num_sequences:
            raise ValueError(f"job {index}: {len(sequences)} sequences came back for {job.num_sequences}")
        for sequence in sequences:
            if len(sequence) != job.max_tokens:
                raise ValueError(f"job {index}: {len(sequence)} tokens came back for {job.max_tokens}")


def process_s(pid: int) -> float:
    """Processor seconds of another process with all its threads: the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime((~pid << 3) | 2)


def _tell(pipe: IO[str], message: dict[str, object]) -> None:
    print(json.dumps(message), file=pipe, flush=True)
