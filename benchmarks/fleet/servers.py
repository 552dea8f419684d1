"""Servers of the small model that run as the simulator's replicas do: a step at a time, without overlap."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from jpaged.cli.server_process import ServerProcess
from jpaged.client import Client

MODEL = "demo"
MAX_MODEL_LEN = 1024
BLOCK_SIZE, NUM_BLOCKS = 16, 1024
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 256
FLAGS = (
    *("--no-overlap", "--num-scheduler-steps", "1", "--max-inter-token-latency", "0", "--wait-for-all-programs"),
    *("--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS)),
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
)


def num_processors() -> int:
    """CPUs that servers run on."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def started(count: int) -> Iterator[list[str]]:
    """The addresses of so many servers that are ready; server i runs on CPU i, counted around."""
    servers: list[ServerProcess] = []
    cpus = sorted(os.sched_getaffinity(0))
    try:
        for number in range(count):
            server = ServerProcess.start(MODEL, FLAGS, {"JAX_PLATFORMS": "cpu"})
            os.sched_setaffinity(server.process.pid, {cpus[number % len(cpus)]})
            servers.append(server)
        targets = [server.target() for server in servers]
        for target in targets:
            with Client(target) as client:
                client.wait_until_ready(600.0)
        yield targets
    finally:
        for server in servers:
            server.stop()
