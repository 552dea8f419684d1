"""Masks of a whole batch, filled on the library's threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par
from numpy.typing import NDArray

from jpaged.service.grammars.state import LlguidanceState
from jpaged.service.grammars.vocabulary import Vocabulary
from jpaged.structured.grammar import GrammarBatch, GrammarState, StatesOneByOne


class LlguidanceMasks:
    """Implementation of the engine's `GrammarMasks`. Used by one thread at a time.

    Attributes:
        num_words: W, the words of a mask.

    Args:
        num_threads: threads of the library; None for its default.
    """

    def __init__(self, num_words: int, num_threads: int | None = None) -> None:
        self.num_words = num_words
        self._executor = LLExecutor(num_threads)

    def batch(self, states: Sequence[GrammarState], rows: Sequence[int]) -> GrammarBatch:
        ours = [state for state in states if isinstance(state, LlguidanceState) and state.narrowing is None]
        if len(ours) < len(states) or not ours or ours[0].vocabulary.num_library_words != self.num_words:
            return StatesOneByOne(states, rows)
        matchers = [state.matcher for state in ours]
        return LlguidanceBatch(self._executor, ours[0].vocabulary, ours, list(zip(matchers, rows, strict=True)))

    def fill(self, states: Sequence[GrammarState | None], mask_rw: NDArray[np.int32]) -> None:
        ours = [(row, state) for row, state in enumerate(states) if isinstance(state, LlguidanceState)]
        if len(ours) < len(states):
            mask_rw[:] = -1
            for row, state in enumerate(states):
                if state is not None and not isinstance(state, LlguidanceState):
                    state.fill(mask_rw[row])
        if not ours:
            return
        vocabulary, num_words = ours[0][1].vocabulary, mask_rw.shape[1]
        num_library_words = vocabulary.num_library_words
        is_direct = num_library_words == num_words and mask_rw.flags.c_contiguous
        library_rw = mask_rw if is_direct else np.zeros((len(mask_rw), num_library_words), np.int32)
        fill_next_token_bitmask_par(self._executor, [(state.matcher, row) for row, state in ours], library_rw)
        rows = slice(None) if len(ours) == len(states) else [row for row, _ in ours]
        mask_rw[rows] = library_rw[rows, :num_words] & vocabulary.all_mask_w
        for row, state in ours:
            if state.narrowing is not None:
                state.narrow(mask_rw[row])


@dataclass(frozen=True, slots=True)
class LlguidanceBatch:
    """Implementation of `GrammarBatch` for states whose masks need no Python code per state.

    Attributes:
        matchers: the matchers of the states, with the rows of their masks.
    """

    executor: LLExecutor
    vocabulary: Vocabulary
    states: list[LlguidanceState]
    matchers: list[tuple[LLMatcher, int]]

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        if not self.vocabulary.eos_token_ids.isdisjoint(token_ids):  # a matcher that has ended reports these as errors
            pairs = enumerate(zip(self.states, token_ids, strict=True))
            return [place for place, (state, token_id) in pairs if not state.accept(token_id)]
        pairs_of = [(matcher, token_id) for (matcher, _), token_id in zip(self.matchers, token_ids, strict=True)]
        are_taken = consume_token_par(self.executor, pairs_of)
        return [] if all(are_taken) else [place for place, is_taken in enumerate(are_taken) if not is_taken]

    def fill(self, mask_rw: NDArray[np.int32]) -> bool:
        fill_next_token_bitmask_par(self.executor, self.matchers, mask_rw)
        mask_rw[[row for _, row in self.matchers]] &= self.vocabulary.all_mask_w
        return not any(matcher.is_error() for matcher, _ in self.matchers)
