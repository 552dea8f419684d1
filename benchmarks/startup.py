"""How long a new process takes until it serves, cold and warm: `jpaged serve MODEL`, and `LLM(MODEL)` with a token.

    cold    nothing was compiled before: the cache folder is empty
    warm    the second start: every program is in the cache
    listening   the server's port is open (servers only)
    ready   the server takes requests, or the first token of an `LLM` is here
    token   a request that is sent when the server is ready has its first token (servers only)
    cpu     seconds of processor time of the process and its children until then, on a shared machine the better measure
    all     every program is there (servers only)

Servers are measured with and without `--wait-for-all-programs`. Real processes, timed from outside by the lines that
they print; the ways take turns, and medians of the rounds are reported with the least and the most.

    python -m benchmarks.startup [--model demo] [--rounds 3] [--ways first-token,in-need,all-first] [--no-save]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import machine, save
from jpaged import Client, SamplingParams

_LISTENING = re.compile(r"^listening on ")
_READY = re.compile(r"^ready on (?P<address>\S+)")
_ALL = re.compile(r"(?P<count>\d+) programs: (?P<origins>[^\n]*)")
_FIRST_TOKEN = """
import sys

from jpaged import LLM, SamplingParams

llm = LLM(sys.argv[1])
llm.generate(["Once upon a time"], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
print("ready on a token", file=sys.stderr, flush=True)
sys.stdin.read()
llm.close()
"""
_SERVER = ["-m", "jpaged", "serve"]
_WAYS = {
    "first-token": ["-c", _FIRST_TOKEN],
    "in-need": [*_SERVER],
    "all-first": [*_SERVER],
}
_FLAGS = {"in-need": ["--port", "0"], "all-first": ["--port", "0", "--wait-for-all-programs"]}


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a process.

    Attributes:
        ready_s: seconds until it took requests, or had a token.
        cpu_s: seconds of processor time until then.
        all_s: seconds until all programs were there; 0 for an `LLM`.
        num_programs: how many there are; 0 for an `LLM`.
        origins: where they came from, as the server says it.
        listening_s, listening_cpu_s: seconds until the port was open, and of processor time; 0 for an `LLM`.
        token_s, token_cpu_s: the same until the first token of a request; 0 for an `LLM`.
    """

    ready_s: float
    cpu_s: float
    all_s: float = 0.0
    num_programs: int = 0
    origins: str = ""
    listening_s: float = 0.0
    listening_cpu_s: float = 0.0
    token_s: float = 0.0
    token_cpu_s: float = 0.0


def start_process(model: str, way: str, cache: str) -> Start:
    """Starts a process, waits for its first token or for its last program, and ends it."""
    command = [sys.executable, *_WAYS[way], model, *_FLAGS.get(way, [])]
    is_server = way in _FLAGS
    begin = time.perf_counter()
    environment = {**os.environ, "JPAGED_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        ready_s = all_s = cpu_s = 0.0
        listening = token = (0.0, 0.0)
        found: re.Match[str] | None = None

        def now() -> tuple[float, float]:
            return time.perf_counter() - begin, processor_s(process.pid)

        for line in process.stderr:
            if _LISTENING.match(line):
                listening = now()
            elif ready := _READY.match(line):
                ready_s, cpu_s = now()
                if is_server:
                    with Client(ready["address"]) as client:
                        client.complete("Once upon a time", SamplingParams(max_tokens=1, temperature=0.0))
                    token = now()
            elif match := _ALL.search(line):
                found, all_s = match, time.perf_counter() - begin
            if ready_s and (found or not is_server):
                break
        if is_server:
            process.send_signal(signal.SIGTERM)
        process.stdin.close()
        process.stderr.read()
    if not ready_s or process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode} before it was ready")
    if found is None:
        return Start(ready_s, cpu_s)
    return Start(ready_s, cpu_s, all_s, int(found["count"]), found["origins"], *listening, *token)


def processor_s(pid: int) -> float:
    """Processor time of a process and its children so far, in user and system mode."""
    return sum(_ticks(one) for one in _family(pid)) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _ticks(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:15]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description="How long a new process takes until it serves, cold and warm.",
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(_WAYS))
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    starts: dict[tuple[str, str], list[Start]] = defaultdict(list)
    for _ in range(options.rounds):
        for way in options.ways.split(","):
            with tempfile.TemporaryDirectory() as cache:
                starts["cold", way].append(start_process(options.model, way, cache))
                if way == "first-token":  # it ends before its last program is compiled
                    start_process(options.model, "all-first", cache)
                starts["warm", way].append(start_process(options.model, way, cache))
    names = ("listening_s", "listening_cpu_s", "ready_s", "cpu_s", "token_s", "token_cpu_s")
    print(f"{'start':>5} {'way':>12}", *(f"{name:>22}" for name in names), f"{'all s':>6}   of the last round")
    results = []
    for (temperature, way), rounds in starts.items():
        spreads = (spread([getattr(start, name) for start in rounds]) for name in names)
        all_s = statistics.median(start.all_s for start in rounds)
        last = f"{rounds[-1].num_programs}: {rounds[-1].origins}" if rounds[-1].num_programs else ""
        print(f"{temperature:>5} {way:>12}", *(f"{each:>22}" for each in spreads), f"{all_s:>6.2f}   {last}")
        results.append({"start": temperature, "way": way, "rounds": [asdict(start) for start in rounds]})
    if not options.no_save:
        command = f"python -m benchmarks.startup --model {options.model}"
        path = save("startup", command, {"model": options.model, "starts": results})
        print(f"written to {path.relative_to(path.parents[2])}")


def spread(values: list[float]) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


if __name__ == "__main__":
    main()
