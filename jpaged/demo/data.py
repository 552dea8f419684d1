"""Training batches: documents packed into rows, each row a function of (seed, row number) alone.

row      | document 0         | document 1   | pad |
segment  | 1 1 1 1 1 1 1 1 1  | 2 2 2 2 2 2  | 0 0 |     attention stays inside one segment
position | 0 1 2 3 4 5 6 7 8  | 0 1 2 3 4 5  | 0 0 |
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from tokenizers import Tokenizer

from jpaged.demo.grammar import document

# Documents that a row may choose from; what does not fit any more is left out.
_CANDIDATES = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, all int32 or float32 `[rows, row_len]`.

    Attributes:
        token_ids: the inputs.
        targets: the token that follows, 0 where there is none.
        weights: 1 where the model learns to predict the target, else 0.
        positions: each token's place in its document.
        segments: which document of the row a token belongs to, from 1; 0 is padding.
    """

    token_ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    segments: np.ndarray


def batch(tokenizer: Tokenizer, seed: int, step: int, num_rows: int, row_len: int, document_len: int) -> Batch:
    """The batch of one training step; documents are cut after `document_len` tokens, if that is less than a row."""
    result = Batch(
        token_ids=np.zeros((num_rows, row_len), np.int32),
        targets=np.zeros((num_rows, row_len), np.int32),
        weights=np.zeros((num_rows, row_len), np.float32),
        positions=np.zeros((num_rows, row_len), np.int32),
        segments=np.zeros((num_rows, row_len), np.int32),
    )
    for row in range(num_rows):
        _fill_row(result, row, tokenizer, seed, step * num_rows + row, document_len)
    return result


def _fill_row(out: Batch, row: int, tokenizer: Tokenizer, seed: int, number: int, document_len: int) -> None:
    start, segment, row_len = 0, 0, out.token_ids.shape[1]
    for index in range(number * _CANDIDATES, (number + 1) * _CANDIDATES):
        token_ids, is_learnt = encode(tokenizer, seed, index)
        if document_len < row_len:
            token_ids, is_learnt = token_ids[:document_len], is_learnt[:document_len]
        length = len(token_ids)
        if start + length > row_len:
            continue
        segment += 1
        here = slice(start, start + length)
        out.token_ids[row, here] = token_ids
        out.targets[row, start : start + length - 1] = token_ids[1:]
        out.weights[row, start : start + length - 1] = is_learnt[1:]
        out.positions[row, here] = np.arange(length)
        out.segments[row, here] = segment
        start += length
        if row_len - start < min(60, document_len):
            return


def encode(tokenizer: Tokenizer, seed: int, index: int) -> tuple[list[int], list[bool]]:
    """Token ids of one document and whether each is learnt."""
    token_ids: list[int] = []
    is_learnt: list[bool] = []
    for span in document(seed, index):
        ids = tokenizer.encode(span.text).ids
        token_ids += ids
        is_learnt += [span.is_learnt] * len(ids)
    return token_ids, is_learnt
