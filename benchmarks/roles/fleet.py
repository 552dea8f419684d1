"""A fleet over each transport of KV blocks: the tokens of one server, prefixes of others, and a killed master.

    grpc      a prefill and a decode server; blocks as messages
    jax       the same two; blocks over data ports (`kv_connector` jax)
    mooncake  two servers over Mooncake Store; its master is paused, and later killed and started again
    trace     three servers over Mooncake Store, to which the turns of conversations go in rotation

Each prints a line of JSON: the requests, how many of them had the tokens of one server without any of this (`equal`),
the prompt tokens that were transferred instead of computed (`hits`), and the bytes per second of transfers, of which
those of Mooncake include waits for a processor. `trace` has the cached share of all prompts beside that of one server
with as much memory. Its model is a generated one of 386 million parameters, because the demo model computes a turn
about as fast as a turn is loaded, and servers then compute. The command fails if a token is another, or if nothing was
transferred.

    python -m benchmarks.roles.fleet [--model demo] [--requests 96] [--transports grpc jax mooncake trace]
        [--trace-model MODEL] [--record]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import SHAPES, make
from benchmarks.record import save
from benchmarks.roles.transports import _PORT, read_counters
from jpaged.client import Client
from jpaged.types import SamplingParams

_COMMON = ("--port", "0", "--metrics-port", "0", "--max-num-seqs", "4", "--block-size", "16")
_ALWAYS = ("--prefill-min-tokens", "32", "--prefill-policy", "always")
_NUM_CALLS = 4
_START_S = 600.0
_NUM_PREFIXES, _NUM_USES, _PREFIX_LEN = 8, 4, 320
_NUM_CONVERSATIONS, _NUM_TURNS, _TURN_LEN, _ANSWER_LEN = 3, 20, 32, 8
_LIBRARIES = "libibverbs1 libnuma1 liburing2"
_SETTLED_S = 0.5
Told = list[tuple[int, ...]]
"""Tokens of each request."""


@dataclass(frozen=True)
class Call:
    """A request: its prompt and its sampling parameters."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


class Program:
    """A process whose output goes to a file."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.log = log
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with log.open("ab") as file:
            self._popen = subprocess.Popen(words, env=environment, stdout=file, stderr=file)

    def wait_for(self, pattern: str) -> str:
        """Returns the first group of the pattern's first match in the output."""
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            if found := re.search(pattern, self.log.read_text(errors="replace"), re.M):
                return found[1]
            if self._popen.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"{self._popen.args[0]!r} has not started:\n{self.log.read_text(errors='replace')}")  # type: ignore[index]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kills the process at once."""
        self._popen.kill()
        self._popen.wait()


class Server:
    """A server of the fleet."""

    def __init__(self, model: str, folder: Path, words: Sequence[str] = ()) -> None:
        number = len([*folder.iterdir()])
        command = [sys.executable, "-m", "jpaged", "serve", model, *_COMMON, "--swap-space", "0.1", *words]
        self._program = Program(command, folder / f"server{number}.log")
        self.target = self._program.wait_for(r"^ready on (\S+:\d+)")
        self._url = self._program.wait_for(r"metrics on (\S+)")
        self.client = Client(self.target)

    def ask(self, call: Call) -> tuple[tuple[int, ...], int]:
        """Returns the tokens, and how many of the prompt were cached."""
        completion = self.client.complete(sampling=call.sampling, prompt_token_ids=list(call.token_ids))
        return tuple(completion.outputs[0].token_ids), completion.usage.cached_tokens

    def counters(self) -> dict[str, float]:
        """Returns the server's own counters."""
        return read_counters(self._url)

    def end(self) -> None:
        """Ends client and process."""
        self.client.close()
        self._program.kill()


class Master:
    """A `mooncake_master`, at a port that stays the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free, socket.socket() as other:
            free.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self._ports = free.getsockname()[1], other.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Starts the process, and waits for its port."""
        port, metrics_port = self._ports
        beside = Path(sys.executable).with_name("mooncake_master")
        found = str(beside) if beside.exists() else shutil.which("mooncake_master")
        if found is None:
            raise SystemExit("mooncake_master is missing: pip install mooncake-transfer-engine-non-cuda")
        words = [found, "--rpc_address", "127.0.0.1", "--rpc_port", str(port)]
        words += ["--metrics_host", "127.0.0.1", "--metrics_port", str(metrics_port)]
        self._program = Program(words, self._folder / "master.log")
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.05)
        raise SystemExit(f"mooncake_master has not started; it loads {_LIBRARIES}:\n{self._program.log.read_text()}")

    def pause(self) -> None:
        """Stops the process, which keeps its connections and does not answer."""
        self._program.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the process continue."""
        self._program.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process at once, and all that it knows."""
        self._program.kill()

    @property
    def words(self) -> tuple[str, str]:
        """Options of a server of the fleet."""
        extra = {
            "master_server_address": f"127.0.0.1:{self._ports[0]}",
            "protocol": "tcp",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": "256MB",
            "local_buffer_size": "16MB",
        }
        transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return "--kv-transfer-config", json.dumps(transfer)


