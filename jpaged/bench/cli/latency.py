"""The subcommand `bench latency`: duration of one batch, without a server."""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from rich.console import Console

from jpaged.bench import results
from jpaged.bench.cli.flags import add_hardware_flag, add_output_json, print_result, require_range, require_writable
from jpaged.bench.cli.offline import Offline, add_offline_flags, get_vocabulary, with_model
from jpaged.bench.datasets import DatasetOptions, Sample
from jpaged.types import MAX_SEED, SamplingParams

DESCRIPTION = """\
Measure the latency of `LLM.generate` for one batch of random prompts, repeatedly.

    jpaged bench latency
    jpaged bench latency ./model --batch-size 1 --input-len 32 --output-len 128 --output-json stream.json

Flags and result keys are vLLM's. The prefix cache is off unless --enable-prefix-caching is given, because every
iteration runs the same prompts.
"""

_PERCENTAGES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL with its options, the batch, and the number of iterations."""
    for name, default, text in (
        ("--input-len", 32, "input tokens per prompt"),
        ("--output-len", 128, "output tokens per sequence"),
        ("--batch-size", 8, "prompts"),
        ("--n", 1, "sequences per prompt"),
        ("--num-iters-warmup", 5, "warm-up batches, not timed"),
        ("--num-iters", 15, "timed batches"),
        ("--seed", 0, "seed of the random prompts"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="N", help="0 is greedy (default: 1)")
    add_hardware_flag(parser)
    add_output_json(parser)
    add_offline_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers, and write them if requested."""
    arguments = with_model(arguments)
    for name, low, high in (
        ("input_len", 1, 2**20),
        ("output_len", 1, 2**20),
        ("batch_size", 1, 2**16),
        ("n", 1, 256),
        ("num_iters_warmup", 0, 2**20),
        ("num_iters", 1, 2**20),
        ("seed", 0, MAX_SEED // 2),
    ):
        require_range(f"--{name.replace('_', '-')}", getattr(arguments, name), low, high)
    require_writable("--output-json", arguments.output_json)
    options = DatasetOptions(
        num_prompts=arguments.batch_size,
        random_input_len=arguments.input_len,
        random_output_len=arguments.output_len,
        seed=arguments.seed,
    )
    samples = options.make(get_vocabulary(arguments.model))
    params = SamplingParams(
        max_tokens=arguments.output_len,
        ignore_eos=True,
        temperature=arguments.temperature,
        n=arguments.n,
        detokenize=not arguments.disable_detokenize,
    )
    with Offline.start(arguments, sys.stderr, enable_prefix_caching=False) as offline:
        latencies = _latencies_s(arguments, offline, samples, params)
        lens = [(arguments.input_len, arguments.output_len)] * (len(samples) * arguments.n)
        mean_s = float(np.mean(latencies))
        result = (
            results.header("latency", arguments.seed)
            | {
                "model_id": offline.model,
                "dtype": offline.dtype,
                "options": offline.options,
                **{name: getattr(arguments, name) for name in ("batch_size", "input_len", "output_len", "n")},
                "avg_latency": mean_s,
                "std_latency": float(np.std(latencies)),
                "latencies": latencies,
                "percentiles": {str(p): float(np.percentile(latencies, p)) for p in _PERCENTAGES},
                "output_tokens_per_second": len(lens) * arguments.output_len / mean_s,
            }
            | offline.shares(lens, mean_s)
        )
    console = Console()
    title = f"latency of {offline.model}: {len(samples)} prompts, {arguments.output_len} tokens each"
    print_result(console, result, title)
    told = ", ".join(f"p{name} {1e3 * seconds:.1f}" for name, seconds in result["percentiles"].items())
    console.print(f"batch latency in ms: {told}", highlight=False)
    if arguments.output_json is not None:
        results.write(arguments.output_json, result)
    return 0


def _latencies_s(
    arguments: argparse.Namespace, offline: Offline, samples: list[Sample], params: SamplingParams
) -> list[float]:
    """Return the seconds of each batch after the warm-up."""
    latencies = []
    for number in range(-arguments.num_iters_warmup, arguments.num_iters):
        begin_s = time.perf_counter()
        offline.generate(samples, [params] * len(samples))
        latency_s = time.perf_counter() - begin_s
        if number >= 0:
            latencies.append(latency_s)
            offline.report.progress("batches", number + 1, arguments.num_iters)
    return latencies
