"""Interface of a grammar for the engine: the allowed next tokens. Independent of the grammar library.

    compiled.start() -> state          one state for each sequence; `copy` when sequences fork
    masks.fill(states, mask_rw)        while the device runs `forward`: before each `sample`
    state.accept(token)                the sampled token
    state.forced(limit)                forced tokens: appended without a step each (jump-forward)
    masks.batch(states, rows)          for several steps of the same rows

A mask has a bit for each token: token t is bit t % 32 of word t // 32, and W words hold the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np


class GrammarState(Protocol):
    """State of one sequence in its grammar. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """True if the text may end here: end-of-sequence tokens are allowed."""
        ...

    @property
    def has_ended(self) -> bool:
        """True if only an end-of-sequence token may follow; stays True after one."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason why the grammar cannot continue, such as a work limit per step; None if it can."""
        ...

    def fill(self, mask_w: np.ndarray) -> None:
        """Write the mask of allowed tokens into int32 `[W]`, including end-of-sequence tokens if the text may end."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance over a token; return False, without a change, if it is not allowed."""
        ...

    def forced(self, limit: int) -> list[int]:
        """Return up to `limit` next tokens that are each the only allowed one. The state does not change.

        Appending them gives the same tokens as masks would. End-of-sequence tokens are not included.
        """
        ...

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading tokens of a draft that are allowed in sequence. The state does not change."""
        ...

    def closing(self, num_tokens_left: int) -> None:
        """Keep the text complete: from here on allow only what can be finished in this number of accepted tokens.

        End-of-sequence tokens do not count: with none left the text is complete, and nothing else is allowed.
        """
        ...

    def copy(self) -> Self:
        """Return an independent copy."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by all requests with the same constraint. Thread-safe."""

    def start(self) -> GrammarState:
        """Return a state at the beginning."""
        ...


class GrammarBatch(Protocol):
    """The same rows for several steps, with minimal work per row and step."""

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        """Advance each state over its token; return the indices of states whose token is not allowed."""
        ...

    def fill(self, mask_rw: np.ndarray) -> bool:
        """Write the masks of the rows; return False if a state has failed."""
        ...


class GrammarMasks(Protocol):
    """Fills masks of a whole batch."""

    def batch(self, states: Sequence[GrammarState], rows: Sequence[int]) -> GrammarBatch:
        """Return a batch of states with these rows of the mask."""
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
    """A `GrammarBatch` for states of any kind."""

    states: Sequence[GrammarState]
    rows: Sequence[int]

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        pairs = enumerate(zip(self.states, token_ids, strict=True))
        return [place for place, (state, token_id) in pairs if not state.accept(token_id)]

    def fill(self, mask_rw: np.ndarray) -> bool:
        for state, row in zip(self.states, self.rows, strict=True):
            state.fill(mask_rw[row])
        return all(state.failure is None for state in self.states)
