"""The subcommand `bench simulate`: a trace in simulated time."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jpaged import json_text
from jpaged.bench.cli.flags import add_simulated_engine_flags, format_value, require_range
from jpaged.config import EngineConfig, iter_options
from jpaged.errors import InvalidArgument
from jpaged.hardware import HARDWARE
from jpaged.plan.simulator.deployment import MODELS, SimulatedDeployment, deploy
from jpaged.plan.simulator.simulation import SimulatedTimes, Simulation, simulate
from jpaged.plan.simulator.trace import WORKLOADS, TraceRequest, read_trace, synthesize
from jpaged.types import MAX_SEED

DESCRIPTION = """\
Serve a trace in simulated time: the real scheduler and KV cache, with step times computed from a data sheet.

    jpaged bench simulate --model opt-13b --hardware a100-40gb --trace sharegpt --rate 2
    jpaged bench simulate --trace requests.jsonl --kv-policy reserve-max --json

A trace is `sharegpt` or `alpaca` (length distributions of the vLLM paper, Poisson arrivals) or a file with one JSON
object per line: arrival_s, prompt_tokens and output_tokens, and optionally n, beam_width, prefix_id with prefix_tokens,
tenant and priority.
"""

_DEFAULT_NUM_REQUESTS = 200
_MAX_NUM_REQUESTS = 10_000_000
_MAX_COUNT = 2**31 - 1
_MIN_RATE = 1e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the model, the hardware, and the scheduler."""
    choices = {name: spec.metadata["choices"] for name, _, spec in iter_options()}
    parser.add_argument("--model", choices=MODELS, default="opt-13b", help="model to simulate (default: opt-13b)")
    parser.add_argument(
        "--hardware", choices=HARDWARE, default="a100-40gb", help="accelerator to simulate (default: a100-40gb)"
    )
    parser.add_argument(
        "--num-devices", type=int, metavar="N", help="number of devices (default: depends on the model)"
    )
    parser.add_argument(
        "--num-blocks", type=int, metavar="N", help="KV blocks in the pool (default: as many as fit in memory)"
    )
    add_simulated_engine_flags(parser, max_num_seqs=256, max_num_batched_tokens=2560, block_size=16)
    parser.add_argument("--trace", default="sharegpt", help="trace: sharegpt, alpaca, or a file (default: sharegpt)")
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second of a synthetic trace (default: 1)")
    parser.add_argument("--num-requests", type=int, metavar="N", help="requests of a synthetic trace (default: 200)")
    parser.add_argument("--duration", type=float, metavar="S", help="seconds of arrivals, instead of --num-requests")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of a synthetic trace (default: 0)")
    parser.add_argument(
        "--kv-policy", choices=choices["kv_policy"], default="paged", help="KV allocation policy (default: paged)"
    )
    parser.add_argument(
        "--batching", choices=choices["batching"], default="continuous", help="batching (default: continuous)"
    )
    parser.add_argument("--policy", choices=choices["policy"], default="fcfs", help="admission order (default: fcfs)")
    parser.add_argument(
        "--preemption-mode", choices=choices["preemption_mode"], default="auto", help="preemption mode (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Run the simulation and print the results."""
    deployment = _deployment(arguments)
    trace = _trace(arguments)
    options = EngineConfig().replace(
        max_num_seqs=_at_least_one(arguments, "max_num_seqs"),
        max_num_batched_tokens=_at_least_one(arguments, "max_num_batched_tokens"),
        max_num_queued_reqs=len(trace),
        overlap=False,
        max_inter_token_latency=0.0,
        policy=arguments.policy,
        batching=arguments.batching,
        preemption_mode=arguments.preemption_mode,
        kv_policy=arguments.kv_policy,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )
    _check_rows(trace, arguments.max_num_seqs)
    numbers = measures(simulate(trace, deployment, options))
    if arguments.json:
        print(json_text.dumps({"model": deployment.model.name, "num_blocks": deployment.num_blocks, **numbers}))
        return 0
    roofline = deployment.roofline
    what = f"{deployment.model.name} on {roofline.num_devices} x {roofline.hardware.name}"
    table = Table(title=f"{what}: {deployment.num_blocks} blocks of {deployment.block_size}", show_header=False)
    for name, value in numbers.items():
        table.add_row(name.replace("_", " "), format_value(value))
    Console().print(table)
    return 0


def measures(result: Simulation) -> dict[str, float | int]:
    """Return the reported measures of a simulation; names include units."""

    def normalized(served: SimulatedTimes) -> float:
        return served.normalized_latency_s

    def first_token(served: SimulatedTimes) -> float:
        return served.time_to_first_token_s

    return {
        "num_requests": len(result.served),
        "elapsed_s": result.elapsed_s,
        "requests_per_s": result.requests_per_s,
        "output_tokens_per_s": result.tokens_per_s,
        "normalized_latency_mean_s": result.normalized_latency_s,
        "normalized_latency_p50_s": result.percentile(normalized, 50),
        "normalized_latency_p99_s": result.percentile(normalized, 99),
        "time_to_first_token_p50_s": result.percentile(first_token, 50),
        "time_to_first_token_p99_s": result.percentile(first_token, 99),
        "mean_batched_requests": result.mean_batched_requests,
        "reserved_slots_with_tokens_percent": 100 * result.slot_share,
        "pool_slots_with_tokens_percent": 100 * result.pool_share,
        "blocks_saved_by_sharing_percent": 100 * result.shared_share,
        "prefix_hit_tokens": result.load.num_prefix_hit_tokens,
        "num_steps": result.load.num_steps,
        "num_preemptions": result.load.num_preemptions,
        "recomputed_tokens": result.load.num_recomputed_tokens,
        "blocks_swapped_out": result.load.num_blocks_swapped_out,
        "blocks_swapped_in": result.load.num_blocks_swapped_in,
        "swap_s": result.swap_s,
    }


def _deployment(arguments: argparse.Namespace) -> SimulatedDeployment:
    model, hardware = MODELS[arguments.model], HARDWARE[arguments.hardware]
    block_size = _at_least_one(arguments, "block_size")
    require_range("--num-host-blocks", arguments.num_host_blocks, 0)
    num_blocks = None if arguments.num_blocks is None else _at_least_one(arguments, "num_blocks")
    num_devices = None if arguments.num_devices is None else _at_least_one(arguments, "num_devices")
    return deploy(
        model,
        hardware,
        num_devices=num_devices,
        num_kv_slots=None if num_blocks is None else num_blocks * block_size,
        block_size=block_size,
        num_host_blocks=arguments.num_host_blocks,
    )


def _trace(arguments: argparse.Namespace) -> list[TraceRequest]:
    max_model_len = MODELS[arguments.model].config.max_model_len
    given = {name: getattr(arguments, name) for name in ("rate", "num_requests", "duration", "seed")}
    if arguments.trace not in ("sharegpt", "alpaca"):
        for name, value in given.items():
            if value is not None:
                raise InvalidArgument(
                    f"--{name.replace('_', '-')}", "applies only to synthetic traces, not to a trace file"
                )
        return read_trace(Path(arguments.trace), max_model_len=max_model_len)
    rate = 1.0 if arguments.rate is None else arguments.rate
    if not _MIN_RATE <= rate <= _MAX_COUNT:
        raise InvalidArgument("--rate", f"{rate} is out of range: must be above 0, from {_MIN_RATE} to {_MAX_COUNT}")
    num_requests = _DEFAULT_NUM_REQUESTS
    if arguments.num_requests is not None:
        if arguments.duration is not None:
            raise InvalidArgument("--duration", "conflicts with --num-requests: give only one of them")
        num_requests = _at_least_one(arguments, "num_requests")
    elif arguments.duration is not None:
        if not (arguments.duration > 0 and math.isfinite(arguments.duration)):
            raise InvalidArgument("--duration", f"{arguments.duration} is out of range: must be above 0")
        num_requests = max(1, round(rate * arguments.duration))
    if num_requests > _MAX_NUM_REQUESTS:
        flag = "--num-requests" if arguments.duration is None else "--duration"
        raise InvalidArgument(flag, f"{num_requests:.6g} requests are above the limit of {_MAX_NUM_REQUESTS}")
    seed = arguments.seed or 0
    require_range("--seed", seed, 0, MAX_SEED)
    return synthesize(
        WORKLOADS[arguments.trace],
        rate_per_s=rate,
        num_requests=num_requests,
        seed=seed,
        max_model_len=max_model_len,
    )


def _at_least_one(arguments: argparse.Namespace, name: str) -> int:
    value: int = getattr(arguments, name)
    require_range(f"--{name.replace('_', '-')}", value, 1)
    return value


def _check_rows(trace: list[TraceRequest], max_num_seqs: int) -> None:
    """Reject a request that needs more rows than a step has: it would wait forever."""
    for request in trace:
        num_rows = max(request.n, request.beam_width)
        if num_rows > max_num_seqs:
            text = f"{max_num_seqs} is below the {num_rows} sequences of a request in the trace"
            raise InvalidArgument("--max-num-seqs", text)
