"""The requests that every peer answers: token ids made from a seed, none of which ends early.

    W1   offline, lengths of ShareGPT: 161 prompt tokens and 338 of output on average (M: 128 and 96), log-normal
    W2   64 requests that share their first 341 tokens, 32 tokens each
    W3   16 requests of 6 samples each, temperature 1
    W4   8 requests, beam search of width 4
    W5   one stream of 128 tokens
    T1   the first half of W1 with a quarter of its outputs (M: half)

A workload is a file of one job a line, so that a worker in another environment reads what it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

WORKLOADS = ("W1", "W2", "W3", "W4", "W5", "T1")
SEED = 20260
"""The seed of workload W1 is one more, and so on."""
VOCAB_SIZES = {"S": 8192, "M": 32000}
FIRST_ID = 3
"""Ids below are special tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request.

    Attributes:
        prompt: token ids.
        max_tokens: tokens to generate for each sequence, exactly.
        n: sequences to sample.
        temperature: 0 is greedy.
        beam_width: beams to search with and to return; 0 samples.
    """

    prompt: Sequence[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    beam_width: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that come back."""
        return self.beam_width or self.n

    @property
    def num_output_tokens(self) -> int:
        """Tokens asked for; of beams those of the best."""
        return self.max_tokens * (1 if self.beam_width else self.n)


def make(model: str, workload: str) -> list[Job]:
    """Returns the jobs of a workload over a model's vocabulary: the same at every call."""
    if workload == "T1":
        jobs = make(model, "W1")
        divisor = {"S": 4, "M": 2}[model]
        return [replace(job, max_tokens=max(4, job.max_tokens // divisor)) for job in jobs[: len(jobs) // 2]]
    rng = np.random.default_rng(SEED + int(workload[1:]))

    def ids(count: int) -> list[int]:
        return rng.integers(FIRST_ID, VOCAB_SIZES[model], count).tolist()

    if workload == "W1":
        lengths = _chat_lengths(rng, model)
        return [Job(ids(num_prompt), num_output) for num_prompt, num_output in lengths]
    if workload == "W2":
        shared = ids(341)
        return [Job(shared + ids(30), 32) for _ in range(64)]
    if workload == "W3":
        return [Job(ids(128), 64, n=6, temperature=1.0) for _ in range(16)]
    if workload == "W4":
        return [Job(ids(128), 32, beam_width=4) for _ in range(8)]
    return [Job(ids(32), 128)]


def _chat_lengths(rng: np.random.Generator, model: str) -> list[tuple[int, int]]:
    if model == "S":
        count, mean_prompt, mean_output, sigmas, max_len, max_prompt = 128, 161, 338, (1.0, 0.9), 1024, 640
    else:
        count, mean_prompt, mean_output, sigmas, max_len, max_prompt = 24, 128, 96, (0.9, 0.8), 512, 384
    noise_prompt, noise_output = rng.standard_normal(count), rng.standard_normal(count)
    prompts = _log_normal(noise_prompt, sigmas[0], mean_prompt, np.full(count, max_prompt))
    outputs = _log_normal(noise_output, sigmas[1], mean_output, max_len - prompts)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _log_normal(noise: np.ndarray, sigma: float, mean: float, most: np.ndarray) -> np.ndarray:
    """Log-normal lengths between 4 and `most` whose mean, after the bounds, is `mean`: found by bisection."""
    low, high = 0.0, float(np.log(50_000.0))
    for _ in range(80):
        middle = (low + high) / 2
        if np.clip(np.exp(middle + sigma * noise), 4, most).mean() < mean:
            low = middle
        else:
            high = middle
    return np.clip(np.exp(middle + sigma * noise), 4, most).round().astype(int)


def digest(jobs: Sequence[Job]) -> str:
    """Names the jobs by their content: 12 hexadecimal digits."""
    return hashlib.sha256(_lines(jobs).encode()).hexdigest()[:12]


def write(path: Path, jobs: Sequence[Job]) -> None:
    """Writes the jobs, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(jobs))


def read(path: Path) -> list[Job]:
    """Reads what `write` wrote."""
    return [Job(**json.loads(line)) for line in path.read_text().splitlines()]


def shortened(jobs: Sequence[Job], *, num_jobs: int = 8, max_tokens: int = 4) -> list[Job]:
    """Returns the first jobs with few tokens each: what a peer runs before it is timed."""
    return [replace(job, max_tokens=min(job.max_tokens, max_tokens)) for job in jobs[:num_jobs]]


def _lines(jobs: Sequence[Job]) -> str:
    return "".join(json.dumps(asdict(job)) + "\n" for job in jobs)
