"""How long a server's steps take while the others, and those beside it on its CPU, do what they do in the day.

    decodes   1, 2, 4 and 8 answers at once, behind short and long contexts: the mean time between later tokens is a
              step
    second    what the second token of an answer takes more: its server sends the first, and has only seen prompts
    prompts   8 to 256 new tokens, behind nothing and behind cached contexts: the time to the first token is a step
    beside    the same while another answer runs: what each holds that up is its part of the step, and what else its
              server does to take it in

Between what was measured, means are interpolated; a simulated step takes the mean times what one of the measured ones
took of its own mean, drawn: what now and then takes longer does so in the day, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from benchmarks.fleet.drive import Measured, measured
from jpaged.capacity.cost import StepLoad
from jpaged.client import AsyncClient
from jpaged.types import SamplingParams

ROWS, DECODE_CONTEXTS = (1, 2, 4, 8), (40, 240, 900)
SIZES, PROMPT_CONTEXTS = (8, 32, 64, 128, 256), (0, 240, 480)
"""Answers at once, new tokens of a prompt, and the tokens of the contexts that they are measured behind."""
_NUM_TOKENS = 40
"""Tokens of an answer, and of one that is held up for each prompt beside it."""
_FEW_TOKENS = 8
"""Of an answer that tells what its second token takes."""
_NUM_BESIDE = 3
_PAUSE_S = 0.5
Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredTimes:
    """How long steps took.

    Attributes:
        decodes_s: [rows, contexts, rounds] of a step in which so many of ROWS decode behind each of DECODE_CONTEXTS.
        prompts_s: [sizes, contexts, rounds] of a step of each of SIZES new tokens behind each of PROMPT_CONTEXTS.
        beside_s: [sizes, contexts, rounds] by which such a prompt holds up the answers beside it.
        second_tokens_s: [contexts, rounds] by which the second token of an answer takes longer than later ones.
    """

    decodes_s: Seconds
    prompts_s: Seconds
    beside_s: Seconds
    second_tokens_s: Seconds

    def and_then(self, other: MeasuredTimes) -> MeasuredTimes:
        """The rounds of both."""
        return MeasuredTimes(
            np.concatenate((self.decodes_s, other.decodes_s), axis=2),
            np.concatenate((self.prompts_s, other.prompts_s), axis=2),
            np.concatenate((self.beside_s, other.beside_s), axis=2),
            np.concatenate((self.second_tokens_s, other.second_tokens_s), axis=1),
        )

    def means_ms(self) -> dict[str, Any]:
        """Milliseconds of each kind of step, for the record."""
        kinds = {
            "decodes": self.decodes_s,
            "prompts": self.prompts_s,
            "beside": self.beside_s,
            "second_tokens": self.second_tokens_s,
        }
        return {kind: np.round(1e3 * values.mean(axis=-1), 3).tolist() for kind, values in kinds.items()}

    def decode_s(self, num_rows: int, num_kv_tokens: float) -> float:
        """A step in which rows decode whose contexts have so many tokens together, in the mean."""
        return float(self._decodes((num_rows, num_kv_tokens / num_rows)))

    def prompt_s(self, num_tokens: int, context: float) -> float:
        """A step of so many new tokens behind a context, in the mean."""
        return float(self._prompts((num_tokens, context)))

    def held_up_s(self, num_tokens: int, context: float) -> float:
        """What a prompt of so many new tokens behind a context holds up those beside it, in the mean."""
        return max(0.0, float(self._beside((num_tokens, context))))

    @cached_property
    def _decodes(self) -> RegularGridInterpolator:
        return _interpolated(ROWS, DECODE_CONTEXTS, self.decodes_s)

    @cached_property
    def _prompts(self) -> RegularGridInterpolator:
        return _interpolated(SIZES, PROMPT_CONTEXTS, self.prompts_s)

    @cached_property
    def _beside(self) -> RegularGridInterpolator:
        return _interpolated(SIZES, PROMPT_CONTEXTS, self.beside_s)


class DrawnTimes:
    """Steps of one server, each as much longer or shorter than the mean as one that was measured."""

    def __init__(self, times: MeasuredTimes, seed: int) -> None:
        self._times = times
        self._generator = np.random.default_rng(seed)
        self._of_decodes, self._of_prompts = _of_means(times.decodes_s), _of_means(times.prompts_s)
        self._stretch, self._num_left = 1.0, 0
        self._second_token_s = max(0.0, float(times.second_tokens_s.mean()))
        self._before = StepLoad.decoding(0, 0)

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step."""
        num_new = load.num_tokens - load.num_decoding
        before, self._before = self._before, load
        decode_s = 0.0
        if load.num_decoding:
            decode_s = self._decode_stretch() * self._times.decode_s(load.num_decoding, load.num_decoding_kv_tokens)
            has_begun = before.num_tokens > before.num_decoding and (
                load.num_decoding > before.num_decoding or not num_new
            )
            decode_s += has_begun * self._second_token_s
        if not num_new:
            return decode_s
        within = num_new * (num_new + 1) // 2
        context = max(0.0, (load.num_pairs - load.num_decoding_kv_tokens - within) / num_new)
        stretch = float(self._generator.choice(self._of_prompts))
        if load.num_decoding:
            return decode_s + stretch * self._times.held_up_s(num_new, context)
        return stretch * self._times.prompt_s(num_new, context)

    def _decode_stretch(self) -> float:
        """The noise of a step, which lasts for as many as were measured together."""
        if not self._num_left:
            self._stretch, self._num_left = float(self._generator.choice(self._of_decodes)), _NUM_TOKENS
        self._num_left -= 1
        return self._stretch


