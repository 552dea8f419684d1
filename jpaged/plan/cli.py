"""The subcommand `plan`: a deployment on devices that this machine lacks."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING

from jpaged import json_text
from jpaged.cli.options import add_config_flags, config_from, config_values, to_flag
from jpaged.cli.startup import StartupReport
from jpaged.config import iter_options
from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.plan.estimate import PlanGoals, SequenceLengths

DESCRIPTION = """\
Estimate memory fit, capacity, speed and cost of a deployment on devices that this machine need not have.

    jpaged plan llama-3.1-8b --topology v5e:2x2 --max-model-len 8192
    jpaged plan llama-3.1-70b --topology v6e:2x4,v5p:2x2x2 --input-len 1000 --output-len 300 \\
        --price v6e=2.7,v5p=4.2 --request-rate 20
    jpaged plan llama-3.1-8b --topology h200 --input-len 8000 --output-len 200 --roles --max-itl-ms 30

The real step programs are compiled for the devices, by libtpu (TPU) or JAX's CUDA packages (GPU); nothing runs.
Without --tensor-parallel-size, one copy of the model uses as many devices of a topology as its attention heads allow.
Times come from a roofline model with the efficiencies that are printed. Exit code 1: the model fits on no topology.
"""

_OPTIONS = {
    *("model", "dtype", "quantization", "hf_overrides"),
    *("max_model_len", "attention_backend", "block_size", "num_blocks", "memory_utilization"),
    *("kv_cache_memory_bytes", "state_checkpoint_interval"),
    *("kv_cache_dtype", "swap_space", "enable_cascade_attention", "max_num_seqs", "max_num_batched_tokens"),
    *("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"),
    *("enable_expert_parallel", "enable_dp_attention", "enable_eplb", "eplb_config"),
    *("lossy_kv_window", "lossy_kv_sinks"),
    *("enable_lora", "max_loras", "max_lora_rank", "enable_dora", "enable_lm_head_lora"),
    *("enable_embedding_lora", "enable_expert_lora", "speculative_config"),
}
"""Engine options that affect programs or memory."""
_INPUT_LEN, _OUTPUT_LEN = 1024, 256
_GOALS = (
    ("--max-ttft-ms", 1000.0, "maximum mean time to first token in milliseconds"),
    ("--max-itl-ms", 50.0, "maximum 99th percentile of the inter-token latency in milliseconds"),
    ("--network-gbits-per-second", 100.0, "network bandwidth between two servers"),
)
"""Flags that require --roles: name, default and help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the topologies, the load, and the relevant engine options."""
    parser.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="T[,T...]",
        help="devices: v6e:2x4, h200:8, a100, ...; if there are several, they are compared and the cheapest is named",
    )
    lengths = "several values describe a mix"
    parser.add_argument(
        "--input-len",
        type=int,
        nargs="+",
        metavar="N",
        help=f"tokens per prompt (default: up to {_INPUT_LEN}); {lengths}",
    )
    parser.add_argument(
        "--output-len",
        type=int,
        nargs="+",
        metavar="N",
        help=f"tokens per output (default: up to {_OUTPUT_LEN}); {lengths}",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--request-rate", type=float, metavar="N", help="load to serve in requests per second")
    load.add_argument("--tokens-per-second", type=float, metavar="N", help="load to serve in output tokens per second")
    parser.add_argument(
        "--price", metavar="USD", help="price of a chip-hour: 2.7, or by generation or topology: v6e=2.7,v5p:2x2x2=4.2"
    )
    parser.add_argument(
        "--roles",
        action="store_true",
        help="compare disaggregated prefill and decode servers (`--role`) with servers that do both, and recommend one",
    )
    for flag, default, what in _GOALS:
        parser.add_argument(flag, type=float, metavar="N", help=f"with --roles: {what} (default: {default:g})")
    parser.add_argument(
        "--all-programs", action="store_true", help="compile every program, not only those that determine the result"
    )
    parser.add_argument(
        "--save",
        metavar="DIR",
        help="write every program to a new folder, for `jpaged serve --compiled DIR` on the target (not for GPUs)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    add_config_flags(parser, without={name for name, _, _ in iter_options()} - _OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of every topology; return 0 if one fits, else 1."""
    config = config_from(arguments)  # reports invalid values as flags
    prices, goals = prices_from(arguments.price), _goals(arguments)

    from jpaged.plan.compilation import (
        Question,  # imports jax
        check_can_be_saved,
        compile_plan,
        find_config,
    )
    from jpaged.plan.report import PlanWorkload, as_json, assess, cheapest, comparison, lines
    from jpaged.plan.step_times import find_target

    options = config_values(arguments)
    model = options.pop("model", "demo")
    names = list(dict.fromkeys(name for words in arguments.topology for name in words.split(",")))
    if arguments.save is not None and len(names) > 1:
        raise InvalidArgument("--save", f"supports one topology; {len(names)} are given")
    if arguments.save is not None and config.parallel.enable_dp_attention:
        raise InvalidArgument("--save", "does not support --enable-dp-attention")
    report, found = StartupReport(sys.stderr), []
    try:
        _, model_config = find_config(model, config.model.overrides)
        for name in names:
            find_target(name)
            if arguments.save is not None:
                check_can_be_saved(name)
        lengths = _lengths(arguments, options.get("max_model_len") or model_config.max_model_len)
        workload = PlanWorkload(lengths, _load(arguments, lengths), prices, goals)
        for name in names:
            question = Question(model, name, options, arguments.all_programs, arguments.save)
            found.append(assess(compile_plan(question, report.line), workload))
            if not arguments.json:
                print("\n".join(lines(found[-1])), end="\n\n", flush=True)
    except InvalidArgument as error:
        known = {*_OPTIONS, "topology", "save"} - {"model"}
        raise InvalidArgument(to_flag(error.field) if error.field in known else error.field, error.problem) from error
    if arguments.json:
        best = cheapest(found)
        best_name = None if best is None else best.plan.target.name
        print(json_text.dumps({"plans": [as_json(one) for one in found], "cheapest": best_name}, indent=2))
    else:
        for line in comparison(found, workload):
            print(line)
    return 0 if any(one.plan.deployment.fits for one in found) else 1


