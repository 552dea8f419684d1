"""The subcommand `bench probe`: measured peak of this machine, from which other benchmarks derive limits."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

from jpaged import json_text
from jpaged.bench import limits
from jpaged.bench.limits import HardwareLimits
from jpaged.errors import InternalError
from jpaged.hardware import find_hardware

DESCRIPTION = """\
Measure the best case of this machine: memory bandwidth, and FLOP/s of matrix products.

    jpaged bench probe --dtype bfloat16

On a CPU, the result is the best of numpy (float32) and XLA (in --dtype), on all cores available to this process. For
an accelerator in the table of `jpaged plan`, it is the data sheet's value. Other benchmarks run this command in a
child process.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the type and the output format."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="data type of the matrix products (default: float32)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Print the two numbers."""
    found = _here(arguments.dtype)
    if arguments.json:
        print(json_text.dumps(asdict(found)))
    else:
        rates = f"reads {found.bytes_per_s / 1e9:.1f} GB/s, computes {found.flops_per_s / 1e9:.1f} GFLOP/s"
        print(f"{rates} ({found.source})")
    return 0


def _here(dtype: str) -> HardwareLimits:
    from jpaged.kernels.paged_attention.measure import survey  # imports jax

    device = survey([], "demo", dtype, "auto", 0).device
    if (known := find_hardware(device.kind)) is not None:
        return limits.of_accelerator(known.name, 1)
    if device.kind != "cpu":
        return HardwareLimits(
            device.limits.bytes_per_s, device.limits.flops_per_s, f"measured: XLA on {device.kind}, {dtype}"
        )
    plain = limits.probe()
    return HardwareLimits(
        max(plain.bytes_per_s, device.limits.bytes_per_s),
        max(plain.flops_per_s, device.limits.flops_per_s),
        f"measured: the best of numpy and XLA on {device.kind}, {dtype}",
    )


def probed(dtype: str) -> HardwareLimits:
    """Return the limits of this machine, measured by a child process, so that jax is not loaded here."""
    command = [sys.executable, "-m", "jpaged", "bench", "probe", "--dtype", dtype, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return HardwareLimits(**json.loads(done.stdout))
    except (ValueError, TypeError) as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InternalError(f"the probe of this machine exited with code {done.returncode}: {last}") from error


def get_limits(hardware: str, dtype: str, num_devices: int = 1) -> tuple[HardwareLimits | None, str]:
    """Return the limits for `--hardware`, or the reason why there are none."""
    if hardware == "none":
        return None, "disabled by --hardware none"
    if hardware in ("auto", "cpu"):
        return probed(dtype), ""
    return limits.of_accelerator(hardware, num_devices), ""