def _of_means(seconds: Seconds) -> Seconds:
    """What each round took of its mean, as far from it as rounds are from a mean that they are not part of."""
    num_rounds = seconds.shape[2]
    means = seconds.mean(axis=2, keepdims=True)
    apart = np.sqrt(num_rounds / max(1, num_rounds - 1)) * (seconds - means)
    ratios: Seconds = np.maximum(0.1, 1 + apart / means).ravel()
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

    async def beside_s(size: int, context: int) -> float:
        """What prompts hold an answer up, each; less than nothing where it goes faster than one that was alone."""
        befores = [text(context) for _ in range(_NUM_BESIDE)]
        for before in befores:
            if before:
                await ask(before, 1)
        own, num_tokens = text(DECODE_CONTEXTS[1]), _NUM_TOKENS * _NUM_BESIDE
        alone = await ask(own, num_tokens)
        answering = asyncio.create_task(ask(own, num_tokens))
        for before in befores:
            await asyncio.sleep(alone.itl_s * _NUM_TOKENS / 2)
            await ask([*before, *text(size)], 1)
        return (num_tokens - 1) * ((await answering).itl_s - alone.itl_s) / _NUM_BESIDE

    async def answers_s(rows: int, context: int, num_tokens: int) -> float:
        """From the first token to the last, of answers at once."""
        await asyncio.sleep(float(generator.exponential(_PAUSE_S)))
        answers = await asyncio.gather(*(ask(text(context), num_tokens) for _ in range(rows)))
        last = max(answers, key=lambda answer: answer.ttft_s)  # it waits for no other's prompt
        return (num_tokens - 1) * last.itl_s

    async def decode_s(rows: int, context: int) -> tuple[float, float]:
        """A step, and what the second token takes more."""
        few_s = await answers_s(rows, context, _FEW_TOKENS)
        step_s = (await answers_s(rows, context, _NUM_TOKENS) - few_s) / (_NUM_TOKENS - _FEW_TOKENS)
        return step_s, few_s - (_FEW_TOKENS - 1) * step_s

    decodes_s = np.zeros((len(ROWS), len(DECODE_CONTEXTS), rounds))
    prompts_s = np.zeros((len(SIZES), len(PROMPT_CONTEXTS), rounds))
    besides_s = np.zeros_like(prompts_s)
    second_tokens_s = np.zeros((len(ROWS), len(DECODE_CONTEXTS), rounds))
    for round_ in range(rounds):
        for at, size in enumerate(SIZES):
            for behind, context in enumerate(PROMPT_CONTEXTS):
                prompts_s[at, behind, round_] = await prompt_s(size, context)
                besides_s[at, behind, round_] = await beside_s(size, context)
        for at, rows in enumerate(ROWS):
            for behind, context in enumerate(DECODE_CONTEXTS):
                decodes_s[at, behind, round_], second_tokens_s[at, behind, round_] = await decode_s(rows, context)
    return MeasuredTimes(decodes_s, prompts_s, besides_s, second_tokens_s[0])  # of answers that are alone
