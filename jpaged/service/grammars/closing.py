"""Completes a text when few tokens are left: masks allow only tokens after which the text can be finished in time.

A completion of c tokens is known for the grammar's current state, and b tokens are left:

    b <= c              only the known completion
    b - c <= reach      tokens after which a completion of at most b - 1 tokens is known: each is tried with the known
                        completions, and a few with a search
    else                every token: none leads that far from an end

So a completion that fits is always known, starting with the one found at admission. `reach` is measured, not proven: a
state that no walk reached may be further from an end than twice the furthest one seen. The text is then truncated, as
without this module.

The allowed tokens depend only on the previous tokens, not on which masks were computed in between. If a position got no
mask (its token was forced or a draft token), its completions are searched first.
"""

from __future__ import annotations

import copy

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from jpaged.service.grammars.completions import BRIEF, Endings, find_way, is_completion
from jpaged.service.grammars.vocabulary import Vocabulary, allowed_ids

_MAX_TRIED = 1024
"""Allowed tokens to try with known completions, lowest ids first because those are frequent: 5 ms."""
_MAX_SEARCHED = 4
_MAX_WAYS = 4


class Closing:
    """The token budget of one sequence, and its known completions."""

    def __init__(self, vocabulary: Vocabulary, endings: Endings | None, num_tokens_left: int) -> None:
        self._vocabulary = vocabulary
        self._reach = None if endings is None else endings.reach
        self._left = num_tokens_left
        self._way: tuple[int, ...] | None = None
        self._ways: list[tuple[int, ...]] = []
        if endings is not None and endings.shortest is not None:
            self._ways.append(endings.shortest)
        self._tried: dict[int, tuple[int, ...]] | None = None

    def copy(self) -> Closing:
        """Return an independent copy."""
        return copy.copy(self)  # both copies replace their lists and dicts and never mutate them

    def move(self, matcher: LLMatcher, token_id: int) -> None:
        """Count the next token; the matcher has not consumed it yet."""
        way = self._known(matcher)
        if way and way[0] == token_id:
            self._way = way[1:]
        elif way is not None and len(way) < self._left and self._is_near(way):
            if self._tried is None:
                self._tried = self._finishable(matcher, self._vocabulary.allowed_by(matcher), way)
            self._way = self._tried.get(token_id)
            if self._way is not None:
                self._remember(self._way)
        else:
            self._way = None
        self._left -= 1
        self._tried = None

    def way(self, matcher: LLMatcher) -> tuple[int, ...] | None:
        """Return the tokens that must come if there is time for no others; None if there is a choice."""
        way = self._known(matcher)
        return way if way is not None and len(way) >= self._left else None

    def narrow(self, matcher: LLMatcher, mask_w: NDArray[np.int32]) -> None:
        """Remove tokens from a mask after which the text could no longer be finished."""
        way = self._known(matcher)
        if way is None:
            return
        vocabulary = self._vocabulary
        if len(way) >= self._left:
            mask_w[:] = vocabulary.mask_of(way[:1]) if way else vocabulary.eos_mask_w
        elif self._is_near(way):
            if self._tried is None:
                self._tried = self._finishable(matcher, mask_w, way)
            ends = mask_w & vocabulary.eos_mask_w
            mask_w[:] = vocabulary.mask_of(list(self._tried)) | ends

    def _is_near(self, way: tuple[int, ...]) -> bool:
        """Return True if the next token may leave too few tokens to finish."""
        return self._reach is None or self._left - len(way) <= self._reach

    def _known(self, matcher: LLMatcher) -> tuple[int, ...] | None:
        """Return a completion from the current state, of at most the remaining tokens if one is found."""
        if self._way is None:
            self._way = find_way(self._vocabulary, matcher, max(self._left, 1), self._ways)
            if self._way is not None:
                self._remember(self._way)
        return self._way

    def _finishable(
        self, matcher: LLMatcher, mask_w: NDArray[np.int32], way: tuple[int, ...]
    ) -> dict[int, tuple[int, ...]]:
        """Return the tokens after which a completion is known that fits, each with its completion."""
        vocabulary, left = self._vocabulary, self._left - 1
        tried: dict[int, tuple[int, ...]] = {way[0]: way[1:]} if way else {}
        ways = [one for one in dict.fromkeys((way, (), *self._ways)) if len(one) <= left]
        allowed = [token_id for token_id in allowed_ids(mask_w).tolist() if token_id not in vocabulary.eos_token_ids]
        unknown = []
        for token_id in allowed[:_MAX_TRIED]:
            found = next((one for one in ways if is_completion(vocabulary, matcher, (token_id, *one))), None)
            if found is None:
                unknown.append(token_id)
            else:
                tried.setdefault(token_id, found)
        unknown.sort(key=lambda token_id: int(vocabulary.openness_v[token_id]))
        for token_id in unknown[:_MAX_SEARCHED]:
            after = matcher.deep_copy()
            if token_id in tried or not after.consume_token(token_id):
                continue
            found = find_way(vocabulary, after, left, tuple(tried.values())[:1] + tuple(self._ways), (BRIEF,))
            if found is not None:
                tried[token_id] = found
        return tried

    def _remember(self, way: tuple[int, ...]) -> None:
        self._ways = [way, *(one for one in self._ways if one != way)][:_MAX_WAYS]
