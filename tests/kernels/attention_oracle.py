"""Paged attention in NumPy float64, token by token: slow, and with nothing to get wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """A call of the operation as numbers: keys and values by layer and block, and the rows."""

    q_thd: np.ndarray
    k_lnbkd: np.ndarray  # [L, N + 1, B, K, D]
    v_lnbkd: np.ndarray  # of fewer numbers where keys are latents
    layer: int
    query_starts_s1: np.ndarray
    kv_lens_s: np.ndarray
    block_tables_sm: np.ndarray
    num_rows: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    first_positions_s: np.ndarray | None = None
    kv_begins_s: np.ndarray | None = None
    sinks_h: np.ndarray | None = None
    num_sink_tokens: int = 0

    def first_position(self, row: int) -> int:
        if self.first_positions_s is not None:
            return int(self.first_positions_s[row])
        return int(self.kv_lens_s[row] - (self.query_starts_s1[row + 1] - self.query_starts_s1[row]))

    def kv_begin(self, row: int) -> int:
        return 0 if self.kv_begins_s is None else int(self.kv_begins_s[row])


def context(case: Case, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values [kv_len, K, D] of a row; a block id outside of the layer reads as zeros."""
    block_size = case.k_lnbkd.shape[2]
    kv_len = int(case.kv_lens_s[row])
    k, v = (np.zeros((kv_len, *x.shape[3:])) for x in (case.k_lnbkd, case.v_lnbkd))
    for position in range(kv_len):
        block = int(case.block_tables_sm[row, position // block_size])
        if 0 <= block < case.k_lnbkd.shape[1]:
            k[position] = case.k_lnbkd[case.layer, block, position % block_size]
            v[position] = case.v_lnbkd[case.layer, block, position % block_size]
    return k, v


def attention(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(o [T, H, D], lse [T, H]); 0 and minus infinity for tokens that see nothing."""
    num_tokens, num_heads, _ = case.q_thd.shape
    group = num_heads // case.k_lnbkd.shape[3]
    o_thd = np.zeros((num_tokens, num_heads, case.v_lnbkd.shape[-1]))
    lse_th = np.full((num_tokens, num_heads), -np.inf)
    for row in range(case.num_rows):
        start, end = case.query_starts_s1[row], case.query_starts_s1[row + 1]
        k, v = context(case, row)
        for t in range(start, end):
            position = case.first_position(row) + t - start
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            window = range(max(first, case.kv_begin(row)), min(position + 1, int(case.kv_lens_s[row])))
            seen = [*range(min(case.num_sink_tokens, first)), *window]
            if not seen:
                continue
            for h in range(num_heads):
                s = k[seen, h // group] @ case.q_thd[t, h].astype(np.float64) * case.scale
                if case.soft_cap is not None:
                    s = case.soft_cap * np.tanh(s / case.soft_cap)
                sink = -np.inf if case.sinks_h is None else float(case.sinks_h[h])
                highest = max(s.max(), sink)
                p = np.exp(s - highest)
                total = p.sum() + np.exp(sink - highest)
                o_thd[t, h] = p @ v[seen, h // group] / total
                lse_th[t, h] = highest + np.log(total)
    return o_thd, lse_th
