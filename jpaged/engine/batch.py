"""A schedule -> the padded numpy arrays of one step.

rows      r0 (3 tokens)   r1 (1)   r2 (4)            then empty rows up to max_num_seqs
tokens    a0 a1 a2        b7       c0 c1 c2 c3  0 0  packed, padded to a bucket
slots     block * block_size + offset of each; the null block's slot 0 for padding
starts    0  3  4  8 8 8 ...
"""

from __future__ import annotations

import numpy as np

from jpaged.engine.executor import FORBIDDEN_WIDTH, Geometry, SamplingInputs, StepInputs
from jpaged.engine.schedule import Schedule, ScheduledRow

_SEED_WORD = 1 << 32


def build_step_inputs(schedule: Schedule, geometry: Geometry, eos_token_ids: frozenset[int]) -> StepInputs:
    """Packs the rows of a schedule in their order; every field is described at `StepInputs`."""
    rows, block_size = schedule.rows, geometry.block_size
    num_padded = geometry.buckets.num_tokens(schedule.num_tokens)
    num_rows, max_rows = len(rows), geometry.max_num_seqs
    token_ids_t = np.zeros(num_padded, np.int32)
    is_fed_back_t = np.zeros(num_padded, np.bool_)
    fed_back_rows_t = np.zeros(num_padded, np.int32)
    positions_t = np.zeros(num_padded, np.int32)
    rope_lens_t = np.ones(num_padded, np.int32)
    slots_t = np.zeros(num_padded, np.int32)
    query_starts_s1 = np.full(max_rows + 1, schedule.num_tokens, np.int32)
    kv_lens_s = np.zeros(max_rows, np.int32)
    block_tables_sm = np.zeros((max_rows, geometry.max_blocks_per_seq), np.int32)

    begin = 0
    for i, row in enumerate(rows):
        sequence, start, stop, end = row.sequence, row.start, row.start + row.num_tokens, begin + row.num_tokens
        known = sequence.token_ids[start:stop]
        token_ids_t[begin : begin + len(known)] = known
        if row.fed_back_row is not None:
            is_fed_back_t[end - 1] = True
            fed_back_rows_t[end - 1] = row.fed_back_row
        positions = np.arange(start, stop, dtype=np.int32)
        positions_t[begin:end] = positions
        rope_lens_t[begin:end] = np.maximum(positions + 1, sequence.num_prompt_tokens)
        blocks = sequence.block_table.ids_m[positions // block_size]
        slots_t[begin:end] = blocks * block_size + positions % block_size
        query_starts_s1[i] = begin
        kv_lens_s[i] = stop
        block_tables_sm[i] = sequence.block_table.ids_m
        begin = end

    last_tokens_s = np.maximum(query_starts_s1[1:] - 1, 0)
    sample_tokens_s = last_tokens_s.copy()
    sample_tokens_s[:num_rows] = last_tokens_s[[row.sample_row for row in rows]]
    return StepInputs(
        token_ids_t=token_ids_t,
        is_fed_back_t=is_fed_back_t,
        fed_back_rows_t=fed_back_rows_t,
        positions_t=positions_t,
        rope_lens_t=rope_lens_t,
        slots_t=slots_t,
        query_starts_s1=query_starts_s1,
        kv_lens_s=kv_lens_s,
        block_tables_sm=block_tables_sm,
        sample_tokens_s=sample_tokens_s,
        sampling=_build_sampling_inputs(rows, geometry, eos_token_ids),
        num_rows=num_rows,
        num_tokens=schedule.num_tokens,
    )


def _build_sampling_inputs(
    rows: list[ScheduledRow], geometry: Geometry, eos_token_ids: frozenset[int]
) -> SamplingInputs:
    num_padded, vocab_size = geometry.buckets.num_rows(len(rows)), geometry.vocab_size
    temperature_r = np.zeros(num_padded, np.float32)
    top_k_r = np.full(num_padded, vocab_size, np.int32)
    top_p_r = np.ones(num_padded, np.float32)
    min_p_r = np.zeros(num_padded, np.float32)
    seeds_r2 = np.zeros((num_padded, 2), np.uint32)
    sequence_indices_r = np.zeros(num_padded, np.int32)
    positions_r = np.zeros(num_padded, np.int32)
    forbidden_ids_rx = np.full((num_padded, FORBIDDEN_WIDTH), vocab_size, np.int32)
    want_top = False
    for i, row in enumerate(rows):
        if not row.draws_token:
            continue
        params = row.group.request.sampling
        want_top = want_top or bool(params.logprobs) or bool(params.beam_width)
        if not params.is_greedy:
            temperature_r[i] = params.temperature
            top_k_r[i] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
            top_p_r[i] = params.top_p
            min_p_r[i] = params.min_p
            seeds_r2[i] = divmod(params.seed or 0, _SEED_WORD)
            sequence_indices_r[i] = row.sequence.index
            positions_r[i] = row.start + row.num_tokens
        if row.output_index < params.min_tokens:
            forbidden = sorted(params.ending_ids(eos_token_ids))
            forbidden_ids_rx[i, : len(forbidden)] = forbidden
    return SamplingInputs(
        temperature_r=temperature_r,
        top_k_r=top_k_r,
        top_p_r=top_p_r,
        min_p_r=min_p_r,
        seeds_r2=seeds_r2,
        sequence_indices_r=sequence_indices_r,
        positions_r=positions_r,
        forbidden_ids_rx=forbidden_ids_rx,
        want_top=want_top,
    )
