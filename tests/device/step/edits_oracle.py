"""Changed logits in NumPy, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Edits:
    """What is asked of one row; `history` is (prompt, output)."""

    history: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    singles: tuple[tuple[int, int, float], ...] = ()
    """(token, the token before or -1, what is added)."""
    allowed: tuple[int, ...] | None = None


def edited(logits: np.ndarray, edits: Edits) -> np.ndarray:
    """Everything but typical_p."""
    x = logits.astype(np.float64)
    prompt, output = edits.history
    if edits.allowed is not None:
        x[[token for token in range(len(x)) if token not in edits.allowed]] = -np.inf
    last = [*prompt, *output][-1:] or [-2]
    for token, after, value in edits.singles:
        if after in (-1, last[0]):
            x[token] += value
    for token in range(len(x)):
        if token in prompt or token in output:
            x[token] = x[token] / edits.repetition if x[token] > 0 else x[token] * edits.repetition
        times = output.count(token)
        x[token] -= edits.frequency * times
        if times:
            x[token] -= edits.presence
    if edits.top_n_sigma > 0:
        there = x[np.isfinite(x)]
        x[x < there.max() - edits.top_n_sigma * there.std()] = -np.inf
    return x


def typical(x: np.ndarray, edits: Edits, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """(surely kept, possibly kept) of what is left: they differ where a share is reached to within rounding."""
    if edits.typical_p >= 1:
        return np.isfinite(x), np.isfinite(x)
    scaled = x / (temperature or 1.0)
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    information = -np.log(np.where(weights > 0, weights, 1))
    entropy = (weights * information).sum()
    distance = np.where(weights > 0, np.abs(information - entropy), np.inf)
    before_sure = np.array([weights[distance < d - 1e-5].sum() for d in distance])
    before_possible = np.array([weights[distance < d + 1e-5].sum() for d in distance])
    kept = np.isfinite(x)
    sure = kept & (before_possible < edits.typical_p - 1e-5)
    possible = kept & (before_sure < edits.typical_p + 1e-5)
    return sure, possible
