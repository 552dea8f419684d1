"""How long a stream waits for its next token while one request of the worst kind is worked on, and what memory stays.

Every route of the HTTP port and every method of the gRPC port is called at the largest size that is accepted.

    wait    the longest time between two messages of another client's stream, or for the answer to a ping
    alone   the same while nothing else runs
    RSS     of the server's process: before the first round, at the peak, and two seconds after the last one

Requests are sent as raw bytes, at the greatest size that is accepted and at the greatest that is refused; the last two
are on a copy of the demo whose chat template never ends, or multiplies a string, when a message asks for it.

    python -m benchmarks.stalls [--rounds 5] [--only http] [--limit-ms 250]
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
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from benchmarks.record import machine, save
from jpaged import json_text
from jpaged._proto.v1 import inference_pb2
from jpaged.demo import FOLDER

_READY = re.compile(r"^ready on \S*:(?P<port>\d+)(?:.* HTTP \S*:(?P<http>\d+))?")
_HTTP = re.compile(r"http://\S*?:(?P<port>\d+)")
_ENDED = ("completed", "failed", "expired", "cancelled")
_SERVICE = "/jpaged.v1.InferenceService/"
_CHANNEL = [("grpc.max_receive_message_length", 64 << 20)]
_MIB = 1 << 20
_MAX_BYTES = _MIB - 64
"""Just below what the server receives."""
_TARGET_S = 0.25
_SETTLE_S = 2.0
_NAME_WIDTH = 40
_PING_INTERVAL_S = 0.005
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
    kind: str = "application/json"
    """The content type of an HTTP request."""


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


def large_answers() -> Iterator[Attack]:
    """Methods of the gRPC port whose answers are large."""
    ids = field(1, b"\x14" * 1000)
    told = field(5, inference_pb2.SamplingParams(max_tokens=20, logprobs=20, prompt_logprobs=20).SerializeToString())
    yield Attack("Generate, prompt_logprobs 20", "Generate", field(3, ids) + told, "OK")
    one = inference_pb2.Continuation(text="a fox").SerializeToString()
    yield Attack("Score, 1024 continuations", "Score", field(1, b"once") + field(3, one) * 1024, "OK")
    text = inference_pb2.EmbedInput(text="a fox").SerializeToString()
    yield Attack("Embed, 1024 inputs", "Embed", field(1, text) * 1024, "OK")


def json_attack(name: str, path: str, body: object, expected: str = "200") -> Attack:
    """A request of the HTTP port."""
    return Attack(name, f"POST {path}", json_text.dumps(body, separators=(",", ":")).encode(), expected)


def http_attacks() -> Iterator[Attack]:
    """Every route of the HTTP port that reads a body, at the largest size that is accepted."""
    ids, texts = [5] * 500, ["a fox"] * 2048
    told = {"echo": True, "logprobs": 20, "max_tokens": 1}
    refused = json_attack(
        "completions, 1000 x 500 ids told", "/v1/completions", {"prompt": [ids] * 1000, **told}, "400"
    )
    yield refused
    for name, more in (("", {}), (", streamed", {"stream": True})):
        body = {"prompt": [ids] * 250, **told, **more}
        yield json_attack(f"completions, 250 x 500 ids told{name}", "/v1/completions", body)
        short = {"prompt": texts[:1024], "max_tokens": 4, **more}
        yield json_attack(f"completions, 1024 prompts{name}", "/v1/completions", short)
        chat = {"messages": [{"role": "user", "content": "hi"}] * 150, "logprobs": True, "top_logprobs": 20, **more}
        yield json_attack(f"chat, logprobs, n 8{name}", "/v1/chat/completions", {**chat, "n": 8, "max_tokens": 300})
        answer = {"input": "Tell me a story.", "top_logprobs": 20, "include": ["message.output_text.logprobs"], **more}
        yield json_attack(f"responses, logprobs{name}", "/v1/responses", {**answer, "max_output_tokens": 900})
    yield json_attack("embeddings, 2048 float", "/v1/embeddings", {"input": texts})
    yield json_attack("embeddings, 2048 base64", "/v1/embeddings", {"input": texts, "encoding_format": "base64"})
    yield json_attack("score, 2048 continuations", "/v1/score", {"prompt": "once upon", "continuations": texts})
    yield json_attack("score, 2048 pairs", "/v1/score", {"text_1": "once upon", "text_2": texts})
    text = "Once upon a time there was a little fox. " * 6000
    yield json_attack("tokenize, 246 KiB, strings", "/tokenize", {"prompt": text, "return_token_strs": True})
    messages = [{"role": "user", "content": "a story"}] * 8192
    yield json_attack("tokenize chat, 8192 messages", "/tokenize", {"messages": messages})
    yield json_attack("detokenize, 262144 ids", "/detokenize", {"tokens": [20] * 262144})
    fields = {f"a{i}": 1 for i in range(80_000)}
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/tokenize",
    ):
        yield json_attack(f"80 thousand fields, {path}", path, fields, "400")
    bytewise = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 300_000) + b"0\r\n\r\n"
    yield Attack("300 thousand chunks of one byte", "POST /v1/completions", bytewise, "400", "chunked")
    for path in ("/metrics", "/v1/models", "/version", "/health", "/", "/page/about", "/page/frame"):
        yield Attack(f"GET {path}", f"GET {path}", b"", "200")
    yield from batch_attacks()


def batch_attacks() -> Iterator[Attack]:
    """Files and batches, each after those before it."""
    wide = json_text.dumps({f"a{i}": 1 for i in range(80_000)}, separators=(",", ":")).encode()
    start = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":'
    lines = b"".join(start % i + wide + b"}\n" for i in range(12))
    yield upload("upload, 12 lines of 80 thousand fields", lines)
    yield batch("batch of 12 lines of 80 thousand fields")
    yield upload("upload, one line of 190 MB", b"a" * 190_000_000)
    yield Attack("GET file content, 190 MB", "GET /v1/files/{file}/content", b"", "200")
    yield batch("batch of one line of 190 MB", "failed")
    told = {"prompt": [5] * 1000, "max_tokens": 20, "logprobs": 20, "prompt_logprobs": 20}
    lines = b"".join(start % i + json_text.dumps(told).encode() + b"}\n" for i in range(12))
    yield upload("upload, 12 lines with logprobs", lines)
    yield batch("batch of 12 lines with logprobs")
    yield upload("upload, 50 thousand bad lines", b"".join(b'{"custom_id":"%d"}\n' % i for i in range(50_000)))
    yield batch("batch of 50 thousand bad lines", "failed")
    for path in ("/v1/files", "/v1/batches?limit=100"):
        yield Attack(f"GET {path}", f"GET {path}", b"", "200")


def upload(name: str, content: bytes) -> Attack:
    """A file for a batch; those after it know it as {file}."""
    parts = (("purpose", b"", b"batch"), ("file", b'; filename="a.jsonl"', content))
    body = b"".join(
        b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (field.encode(), more, value)
        for field, more, value in parts
    )
    return Attack(name, "POST /v1/files", body + b"--x--\r\n", "200", "multipart/form-data; boundary=x")


def batch(name: str, status: str = "completed") -> Attack:
    """A batch over the file that was sent last, to its end."""
    body = {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h"}
    return Attack(name, "POST /v1/batches", json_text.dumps(body).encode(), status)


def hostile_attacks() -> Iterator[Attack]:
    """For the copy with a template of its own."""
    for word in ("loop", "grow"):
        yield Attack(f"chat template, {word}", "Generate", field(4, turn("user", word)), "INVALID_ARGUMENT")


class Server:
    """`jpaged serve` as a process."""

    def __init__(self, model: str, batch_dir: str) -> None:
        command = [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", "--wait-for-all-programs"]
        command += ["--http-port", "0", "--batch-dir", batch_dir]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self._process.stderr is not None
        self.port = self.http_port = 0
        for line in self._process.stderr:
            if match := _HTTP.search(line):
                self.http_port = int(match["port"])
            if match := _READY.match(line):
                self.port = int(match["port"])
                break
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
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
    """Streams one after another, and pings: the longest wait for an answer or for a stream's next message.

    The wait for a stream's first message is left out: it queues behind the prompts that came before, by design.
    """

    def __init__(self, channel: aio.Channel, http_port: int) -> None:
        self._call: Any = channel.unary_stream(_SERVICE + "Generate")
        sampling = inference_pb2.SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
        self._request = inference_pb2.GenerateRequest(text="Once upon a time", sampling=sampling).SerializeToString()
        self._http_port = http_port
        self._since: dict[str, float | None] = {"stream": None, "ping": None}
        self._longest = 0.0

    async def run(self) -> None:
        """Stream and ping until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stream())
            group.create_task(self._ping())

    async def _stream(self) -> None:
        while True:
            async for _ in self._call(self._request):
                self._note("stream", time.perf_counter())
            self._note("stream", None)

    async def _ping(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        with contextlib.closing(writer):
            while True:
                self._note("ping", time.perf_counter())
                writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.readuntil(b"\r\n\r\nserving\n")
                self._note("ping", None)
                await asyncio.sleep(_PING_INTERVAL_S)

    def _note(self, what: str, now: float | None) -> None:
        if (since := self._since[what]) is not None:
            self._longest = max(self._longest, time.perf_counter() - since)
        self._since[what] = now

    def reset(self) -> None:
        """Begin anew."""
        self._longest = 0.0

    def longest_s(self) -> float:
        """Return the longest wait, also one that has not ended."""
        now = time.perf_counter()
        return max(self._longest, *(now - since for since in self._since.values() if since is not None), 0.0)


@contextlib.asynccontextmanager
async def metered(server: Server) -> AsyncIterator[tuple[Meter, aio.Channel]]:
    """A meter that runs, and a channel for others."""
    target = f"127.0.0.1:{server.port}"
    async with aio.insecure_channel(target) as own, aio.insecure_channel(target, options=_CHANNEL) as channel:
        meter = Meter(own, server.http_port)
        task = asyncio.create_task(meter.run())
        try:
            await asyncio.sleep(_SETTLE_S)
            yield meter, channel
        finally:
            task.cancel()
            await asyncio.wait((task,))


class Http:
    """The HTTP port of a server, each request on a connection of its own; and the file that was sent last."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._file = ""

    async def send(self, attack: Attack) -> str:
        """Send a request and read its answer; its status, or that of the batch that it made, once that has ended."""
        status, content = await self._answer(attack.method, attack.payload, attack.kind)
        if attack.method == "POST /v1/files" and status == "200":
            self._file = json.loads(content)["id"]
        if attack.method != "POST /v1/batches" or status != "200":
            return status
        path = f"GET /v1/batches/{json.loads(content)['id']}"
        while True:
            batch = json.loads((await self._answer(path, b""))[1])
            if batch["status"] in _ENDED:
                return str(batch["status"])
            await asyncio.sleep(0.1)

    async def _answer(self, method: str, payload: bytes, kind: str = "") -> tuple[str, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_MIB)
        payload = payload.replace(b"{file}", self._file.encode()) if len(payload) < 1000 else payload
        is_chunked = kind == "chunked"
        length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(payload)}"
        kind = "application/json" if is_chunked else kind
        head = f"{method.format(file=self._file)} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        writer.write(f"{head}content-type: {kind}\r\n{length}\r\n\r\n".encode())
        begin, is_over = bytearray(), False

        async def read() -> None:
            while part := await reader.read(64 << 10):
                if len(begin) < _MIB:
                    begin.extend(part)

        reading = asyncio.create_task(read())
        try:
            for at in range(0, len(payload), 256 << 10):
                writer.write(payload[at : at + (256 << 10)])
                await writer.drain()
        except ConnectionError:
            is_over = True
        await reading
        writer.close()
        first, _, rest = bytes(begin).partition(b"\r\n")
        if not first:
            return ("closed" if is_over else "empty"), b""
        return first.split(b" ")[1].decode(), rest.partition(b"\r\n\r\n")[2]


async def send(channel: aio.Channel, http: Http, attack: Attack) -> str:
    """Sends it; the name of its status."""
    if " " in attack.method:
        return await http.send(attack)
    stream: Any = channel.unary_stream(_SERVICE + attack.method)
    unary: Any = channel.unary_unary(_SERVICE + attack.method)
    try:
        if attack.method == "Generate":
            async for _ in stream(attack.payload):
                pass
        else:
            await unary(attack.payload)
    except aio.AioRpcError as error:
        return error.code().name
    return grpc.StatusCode.OK.name


async def measure(server: Server, kinds: list[Attack], rounds: int, *, settle_s: float = _SETTLE_S) -> list[Result]:
    """Send each kind `rounds` times, one after another, and wait `settle_s` seconds after each."""
    results, http = [], Http(server.http_port)
    async with metered(server) as (meter, channel):
        meter.reset()
        before = server.rss_mib()
        await asyncio.sleep(5 * settle_s)
        results.append(Result("alone", 0, "", 0.0, meter.longest_s() * 1e3, before, before, server.rss_mib()))
        print(line_of(results[-1]), flush=True)
        for attack in kinds:
            before = peak = server.rss_mib()
            longest_s = took_s = 0.0
            for _ in range(rounds):
                meter.reset()
                begin = time.perf_counter()
                sent = asyncio.create_task(send(channel, http, attack))
                while not (await asyncio.wait((sent,), timeout=0.02))[0]:
                    peak = max(peak, server.rss_mib())
                status = sent.result()
                if status != attack.expected:
                    print(f"{attack.name}: {status}, not {attack.expected}", flush=True)
                took_s = max(took_s, time.perf_counter() - begin)
                peak = max(peak, server.rss_mib())
                await asyncio.sleep(settle_s)
                longest_s = max(longest_s, meter.longest_s())
            await asyncio.sleep(settle_s)
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
        f"{result.request:{_NAME_WIDTH}} {result.num_bytes / _MIB:6.2f} {result.status:18} {result.took_s:7.2f}"
        f" {result.longest_wait_ms:9.1f} {memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stalls",
        description="How long a stream waits while one request of the worst kind is worked on, and what memory stays.",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("grpc", "http", "templates"), help="requests of one kind (default: all)")
    parser.add_argument("--match", default="", help="requests whose name has this regular expression (default: all)")
    parser.add_argument("--limit-ms", type=float, help="fail if a wait is longer (default: report only)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} is below 1")
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    heads = f"{'wait ms':>9} {'RSS MiB':>8} {'peak':>8} {'after':>8}"
    print(f"{'request':{_NAME_WIDTH}} {'MiB':>6} {'status':18} {'took s':>7} {heads}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind, kinds in (
            ("grpc", lambda: (*attacks(), *large_answers())),
            ("http", http_attacks),
            ("templates", hostile_attacks),
        ):
            if options.only not in (None, kind):
                continue
            model = str(hostile_copy(Path(scratch) / "demo")) if kind == "templates" else "demo"
            server = Server(model, f"{scratch}/{kind}")
            try:
                chosen = [one for one in kinds() if re.search(options.match, one.name)]
                results += asyncio.run(measure(server, chosen, options.rounds))
            finally:
                server.stop()
    worst = max(result.longest_wait_ms for result in results) / 1e3
    print(f"longest wait {worst * 1e3:.0f} ms; the target is {_TARGET_S * 1e3:.0f} ms")
    if options.only is None and not options.match:
        measured = {
            "target_ms": _TARGET_S * 1e3,
            "rounds": options.rounds,
            "requests": [asdict(one) for one in results],
        }
        path = save("stalls", f"python -m benchmarks.stalls --rounds {options.rounds}", measured)
        print(f"written to {path.relative_to(path.parents[2])}")
    if options.limit_ms is not None and worst * 1e3 > options.limit_ms:
        raise SystemExit(f"{worst * 1e3:.0f} ms are over the limit of {options.limit_ms:.0f} ms")


if __name__ == "__main__":
    main()
