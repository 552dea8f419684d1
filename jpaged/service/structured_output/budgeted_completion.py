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

A search finds completions: few tokens that complete a text from its grammar's current state.

The library returns the allowed tokens, not the distance to an end. The search is a beam search over states, one token a
level: it jumps over forced tokens, then tries tokens that close something and the longest tokens. A token that leads to
an already seen set of allowed tokens makes no progress (except in counted repeats) and is ranked last. The first end
found need not be the shortest; callers rely only on every result being a valid completion.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from jpaged.service.structured_output.vocabulary import Vocabulary, allowed_ids

_NUM_CLOSERS = 8
_NUM_LONGEST = 2
_NUM_SINGLES = 100
"""Includes all allowed tokens of one byte."""
_STANDSTILL, _AGAIN = 4, 1
"""Cost of a token after which the allowed tokens are as before it (standstill), or as somewhere earlier (again).

A closing bracket (-2) at a standstill may be inside a string, where a quote (0) is better, or one of several closing
brackets, where it is better than another comma (3). A repeated state, as in the digits of a number, costs more each
time, so that a comma wins at last. A standstill then costs more too: the next item of a list allows what the item
before it did, and the search would otherwise extend a string in it instead of ending it.
"""
_FIRST_PART = 2048
_NUM_PLACES = 96
"""Maximum number of states, with distinct allowed tokens, from which an end is searched."""
_MIN_REACH = 64


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of a search.

    Attributes:
        width: states kept at each level.
        num_states: approximate number of tokens tried; one takes 50 us.
    """

    width: int
    num_states: int


BRIEF = Effort(width=1, num_states=150)
QUICK = Effort(width=2, num_states=400)
THOROUGH = Effort(width=8, num_states=3000)
LONG = Effort(width=1, num_states=8_000)
STEADY = Effort(width=4, num_states=20_000)
WIDE = Effort(width=32, num_states=12_000)


@dataclass(frozen=True, slots=True)
class Endings:
    """Completions of a grammar, as far as found.

    Attributes:
        shortest: tokens of a complete text; None if no end was found.
        reach: maximum number of tokens that one more token may add to the distance to an end: twice the longest
            completion found from any state. None if no completion was found from some state.
    """

    shortest: tuple[int, ...] | None
    reach: int | None


@dataclass(slots=True)
class _Path:
    matcher: LLMatcher
    token_ids: tuple[int, ...]
    cost: int
    num_bytes: int
    mask: bytes
    seen: frozenset[int] = frozenset()
    num_again: int = 0


def find_completion(
    vocabulary: Vocabulary, matcher: LLMatcher, limit: int, effort: Effort, ways: Sequence[tuple[int, ...]] = ()
) -> tuple[int, ...] | None:
    """Return at most `limit` tokens after which the text may end; None if none are found.

    The matcher is unchanged.

    Args:
        ways: completions from other states; a suffix of one may complete the text here too. If given, the first
            completion found is returned; otherwise the shortest.
    """
    best: tuple[int, ...] | None = None
    bound, left = limit, effort.num_states
    beam = [_Path(matcher.deep_copy(), (), 0, 0, b"")]
    while beam and left > 0:
        open_paths: dict[tuple[bytes, int], _Path] = {}
        for path in beam:
            if not _jump(path, bound):
                continue
            if (end := _find_end(vocabulary, path, bound, ways)) is not None:
                best, bound = (*path.token_ids, *end), len(path.token_ids) + len(end) - 1
                if ways:
                    return best
            elif len(path.token_ids) < bound:
                path.mask = path.mask or path.matcher.compute_bitmask()
                path.seen |= {hash(path.mask)}
                open_paths.setdefault((path.mask, len(path.token_ids)), path)
        children: list[_Path] = []
        for path in open_paths.values():
            found, num_tried = _children(vocabulary, path)
            children += found
            left -= num_tried
        children.sort(key=lambda child: (child.cost, -child.num_bytes, child.token_ids))
        beam = children[: effort.width]
    return best


def is_completion(vocabulary: Vocabulary, matcher: LLMatcher, token_ids: Sequence[int]) -> bool:
    """Return True if the text may end after these tokens. The matcher is unchanged. Takes 2 us."""
    ended = [*token_ids, vocabulary.spec.eos_token_ids[0]]
    return matcher.validate_tokens(ended) == len(ended)


def search_endings(vocabulary: Vocabulary, matcher: LLMatcher, limit: int) -> Endings:
    """Search completions from the beginning, and from the first states that a text may reach."""
    shortest = find_completion(vocabulary, matcher, limit, LONG)
    if shortest is None:
        shortest = find_way(vocabulary, matcher, limit, (), (THOROUGH, STEADY, WIDE))
    elif len(shortest) > 1:
        shortest = find_completion(vocabulary, matcher, len(shortest) - 1, THOROUGH) or shortest
    if shortest is None:
        return Endings(None, None)
    longest, known = len(shortest), shortest
    left = deque([_Path(matcher.deep_copy(), (), 0, 0, b"")])
    seen: set[bytes] = set()
    while left and len(seen) < _NUM_PLACES:
        path = left.popleft()
        if not _jump(path, limit) or path.matcher.is_stopped():
            continue
        path.mask = path.mask or path.matcher.compute_bitmask()
        if path.mask in seen:
            continue
        seen.add(path.mask)
        found = find_way(vocabulary, path.matcher, limit, (known, shortest))
        if found is None:
            return Endings(shortest, None)
        known = found
        longest = max(longest, len(found))
        left.extend(_children(vocabulary, path)[0])
    return Endings(shortest, max(_MIN_REACH, 2 * longest))


def find_way(
    vocabulary: Vocabulary,
    matcher: LLMatcher,
    limit: int,
    ways: Sequence[tuple[int, ...]],
    efforts: Sequence[Effort] | None = None,
) -> tuple[int, ...] | None:
    """Return a completion of at most `limit` tokens: a known one, or one found by a search; None if there is none."""
    if matcher.is_accepting():
        return ()
    for way in ways:
        if len(way) <= limit and is_completion(vocabulary, matcher, way):
            return way
    for effort in efforts or (QUICK, THOROUGH, LONG, WIDE):
        if (found := find_completion(vocabulary, matcher, limit, effort, ways)) is not None:
            return found
    return None


def _find_end(
    vocabulary: Vocabulary, path: _Path, bound: int, ways: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the suffix of a known completion that ends the text at a path's state; empty if it may end there."""
    if path.matcher.is_accepting():
        return ()
    for way in ways:
        for start in range(max(0, len(path.token_ids) + len(way) - bound), len(way)):
            if is_completion(vocabulary, path.matcher, way[start:]):
                return way[start:]
    return None


