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
from pathlib import Path

from benchmarks.soak.cases import answers_of, make_cases
from benchmarks.soak.loads import LOADS, Run
from benchmarks.soak.servers import Child, kill_again_and_again, pair
from benchmarks.soak.tally import Tally
from jpaged.client import AsyncClient, Load

_REST_TIMEOUT_S = 60.0
_LOOK_S = 0.5
_GROWTH_MIB = 64.0
"""What a server's memory may grow by from the second quarter of a run to the last: buffers and fragments."""


def main() -> int:
    """Run it and say what came of it."""
    parser = argparse.ArgumentParser("python -m benchmarks.soak", description="An hour of mixed load in minutes.")
    parser.add_argument("--requests", type=int, default=3600, help="requests to make (default: 3600)")
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds between a start and a kill (default: 5)")
    parser.add_argument("--min-kills", type=int, default=3, help="go on until so many kills (default: 3)")
    parser.add_argument("--cases", type=int, default=64, help="different requests (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests, and who asks for which (default: 0)")
    parser.add_argument("--logs", type=Path, help="a folder for the servers' logs")
    parser.add_argument("flags", nargs="*", help="further flags of both servers, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(_soak(options, folder))


async def _soak(options: argparse.Namespace, folder: Path) -> int:
    tally, memory_mib = Tally(options.requests), []
    async with pair(folder, tuple(options.flags)) as (steady, mortal):
        cases = make_cases(options.cases, options.seed)
        run = Run(steady, mortal, cases, await answers_of(steady.target, cases), tally, options.min_kills)
        print(f"{len(cases)} requests answered undisturbed; {options.requests} begin", flush=True)
        began_s = time.monotonic()
        killing = asyncio.create_task(kill_again_and_again(mortal, options.kill_every))
        watching = asyncio.create_task(_watch(steady, memory_mib))
        async with asyncio.TaskGroup() as group:
            seed = options.seed
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
    growth_mib = _growth(memory_mib)
    print("\n".join(tally.lines()))
    rate = tally.num_done / elapsed_s
    print(f"{tally.num_done} requests in {elapsed_s:.0f} s ({rate:.1f}/s), {mortal.num_kills} kills of one server")
    print(f"blocks lost by the other: {lost}; its exit code: {code}")
    print(f"its memory: {memory_mib[0]:.0f} MiB at first, {memory_mib[-1]:.0f} at last, grown by {growth_mib:.1f}")
    for line in tally.wrong[:10]:
        print(line, file=sys.stderr)
    return int(bool(tally.wrong) or lost != 0 or code != 0 or growth_mib > _GROWTH_MIB)


async def _watch(child: Child, memory_mib: list[float]) -> None:
    while True:
        memory_mib.append(child.resident_mib)
        await asyncio.sleep(_LOOK_S)


def _growth(memory_mib: list[float]) -> float:
    """From the second quarter to the last: in the first caches fill."""
    quarter = max(1, len(memory_mib) // 4)
    return statistics.median(memory_mib[-quarter:]) - statistics.median(memory_mib[quarter : 2 * quarter] or memory_mib)


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
