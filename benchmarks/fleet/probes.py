"""How long a server's steps take while the others, and those beside it on its CPU, do what they do in the day.

    rows      1, 2, 4, 8 and 16 answers at once: the mean time between tokens is a step that decodes
    prompts   new tokens that fill a program, behind a context that is cached: the time to the first token is a step

Means, as what now and then takes longer does so in the day, too.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.fleet.drive import Measured, measured
from benchmarks.fleet.servers import MAX_NUM_BATCHED_TOKENS
from jpaged.capacity.cost import StepLoad
from jpaged.client import AsyncClient
from jpaged.types import SamplingParams

SIZES = tuple(8 << i for i in range(16) if 8 << i <= MAX_NUM_BATCHED_TOKENS)
_ROWS = (1, 2, 4, 8, 16)
_CONTEXT, _NUM_TOKENS = 240, 40
"""Tokens of a context, about what conversations have, and of the answer."""
_PAUSE_S = 0.15


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """How long a step takes, by what was measured.

    Attributes:
        rows_s: seconds of a step in which so many rows decode, for each of 1, 2, 4, 8 and 16.
        sizes_s: seconds of a prompt that fills a program of each of SIZES.
    """

    rows_s: tuple[float, ...]
    sizes_s: tuple[float, ...]

    def mean_with(self, other: MeasuredTimes) -> MeasuredTimes:
        """The mean of both."""
        return MeasuredTimes(
            tuple((a + b) / 2 for a, b in zip(self.rows_s, other.rows_s, strict=True)),
            tuple((a + b) / 2 for a, b in zip(self.sizes_s, other.sizes_s, strict=True)),
        )

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step."""
        decodes_s = float(np.interp(load.num_decoding, _ROWS, self.rows_s)) if load.num_decoding else 0.0
        if load.num_tokens == load.num_decoding:
            return decodes_s
        size = min(bisect_left(SIZES, load.num_tokens), len(SIZES) - 1)
        # Beside a prompt a row takes what it takes beside another row.
        return self.sizes_s[size] + max(0.0, decodes_s - self.rows_s[0])


async def probe(client: AsyncClient, rounds: int, seed: int) -> MeasuredTimes:
    """Measures one server, which has nothing else to do."""
    generator = np.random.default_rng(seed)

    def text(num_tokens: int) -> list[int]:
        ids: list[int] = generator.integers(1, 3000, num_tokens).tolist()
        return ids

    async def ask(ids: list[int], num_tokens: int) -> Measured:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        return measured([chunk async for chunk in client.generate(prompt_token_ids=ids, sampling=sampling)])

    prompts_s: dict[int, list[float]] = {size: [] for size in SIZES}
    rows_s: dict[int, list[float]] = {rows: [] for rows in _ROWS}
    for _ in range(rounds):
        before = text(_CONTEXT)
        await ask(before, 1)
        for size in SIZES:
            for _ in range(4):
                await asyncio.sleep(float(generator.exponential(_PAUSE_S)))  # as cold as one that comes in the day
                prompts_s[size].append((await ask([*before, *text(size)], 1)).ttft_s)
        for rows in _ROWS:
            answers = await asyncio.gather(*(ask(text(_CONTEXT), _NUM_TOKENS) for _ in range(rows)))
            last = max(answers, key=lambda answer: answer.ttft_s)  # which waits for no other's prompt
            rows_s[rows].append(last.itl_s)
    return MeasuredTimes(_rising(rows_s), _rising(prompts_s))


def _rising(measured_s: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """The mean of each size; no less than that of a smaller one."""
    means = [statistics.mean(values) for values in measured_s.values()]
    return tuple(itertools.accumulate(means, max))