def _lengths(arguments: argparse.Namespace, max_model_len: int) -> tuple[SequenceLengths, ...]:
    from jpaged.plan.estimate import SequenceLengths

    room = max_model_len - max(arguments.input_len) if arguments.input_len else max_model_len // 4
    outputs = arguments.output_len or [min(_OUTPUT_LEN, max(1, room))]
    inputs = arguments.input_len or [min(_INPUT_LEN, max(1, max_model_len - max(outputs)))]
    for flag, values in (("--input-len", inputs), ("--output-len", outputs)):
        for value in values:
            if value < 1:
                raise InvalidArgument(flag, f"{value} is below the limit of 1")
    if 1 not in (len(inputs), len(outputs)) and len(inputs) != len(outputs):
        raise InvalidArgument(
            "--output-len", f"{len(outputs)} values for {len(inputs)} of --input-len: give the same number, or one"
        )
    count = max(len(inputs), len(outputs))
    inputs, outputs = (values * count if len(values) == 1 else values for values in (inputs, outputs))
    lengths = tuple(SequenceLengths(i, o) for i, o in zip(inputs, outputs, strict=True))
    for pair in lengths:
        if pair.input_len + pair.output_len > max_model_len:
            raise InvalidArgument(
                "--input-len" if arguments.input_len else "--output-len",
                f"{pair.input_len} prompt tokens and {pair.output_len} output tokens exceed max_model_len "
                f"({max_model_len})",
            )
    return lengths


def _load(arguments: argparse.Namespace, lengths: tuple[SequenceLengths, ...]) -> float | None:
    for flag, value in (
        ("--request-rate", arguments.request_rate),
        ("--tokens-per-second", arguments.tokens_per_second),
    ):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InvalidArgument(flag, f"{value:g} is not a finite number above 0")
    if arguments.request_rate is not None:
        return arguments.request_rate * sum(pair.output_len for pair in lengths) / len(lengths)
    return arguments.tokens_per_second


def _goals(arguments: argparse.Namespace) -> PlanGoals | None:
    """Return the goals of the comparison of roles; None without --roles."""
    from jpaged.plan.estimate import PlanGoals

    values = []
    for flag, default, _ in _GOALS:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None and not arguments.roles:
            raise InvalidArgument(flag, "requires --roles")
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InvalidArgument(flag, f"{value:g} is not a finite number above 0")
        values.append(default if value is None else value)
    ttft_ms, itl_ms, gbits_per_s = values
    return PlanGoals(ttft_ms / 1e3, itl_ms / 1e3, gbits_per_s * 1e9 / 8) if arguments.roles else None


def prices_from(text: str | None) -> dict[str, float]:
    """Parse the prices of `--price`; a bare `2.7` applies to every chip, under the empty name.

    Raises:
        InvalidArgument: a price is not a number of 0 or more.
    """
    prices = {}
    for word in text.split(",") if text else ():
        name, _, value = word.rpartition("=")
        try:
            price = float(value)
        except ValueError:
            raise InvalidArgument("--price", f"{value!r} is not a price in USD, such as 2.7 or v6e=2.7") from None
        if not (price >= 0 and math.isfinite(price)):
            raise InvalidArgument("--price", f"{value} is below the limit of 0")
        prices[name] = price
    return prices
