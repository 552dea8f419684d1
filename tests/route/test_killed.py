"""Real servers in processes of their own behind a router: the same tokens as without, also when servers are killed."""

import asyncio
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

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
        self.targets: list[str] = [one.wait_for(r"^ready on (127\.0\.0\.1:\d+)$").group(1) for one in self._processes]
        self.begin_router()

    def begin_router(self) -> None:
        words = [word for target in self.targets for word in ("--target", target)]
        self.router = Process(
            ("-m", "jpaged", "route", "--port", "0", "--metrics-port", "0", "--resume-within", "600", *words)
        )
        self.target: str = self.router.wait_for(r"^listening on (127\.0\.0\.1:\d+),").group(1)
        self._metrics = self.router.wait_for(r"^metrics on (\S+)$").group(1)

    def counted(self, name: str) -> dict[str, float]:
        """A metric of the router, by target."""
        families: Any = text_string_to_metric_families(urllib.request.urlopen(self._metrics).read().decode())
        samples = [sample for family in families for sample in family.samples]
        return {one.labels["target"]: one.value for one in samples if one.name == f"jpaged:route_{name}"}

    def until_all_serve(self) -> None:
        with Client(self.target) as client:
            client.wait_until_ready(120)
        while set(self.counted("target_up").values()) != {1.0}:
            assert self.router.popen.poll() is None
            time.sleep(0.1)

    def kill_busiest(self) -> str:
        """Kills the server that has the most calls; its target."""
        calls = self.counted("target_open_calls")
        target = max(calls, key=lambda one: calls[one])
        self._processes[self.targets.index(target)].end(signal.SIGKILL)
        return target

    def restart(self, target: str) -> None:
        process = Process((*SERVE, target.partition(":")[2]))
        self._processes[self.targets.index(target)] = process
        process.wait_for(r"^ready on")

    def drain(self, target: str) -> int:
        return self._processes[self.targets.index(target)].end(signal.SIGTERM)

    def end(self) -> None:
        for process in (self.router, *self._processes):
            if process.popen.poll() is None:
                process.end(signal.SIGKILL)


@pytest.fixture(scope="module")
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


class Reading:
    """Streams that are read at one time."""

    def __init__(self, client: AsyncClient, numbers: range) -> None:
        self._client = client
        self._told = Counter[int]()
        self._news = asyncio.Condition()
        self.all = asyncio.gather(*(self._read(number) for number in numbers))

    async def until(self, num_tokens: int) -> None:
        """Waits until so many tokens have come of all streams together."""
        async with self._news:
            await self._news.wait_for(lambda: self.all.done() or self._told.total() >= num_tokens)

    async def _read(self, number: int) -> list[Any]:
        found: dict[int, Any] = {}
        async with self._client.generate(f"Once upon a time, {number},", sampling_of(number)) as stream:
            async for chunk in stream:
                text, ids, _ = found.get(chunk.index, ("", (), None))
                found[chunk.index] = text + chunk.text, ids + chunk.token_ids, chunk.finish_reason
                self._told[number] += len(chunk.token_ids)
                async with self._news:
                    self._news.notify_all()
            assert stream.num_tries == 1
        return [(index, ids, text, end) for index, (text, ids, end) in sorted(found.items())]


def test_a_router_that_is_killed_leaves_servers_that_are_free(fleet):
    with Client(fleet.target, resuming=None) as client:
        fleet.until_all_serve()
        streams = [client.generate(f"prompt {i}", SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(6)]
        for stream in streams:
            next(iter(stream))
        fleet.router.end(signal.SIGKILL)
        for stream in streams:
            stream.close()
    for target in fleet.targets:
        with Client(target) as direct:
            assert load_at_rest(direct).num_blocks_used == 0
    fleet.begin_router()


async def test_tokens_are_those_of_the_servers_and_nothing_is_lost_when_they_are_killed(fleet):
    rng = random.Random(1)
    await asyncio.to_thread(fleet.until_all_serve)
    async with AsyncClient(fleet.targets[0]) as direct, AsyncClient(fleet.target, resuming=None) as client:
        asked = [direct.complete(f"Once upon a time, {number},", sampling_of(number)) for number in range(NUM_STREAMS)]
        expected = [bare(output) for output in await asyncio.gather(*asked)]
        assert await Reading(client, range(NUM_STREAMS)).all == expected
        for kill in range(NUM_KILLS):
            await asyncio.to_thread(fleet.until_all_serve)
            numbers = range(kill % 2, NUM_STREAMS, 2)
            reading = Reading(client, numbers)
            await reading.until(rng.randrange(1, 500))  # of some 2900
            target = await asyncio.to_thread(fleet.kill_busiest)
            restarting = asyncio.ensure_future(asyncio.to_thread(fleet.restart, target))
            assert await reading.all == [expected[number] for number in numbers]
            await restarting
        assert sum((await asyncio.to_thread(fleet.counted, "retried_calls_total")).values()) > 0
        await asyncio.to_thread(fleet.until_all_serve)
        reading = Reading(client, range(NUM_STREAMS))
        await reading.until(1)
        assert await asyncio.to_thread(fleet.drain, fleet.targets[1]) == 0
        assert await reading.all == expected
