"""How long `jpaged serve demo` takes from its start to its first request, cold and warm.

    cold    nothing was compiled before: the cache folder is empty
    warm    the second start: every program is in the cache
    ready   the server takes requests
    all     every program is there

Each with and without `--wait-for-all-programs`. Real processes, timed from outside by the lines that they print; the
ways take turns, and the medians of the rounds are reported.

    python -m benchmarks.startup [--rounds 3]
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
from dataclasses import asdict, dataclass

from benchmarks.record import machine, save

_READY = re.compile(r"^ready on ")
_ALL = re.compile(r"(?P<count>\d+) programs: (?P<origins>[^\n]*)")
_WAYS = {"in need": [], "all first": ["--wait-for-all-programs"]}


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server.

    Attributes:
        ready_s: seconds until it took requests.
        all_s: seconds until all programs were there.
        num_programs: how many there are.
        origins: where they came from, as the server says it.
    """

    ready_s: float
    all_s: float
    num_programs: int
    origins: str


def start_server(cache: str, flags: list[str]) -> Start:
    """Starts a server, waits for its last program, and ends it."""
    command = [sys.executable, "-m", "jpaged", "serve", "demo", "--port", "0", *flags]
    begin = time.perf_counter()
    environment = {**os.environ, "JPAGED_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        ready_s = all_s = 0.0
        found: re.Match[str] | None = None
        for line in server.stderr:
            if _READY.match(line):
                ready_s = time.perf_counter() - begin
            elif match := _ALL.search(line):
                found, all_s = match, time.perf_counter() - begin
            if ready_s and found:
                break
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    if found is None or server.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {server.returncode} before it was ready")
    return Start(ready_s, all_s, int(found["count"]), found["origins"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description="How long `jpaged serve demo` takes from its start to its first request, cold and warm.",
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    starts: dict[tuple[str, str], list[Start]] = defaultdict(list)
    for _ in range(options.rounds):
        for way, flags in _WAYS.items():
            with tempfile.TemporaryDirectory() as cache:
                starts["cold", way].append(start_server(cache, flags))
                starts["warm", way].append(start_server(cache, flags))
    print(f"{'start':>6} {'programs':>10} {'ready s':>8} {'all s':>6}   of the last round")
    results = []
    for (temperature, way), rounds in starts.items():
        ready_s = statistics.median(start.ready_s for start in rounds)
        all_s = statistics.median(start.all_s for start in rounds)
        last = f"{rounds[-1].num_programs}: {rounds[-1].origins}"
        print(f"{temperature:>6} {way:>10} {ready_s:>8.2f} {all_s:>6.2f}   {last}")
        results.append({"start": temperature, "programs": way, "rounds": [asdict(start) for start in rounds]})
    path = save("startup", "python -m benchmarks.startup", {"starts": results})
    print(f"written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
