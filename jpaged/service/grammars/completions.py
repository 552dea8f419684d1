"""Ways to end: tokens that complete a text from where its grammar is, and few of them.

The library says which tokens may come, not how far the end is. A beam of states goes forward, a token a level: what is
forced is jumped over, then the tokens that close something and the longest ones are tried. A token after which the same
tokens may come as somewhere before leads nowhere, but for counts, and is put behind others. The first end found need
not be the shortest there is; each that is found is a way to end, and that is what is relied on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from jpaged.service.grammars.vocabulary import Vocabulary

_NUM_CLOSERS = 8
_NUM_LONGEST = 2
_NUM_SINGLES = 100
"""All tokens of one byte are among them, where it is one that may come."""
_STANDSTILL, _AGAIN = 4, 1
"""What a token costs after which the same tokens may come as before it, and as somewhere before.

A bracket that closes (-2) and stands still may be in a text, where a quote (0) is better, or one of several that close,
where it is better than another comma (3). What goes around in a circle, as the digits of a number do, costs more each
time, so that a comma comes at last. To stand still costs as much more then: the next item of a list lets come what the
one before it did, and a text in it would else be filled up sooner than ended.
"""
_FIRST_PART = 2048
_NUM_PLACES = 96
"""Places, no two of which let the same tokens come, from which an end is looked for."""
_MIN_REACH = 64


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of a search.

    Attributes:
        width: states that are kept at each level.
        num_states: tokens that are tried, about; one takes 50 us.
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
    """How a grammar ends, as far as was found.

    Attributes:
        shortest: tokens of a complete text; None where no end was found.
        reach: tokens that one more token may add to what is left to write, at most: twice the longest ending that was
            found from anywhere. None where some place had none that was found.
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
    """Tokens, `limit` at most, after which the text may end; None where the search found none. Nothing moves.

    Args:
        ways: ways to end from elsewhere, whose last parts may lead to an end from here too. With some given, the first
            way that is found is taken; else the shortest.
    """
    best: tuple[int, ...] | None = None
    bound, left = limit, effort.num_states
    beam = [_Path(matcher.deep_copy(), (), 0, 0, b"")]
    while beam and left > 0:
        open_paths: dict[tuple[bytes, int], _Path] = {}
        for path in beam:
            if not _jump(path, bound):
                continue
            if (end := _end_of(vocabulary, path, bound, ways)) is not None:
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
    """Whether the text may end after these tokens. Nothing moves; two microseconds."""
    ended = [*token_ids, vocabulary.spec.eos_token_ids[0]]
    return matcher.validate_tokens(ended) == len(ended)


def endings_of(vocabulary: Vocabulary, matcher: LLMatcher, limit: int) -> Endings:
    """Look for ways to end from the beginning, and from the first places that a text may come to."""
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
    """A way to end of `limit` tokens at most: one of those known, or another that is looked for."""
    if matcher.is_accepting():
        return ()
    for way in ways:
        if len(way) <= limit and is_completion(vocabulary, matcher, way):
            return way
    for effort in efforts or (QUICK, THOROUGH, LONG, WIDE):
        if (found := find_completion(vocabulary, matcher, limit, effort, ways)) is not None:
            return found
    return None


def _end_of(vocabulary: Vocabulary, path: _Path, bound: int, ways: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The last part of a way that ends the text from where a path is; an empty one where it may end there."""
    if path.matcher.is_accepting():
        return ()
    for way in ways:
        for start in range(max(0, len(path.token_ids) + len(way) - bound), len(way)):
            if is_completion(vocabulary, path.matcher, way[start:]):
                return way[start:]
    return None


def _jump(path: _Path, bound: int) -> bool:
    """Take the tokens that are forced; False where they lead beyond the bound."""
    if len(path.token_ids) > bound:
        return False
    forced = path.matcher.compute_ff_tokens()
    if forced:
        path.token_ids += tuple(forced)
        path.mask = b""
        return len(path.token_ids) <= bound and path.matcher.consume_tokens(forced)
    return True


def _children(vocabulary: Vocabulary, path: _Path) -> tuple[list[_Path], int]:
    """A path's next steps, and how many tokens were tried; of those after which the same may come, the cheapest."""
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
            break  # else no token was there that leads anywhere, as in an address before its @: others are tried
    return list(found.values()), num_tried


def _child(vocabulary: Vocabulary, path: _Path, token_id: int) -> _Path | None:
    matcher = path.matcher.deep_copy()
    if not matcher.consume_token(token_id):
        return None
    # Where something is forced, it is jumped over before the mask is wanted.
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
    """The first tokens of an order that a mask has, `count` at most; a part of a large vocabulary is mostly enough."""
    bits = np.frombuffer(mask, np.uint8)
    for ids in (order_v[:_FIRST_PART], order_v[_FIRST_PART:]):
        allowed = ids[(bits[ids >> 3] >> (ids & 7) & 1).astype(bool)][: count + len(vocabulary.eos_token_ids)].tolist()
        found = [token_id for token_id in allowed if token_id not in vocabulary.eos_token_ids]
        if found:
            return found[:count]
    return []
