"""Bytes of weights that a decode of one row reads: a mixture of experts beside a dense feed-forward of the same size.

    taskset -c 0 python -m benchmarks.cpu.experts

Linux counts the pages that are touched (`/proc/self/clear_refs`), of 2 MiB each where it has such; times are medians of
calls one after the other.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jpaged.kernels import matmul
from jpaged.kernels.experts import ExpertWeights, apply_experts, route
from jpaged.kernels.mixture_kind import SILU, Routing

WIDTH, INNER = 1024, 1024
ROUTING = Routing(num_experts=32, top_k=4)
NUM_RUNS = 30


def touched_bytes() -> int:
    """Bytes of the pages that were read or written since they were last forgotten."""
    smaps = Path("/proc/self/smaps").read_text(encoding="ascii")
    return sum(1024 * int(found) for found in re.findall(r"^Referenced: +(\d+) kB", smaps, re.MULTILINE))


def measure(run: Callable[[jax.Array], jax.Array]) -> tuple[float, float]:
    """(MiB that a call touches beyond what a look at the counters does, seconds)."""
    rows = jax.random.normal(jax.random.key(1), (NUM_RUNS + 2, 1, WIDTH))
    run(rows[0]).block_until_ready()
    forget = Path("/proc/self/clear_refs")
    forget.write_text("1", encoding="ascii")
    touched_bytes()
    before = touched_bytes()
    run(rows[1]).block_until_ready()
    mib = (touched_bytes() - before) / 2**20
    times = []
    for row in rows[2:]:
        begin = time.perf_counter()
        run(row).block_until_ready()
        times.append(time.perf_counter() - begin)
    return mib, statistics.median(times)


def main() -> None:
    """Prints both."""
    num_experts, packer = ROUTING.num_experts, matmul.loaded().packer(SingleDeviceSharding(jax.devices()[0]))

    def pack(width: int, num_columns: int) -> matmul.PackedMatrix:
        return packer.pack(
            jax.random.normal(jax.random.key(0), (width, num_experts, num_columns)), num_parts=num_experts
        )

    weights = ExpertWeights(pack(WIDTH, INNER), pack(WIDTH, INNER), pack(INNER, WIDTH))
    router = jax.random.normal(jax.random.key(2), (WIDTH, num_experts))
    gate_up = packer.pack(jnp.ones((WIDTH, 2, num_experts * INNER)), num_parts=2)
    down = packer.pack(jnp.ones((num_experts * INNER, WIDTH)))

    @jax.jit
    def mixture(x_te: jax.Array, weights: ExpertWeights) -> jax.Array:
        return apply_experts(x_te, route(x_te @ router, ROUTING, jnp.int32(1)), weights, SILU)

    @jax.jit
    def dense(x_te: jax.Array, gate_up: matmul.PackedMatrix, down: matmul.PackedMatrix) -> jax.Array:
        kernel = matmul.loaded()
        return kernel.multiply(kernel.multiply(x_te, gate_up, jnp.int32(1)), down, jnp.int32(1))

    size = 3 * num_experts * WIDTH * INNER * 4 / 2**20
    chosen = size * ROUTING.top_k / num_experts
    print(f"weights {size:.0f} MiB, {ROUTING.top_k} of {num_experts} experts: {chosen:.0f} MiB")
    for name, run in (("mixture", lambda x: mixture(x, weights)), ("dense", lambda x: dense(x, gate_up, down))):
        mib, seconds = measure(run)
        print(f"{name:8} {mib:6.0f} MiB touched  {1e3 * seconds:7.2f} ms a row")


if __name__ == "__main__":
    main()
