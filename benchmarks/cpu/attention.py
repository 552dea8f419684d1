"""Attention on CPUs: the C++ kernel against the XLA version, on one core and on all.

    decode    one query a row
    prefill   512 queries in all, the last of each row's context

Each core count is a process of its own, pinned before JAX starts its threads. In it the two take turns, A B A B, over
the same arrays, and medians are compared; what a call costs without any work is part of both. Beside the time on the
clock stands the processor's time of all threads, which other processes of the machine disturb less.

    python -m benchmarks.cpu.attention [--shapes qwen2.5-0.5b] [--kinds decode] [--rows 1 8] [--contexts 512] [--cpus 1]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from jpaged import json_text
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import cpu, reference
from jpaged.kernels.paged_attention.measure import SHAPES
from jpaged.kernels.paged_attention.spec import AttentionCall, AttentionSpec, RaggedRows

BLOCK_SIZE = 16
PREFILL_TOKENS = 512
NUM_TURNS = 5
LEAST_SAMPLE_S = 0.004
DTYPES = ("float32", "bfloat16")
KINDS: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison, in milliseconds a call.

    Attributes:
        cpu_ms: of the kernel, on the clock.
        xla_ms: of the XLA version.
        cpu_busy_ms: of the kernel, processor's time.
        xla_busy_ms: of the XLA version.
        error: the largest difference between the two outputs.
    """

    shape: str
    kind: str
    dtype: str
    num_rows: int
    context: int
    num_cpus: int
    cpu_ms: float
    xla_ms: float
    cpu_busy_ms: float
    xla_busy_ms: float
    error: float

    @property
    def speedup(self) -> float:
        """How many times as fast as the XLA version."""
        return self.xla_ms / self.cpu_ms

    @property
    def busy_speedup(self) -> float:
        """The same, of the processor's time."""
        return self.xla_busy_ms / self.cpu_busy_ms


Attention = Callable[[AttentionCall], tuple[jax.Array, jax.Array]]


