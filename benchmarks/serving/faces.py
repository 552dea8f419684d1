"""What a face costs: the same streams over gRPC and over HTTP, of one server, in turn.

    grpc   `AsyncClient`, each message read
    http   server-sent events of /v1/completions, each event read and parsed, by as little of a client as does that

The server has a processor of its own, and the client another, where there are two. A ratio is of tokens a second over
HTTP over those over gRPC, in one round, and the order of both turns from round to round. Texts are compared.

    python -m benchmarks.serving.faces [--rounds 5] [--requests 256] [--tokens 64] [--streams 128]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass

from benchmarks.record import machine, save
from benchmarks.serving.streams import Load, cpu_s, digest_of
from jpaged import json_text
from jpaged.client import AsyncClient

FACES = ("grpc", "http")
TARGET_RATIO = 0.9
_HTTP = re.compile(r"^OpenAI's API on http://\S*:(?P<port>\d+)/v1")
_READY = re.compile(r"^ready on \S*:(?P<port>\d+)")
_EVENT = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Run:
    """One face's part of a round.

    Attributes:
        num_messages: that the client read with text in them.
        first_ms: median time from a request to its first message.
        server_us, client_us: processor time a token, all threads.
    """

    face: str
    tokens_per_s: float
    digest: str
    num_messages: int
    first_ms: float
    server_us: float
    client_us: float


class Server:
    """`jpaged serve demo` with an HTTP port, as a process on one processor."""

    def __init__(self, cpus: set[int]) -> None:
        command = [sys.executable, "-m", "jpaged", "serve", "demo", "--port", "0", "--http-port", "0"]
        command.append("--wait-for-all-programs")
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        os.sched_setaffinity(self._process.pid, cpus)
        assert self._process.stderr is not None
        http_port = None
        for line in self._process.stderr:
            http_port = match["port"] if (match := _HTTP.match(line)) else http_port
            if ready := _READY.match(line):
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended with {self._process.wait()} before it was ready")
        self.target, self.http_port = f"127.0.0.1:{ready['port']}", int(http_port or 0)

    @property
    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate()


async def over_grpc(client: AsyncClient, load: Load, prompt: str) -> AsyncIterator[str]:
    """The texts of a stream's messages."""
    async with client.generate(prompt, load.sampling) as stream:
        async for chunk in stream:
            yield chunk.text


async def over_http(port: int, load: Load, prompt: str) -> AsyncIterator[str]:
    """The texts of a stream's events, over a connection of its own."""
    fields = {"max_tokens": load.num_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    body = json_text.dumps({"model": "demo", "prompt": prompt, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{status!r}: {await reader.read(1000)!r}")
    try:
        async for line in reader:
            if line.startswith(_EVENT):
                if line.startswith(_DONE, len(_EVENT)):
                    return
                yield json.loads(line[len(_EVENT) :])["choices"][0]["text"]
    finally:
        writer.close()


async def run(face: str, load: Load, server: Server) -> Run:
    """Read so many streams at a time, message by message."""
    texts, first_s, num_messages = [""] * load.num_requests, list[float](), 0
    waiting = iter(enumerate(load.prompts))

    async def read(client: AsyncClient) -> None:
        nonlocal num_messages
        for index, prompt in waiting:
            began, parts = time.perf_counter(), list[str]()
            told = over_grpc(client, load, prompt) if face == "grpc" else over_http(server.http_port, load, prompt)
            async for text in told:
                if not parts:
                    first_s.append(time.perf_counter() - began)
                parts.append(text)
            num_messages += len(parts)
            texts[index] = "".join(parts)

    async with AsyncClient(server.target) as client:
        await client.server_info()
        before = server.cpu_s, time.process_time()
        began = time.perf_counter()
        await asyncio.gather(*(read(client) for _ in range(load.num_streams)))
        wall_s = time.perf_counter() - began
        spent = server.cpu_s - before[0], time.process_time() - before[1]
    total = load.num_requests * load.num_tokens
    us = [seconds / total * 1e6 for seconds in spent]
    first_ms = statistics.median(first_s) * 1e3
    return Run(face, total / wall_s, digest_of(texts), num_messages, first_ms, us[0], us[1])


@contextlib.contextmanager
def served() -> Iterator[Server]:
    """A server on the first processor that this process may use, which goes to the last."""
    cpus = sorted(os.sched_getaffinity(0))
    os.environ["JAX_PLATFORMS"] = "cpu"
    server = Server({cpus[0]})
    os.sched_setaffinity(0, {cpus[-1]})
    try:
        yield server
    finally:
        server.stop()


def measure(load: Load, num_rounds: int) -> list[list[Run]]:
    """Run both faces in turn, so many rounds after one that is not counted."""
    rounds = []
    with served() as server:
        for number in range(num_rounds + 1):
            order = FACES if number % 2 else FACES[::-1]
            found = {face: asyncio.run(run(face, load, server)) for face in order}
            runs = [found[face] for face in FACES]
            if len({one.digest for one in runs}) != 1:
                raise SystemExit(f"the faces do not tell the same texts: {[one.digest for one in runs]}")
            if number:
                told = [f"{one.face} {one.tokens_per_s:6.0f} tok/s" for one in runs]
                print("   ".join(told), f"  {runs[1].tokens_per_s / runs[0].tokens_per_s:5.2f}x", flush=True)
                rounds.append(runs)
    return rounds


def summary_of(rounds: list[list[Run]]) -> dict[str, dict[str, float]]:
    """Return medians over the rounds for each face, and the ratio with its least and its greatest."""
    summary = {}
    for place, face in enumerate(FACES):
        ratios = [runs[place].tokens_per_s / runs[0].tokens_per_s for runs in rounds]
        mine = [runs[place] for runs in rounds]
        names = ("tokens_per_s", "num_messages", "first_ms", "server_us", "client_us")
        medians = {name: float(statistics.median(asdict(one)[name] for one in mine)) for name in names}
        spread = {"ratio_least": min(ratios), "ratio_greatest": max(ratios)}
        summary[face] = {**medians, "ratio": statistics.median(ratios), **spread}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.faces", description="Tokens a second over HTTP, over those over gRPC."
    )
    sizes = {"rounds": 5, "requests": 256, "tokens": 64, "streams": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is below 1")
    load = Load(options.requests, options.tokens, options.streams)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    rounds = measure(load, options.rounds)
    summary = summary_of(rounds)
    print(f"{'':6} {'tok/s':>7} {'ratio':>6} {'least':>6} {'most':>6} {'messages':>9} {'first ms':>9} {'us/token':>15}")
    for face, row in summary.items():
        ratios = f"{row['ratio']:6.2f} {row['ratio_least']:6.2f} {row['ratio_greatest']:6.2f}"
        spent = f"{row['server_us']:6.0f} + {row['client_us']:6.0f}"
        print(f"{face:6} {row['tokens_per_s']:7.0f} {ratios} {row['num_messages']:9.0f} {row['first_ms']:9.0f} {spent}")
    print(f"the target is a ratio of {TARGET_RATIO}; processor time is of the server and of the client")
    command = " ".join(f"--{name} {getattr(options, name)}" for name in sizes)
    record = {"target_ratio": TARGET_RATIO, "load": asdict(load), "summary": summary}
    path = save("faces", f"python -m benchmarks.serving.faces {command}", record | {"rounds": rounds_of(rounds)})
    print(f"written to {path.relative_to(path.parents[2])}")


def rounds_of(rounds: list[list[Run]]) -> list[list[dict[str, object]]]:
    """Return what every round found, for the record."""
    return [[asdict(one) for one in runs] for runs in rounds]


if __name__ == "__main__":
    main()
