"""What the device does in a second, timed when it starts: on idle blocks and a row of the null block."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jpaged.device.programs.store import ProgramStore
from jpaged.device.step.runner import StepRunner
from jpaged.device.transfers import BlockMover
from jpaged.engine.executor import BlockMoves, DeviceRates, Geometry, Move, SamplingInputs, StepInputs

_NUM_RUNS = 3
NO_RATE = 1.0
"""The rate of swapping, in bytes a second, without host memory to swap to: recomputing is then always quicker."""


def measure_rates(runner: StepRunner, mover: BlockMover, programs: ProgramStore, geometry: Geometry) -> DeviceRates:
    """Times a prefill, and swaps of blocks that nobody uses yet."""
    inputs = null_prefill(geometry)
    sampling = SamplingInputs.neutral(geometry.buckets.num_rows(inputs.num_rows))
    prefill_s = _seconds_of(lambda: np.asarray(runner.sample(runner.forward(runner.pack(inputs)), sampling)))
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
    return DeviceRates(swap_out, swap_in, inputs.num_tokens / prefill_s)


def _seconds_of(act: Callable[[], object]) -> float:
    """The quickest of a few runs: the first one also touches memory for the first time."""
    quickest = float("inf")
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        act()
        quickest = min(quickest, time.perf_counter() - begin)
    return quickest


def null_prefill(geometry: Geometry) -> StepInputs:
    """A step of the largest bucket whose prompts lie in the null block: it computes as any and disturbs nothing."""
    num_padded, max_rows = geometry.buckets.tokens[-1], geometry.max_num_seqs
    num_tokens = min(num_padded, max_rows * geometry.max_model_len)
    num_rows = -(-num_tokens // geometry.max_model_len)
    starts_s1 = np.minimum(np.arange(max_rows + 1) * geometry.max_model_len, num_tokens).astype(np.int32)
    positions_t = (np.arange(num_padded) % geometry.max_model_len).astype(np.int32)
    return StepInputs(
        token_ids_t=np.zeros(num_padded, np.int32),
        is_prev_sampled_t=np.zeros(num_padded, np.bool_),
        prev_sampled_rows_t=np.zeros(num_padded, np.int32),
        positions_t=positions_t,
        rope_lens_t=positions_t + 1,
        slots_t=positions_t % geometry.block_size,
        query_starts_s1=starts_s1,
        kv_lens_s=np.diff(starts_s1),
        block_tables_sm=np.zeros((max_rows, geometry.max_blocks_per_seq), np.int32),
        kv_begins_s=np.zeros(max_rows, np.int32),
        run_starts_s1=np.full(max_rows + 1, num_rows, np.int32),
        sample_tokens_s=np.maximum(starts_s1[1:] - 1, 0),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_runs=0,
    )
