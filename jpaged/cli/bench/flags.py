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
    "dataset_name": "dataset to send",
    "dataset_path": "file of sharegpt (JSON) or custom (JSON lines)",
    "num_prompts": "requests",
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
        group.add_argument(flag_of(spec.name), **keywords)
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
        for name in ("random", "prefix_repetition", "sharegpt", "custom"):
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


def add_output_json(parser: argparse.ArgumentParser) -> None:
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
