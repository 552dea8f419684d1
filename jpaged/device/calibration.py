"""Device rates, timed at startup on idle blocks and on rows of the null block."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np

from jpaged.device.programs.store import ProgramStore
from jpaged.device.step.runner import StepRunner
from jpaged.device.transfers import BlockMover
from jpaged.engine.executor import BlockMoves, DeviceRates, Geometry, Move, SamplingInputs, StepInputs

_NUM_RUNS = 3
_ENOUGH_S = 0.03
"""Time after which no further run is made. The first-touch cost of memory is a small part of it."""
_CONTEXT_SHARE = 4
"""Context tokens per query token when attention is timed. A larger context would take too long on a slow device."""
NO_RATE = 1.0
"""The swap rate in bytes per second without host memory: recomputing is then always faster than swapping."""


def measure_rates(runner: StepRunner, mover: BlockMover, programs: ProgramStore, geometry: Geometry) -> DeviceRates:
    """Time steps of the sizes compiled so far, and swaps of blocks that are not in use yet."""

    def step_s(inputs: StepInputs) -> float:
        sampling = SamplingInputs.neutral(geometry.buckets.num_rows(inputs.num_rows))
        return _seconds_of(lambda: np.asarray(runner.sample(runner.forward(runner.pack(inputs)), sampling)))

    forward_s, pair_s = measure_steps(geometry, step_s)
    swap_out = swap_in = NO_RATE
    swap_sizes = programs.sizes(Move.SWAP_IN.value)
    if swap_sizes:
        count = min(geometry.num_host_blocks, geometry.num_blocks, swap_sizes[-1])
        ids = list(range(1, count + 1))

        def rate_of(move: Move) -> float:
            def swap() -> None:
                mover.run(BlockMoves(move, ids, ids), programs)
                mover.wait()

            return count * geometry.bytes_per_block / _seconds_of(swap)

        swap_out, swap_in = rate_of(Move.SWAP_OUT), rate_of(Move.SWAP_IN)  # swaps existing contents
    return DeviceRates(swap_out, swap_in, forward_s, pair_s)


def measure_steps(
    geometry: Geometry, step_s: Callable[[StepInputs], float]
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Measure `DeviceRates.forward_s` and `pair_s` with steps of the smallest, the middle and the largest size.

    Attention is timed in the middle size: once without a context, once with a long one.

    Args:
        step_s: runs a step and returns its seconds.
    """
    sizes = geometry.buckets.tokens
    middle = sizes[len(sizes) // 2]
    steps = {size: null_prefill(geometry, size) for size in sorted({sizes[0], middle, sizes[-1]})}
    timed = {size: step_s(inputs) for size, inputs in steps.items()}
    far = null_prefill(geometry, middle, min(_CONTEXT_SHARE * middle, geometry.max_model_len // 2))
    num_more = far.num_pairs - steps[middle].num_pairs
    pair_s = max(0.0, step_s(far) - timed[middle]) / num_more if num_more > 0 else 0.0
    # a larger value is noise
    pair_s = min(pair_s, *(timed[size] / 2 / inputs.num_pairs for size, inputs in steps.items()))
    return tuple((size, timed[size] - pair_s * inputs.num_pairs) for size, inputs in steps.items()), pair_s


def _seconds_of(act: Callable[[], object]) -> float:
    """Return the fastest of up to `_NUM_RUNS` runs; a run that takes `_ENOUGH_S` is the last one.

    The first run also touches memory for the first time.
    Several processes make all runs: they wait for each other inside a step, and their clocks may differ.
    """
    quickest, start, is_alone = float("inf"), time.perf_counter(), jax.process_count() == 1
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        act()
        end = time.perf_counter()
        quickest = min(quickest, end - begin)
        if is_alone and end - start >= _ENOUGH_S:
            break
    return quickest


def null_prefill(geometry: Geometry, num_padded: int, start: int = 0) -> StepInputs:
    """Build a prefill step of a given size whose prompts use only the null block, so that it disturbs no cached block.

    Args:
        num_padded: one of the geometry's buckets.
        start: number of computed tokens of every prompt; below `max_model_len`.
    """
    max_rows, row_len = geometry.max_num_seqs, geometry.max_model_len - start
    num_tokens = min(num_padded, max_rows * row_len)
    num_rows = -(-num_tokens // row_len)
    starts_s1 = np.minimum(np.arange(max_rows + 1) * row_len, num_tokens).astype(np.int32)
    positions_t = (start + np.arange(num_padded) % row_len).astype(np.int32)
    query_lens_s = np.diff(starts_s1)
    return StepInputs(
        token_ids_t=np.zeros(num_padded, np.int32),
        is_prev_sampled_t=np.zeros(num_padded, np.bool_),
        prev_sampled_rows_t=np.zeros(num_padded, np.int32),
        positions_t=positions_t,
        rope_lens_t=positions_t + 1,
        slots_gt=np.tile(positions_t % geometry.block_size, (len(geometry.windows), 1)),
        adapters_t=np.zeros(num_padded, np.int32),
        query_starts_s1=starts_s1,
        kv_lens_s=np.where(query_lens_s > 0, query_lens_s + np.int32(start), np.int32(0)),
        block_tables_gsm=np.zeros((len(geometry.windows), max_rows, geometry.max_blocks_per_seq), np.int32),
        kv_begins_s=np.zeros(max_rows, np.int32),
        run_starts_s1=np.full(max_rows + 1, num_rows, np.int32),
        told_tokens_q=np.zeros(geometry.num_told, np.int32),
        sample_tokens_s=np.maximum(starts_s1[1:] - 1, 0),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_runs=0,
    )
