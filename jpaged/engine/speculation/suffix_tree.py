"""Suffix tree with counts: how often a string occurred, and what followed.

    texts   0  a b c a b d          leaves of "a b": the places after it, 0:2 and 0:5
            1  x a b c              and 1:3; after "x a b" only 1:3

A node of a suffix tree is a string, its count the number of leaves below it, and its children what follows at these
leaves. This implementation stores only the leaves, in a table by the last tokens of a string (`SEED_LEN`). A node is a
list of leaves and a child is computed on descent. So adding or removing a text splits, joins or relabels no edges. A
token costs one entry at any depth. A reader of a text keeps its match: the leaves whose last tokens equal the reader's,
with the length of each match. The match after the next token follows from it.

Drafts are those of SuffixDecoding (https://arxiv.org/abs/2411.04975, section 3; matches are weighted as in
https://github.com/snowflakedb/ArcticInference). Each length of a match yields the likeliest path down from its node.
Its score is the sum of the estimated token probabilities. The best score is used; ties go to the longer match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SEED_LEN = 2
"""Tokens of the shortest match, by which leaves are indexed."""
MAX_LEAVES = 16
"""Maximum number of leaves per seed, the most recent ones, from which probabilities are estimated. With 8, too much
looks likely: with phrases in random order 61 % of the draft tokens are accepted, with 16 leaves 81 %, and with 32 the
same.
"""
_TOKEN_BITS = 24
_SEED_MASK = (1 << _TOKEN_BITS * SEED_LEN) - 1
_LEAST_SEED = 1 << _TOKEN_BITS * (SEED_LEN - 1)  # smaller seeds have fewer tokens
_OFFSET_BITS = 32
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1

Leaf = int
"""Place in a text: text number and token offset in one integer, so that leaf + 1 is the next place."""
Match = dict[Leaf, int]
"""Leaves after the reader's last tokens, and how many tokens before each are equal."""
NO_MATCH: Match = {}


class Draft(NamedTuple):
    """Likely next tokens.

    Attributes:
        score: expected number of accepted tokens, from the counts.
        text_number: the text they come from, the most recent of several.
    """

    token_ids: list[int]
    score: float
    text_number: int


NO_DRAFT = Draft([], 0.0, 0)


@dataclass(frozen=True, slots=True)
class DraftRule:
    """Limits on the length and the probability of a draft.

    Attributes:
        max_depth: maximum number of tokens of a match and its draft together.
        max_factor: maximum number of draft tokens per token of the match.
        min_prob: minimum probability of a draft's last token given the match, by path counts.
    """

    max_depth: int
    max_factor: float
    min_prob: float

    def num_tokens(self, match_len: int) -> int:
        """Return the maximum number of draft tokens after a match of match_len tokens."""
        return min(int(match_len * self.max_factor + 1e-6), self.max_depth - match_len)

    @property
    def best_len(self) -> int:
        """Return the match length that allows the longest draft; the limit falls with the distance from it."""
        return max(range(1, self.max_depth), key=self.num_tokens)


