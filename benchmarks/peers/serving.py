"""Servers under load: at which rate vLLM's OpenAI server saturates, and what jpaged's does at that rate and above.

Each server has one core, all of its processes; the client, `jpaged bench serve`, has the others. Both servers are up,
and take turns at each rate:

    inf      all requests at once: what vLLM answers of them in a second is the rate at which it saturates
    0.5 ..   multiples of that rate

The prompts of each rate are new, and the same for both servers, so no server answers from its prefix cache.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import Shape
from benchmarks.peers.environments import Home, reason
from benchmarks.peers.peers import OURS, PEERS, options_for
from benchmarks.peers.session import START_LIMIT_S, STOP_LIMIT_S, PeerFailed, variables

AT_ONCE = "inf"
MULTIPLES = (0.5, 0.75, 1.0, 1.2, 1.4, 1.6, 2.0)
MEASURED = {"output_throughput", "request_throughput", "median_tpot_ms", "median_ttft_ms", "completed"}
"""What is kept of a run; vLLM's names."""
REFERENCE = "vllm"
RUN_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Server:
    """How a peer is served.

    Attributes:
        flags: of its command, after its options.
        ready: what it prints once it takes requests.
        backend: by which the client speaks to it.
    """

    module: Sequence[str]
    flags: Sequence[str]
    ready: str
    backend: str


SERVERS = {
    OURS: Server(("jpaged", "serve"), ("--wait-for-all-programs",), "ready on ", "jpaged"),
    "vllm": Server(("vllm.entrypoints.openai.api_server",), (), "Application startup complete", "openai"),
}
"""The two peers that are compared as servers."""


@contextmanager
def running(name: str, shape: Shape, home: Home, core: int) -> Iterator[int]:
    """Starts a server and yields its port once it takes requests.

    Raises:
        PeerFailed: it ended, or was not ready in time.
    """
    port, log = _free_port(), home.log(f"serve_{name}_{shape.name}")
    environment = {**os.environ, **variables(PEERS[name], home, core)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the server's engine is a process of its own
    with log.open("w") as output:
        process = subprocess.Popen(
            server_command(name, shape, home, core, port),
            stdout=output,
            stderr=output,
            cwd=home.folder,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait(process, name, log)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def server_command(name: str, shape: Shape, home: Home, core: int, port: int) -> list[str]:
    """Returns the command line of a server on its core."""
    server, peer = SERVERS[name], PEERS[name]
    folder = str(home.folder / "models" / shape.name)
    options = {"port": port, "dtype": shape.dtype, **options_for(peer, shape)}
    flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    model = ["--model", folder] if name != OURS else [folder]
    python = ["taskset", "-c", str(core), str(home.python(peer.environment)), "-P", "-m"]
    return [*python, *server.module, *model, *flags, *server.flags]


def client_command(name: str, port: int, shape: Shape, home: Home, rate: str, seed: int, output: Path) -> list[str]:
    """Returns the command line of one run of the client.

    Args:
        seed: of the prompts and the arrivals.
    """
    folder = str(home.folder / "models" / shape.name)
    url = f"http://127.0.0.1:{port}"
    to_ours = SERVERS[name].backend == "jpaged"
    target = ["--target", f"127.0.0.1:{port}"] if to_ours else ["--base-url", url, "--model", folder]
    lengths = {"random-input-len": 128, "random-output-len": 128, "random-range-ratio": 0.5, "num-prompts": 128}
    flags = [part for key, value in {**lengths, "seed": seed}.items() for part in (f"--{key}", str(value))]
    client = [sys.executable, "-P", "-m", "jpaged", "bench", "serve", "--backend", SERVERS[name].backend]
    load = ["--tokenizer", folder, "--hardware", "none", "--request-rate", rate, "--output-json", str(output)]
    return [*client, *target, *load, *flags]


def measure(
    shape: Shape, missing: Mapping[str, str], home: Home, core: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Returns, by server, a point for each rate; or why there is none.

    Each point is one run: the rate that was asked for, and of the client's numbers those in `MEASURED`.
    """
    if missing.get(REFERENCE):
        return {"missing": missing[REFERENCE]}
    points: dict[str, list[dict]] = {name: [] for name in SERVERS}
    try:
        with ExitStack() as stack:
            ports = {name: stack.enter_context(running(name, shape, home, core)) for name in SERVERS}

            def run(name: str, rate: str, seed: int) -> dict:
                point = _run(name, ports[name], shape, home, rate, seed, core)
                points[name].append(point)
                tpot_ms, answered = point["median_tpot_ms"], point["request_throughput"]
                report(f"serve {name} at {rate} a second: {answered:.2f} answered, {tpot_ms:.1f} ms a token")
                return point

            at_once = {name: run(name, AT_ONCE, 0) for name in SERVERS}
            for seed, multiple in enumerate(MULTIPLES, start=1):
                for name in SERVERS:
                    run(name, f"{multiple * at_once[REFERENCE]['request_throughput']:.3f}", seed)
    except PeerFailed as error:
        report(str(error))
        return {"points": points, "missing": str(error)}
    return {"points": points}


def saturation(points: Sequence[Mapping]) -> float:
    """Returns how many requests a server answers in a second when all come at once."""
    return next(point["request_throughput"] for point in points if point["rate"] == AT_ONCE)


def sustained(points: Sequence[Mapping], limit_ms: float) -> float:
    """Returns the highest rate at which half of the requests took no longer for a token; 0 where there is none."""
    paced = (point for point in points if point["rate"] != AT_ONCE)
    return max((float(point["rate"]) for point in paced if point["median_tpot_ms"] <= limit_ms), default=0.0)


def _run(name: str, port: int, shape: Shape, home: Home, rate: str, seed: int, core: int) -> dict:
    output = home.folder / "logs" / f"serve_{name}.json"
    others = sorted(os.sched_getaffinity(0) - {core}) or [core]
    command = ["taskset", "-c", ",".join(map(str, others))]
    command += client_command(name, port, shape, home, rate, seed, output)
    log = home.log(f"client_{name}")
    with log.open("w") as file:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        try:
            done = subprocess.run(
                command, stdout=file, stderr=file, env=environment, timeout=RUN_LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"the client of {name} was cut off after {RUN_LIMIT_S:.0f} s") from error
    if done != 0:
        raise PeerFailed(f"the client of {name} ended with {done}: {reason(log.read_text(), done)} (all of it: {log})")
    result = json.loads(output.read_text())
    return {"rate": rate, **{key: result[key] for key in sorted(MEASURED)}}


def _wait(process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while SERVERS[name].ready not in (said := log.read_text(errors="replace")):
        if process.poll() is not None:
            why = reason(said, process.returncode)
            raise PeerFailed(f"the server of {name} ended with {process.returncode}: {why} (all of it: {log})")
        if time.monotonic() > deadline:
            raise PeerFailed(f"the server of {name} was not ready after {START_LIMIT_S:.0f} s (see {log})")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
