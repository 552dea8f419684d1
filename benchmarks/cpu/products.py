"""Products with quantized matrices on CPUs beside the same with bfloat16: the C++ kernel, on one core.

As many copies of a matrix as exceed the caches are multiplied one after the other in one program, as the layers of a
model are. The formats take turns, A B C A B C, and the median of the turns counts, in processor's time: what a row of
decoding waits for is memory, so that the gain is about what the bytes say.

    taskset -c 0 python -m benchmarks.cpu.products [--rows 1 16 128] [--formats int8 int4] [--shapes 4096x4096]
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from jpaged.kernels.matmul import PackedMatrix, ProductKernel, kernel
from jpaged.kernels.matmul.quantized import MatrixFormat, quantize

NUM_TURNS = 9
LEAST_TURN_S = 0.02
LEAST_BYTES = 192 << 20
"""What all copies have in bfloat16: in 4 bits they are still more than the caches."""
BF16 = "bf16"
FORMATS = {
    "int8": MatrixFormat("int8"),
    "w8a8": MatrixFormat("int8", activations="int8"),
    "int8g128": MatrixFormat("int8", 128),
    "int4": MatrixFormat("int4", 128),
    "int4g32": MatrixFormat("int4", 32),
    "int8g32": MatrixFormat("int8", 32),
    "int4m32": MatrixFormat("int4", 32, has_zeros=True, has_whole_zeros=False),
    "int4z": MatrixFormat("int4", 128, has_zeros=True),
    "mxfp4": MatrixFormat("mxfp4", 32),
    "fp8": MatrixFormat("fp8"),
    "fp8b128": MatrixFormat("fp8", 128),
}
A8 = "-a8"
"""Suffix of a format whose rows are rounded to int8 (`--activation-dtype int8`)."""
NAMES = (*FORMATS, *(f"{name}{A8}" for name, form in FORMATS.items() if not form.activations and form.values != "fp8"))


@dataclass(frozen=True, slots=True)
class Point:
    """One format at one size, in milliseconds a product."""

    format: str
    shape: str
    num_rows: int
    ms: float
    times_bf16: float
    gigabytes_per_s: float


@functools.partial(jax.jit, static_argnames="run")
def multiply_all(x: jax.Array, matrices: list[PackedMatrix], run: ProductKernel) -> jax.Array:
    num_rows = jnp.int32(len(x))
    total = jnp.zeros((), jnp.float32)
    for matrix in matrices:
        y = run.multiply(x, matrix, num_rows)
        total = total + y[0, 0].astype(jnp.float32)
        x = x + total.astype(x.dtype) * 0  # one after the other
    return total


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def seconds(x: jax.Array, matrices: list[PackedMatrix], run: ProductKernel) -> float:
    """Processor's time of a product, of as many rounds as make a turn."""
    num_rounds, spent, begin = 0, 0.0, time.process_time()
    while spent < LEAST_TURN_S:
        jax.block_until_ready(multiply_all(x, matrices, run))
        num_rounds += 1
        spent = time.process_time() - begin
    return spent / num_rounds / len(matrices)


def measure(shape: str, rows: list[int], formats: list[str], run: ProductKernel) -> list[Point]:
    depth, width = (int(size) for size in shape.split("x"))
    sharding = SingleDeviceSharding(jax.devices()[0])
    weights = np.random.default_rng(0).normal(scale=0.02, size=(depth, width)).astype(ml_dtypes.bfloat16)
    num_copies = -(-LEAST_BYTES // weights.nbytes)
    names = [BF16, *formats]
    matrices = {}
    for name in names:
        packer = run.packer(sharding, rounds_rows=name.endswith(A8))
        leaf = jnp.asarray(weights) if name == BF16 else quantize(weights, FORMATS[name.removesuffix(A8)])
        matrices[name] = [packer.pack(leaf) for _ in range(num_copies)]
    points = []
    for num_rows in rows:
        x = jnp.asarray(np.random.default_rng(1).normal(size=(num_rows, depth)), jnp.bfloat16)
        for name in names:
            seconds(x, matrices[name], run)
        turns = [[seconds(x, matrices[name], run) for name in names] for _ in range(NUM_TURNS)]
        spent = dict(zip(names, (median(times) for times in zip(*turns, strict=True)), strict=True))
        for name in names:
            rate = num_bytes(matrices[name]) / num_copies / spent[name] / 1e9
            points.append(Point(name, shape, num_rows, 1e3 * spent[name], spent[BF16] / spent[name], rate))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.products", description="Quantized products on one core."
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--shapes", nargs="+", default=["2048x2560", "2048x11264", "5632x2048"], help="KxN")
    parser.add_argument("--formats", nargs="+", default=list(NAMES), choices=NAMES)
    options = parser.parse_args()
    run = kernel()
    if isinstance(run, str):
        raise SystemExit(run)
    points = [p for shape in options.shapes for p in measure(shape, options.rows, options.formats, run)]
    table = Table("K x N", "rows", "format", "ms", "x bf16", "GB/s")
    for point in points:
        numbers = (f"{point.ms:.3f}", f"{point.times_bf16:.2f}", f"{point.gigabytes_per_s:.1f}")
        table.add_row(point.shape, str(point.num_rows), point.format, *numbers)
    Console().print(table)
    command = f"python -m benchmarks.cpu.products {' '.join(sys.argv[1:])}".rstrip()
    facts = {"num_cpus": len(os.sched_getaffinity(0)), "core": run.core, "unit": "milliseconds of processor time"}
    path: Path = save("cpu_products", command, {**facts, "points": [asdict(point) for point in points]})
    Console().print(f"saved to {path}")


if __name__ == "__main__":
    main()
