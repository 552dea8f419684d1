"""Speed of attention on this device: paged compared to contiguous, and to the limits of the device.

    paged        blocks scattered over the pool, as in serving
    in order     the same kernel with consecutive blocks: the cost of scattering
    contiguous   jax.nn.dot_product_attention over dense [S, context, K, D]: the cost of paging
    limit        decode: bytes of keys, values, queries and outputs over the measured copy bandwidth
                 prefill: FLOPs of the visible scores over the measured rate of matmuls; the greater of the two

A program runs the operation in a loop in which each turn reads the output of the previous one. The time of one is the
slope between two counts, which excludes the start of a program. The variants alternate, and medians are compared.

On GPUs a loop whose number of turns the program computes waits for the host in each turn. The loop is static there,
and a count is a number of calls, which do not wait for each other. Operands are random, because zeros take less power:
an H200 multiplied them 13 % faster.

`SHAPES` are the head shapes of real models, for tests and benchmarks.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import Backend
from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.api import choose, paged_attention
from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention in a published configuration."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float | None = None


SHAPES: dict[str, AttentionShape] = {
    "demo": AttentionShape(8, 4, 32),
    "qwen2.5-0.5b": AttentionShape(14, 2, 64),
    "smollm2-135m": AttentionShape(9, 3, 64),
    "tinyllama-1.1b": AttentionShape(32, 4, 64),
    "llama-2-7b": AttentionShape(32, 32, 128),
    "llama-3-8b": AttentionShape(32, 8, 128),
    "mistral-7b-v0.1": AttentionShape(32, 8, 128, sliding_window=4096),
    "gemma-2-2b": AttentionShape(8, 4, 256, sliding_window=4096, soft_cap=50.0),
}


CHUNK_TOKENS = 2048
"""Maximum queries of a prefill cell: the last tokens of the context."""

_MAX_DENSE_SCORES = 1 << 30  # elements: larger dense prefills are skipped, because XLA materializes every score
_NUM_TURNS = 5
_MIN_SECONDS = 0.02  # of the longer of two runs whose difference is taken
_STATIC_TURNS = 16
"""Turns of a call on GPUs: long enough that the next call is dispatched before its end."""
_NUM_RANDOM_BLOCKS = 256
"""Blocks of random numbers, which repeat in a larger pool."""

Run = Callable[[int], float]  # number of turns, or of calls -> seconds


@dataclass(frozen=True, slots=True)
class TimedLoop:
    """A compiled loop over an operation.

    Attributes:
        run: runs it and returns the seconds.
        turns: turns of a unit of `run`'s argument: 1, or those of a call.
    """

    run: Run
    turns: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the table.

    Attributes:
        kind: one query per row, or a chunk of a prompt.
        num_seqs: rows.
        context: tokens of each row's context.
        block_size: tokens of a block.
    """

    kind: Literal["decode", "prefill"]
    num_seqs: int
    context: int
    block_size: int

    @property
    def num_queries(self) -> int:
        """Queries of one row."""
        return 1 if self.kind == "decode" else min(self.context, CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of the device, measured with XLA's own programs.

    Attributes:
        bytes_per_s: read and written by a copy of an array that no cache holds.
        flops_per_s: of a large matmul in the queries' type.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of one operation in each variant; None if the dense one would not fit."""

    cell: Cell
    backend: Backend
    paged_s: float
    in_order_s: float
    contiguous_s: float | None
    limit_s: float

    @property
    def limit_share(self) -> float:
        """Share of the device's limit that the paged operation reaches, 0 to 1."""
        return self.limit_s / self.paged_s

    @property
    def over_contiguous(self) -> float | None:
        """Time of paged over that of contiguous: 1.05 is five percent slower."""
        return None if self.contiguous_s is None else self.paged_s / self.contiguous_s


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device and the versions of a measurement."""

    kind: str
    jax_version: str
    limits: DeviceLimits


@dataclass(frozen=True, slots=True)
class Survey:
    """Cells that were measured, and those that were not, with the reason."""

    device: DeviceFacts
    rows: tuple[Measurement, ...]
    left_out: tuple[tuple[Cell, str], ...]


def survey(cells: Sequence[Cell], shape_name: str, dtype_name: str, backend: str, max_bytes: int) -> Survey:
    """Time every cell on JAX's first device, except those with more than `max_bytes` of keys and values."""
    shape, dtype, device = SHAPES[shape_name], jnp.dtype(dtype_name), jax.devices()[0]
    is_cpu = device.platform == "cpu"
    limits = measure_limits(dtype, num_bytes=1 << (28 if is_cpu else 31), width=1024 if is_cpu else 8192)
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    rows: list[Measurement] = []
    left_out: list[tuple[Cell, str]] = []
    for cell in cells:
        num_bytes = cell.num_seqs * cell.context * token_bytes
        if num_bytes > max_bytes:
            gib = num_bytes / 2**30, max_bytes / 2**30
            left_out.append((cell, f"{gib[0]:.1f} GiB of keys and values exceed the limit of {gib[1]:g} GiB"))
            continue
        try:
            rows.append(measure(cell, shape, dtype, backend, limits))
        except Unsupported as error:
            left_out.append((cell, str(error)))
    return Survey(DeviceFacts(device.device_kind, jax.__version__, limits), tuple(rows), tuple(left_out))


def measure_limits(dtype: jnp.dtype, *, num_bytes: int, width: int) -> DeviceLimits:
    """Time a copy of `num_bytes` and a matmul of two matrices of `width` x `width`."""

    def copy(x: jax.Array) -> jax.Array:
        return x + 1

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(dtype)

    copied = median_seconds([looped(copy, jax.random.normal(jax.random.key(0), (num_bytes // 4,)))])[0]
    multiplied = median_seconds([looped(product, *random_factors(width, dtype))])[0]
    return DeviceLimits(2 * num_bytes / copied, 2 * width**3 / multiplied)


def random_factors(width: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return two random square matrices: products with the second have the variance of the first, however often."""
    x, y = jax.random.normal(jax.random.key(0), (2, width, width))
    return x.astype(dtype), (y * width**-0.5).astype(dtype)


def random_pool(layout: KVLayout) -> jax.Array:
    """Return a pool of random keys and values, of which a large one repeats some blocks."""

    def fill() -> jax.Array:
        num_blocks = min(layout.shape[0], _NUM_RANDOM_BLOCKS)
        blocks = layout.encode(jax.random.normal(jax.random.key(1), (num_blocks, *layout.shape[1:])))
        return blocks[jnp.arange(layout.shape[0]) % num_blocks]

    return jax.jit(fill)()


def measure(cell: Cell, shape: AttentionShape, dtype: jnp.dtype, name: str, limits: DeviceLimits) -> Measurement:
    """Time one cell on JAX's first device.

    Args:
        cell: the call.
        shape: heads.
        dtype: of queries, keys and values.
        name: of a backend, or `auto`.
        limits: of the device.

    Raises:
        Unsupported: the backend does not support the call; has the reason.
    """
    blocks_per_seq = -(-cell.context // cell.block_size)
    num_blocks = cell.num_seqs * blocks_per_seq
    pool_layout = KVLayout(1, num_blocks, cell.block_size, shape.num_kv_heads, shape.head_dim, dtype)
    queries = Queries(shape.num_heads, dtype, cell.num_seqs, blocks_per_seq, cell.num_seqs * cell.num_queries)
    chosen = choose(name, jax.devices()[0], pool_layout, queries)
    layout = chosen.layout
    spec = AttentionSpec(layout, AttentionKind(shape.head_dim**-0.5, shape.sliding_window, shape.soft_cap))
    pool = random_pool(layout)
    q_thd = jax.random.normal(jax.random.key(0), (cell.num_seqs * cell.num_queries, shape.num_heads, shape.head_dim))
    q_thd = q_thd.astype(dtype)

    def paged(ids: np.ndarray) -> TimedLoop:
        rows = RaggedRows(
            jnp.arange(cell.num_seqs + 1, dtype=jnp.int32) * cell.num_queries,
            jnp.full(cell.num_seqs, cell.context, jnp.int32),
            jnp.asarray(ids.reshape(cell.num_seqs, blocks_per_seq), jnp.int32),
            jnp.int32(cell.num_seqs),
        )
        return looped(functools.partial(_attend, spec, chosen.backend), q_thd, pool, rows)

    ids = np.arange(1, num_blocks + 1)
    runs = [paged(np.random.default_rng(0).permutation(ids)), paged(ids)]
    num_scores = cell.num_seqs * shape.num_heads * cell.num_queries * cell.context
    if num_scores <= _MAX_DENSE_SCORES:
        kv_shape = cell.num_seqs, cell.context, shape.num_kv_heads, shape.head_dim
        kv = (jax.random.normal(jax.random.key(seed), kv_shape, dtype) for seed in (2, 3))
        runs.append(looped(functools.partial(_dense, cell, spec), q_thd, *kv))
    seconds = median_seconds(runs)
    contiguous_s = seconds[2] if len(seconds) > 2 else None
    return Measurement(
        cell, chosen.backend, seconds[0], seconds[1], contiguous_s, compute_limit(cell, shape, dtype, limits)
    )


def compute_limit(cell: Cell, shape: AttentionShape, dtype: jnp.dtype, limits: DeviceLimits) -> float:
    """Return the minimum seconds that the device needs to move the bytes or to multiply.

    A query sees the keys up to its own, or the window's; a chunk reads each key once.
    """
    window = shape.sliding_window or cell.context
    first = cell.context - cell.num_queries
    num_keys = min(cell.context, cell.num_queries - 1 + window)
    num_scores = sum(min(first + i + 1, window) for i in range(cell.num_queries)) * shape.num_heads
    row_bytes = shape.head_dim * dtype.itemsize
    num_bytes = 2 * num_keys * shape.num_kv_heads * row_bytes + 2 * cell.num_queries * shape.num_heads * row_bytes
    flops = 4 * shape.head_dim * num_scores
    return cell.num_seqs * max(num_bytes / limits.bytes_per_s, flops / limits.flops_per_s)


def _attend(spec: AttentionSpec, backend: Backend, q_thd: jax.Array, pool: jax.Array, rows: RaggedRows) -> jax.Array:
    return paged_attention(q_thd, pool, jnp.int32(0), rows, spec, backend=backend)[0]


def _dense(cell: Cell, spec: AttentionSpec, q_thd: jax.Array, k_stkd: jax.Array, v_stkd: jax.Array) -> jax.Array:
    q_sqhd = q_thd.reshape(cell.num_seqs, cell.num_queries, *q_thd.shape[1:])
    distance_qt = (
        cell.context - cell.num_queries + jnp.arange(cell.num_queries)[:, None] - jnp.arange(cell.context)[None]
    )
    is_seen_qt = (distance_qt >= 0) & (distance_qt < (spec.kind.sliding_window or cell.context))
    mask = None if cell.kind == "decode" and spec.kind.sliding_window is None else is_seen_qt[None, None]
    return jax.nn.dot_product_attention(q_sqhd, k_stkd, v_stkd, mask=mask, scale=spec.kind.scale).reshape(q_thd.shape)


def looped(act: Callable[..., jax.Array], x: jax.Array, *rest: object, is_static: bool | None = None) -> TimedLoop:
    """Return a loop over an operation, each turn with the result of the previous one.

    Args:
        act: the operation.
        x: its first argument in the first turn.
        rest: its other arguments.
        is_static: the number of turns is compiled in; None does that on GPUs.
    """
    if is_static is None:
        is_static = jax.default_backend() == "gpu"

    @functools.partial(jax.jit, static_argnums=0 if is_static else ())
    def program(num_turns: jax.Array | int, x: jax.Array, *rest: object) -> jax.Array:
        return jax.lax.fori_loop(0, num_turns, lambda _, x: act(x, *rest), x)

    def run(count: int) -> float:
        begin, result = time.perf_counter(), x
        for _ in range(count if is_static else 1):
            result = program(_STATIC_TURNS if is_static else jnp.int32(count), result, *rest)
        result.block_until_ready()
        return time.perf_counter() - begin

    run(1)  # compiled
    return TimedLoop(run, _STATIC_TURNS if is_static else 1)


def median_seconds(loops: Sequence[TimedLoop]) -> list[float]:
    """Return the median seconds of one turn of each; the loops alternate."""
    counts = [_count(loop.run) for loop in loops]
    slopes: list[list[float]] = [[] for _ in loops]
    for _ in range(_NUM_TURNS):
        for loop, count, found in zip(loops, counts, slopes, strict=True):
            found.append(max((loop.run(2 * count) - loop.run(count)) / count / loop.turns, 1e-9))
    return [statistics.median(found) for found in slopes]


def _count(run: Run) -> int:
    """Return the number of turns, or calls, that take long enough to be timed."""
    one = max(min(run(1), run(1)), 1e-7)
    several = max(1, math.ceil(_MIN_SECONDS / 4 / one))
    return max(1, math.ceil(several * _MIN_SECONDS / max(run(several), 1e-7)))
