"""The least seconds that a workload can take on a core that reads and multiplies at given rates.

A schedule that nothing holds up: every prompt is computed once, and what all jobs begin with once; then all sequences
decode together, and a step takes as long as reading the weights or multiplying its rows by them, whichever is longer.
Keys and values are read once for each token that is decoded, those of a prompt once for all sequences of its job.
Sampling, norms and the host take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.checkpoints import HEAD_DIM, Shape
from benchmarks.peers.workloads import Job


@dataclass(frozen=True, slots=True)
class Rates:
    """What one core does.

    Attributes:
        read_bytes_s: bytes of memory read in a second.
        flops: multiplications and additions in a second, in the type of the weights.
    """

    read_bytes_s: float
    flops: float


def least_s(shape: Shape, jobs: Sequence[Job], rates: Rates) -> float:
    """Returns the least seconds for all jobs together."""
    weights_s = shape.num_parameters_read * shape.bytes_per_value / rates.read_bytes_s
    row_s = 2 * shape.num_parameters_read / rates.flops
    lengths = [job.max_tokens for job in jobs for _ in range(job.num_sequences)]
    # The first token of a sequence comes with its prompt; the last is never an input.
    num_rows = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    decode_s = sum(max(weights_s, row_s * count) for count in num_rows)
    prompt_s = max(weights_s, _prompt_flops(shape, jobs) / rates.flops)
    return prompt_s + decode_s + _keys_read_bytes(shape, jobs) / rates.read_bytes_s


def greatest(rates: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns of each rate the greater, as `benchmarks.peers.workers.rates` measured them at two times on one core."""
    flops = {name: max(value, others["flops"].get(name, value)) for name, value in rates["flops"].items()}
    return {"read_bytes_s": max(rates["read_bytes_s"], others["read_bytes_s"]), "flops": flops}


def num_shared_tokens(jobs: Sequence[Job]) -> int:
    """Counts the tokens that every prompt begins with; none of a single job."""
    if len(jobs) == 1:
        return 0
    columns = zip(*(job.prompt for job in jobs), strict=False)
    differing = (index for index, column in enumerate(columns) if len(set(column)) > 1)
    return next(differing, min(len(job.prompt) for job in jobs))


def _prompt_flops(shape: Shape, jobs: Sequence[Job]) -> float:
    """Operations of all prompts: the output matrix for their last tokens alone, attention with what is before each."""
    shared = num_shared_tokens(jobs)
    num_tokens = shared + sum(len(job.prompt) - shared for job in jobs)
    num_scores = shared**2 / 2 + sum((len(job.prompt) ** 2 - shared**2) / 2 for job in jobs)
    matrices = 2 * (shape.num_parameters_read - shape.num_output_parameters) * num_tokens
    attention = 4 * shape.num_layers * shape.num_heads * HEAD_DIM * num_scores
    return matrices + attention + 2 * shape.num_output_parameters * len(jobs)


def _keys_read_bytes(shape: Shape, jobs: Sequence[Job]) -> float:
    """Bytes of keys and values that decoding reads."""
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * HEAD_DIM * shape.bytes_per_value
    total = 0
    for job in jobs:
        num_steps = job.max_tokens - 1
        total += num_steps * len(job.prompt) + job.num_sequences * num_steps * (num_steps + 1) // 2
    return float(total * token_bytes)
