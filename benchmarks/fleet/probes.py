"""What a server's steps take: measured while the others have nothing to do, and what these cost when they do.

decodes   1, 2, 4 and 8 answers at once, behind short and long contexts: the mean time between later tokens is a
          step
second    what the second token of an answer takes more: its server sends the first, and has only seen prompts
prompts   8 to 256 new tokens, behind nothing and behind cached contexts: the time to the first token is a step
beside    the same while another answer runs: what each holds that up is its part of the step, and what else its
          server does to take it in
slower    an answer and a prompt while a server on another processor, one on the same, or both are at work: how
          many times as long as alone, in turns with these
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from benchmarks.fleet.drive import Measured, measured
from benchmarks.fleet.neighbours import Beside
from benchmarks.fleet.times import DECODE_CONTEXTS, NUM_TOKENS, PROMPT_CONTEXTS, ROWS, SIZES, Floats, MeasuredTimes
from jpaged.client import AsyncClient
from jpaged.types import SamplingParams

_FEW_TOKENS = 8
"""Tokens of an answer that tells what its second token takes."""
_NUM_BESIDE = 3
_PAUSE_S = 0.5
_CONTEXT, _SIZE = 240, 64
"""Tokens that an answer beside other servers is behind, and new ones of a prompt there and of those that they have."""
_NUM_TURNS = 5
"""Answers and prompts of a round beside other servers."""
_TURN_S = 0.06
"""What a turn of another server takes, about: it has worked for up to so long when an answer or a prompt begins."""


async def probe(clients: Sequence[AsyncClient], num_processors: int, rounds: int, seed: int) -> MeasuredTimes:
    """Measures the first of the servers."""
    return await _Probes(clients, num_processors, seed).all(rounds)


class _Probes:
    def __init__(self, clients: Sequence[AsyncClient], num_processors: int, seed: int) -> None:
        self._client = clients[0]
        self._generator = np.random.default_rng(seed)
        self._beside = {Beside.NOBODY: clients[:0], Beside.OTHER_PROCESSOR: clients[1:2]}
        if len(clients) > num_processors:
            same = clients[num_processors : num_processors + 1]
            self._beside |= {Beside.SAME_PROCESSOR: same, Beside.BOTH: [*clients[1:2], *same]}

    async def all(self, rounds: int) -> MeasuredTimes:
        """So many rounds of everything."""
        decodes_s = np.zeros((len(ROWS), len(DECODE_CONTEXTS), rounds))
        prompts_s = np.zeros((len(SIZES), len(PROMPT_CONTEXTS), rounds))
        besides_s = np.zeros_like(prompts_s)
        second_tokens_s = np.zeros((len(DECODE_CONTEXTS), rounds))
        slower = np.ones((2, len(Beside), rounds, _NUM_TURNS))
        for round_ in range(rounds):
            for at, size in enumerate(SIZES):
                for behind, context in enumerate(PROMPT_CONTEXTS):
                    prompts_s[at, behind, round_] = await self._prompt_s(size, context)
                    besides_s[at, behind, round_] = await self._beside_s(size, context)
            for at, rows in enumerate(ROWS):
                for behind, context in enumerate(DECODE_CONTEXTS):
                    decodes_s[at, behind, round_], second_s = await self._decode_s(rows, context)
                    if rows == 1:
                        second_tokens_s[behind, round_] = second_s
            slower[:, :, round_] = await self._slower()
        return MeasuredTimes(decodes_s, prompts_s, besides_s, second_tokens_s, *slower.reshape(2, len(Beside), -1))

    async def _prompt_s(self, size: int, context: int) -> float:
        before = self._text(context)
        if before:
            await _ask(self._client, before, 1)
        await self._pause()
        return (await _ask(self._client, [*before, *self._text(size)], 1)).ttft_s

    async def _beside_s(self, size: int, context: int) -> float:
        """What prompts hold an answer up, each; less than nothing where it goes faster than one that was alone."""
        befores = [self._text(context) for _ in range(_NUM_BESIDE)]
        for before in befores:
            if before:
                await _ask(self._client, before, 1)
        own, num_tokens = self._text(_CONTEXT), NUM_TOKENS * _NUM_BESIDE
        alone = await _ask(self._client, own, num_tokens)
        answering = asyncio.create_task(_ask(self._client, own, num_tokens))
        for before in befores:
            await asyncio.sleep(alone.itl_s * NUM_TOKENS / 2)
            await _ask(self._client, [*before, *self._text(size)], 1)
        return (num_tokens - 1) * ((await answering).itl_s - alone.itl_s) / _NUM_BESIDE

    async def _answers_s(self, rows: int, context: int, num_tokens: int) -> float:
        """From the first token to the last, of answers at once."""
        await self._pause()
        answers = await asyncio.gather(*(_ask(self._client, self._text(context), num_tokens) for _ in range(rows)))
        last = max(answers, key=lambda answer: answer.ttft_s)  # it waits for no other's prompt
        return (num_tokens - 1) * last.itl_s

    async def _decode_s(self, rows: int, context: int) -> tuple[float, float]:
        """A step, and what the second token takes more."""
        few_s = await self._answers_s(rows, context, _FEW_TOKENS)
        step_s = (await self._answers_s(rows, context, NUM_TOKENS) - few_s) / (NUM_TOKENS - _FEW_TOKENS)
        return step_s, few_s - (_FEW_TOKENS - 1) * step_s

    async def _slower(self) -> Floats:
        """[2, len(Beside), turns] times what they take alone that answers and prompts take."""
        seconds = np.ones((2, len(Beside), _NUM_TURNS))
        for turn in range(_NUM_TURNS):
            for beside, others in self._beside.items():
                async with self._at_work(others):
                    seconds[0, beside, turn] = (await _ask(self._client, self._text(_CONTEXT), NUM_TOKENS)).itl_s
                async with self._at_work(others):
                    seconds[1, beside, turn] = (await _ask(self._client, self._text(_SIZE), 1)).ttft_s
        alone_s = np.median(seconds[:, Beside.NOBODY], axis=1)
        for beside in self._beside:
            seconds[:, beside] /= alone_s[:, None]
        return seconds

    @asynccontextmanager
    async def _at_work(self, others: Sequence[AsyncClient]) -> AsyncIterator[None]:
        """Servers that have one turn after the other, a prompt and an answer, since a moment that is within a turn."""

        async def work(client: AsyncClient) -> None:
            while True:
                await _ask(client, self._text(_SIZE), NUM_TOKENS)

        await self._pause()
        tasks = [asyncio.create_task(work(client)) for client in others]
        try:
            await asyncio.sleep(float(self._generator.uniform(0.0, _TURN_S)))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _text(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._generator.integers(1, 3000, num_tokens).tolist()
        return ids

    async def _pause(self) -> None:
        """As cold as one that comes in the day."""
        await asyncio.sleep(float(self._generator.exponential(_PAUSE_S)))


async def _ask(client: AsyncClient, ids: list[int], num_tokens: int) -> Measured:
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    return measured([chunk async for chunk in client.generate(prompt_token_ids=ids, sampling=sampling)])
