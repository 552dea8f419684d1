"""The single steps of a multi-step decode."""

from __future__ import annotations

import dataclasses

import numpy as np

from jpaged.engine.executor import SamplingInputs, StepInputs


def step_at(
    place: int, step: StepInputs, sampling: SamplingInputs, block_size: int
) -> tuple[StepInputs, SamplingInputs]:
    """Return one of the steps of a decode; each except the first takes its inputs from the last tokens.

    Args:
        place: index of the step, from 0.
        step: the first. Row i has token i and no other.
        sampling: of the first.
        block_size: token slots in a block.
    """
    if place == 0:
        return step, sampling
    rows = np.arange(step.num_rows)
    is_used_t = np.arange(len(step.token_ids_t)) < step.num_rows
    positions_t = step.positions_t + place * is_used_t.astype(np.int32)
    positions = positions_t[rows]
    slots_gt, prev_rows_t = np.zeros_like(step.slots_gt), np.zeros_like(step.prev_sampled_rows_t)
    blocks_gr = step.block_tables_gsm[:, rows, positions // block_size]
    slots_gt[:, rows] = blocks_gr * block_size + positions % block_size
    prev_rows_t[rows] = rows
    kv_lens_s, rows_r = step.kv_lens_s.copy(), sampling.rows_r.copy()
    kv_lens_s[rows] += place
    rows_r["positions_r"] += place
    later = dataclasses.replace(
        step,
        is_prev_sampled_t=is_used_t,
        prev_sampled_rows_t=prev_rows_t,
        positions_t=positions_t,
        rope_lens_t=np.maximum(step.rope_lens_t, positions_t + 1),
        slots_gt=slots_gt,
        kv_lens_s=kv_lens_s,
    )
    return later, dataclasses.replace(sampling, rows_r=rows_r)
