"""A worker whose tokens are zeros: it notes each run in a file, and fails, stalls or falls short when it is told to."""

import sys
import time
from pathlib import Path

from benchmarks.peers.workers.protocol import Answer, Settings, serve
from benchmarks.peers.workloads import Job

TURNS = "turns"


class Fake:
    def __init__(self, settings: Settings) -> None:
        self._options = settings.options
        self._note("start")

    def about(self) -> dict[str, object]:
        print("what a library prints is no answer")
        return {"fake": "1.0"}

    def forget(self) -> None:
        self._note("forget")

    def run(self, jobs: list[Job]) -> Answer:
        self._note(f"run {jobs[0].max_tokens}")
        if self._options.get("fails_at") == jobs[0].max_tokens:
            raise ValueError("the pool is too small")
        if self._options.get("stalls"):
            sys.stdin.read()
        count = 1 if self._options.get("is_short") else 0
        token = self._options.get("token", 0)
        outputs = [[[token] * (job.max_tokens - count)] * job.num_sequences for job in jobs]
        return Answer(outputs, 2.0, ttft_s=[0.5], counts={"steps": 3})

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        with Path(TURNS).open("a") as file:
            file.write(f"{self._options['name']} {what}\n")


if __name__ == "__main__":
    serve(Fake)
