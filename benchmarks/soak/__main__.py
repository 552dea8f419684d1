"""An hour's worth of mixed load in minutes: `python -m benchmarks.soak`.

Two servers of the demo model answer loads of every face at once, with cancels, deadlines and slow readers. One of them
is killed (kill -9) every few seconds and started again on its ports. In the end every text must be what an undisturbed
server answers, no block may be missing, and the memory of the server that lived must not have grown.

The exit code is 0 where all of it held, and 1 otherwise. 3600 requests are those of an hour with one a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import save
from benchmarks.soak.cases import answers_of, make_cases
from benchmarks.soak.loads import LOADS, Run
from benchmarks.soak.servers import Child, kill_again_and_again, pair
from benchmarks.soak.tally import Tally
from jpaged.client import AsyncClient, Load

_REST_TIMEOUT_S = 60.0
_LOOK_S = 0.5
_GROWTH_MIB = 64.0
"""What a server's memory may grow by from the second quarter of a run to the last: buffers and fragments."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        num_lost: blocks that nobody has and that are not free, of the server that lived.
        exit_code: of that server.
        memory_mib: of that server, again and again.
    """

    tally: Tally
    seconds: float
    num_kills: int
    num_lost: int
    exit_code: int
    memory_mib: list[float]

    @property
    def growth_mib(self) -> float:
        """From the second quarter to the last: in the first caches fill."""
        quarter = max(1, len(self.memory_mib) // 4)
        second = self.memory_mib[quarter : 2 * quarter] or self.memory_mib
        return statistics.median(self.memory_mib[-quarter:]) - statistics.median(second)

    @property
    def held(self) -> bool:
        """Every text was right, no block is lost, the memory is flat, and the server ended well."""
        return not self.tally.wrong and self.num_lost == self.exit_code == 0 and self.growth_mib <= _GROWTH_MIB

    def lines(self) -> list[str]:
        """Tell it."""
        return [
            *self.tally.lines(),
            f"{self.tally.num_done} requests in {self.seconds:.0f} s ({self.tally.num_done / self.seconds:.1f}/s), "
            f"{self.num_kills} kills of one server",
            f"blocks lost by the other: {self.num_lost}; its exit code: {self.exit_code}",
            f"its memory: {self.memory_mib[0]:.0f} MiB at first, {self.memory_mib[-1]:.0f} at last, "
            f"grown by {self.growth_mib:.1f}",
        ]

    def values(self) -> dict[str, object]:
        """Return it for the record."""
        return {
            "num_requests": self.tally.num_done,
            "seconds": self.seconds,
            "num_kills": self.num_kills,
            "num_wrong": len(self.tally.wrong),
            "num_blocks_lost": self.num_lost,
            "exit_code": self.exit_code,
            "memory_growth_mib": self.growth_mib,
            "loads": {name: dict(counts) for name, counts in sorted(self.tally.counts.items())},
        }


def main() -> int:
    """Run it and say what came of it."""
    parser = argparse.ArgumentParser("python -m benchmarks.soak", description="An hour of mixed load in minutes.")
    parser.add_argument("--requests", type=int, default=3600, help="requests to make (default: 3600)")
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds between a start and a kill (default: 5)")
    parser.add_argument("--min-kills", type=int, default=3, help="go on until so many kills (default: 3)")
    parser.add_argument("--cases", type=int, default=64, help="different requests (default: 64)")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="of the requests, and who asks for which; a run each (default: 0)",
    )
    parser.add_argument("--logs", type=Path, help="a folder for the servers' logs")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/soak.json")
    parser.add_argument("flags", nargs="*", help="further flags of both servers, behind --")
    options = parser.parse_args()
    outcomes = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.logs / str(seed) if options.logs else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            outcome = asyncio.run(_soak(options, seed, folder))
        print("\n".join(outcome.lines()), flush=True)
        for line in outcome.tally.wrong[:10]:
            print(line, file=sys.stderr)
        outcomes.append(outcome)
    if options.record:
        runs = [{"seed": seed, **outcome.values()} for seed, outcome in zip(options.seeds, outcomes, strict=True)]
        path = save("soak", f"python -m benchmarks.soak {' '.join(sys.argv[1:])}", {"runs": runs})
        print(f"written to {path.relative_to(path.parents[2])}")
    return int(not all(outcome.held for outcome in outcomes))


async def _soak(options: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    tally, memory_mib = Tally(options.requests), list[float]()
    async with pair(folder, tuple(options.flags)) as (steady, mortal):
        cases = make_cases(options.cases, seed)
        run = Run(steady, mortal, cases, await answers_of(steady.target, cases), tally, options.min_kills)
        print(f"{len(cases)} requests answered undisturbed; {options.requests} begin", flush=True)
        began_s = time.monotonic()
        killing = asyncio.create_task(kill_again_and_again(mortal, options.kill_every))
        watching = asyncio.create_task(_watch(steady, memory_mib))
        async with asyncio.TaskGroup() as group:
            for load, num in LOADS:
                for _ in range(num):
                    seed += 1
                    group.create_task(load(run, seed))
        elapsed_s = time.monotonic() - began_s
        for task in (killing, watching):
            task.cancel()
        await asyncio.gather(killing, watching, return_exceptions=True)
        lost = await _blocks_lost(steady)
        code = await steady.stop()
    return Outcome(tally, elapsed_s, mortal.num_kills, lost, code, memory_mib)


async def _watch(child: Child, memory_mib: list[float]) -> None:
    while True:
        memory_mib.append(child.resident_mib)
        await asyncio.sleep(_LOOK_S)


async def _blocks_lost(child: Child) -> int:
    """Blocks that nobody has and that are not free, once all requests have ended."""
    until_s = time.monotonic() + _REST_TIMEOUT_S
    async with AsyncClient(child.target) as client:
        while True:
            load = await client.load()
            if _is_at_rest(load) or time.monotonic() > until_s:
                return load.num_blocks - load.num_blocks_free
            await asyncio.sleep(_LOOK_S)


def _is_at_rest(load: Load) -> bool:
    return load.num_running == load.num_waiting == load.num_blocks_used == 0


if __name__ == "__main__":
    sys.exit(main())
