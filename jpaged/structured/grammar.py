"""What the engine asks of a grammar: which tokens may come next. It knows no grammar library.

    compiled.start() -> state          one state for each sequence; `copy` where sequences fork
    masks.fill(states, mask_rw)        while the device runs `forward`: before each `sample`
    state.accept(token)                what was sampled
    state.forced(limit)                what follows without a choice: appended without a step each
    masks.batch(states, rows)          for several steps of the same rows

A mask has a bit for each token: token t is bit t % 32 of word t // 32, and W words hold the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np


class GrammarState(Protocol):
    """Where one sequence is in its grammar. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here: end-of-sequence tokens are among those that may come."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow but an end-of-sequence token; so it stays after one."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot go on, as where a step needs more work than one may: the request has to end."""
        ...

    def fill(self, mask_w: np.ndarray) -> None:
        """Write the tokens that may come next into int32 `[W]`; end-of-sequence tokens where the text may end."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move over a token; False, and nothing moves, where it may not come."""
        ...

    def forced(self, limit: int) -> list[int]:
        """The tokens that are each the only one that may come, one after another, `limit` at most. Nothing moves.

        Each is what a mask would have left: appending them changes no token. No end-of-sequence token is among them.
        """
        ...

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """How many of a proposal's tokens may come, one after another, before the first that may not. Nothing moves."""
        ...

    def closing(self, num_tokens_left: int) -> None:
        """Keep the text whole: from here on allow only what can be finished in so many tokens, as `accept` counts them.

        End-of-sequence tokens are not counted: with none left the text is complete, and nothing else may come.
        """
        ...

    def copy(self) -> Self:
        """A state that moves by itself from here on."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by all requests that ask for it. Safe to call from several threads."""

    def start(self) -> GrammarState:
        """A state at the beginning."""
        ...


class GrammarBatch(Protocol):
    """The same rows for several steps: what is done for each of them at every step costs no more than it has to."""

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        """Move each state over its token; the places, among the states, of those whose token may not come."""
        ...

    def fill(self, mask_rw: np.ndarray) -> bool:
        """Write the masks where the rows have theirs; False where a state has failed."""
        ...


class GrammarMasks(Protocol):
    """Masks of a whole batch."""

    def batch(self, states: Sequence[GrammarState], rows: Sequence[int]) -> GrammarBatch:
        """The states of rows with these places in masks, as they move from here on."""
        ...

    @property
    def num_words(self) -> int:
        """W, the words of a mask."""
        ...

    def fill(self, states: Sequence[GrammarState | None], mask_rw: np.ndarray) -> None:
        """Write each row's mask into int32 `[R, W]`, on several threads without the GIL; None allows every token."""
        ...


@dataclass(frozen=True, slots=True)
class StatesOneByOne:
    """A `GrammarBatch` of any states."""

    states: Sequence[GrammarState]
    rows: Sequence[int]

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        pairs = enumerate(zip(self.states, token_ids, strict=True))
        return [place for place, (state, token_id) in pairs if not state.accept(token_id)]

    def fill(self, mask_rw: np.ndarray) -> bool:
        for state, row in zip(self.states, self.rows, strict=True):
            state.fill(mask_rw[row])
        return all(state.failure is None for state in self.states)