def _jump(path: _Path, bound: int) -> bool:
    """Consume the forced tokens; return False if they exceed the bound."""
    if len(path.token_ids) > bound:
        return False
    forced = path.matcher.compute_ff_tokens()
    if forced:
        path.token_ids += tuple(forced)
        path.mask = b""
        return len(path.token_ids) <= bound and path.matcher.consume_tokens(forced)
    return True


def _children(vocabulary: Vocabulary, path: _Path) -> tuple[list[_Path], int]:
    """Return a path's next steps (the cheapest for each set of allowed tokens), and the number of tokens tried."""
    found: dict[bytes, _Path] = {}
    num_tried = 0
    closers = _first_allowed(vocabulary, path.mask, vocabulary.closers_first_v, _NUM_SINGLES)
    longest = _first_allowed(vocabulary, path.mask, vocabulary.longest_first_v, _NUM_LONGEST)
    for token_ids in ((*closers[:_NUM_CLOSERS], *longest), closers[_NUM_CLOSERS:]):
        for token_id in token_ids:
            num_tried += 1
            child = _child(vocabulary, path, token_id)
            if child is None:
                continue
            key = child.mask or token_id.to_bytes(4, "little")
            other = found.get(key)
            if other is None or (child.cost, -child.num_bytes) < (other.cost, -other.num_bytes):
                found[key] = child
        if any(hash(mask) not in path.seen for mask in found):
            break  # otherwise no token makes progress, as in an address before its @, and the second part is tried
    return list(found.values()), num_tried


def _child(vocabulary: Vocabulary, path: _Path, token_id: int) -> _Path | None:
    matcher = path.matcher.deep_copy()
    if not matcher.consume_token(token_id):
        return None
    # Forced tokens are consumed before the mask is needed.
    mask = b"" if matcher.is_stopped() or matcher.compute_ff_tokens() else matcher.compute_bitmask()
    cost, num_again = int(vocabulary.openness_v[token_id]), 0
    if mask == path.mask:
        cost, num_again = cost + _STANDSTILL + path.num_again, path.num_again
    elif hash(mask) in path.seen:
        cost, num_again = cost + _AGAIN + path.num_again, path.num_again + 1
    cost += path.cost
    num_bytes = path.num_bytes + int(vocabulary.byte_lens_v[token_id])
    return _Path(matcher, (*path.token_ids, token_id), cost, num_bytes, mask, path.seen, num_again)


def _first_allowed(vocabulary: Vocabulary, mask: bytes, order_v: NDArray[np.int64], count: int) -> list[int]:
    """Return the first `count` allowed tokens of an order. A part of a large vocabulary is usually enough."""
    bits = np.frombuffer(mask, np.uint8)
    for ids in (order_v[:_FIRST_PART], order_v[_FIRST_PART:]):
        allowed = ids[(bits[ids >> 3] >> (ids & 7) & 1).astype(bool)][: count + len(vocabulary.eos_token_ids)].tolist()
        found = [token_id for token_id in allowed if token_id not in vocabulary.eos_token_ids]
        if found:
            return found[:count]
    return []


_MAX_TRIED = 1024
"""Allowed tokens to try with known completions, lowest ids first because those are frequent: 5 ms."""
_MAX_SEARCHED = 4
_MAX_WAYS = 4


class CompletionBudget:
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

    def copy(self) -> CompletionBudget:
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
            mask_w[:] = vocabulary.build_mask(way[:1]) if way else vocabulary.eos_mask_w
        elif self._is_near(way):
            if self._tried is None:
                self._tried = self._finishable(matcher, mask_w, way)
            ends = mask_w & vocabulary.eos_mask_w
            mask_w[:] = vocabulary.build_mask(list(self._tried)) | ends

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
