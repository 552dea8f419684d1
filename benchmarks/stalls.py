"""How long a stream waits for its next token while one request of the worst kind is worked on, and what memory stays.

    wait    the longest time between two messages of another client's streams, one after another on the demo
    alone   the same while nothing else runs
    RSS     of the server's process: before the first round, at the peak, and two seconds after the last one

Requests are sent as raw bytes, at the greatest size that is accepted and at the greatest that is refused; the last two
are on a copy of the demo whose chat template never ends, or multiplies a string, when a message asks for it.

    python -m benchmarks.stalls [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from grpc import aio

from benchmarks.record import machine, save
from jpaged import json_text
from jpaged._proto.v1 import inference_pb2
from jpaged.demo import FOLDER

_READY = re.compile(r"^ready on \S*:(?P<port>\d+)")
_SERVICE = "/jpaged.v1.InferenceService/"
_CHANNEL = [("grpc.max_receive_message_length", 64 << 20)]
_MIB = 1 << 20
_MAX_BYTES = _MIB - 64
"""Just below what the server receives."""
_TARGET_S = 0.25
_SETTLE_S = 2.0
_LOOPS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
_HOSTILE = (
    "{% if messages[0].content == 'loop' %}" + _LOOPS + "{% elif messages[0].content == 'grow' %}"
    "{{ 'a' * 10**10 }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Attack:
    """A request of one kind at its greatest size."""

    name: str
    method: str
    payload: bytes
    expected: str


@dataclass(frozen=True, slots=True)
class Result:
    """What it did to the others."""

    request: str
    num_bytes: int
    status: str
    took_s: float
    longest_wait_ms: float
    rss_before_mib: float
    rss_peak_mib: float
    rss_after_mib: float


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a message."""
    size, length = bytearray(), len(payload)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + payload


def turn(role: str, content: str) -> bytes:
    """A message of a conversation."""
    return field(1, field(1, role.encode()) + field(2, content.encode()))


