"""Sends a day to real servers: conversations begin when they are to, and each turn goes where the rule says.

What is timed is told by the servers (`RequestTimes`): from when a request was queued to its first token and its last,
as the simulator counts it; networks and clients are not simulated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jpaged.client import AsyncClient
from jpaged.client.convert import GenerateChunk
from jpaged.plan.fleet.day import Attempt, Day, Session, get_prompt
from jpaged.plan.fleet.routing import FleetRouter, Rule
from jpaged.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Measured:
    """One turn, by its server's clock.

    Attributes:
        itl_s: the mean time between two tokens; 0 where there is one.
        num_new: tokens of the prompt that were computed.
    """

    ttft_s: float
    itl_s: float
    num_tokens: int
    num_new: int


@dataclass(slots=True)
class Run:
    """A day that is being sent.

    Attributes:
        elapsed_s: from its beginning to the last end.
    """

    turns: list[Measured] = field(default_factory=list)
    num_skipped: int = 0
    elapsed_s: float = 0.0
    hit_percent: float = 0.0

    def add(self, turn: Measured, at_s: float) -> None:
        """A turn has ended."""
        self.turns.append(turn)
        self.elapsed_s = at_s


class Driver:
    """Routes as `jpaged.plan.fleet` does, knowing at once what has ended."""

    def __init__(self, clients: Sequence[AsyncClient], rule: Rule, day: Day, seed: int) -> None:
        self._clients = clients
        self._day = day
        self._router = FleetRouter(rule, len(clients), seed)
        for place in range(len(clients)):
            self._router.begin(place)
        self._router.use(range(len(clients)))
        self._salt = f"{seed} {time.time()}"

    async def run(self, sessions: Sequence[Session]) -> Run:
        """Sends all conversations and waits for their ends."""
        run = Run()
        before = await self._counts()
        begin_s = time.perf_counter()
        await asyncio.gather(*(self._converse(session, begin_s, run) for session in sessions))
        queried, hit = (after - earlier for after, earlier in zip(await self._counts(), before, strict=True))
        run.hit_percent = 100 * hit / max(1, queried)
        return run

    async def _counts(self) -> tuple[int, int]:
        loads = [await client.load() for client in self._clients]
        return sum(load.num_prefix_query_tokens for load in loads), sum(load.num_prefix_hit_tokens for load in loads)

    async def _converse(self, session: Session, begin_s: float, run: Run) -> None:
        await asyncio.sleep(max(0.0, begin_s + session.begin_s - time.perf_counter()))
        for turn in range(len(session.said)):
            if turn:
                await asyncio.sleep(session.thinking_s[turn - 1])
                if time.perf_counter() - begin_s >= self._day.seconds:
                    run.num_skipped += len(session.said) - turn
                    return
            run.add(await self._send(session, turn), time.perf_counter() - begin_s)

    async def _send(self, session: Session, turn: int) -> Measured:
        attempt = Attempt(0, session, turn, 0.0, replays=False)
        place = self._router.send(attempt)
        chunks = list[GenerateChunk]()
        try:
            sampling = SamplingParams(
                max_tokens=session.answered[turn], ignore_eos=True, temperature=0.0, cache_salt=self._salt
            )
            stream = self._clients[place].generate(prompt_token_ids=get_prompt(attempt), sampling=sampling)
            chunks = [chunk async for chunk in stream]
        finally:
            self._router.ended(place)
        return measured(chunks)


def measured(chunks: Sequence[GenerateChunk]) -> Measured:
    """What a server told of a request."""
    times, usage = chunks[-1].times, chunks[-1].usage
    if times is None or times.first_token_s is None or times.last_token_s is None:
        raise SystemExit("a server told no times of a request")
    num_tokens = usage.completion_tokens
    gap_s = (times.last_token_s - times.first_token_s) / max(1, num_tokens - 1)
    ttft_s = times.first_token_s - times.arrival_s
    return Measured(ttft_s, gap_s, num_tokens, usage.prompt_tokens - usage.cached_tokens)
