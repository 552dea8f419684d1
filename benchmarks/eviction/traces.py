"""What arrives: requests with their tokens, of users who come back, or do not.

chat      multi-turn conversations behind one of four system prompts; a median of 30 s to think between two turns
agents    tasks of four to fourteen calls behind one of six system prompts with tools; a call brings a tool's answer
batch     evaluation with few-shot prompts, a task of eight at a time for most of it, each question once
random    prompts that have nothing in common
mixed     all four at once, a tenant each

Time runs six times as fast, so that one device has something to do. Tokens are from a seed. A turn's prompt is the one
before, its answer (the simulated executor samples token 0) and new ones. What several conversations begin with ends
where a block does, so that every hit is of whole blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_SIZE = 16
_VOCAB_SIZE = 128_000
MAX_LEN = 8192
_ANSWER_TOKEN = 0
_SPEED = 6.0


@dataclass(frozen=True, slots=True)
class Coming:
    """One request to come; it generates exactly `output_tokens`, all of them token 0."""

    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    tenant: str

    @property
    def num_matchable_blocks(self) -> int:
        """Blocks of the prompt that a cache may give it: all full ones short of the last token."""
        return (len(self.prompt_token_ids) - 1) // BLOCK_SIZE


class _Writer:
    """Writes the requests of one tenant, for so many seconds."""

    def __init__(self, tenant: str, seconds: float, random_: random.Random) -> None:
        self.tenant, self.seconds, self.random = tenant, seconds, random_
        self.requests: list[Coming] = []

    def tokens(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(1, _VOCAB_SIZE), k=self.random.randint(low, high)))

    def prefixes(self, count: int, low: int, high: int) -> list[tuple[int, ...]]:
        """So many texts of whole blocks, that many at least and at most."""
        lens = [BLOCK_SIZE * self.random.randint(low, high) for _ in range(count)]
        return [self.tokens(length, length) for length in lens]

    def arrivals(self, rate_per_s: float) -> list[float]:
        times, now = [], self.random.expovariate(rate_per_s)
        while now < self.seconds:
            times.append(now)
            now += self.random.expovariate(rate_per_s)
        return times

    def ask(self, at_s: float, prompt: tuple[int, ...], output_tokens: int) -> tuple[int, ...]:
        """Adds a request; its prompt and its answer."""
        self.requests.append(Coming(at_s / _SPEED, prompt, output_tokens, self.tenant))
        return prompt + (_ANSWER_TOKEN,) * output_tokens


def _chat(writer: _Writer, rate_per_s: float) -> None:
    draw, prefixes = writer.random, writer.prefixes(4, 8, 24)
    for arrival_s in writer.arrivals(rate_per_s):
        at_s, text, is_over = arrival_s, draw.choice(prefixes), False
        while not is_over:
            text = writer.ask(at_s, text + writer.tokens(24, 240), draw.randint(16, 160))
            at_s += 3 + draw.lognormvariate(3.4, 1.0)  # half of them within 30 s of the answer
            is_over = draw.random() < 0.25 or len(text) > MAX_LEN - 512


def _agents(writer: _Writer, rate_per_s: float) -> None:
    draw, prefixes = writer.random, writer.prefixes(6, 40, 120)
    for arrival_s in writer.arrivals(rate_per_s):
        at_s, text = arrival_s, draw.choice(prefixes) + writer.tokens(50, 300)
        for _ in range(draw.randint(4, 14)):
            text = writer.ask(at_s, text, draw.randint(16, 64)) + writer.tokens(16, 380)
            at_s += 2 + draw.expovariate(1 / 3)


def _batch(writer: _Writer, rate_per_s: float) -> None:
    draw, prefixes = writer.random, writer.prefixes(8, 30, 90)
    now = prefixes[0]
    for at_s in writer.arrivals(rate_per_s):
        now = draw.choice(prefixes) if draw.random() < 0.02 else now
        task = now if draw.random() < 0.8 else draw.choice(prefixes)
        writer.ask(at_s, task + writer.tokens(30, 120), draw.randint(8, 32))


def _random(writer: _Writer, rate_per_s: float) -> None:
    for at_s in writer.arrivals(rate_per_s):
        writer.ask(at_s, writer.tokens(100, 1600), writer.random.randint(16, 64))


_KINDS: dict[str, Callable[[_Writer, float], None]] = {
    "chat": _chat,
    "agents": _agents,
    "batch": _batch,
    "random": _random,
}
TRACES: dict[str, dict[str, float]] = {
    "chat": {"chat": 1.0},
    "agents": {"agents": 0.3},
    "batch": {"batch": 4.0},
    "random": {"random": 2.0},
    "mixed": {"chat": 0.6, "agents": 0.15, "batch": 1.0, "random": 0.7},
}
"""Who comes how often a second: conversations, tasks, or requests."""


def make_trace(name: str, seconds: float, seed: int) -> list[Coming]:
    """The requests that begin within so many seconds, before time is made faster, and what follows from them."""
    requests = []
    for kind, rate_per_s in TRACES[name].items():
        writer = _Writer(kind, seconds, random.Random(f"{seed} {kind}"))
        _KINDS[kind](writer, rate_per_s)
        requests += writer.requests
    return sorted(requests, key=lambda request: request.arrival_s)
