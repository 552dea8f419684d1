"""Flags shared by several benchmarks: data set, percentiles, result files, hardware limits."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from jpaged.bench.datasets import DatasetName, DatasetOptions
from jpaged.cli.options import flag_of
from jpaged.errors import InvalidArgument
from jpaged.hardware import HARDWARE

_HELP: Mapping[str, str] = {
    "dataset_name": "what is sent",
    "dataset_path": "file of sharegpt (JSON) or custom (JSON lines)",
    "num_prompts": "requests",
    "seed": "of the data set and of the arrivals",
    "random_input_len": "tokens of a random prompt",
    "random_output_len": "tokens that follow it",
    "random_range_ratio": "both lengths are drawn from this share below to this share above",
    "random_prefix_len": "tokens that all random prompts begin with, besides",
    "prefix_repetition_prefix_len": "tokens of a prefix",
    "prefix_repetition_suffix_len": "tokens of a suffix",
    "prefix_repetition_num_prefixes": "prefixes",
    "prefix_repetition_output_len": "tokens that follow",
    "sharegpt_output_len": "tokens that follow (default: as many as the conversation's second turn has)",
    "custom_output_len": "tokens that follow a line without output_tokens",
    "prompt_format": "whether random prompts are sent as token ids, or as texts for servers that take no ids",
    "no_oversample": "send a file with too few requests once, instead of repeating some",
    "disable_shuffle": "keep the order of the file, or of the prefixes",
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
        group.add_argument(flag_of(spec.name), **keywords)
    group.add_argument("--input-len", type=int, metavar="N", help="the same as --random-input-len")
    group.add_argument("--output-len", type=int, metavar="N", help="output tokens, whatever the data set")


def dataset_from(arguments: argparse.Namespace) -> DatasetOptions:
    """Return the data set options of a command line.

    Raises:
        InvalidArgument: a value is out of range; named as a flag.
    """
    values = {spec.name: getattr(arguments, f"dataset_{spec.name}") for spec in fields(DatasetOptions)}
    if arguments.input_len is not None:
        values["random_input_len"] = arguments.input_len
    if arguments.output_len is not None:
        for name in ("random", "prefix_repetition", "sharegpt", "custom"):
            values[f"{name}_output_len"] = arguments.output_len
    return DatasetOptions(**values)


def add_hardware_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the hardware of the limits."""
    parser.add_argument(
        "--hardware",
        default="auto",
        choices=("auto", "none", "cpu", *HARDWARE),
        help="whose bandwidth and FLOPs the limit is computed from: auto measures a CPU of this machine and looks "
        "accelerators up, cpu measures, none leaves it out (default: auto)",
    )


def add_output_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the result file."""
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the numbers")


def require_writable(flag: str, path: Path | None) -> None:
    """Reject an output file that cannot be written, before anything is measured."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InvalidArgument(flag, f"{path} is a folder, or in none")


def require_range(flag: str, value: float, low: float, high: float = 2**31 - 1) -> None:
    """Reject a number out of range."""
    if not low <= value <= high:
        raise InvalidArgument(flag, f"{value} is out of range: must be from {low} to {high}")
