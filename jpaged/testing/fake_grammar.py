"""A grammar over token ids without text: the allowed tokens depend on the previous ones, and often there is only one.

    tokens so far   0      1      2      3 ... length
    allowed         some   one    one    some  only the end

A hash of the previous tokens selects them, so that a wrong token changes the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor.rows import num_mask_words
from jpaged.structured import GrammarBatch, GrammarState, StatesOneByOne

_NUM_CHOICES = 7


@dataclass(slots=True)
class FakeGrammarState:
    """A `GrammarState`."""

    grammar: FakeGrammar
    token_ids: list[int] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.token_ids) >= self.grammar.length

    @property
    def has_ended(self) -> bool:
        return self.is_complete

    def allowed(self) -> list[int]:
        """Return the tokens that may come next."""
        return self.grammar.allowed_after(self.token_ids)

    def fill(self, mask_w: NDArray[np.int32]) -> None:
        bits = np.zeros(mask_w.size * 32, np.uint8)
        bits[self.allowed()] = 1
        mask_w[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.token_ids.append(token_id)
        if self.grammar.fails_after is not None and len(self.token_ids) >= self.grammar.fails_after:
            self.failure = "as configured"
        return True

    def forced(self, limit: int) -> list[int]:
        found: list[int] = []
        while len(found) < limit and len(self.token_ids) + len(found) < self.grammar.length:
            allowed = self.grammar.allowed_after([*self.token_ids, *found])
            if len(allowed) > 1:
                break
            found += allowed
        return found

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        state = self.copy()
        return next((i for i, token_id in enumerate(token_ids) if not state.accept(token_id)), len(token_ids))

    def closing(self, num_tokens_left: int) -> None:
        self.grammar = replace(self.grammar, length=min(self.grammar.length, len(self.token_ids) + num_tokens_left))

    def copy(self) -> FakeGrammarState:
        return FakeGrammarState(self.grammar, list(self.token_ids), self.failure)


@dataclass(frozen=True, slots=True)
class FakeGrammar:
    """A `Grammar`.

    Attributes:
        length: tokens before the end.
        salt: another number gives another grammar.
        fails_after: number of tokens after which the grammar fails; None never fails.
        is_free: several tokens are allowed everywhere except at the end.
    """

    vocab_size: int
    eos_token_id: int
    length: int
    salt: int = 0
    fails_after: int | None = None
    is_free: bool = False

    def start(self) -> FakeGrammarState:
        return FakeGrammarState(self)

    def allowed_after(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that may follow these."""
        if len(token_ids) >= self.length:
            return [self.eos_token_id]
        digest = zlib.crc32(repr((self.salt, token_ids)).encode())
        num_choices = 1 if digest % 3 and not self.is_free else _NUM_CHOICES
        others = [token_id for token_id in range(self.vocab_size) if token_id != self.eos_token_id]
        return [others[(digest + 31 * i) % len(others)] for i in range(num_choices)]


@dataclass(slots=True)
class FakeMasks:
    """A `GrammarMasks`."""

    vocab_size: int
    num_filled: int = 0

    @property
    def num_words(self) -> int:
        return num_mask_words(self.vocab_size)

    def batch(self, states: Sequence[GrammarState], rows: Sequence[int]) -> GrammarBatch:
        return StatesOneByOne(states, rows)

    def fill(self, states: Sequence[GrammarState | None], mask_rw: NDArray[np.int32]) -> None:
        for mask_w, state in zip(mask_rw, states, strict=True):
            mask_w[:] = -1
            if state is not None:
                state.fill(mask_w)
                self.num_filled += 1
