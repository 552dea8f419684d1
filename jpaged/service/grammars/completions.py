"""Ways to end: tokens that complete a text from where its grammar is, and few of them.

The library says which tokens may come, not how far the end is. A beam of states goes forward, a token a level: what is
forced is jumped over, then the tokens that close something and the longest ones are tried. A token after which the same
tokens may come as before leads nowhere, but for counts, and is put behind others. The first end found need not be the
shortest there is; each that is found is a way to end, and that is what is relied on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from jpaged.service.grammars.vocabulary import Vocabulary

_NUM_CLOSERS = 8
_NUM_LONGEST = 2
_STANDSTILL = 3
"""What a token costs that changes nothing of what may come."""
_NUM_WALKS = 4
_WALK_LEN = 24
_NUM_SHORT = 64


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of a search.

    Attributes:
        width: states that are kept at each level.
        num_states: states that are looked at, at most; one takes 0.1 ms, and ten times that of a large vocabulary.
    """

    width: int
    num_states: int


QUICK = Effort(width=2, num_states=400)
THOROUGH = Effort(width=8, num_states=3000)
LONG = Effort(width=1, num_states=10_000)


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


def find_completion(
    vocabulary: Vocabulary, matcher: LLMatcher, limit: int, effort: Effort = QUICK
) -> tuple[int, ...] | None:
    """Tokens, `limit` at most, after which the text may end; None where the search found none. Nothing moves."""
    best: tuple[int, ...] | None = None
    bound, left = limit, effort.num_states
    beam = [_Path(matcher.deep_copy(), (), 0, 0, b"")]
    while beam and left > 0:
        open_paths: dict[tuple[bytes, int], _Path] = {}
        for path in beam:
            if not _jump(path, bound):
                continue
            if path.matcher.is_accepting():
                best, bound = path.token_ids, len(path.token_ids) - 1
            elif len(path.token_ids) < bound:
                path.mask = path.mask or path.matcher.compute_bitmask()
                open_paths.setdefault((path.mask, len(path.token_ids)), path)
                left -= 1
        children = [child for path in open_paths.values() for child in _children(vocabulary, path)]
        left -= len(children)
        children.sort(key=lambda child: (child.cost, -child.num_bytes, child.token_ids))
        beam = children[: effort.width]
    return best


def is_completion(vocabulary: Vocabulary, matcher: LLMatcher, token_ids: Sequence[int]) -> bool:
    """Whether the text may end after these tokens. Nothing moves; two microseconds."""
    ended = [*token_ids, vocabulary.spec.eos_token_ids[0]]
    return matcher.validate_tokens(ended) == len(ended)


def endings_of(vocabulary: Vocabulary, matcher: LLMatcher, limit: int) -> Endings:
    """Look for ways to end from the beginning, and from a hundred places that a model might come to."""
    shortest = find_completion(vocabulary, matcher, limit, LONG)
    if shortest is None:
        shortest = find_completion(vocabulary, matcher, limit, THOROUGH)
    elif len(shortest) > 1:
        shortest = find_completion(vocabulary, matcher, len(shortest) - 1, THOROUGH) or shortest
    if shortest is None:
        return Endings(None, None)
    rng = np.random.default_rng(0)
    longest, known = len(shortest), shortest
    for _ in range(_NUM_WALKS):
        walk = matcher.deep_copy()
        for _ in range(_WALK_LEN):
            walk.consume_tokens(walk.compute_ff_tokens())
            if walk.is_stopped():
                break
            allowed = _flags(vocabulary, walk.compute_bitmask())
            allowed[list(vocabulary.eos_token_ids)] = False
            ids = np.flatnonzero(allowed)
            if rng.random() < 0.5:  # most tokens are words; what opens and closes is where endings differ
                ids = vocabulary.closers_first_v[allowed[vocabulary.closers_first_v]][:_NUM_SHORT]
            if not len(ids) or not walk.consume_token(int(rng.choice(ids))):
                break
            if not is_completion(vocabulary, walk, known):
                found = find_completion(vocabulary, walk, limit) or find_completion(vocabulary, walk, limit, LONG)
                if found is None:
                    return Endings(shortest, None)
                known = found
            longest = max(longest, len(known))
    return Endings(shortest, 2 * longest + 16)


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


def _children(vocabulary: Vocabulary, path: _Path) -> list[_Path]:
    """A path's next steps; of those after which the same may come, the one of most bytes."""
    found: dict[bytes, _Path] = {}
    for token_id in _candidates(vocabulary, path.mask):
        matcher = path.matcher.deep_copy()
        if not matcher.consume_token(token_id):
            continue
        # Where something is forced, it is jumped over before the mask is wanted.
        mask = b"" if matcher.is_stopped() or matcher.compute_ff_tokens() else matcher.compute_bitmask()
        cost = path.cost + int(vocabulary.openness_v[token_id]) + _STANDSTILL * (mask == path.mask)
        num_bytes = path.num_bytes + int(vocabulary.byte_lens_v[token_id])
        child = _Path(matcher, (*path.token_ids, token_id), cost, num_bytes, mask)
        other = found.get(mask) if mask else None
        if other is None or (cost, -num_bytes) < (other.cost, -other.num_bytes):
            found[mask or bytes([token_id % 256, len(found) % 256])] = child
    return list(found.values())


def _candidates(vocabulary: Vocabulary, mask: bytes) -> list[int]:
    allowed = _flags(vocabulary, mask)
    found: dict[int, None] = {}
    for order_v, count in ((vocabulary.closers_first_v, _NUM_CLOSERS), (vocabulary.longest_first_v, _NUM_LONGEST)):
        found.update(dict.fromkeys(order_v[allowed[order_v]][:count].tolist()))
    return [token_id for token_id in found if token_id not in vocabulary.eos_token_ids]


def _flags(vocabulary: Vocabulary, mask: bytes) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return bits[: vocabulary.spec.vocab_size].astype(bool)
