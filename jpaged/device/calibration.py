"""What the device does in a second, timed when it starts: on idle blocks and a row of the null block."""

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
"""No further run is made after so long: touching memory for the first time is a small part of that."""
_CONTEXT_SHARE = 4
"""Tokens that are looked back at where attention is timed, for each that looks: more take long on a slow device."""
NO_RATE = 1.0
"""The rate of swapping, in bytes a second, without host memory to swap to: recomputing is then always quicker."""


def measure_rates(runner: StepRunner, mover: BlockMover, programs: ProgramStore, geometry: Geometry) -> DeviceRates:
    """Times steps of the sizes that are there by now, and swaps of blocks that nobody uses yet."""

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

        swap_out, swap_in = rate_of(Move.SWAP_OUT), rate_of(Move.SWAP_IN)  # in what is there already
    return DeviceRates(swap_out, swap_in, forward_s, pair_s)


def measure_steps(
    geometry: Geometry, step_s: Callable[[StepInputs], float]
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Find `DeviceRates.forward_s` and `pair_s`, by steps of the least, the middle and the largest size.

    Attention is timed in the middle one, whose tokens look back once at nothing and once at a long context.

    Args:
        step_s: seconds of a step.
    """
    sizes = geometry.buckets.tokens
    middle = sizes[len(sizes) // 2]
    steps = {size: null_prefill(geometry, size) for size in sorted({sizes[0], middle, sizes[-1]})}
    timed = {size: step_s(inputs) for size, inputs in steps.items()}
    far = null_prefill(geometry, middle, min(_CONTEXT_SHARE * middle, geometry.max_model_len // 2))
    num_more = far.num_pairs - steps[middle].num_pairs
    pair_s = max(0.0, step_s(far) - timed[middle]) / num_more if num_more > 0 else 0.0
    pair_s = min(pair_s, *(timed[size] / 2 / inputs.num_pairs for size, inputs in steps.items()))  # else it was noise
    return tuple((size, timed[size] - pair_s * inputs.num_pairs) for size, inputs in steps.items()), pair_s


def _seconds_of(act: Callable[[], object]) -> float:
    """The quickest of a few runs, the first of which also touches memory for the first time; of a long act one.

    Several processes run all of them: they wait for each other inside of a step, and their clocks may not agree.
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
    """A step of a size whose prompts lie in the null block: it computes as any and disturbs nothing.

    Args:
        num_padded: one of the geometry's buckets.
        start: tokens of every prompt that were computed before; below its `max_model_len`.
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
