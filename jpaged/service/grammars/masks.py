"""Masks of a whole batch, on the library's own threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from jpaged.service.grammars.state import LlguidanceState
from jpaged.service.grammars.vocabulary import Vocabulary
from jpaged.structured.grammar import GrammarState


class LlguidanceMasks:
    """A `GrammarMasks` of the engine's. Used by one thread at a time.

    Args:
        num_threads: threads of the library's; None takes as many as it sees fit.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads)

    @property
    def num_words(self) -> int:
        return self._vocabulary.num_words

    def fill(self, states: Sequence[GrammarState | None], mask_rw: NDArray[np.int32]) -> None:
        rows = [(cast(LlguidanceState, state), row) for row, state in enumerate(states) if state is not None]
        mask_rw[:] = self._vocabulary.all_mask_w
        if not rows:
            return
        num_words = self._vocabulary.num_library_words
        is_direct = num_words == mask_rw.shape[1] and mask_rw.flags.c_contiguous
        library_rw = mask_rw if is_direct else np.zeros((len(mask_rw), num_words), np.int32)
        fill_next_token_bitmask_par(self._executor, [(state.matcher, row) for state, row in rows], library_rw)
        for state, row in rows:
            mask_rw[row] = library_rw[row, : mask_rw.shape[1]]
            state.finish_mask(mask_rw[row])