def attacks() -> Iterator[Attack]:
    """The kinds, those that are accepted first."""
    story = "Once upon a time there was a little fox who lived in a wood. "
    sampling = field(5, inference_pb2.SamplingParams(max_tokens=1).SerializeToString())
    ids = field(1, b"\x14" * 1023)
    yield Attack("Generate text, 900 tokens", "Generate", field(2, (story * 60).encode()) + sampling, "OK")
    yield Attack("Generate token_ids, 1023", "Generate", field(3, ids) + sampling, "OK")
    yield Attack("Generate chat, 300 messages", "Generate", field(4, turn("user", "hi") * 300) + sampling, "OK")
    yield Attack("Tokenize text, 256 KiB", "Tokenize", field(1, (story * 5000).encode()[: 256 << 10]), "OK")
    yield Attack("Tokenize one word, 256 KiB", "Tokenize", field(1, b"a" * (256 << 10)), "OK")
    chat = turn("user", "tell me a story of fox") * 8192
    yield Attack("Tokenize chat, 8192 messages", "Tokenize", field(2, chat), "OK")
    yield Attack("Detokenize, 262144 ids", "Detokenize", field(1, b"\x14" * (256 << 10)), "OK")
    empty = b"\x0a\x00" * (_MAX_BYTES // 2)
    refused = "INVALID_ARGUMENT"
    yield Attack("Generate chat, 524 thousand empty", "Generate", field(4, empty), refused)
    yield Attack("Tokenize chat, 524 thousand empty", "Tokenize", field(2, empty), refused)
    yield Attack("Generate chat, 1 MiB in one", "Generate", field(4, turn("user", "a" * (_MAX_BYTES - 32))), refused)
    yield Attack("Generate text, 1 MiB", "Generate", field(2, b"a" * _MAX_BYTES), refused)
    yield Attack("Tokenize text, 1 MiB", "Tokenize", field(1, b"a" * _MAX_BYTES), refused)
    yield Attack("Generate a million ids", "Generate", field(3, field(1, b"\x14" * (_MAX_BYTES - 8))), refused)
    yield Attack("Detokenize a million ids", "Detokenize", field(1, b"\x14" * _MAX_BYTES), refused)
    stops = field(5, b"\x4a\x00" * (_MAX_BYTES // 2))
    yield Attack("Generate 524 thousand stops", "Generate", field(2, b"a") + stops, refused)
    yield Attack("Generate text, 16 MiB", "Generate", field(2, b"a" * 16 * _MIB), "RESOURCE_EXHAUSTED")


def hostile_attacks() -> Iterator[Attack]:
    """For the copy with a template of its own."""
    for word in ("loop", "grow"):
        yield Attack(f"chat template, {word}", "Generate", field(4, turn("user", word)), "INVALID_ARGUMENT")


class Server:
    """`jpaged serve` as a process."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", "--wait-for-all-programs"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self._process.stderr is not None
        self.port = 0
        for line in self._process.stderr:
            if match := _READY.match(line):
                self.port = int(match["port"])
                break
        if not self.port:
            raise SystemExit(f"{' '.join(command)} ended with {self._process.wait()} before it was ready")

    def rss_mib(self) -> float:
        """Memory of its process that is resident."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB

    def stop(self) -> None:
        """Ends it, and waits."""
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate()


class Meter:
    """Streams one after another, and the longest wait for a message of theirs since `reset`."""

    def __init__(self, channel: aio.Channel) -> None:
        self._call = channel.unary_stream(_SERVICE + "Generate")
        sampling = inference_pb2.SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
        self._request = inference_pb2.GenerateRequest(text="Once upon a time", sampling=sampling).SerializeToString()
        self._last = time.perf_counter()
        self._longest = 0.0

    async def run(self) -> None:
        while True:
            async for _ in self._call(self._request):
                now = time.perf_counter()
                self._longest, self._last = max(self._longest, now - self._last), now

    def reset(self) -> None:
        self._longest = 0.0

    def longest_s(self) -> float:
        """Also the wait that has not ended yet."""
        return max(self._longest, time.perf_counter() - self._last)


@contextlib.asynccontextmanager
async def metered(server: Server) -> AsyncIterator[tuple[Meter, aio.Channel]]:
    """A meter that runs, and a channel for others."""
    target = f"127.0.0.1:{server.port}"
    async with aio.insecure_channel(target) as own, aio.insecure_channel(target, options=_CHANNEL) as channel:
        meter = Meter(own)
        task = asyncio.create_task(meter.run())
        try:
            await asyncio.sleep(_SETTLE_S)
            yield meter, channel
        finally:
            task.cancel()
            await asyncio.wait((task,))


async def send(channel: aio.Channel, attack: Attack) -> str:
    """Sends it; the name of its status."""
    try:
        if attack.method == "Generate":
            async for _ in channel.unary_stream(_SERVICE + attack.method)(attack.payload):
                pass
        else:
            await channel.unary_unary(_SERVICE + attack.method)(attack.payload)
    except aio.AioRpcError as error:
        return error.code().name
    return grpc.StatusCode.OK.name


async def measure(server: Server, kinds: list[Attack], rounds: int) -> list[Result]:
    """Each kind so many times, one after another."""
    results = []
    async with metered(server) as (meter, channel):
        meter.reset()
        before = server.rss_mib()
        await asyncio.sleep(5 * _SETTLE_S)
        results.append(Result("alone", 0, "", 0.0, meter.longest_s() * 1e3, before, before, server.rss_mib()))
        print(line_of(results[-1]), flush=True)
        for attack in kinds:
            before = peak = server.rss_mib()
            longest_s = took_s = 0.0
            for _ in range(rounds):
                meter.reset()
                begin = time.perf_counter()
                sent = asyncio.create_task(send(channel, attack))
                while not (await asyncio.wait((sent,), timeout=0.02))[0]:
                    peak = max(peak, server.rss_mib())
                status = sent.result()
                if status != attack.expected:
                    raise SystemExit(f"{attack.name}: {status}, not {attack.expected}")
                took_s = max(took_s, time.perf_counter() - begin)
                peak = max(peak, server.rss_mib())
                await asyncio.sleep(1.5)
                longest_s = max(longest_s, meter.longest_s())
            await asyncio.sleep(_SETTLE_S)
            memory = (before, peak, server.rss_mib())
            results.append(Result(attack.name, len(attack.payload), status, took_s, longest_s * 1e3, *memory))
            print(line_of(results[-1]), flush=True)
    return results


def hostile_copy(folder: Path) -> Path:
    """The demo with a chat template that can be asked to misbehave."""
    command = [sys.executable, "-m", "jpaged", "convert", "demo", str(folder), "--to", "safetensors"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    config["chat_template"] = _HOSTILE + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json_text.dumps(config))
    return folder


def line_of(result: Result) -> str:
    memory = f"{result.rss_before_mib:8.0f} {result.rss_peak_mib:8.0f} {result.rss_after_mib:8.0f}"
    return (
        f"{result.request:32} {result.num_bytes / _MIB:6.2f} {result.status:18} {result.took_s:7.2f}"
        f" {result.longest_wait_ms:9.1f} {memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stalls",
        description="How long a stream waits while one request of the worst kind is worked on, and what memory stays.",
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} is below 1")
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    heads = f"{'wait ms':>9} {'RSS MiB':>8} {'peak':>8} {'after':>8}"
    print(f"{'request':32} {'MiB':>6} {'status':18} {'took s':>7} {heads}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model, kinds in (("demo", attacks), (str(hostile_copy(Path(scratch) / "demo")), hostile_attacks)):
            server = Server(model)
            try:
                results += asyncio.run(measure(server, list(kinds()), options.rounds))
            finally:
                server.stop()
    worst = max(result.longest_wait_ms for result in results) / 1e3
    print(f"longest wait {worst * 1e3:.0f} ms; the target is {_TARGET_S * 1e3:.0f} ms")
    measured = {"target_ms": _TARGET_S * 1e3, "rounds": options.rounds, "requests": [asdict(one) for one in results]}
    path = save("stalls", f"python -m benchmarks.stalls --rounds {options.rounds}", measured)
    print(f"written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
