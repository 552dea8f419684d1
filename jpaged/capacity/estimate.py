"""Capacity of a deployment for given lengths: concurrent sequences, tokens per second, and their price.

A batch of b equal sequences, each with I prompt tokens and O output tokens, takes

    b * I / T prefill steps of T = max_num_batched_tokens, and O decode steps of b rows at a context of I + O / 2

so tokens/s = b * O / (their seconds). b is the number that the pool holds at full length, at most max_num_seqs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jpaged.capacity.cost import StepLoad
from jpaged.capacity.step_times import StepParts, StepTimes
from jpaged.engine.executor.shapes import Reach

MAX_LOAD = 0.8
"""Share of the estimated tokens per second that a load may use: above it, waiting times grow without bound."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output tokens of a sequence."""

    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate for sequences of one pair of lengths on one copy of the model.

    Attributes:
        num_fitting: sequences that the pool holds at full length.
        num_running: those that run concurrently, at most max_num_seqs.
        decode: a step that gives each of them a token.
        prefill: a step of max_num_batched_tokens of their prompts.
        tokens_per_s: output tokens, with the prefill in between; 0 if not a single sequence fits.
    """

    lengths: Lengths
    num_fitting: int
    num_running: int
    decode: StepParts
    prefill: StepParts
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Pool:
    """Limits of concurrency: blocks and their size, rows and tokens of a step, and the windows of the KV groups."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: Sequence[int | None] = (None,)
    num_sink_tokens: int = 0

    def num_fitting(self, num_tokens: int) -> int:
        """Return the number of sequences of num_tokens tokens that the blocks suffice for."""
        sizes = self.block_size, self.max_num_batched_tokens, self.num_sink_tokens
        reaches = [Reach.of(window, *sizes) for window in self.windows]
        return self.num_blocks // sum(reach.num_kept(num_tokens) for reach in reaches)


def estimate(lengths: Lengths, pool: Pool, times: StepTimes) -> Estimate:
    """Estimate the numbers of one copy of the model."""
    input_len, output_len = lengths.input_len, lengths.output_len
    num_fitting = pool.num_fitting(input_len + output_len)
    num_running = min(num_fitting, pool.max_num_seqs)
    num_rows = max(1, num_running)
    decode = times.parts(StepLoad.decoding(num_rows, input_len + output_len / 2))
    prefill = times.parts(StepLoad.prompts(pool.max_num_batched_tokens, input_len))
    batch_s = num_rows * input_len / pool.max_num_batched_tokens * prefill.seconds + output_len * decode.seconds
    return Estimate(lengths, num_fitting, num_running, decode, prefill, num_running * output_len / batch_s)


def mean_lengths(lengths: Sequence[Lengths]) -> Lengths:
    """Return the mean lengths of an even mix, each rounded up."""
    count = len(lengths)
    return Lengths(
        math.ceil(sum(pair.input_len for pair in lengths) / count),
        math.ceil(sum(pair.output_len for pair in lengths) / count),
    )


def price_of(prices: Mapping[str, float], name: str, family: str) -> float | None:
    """Return USD per chip-hour: the target's price, its family's, or the one for all; None if there is none."""
    return prices.get(name, prices.get(family, prices.get("")))


def usd_per_million(price: float, num_chips: int, tokens_per_s: float) -> float | None:
    """Return USD per million output tokens of chips that do nothing else; None for a rate of 0."""
    return price * num_chips / 3600 / tokens_per_s * 1e6 if tokens_per_s else None


@dataclass(frozen=True, slots=True)
class Service:
    """Deployment of a load on slices of one kind.

    Attributes:
        num_slices: slices that carry it with at most MAX_LOAD of their capacity.
        usd_per_hour: price of all their chips; None without a price.
    """

    num_slices: int
    num_chips: int
    usd_per_hour: float | None


def serve(load: float, slice_tokens_per_s: float, chips_per_slice: int, price: float | None) -> Service | None:
    """Return the slices for a load in output tokens per second; None if a slice serves nothing."""
    if slice_tokens_per_s <= 0:
        return None
    num_slices = max(1, math.ceil(load / (slice_tokens_per_s * MAX_LOAD)))
    num_chips = num_slices * chips_per_slice
    return Service(num_slices, num_chips, None if price is None else price * num_chips)
