"""A schedule -> the padded numpy arrays of one step.

rows      r0 (3 tokens)   r1 (1)   r2 (4)            then empty rows up to max_num_seqs
tokens    a0 a1 a2        b7       c0 c1 c2 c3  0 0  packed, padded to a bucket
slots     block * block_size + offset of each; the null block's slot 0 for padding
starts    0  3  4  8 8 8 ...

Values are gathered in lists and written a column at a time: one write into an array costs as much as ten into a list.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import Geometry, SamplingInputs, StepInputs, random_columns, row_lists
from jpaged.engine.scheduling.schedule import Schedule, ScheduledRow

_KNOWN = -1


def build_step_inputs(schedule: Schedule, geometry: Geometry) -> StepInputs:
    """Packs the rows of a schedule in their order; every field is described at `StepInputs`."""
    rows, block_size, max_rows = schedule.rows, geometry.block_size, geometry.max_num_seqs
    num_rows, num_tokens = len(rows), schedule.num_tokens
    num_padded = geometry.buckets.num_tokens(num_tokens)
    starts, lens = _column([row.start for row in rows]), _column([row.num_tokens for row in rows])
    ends = np.cumsum(lens, dtype=np.int32)
    block_tables_sm = np.zeros((max_rows, geometry.max_blocks_per_seq), np.int32)
    np.stack([row.sequence.kv.table.ids_m for row in rows], out=block_tables_sm[:num_rows])

    rows_t = np.repeat(np.arange(num_rows), lens)
    positions_t = np.arange(num_tokens, dtype=np.int32) + (starts + lens - ends)[rows_t]
    prompt_lens = _column([row.sequence.num_prompt_tokens for row in rows])
    blocks_t = block_tables_sm[rows_t, positions_t // block_size]

    prev_rows = _column([_KNOWN if row.prev_sampled_row is None else row.prev_sampled_row for row in rows])
    is_prev_sampled = prev_rows != _KNOWN
    prev_rows_t = _padded([], num_padded, _KNOWN)
    prev_rows_t[ends[is_prev_sampled] - 1] = prev_rows[is_prev_sampled]

    query_starts_s1 = _padded(ends - lens, max_rows + 1, num_tokens)
    last_tokens_s = np.maximum(query_starts_s1[1:] - 1, 0)
    kv_begins_s, run_starts_s1 = _runs(schedule, max_rows)
    sample_rows = _column([row.sample_row for row in rows])
    return StepInputs(
        token_ids_t=_padded(_known_tokens(rows), num_padded),
        is_prev_sampled_t=prev_rows_t != _KNOWN,
        prev_sampled_rows_t=np.maximum(prev_rows_t, 0),
        positions_t=_padded(positions_t, num_padded),
        rope_lens_t=_padded(np.maximum(positions_t + 1, prompt_lens[rows_t]), num_padded, 1),
        slots_t=_padded(blocks_t * block_size + positions_t % block_size, num_padded),
        query_starts_s1=query_starts_s1,
        kv_lens_s=_padded(starts + lens, max_rows),
        block_tables_sm=block_tables_sm,
        kv_begins_s=kv_begins_s,
        run_starts_s1=run_starts_s1,
        sample_tokens_s=np.concatenate([last_tokens_s[sample_rows], last_tokens_s[num_rows:]]),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_runs=len(schedule.runs),
    )


def build_sampling_inputs(schedule: Schedule, geometry: Geometry, eos_token_ids: frozenset[int]) -> SamplingInputs:
    """How the rows of a schedule are sampled, in their order."""
    sampled = [(i, row, row.group.request.sampling) for i, row in enumerate(schedule.rows) if row.samples_token]
    want_top_logprobs = any(params.logprobs or params.beam_width for _, _, params in sampled)
    inputs = SamplingInputs.neutral(geometry.buckets.num_rows(len(schedule.rows)), want_top_logprobs=want_top_logprobs)
    for i, row, params in sampled:
        inputs.fill_lists(i, row_lists(params, eos_token_ids, row.output_index))
    if random := [one for one in sampled if not one[2].is_greedy]:
        places, random_rows, params_r = zip(*random, strict=True)
        indices = [row.sequence.index for row in random_rows]
        positions = [row.start + row.num_tokens for row in random_rows]
        inputs.fill_columns(places, random_columns(params_r, indices, positions))
    return inputs


def _runs(schedule: Schedule, max_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What each row shares with its run, and where the runs begin."""
    kv_begins_s = np.zeros(max_rows, np.int32)
    run_starts_s1 = np.full(max_rows + 1, len(schedule.rows), np.int32)
    begin = 0
    for i, run in enumerate(schedule.runs):
        run_starts_s1[i] = begin
        kv_begins_s[begin : begin + run.num_rows] = run.num_tokens
        begin += run.num_rows
    return kv_begins_s, run_starts_s1


def _known_tokens(rows: list[ScheduledRow]) -> list[int]:
    """The packed tokens, 0 where one is in flight."""
    token_ids: list[int] = []
    for row in rows:
        known, stop = row.sequence.token_ids, row.start + row.num_tokens
        if row.num_tokens == 1 and stop <= len(known):
            token_ids.append(known[row.start])
        else:
            token_ids += known[row.start : stop]
            token_ids += [0] * (stop - max(row.start, len(known)))
    return token_ids


def _column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _padded(values: list[int] | NDArray[np.int32], size: int, fill: int = 0) -> NDArray[np.int32]:
    array = np.full(size, fill, np.int32)
    array[: len(values)] = values
    return array
