"""The subcommand `bench throughput`: many requests at once, without a server."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

from jpaged.bench import results
from jpaged.bench.cli.flags import (
    add_dataset_flags,
    add_hardware_flag,
    add_output_json,
    dataset_from,
    print_result,
    require_range,
    require_writable,
)
from jpaged.bench.cli.offline import Offline, add_offline_flags, get_vocabulary, with_model
from jpaged.bench.datasets import SESSION_DATASETS, DatasetOptions, Sample
from jpaged.errors import InvalidArgument
from jpaged.types import SamplingParams

DESCRIPTION = """\
Measure the throughput of `LLM.generate` in requests and tokens per second, with all requests submitted at once.

    jpaged bench throughput
    jpaged bench throughput ./model --num-prompts 500 --input-len 512 --output-len 128 --output-json before.json

Flags (except their defaults) and result keys are vLLM's. Every request generates all its tokens. The limit is the best
that this machine's memory bandwidth and FLOP/s allow (`jpaged bench probe`).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL with its options, the data set, and the result file."""
    add_dataset_flags(parser)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="sequences per prompt (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="N", help="0 is greedy (default: 1)")
    parser.add_argument("--num-warmups", type=int, default=1, metavar="N", help="warm-up requests (default: 1)")
    add_hardware_flag(parser)
    add_output_json(parser)
    add_offline_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers, and write them if requested."""
    arguments = with_model(arguments)
    options = dataset_from(arguments)
    if options.dataset_name in SESSION_DATASETS:
        raise InvalidArgument("--dataset-name", f"{options.dataset_name} works only with jpaged bench serve")
    require_range("--n", arguments.n, 1, 256)
    require_range("--num-warmups", arguments.num_warmups, 0)
    require_writable("--output-json", arguments.output_json)
    samples, other = _samples(arguments, options)
    with Offline.start(arguments, sys.stderr) as offline:
        if arguments.num_warmups:
            other = other[: arguments.num_warmups]
            offline.generate(other, [_params(one, arguments) for one in other])
        offline.report.line(f"generating from {len(samples)} prompts")
        num_steps, begin_s = offline.num_steps, time.perf_counter()
        outputs = offline.generate(samples, [_params(one, arguments) for one in samples])
        elapsed_s, num_steps = time.perf_counter() - begin_s, offline.num_steps - num_steps
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        lens = [(len(output.prompt_token_ids), len(one.token_ids)) for output in outputs for one in output.outputs]
        output_tokens = sum(length for _, length in lens)
        result = (
            results.header("throughput", options.seed)
            | {
                "model_id": offline.model,
                "dtype": offline.dtype,
                "n": arguments.n,
                "workload": results.workload(options),
                "options": offline.options,
                "elapsed_time": elapsed_s,
                "num_requests": len(samples),
                "num_steps": num_steps,
                "total_num_tokens": prompt_tokens + output_tokens,
                "total_input_tokens": prompt_tokens,
                "total_output_tokens": output_tokens,
                "requests_per_second": len(samples) / elapsed_s,
                "tokens_per_second": (prompt_tokens + output_tokens) / elapsed_s,
                "output_tokens_per_second": output_tokens / elapsed_s,
            }
            | offline.shares(lens, elapsed_s)
        )
    print_result(Console(), result, f"throughput of {offline.model}")
    if arguments.output_json is not None:
        results.write(arguments.output_json, result)
    return 0


def _samples(arguments: argparse.Namespace, options: DatasetOptions) -> tuple[list[Sample], list[Sample]]:
    """Return the timed samples, and others of the same kind for warm-up."""
    vocabulary = get_vocabulary(arguments.model)
    return options.make(vocabulary), options.for_warm_up().make(vocabulary)


def _params(sample: Sample, arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=sample.output_len,
        ignore_eos=True,
        temperature=arguments.temperature,
        n=arguments.n,
        detokenize=not arguments.disable_detokenize,
    )
