"""Runs `jpaged.ray` on clusters of this machine, and compares every row with what `LLM` generates.

A cluster of two nodes, which loses a worker in the middle; and one that has no worker node until rows need one.
`make ray` runs it, and a long test. It prints a line for each check that passed; exit code 0: all of them did.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ray
from ray._private import state
from ray.cluster_utils import Cluster

from jpaged import LLM, SamplingParams
from jpaged.ray import ERROR_COLUMN, JpagedEngineProcessorConfig, build_processor

ENGINE = {"max_num_seqs": 4, "num_blocks": 256, "max_num_batched_tokens": 64}
NUM_ROWS = 48
BATCH_SIZE = 4
STORE_BYTES = 80 << 20
PATIENCE_S = 240.0
PROVIDER_SETTINGS = ("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check")
EMPTY_LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
)
"""Settings of Ray's autoscaler that nodes on one machine do not need; without them it refuses its configuration."""
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
        check_errors()
    with no_workers():
        check_from_0(expected)
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


def check_errors() -> None:
    """Require that a row that cannot run has its error, and that it ends the data set if errors do."""
    config = {"model_source": "demo", "engine_kwargs": ENGINE, "batch_size": BATCH_SIZE}
    rows = [{"prompt": "Once upon a time", "sampling_params": {"max_tokens": 4}, "id": i} for i in range(4)]
    rows[2]["sampling_params"]["max_tokens"] = -1
    tolerant = JpagedEngineProcessorConfig(**config, should_continue_on_error=True)
    done = sorted(build_processor(tolerant)(ray.data.from_items(rows)).take_all(), key=lambda row: row["id"])
    errors = [row[ERROR_COLUMN] for row in done]
    require([not error for error in errors] == [True, True, False, True], f"one row has an error: {errors}")
    require("max_tokens" in errors[2], f"the error names the parameter: {errors[2]}")
    try:
        build_processor(JpagedEngineProcessorConfig(**config))(ray.data.from_items(rows)).take_all()
    except Exception as error:  # Ray raises types that it makes of the cause
        require("max_tokens" in str(error), f"the error names the parameter: {error}")
    else:
        require(condition=False, what="an error ends the data set")
    say("errors: one row of four has one, and ends a data set that does not tolerate it")


def check_from_0(expected: dict[int, tuple[str, list[int]]]) -> None:
    """Require that the cluster starts a worker node for the data set, and ends it afterwards."""
    require(num_workers() == 0, "there is no worker node yet")
    begun_s = time.monotonic()
    rows, most = [], 0
    for row in run(concurrency=(1, 2), resources_per_bundle={"CPU": 1}):
        most = max(most, num_workers())
        rows.append(row)
    check_rows(rows, expected)
    require(most >= 1, "a worker node was started")
    done_s = time.monotonic() - begun_s
    deadline_s = time.monotonic() + PATIENCE_S
    while num_workers():
        require(time.monotonic() < deadline_s, "idle worker nodes end")
        time.sleep(1.0)
    say(f"from 0: up to {most} worker nodes, {len(rows)} rows in {done_s:.0f} s, and none is left afterwards")


def num_workers() -> int:
    """Return the number of nodes that have CPUs for work."""
    return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())


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


@contextmanager
def no_workers() -> Iterator[None]:
    """Start a cluster whose worker nodes are started by its autoscaler, and join it."""
    node = {"node_config": {}, "min_workers": 0}
    worker = {"resources": {"CPU": CPUS, "object_store_memory": STORE_BYTES}, "max_workers": 2}
    config = {
        "cluster_name": "check",
        "provider": {"type": "fake_multinode", **dict.fromkeys(PROVIDER_SETTINGS, True)},
        "max_workers": 2,
        "idle_timeout_minutes": 0.1,
        "head_node_type": "head",
        "available_node_types": {"head": {**node, "resources": {}, "max_workers": 0}, "worker": {**node, **worker}},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in EMPTY_LISTS},
    }
    with tempfile.TemporaryDirectory(prefix="jpaged-ray-") as name:
        (file := Path(name) / "cluster.json").write_text(json.dumps(config))
        port = free_port()
        command = [
            Path(sys.executable).with_name("ray"),
            "start",
            "--head",
            "--block",
            f"--port={port}",
            "--num-cpus=0",
        ]
        command += [f"--autoscaling-config={file}", f"--object-store-memory={STORE_BYTES}", "--include-dashboard=false"]
        variables = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        head = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            wait_for_port(port)
            join(f"127.0.0.1:{port}")
            yield
        finally:
            ray.shutdown()
            os.killpg(head.pid, signal.SIGTERM)
            head.wait()


def free_port() -> int:
    """Return a port that no process has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Return when a process listens there."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        require(time.monotonic() < deadline_s, "the head of the cluster starts")
        time.sleep(0.5)


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
