"""The model of the fakes: the next token of a context, computable by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NAN = 1 << 40
"""Added to the token in a slot whose keys and values are NaN."""

Window = int | tuple[int, int] | None
"""Tokens that a KV group sees; a pair is a window and a number of sink tokens."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The tokens that a row's last token sees in each KV group, with their positions, and the adapter's weight."""

    places: list[NDArray[np.int64]]
    tokens: list[NDArray[np.int64]]
    weight: int

    @classmethod
    def of(cls, context: list[int], windows: Sequence[Window], weight: int) -> Seen:
        """Return everything that the last token of a context sees."""
        places = [places_seen(len(context), window) for window in windows]
        return cls(places, [np.array(context, np.int64)[of_group] for of_group in places], weight)

    @property
    def context(self) -> list[int]:
        """All tokens that the first KV group sees."""
        tokens: list[int] = (self.tokens[0] % NAN).tolist()
        return tokens

    def next_token(self, vocab_size: int) -> int:
        """Return the next token."""
        total = self.weight
        for group, (places, tokens) in enumerate(zip(self.places, self.tokens, strict=True)):
            total += (group + 1) * int(np.sum((places + 1) * (tokens % NAN)))
        return total % vocab_size


def places_seen(end: int, window: Window) -> NDArray[np.int64]:
    """Return the positions that the last of `end` tokens sees."""
    width, num_sinks = window if isinstance(window, tuple) else (window, 0)
    begin = max(0, end - width) if width else 0
    return np.concatenate([np.arange(min(num_sinks, begin)), np.arange(begin, end)])


def sampled(seen: Seen, row: np.void, vocab_size: int) -> int:
    """Return the token that a row samples."""
    token_id = seen.next_token(vocab_size)
    if row["temperature_r"] > 0:
        high, low = (int(word) for word in row["seeds_r2"])
        token_id += _noise(high << 32 | low, int(row["sequence_indices_r"]), int(row["positions_r"]))
    banned = set(row["banned_token_ids_rx"].tolist())
    token_id %= vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


@dataclass(frozen=True, slots=True)
class Script:
    """Samples a given answer instead of `sampled`, and then the token that ends it.

    Args:
        answers: the tokens of the answer of each sequence of a request, in turn.
        marker: the end of a prompt; no answer contains it.
        end: the token after an answer.
    """

    answers: Sequence[Sequence[int]]
    marker: Sequence[int]
    end: int

    def __call__(self, seen: Seen, row: np.void, vocab_size: int) -> int:
        context, size = seen.context, len(self.marker)
        marker = list(self.marker)
        starts = (at + size for at in range(len(context) - size, -1, -1) if context[at : at + size] == marker)
        place = len(context) - next(starts, len(context))
        answer = self.answers[int(row["sequence_indices_r"]) % len(self.answers)]
        return answer[place] if place < len(answer) else self.end


def _noise(seed: int, sequence_index: int, position: int) -> int:
    return (seed * 31 + sequence_index * 17 + position * 7) % 101


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int = 257,
    seed: int | None = None,
    sequence_index: int = 0,
    eos_token_ids: frozenset[int] = frozenset(),
    windows: Sequence[Window] = (None,),
    weight: int = 0,
) -> list[int]:
    """Return what a FakeExecutor generates for a prompt: up to num_tokens, or through an end-of-sequence token.

    Args:
        seed: the request's seed if its temperature is above 0; None is greedy.
        windows: of the KV groups.
        weight: of the adapter; 0 is none.
    """
    context = list(prompt_token_ids)
    while len(context) - len(prompt_token_ids) < num_tokens:
        token_id = Seen.of(context, windows, weight).next_token(vocab_size)
        if seed is not None:
            token_id += _noise(seed, sequence_index, len(context))
        context.append(token_id % vocab_size)
        if context[-1] in eos_token_ids:
            break
    return context[len(prompt_token_ids) :]
