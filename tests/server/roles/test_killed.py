"""Servers of both roles that are killed at random moments: the same tokens, or an error that says what happened."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.client import AsyncClient, Client, ResumePolicy
from jpaged.errors import JpagedError, Unavailable
from jpaged.types import RequestOutput, SamplingParams
from tests.processes import Process, load_at_rest

TALE = "Once upon a time there was a wood, and in the wood a fox. " * 12
NUM_ROUNDS, NUM_CALLS, NUM_RESUMING = 10, 12, 6
COMMON = ("-m", "jpaged", "serve", "demo", "--dtype", "float32", "--max-num-seqs", "8", "--swap-space", "0.1")
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}
Told = list[tuple[object, ...]]

pytestmark = pytest.mark.long


class Apart:
    """A server that does both, to compare with, and two that do it apart, at ports that stay theirs."""

    def __init__(self) -> None:
        self._processes: dict[str, Process] = {}
        self.targets: dict[str, str] = {}
        self._words: dict[str, tuple[str, ...]] = {"both": (), "prefill": ("--role", "prefill")}
        self.start("both")
        self.start("prefill")
        always = ("--prefill-min-tokens", "32", "--prefill-policy", "always")
        options = ("--prefill-target", self.targets["prefill"], *always)
        self._words["decode"] = ("--role", "decode", *options)
        self.start("decode")

    def start(self, role: str) -> None:
        port = self.targets.get(role, ":0").rpartition(":")[2]
        process = self._processes[role] = Process((*COMMON, "--port", port, *self._words[role]), ENVIRONMENT)
        self.targets[role] = process.wait_for(r"^ready on (127\.0\.0\.1:\d+)$")[1]

    def kill(self, role: str) -> None:
        self._processes[role].end(signal.SIGKILL)

    def end(self) -> None:
        for process in self._processes.values():
            if process.popen.poll() is None:
                process.end(signal.SIGKILL)


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.end()


def sampling_of(number: int) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": 40, "seed": number, "n": 1 + number % 3, "ignore_eos": number % 4 > 0}
    values["temperature"] = float(number % 5 > 0)
    if number % 3 == 1:
        values["logprobs"] = 2
    if number % 7 == 2:
        values["stop"] = ["fo"]
    return SamplingParams(**values)


def told(output: RequestOutput) -> Told:
    """What was told of each sequence; of log-probabilities whose: a sum may be rounded in another way elsewhere."""
    return [
        (one.index, one.token_ids, one.text, one.finish_reason, [p.chosen.token_id for p in one.logprobs or ()])
        for one in output.outputs
    ]


async def ask(client: AsyncClient, round_: int, number: int) -> Told:
    return told(await client.complete(f"{round_}, {number}: a little fox. {TALE}", sampling_of(number)))


async def ask_all(target: str, round_: int) -> list[Told | BaseException]:
    """The first calls by a client that goes on with what has begun, the others by one that does not."""
    patient = ResumePolicy(within_s=600.0)  # a busy machine takes long to start a server again
    async with AsyncClient(target, resuming=patient) as resuming, AsyncClient(target, resuming=None) as plain:
        calls = [ask(resuming if n < NUM_RESUMING else plain, round_, n) for n in range(NUM_CALLS)]
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_whoever_is_killed_tokens_are_those_of_one_server_or_the_call_says_why(apart: Apart) -> None:
    rng = random.Random(7)
    for round_ in range(NUM_ROUNDS):
        victim = "decode" if round_ % 3 == 2 else "prefill"
        wanted = await ask_all(apart.targets["both"], round_)
        asking = asyncio.create_task(ask_all(apart.targets["decode"], round_))
        await asyncio.sleep(rng.random() * 2.0)  # anywhere in prompts, transfers and steps
        await asyncio.to_thread(apart.kill, victim)
        await asyncio.to_thread(apart.start, victim)
        for number, (one, right) in enumerate(zip(await asking, wanted, strict=True)):
            if isinstance(one, JpagedError):
                assert isinstance(one, Unavailable), (victim, number, one)
                had_not_begun = "failed to connect" in str(one)  # the server was killed before it accepted the call
                assert victim == "decode", (number, one)
                assert number >= NUM_RESUMING or had_not_begun, (number, one)
                continue
            assert one == right, (round_, victim, number)
        assert await ask_all(apart.targets["decode"], round_) == wanted
        for role in ("prefill", "decode"):
            await asyncio.to_thread(_is_at_rest, apart.targets[role])


def _is_at_rest(target: str) -> None:
    """Nothing that was killed keeps anything held elsewhere."""
    with Client(target) as client:
        assert load_at_rest(client).num_blocks_used == 0
