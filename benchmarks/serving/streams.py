"""What streams cost beside the engine: the same requests by `LLM.generate`, by `jpaged batch` and as gRPC streams.

    llm       one process, no server
    batch     `jpaged serve` and `jpaged batch`, as the command runs it
    streams   `jpaged serve` and an `AsyncClient` with many open streams, which share calls; it reads every message
    calls     as streams, each on a call of its own

All are on the same model and the same processors, and take turns: llm batch streams calls llm batch streams calls. A
ratio is of tokens a second in one round, over those of `LLM.generate` in it; a processor ratio is of processor time per
token, server and client together, all threads. It does not depend on the machine's other work, except that messages
are limited by wall-clock time. Texts are compared: all must be the same.

    python -m benchmarks.serving.streams [--model demo|S|M] [--rounds 5] [--requests 256] [--tokens 64] [--streams 128]

S and M are the models of `benchmarks.peers`, made anew: 15.7 and 386 million parameters, the demo has 3.5.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import SHAPES, make
from benchmarks.record import machine, save
from jpaged import json_text
from jpaged.cli.main import main as run_command
from jpaged.client import AsyncClient
from jpaged.types import SamplingParams

WAYS = ("llm", "batch", "streams", "calls")
TARGET_RATIO = 0.95
MODELS = ("demo", *SHAPES)
_READY = re.compile(r"^ready on \S*:(?P<port>\d+)")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for: requests of so many tokens each, and how many streams are open at a time."""

    num_requests: int
    num_tokens: int
    num_streams: int

    @property
    def prompts(self) -> list[str]:
        """Prompts of about 16 tokens that begin alike."""
        return [f"Once upon a time there was a little fox number {i}" for i in range(self.num_requests)]

    @property
    def sampling(self) -> SamplingParams:
        """Greedy, and as long as asked for."""
        return SamplingParams(max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Run:
    """One way's part of a round.

    Attributes:
        wall_s: from the first request to the last answer.
        digest: of all texts, in the order of the requests.
        num_messages: that the client read; None where it does not see them.
        first_ms: median time from a request to its first message.
        gap_ms: between two messages of a stream, the 99th percentile.
    """

    wall_s: float
    digest: str
    num_messages: int | None = None
    first_ms: float | None = None
    gap_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A way in one round, and microseconds of processor time a token: of the engine's process, and of the client's."""

    way: str
    run: Run
    tokens_per_s: float
    engine_us: float
    client_us: float


def digest_of(texts: Sequence[str]) -> str:
    """A short name for what came out."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def offline(pipe: Connection, load: Load, model: str) -> None:
    """Answers each question with a run of `LLM.generate`."""
    from jpaged import LLM

    with LLM(model, wait_for_all_programs=True) as llm:
        while pipe.recv() is not None:
            begin = time.perf_counter()
            outputs = llm.generate(load.prompts, load.sampling)
            wall_s = time.perf_counter() - begin
            pipe.send(Run(wall_s, digest_of([output.outputs[0].text for output in outputs])))


def online(pipe: Connection, load: Load, target: str) -> None:
    """Answers each question, the name of a way, with a run of it against the server."""
    ways: dict[str, Callable[[], Run]] = {
        "batch": lambda: batch(load, target),
        "streams": lambda: asyncio.run(streams(load, target)),
        "calls": lambda: asyncio.run(streams(load, target, max_requests_per_call=1)),
    }
    while (way := pipe.recv()) is not None:
        pipe.send(ways[way]())


def batch(load: Load, target: str) -> Run:
    """Runs the command on a file of the requests."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        body = {"max_tokens": load.num_tokens, "temperature": 0.0, "ignore_eos": True}
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
            for i, prompt in enumerate(load.prompts)
        ]
        asked.write_text("".join(json_text.dumps(line) + "\n" for line in lines))
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            begin = time.perf_counter()
            code = run_command(["batch", "--input", str(asked), "--output", str(answered), "--target", target])
            wall_s = time.perf_counter() - begin
        if code:
            raise SystemExit(f"jpaged batch ended with {code}: {told.getvalue()}")
        answers = {answer["custom_id"]: answer for answer in map(json.loads, answered.read_text().splitlines())}
        texts = [answers[str(i)]["response"]["body"]["choices"][0]["text"] for i in range(load.num_requests)]
    return Run(wall_s, digest_of(texts))


async def streams(load: Load, target: str, **options: Any) -> Run:
    """Reads so many streams at a time, message by message."""
    texts = [""] * load.num_requests
    first_s, gaps_s, num_messages = list[float](), list[float](), 0
    waiting = iter(enumerate(load.prompts))

    async def read(client: AsyncClient) -> None:
        nonlocal num_messages
        for index, prompt in waiting:
            last, parts, seen_s = time.perf_counter(), list[str](), first_s
            async with client.generate(prompt, load.sampling) as stream:
                async for chunk in stream:
                    now = time.perf_counter()
                    seen_s.append(now - last)
                    last, seen_s = now, gaps_s
                    parts.append(chunk.text)
            num_messages += len(parts)
            texts[index] = "".join(parts)

    async with AsyncClient(target, **options) as client:
        await client.server_info()
        begin = time.perf_counter()
        await asyncio.gather(*(read(client) for _ in range(load.num_streams)))
        wall_s = time.perf_counter() - begin
    gap_s = statistics.quantiles(gaps_s, n=100)[-1] if len(gaps_s) > 1 else 0.0
    return Run(wall_s, digest_of(texts), num_messages, statistics.median(first_s) * 1e3, gap_s * 1e3)


class Worker:
    """A process that runs one of the ways when it is asked."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()

    @property
    def cpu_s(self) -> float:
        return cpu_s(self._process.pid or 0)

    def run(self, way: str) -> Run:
        """Has it run a way, and waits."""
        self._pipe.send(way)
        while not self._pipe.poll(1.0):
            if not self._process.is_alive():
                raise SystemExit(f"the process of {way} ended with {self._process.exitcode}")
        answer = self._pipe.recv()
        assert isinstance(answer, Run)
        return answer

    def stop(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join()


class Server:
    """`jpaged serve`, as a process, with the default options."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", "--wait-for-all-programs"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        ports = (match["port"] for line in self._process.stderr if (match := _READY.match(line)))
        port = next(ports, None)
        if port is None:
            raise SystemExit(f"{' '.join(command)} ended with {self._process.wait()} before it was ready")
        self.target = f"127.0.0.1:{port}"

    @property
    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate()


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has taken so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def model_of(name: str) -> Iterator[str]:
    """Yields what to serve under one of the MODELS' names."""
    if name == "demo":
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        make(SHAPES[name], Path(folder) / name)
        yield str(Path(folder) / name)


@contextlib.contextmanager
def processes(load: Load, name: str) -> Iterator[tuple[Worker, Worker, Server]]:
    """Starts the three processes, one after another, and ends them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(model_of(name))
        server = Server(model)
        stack.callback(server.stop)
        llm, client = Worker(offline, load, model), Worker(online, load, server.target)
        stack.callback(llm.stop)
        stack.callback(client.stop)
        yield llm, client, server


def measure(load: Load, model: str, num_rounds: int) -> list[list[Measured]]:
    """Runs all ways in turn, so many rounds after one that is not counted."""
    rounds, total = [], load.num_requests * load.num_tokens
    with processes(load, model) as (llm, client, server):
        for number in range(num_rounds + 1):
            results = []
            for way in WAYS:
                engine, worker = (llm, None) if way == "llm" else (server, client)
                before = engine.cpu_s, worker.cpu_s if worker else 0.0
                run = (worker or llm).run(way)
                spent = engine.cpu_s - before[0], (worker.cpu_s if worker else 0.0) - before[1]
                us = [seconds / total * 1e6 for seconds in spent]
                results.append(Measured(way, run, total / run.wall_s, us[0], us[1]))
            if len({one.run.digest for one in results}) != 1:
                raise SystemExit(f"the ways do not tell the same texts: {[one.run.digest for one in results]}")
            if number:
                print("   ".join(line_of(one, results[0]) for one in results), flush=True)
                rounds.append(results)
    return rounds


def line_of(one: Measured, llm: Measured) -> str:
    """What one way did in one round."""
    shown = f"{one.way} {one.tokens_per_s:6.0f} tok/s {one.engine_us + one.client_us:4.0f} us"
    return shown if one is llm else f"{shown} {one.tokens_per_s / llm.tokens_per_s:5.2f}x"


def summary_of(rounds: list[list[Measured]]) -> dict[str, dict[str, float]]:
    """Returns medians over the rounds for each way, and the ratio with its least and its greatest."""
    summary = {}
    for index, way in enumerate(WAYS):
        ratios = [results[index].tokens_per_s / results[0].tokens_per_s for results in rounds]
        mine = [results[index] for results in rounds]
        summary[way] = {
            "tokens_per_s": statistics.median(one.tokens_per_s for one in mine),
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_greatest": max(ratios),
            "processor_ratio": statistics.median(
                results[0].engine_us / (results[index].engine_us + results[index].client_us) for results in rounds
            ),
            "engine_us": statistics.median(one.engine_us for one in mine),
            "client_us": statistics.median(one.client_us for one in mine),
        }
        if mine[0].run.num_messages is not None:
            num_messages = statistics.median(one.run.num_messages or 0 for one in mine)
            summary[way]["num_messages"] = num_messages
            summary[way]["first_ms"] = statistics.median(one.run.first_ms or 0 for one in mine)
            summary[way]["gap_p99_ms"] = statistics.median(one.run.gap_ms or 0 for one in mine)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.streams",
        description="Tokens a second by `jpaged batch` and as streams, over those of `LLM.generate`.",
    )
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=128)
    options = parser.parse_args()
    for name in ("rounds", "requests", "tokens", "streams"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is below 1")
    load = Load(options.requests, options.tokens, options.streams)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    rounds = measure(load, options.model, options.rounds)
    summary = summary_of(rounds)
    columns = f"{'ratio':>6} {'least':>6} {'most':>6} {'processor':>9}"
    print(f"{'':8} {'tok/s':>7} {columns} {'engine us/token':>16} {'client us/token':>16}")
    for way, row in summary.items():
        ratios = f"{row['ratio']:6.2f} {row['ratio_least']:6.2f} {row['ratio_greatest']:6.2f}"
        ratios += f" {row['processor_ratio']:9.2f}"
        print(f"{way:8} {row['tokens_per_s']:7.0f} {ratios} {row['engine_us']:16.0f} {row['client_us']:16.0f}")
    row = summary["streams"]
    told = f"first message {row['first_ms']:.0f} ms (median), gap of {row['gap_p99_ms']:.0f} ms (99 %)"
    print(f"streams: {row['num_messages']:.0f} messages, {told}; the target is a ratio of {TARGET_RATIO}")
    runs = [[asdict(one) for one in results] for results in rounds]
    command = " ".join(
        f"--{name} {getattr(options, name)}" for name in ("model", "rounds", "requests", "tokens", "streams")
    )
    record = {"target_ratio": TARGET_RATIO, "load": asdict(load), "summary": summary, "rounds": runs}
    name = "streams" if options.model == "demo" else f"streams_{options.model}"
    path = save(name, f"python -m benchmarks.serving.streams {command}", record)
    print(f"written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
