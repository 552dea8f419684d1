"""Speed of one device: dispatch, the bandwidth of decode attention, and the FLOP/s of prefill attention beside cuDNN.

Loops are static and operands random (`jpaged.kernels.paged_attention.measure`). All cells of a check read one pool.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.first_contact.cells import Cells, NotOnThisPlatform, Program, Values
from jpaged.hardware import find_hardware
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.api import Choice, choose, paged_attention
from jpaged.kernels.paged_attention.measure import (
    SHAPES,
    AttentionShape,
    TimedLoop,
    looped,
    measure_limits,
    median_seconds,
    random_pool,
)
from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows

_DECODE = {"full": ((1, 16, 64, 256), (1024, 8192, 32_768)), "tiny": ((1, 2), (64,))}  # rows, contexts
_PREFILL = {"full": (2048, (2048, 8192, 32_768)), "tiny": (32, (32, 64))}  # tokens of a chunk, contexts
_LIMITS = {"full": (1 << 31, 8192), "tiny": (1 << 22, 128)}  # bytes of a copy, width of a product
_BLOCK_SIZE = 32
_SHAPE = {"full": SHAPES["llama-3-8b"], "tiny": SHAPES["demo"]}
_DTYPE = jnp.dtype("bfloat16")

_LEAST_S = 1e-8
_NUM_CALLS = {"full": 300, "tiny": 20}
_NUM_REPEATS = 5
_WIDTH, _NUM_LAYERS = {"full": 4096, "tiny": 64}, 32
_NUM_ARGUMENTS = 300
"""Arrays of a model of 32 layers."""


def check_dispatch(cells: Cells, size: str) -> None:
    """Measure the host's time of a call, and the whole time of many calls of which each reads the one before."""
    width = _WIDTH[size]
    one, many = jnp.zeros(8), [jnp.full((8,), float(i)) for i in range(_NUM_ARGUMENTS)]

    def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    def weights() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), _NUM_LAYERS)
        return [jax.random.normal(key, (width, width), _DTYPE) * width**-0.5 for key in keys]

    rows = jax.random.normal(jax.random.key(1), (1, width), _DTYPE)
    count = _NUM_CALLS[size]
    programs = {
        "a kernel": Program(lambda: _chain(lambda x: x + 1, one), lambda run: _dispatch(run, count)),
        f"{_NUM_ARGUMENTS} arguments": Program(
            lambda: _chain(lambda x, *rest: x + rest[0] + rest[-1], one, *many), lambda run: _dispatch(run, count)
        ),
        f"{_NUM_LAYERS} products of a row": Program(
            lambda: _chain(layers, rows, *weights()), lambda run: _dispatch(run, max(10, count // 4))
        ),
    }
    cells.run_programs(programs, are_timed=True)
    cells.run("a round trip", lambda: _round_trip(count))


def _chain(act: Callable[..., jax.Array], x: jax.Array, *rest: jax.Array) -> Callable[[int], tuple[float, float]]:
    """Return a function that calls a program n times, and returns the seconds of the calls and of all."""
    jitted = jax.jit(act, donate_argnums=0, keep_unused=True)

    def run(count: int) -> tuple[float, float]:
        result = jax.block_until_ready(x + 0)
        begin_s = time.perf_counter()
        for _ in range(count):
            result = jitted(result, *rest)
        dispatched_s = time.perf_counter() - begin_s
        result.block_until_ready()
        return dispatched_s, time.perf_counter() - begin_s

    run(1)
    return run


def _dispatch(run: Callable[[int], tuple[float, float]], count: int) -> Values:
    found = [run(count) for _ in range(_NUM_REPEATS)]
    dispatched, whole = (sorted(value / count for value in values) for values in zip(*found, strict=True))
    return {
        "step_dispatch_s": statistics.median(dispatched),
        "call_s": statistics.median(whole),
        "call_s_range": [whole[0], whole[-1]],
    }


def _round_trip(count: int) -> Values:
    """Time a small array to the device, through a program and back, as sampled tokens take it."""
    act, x = jax.jit(lambda x: x + 1), np.zeros(64, np.int32)
    seconds = []
    for _ in range(count):
        begin_s = time.perf_counter()
        np.asarray(act(jax.device_put(x)))
        seconds.append(time.perf_counter() - begin_s)
    return {"round_trip_s": statistics.median(seconds), "p90_s": sorted(seconds)[int(0.9 * count)]}


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A pool that all cells of a check read.

    Attributes:
        shape: heads.
        choice: backend and layout.
        pool: the array.
    """

    shape: AttentionShape
    choice: Choice
    pool: jax.Array

    @classmethod
    def allocate(cls, shape: AttentionShape, num_tokens: int, max_rows: int, max_queries: int) -> SharedPool:
        """Fill a pool for this number of tokens with random numbers.

        Args:
            max_rows: of a call.
            max_queries: of a call.
        """
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        layout = KVLayout(1, num_blocks, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, _DTYPE)
        queries = Queries(shape.num_heads, _DTYPE, max_rows, num_blocks, max_queries)
        choice = choose("auto", jax.devices()[0], layout, queries)
        return cls(shape, choice, random_pool(choice.layout).block_until_ready())

    def loop(self, num_rows: int, num_queries: int, context: int) -> TimedLoop:
        """Compile a loop of attention over rows whose blocks are scattered."""
        shape, layout = self.shape, self.choice.layout
        per_row = -(-context // _BLOCK_SIZE)
        ids = np.random.default_rng(0).permutation(layout.num_blocks)[: num_rows * per_row] + 1
        rows = RaggedRows(
            jnp.arange(num_rows + 1, dtype=jnp.int32) * num_queries,
            jnp.full(num_rows, context, jnp.int32),
            jnp.asarray(ids.reshape(num_rows, per_row), jnp.int32),
            jnp.int32(num_rows),
        )
        spec = AttentionSpec(layout, AttentionKind(shape.head_dim**-0.5))
        q_shape = num_rows * num_queries, shape.num_heads, shape.head_dim
        return looped(
            lambda q, pool, rows: paged_attention(q, pool, jnp.int32(0), rows, spec, backend=self.choice.backend)[0],
            jax.random.normal(jax.random.key(2), q_shape, _DTYPE),
            self.pool,
            rows,
        )


def check_decode(cells: Cells, size: str) -> None:
    """Measure the bandwidth of decode attention, and that of a copy."""
    all_rows, contexts = _DECODE[size]
    shape = _SHAPE[size]
    cells.run("limits", functools.partial(_limits, size))
    num_tokens, most = max(all_rows) * max(contexts), max(all_rows)
    made = cells.run("pool", lambda: _allocate(shape, num_tokens, most, most), is_needed=True)
    if made is None:
        return
    pool: SharedPool = _pools.pop()
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * _DTYPE.itemsize

    def run(num_rows: int, context: int, loop: TimedLoop) -> Values:
        seconds = _measured(loop)
        rate = num_rows * context * token_bytes / seconds
        return {"rows": num_rows, "context": context, "seconds": seconds, "decode_bytes_per_s": rate, **_share(rate)}

    cells.run_programs(
        {
            f"{num_rows} x {context}": Program(
                functools.partial(pool.loop, num_rows, 1, context), functools.partial(run, num_rows, context)
            )
            for context in contexts
            for num_rows in all_rows
        },
        are_timed=True,
    )


_pools: list[SharedPool] = []


def _allocate(shape: AttentionShape, num_tokens: int, max_rows: int, max_queries: int) -> Values:
    pool = SharedPool.allocate(shape, num_tokens, max_rows, max_queries)
    _pools.append(pool)
    passed_over = dict(pool.choice.passed_over)
    return {"backend": pool.choice.backend, "gib": pool.pool.nbytes / 2**30, "passed_over": passed_over}


def _limits(size: str) -> Values:
    num_bytes, width = _LIMITS[size]
    limits = measure_limits(_DTYPE, num_bytes=num_bytes, width=width)
    return {"copy_bytes_per_s": limits.bytes_per_s, "product_flops_per_s": limits.flops_per_s}


def _measured(loop: TimedLoop) -> float:
    """Return the seconds of a turn; infinity if the machine was too busy for a difference of two runs."""
    seconds = median_seconds([loop])[0]
    return seconds if seconds > _LEAST_S else math.inf


def _share(bytes_per_s: float = 0.0, flops_per_s: float = 0.0) -> Mapping[str, float]:
    """Return the share of the data sheet's peak; empty for a device that is not in the table."""
    hardware = find_hardware(jax.devices()[0].device_kind)
    if hardware is None:
        return {}
    peak = max(bytes_per_s / hardware.hbm_bytes_per_s, flops_per_s / hardware.flops)
    return {"share_of_peak": peak}


def check_prefill(cells: Cells, size: str) -> None:
    """Measure the FLOP/s of chunks over paged contexts, and those of cuDNN over contiguous ones."""
    chunk, contexts = _PREFILL[size]
    shape = _SHAPE[size]
    made = cells.run("pool", lambda: _allocate(shape, 2 * max(contexts), 1, chunk), is_needed=True)
    if made is None:
        return
    pool = _pools.pop()

    def run(num_scores: float, loop: TimedLoop) -> Values:
        seconds = _measured(loop)
        rate = 4 * shape.num_heads * shape.head_dim * num_scores / seconds
        return {"seconds": seconds, "prefill_flops_per_s": rate, **_share(flops_per_s=rate)}

    programs: dict[str, Program] = {}
    for context in contexts:
        scores = chunk * (context - chunk) + chunk * (chunk + 1) / 2
        dense_scores = scores if context == chunk else float(chunk * context)
        loop = functools.partial(pool.loop, 1, chunk, context)
        programs[f"{chunk} of {context}"] = Program(loop, functools.partial(run, scores))
        dense = functools.partial(_cudnn, shape, chunk, context)
        programs[f"cuDNN, {chunk} of {context}"] = Program(dense, functools.partial(_as_cudnn, run, dense_scores))
    cells.run_programs(programs, are_timed=True)


def _as_cudnn(run: Callable[[float, TimedLoop], Values], num_scores: float, loop: TimedLoop) -> Values:
    """Rename the rate, for which the plan has no estimate."""
    values = dict(run(num_scores, loop))
    return {"cudnn_flops_per_s": values.pop("prefill_flops_per_s"), **values}


def _cudnn(shape: AttentionShape, chunk: int, context: int) -> TimedLoop:
    """Compile a loop of cuDNN's attention: causal for a whole prompt, and without a mask for a longer context."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise NotOnThisPlatform(f"cuDNN requires an NVIDIA GPU; this is a {device.platform}")
    keys = jax.random.split(jax.random.key(3), 3)
    q = jax.random.normal(keys[0], (1, chunk, shape.num_heads, shape.head_dim), _DTYPE)
    k, v = (jax.random.normal(key, (1, context, shape.num_kv_heads, shape.head_dim), _DTYPE) for key in keys[1:])

    def act(q: jax.Array, k: Any, v: Any) -> jax.Array:
        is_causal = context == chunk
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")

    return looped(act, q, k, v)
