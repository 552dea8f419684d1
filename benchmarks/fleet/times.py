"""How long a replica's steps take in simulation, from what servers took.

Between what was measured, the middles of the rounds are interpolated; a simulated step takes that times a factor that
is drawn: while no other server is at work, what one of the measured steps took of its own middle; while others are,
what one of the turns took that were measured beside servers that are at work as those are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from benchmarks.fleet.neighbours import Processors
from jpaged.plan.cost import StepLoad

ROWS, DECODE_CONTEXTS = (1, 2, 4, 8), (40, 240, 900)
SIZES, PROMPT_CONTEXTS = (8, 32, 64, 128, 256), (0, 240, 480)
"""Answers at once, new tokens of a prompt, and the tokens of the contexts that they are measured behind."""
NUM_TOKENS = 40
"""Tokens of an answer that is timed."""
_LEAST, _MOST = 0.5, 2.0
"""No step takes less or more of its middle: what did was not the server's."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredTimes:
    """How long steps took.

    Attributes:
        decodes_s: [rows, contexts, rounds] of a step in which so many of ROWS decode behind each of DECODE_CONTEXTS.
        prompts_s: [sizes, contexts, rounds] of a step of each of SIZES new tokens behind each of PROMPT_CONTEXTS.
        beside_s: [sizes, contexts, rounds] by which such a prompt holds up the answers beside it.
        second_tokens_s: [contexts, rounds] by which the second token of an answer takes longer than later ones.
        slower_decodes: [len(Beside), turns] times what it takes alone that an answer takes beside other servers; 1
            where that was not measured.
        slower_prompts: [len(Beside), turns] of a prompt likewise.
    """

    decodes_s: Floats
    prompts_s: Floats
    beside_s: Floats
    second_tokens_s: Floats
    slower_decodes: Floats
    slower_prompts: Floats

    def and_then(self, other: MeasuredTimes) -> MeasuredTimes:
        """The rounds of both."""
        both = {
            field.name: np.concatenate((getattr(self, field.name), getattr(other, field.name)), axis=-1)
            for field in fields(self)
        }
        return MeasuredTimes(**both)

    def told(self) -> dict[str, Any]:
        """The middles of the rounds, for the record: milliseconds of each kind of step, and times that they take."""
        middles = {field.name: np.median(getattr(self, field.name), axis=-1) for field in fields(self)}
        return {
            name.removesuffix("_s") + "_ms" * name.endswith("_s"): np.round(
                values * (1e3 if name.endswith("_s") else 1.0), 3
            ).tolist()
            for name, values in middles.items()
        }

    def decode_s(self, num_rows: int, num_kv_tokens: float) -> float:
        """A step in which rows decode whose contexts have so many tokens together."""
        return float(self._decodes((num_rows, num_kv_tokens / num_rows)))

    def prompt_s(self, num_tokens: int, context: float) -> float:
        """A step of so many new tokens behind a context."""
        return float(self._prompts((num_tokens, context)))

    def held_up_s(self, num_tokens: int, context: float) -> float:
        """What a prompt of so many new tokens behind a context holds up those beside it."""
        return max(0.0, float(self._held_up((num_tokens, context))))

    @cached_property
    def second_token_s(self) -> float:
        """What the second token of an answer takes more."""
        return max(0.0, float(np.median(self.second_tokens_s)))

    @cached_property
    def decode_factors(self) -> list[Floats]:
        """What steps of answers take of the middle, from the least to the most, for each of `Beside`."""
        return _factors(self.decodes_s, self.slower_decodes)

    @cached_property
    def prompt_factors(self) -> list[Floats]:
        """The same of prompts."""
        return _factors(self.prompts_s, self.slower_prompts)

    @cached_property
    def _decodes(self) -> RegularGridInterpolator:
        return _interpolated(ROWS, DECODE_CONTEXTS, self.decodes_s)

    @cached_property
    def _prompts(self) -> RegularGridInterpolator:
        return _interpolated(SIZES, PROMPT_CONTEXTS, self.prompts_s)

    @cached_property
    def _held_up(self) -> RegularGridInterpolator:
        return _interpolated(SIZES, PROMPT_CONTEXTS, self.beside_s)


class DrawnTimes:
    """Steps of one server; they are asked for in order, each once.

    Args:
        place: which of the servers that run on these processors.
        clock: the server's.
    """

    def __init__(
        self, times: MeasuredTimes, seed: int, processors: Processors, place: int, clock: Callable[[], float]
    ) -> None:
        self._times = times
        self._generator = np.random.default_rng(seed)
        self._processors, self._place, self._clock = processors, place, clock
        self._luck, self._num_left = 0.0, 0
        self._before = StepLoad.decoding(0, 0)

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step that begins now."""
        now_s = self._clock()
        beside = self._processors.beside(self._place, now_s)
        decode_s, prompt_s = self._middles_s(load)
        if decode_s:
            decode_s *= _drawn(self._times.decode_factors[beside], self._decode_luck())
        if prompt_s:
            prompt_s *= _drawn(self._times.prompt_factors[beside], self._generator.random())
        self._processors.works(self._place, now_s, decode_s + prompt_s)
        return decode_s + prompt_s

    def _middles_s(self, load: StepLoad) -> tuple[float, float]:
        """What answers and prompts take of a step, without what is drawn."""
        num_new = load.num_tokens - load.num_decoding
        before, self._before = self._before, load
        decode_s = 0.0
        if load.num_decoding:
            has_begun = before.num_tokens > before.num_decoding and (
                load.num_decoding > before.num_decoding or not num_new
            )
            decode_s = self._times.decode_s(load.num_decoding, load.num_decoding_kv_tokens)
            decode_s += has_begun * self._times.second_token_s
        if not num_new:
            return decode_s, 0.0
        within = num_new * (num_new + 1) // 2
        context = max(0.0, (load.num_pairs - load.num_decoding_kv_tokens - within) / num_new)
        return decode_s, (self._times.held_up_s if load.num_decoding else self._times.prompt_s)(num_new, context)

    def _decode_luck(self) -> float:
        """Which of the factors a step has; for as many steps as were measured together."""
        if not self._num_left:
            self._luck, self._num_left = self._generator.random(), NUM_TOKENS
        self._num_left -= 1
        return self._luck


def _drawn(factors: Floats, luck: float) -> float:
    return float(factors[int(luck * len(factors))])


def _factors(seconds: Floats, slower: Floats) -> list[Floats]:
    """For each of `Beside`, from the least to the most.

    Rounds are as far from the middle one as they are from a mean that they are not part of.
    """
    num_rounds = seconds.shape[2]
    middles = np.median(seconds, axis=2, keepdims=True)
    apart = np.sqrt(num_rounds / max(1, num_rounds - 1)) * (seconds - middles)
    factors = [(1 + apart / middles).ravel(), *slower[1:]]
    return [np.sort(np.clip(some, _LEAST * np.median(some), _MOST * np.median(some))) for some in factors]


def _interpolated(xs: Sequence[int], ys: Sequence[int], seconds: Floats) -> RegularGridInterpolator:
    """Beyond what was measured it goes on as straight as between the last two."""
    return RegularGridInterpolator((xs, ys), np.median(seconds, axis=2), bounds_error=False, fill_value=None)
