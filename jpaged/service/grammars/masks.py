"""Masks of a whole batch, on the library's own threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from jpaged.service.grammars.state import LlguidanceState
from jpaged.structured.grammar import GrammarState


class LlguidanceMasks:
    """A `GrammarMasks` of the engine's. Used by one thread at a time.

    Attributes:
        num_words: W, the words of a mask.

    Args:
        num_threads: threads of the library's; None takes as many as it sees fit.
    """

    def __init__(self, num_words: int, num_threads: int | None = None) -> None:
        self.num_words = num_words
        self._executor = LLExecutor(num_threads)

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
