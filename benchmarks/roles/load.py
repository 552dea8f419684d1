"""Requests that arrive at random, each at the server with the fewest open, and what their clients saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.bench.load_generator import ArrivalProcess
from jpaged.client import AsyncClient
from jpaged.types import SamplingParams

PERCENTILES = (50, 90, 99)
_FIRST_ID, _NUM_IDS = 300, 700


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of each prompt, and of each output."""

    prompt_len: int
    output_len: int

    @classmethod
    def parse(cls, word: str) -> Shape:
        """Reads 900+32."""
        prompt_len, _, output_len = word.partition("+")
        return cls(int(prompt_len), int(output_len))

    def __str__(self) -> str:
        return f"{self.prompt_len}+{self.output_len}"


@dataclass(frozen=True, slots=True)
class Seen:
    """What clients saw of some requests.

    Attributes:
        ttfts_s: from sending to the first token, of each.
        itls_s: between two messages with tokens.
        wall_s: from the first request to the last answer.
        num_tokens: that came.
    """

    ttfts_s: tuple[float, ...]
    itls_s: tuple[float, ...]
    wall_s: float
    num_tokens: int

    def numbers(self) -> dict[str, float]:
        """Mean and percentiles in milliseconds, and tokens a second."""
        found = {"tokens_per_s": self.num_tokens / self.wall_s}
        for name, times_s in (("ttft", self.ttfts_s), ("itl", self.itls_s)):
            found[f"{name}_mean_ms"] = 1e3 * float(np.mean(times_s))
            for percentile in PERCENTILES:
                found[f"{name}_p{percentile}_ms"] = 1e3 * float(np.percentile(times_s, percentile))
        return {key: round(value, 2) for key, value in found.items()}


async def drive(targets: Sequence[str], shape: Shape, rate: float, count: int, seed: int) -> Seen:
    """Sends so many requests, so many a second, whose times and prompts are functions of the arguments.

    No two loads share prompts, or the prefix cache would answer for the model.
    """
    rng = np.random.default_rng([seed, round(rate * 1e6), count, shape.prompt_len, shape.output_len])
    arrivals = ArrivalProcess(rate).times_s(count, rng)
    prompts = rng.integers(_FIRST_ID, _FIRST_ID + _NUM_IDS, (count, shape.prompt_len)).tolist()
    sampling = SamplingParams(max_tokens=shape.output_len, temperature=0.0, ignore_eos=True)
    clients = [AsyncClient(target, resuming=None) for target in targets]
    num_open = [0] * len(clients)
    ttfts_s, itls_s, num_tokens = list[float](), list[float](), 0
    begin_s = time.perf_counter()

    async def one(at_s: float, prompt: list[int]) -> None:
        nonlocal num_tokens
        await asyncio.sleep(begin_s + at_s - time.perf_counter())
        place = num_open.index(min(num_open))
        num_open[place] += 1
        sent_s, last_s = time.perf_counter(), None
        try:
            async with clients[place].generate(prompt_token_ids=prompt, sampling=sampling) as stream:
                async for chunk in stream:
                    if not chunk.token_ids:
                        continue
                    now_s = time.perf_counter()
                    num_tokens += len(chunk.token_ids)
                    (ttfts_s if last_s is None else itls_s).append(now_s - (sent_s if last_s is None else last_s))
                    last_s = now_s
        finally:
            num_open[place] -= 1

    try:
        await asyncio.gather(*(one(at_s, prompt) for at_s, prompt in zip(arrivals.tolist(), prompts, strict=True)))
    finally:
        for client in clients:
            await client.close()
    wall_s = time.perf_counter() - begin_s
    if num_tokens != count * shape.output_len:
        raise SystemExit(f"{num_tokens} tokens came of {count * shape.output_len}")
    return Seen(tuple(ttfts_s), tuple(itls_s), wall_s, num_tokens)