class SuffixTree:
    """Texts and the leaves of their suffixes.

    A growing text is the only one in its tree, as number 0.

    Args:
        rule: rule for drafts.
        max_tokens: number of recent tokens of a growing text whose leaves are kept.
    """

    def __init__(self, rule: DraftRule, max_tokens: int = _OFFSET_MASK) -> None:
        self._rule = rule
        self._num_drafted = [rule.num_tokens(match_len) for match_len in range(rule.max_depth)]
        self._best_len = rule.best_len
        self._max_tokens = max_tokens
        self._texts: dict[int, list[int]] = {}
        self._leaves: dict[int, Leaf | list[Leaf]] = {}  # most seeds have one leaf, and need no list
        self._growing_end = 0  # leaf at the end of the growing text, which nothing follows yet

    @property
    def num_leaves(self) -> int:
        return sum(1 if isinstance(found, int) else len(found) for found in self._leaves.values())

    def put(self, number: int, token_ids: list[int]) -> None:
        """Add a text, whose leaves are added by `index`; numbers start at 1 and must not be reused.

        The list must not be modified afterwards.
        """
        self._texts[number] = token_ids

    def index(self, number: int, begin: int, end: int) -> None:
        """Add the leaves after the tokens `begin` to `end` of a text."""
        token_ids = self._texts[number]
        seed = _seed_of(token_ids[max(0, begin - SEED_LEN) : begin])
        self._add(seed, token_ids[begin : min(end, len(token_ids) - 1)], (number << _OFFSET_BITS) + begin)

    def has(self, number: int) -> bool:
        """Return True if the tree has a text of this number."""
        return number in self._texts

    def remove(self, number: int) -> None:
        """Remove a text and its leaves."""
        self._discard(0, self._texts.pop(number)[:-1], number << _OFFSET_BITS)

    def grow(self, seed: int, token_ids: list[int], begin: int, end: int) -> int:
        """Append the tokens `begin` to `end` to the growing text.

        Args:
            seed: result of the last call; 0 at first.
            token_ids: the text; the tree keeps a reference.
            begin: number of tokens that were appended before.

        Returns:
            the seed at `end`.
        """
        self._texts[0] = token_ids
        self._growing_end = end
        seed = self._add(seed, token_ids[begin:end], begin)
        first, last = max(0, begin - self._max_tokens), end - self._max_tokens
        if last > first:
            before = max(0, first - SEED_LEN)
            old = _seed_of(token_ids[before:first])
            self._discard(old, token_ids[first:last], first)
        return seed

    def advance(self, match: Match, seed: int, token_ids: list[int], num_new: int) -> Match:
        """Return the match after num_new more tokens of the reader's text, which now ends with `seed`."""
        found = self._leaves.get(seed)
        if found is None or seed < _LEAST_SEED:
            return NO_MATCH
        texts, known = self._texts, match.get
        new = token_ids[-num_new:] if match and num_new > SEED_LEN else None
        before = token_ids[-1 - SEED_LEN] if len(token_ids) > SEED_LEN else -1
        matched: Match = {}
        for leaf in (found,) if isinstance(found, int) else found:
            if leaf == self._growing_end:
                continue
            length = known(leaf - num_new)
            if length is not None and (new is None or self._before(leaf, num_new) == new):
                matched[leaf] = length + num_new
                continue
            text, offset = texts[leaf >> _OFFSET_BITS], leaf & _OFFSET_MASK
            if offset > SEED_LEN and text[offset - 1 - SEED_LEN] == before:
                matched[leaf] = self._common_len(text, offset, token_ids)
            else:  # most of them
                matched[leaf] = SEED_LEN
        if (
            match and not isinstance(found, int) and len(found) == MAX_LEAVES
        ):  # some may have been dropped: leaves that were matched before stay
            self._keep(match, matched, token_ids[-num_new:])
            if len(matched) > 2 * MAX_LEAVES:
                longest = sorted(matched.items(), key=lambda one: (one[1], one[0]), reverse=True)
                return dict(longest[:MAX_LEAVES])
        return matched

    def draft(self, match: Match, limit: int) -> Draft:
        """Return the best draft after a match, of at most `limit` tokens."""
        best = NO_DRAFT
        if not match or limit < 1:
            return best
        longest = self._rule.max_depth - 1
        order = [(length if length < longest else longest, leaf) for leaf, length in match.items()]
        order.sort(reverse=True)
        end, num_leaves = 0, len(order)
        while end < num_leaves:
            length = order[end][0]
            while end < num_leaves and order[end][0] == length:
                end += 1
            most = self._most(order[end][0] if end < num_leaves else 0, length, limit)
            if most > best.score:
                found = self._path([leaf for _, leaf in order[:end]], most)
                if found.score > best.score:
                    best = found
        return best

    def _most(self, above: int, length: int, limit: int) -> int:
        """Return the maximum draft length after a match longer than `above` and no longer than `length`."""
        return min(limit, self._num_drafted[min(max(self._best_len, above + 1), length)])

    def _path(self, leaves: Sequence[Leaf], most: int) -> Draft:
        """Return the likeliest path down from a node; equally frequent tokens are resolved by the first leaf."""
        texts = self._texts
        ways = [
            texts[leaf >> _OFFSET_BITS][leaf & _OFFSET_MASK : (leaf & _OFFSET_MASK) + most]
            if leaf >> _OFFSET_BITS in texts
            else []
            for leaf in leaves
        ]
        token_ids = ways[0]
        if ways.count(token_ids) == len(ways):
            return Draft(token_ids, float(len(token_ids)), leaves[0] >> _OFFSET_BITS)
        token_ids = []
        prob, score = 1.0, 0.0
        for place in range(most):
            column = [way[place] for way in ways if len(way) > place]
            if not column:
                break
            token_id = column[0]
            count = column.count(token_id)
            if 2 * count < len(column):
                token_id, count = Counter(column).most_common(1)[0]
            prob *= count / len(ways)
            if prob < self._rule.min_prob:
                break
            token_ids.append(token_id)
            score += prob
            if count < len(ways):
                ways = [way for way in ways if len(way) > place and way[place] == token_id]
        return Draft(token_ids, score, leaves[0] >> _OFFSET_BITS)

    def _common_len(self, text: list[int], offset: int, token_ids: list[int]) -> int:
        """Return the number of equal tokens before a place and at the end of a text, up to the depth."""
        most = min(self._rule.max_depth, offset, len(token_ids))
        length = SEED_LEN
        while length < most and text[offset - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length

    def _before(self, leaf: Leaf, num_tokens: int) -> list[int]:
        offset = leaf & _OFFSET_MASK
        return self._texts[leaf >> _OFFSET_BITS][offset - num_tokens : offset]

    def _keep(self, match: Match, matched: Match, new_token_ids: list[int]) -> None:
        """Add the leaves of a match that the new tokens continue, even if their seed has dropped them."""
        num_new = len(new_token_ids)
        for leaf, length in match.items():
            end = leaf + num_new
            if end in matched or end == self._growing_end or leaf >> _OFFSET_BITS not in self._texts:
                continue
            if self._before(end, num_new) == new_token_ids:
                matched[end] = length + num_new

    def _add(self, seed: int, token_ids: list[int], begin: Leaf) -> int:
        """Add the leaves after each of the tokens, the first of which is at `begin`; return the seed of the last."""
        leaves = self._leaves
        for leaf, token_id in enumerate(token_ids, start=begin + 1):
            seed = (seed << _TOKEN_BITS | token_id + 1) & _SEED_MASK
            found = leaves.get(seed)
            if found is None:
                leaves[seed] = leaf
            elif isinstance(found, int):
                leaves[seed] = [found, leaf]
            else:
                found.append(leaf)
                if len(found) > MAX_LEAVES:
                    del found[0]
        return seed

    def _discard(self, seed: int, token_ids: list[int], begin: Leaf) -> None:
        """Remove the leaves after each of the tokens, unless later ones have replaced them."""
        leaves = self._leaves
        for leaf, token_id in enumerate(token_ids, start=begin + 1):
            seed = (seed << _TOKEN_BITS | token_id + 1) & _SEED_MASK
            found = leaves.get(seed)
            if found == leaf:
                del leaves[seed]
            elif isinstance(found, list) and leaf in found:
                found.remove(leaf)
                if len(found) == 1:
                    leaves[seed] = found[0]


def _seed_of(token_ids: list[int]) -> int:
    """Return the last tokens as one number; 0 for none."""
    seed = 0
    for token_id in token_ids:
        seed = (seed << _TOKEN_BITS | token_id + 1) & _SEED_MASK
    return seed
