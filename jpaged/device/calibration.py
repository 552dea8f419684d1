"""What the device does in a second, timed when it starts: on idle blocks and a row of the null block."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jpaged.engine.executor import Geometry, SamplingInputs, StepInputs

_NUM_RUNS = 3
NO_RATE = 1.0
"""Bytes a second of swapping where there is no host memory to swap to: the other way is always quicker."""


def seconds_of(act: Callable[[], object]) -> float:
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
        is_fed_back_t=np.zeros(num_padded, np.bool_),
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
        sampling=SamplingInputs.neutral(geometry.buckets.num_rows(num_rows)),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_runs=0,
    )
