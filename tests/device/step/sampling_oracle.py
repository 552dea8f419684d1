"""Sampling in NumPy and Python integers, one row at a time, by sorting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORD = 2**32


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    position: int = 0
    banned: tuple[int, ...] = ()


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32-20 in Python integers."""
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + schedule[0]) % WORD, (counter[1] + schedule[1]) % WORD
    for round_ in range(20):
        distance = (13, 15, 26, 6, 17, 29, 16, 24)[round_ % 8]
        x = (x + y) % WORD
        y = ((y << distance | y >> (32 - distance)) % WORD) ^ x
        if round_ % 4 == 3:
            group = round_ // 4
            x = (x + schedule[(group + 1) % 3]) % WORD
            y = (y + schedule[(group + 2) % 3] + group + 1) % WORD
    return x, y


def exponentials(params: Params, vocab_size: int) -> np.ndarray:
    key = threefry(divmod(params.seed, WORD), (params.index, params.position))
    half = (vocab_size + 1) // 2
    words = np.array([threefry(key, (v, 0)) for v in range(half)], np.float64)
    u = (np.concatenate([words[:, 0], words[:, 1]])[:vocab_size] + 0.5) / WORD
    return -np.log1p(-np.minimum(u, 1 - 2.0**-24))


def allowed(logits: np.ndarray, params: Params) -> np.ndarray:
    out = logits.astype(np.float64)
    out[[i for i in params.banned if i < len(out)]] = -np.inf
    return out


def kept(scaled: np.ndarray, params: Params) -> tuple[np.ndarray, np.ndarray]:
    """(surely kept, possibly kept): they differ only where a sum or a product is at its limit to within rounding."""
    weights = np.exp(scaled - scaled.max())
    sure, possible = weights >= params.min_p * (1 + 1e-5), weights >= params.min_p * (1 - 1e-5)
    sure |= scaled == scaled.max()
    if 0 < params.top_k < len(scaled):
        kth = np.sort(scaled)[-params.top_k]
        sure, possible = sure & (scaled >= kth), possible & (scaled >= kth)
    if params.top_p < 1:
        # A token stays when those strictly likelier have not reached the share yet.
        before = np.array([weights[possible & (scaled > x)].sum() for x in scaled])
        total = weights[possible].sum()
        sure_total = weights[sure].sum()
        sure &= before < params.top_p * sure_total - 1e-5 * total
        sure |= scaled == scaled.max()
        possible &= before < params.top_p * total + 1e-5 * total
    return sure, possible


def scores(logits: np.ndarray, params: Params) -> np.ndarray:
    """Noisy logits of every token, nothing truncated."""
    return allowed(logits, params) / params.temperature - np.log(exponentials(params, len(logits)))


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
