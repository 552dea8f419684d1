"""Figure 18a on the kernel that is here: attention over blocks, and over contiguous memory, on one CPU core.

    python -m benchmarks.paper.kernel

The same C++ kernel reads the same tokens twice: in blocks of 16 from all over the pool, and with one block for a whole
context. The two take turns, and medians of the processor's time are compared.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.paper.table import Table
from benchmarks.record import machine
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import cpu
from jpaged.kernels.paged_attention.spec import AttentionCall, AttentionSpec, RaggedRows

_NUM_HEADS, _HEAD_DIM = 40, 128
_BLOCK_SIZE = 16
_ROWS = (8, 32)
_CONTEXTS = (64, 128, 256, 1024)
_NUM_TURNS = 31
_LEAST_SAMPLE_S = 0.01


def attention_latency() -> Table:
    """Measures every batch and context."""
    table = Table(
        "f18a_kernel",
        "F18a  milliseconds of decode attention in one layer of OPT-13B (C++ kernel, bfloat16, one core)",
        [
            "The paper: 20 to 26 percent more than FasterTransformer's kernel over contiguous memory, on an A100. The "
            "cost model charges 23 percent, and not what is measured here, as it is of that device.",
            "Here both are one kernel: only where the tokens lie differs.",
        ],
        {"seed": 0, "jax": jax.__version__, **{key: str(value) for key, value in machine().items()}},
    )
    for num_rows in _ROWS:
        for context in _CONTEXTS:
            paged, contiguous = _take_turns([_attention(num_rows, context, size) for size in (_BLOCK_SIZE, context)])
            table.add(
                num_rows=num_rows,
                context=context,
                paged_ms=1000 * paged,
                contiguous_ms=1000 * contiguous,
                more_percent=100 * (paged / contiguous - 1),
                paper="20 to 26",
            )
    return table


def _attention(num_rows: int, context: int, block_size: int) -> Callable[[], object]:
    width = context // block_size
    layout = KVLayout(1, num_rows * width, block_size, _NUM_HEADS, _HEAD_DIM, jnp.dtype("bfloat16"))
    spec = AttentionSpec(layout, AttentionKind(_HEAD_DIM**-0.5))
    rng = np.random.default_rng(0)
    some = np.asarray(layout.encode(jnp.asarray(rng.standard_normal(1 << 20, np.float32))))
    pool = jnp.asarray(np.resize(some, layout.shape))
    q_thd = jnp.asarray(rng.standard_normal((num_rows, _NUM_HEADS, _HEAD_DIM)), "bfloat16")
    rows = RaggedRows(
        jnp.arange(num_rows + 1, dtype=jnp.int32),
        jnp.full(num_rows, context, jnp.int32),
        jnp.asarray((rng.permutation(num_rows * width) + 1).reshape(num_rows, width), jnp.int32),
        jnp.int32(num_rows),
    )
    program = jax.jit(lambda q_thd, pool, rows: cpu.attend(AttentionCall(q_thd, pool, 0, rows, spec)))
    return lambda: jax.block_until_ready(program(q_thd, pool, rows))


def _take_turns(calls: list[Callable[[], object]]) -> list[float]:
    """Median seconds of the processor, of each call."""
    for call in calls:
        call()
    count = max(1, int(_LEAST_SAMPLE_S / max(_busy_s(call, 1) for call in calls)))
    samples = [[_busy_s(call, count) for call in calls] for _ in range(_NUM_TURNS)]
    return [statistics.median(turn[i] for turn in samples) for i in range(len(calls))]


def _busy_s(call: Callable[[], object], count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begin) / count


def main() -> None:
    """Writes the table and prints it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table = attention_latency()
    table.save()
    print(table)


if __name__ == "__main__":
    main()