def make_rounds(num_calls: int) -> list[list[Call]]:
    """Returns rounds of requests, of which each four have the same prefixes; half of the requests have a seed."""
    chance, rounds, number = random.Random(0), list[list[Call]](), 0
    while number < num_calls:
        prefixes = [tuple(chance.randrange(300, 3000) for _ in range(_PREFIX_LEN)) for _ in range(_NUM_PREFIXES)]
        for _ in range(_NUM_USES):
            rounds.append([])
            for prefix in prefixes:
                own = tuple(chance.randrange(300, 3000) for _ in range(chance.randrange(1, 33)))
                sampling = SamplingParams(
                    max_tokens=_ANSWER_LEN, temperature=float(number % 2), seed=number, ignore_eos=number % 3 > 0
                )
                rounds[-1].append(Call(prefix + own, sampling))
                number += 1
    return rounds


def send(servers: Sequence[Server], rounds: Sequence[Sequence[Call]], master: Master | None = None) -> Told:
    """Returns the tokens of each request; each round goes to the next server. Pauses and kills a master."""
    killed, told = len(rounds) // 2, list[tuple[int, ...]]()
    with ThreadPoolExecutor(_NUM_CALLS) as threads:
        for number, calls in enumerate(rounds):
            found = threads.map(
                lambda call, server: server.ask(call)[0], calls, itertools.repeat(servers[number % len(servers)])
            )
            told.append(next(found))
            if master is not None and number == killed // 2:
                master.pause()
            if master is not None and number == killed:
                master.kill()
            told.extend(found)
            if master is not None and number == killed // 2:
                master.resume()
            if master is not None and number == killed + 1:
                master.start()
            if master is not None:
                settle(servers)
    return told


def settle(servers: Sequence[Server]) -> None:
    """Returns when the store has followed the servers' memory, as far as it does at all, after ten seconds anyway."""
    end_s, before = time.monotonic() + 10, -1.0
    while time.monotonic() < end_s:
        time.sleep(_SETTLED_S)
        written = add_up(servers).get("external_blocks_written", 0.0)
        if written == before:
            return
        before = written


@contextlib.contextmanager
def serving(model: str, folder: Path, *words: Sequence[str]) -> Iterator[list[Server]]:
    """One server for each list of options."""
    servers: list[Server] = []
    try:
        for some in words:
            servers.append(Server(model, folder, some))
        yield servers
    finally:
        for server in servers:
            server.end()


def add_up(servers: Sequence[Server]) -> dict[str, float]:
    """Returns the sums of the servers' counters."""
    each = [server.counters() for server in servers]
    return {name: sum(one.get(name, 0.0) for one in each) for name in each[0]}


def run_roles(
    model: str, folder: Path, transport: str, rounds: Sequence[Sequence[Call]], wanted: Told
) -> dict[str, Any]:
    """Returns the result of a prefill and a decode server."""
    port = ("--kv-transfer-config", _PORT) if transport == "jax" else ()
    with contextlib.ExitStack() as stack:
        (prefill,) = stack.enter_context(serving(model, folder, ("--role", "prefill", *port)))
        words = ("--role", "decode", "--prefill-target", prefill.target, *_ALWAYS, *port)
        times = ("--prefill-timeout", "120", "--transfer-timeout", "60")
        decoding = stack.enter_context(serving(model, folder, (*words, *times)))
        found, counters = send(decoding, rounds), add_up(decoding)
    rate = ("bytes_pulled", "pull_seconds") if transport == "jax" else ("bytes_received", "transfer_wait_seconds")
    return describe(transport, found, wanted, counters, rate, 16 * counters["blocks_received"])