def measure(shape_name: str, kind: str, dtype: str, num_rows: int, context: int) -> tuple[float, ...]:
    """What a point has behind its sizes."""
    shape = SHAPES[shape_name]
    num_queries = 1 if kind == "decode" else min(context, PREFILL_TOKENS // num_rows)
    width = context // BLOCK_SIZE
    layout = KVLayout(1, num_rows * width, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, jnp.dtype(dtype))
    spec = AttentionSpec(layout, AttentionKind(shape.head_dim**-0.5))
    rng = np.random.default_rng(0)
    some = np.asarray(layout.encode(jnp.asarray(rng.standard_normal(1 << 20, np.float32))))
    pool = jnp.asarray(np.resize(some, layout.shape))
    q_thd = jnp.asarray(rng.standard_normal((num_rows * num_queries, shape.num_heads, shape.head_dim)), dtype)
    tables = (rng.permutation(num_rows * width) + 1).reshape(num_rows, width)
    rows = RaggedRows(
        jnp.arange(num_rows + 1, dtype=jnp.int32) * num_queries,
        jnp.full(num_rows, context, jnp.int32),
        jnp.asarray(tables, jnp.int32),
        jnp.int32(num_rows),
    )
    attentions: tuple[Attention, ...] = (cpu.attend, reference.attend)
    calls = [_bind(attention, spec, q_thd, pool, rows) for attention in attentions]
    outputs = [np.asarray(call()[0], np.float32) for call in calls]
    return *_take_turns(calls), float(np.abs(outputs[0] - outputs[1]).max())


def _bind(
    attention: Attention, spec: AttentionSpec, q_thd: jax.Array, pool: jax.Array, rows: RaggedRows
) -> Callable[[], tuple[jax.Array, jax.Array]]:
    program = jax.jit(lambda q_thd, pool, rows: attention(AttentionCall(q_thd, pool, 0, rows, spec)))
    return lambda: jax.block_until_ready(program(q_thd, pool, rows))


def _take_turns(calls: Sequence[Callable[[], object]]) -> tuple[float, ...]:
    """Median milliseconds of each on the clock, then of each of the processor's."""
    counts = [max(1, int(LEAST_SAMPLE_S / _time(call, 1)[0])) for call in calls]
    samples = [[_time(call, count) for call, count in zip(calls, counts, strict=True)] for _ in range(NUM_TURNS)]
    return tuple(
        1e3 * statistics.median(turn[i][clock] for turn in samples) for clock in range(2) for i in range(len(calls))
    )


def _time(call: Callable[[], object], count: int) -> tuple[float, float]:
    begin, busy_begin = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count, (time.process_time() - busy_begin) / count


def _points(options: argparse.Namespace) -> Iterator[Point]:
    """What a pinned process measures."""
    num_cpus = len(os.sched_getaffinity(0))
    cells = itertools.product(options.shapes, options.kinds, DTYPES, options.rows, options.contexts)
    for shape, kind, dtype, num_rows, context in cells:
        yield Point(shape, kind, dtype, num_rows, context, num_cpus, *measure(shape, kind, dtype, num_rows, context))


def _measure_pinned(options: argparse.Namespace) -> Iterator[Point]:
    """Each core count in a process of its own."""
    allowed = sorted(os.sched_getaffinity(0))
    lists = {name: [str(x) for x in getattr(options, name)] for name in ("shapes", "kinds", "rows", "contexts")}
    arguments = itertools.chain.from_iterable((f"--{name}", *values) for name, values in lists.items())
    command = [sys.executable, "-m", "benchmarks.cpu.attention", *arguments]
    for count in options.cpus or sorted({1, len(allowed)}):
        cores = ",".join(map(str, allowed[:count]))
        with subprocess.Popen([*command, "--cores", cores], stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                yield Point(**json.loads(line))
        if process.returncode:
            raise SystemExit(f"the process pinned to cores {cores} failed")


def _table(points: list[Point]) -> Table:
    table = Table(title="paged attention on CPUs, ms a call")
    for name in (
        "shape",
        "kind",
        "dtype",
        "rows",
        "context",
        "cores",
        "cpu",
        "xla",
        "times",
        "busy: cpu",
        "xla",
        "times",
    ):
        table.add_column(name, justify="left" if name in ("shape", "kind", "dtype") else "right")
    for p in points:
        sizes = (str(p.num_rows), str(p.context), str(p.num_cpus))
        clock = (f"{p.cpu_ms:.3f}", f"{p.xla_ms:.3f}", f"{p.speedup:.2f}")
        busy = (f"{p.cpu_busy_ms:.3f}", f"{p.xla_busy_ms:.3f}", f"{p.busy_speedup:.2f}")
        table.add_row(p.shape, p.kind, p.dtype, *sizes, *clock, *busy)
    return table


def _worst(points: list[Point]) -> dict[str, dict[str, float]]:
    """The least times as fast, on the clock and of the processor's time."""
    decode = [p for p in points if p.kind == "decode"]
    kinds = {"any": points, "decode": decode, "decode, 8 rows and more": [p for p in decode if p.num_rows >= 8]}
    return {
        name: {
            "clock": round(min(p.speedup for p in chosen), 2),
            "busy": round(min(p.busy_speedup for p in chosen), 2),
        }
        for name, chosen in kinds.items()
        if chosen
    }


def _save(points: list[Point]) -> Path:
    records = [{**asdict(p), "speedup": round(p.speedup, 2), "busy_speedup": round(p.busy_speedup, 2)} for p in points]
    found = cpu.kernel()
    vectors = found if isinstance(found, str) else found.vectors
    facts = {"jax": version("jax"), "jaxlib": version("jaxlib"), "vectors": vectors}
    command = f"python -m benchmarks.cpu.attention {' '.join(sys.argv[1:])}".rstrip()
    return save("cpu_attention", command, {**facts, "least_speedup": _worst(points), "points": records})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.attention",
        description="Attention on CPUs: the C++ kernel against the XLA version, on one core and on all.",
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-0.5b", "llama-3-8b"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 4096])
    parser.add_argument("--cpus", type=int, nargs="+", help="core counts; by default one, and all that there are")
    parser.add_argument("--cores", help="measure on these cores, in this process, and print JSON")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
        jax.config.update("jax_platforms", "cpu")
        for point in _points(options):
            print(json_text.dumps(asdict(point)), flush=True)
        return
    points = []
    for point in _measure_pinned(options):
        points.append(point)
        path = _save(points)  # after each: a run that is cut short leaves what it has
        print(f"{len(points)}: {point}", file=sys.stderr)
    Console(width=140).print(_table(points))
    print("least times as fast: " + ", ".join(f"{name} {value}" for name, value in _worst(points).items()))
    print(f"written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
