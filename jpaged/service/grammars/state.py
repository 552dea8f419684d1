"""State of one sequence in its grammar, backed by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from jpaged.service.grammars.closing import Closing
from jpaged.service.grammars.completions import Endings
from jpaged.service.grammars.vocabulary import Vocabulary


@dataclass(slots=True)
class LlguidanceState:
    """Implementation of the engine's `GrammarState`.

    Attributes:
        matcher: the library's state, advanced only by this object.
        endings: known completions of the grammar, from its compile.
        narrowing: removes tokens from masks so that the text is complete in time; None without `always_complete`.
    """

    vocabulary: Vocabulary
    matcher: LLMatcher
    endings: Endings | None = None
    narrowing: Closing | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self.matcher.is_accepting())

    @property
    def has_ended(self) -> bool:
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    @property
    def failure(self) -> str | None:
        return self.matcher.get_error().partition("\n")[0] if self.matcher.is_error() else None

    def fill(self, mask_w: NDArray[np.int32]) -> None:
        num_words = self.vocabulary.num_library_words
        if num_words == self.vocabulary.num_words and mask_w.flags.c_contiguous:
            self.matcher.unsafe_compute_mask_ptr(mask_w.ctypes.data, mask_w.nbytes)
        else:
            mask_w[:] = self.vocabulary.allowed_by(self.matcher)
        mask_w &= self.vocabulary.all_mask_w
        self.narrow(mask_w)

    def narrow(self, mask_w: NDArray[np.int32]) -> None:
        """Remove tokens from the library's mask after which the text could not be completed in time."""
        if self.narrowing is not None and not self.matcher.is_stopped():
            self.narrowing.narrow(self.matcher, mask_w)

    def accept(self, token_id: int) -> bool:
        if self.narrowing is None or self.matcher.validate_tokens([token_id]) != 1:
            is_taken = self.matcher.try_consume_tokens([token_id]) == 1
            return is_taken or (self.has_ended and token_id in self.vocabulary.eos_token_ids)
        if token_id not in self.vocabulary.eos_token_ids:
            self.narrowing.move(self.matcher, token_id)
        return self.matcher.try_consume_tokens([token_id]) == 1

    def forced(self, limit: int) -> list[int]:
        if self.matcher.is_stopped():
            return []
        way = None if self.narrowing is None else self.narrowing.way(self.matcher)
        return list(self.matcher.compute_ff_tokens() if way is None else way)[:limit]

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        if self.has_ended:
            ends = self.vocabulary.eos_token_ids
            return next((i for i, token_id in enumerate(token_ids) if token_id not in ends), len(token_ids))
        count = int(self.matcher.validate_tokens(list(token_ids)))
        if self.narrowing is None:
            return count
        state, mask_w = self.copy(), np.zeros(self.vocabulary.num_words, np.int32)
        for index, token_id in enumerate(token_ids[:count]):
            state.fill(mask_w)
            if not mask_w[token_id // 32] >> (token_id % 32) & 1 or not state.accept(token_id):
                return index
        return count

    def closing(self, num_tokens_left: int) -> None:
        self.narrowing = Closing(self.vocabulary, self.endings, num_tokens_left)

    def copy(self) -> LlguidanceState:
        closing = None if self.narrowing is None else self.narrowing.copy()
        return LlguidanceState(self.vocabulary, self.matcher.deep_copy(), self.endings, closing)