def run_mooncake(model: str, folder: Path, rounds: Sequence[Sequence[Call]], wanted: Told) -> dict[str, Any]:
    """Returns the result of two servers over Mooncake Store, whose master is killed halfway."""
    master = Master(folder)
    try:
        with serving(model, folder, master.words, master.words) as servers:
            found = send(servers, rounds, master)
            counters = add_up(servers)
    finally:
        master.kill()
    rate = ("external_read_bytes", "external_read_seconds")
    line = describe("mooncake", found, wanted, counters, rate, counters["external_prefix_hits"])
    return {**line, "fallbacks": int(counters["external_fallbacks"])}


def make_model(folder: Path) -> str:
    """Writes a model that computes a turn more slowly than the turn is loaded; returns its folder."""
    make(SHAPES["M"], folder / "M")
    return str(folder / "M")


def run_trace(model: str, folder: Path) -> dict[str, Any]:
    """Returns the cached share of conversations whose turns go to three servers, beside that of one."""
    master = Master(folder)
    try:
        with serving(model, folder, ()) as alone:
            wanted, share_alone = converse(alone)
        with serving(model, folder, *[master.words] * 3) as servers:
            found, share = converse(servers)
            counters = add_up(servers)
    finally:
        master.kill()
    rate = ("external_read_bytes", "external_read_seconds")
    line = describe("trace", found, wanted, counters, rate, counters["external_prefix_hits"])
    shares = {"cached_share": round(share, 4), "cached_share_of_one_server": round(share_alone, 4)}
    return {**line, **shares, "fallbacks": int(counters["external_fallbacks"])}


def converse(servers: Sequence[Server]) -> tuple[Told, float]:
    """Returns all tokens of conversations whose turns go to the servers in rotation, and the prompts' cached share."""
    chance = random.Random(1)
    histories: list[tuple[int, ...]] = [() for _ in range(_NUM_CONVERSATIONS)]
    sampling = SamplingParams(max_tokens=_ANSWER_LEN, temperature=0.0, ignore_eos=True)
    places = itertools.cycle(servers)
    answers, num_cached, num_tokens = list[tuple[int, ...]](), 0, 0
    for _ in range(_NUM_TURNS):
        for number, history in enumerate(histories):
            prompt = (*history, *(chance.randrange(300, 3000) for _ in range(_TURN_LEN)))
            answer, cached = next(places).ask(Call(prompt, sampling))
            answers.append(answer)
            num_cached, num_tokens = num_cached + cached, num_tokens + len(prompt)
            histories[number] = (*prompt, *answer)
        next(places)  # the next turn of a conversation goes to another server
        settle(servers)
    return answers, num_cached / num_tokens


def describe(
    transport: str,
    found: Told,
    wanted: Told,
    counters: dict[str, float],
    rate: tuple[str, str],
    hits: float,
) -> dict[str, Any]:
    """Returns the line of a transport; `rate` names its counters of bytes and seconds."""
    num_bytes, seconds = (counters[name] for name in rate)
    return {
        "transport": transport,
        "bytes_per_s": round(num_bytes / seconds) if seconds else 0,
        "requests": len(found),
        "equal": sum(one == other for one, other in zip(found, wanted, strict=True)),
        "hits": int(hits),
    }


def main() -> int:
    """Runs each transport, and prints a line for each; returns 1 if one has other tokens or no hits."""
    parser = argparse.ArgumentParser(description="Check and measure fleets over each transport of KV blocks.")
    names = ("grpc", "jax", "mooncake", "trace")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--trace-model", help="model of trace (default: a generated one)")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--transports", nargs="+", choices=names, default=names)
    parser.add_argument("--record", action="store_true", help="write the lines to benchmarks/results")
    arguments = parser.parse_args()
    model, rounds, is_right = arguments.model, make_rounds(arguments.requests), True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted: Told = []
        lines: list[dict[str, Any]] = []
        hits: dict[str, int] = {}
        if {*arguments.transports} != {"trace"}:
            with serving(model, folder, ()) as alone:
                wanted = send(alone, rounds)
        for transport in arguments.transports:
            if transport == "trace":
                line = run_trace(arguments.trace_model or make_model(folder), folder)
            elif transport == "mooncake":
                line = run_mooncake(model, folder, rounds, wanted)
            else:
                line = run_roles(model, folder, transport, rounds, wanted)
            print(json.dumps(line), flush=True)
            lines.append(line)
            is_right = is_right and line["equal"] == line["requests"]
            store = "mooncake" if transport == "trace" else transport
            hits[store] = hits.get(store, 0) + line["hits"]
    if arguments.record:
        save("fleet_transports", "make fleet ARGS=--record", {"lines": lines})
    return 0 if is_right and all(hits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
