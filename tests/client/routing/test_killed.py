"""Two servers in processes of their own; one after the other is killed and comes again, and every stream is whole."""

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.client import AsyncClient, GenerateChunk
from jpaged.types import SamplingParams
from tests.processes import Process

FAKE = ("-m", "tests.cli.fake_jpaged", "serve", "fake-model", "--port")
NUM_STREAMS, NUM_KILLS = 24, 4


class Pair:
    """Two servers at ports that stay theirs."""

    def __init__(self) -> None:
        self._processes = [Process((*FAKE, "0")) for _ in range(2)]
        self.targets = [one.wait_for(r"^ready on (127\.0\.0\.1:\d+)$").group(1) for one in self._processes]

    def kill(self, index: int) -> None:
        self._processes[index].end(signal.SIGKILL)

    def restart(self, index: int) -> None:
        self._processes[index] = Process((*FAKE, self.targets[index].partition(":")[2]))
        self._processes[index].wait_for(r"^ready on")

    def end(self) -> None:
        for process in self._processes:
            if process.popen.poll() is None:
                process.end(signal.SIGKILL)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.end()


def sampling_of(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=300, ignore_eos=True, seed=number, n=1 + number % 3, temperature=float(number % 4 > 0)
    )


def folded(chunks: list[GenerateChunk]) -> dict[int, tuple[str, tuple[int, ...], str]]:
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    found: dict[int, Any] = {}
    for chunk in chunks:
        text, ids, finish = found.get(chunk.index, ("", (), ""))
        assert not finish
        found[chunk.index] = text + chunk.text, ids + chunk.token_ids, chunk.finish_reason or ""
    return found


async def read(client: AsyncClient, number: int, pause_s: float) -> list[GenerateChunk]:
    """All of a stream, by a reader that takes its time, so that a server is gone before it has sent all."""
    chunks = []
    async with client.generate(f"prompt {number}", sampling_of(number)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            await asyncio.sleep(pause_s)
    return chunks


@pytest.mark.long
async def test_streams_outlive_servers_that_are_killed(pair):
    rng = random.Random(1)
    async with AsyncClient(pair.targets) as client:
        undisturbed = await asyncio.gather(*(read(client, number, 0.0) for number in range(NUM_STREAMS)))
        reading = [asyncio.ensure_future(read(client, number, rng.random() * 0.05)) for number in range(NUM_STREAMS)]
        for kill in range(NUM_KILLS):
            await asyncio.to_thread(pair.kill, kill % 2)
            await asyncio.to_thread(pair.restart, kill % 2)
        survived = await asyncio.gather(*reading)
    assert [folded(one) for one in survived] == [folded(one) for one in undisturbed]
