"""What a router costs: processor time a token, and memory a stream.

    python -m benchmarks.route [--streams 1000] [--rates 100 500 1000 2000] [--seconds 20] [--record]

Servers without a model tell tokens at a rate, all of one server at one time, as engines do; callers in another process
read them; the router is `jpaged route` between them. Each message has one token. What is measured is the processor time
of the router's process alone, all threads, by the kernel's clock, and its resident memory with the streams open and
before. A core is one second of processor time a second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import put_on_page, save

TARGET_SHARE = 0.05
"""The bound: so much of a core for each hundred tokens a second."""
_LISTENING = re.compile(r"^listening on \S+:(?P<port>\d+)")
_WAIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One rate.

    Attributes:
        asked_per_s: tokens a second that the servers tell together.
        tokens_per_s: that callers had.
        cpu_us: microseconds of the router's processor time a token.
        core_share: of a core, for each hundred tokens a second.
        bytes_of_stream: memory that an open stream adds.
    """

    num_streams: int
    num_servers: int
    asked_per_s: float
    tokens_per_s: float
    cpu_us: float
    core_share: float
    bytes_of_stream: float


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, all its threads."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start(stack: ExitStack, *words: str, is_router: bool = False) -> subprocess.Popen[str]:
    """Start a module of Python's; it is ended with the stack."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if is_router else None,
        text=True,
    )

    def end() -> None:
        process.terminate()
        process.communicate()

    stack.callback(end)
    return process


def asked(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the callers have now."""
    assert process.stdin is not None
    assert process.stdout is not None
    print("", file=process.stdin, flush=True)
    told: dict[str, Any] = json.loads(process.stdout.readline())
    if told["failed"]:
        raise SystemExit(f"streams have ended: {told['failed']}")
    return told


def measure(num_streams: int, num_servers: int, rate: float, seconds: float) -> Measured:
    """Run one rate: tokens a second of all streams together."""
    with ExitStack() as stack:
        words = "benchmarks.route.server", "--rate", str(rate / num_streams)
        servers = [start(stack, *words) for _ in range(num_servers)]
        targets = []
        for server in servers:
            assert server.stdout is not None
            targets += ["--target", f"127.0.0.1:{server.stdout.readline().strip()}"]
        router = start(stack, "jpaged", "route", "--port", "0", "--shutdown-timeout", "0", *targets, is_router=True)
        assert router.stderr is not None
        found = next(match for line in router.stderr if (match := _LISTENING.match(line)))
        time.sleep(2.0)
        before = resident_bytes(router.pid)
        target = f"127.0.0.1:{found['port']}"
        callers = start(stack, "benchmarks.route.callers", "--target", target, "--streams", str(num_streams))
        until_s = time.monotonic() + _WAIT_S
        while asked(callers)["num_open"] < num_streams:
            if time.monotonic() > until_s:
                raise SystemExit(f"only {asked(callers)['num_open']} of {num_streams} streams were begun")
            time.sleep(0.5)
        time.sleep(2.0)
        used_s, begin_s, first = cpu_s(router.pid), time.monotonic(), asked(callers)["num_messages"]
        time.sleep(seconds)
        used_s, wall_s = cpu_s(router.pid) - used_s, time.monotonic() - begin_s
        num_tokens = asked(callers)["num_messages"] - first
        grown = resident_bytes(router.pid) - before
    per_token_s = used_s / max(1, num_tokens)
    tokens_per_s = num_tokens / wall_s
    return Measured(
        num_streams, num_servers, rate, tokens_per_s, per_token_s * 1e6, per_token_s * 100, grown / num_streams
    )


def table(results: list[Measured]) -> str:
    """The results for the page."""
    lines = [
        "| streams | servers | tokens/s asked | tokens/s | processor time a token | of a core each 100 tokens/s "
        "| memory a stream |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.num_streams} | {one.num_servers} | {one.asked_per_s:g} | {one.tokens_per_s:.0f} "
        f"| {one.cpu_us:.0f} us | {one.core_share:.1%} | {one.bytes_of_stream / 1024:.0f} KiB |"
        for one in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure all rates, print them, and with --record keep them."""
    parser = argparse.ArgumentParser(description="What a router costs.")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 500.0, 1000.0, 2000.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate")
    parser.add_argument("--record", action="store_true", help="keep the results, and put them on the page")
    arguments = parser.parse_args()
    results = []
    for rate in arguments.rates:
        results.append(measure(arguments.streams, arguments.servers, rate, arguments.seconds))
        print(table(results[-1:]).splitlines()[-1], flush=True)
    worst = max(one.core_share for one in results)
    print(table(results))
    print(f"\nat most {worst:.1%} of a core each 100 tokens/s; the bound is {TARGET_SHARE:.0%}")
    if arguments.record:
        words = " ".join(sys.argv[1:])
        save("route", f"python -m benchmarks.route {words}", {"results": [asdict(one) for one in results]})
        put_on_page({"route": table(results)})


if __name__ == "__main__":
    main()
