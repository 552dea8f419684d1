"""Real servers in processes of their own behind a router: the same tokens as without, also when servers are killed."""

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.client import AsyncClient, Client
from jpaged.types import RequestOutput, SamplingParams
from tests.processes import Process, load_at_rest

SERVE = ("-m", "jpaged", "serve", "demo", "--max-num-seqs", "8", "--num-blocks", "512", "--port")
NUM_STREAMS, NUM_KILLS = 24, 4
pytestmark = pytest.mark.long


class Fleet:
    """Servers at ports that stay theirs, and a router in front of them."""

    def __init__(self, num_servers: int) -> None:
        self._processes = [Process((*SERVE, "0")) for _ in range(num_servers)]
        self.targets: list[Any] = [one.wait_for(r"^ready on (127\.0\.0\.1:\d+)$").group(1) for one in self._processes]
        words = [word for target in self.targets for word in ("--target", target)]
        self.router = Process(("-m", "jpaged", "route", "--port", "0", *words))
        self.target: Any = self.router.wait_for(r"^listening on (127\.0\.0\.1:\d+),").group(1)

    def kill(self, index: int) -> None:
        self._processes[index].end(signal.SIGKILL)

    def restart(self, index: int) -> None:
        self._processes[index] = Process((*SERVE, self.targets[index].partition(":")[2]))
        self._processes[index].wait_for(r"^ready on")

    def drain(self, index: int) -> int:
        return self._processes[index].end(signal.SIGTERM)

    def end(self) -> None:
        for process in (self.router, *self._processes):
            if process.popen.poll() is None:
                process.end(signal.SIGKILL)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet(3)
    yield made
    made.end()


def sampling_of(number: int) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "seed": number, "n": 1 + number % 3}
    values["temperature"] = float(number % 4 > 0)
    if number % 5 == 0:
        values["logprobs"] = 2
    return SamplingParams(**values)


def bare(output: RequestOutput) -> list[tuple[int, tuple[int, ...], str, str | None]]:
    return [(one.index, tuple(one.token_ids), one.text, one.finish_reason) for one in output.outputs]


async def read(client: AsyncClient, number: int, pause_s: float) -> list[Any]:
    """All of a stream, by a reader that takes its time, so that a server is gone before it has sent all."""
    found: dict[int, Any] = {}
    async with client.generate(f"Once upon a time, {number},", sampling_of(number)) as stream:
        async for chunk in stream:
            text, ids, _ = found.get(chunk.index, ("", (), None))
            found[chunk.index] = text + chunk.text, ids + chunk.token_ids, chunk.finish_reason
            await asyncio.sleep(pause_s)
        assert stream.num_tries == 1
    return [(index, ids, text, end) for index, (text, ids, end) in sorted(found.items())]


async def test_tokens_are_those_of_the_servers_and_nothing_is_lost_when_they_are_killed(fleet):
    rng = random.Random(1)
    async with AsyncClient(fleet.targets[0]) as direct, AsyncClient(fleet.target, resuming=None) as client:
        await client.wait_until_ready(120)
        expected = [
            bare(await direct.complete(f"Once upon a time, {number},", sampling_of(number)))
            for number in range(NUM_STREAMS)
        ]
        assert await asyncio.gather(*(read(client, number, 0.0) for number in range(NUM_STREAMS))) == expected
        reading = [asyncio.ensure_future(read(client, number, rng.random() * 0.2)) for number in range(NUM_STREAMS)]
        for kill in range(NUM_KILLS):
            await asyncio.sleep(rng.random())  # anywhere in a step
            await asyncio.to_thread(fleet.kill, kill % 3)
            await asyncio.to_thread(fleet.restart, kill % 3)
        assert await asyncio.gather(*reading) == expected
        reading = [asyncio.ensure_future(read(client, number, 0.02)) for number in range(NUM_STREAMS)]
        assert await asyncio.to_thread(fleet.drain, 1) == 0
        assert await asyncio.gather(*reading) == expected


def test_a_router_that_is_killed_leaves_servers_that_are_free(fleet):
    with Client(fleet.target, resuming=None) as client:
        client.wait_until_ready(120)
        streams = [client.generate(f"prompt {i}", SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(6)]
        for stream in streams:
            next(iter(stream))
        fleet.router.end(signal.SIGKILL)
        for stream in streams:
            stream.close()
    for target in fleet.targets:
        with Client(target) as direct:
            assert load_at_rest(direct).num_blocks_used == 0
