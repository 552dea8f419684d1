"""How long a server's steps take while the others, and those beside it on its CPU, do what they do in the day.

    decodes   1, 2, 4, 8 and 16 answers at once, behind short and long contexts: the mean time between tokens is a step
    prompts   8 to 256 new tokens, behind nothing and behind cached contexts: the time to the first token is a step

Means, as what now and then takes longer does so in the day, too. Between what was measured steps are interpolated.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from benchmarks.fleet.drive import Measured, measured
from jpaged.capacity.cost import StepLoad
from jpaged.client import AsyncClient
from jpaged.types import SamplingParams

ROWS, DECODE_CONTEXTS = (1, 2, 4, 8, 16), (40, 240, 480, 900)
SIZES, PROMPT_CONTEXTS = (8, 16, 32, 64, 96, 128, 192, 256), (0, 240, 480)
"""Answers at once, new tokens of a prompt, and the tokens of the contexts that they are measured behind."""
_NUM_TOKENS = 40
"""Of an answer."""
_DECODES = 3
"""Of each kind a round: they are short."""
_PAUSE_S = 0.15


@dataclass(frozen=True)
class MeasuredTimes:
    """How long a step takes, by what was measured.

    Attributes:
        decodes_s: seconds of a step in which so many rows decode, for each of ROWS: behind each of DECODE_CONTEXTS.
        prompts_s: seconds of a step of so many new tokens, for each of SIZES: behind each of PROMPT_CONTEXTS.
    """

    decodes_s: tuple[tuple[float, ...], ...]
    prompts_s: tuple[tuple[float, ...], ...]

    def mean_with(self, other: MeasuredTimes) -> MeasuredTimes:
        """The mean of both."""
        return MeasuredTimes(_mean(self.decodes_s, other.decodes_s), _mean(self.prompts_s, other.prompts_s))

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step."""
        num_new = load.num_tokens - load.num_decoding
        decode_s = self._decode_s(load.num_decoding, load.num_decoding_kv_tokens) if load.num_decoding else 0.0
        if not num_new:
            return decode_s
        within = num_new * (num_new + 1) // 2
        context = max(0.0, (load.num_pairs - load.num_decoding_kv_tokens - within) / num_new)
        prompt_s = float(self._prompts((num_new, context)))
        # Beside a prompt a row takes what it takes beside another row.
        return prompt_s + max(0.0, decode_s - self._decode_s(1, DECODE_CONTEXTS[0])) if decode_s else prompt_s

    def _decode_s(self, num_rows: int, num_kv_tokens: float) -> float:
        return float(self._decodes((num_rows, num_kv_tokens / num_rows)))

    @cached_property
    def _decodes(self) -> RegularGridInterpolator:
        return _interpolated(ROWS, DECODE_CONTEXTS, self.decodes_s)

    @cached_property
    def _prompts(self) -> RegularGridInterpolator:
        return _interpolated(SIZES, PROMPT_CONTEXTS, self.prompts_s)


def _interpolated(xs: Sequence[int], ys: Sequence[int], seconds: Sequence[Sequence[float]]) -> RegularGridInterpolator:
    """Beyond what was measured it goes on as straight as between the last two."""
    return RegularGridInterpolator((xs, ys), seconds, bounds_error=False, fill_value=None)


def _mean(these: Sequence[Sequence[float]], those: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    means: list[list[float]] = ((np.array(these) + np.array(those)) / 2).tolist()
    return tuple(tuple(row) for row in means)


async def probe(client: AsyncClient, rounds: int, seed: int) -> MeasuredTimes:
    """Measures one server, which has nothing else to do."""
    generator = np.random.default_rng(seed)

    def text(num_tokens: int) -> list[int]:
        ids: list[int] = generator.integers(1, 3000, num_tokens).tolist()
        return ids

    async def ask(ids: list[int], num_tokens: int) -> Measured:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        return measured([chunk async for chunk in client.generate(prompt_token_ids=ids, sampling=sampling)])

    async def prompt_s(size: int, context: int) -> float:
        before = text(context)
        if before:
            await ask(before, 1)
        await asyncio.sleep(float(generator.exponential(_PAUSE_S)))  # as cold as one that comes in the day
        return (await ask([*before, *text(size)], 1)).ttft_s

    async def decode_s(rows: int, context: int) -> float:
        answers = await asyncio.gather(*(ask(text(context), _NUM_TOKENS) for _ in range(rows)))
        return max(answers, key=lambda answer: answer.ttft_s).itl_s  # the last waits for no other's prompt

    prompts_s = {(size, context): list[float]() for size in SIZES for context in PROMPT_CONTEXTS}
    decodes_s = {(rows, context): list[float]() for rows in ROWS for context in DECODE_CONTEXTS}
    for _ in range(rounds):
        for (size, context), values in prompts_s.items():
            values.append(await prompt_s(size, context))
        for (rows, context), values in decodes_s.items():
            values.extend([await decode_s(rows, context) for _ in range(_DECODES)])
    return MeasuredTimes(
        tuple(tuple(statistics.mean(decodes_s[rows, context]) for context in DECODE_CONTEXTS) for rows in ROWS),
        tuple(tuple(statistics.mean(prompts_s[size, context]) for context in PROMPT_CONTEXTS) for size in SIZES),
    )
