"""Runs `jpaged.ray` on a cluster of this machine, and compares every row with what `LLM` generates.

The cluster has two nodes with an engine each, and loses one of the engines in the middle.
`make ray` runs it, and a long test. It prints a line for each check that passed; exit code 0: all of them did.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import ray
from ray._private import state
from ray.cluster_utils import Cluster

from jpaged import LLM, SamplingParams
from jpaged.ray import JpagedEngineProcessorConfig, build_processor

ENGINE = {"max_num_seqs": 4, "num_blocks": 256, "max_num_batched_tokens": 64}
NUM_ROWS = 48
BATCH_SIZE = 4
STORE_BYTES = 80 << 20
CPUS = 2
"""Ray's CPUs of a worker node: one for the engine, one for the functions of rows."""


def main() -> int:
    """Run every check; the first that fails ends with a traceback."""
    begun_s = time.monotonic()
    os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        expected = other.submit(generate_alone).result()
    say(f"alone: LLM generated {len(expected)} answers to compare with")
    with two_nodes():
        check_two_nodes(expected)
        check_lost_worker(expected)
    say(f"in all: {time.monotonic() - begun_s:.0f} s")
    return 0


def requests() -> list[dict[str, Any]]:
    """Return rows of which every second one is greedy, and the others have a seed."""
    return [
        {
            "id": number,
            "text": f"Once upon a time there was a {('fox', 'bear', 'dragon', 'cat')[number % 4]}, number {number},",
            "sampling": {"max_tokens": 12 + number % 5, "temperature": 0.8 * (number % 2), "seed": number},
        }
        for number in range(NUM_ROWS)
    ]


def generate_alone() -> dict[int, tuple[str, list[int]]]:
    """Return what one engine makes in one process, by the rows' ids."""
    rows = requests()
    with LLM("demo", **ENGINE) as llm:
        params = [SamplingParams(**row["sampling"]) for row in rows]
        outputs = llm.generate([row["text"] for row in rows], params, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return {row["id"]: (one.text, list(one.token_ids)) for row, one in zip(rows, found, strict=True)}


def ask(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row for the model."""
    return {"id": row["id"], "prompt": row["text"], "sampling_params": row["sampling"]}


def answer(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the result."""
    return {"id": row["id"], "text": row["generated_text"], "tokens": row["generated_tokens"]}


def run(**values: Any) -> Iterator[dict[str, Any]]:
    """Yield the results as they come."""
    settings = {"model_source": "demo", "engine_kwargs": ENGINE, "batch_size": BATCH_SIZE, **values}
    processor = build_processor(
        JpagedEngineProcessorConfig(**settings), ask, answer, {"num_cpus": 0.2}, {"num_cpus": 0.2}
    )
    source = ray.data.from_items(requests(), override_num_blocks=NUM_ROWS // BATCH_SIZE)
    yield from processor(source).iter_rows()


def check_rows(rows: list[dict[str, Any]], expected: dict[int, tuple[str, list[int]]]) -> None:
    """Require each row once, as one process alone made it."""
    require(sorted(row["id"] for row in rows) == sorted(expected), f"every row once: {[row['id'] for row in rows]}")
    for row in rows:
        found = row["text"], list(row["tokens"])
        require(found == expected[row["id"]], f"row {row['id']}: {found}, not {expected[row['id']]}")


def engines() -> dict[int, str]:
    """Return the processes of the engines that run, and their nodes."""
    actors = [one for one in state.actors().values() if "EngineStage" in one["ActorClassName"] + one["Name"]]
    return {one["Pid"]: one["Address"]["NodeID"] for one in actors if one["State"] == "ALIVE" and one["Pid"]}


def check_two_nodes(expected: dict[int, tuple[str, list[int]]]) -> None:
    """Require that each node has an engine, and that all rows are those of one process."""
    rows, seen = [], {}
    for row in run(concurrency=2):
        seen |= engines()
        rows.append(row)
    check_rows(rows, expected)
    require(len(set(seen.values())) == 2, f"each node has an engine: {seen}")
    say(f"two nodes: {len(rows)} rows by engines {sorted(seen)}, one on each node")


def check_lost_worker(expected: dict[int, tuple[str, list[int]]]) -> None:
    """Kill an engine after the first row, while it has others."""
    rows, killed = [], 0
    for row in run(concurrency=2):
        if not killed:
            killed = min(engines())
            os.kill(killed, signal.SIGKILL)
        rows.append(row)
    check_rows(rows, expected)
    say(f"lost worker: {killed} was killed after the first row; {len(rows)} rows, each once and equal")


@contextmanager
def two_nodes() -> Iterator[None]:
    """Start a cluster of two nodes that have one engine each, and join it."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": CPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    try:
        cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES)
        join(cluster.address)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def join(address: str) -> None:
    """Connect this process."""
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False


def require(condition: bool, what: str) -> None:
    """Fail with what was expected."""
    if not condition:
        raise AssertionError(what)


def say(what: str) -> None:
    """Print one line at once."""
    print(f"ray data: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
