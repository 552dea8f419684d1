"""Flags shared by several benchmarks, and a result as a table on the terminal.

The flags set the data set, percentiles, result files and hardware limits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from jpaged.bench.datasets import DatasetName, DatasetOptions
from jpaged.bench.metrics import LATENCIES
from jpaged.cli.options import to_flag
from jpaged.errors import InvalidArgument
from jpaged.hardware import HARDWARE

_HELP: Mapping[str, str] = {
    "dataset_name": "dataset to send",
    "dataset_path": "file of sharegpt (JSON) or custom (JSON lines); file or folder of a trace",
    "num_prompts": "requests; conversations of multi_turn",
    "seed": "seed of the dataset and the arrivals",
    "random_input_len": "tokens per random prompt",
    "random_output_len": "output tokens per random prompt",
    "random_range_ratio": "relative spread of both lengths: uniform from 1 - N to 1 + N times the mean",
    "random_prefix_len": "length of an additional prefix shared by all random prompts, in tokens",
    "prefix_repetition_prefix_len": "tokens per prefix",
    "prefix_repetition_suffix_len": "tokens per suffix",
    "prefix_repetition_num_prefixes": "prefixes",
    "prefix_repetition_output_len": "output tokens",
    "sharegpt_output_len": "output tokens (default: as many as the conversation's second turn has)",
    "custom_output_len": "output tokens for a line without output_tokens",
    "multi_turn_num_turns": "turns per conversation",
    "multi_turn_prefix_len": "tokens before the first turn, shared by all conversations",
    "multi_turn_input_len": "new prompt tokens per turn",
    "multi_turn_output_len": "output tokens per turn",
    "multi_turn_delay": "seconds from the end of an answer to the next turn",
    "trace_block_size": "tokens of a block of hash_ids, for traces that do not state it",
    "trace_speedup": "factor by which recorded times and delays are shortened",
    "trace_max_input_len": "skip requests of a trace with longer prompts, in tokens (default: no limit)",
    "trace_max_output_len": "limit the output tokens of a trace's requests (default: no limit)",
    "prompt_format": "format of random prompts: token ids, or text for servers that accept no ids",
    "no_oversample": "send a file with too few requests once, instead of repeating some of them",
    "disable_shuffle": "keep the order of the file or of the prefixes",
}
_CHOICES: Mapping[str, tuple[str, ...]] = {"dataset_name": get_args(DatasetName), "prompt_format": ("ids", "text")}


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for every field of DatasetOptions, and the two general lengths."""
    group = parser.add_argument_group("data set")
    for spec in fields(DatasetOptions):
        keywords: dict[str, Any] = {"dest": f"dataset_{spec.name}", "default": spec.default, "help": _HELP[spec.name]}
        if isinstance(spec.default, bool):
            keywords["action"] = "store_true"
        elif spec.name in _CHOICES:
            keywords["choices"] = _CHOICES[spec.name]
        elif spec.name == "dataset_path":
            keywords.update(type=Path, metavar="FILE")
        else:
            keywords.update(type=float if isinstance(spec.default, float) else int, metavar="N")
        if spec.default is not None and not isinstance(spec.default, bool):
            keywords["help"] += f" (default: {spec.default})"
        group.add_argument(to_flag(spec.name), **keywords)
    group.add_argument("--input-len", type=int, metavar="N", help="the same as --random-input-len")
    group.add_argument("--output-len", type=int, metavar="N", help="output tokens per request, for any dataset")


def dataset_from(arguments: argparse.Namespace) -> DatasetOptions:
    """Return the data set options of a command line.

    Raises:
        InvalidArgument: a value is out of range; named as a flag.
    """
    values = {spec.name: getattr(arguments, f"dataset_{spec.name}") for spec in fields(DatasetOptions)}
    if arguments.input_len is not None:
        values["random_input_len"] = arguments.input_len
    if arguments.output_len is not None:
        for name in ("random", "prefix_repetition", "sharegpt", "custom", "multi_turn"):
            values[f"{name}_output_len"] = arguments.output_len
    return DatasetOptions(**values)


