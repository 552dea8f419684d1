"""Sampling on CPUs: the C++ kernel against XLA, on one core, for rows that are all greedy or all sampled.

Both are compiled as a server compiles them, but for the product that makes the logits. They take turns, A B A B, over
the same logits; the least of several turns counts, in processor's time. Logits are normal, with a deviation of 3 or, of
a model that is unsure of everything, 0.3, where nothing but the noise decides.

    taskset -c 0 python -m benchmarks.cpu.sampling [--rows 1 8 64] [--vocab-sizes 8192 32000] [--ways greedy top_p]
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from jpaged.device.model_runner import unpack_rows
from jpaged.device.sampling import SamplingVocabulary, sample
from jpaged.engine.executor import Detail, SamplingInputs
from jpaged.kernels.sampling import RowSampling
from jpaged.kernels.sampling.cpu import CpuSampling, kernel

NUM_TURNS = 7
LEAST_TURN_S = 0.004
STEEP, FLAT = 3.0, 0.3


@dataclass(frozen=True, slots=True)
class Way:
    """What all rows of a call have in common."""

    fields: dict[str, float]
    detail: Detail = Detail.TOKENS
    deviation: float = STEEP


WAYS = {
    "greedy": Way({}),
    "logprobs": Way({}, Detail.LOGPROBS),
    "top_logprobs": Way({}, Detail.TOP_LOGPROBS),
    "sampled": Way({"temperature_r": 0.8}),
    "flat": Way({"temperature_r": 0.8}, deviation=FLAT),
    "top_k": Way({"temperature_r": 0.8, "top_k_r": 50}),
    "top_p": Way({"temperature_r": 0.8, "top_p_r": 0.9}),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison, in milliseconds a call."""

    way: str
    vocab_size: int
    num_rows: int
    cpu_ms: float
    xla_ms: float
    gigabytes_per_s: float


@functools.partial(jax.jit, static_argnames=("detail", "kernel"))
def run(logits_rv: jax.Array, words: jax.Array, detail: Detail, kernel: CpuSampling | None) -> list[Any]:
    how = RowSampling(**unpack_rows(words))
    return jax.tree.leaves(sample(logits_rv, how, SamplingVocabulary(logits_rv.shape[1]), detail, kernel))


def seconds(call: Callable[[], object]) -> float:
    """Processor's time of a call, of as many as make a turn."""
    num_calls, spent = 0, 0.0
    begin = time.process_time()
    while spent < LEAST_TURN_S:
        call()
        num_calls += 1
        spent = time.process_time() - begin
    return spent / num_calls


def measure(name: str, vocab_size: int, num_rows: int, native: CpuSampling) -> Point:
    way, rng = WAYS[name], np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(scale=way.deviation, size=(num_rows, vocab_size)).astype(np.float32))
    inputs = SamplingInputs.neutral(num_rows)
    for field, value in way.fields.items():
        inputs.rows_r[field] = value
    inputs.rows_r["positions_r"] = np.arange(num_rows)
    calls = [
        lambda kernel=kernel: jax.block_until_ready(run(logits, inputs.words, way.detail, kernel))
        for kernel in (native, None)
    ]
    for call in calls:
        call()
    turns = [[seconds(call) for call in calls] for _ in range(NUM_TURNS)]
    cpu_s, xla_s = (min(times) for times in zip(*turns, strict=True))
    return Point(name, vocab_size, num_rows, 1e3 * cpu_s, 1e3 * xla_s, logits.nbytes / cpu_s / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.sampling", description="Sampling on one core.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[8192, 32000, 128256])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    native = kernel()
    if isinstance(native, str):
        raise SystemExit(native)
    points = [
        measure(way, vocab_size, num_rows, native)
        for vocab_size in options.vocab_sizes
        for num_rows in options.rows
        for way in options.ways
    ]
    table = Table("way", "V", "R", "kernel ms", "XLA ms", "times", "GB/s")
    for point in points:
        speedup, rate = point.xla_ms / point.cpu_ms, point.gigabytes_per_s
        numbers = (f"{point.cpu_ms:.3f}", f"{point.xla_ms:.3f}", f"{speedup:.1f}", f"{rate:.1f}")
        table.add_row(point.way, str(point.vocab_size), str(point.num_rows), *numbers)
    Console().print(table)
    command = f"python -m benchmarks.cpu.sampling {' '.join(sys.argv[1:])}".rstrip()
    facts = {"num_cpus": len(os.sched_getaffinity(0)), "unit": "milliseconds of processor time a call"}
    path: Path = save("cpu_sampling", command, {**facts, "points": [asdict(point) for point in points]})
    Console().print(f"saved to {path}")


if __name__ == "__main__":
    main()
