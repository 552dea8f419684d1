"""The subcommand `convert`: a model in another format."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from jpaged.cli.options import to_flag
from jpaged.cli.startup import StartupReport
from jpaged.errors import InvalidArgument
from jpaged.types import require_whole_characters

DESCRIPTION = """\
Write a model, or a GGUF file, as safetensors in Hugging Face layout or as Orbax, tensor by tensor.

    jpaged convert meta-llama/Llama-3.1-8B-Instruct ./llama-orbax --to orbax
    jpaged convert ./llama-orbax ./llama-hf --to safetensors --max-shard-size 2GiB
    jpaged convert ./llama-hf ./llama-int4 --to safetensors --quantize int4

All of these folders can be served. The output is complete and bit-identical to the input unless --dtype or --quantize
is given; block-quantized GGUF tensors become float32.
"""

_MAX_DIGITS = 18
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("KMGT", start=1)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the source, the destination, and the format."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="model to convert: demo, a folder in either format, a GGUF file, or a Hugging Face Hub id",
    )
    parser.add_argument("destination", metavar="DESTINATION", type=Path, help="new output folder; parents are created")
    parser.add_argument("--to", required=True, choices=("orbax", "safetensors"), help="output format")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="data type of the tensors; auto: keep each tensor's own type (default: auto)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default=None,
        help="maximum size of one tensor file, such as 5GiB or 500MB (default: 5GiB for safetensors; Orbax's own "
        "default)",
    )
    parser.add_argument(
        "--quantize",
        choices=("int8", "int4", "fp8"),
        help="quantize the layers' weight matrices, in the compressed-tensors format",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing checkpoint at DESTINATION")


def run(arguments: argparse.Namespace) -> int:
    """Convert the folder; return 0."""
    for name, text in (("SOURCE", arguments.source), ("DESTINATION", str(arguments.destination))):
        require_whole_characters(name, text)  # Orbax requires it
    size = None if arguments.max_shard_size is None else size_in_bytes(arguments.max_shard_size)

    from jpaged.checkpoints.conversion import ConversionOptions, convert_folder, on_host  # imports jax
    from jpaged.checkpoints.hub import find_folder

    dtype = None if arguments.dtype == "auto" else arguments.dtype
    report = StartupReport(sys.stderr)
    on_host()

    def progress(number: int, total: int, name: str) -> None:
        report.progress(name, number, total)

    try:
        options = ConversionOptions(arguments.to, dtype, size, arguments.force, arguments.quantize)
        convert_folder(find_folder(arguments.source), arguments.destination, options, progress)
    except InvalidArgument as error:
        if error.field not in ("dtype", "max_shard_size", "quantization"):
            raise
        name = "quantize" if error.field == "quantization" else error.field
        raise InvalidArgument(to_flag(name), error.problem) from error
    report.line(f"written to {arguments.destination}")
    return 0


def size_in_bytes(text: str) -> int:
    """Parse a size such as `5GiB`: KB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB of 1024.

    Raises:
        InvalidArgument: it is not a number with one of those units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or len(match[1]) > _MAX_DIGITS:
        raise InvalidArgument(
            "--max-shard-size",
            f"{text!r} is not a size: must be a number and one of {', '.join(unit for unit in _UNITS if unit)}",
        )
    return int(float(match[1]) * _UNITS[match[2]])