def add_hardware_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the hardware of the limits."""
    parser.add_argument(
        "--hardware",
        default="auto",
        choices=("auto", "none", "cpu", *HARDWARE),
        help="machine whose memory bandwidth and FLOP/s set the limit; auto: measured for a local CPU, looked up "
        "for accelerators; cpu: measured; none: no limit (default: auto)",
    )


def add_simulated_engine_flags(
    group: argparse._ActionsContainer, *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int
) -> None:
    """Add flags for the scheduler and the KV cache of a simulated engine, with these defaults."""
    for name, default, what in (
        ("max-num-seqs", max_num_seqs, "maximum number of sequences per step"),
        ("max-num-batched-tokens", max_num_batched_tokens, "maximum number of tokens per step"),
        ("block-size", block_size, "tokens per KV block"),
        ("num-host-blocks", 0, "host KV blocks of each engine, for swapping and for blocks evicted from the device"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV blocks of shared prefixes (default: on)",
    )


def add_output_json(parser: argparse._ActionsContainer) -> None:
    """Add the flag for the result file."""
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the results to this file")


def require_writable(flag: str, path: Path | None) -> None:
    """Reject an output file that cannot be written, before anything is measured."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InvalidArgument(flag, f"{path} is a folder, or its folder does not exist")


def require_range(flag: str, value: float, low: float, high: float = 2**31 - 1) -> None:
    """Reject a number out of range."""
    if not low <= value <= high:
        raise InvalidArgument(flag, f"{value} is out of range: must be from {low} to {high}")


_ROWS: Mapping[str, str] = {
    "completed": "requests that succeeded",
    "failed": "requests that failed",
    "num_requests": "requests",
    "num_steps": "steps",
    "duration": "seconds",
    "elapsed_time": "seconds",
    "total_input_tokens": "prompt tokens",
    "total_output_tokens": "generated tokens",
    "request_throughput": "requests/s",
    "requests_per_second": "requests/s",
    "request_goodput": "requests/s within the objectives (goodput)",
    "cached_share": "prompt tokens from the prefix cache",
    "output_throughput": "generated tokens/s",
    "output_tokens_per_second": "generated tokens/s",
    "max_output_tokens_per_s": "peak messages per second",
    "total_token_throughput": "all tokens/s",
    "tokens_per_second": "all tokens/s",
    "max_concurrent_requests": "peak concurrent requests",
    "avg_latency": "mean batch latency, s",
    "std_latency": "standard deviation, s",
    "limit_seconds": "seconds at the machine's limit",
    "limit_tpot_ms": "time per output token at the machine's limit, ms",
    "mbu": "memory bandwidth utilization (MBU)",
    "mfu": "FLOP/s utilization (MFU)",
    "share_of_limit": "fraction of the machine's limit",
}
_SHARES = ("mbu", "mfu", "share_of_limit", "cached_share")
_TURNS: Mapping[str, str] = {
    "turn": "turn",
    "completed": "requests",
    "failed": "failed",
    "mean_input_tokens": "prompt tokens",
    "cached_share": "cached",
    "mean_computed_tokens": "computed tokens",
    "median_ttft_ms": "TTFT, ms",
    "median_e2el_ms": "E2EL, ms",
}
_MAX_TURNS = 32
"""Maximum number of turns on the terminal; the result file has all."""


def print_result(console: Console, result: Mapping[str, Any], title: str, metrics: Sequence[str] = ()) -> None:
    """Print the numbers of a result, with latencies in a separate table."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for key, words in _ROWS.items():
        if (value := result.get(key)) is not None:
            table.add_row(words, _text(key, value))
    console.print(table)
    if metrics:
        console.print(_latencies(result, metrics))
        legend = "; ".join(f"{name.upper()}: {LATENCIES[name]}" for name in metrics)
        console.print(legend, highlight=False)


def print_turns(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table of a result's turns, if it has any: medians of latencies, means of counts."""
    rows = result.get("turns") or []
    if not rows:
        return
    table = Table(title="turns", title_justify="left")
    keys = [key for key in _TURNS if any(key in row for row in rows)]
    for key in keys:
        table.add_column(_TURNS[key], justify="right")
    for row in rows[:_MAX_TURNS]:
        table.add_row(*(_text(key, row[key]) if key in row else "-" for key in keys))
    console.print(table)
    if len(rows) > _MAX_TURNS:
        console.print(f"{len(rows) - _MAX_TURNS} more turns: see the result file", highlight=False)


def _latencies(result: Mapping[str, Any], metrics: Sequence[str]) -> Table:
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("latency")
    words = [key.removesuffix(f"_{metrics[0]}_ms") for key in result if key.endswith(f"_{metrics[0]}_ms")]
    words = [word for word in words if f"{word}_{metrics[0]}_ms" in result and not word.startswith("limit")]
    for word in words:
        table.add_column(word, justify="right")
    for name in metrics:
        cells = [f"{result[f'{word}_{name}_ms']:.2f}" for word in words]
        table.add_row(name.upper(), *cells)
    return table


def format_value(value: float | str | None) -> str:
    """Return a cell of a table of simulated results: four digits of a float, and - for None."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(key: str, value: float) -> str:
    if key in _SHARES:
        return f"{100 * value:.1f} %"
    return f"{value}" if isinstance(value, int) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
