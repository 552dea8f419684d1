"""Training batches: documents packed into rows, each row a function of (seed, row number) alone.

row      | document 0         | document 1   | pad |
segment  | 1 1 1 1 1 1 1 1 1  | 2 2 2 2 2 2  | 0 0 |     attention stays inside one segment
position | 0 1 2 3 4 5 6 7 8  | 0 1 2 3 4 5  | 0 0 |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from tokenizers import Tokenizer

from benchmarks.demo_model.stories import lexicon
from benchmarks.demo_model.stories.grammar import document, introduction

# Documents that a row may choose from; what does not fit any more is left out.
_CANDIDATES = 8
_MIN_LEN = 48  # no document fits into less

_NOUNS = " ".join(kind.noun for kinds in lexicon.KINDS.values() for kind in kinds)
# Tokens that name a character; "\u0120" is the space before a word in byte-level BPE.
_CAST_TOKENS = frozenset(f"\u0120{word}" for word in (*lexicon.BOYS, *lexicon.GIRLS, *_NOUNS.split()))
_PRONOUNS = ("he", "him", "his", "himself", "she", "her", "herself")
_PRONOUN_TOKENS = frozenset(f"\u0120{form}" for word in _PRONOUNS for form in (word, word.capitalize()))
# No token of the corpus is longer in the mean of so many.
_CHARS_PER_TOKEN = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, all int32 or float32 `[rows, row_len]`.

    Attributes:
        token_ids: the inputs.
        targets: the token that follows, 0 where there is none.
        weights: above 0 where the model learns to predict the target.
        positions: each token's place in its document.
        segments: which document of the row a token belongs to, from 1; 0 is padding.
    """

    token_ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    segments: np.ndarray


@dataclass(frozen=True, slots=True)
class Lesson:
    """How documents are shown.

    Attributes:
        document_len: documents are cut after so many tokens; None leaves them whole.
        emphasis: weight of pronouns, and of what the document has already: a character's name or noun, or a piece
            inside of a rare word; all else weighs 1.
        introductions: every second document is an introduction instead of a story.
    """

    document_len: int | None = None
    emphasis: float = 1.0
    introductions: bool = False


def batch(tokenizer: Tokenizer, seed: int, step: int, shape: tuple[int, int], lesson: Lesson) -> Batch:
    """The batch of one training step; `shape` is rows and tokens of a row."""
    result = empty_batch(shape)
    for row in range(shape[0]):
        first = (step * shape[0] + row) * _CANDIDATES
        fill_row(result, row, (encode(tokenizer, seed, first + index, lesson) for index in range(_CANDIDATES)))
    return result


def empty_batch(shape: tuple[int, int]) -> Batch:
    """Rows of padding."""
    return Batch(
        token_ids=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        weights=np.zeros(shape, np.float32),
        positions=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
    )


def one_row(token_ids: list[int], row_len: int) -> Batch:
    """One document alone, each of its tokens weighing 1."""
    result = empty_batch((1, row_len))
    fill_row(result, 0, iter([(token_ids, [1.0] * len(token_ids))]))
    return result


def fill_row(out: Batch, row: int, documents: Iterator[tuple[list[int], list[float]]]) -> None:
    """Pack documents, token ids and their weights, into one row until hardly any room is left."""
    start, segment, row_len = 0, 0, out.token_ids.shape[1]
    for token_ids, weights in documents:
        length = len(token_ids)
        if start + length > row_len:
            continue
        segment += 1
        here = slice(start, start + length)
        out.token_ids[row, here] = token_ids
        out.targets[row, start : start + length - 1] = token_ids[1:]
        out.weights[row, start : start + length - 1] = weights[1:]
        out.positions[row, here] = np.arange(length)
        out.segments[row, here] = segment
        start += length
        if row_len - start < _MIN_LEN:
            return


def encode(tokenizer: Tokenizer, seed: int, index: int, lesson: Lesson) -> tuple[list[int], list[float]]:
    """Token ids of one document and the weight of each."""
    token_ids: list[int] = []
    weights: list[float] = []
    make = introduction if lesson.introductions and index % 2 else document
    max_num_chars = lesson.document_len and lesson.document_len * _CHARS_PER_TOKEN
    for span in make(seed, index):
        encoding = tokenizer.encode(span.text[:max_num_chars])
        for token_id, token in zip(encoding.ids, encoding.tokens, strict=True):
            is_again = token_id in token_ids and (token in _CAST_TOKENS or (token.isascii() and token.isalpha()))
            is_kept = is_again or token in _PRONOUN_TOKENS
            weights.append((lesson.emphasis if is_kept else 1.0) if span.is_learnt else 0.0)
            token_ids.append(token_id)
    return token_ids[: lesson.document_len], weights[: lesson.document_len]
