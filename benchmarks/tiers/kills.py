"""A server with a disk beneath it, killed with -9 at random moments: no token is ever wrong, and no start is refused.

    jpaged serve ── finds what is in the folder ── streams that begin alike ── SIGKILL ── jpaged serve ── ...

Each life is `jpaged serve demo` on one port, over one folder. Half of them, by chance, are killed within the time that
the first one took to start, the others behind it. The streams of one client go on through all: what a life leaves
unfinished goes on at the next. Each is held to what its prompt gave before there was a disk. A life that ends by
itself, an answer that differs, or blocks that a life had on disk of which the next one finds none, are errors.

    python -m benchmarks.tiers.kills [--kills 200] [--seconds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import put_on_page, save
from benchmarks.soak.servers import Child
from jpaged.client import AsyncClient, ResumePolicy
from jpaged.errors import Unavailable
from jpaged.types import SamplingParams

_PROMPTS, _STREAMS = 24, 6
_GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_SIZES = (
    *("--max-model-len", "256", "--num-blocks", "48", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--max-messages-per-second", "100000"),
)
_DISK = ("--swap-space", "0.01", "--kv-disk-space", "0.004", "--kv-disk-dir")
_RESUMING = ResumePolicy(within_s=600.0, max_times=1000)
"""Streams go on however often their server is killed in a row."""
_IN_START = 0.5
_PAUSE_S, _AFTER_LOOK_S, _LONGEST_S = 0.01, 0.05, 300.0


@dataclass(frozen=True, slots=True)
class Kills:
    """What came of it.

    Attributes:
        kills, in_starts: all of them, and those within the time that the first start took.
        answers, resumed: streams that were held to what they have to be, and those of them that outlived a server.
        hit_tokens: of prompts, that came back from disk.
        found: blocks that a life found when it began, the most of any.
        dropped: blocks with a wrong hash.
    """

    kills: int
    in_starts: int
    answers: int
    resumed: int
    hit_tokens: int
    found: int
    dropped: int
    seconds: float


def prompts(seed: int) -> list[list[int]]:
    """Prompts of a few beginnings, with ends of their own."""
    choose = random.Random(seed)
    heads = [[choose.randrange(3, 250) for _ in range(150)] for _ in range(4)]
    return [[*choose.choice(heads), *(choose.randrange(3, 250) for _ in range(16))] for _ in range(_PROMPTS)]


async def right_answers(folder: Path) -> dict[int, list[int]]:
    """What each prompt gives without a disk."""
    child = Child(folder / "right.log", _SIZES)
    try:
        await child.start()
        async with AsyncClient(child.target) as client:
            outputs = [await client.complete(prompt_token_ids=prompt, sampling=_GREEDY) for prompt in prompts(0)]
    finally:
        await child.kill()
    return {place: [*output.outputs[0].token_ids] for place, output in enumerate(outputs)}


class Streams:
    """Requests of one client, one behind the other, through all lives of a server.

    Args:
        right: the tokens that each prompt has to give.
        seed: which prompts they ask for.

    Attributes:
        may_begin: while this is set, new ones begin; those that run go on in any case.
        is_over: once this is set, `run` ends with what runs.
        answers, resumed: as `Kills` has them.
        wrong: of answers that were not right, what is to be said.
    """

    def __init__(self, right: dict[int, list[int]], seed: int) -> None:
        self.may_begin = asyncio.Event()
        self.is_over = False
        self.answers = self.resumed = 0
        self.wrong: list[str] = []
        self._came: asyncio.Queue[None] = asyncio.Queue()
        self._right, self._choose = right, random.Random(seed)

    async def answered(self, num: int) -> None:
        """Waits for so many further answers.

        Raises:
            TimeoutError: they do not come.
        """
        while not self._came.empty():
            self._came.get_nowait()
        async with asyncio.timeout(_LONGEST_S):
            for _ in range(num):
                await self._came.get()

    async def run(self, client: AsyncClient) -> None:
        """Asks for prompts until it is over."""
        asked = prompts(0)
        while await self.may_begin.wait() and not self.is_over:
            place, tokens = self._choose.randrange(_PROMPTS), list[int]()
            try:
                async with client.generate(prompt_token_ids=asked[place], sampling=_GREEDY) as stream:
                    async for chunk in stream:
                        tokens += chunk.token_ids
            except Unavailable:
                if tokens:
                    raise  # what has begun goes on
                await asyncio.sleep(_PAUSE_S)
                continue
            if tokens != self._right[place]:
                self.wrong.append(f"prompt {place} gave {tokens}, not {self._right[place]}")
            self.answers += 1
            self._came.put_nowait(None)
            self.resumed += stream.num_tries > 1


class _Lives:
    """Lives of one server, and what each has told of its disk before it was killed."""

    def __init__(self, child: Child, client: AsyncClient, streams: Streams, choose: random.Random) -> None:
        self._child, self._client, self._streams, self._choose = child, client, streams, choose
        self._start_s = 0.0
        self.num = self.num_in_starts = 0
        self.num_hit_tokens = self.num_dropped = self.most_found = self._num_kept = 0

    async def start(self) -> None:
        """Begins a life; it is one that takes requests, and that finds what the one before had."""
        begin_s = time.monotonic()
        await self._child.start()
        self._start_s = self._start_s or time.monotonic() - begin_s
        num_found = (await self._client.load()).num_disk_blocks
        if self._num_kept and not num_found:
            raise SystemExit(f"life {self.num} found nothing; one before had {self._num_kept} blocks on disk")
        self.most_found = max(self.most_found, num_found)

    async def serve(self, longest_s: float, most_answers: int) -> None:
        """One that is killed while it serves."""
        await self.start()
        self._streams.may_begin.set()
        await self._streams.answered(self._choose.randint(0, most_answers))
        await asyncio.sleep(longest_s * self._choose.random() ** 2)
        last = await self._client.load()
        await asyncio.sleep(_AFTER_LOOK_S * self._choose.random())
        self._streams.may_begin.clear()
        await self._kill()
        self.num_hit_tokens += last.num_disk_hit_tokens
        self.num_dropped += last.num_disk_blocks_dropped
        self._num_kept = last.num_disk_blocks

    async def begin(self) -> None:
        """One that is killed before it serves, or soon behind that where this start is a fast one."""
        await self._child.begin()
        await asyncio.sleep(self._start_s * self._choose.random())
        await self._kill()
        self.num_in_starts += 1

    async def _kill(self) -> None:
        if self._child.has_ended:
            raise SystemExit(f"life {self.num} ended by itself: {self._child.last_words}")
        await self._child.kill()
        self.num += 1
        if self._streams.wrong:
            raise SystemExit(f"behind {self.num} kills: {'; '.join(self._streams.wrong[:5])}")


async def kill(num_kills: int, longest_s: float, folder: Path, seed: int = 0, most_answers: int = 0) -> Kills:
    """Starts and kills so many servers, and holds what the streams tell to what is right.

    Args:
        longest_s: the longest time that a server serves.
        folder: of the logs and of the disk tier.
        most_answers: a number of answers, this one at most, is waited for before that time begins.

    Raises:
        SystemExit: a server ended by itself, an answer was wrong, or what was on disk is not.
        ExceptionGroup: of RuntimeError, where a server ended before it took requests, or of TimeoutError, where it
            answers nothing.
    """
    choose, begin_s = random.Random(seed), time.monotonic()
    streams = Streams(await right_answers(folder), seed)
    child = Child(folder / "lives.log", (*_SIZES, *_DISK, str(folder / "kv")))
    async with AsyncClient(child.target, resuming=_RESUMING) as client:
        lives = _Lives(child, client, streams, choose)
        try:
            async with asyncio.TaskGroup() as running:
                for _ in range(_STREAMS):
                    running.create_task(streams.run(client))
                for life in range(num_kills):
                    if life and choose.random() < _IN_START:
                        await lives.begin()
                    else:
                        await lives.serve(longest_s, most_answers)
                await lives.start()
                streams.is_over = True
                streams.may_begin.set()
            if code := await child.stop():
                raise SystemExit(f"the last life ended with status {code}: {child.last_words}")
        finally:
            await child.kill()
    if streams.wrong:
        raise SystemExit("; ".join(streams.wrong[:5]))
    return Kills(
        kills=lives.num,
        in_starts=lives.num_in_starts,
        answers=streams.answers,
        resumed=streams.resumed,
        hit_tokens=lives.num_hit_tokens,
        found=lives.most_found,
        dropped=lives.num_dropped,
        seconds=round(time.monotonic() - begin_s, 1),
    )


def table(done: Kills) -> str:
    """What came of it, for the page."""
    columns = {
        "kills": done.kills,
        "during start-up": done.in_starts,
        "answers (each equal to the one without a disk)": done.answers,
        "resumed after a kill": done.resumed,
        "tokens read back": done.hit_tokens,
        "most blocks found at start-up": done.found,
        "blocks with a wrong hash": done.dropped,
    }
    return "\n".join(
        (
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
            f"| {' | '.join(map('{:,}'.format, columns.values()))} |",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers.kills", description="Kills a server with a disk at random moments."
    )
    parser.add_argument("--kills", type=int, default=200, help="servers that are killed (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="the longest of them serves so long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which moments, and which prompts (%(default)s)")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/tier_kills.json and docs/performance.md"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = asyncio.run(kill(options.kills, options.seconds, Path(folder), options.seed))
    print(done)
    if options.record:
        save("tier_kills", f"python -m benchmarks.tiers.kills --kills {options.kills} --record", asdict(done))
        put_on_page({"kills": table(done)})


if __name__ == "__main__":
    main()
