"""Requests, and what they are answered with where nothing goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from jpaged.client import AsyncClient
from jpaged.sampling_params import request_fields
from jpaged.types import SamplingParams

_WHO = ("a small fox", "the old baker", "Lily", "a tired robot", "two friends", "the queen's cat")
_WHERE = ("in the forest", "by the sea", "at the market", "under a bridge", "on a hill", "in an empty house")
_WHAT = ("found a key", "lost a shoe", "heard a song", "saw a light", "made a cake", "told a story")

Texts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One request; its seed is given, so that it has one answer."""

    prompt: str
    sampling: SamplingParams

    @property
    def body(self) -> dict[str, Any]:
        """It as OpenAI's body of a completion; what is as by default is left out."""
        default = SamplingParams()
        given = {spec.name: getattr(self.sampling, spec.name) for spec in request_fields()}
        changed = {name: value for name, value in given.items() if value != getattr(default, name)}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
        return {"prompt": self.prompt, **listed, "max_tokens": self.sampling.max_tokens}


def make_cases(num: int, seed: int) -> list[Case]:
    """Requests of all kinds: greedy and sampled, alone and several, with penalties and stops.

    Their seeds fit into every face.
    """
    chosen = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.7, "repetition_penalty": 1.2, "min_tokens": 12},
        {"temperature": 0.8, "stop": (" the ", "."), "min_tokens": 4},
        {"temperature": 1.0, "n": 2, "min_p": 0.02},
    ]
    return [_case(chosen, kinds[i % len(kinds)]) for i in range(num)]


def _case(chosen: random.Random, kind: dict[str, Any]) -> Case:
    who, where, what = (chosen.choice(words) for words in (_WHO, _WHERE, _WHAT))
    prompt = f"Once upon a time {who} lived {where} and {what}. " * chosen.randint(1, 4)
    return Case(prompt, SamplingParams(**kind, seed=chosen.getrandbits(31), max_tokens=chosen.randint(16, 96)))


async def answers_of(target: str, cases: list[Case]) -> list[Texts]:
    """The texts of each, from a server that nobody disturbs."""
    async with AsyncClient(target) as client:
        outputs = [await client.complete(case.prompt, case.sampling) for case in cases]
    return [tuple(one.text for one in output.outputs) for output in outputs]
