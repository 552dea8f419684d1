"""How long a server's steps take while the others, and those beside it on its CPU, do what they do in the day.

    decodes   1, 2, 4, 8 and 16 answers at once, behind short and long contexts: the mean time between tokens is a step
    prompts   8 to 256 new tokens, behind nothing and behind cached contexts: the time to the first token is a step

Between what was measured, means are interpolated; a simulated step takes the mean times what one of the measured ones
took of its own mean, drawn: what now and then takes longer does so in the day, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from benchmarks.fleet.drive import Measured, measured
from jpaged.capacity.cost import StepLoad
from jpaged.client import AsyncClient
from jpaged.types import SamplingParams

ROWS, DECODE_CONTEXTS = (1, 2, 4, 8, 16), (40, 240, 900)
SIZES, PROMPT_CONTEXTS = (8, 32, 64, 128, 256), (0, 240, 480)
"""Answers at once, new tokens of a prompt, and the tokens of the contexts that they are measured behind."""
_NUM_TOKENS = 40
"""Tokens of an answer."""
_PAUSE_S = 0.15
Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredTimes:
    """How long steps took.

    Attributes:
        decodes_s: [rows, contexts, rounds] of a step in which so many of ROWS decode behind each of DECODE_CONTEXTS.
        prompts_s: [sizes, contexts, rounds] of a step of each of SIZES new tokens behind each of PROMPT_CONTEXTS.
    """

    decodes_s: Seconds
    prompts_s: Seconds

    def and_then(self, other: MeasuredTimes) -> MeasuredTimes:
        """The rounds of both."""
        return MeasuredTimes(
            np.concatenate((self.decodes_s, other.decodes_s), axis=2),
            np.concatenate((self.prompts_s, other.prompts_s), axis=2),
        )

    def means_ms(self) -> dict[str, list[list[float]]]:
        """Milliseconds of each kind of step, for the record."""
        means = {"decodes": self.decodes_s.mean(axis=2), "prompts": self.prompts_s.mean(axis=2)}
        return {kind: np.round(1e3 * values, 3).tolist() for kind, values in means.items()}

    def decode_s(self, num_rows: int, num_kv_tokens: float) -> float:
        """A step in which rows decode whose contexts have so many tokens together, in the mean."""
        return float(self._decodes((num_rows, num_kv_tokens / num_rows)))

    def prompt_s(self, num_tokens: int, context: float) -> float:
        """A step of so many new tokens behind a context, in the mean."""
        return float(self._prompts((num_tokens, context)))

    @cached_property
    def _decodes(self) -> RegularGridInterpolator:
        return _interpolated(ROWS, DECODE_CONTEXTS, self.decodes_s)

    @cached_property
    def _prompts(self) -> RegularGridInterpolator:
        return _interpolated(SIZES, PROMPT_CONTEXTS, self.prompts_s)


class DrawnTimes:
    """Steps of one server, each as much longer or shorter than the mean as one that was measured."""

    def __init__(self, times: MeasuredTimes, seed: int) -> None:
        self._times = times
        self._generator = np.random.default_rng(seed)
        self._of_decodes, self._of_prompts = _of_means(times.decodes_s), _of_means(times.prompts_s)
        self._stretch, self._num_left = 1.0, 0

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step."""
        num_new = load.num_tokens - load.num_decoding
        decode_s = 0.0
        if load.num_decoding:
            decode_s = self._decode_stretch() * self._times.decode_s(load.num_decoding, load.num_decoding_kv_tokens)
        if not num_new:
            return decode_s
        within = num_new * (num_new + 1) // 2
        context = max(0.0, (load.num_pairs - load.num_decoding_kv_tokens - within) / num_new)
        prompt_s = float(self._generator.choice(self._of_prompts)) * self._times.prompt_s(num_new, context)
        # Beside a prompt a row takes what it takes beside another row.
        return prompt_s + max(0.0, decode_s - self._times.decode_s(1, DECODE_CONTEXTS[0]))

    def _decode_stretch(self) -> float:
        """The noise of a step, which lasts for as many as were measured together."""
        if not self._num_left:
            self._stretch, self._num_left = float(self._generator.choice(self._of_decodes)), _NUM_TOKENS
        self._num_left -= 1
        return self._stretch


def _of_means(seconds: Seconds) -> Seconds:
    ratios: Seconds = (seconds / seconds.mean(axis=2, keepdims=True)).ravel()
    return ratios


def _interpolated(xs: Sequence[int], ys: Sequence[int], seconds: Seconds) -> RegularGridInterpolator:
    """Beyond what was measured it goes on as straight as between the last two."""
    return RegularGridInterpolator((xs, ys), seconds.mean(axis=2), bounds_error=False, fill_value=None)


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

    decodes_s = np.zeros((len(ROWS), len(DECODE_CONTEXTS), rounds))
    prompts_s = np.zeros((len(SIZES), len(PROMPT_CONTEXTS), rounds))
    for round_ in range(rounds):
        for at, size in enumerate(SIZES):
            for behind, context in enumerate(PROMPT_CONTEXTS):
                prompts_s[at, behind, round_] = await prompt_s(size, context)
        for at, rows in enumerate(ROWS):
            for behind, context in enumerate(DECODE_CONTEXTS):
                decodes_s[at, behind, round_] = await decode_s(rows, context)
    return MeasuredTimes(decodes_s, prompts_s)
