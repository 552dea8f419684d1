"""A tree of suffixes with counts: how often a string was there, and what came next.

    texts   0  a b c a b d          leaves of "a b": the places behind it, 0:2 and 0:5
            1  x a b c              and 1:3; behind "x a b" is 1:3 alone

A node of a suffix tree is a string, its count the number of leaves below it, and its children what follows at those
leaves. This one keeps the leaves alone, in a table by the last tokens of a string (`SEED_LEN`): a node is the list of
its leaves, a child is made when somebody descends, and there are no edges to split, join or relabel when a text comes
or goes. A token costs one entry, whatever the depth. Who reads along a text keeps its match: the leaves whose last
tokens are his, each with how many, from which those of the next token follow.

Proposing is that of SuffixDecoding (https://arxiv.org/abs/2411.04975, section 3; the weighing of matches as in
https://github.com/snowflakedb/ArcticInference): for each length of a match the likeliest path down from its node, whose
score is the sum of the estimated probabilities of its tokens. The best score wins, the longer of two matches as good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

SEED_LEN = 2
"""Tokens of the shortest match, by which leaves are found."""
MAX_LEAVES = 32
"""Leaves of a seed at most, the last ones: what is likely is estimated from them."""
_TOKEN_BITS = 24
_SEED_MASK = (1 << _TOKEN_BITS * SEED_LEN) - 1
_OFFSET_BITS = 32
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1

Leaf = int
"""A place in a text: its number and the offset of the token there, in one integer, so that a leaf + 1 is the next."""
Match = dict[Leaf, int]
"""Leaves behind the last tokens of who reads along, and how many tokens before each are the same."""
NO_MATCH: Match = {}


def next_seed(seed: int, token_id: int) -> int:
    """The last tokens as one number, after one more; 0 before the first."""
    return (seed << _TOKEN_BITS | token_id + 1) & _SEED_MASK


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        score: how many of them are expected to come, by what was counted.
        leaf: where they come from, the last of several places.
    """

    token_ids: list[int]
    score: float
    leaf: Leaf = 0

    @property
    def text_number(self) -> int:
        return self.leaf >> _OFFSET_BITS


NO_DRAFT = Draft([], 0.0)


@dataclass(frozen=True, slots=True)
class DraftRule:
    """How long a draft may be, and how likely it has to be.

    Attributes:
        max_depth: tokens of a match and its draft together.
        max_factor: tokens of a draft for each token of its match.
        min_prob: of a draft's last token, given the match: counted paths, of the paths that begin with it.
    """

    max_depth: int
    max_factor: float
    min_prob: float

    def num_tokens(self, match_len: int) -> int:
        """Tokens of a draft behind a match of so many."""
        return min(int(match_len * self.max_factor + 1e-6), self.max_depth - match_len)

    @property
    def best_len(self) -> int:
        """The length of a match that allows the longest draft; longer and shorter ones allow less the further off."""
        return max(range(1, self.max_depth), key=self.num_tokens)


class SuffixTree:
    """Texts and the leaves of their suffixes.

    Args:
        rule: of the drafts.
        max_tokens: tokens of a growing text whose leaves are kept, the last ones.
    """

    def __init__(self, rule: DraftRule, max_tokens: int = _OFFSET_MASK) -> None:
        self._rule = rule
        self._num_drafted = [rule.num_tokens(match_len) for match_len in range(rule.max_depth)]
        self._best_len = rule.best_len
        self._max_tokens = max_tokens
        self._texts: dict[int, list[int]] = {}
        self._leaves: dict[int, Leaf | list[Leaf]] = {}

    @property
    def num_leaves(self) -> int:
        return sum(1 if isinstance(leaves, int) else len(leaves) for leaves in self._leaves.values())

    def put(self, number: int, token_ids: list[int]) -> None:
        """Takes in a text, whole; a number is never given again, and the list is not written any more."""
        self._texts[number] = token_ids
        seed = 0
        for leaf, token_id in enumerate(token_ids[:-1], start=(number << _OFFSET_BITS) + 1):
            seed = next_seed(seed, token_id)
            self._add(seed, leaf)

    def remove(self, number: int) -> None:
        """Lets go of a text and its leaves."""
        seed = 0
        for leaf, token_id in enumerate(self._texts.pop(number)[:-1], start=(number << _OFFSET_BITS) + 1):
            seed = next_seed(seed, token_id)
            self._discard(seed, leaf)

    def follow(self, token_ids: list[int]) -> None:
        """Takes in a text that will grow, as number 0; its leaves come with `grow`."""
        self._texts[0] = token_ids

    def grow(self, seed: int, end: int) -> None:
        """Adds the leaf behind the first `end` tokens of text 0, whose last ones are `seed`."""
        self._add(seed, end)
        if end > self._max_tokens:
            last, old = end - self._max_tokens, 0
            for token_id in self._texts[0][max(0, last - SEED_LEN) : last]:
                old = next_seed(old, token_id)
            self._discard(old, last)

    def advance(self, match: Match, seed: int, token_id: int) -> Match:
        """The match after one more token, the last one of `seed`.

        A text that came meanwhile counts from its seed on.
        """
        found = self._leaves.get(seed)
        if found is None or seed < 1 << _TOKEN_BITS * (SEED_LEN - 1):
            return NO_MATCH
        known = match.get
        if isinstance(found, int):
            return {found: known(found - 1, SEED_LEN - 1) + 1}
        matched = {leaf: known(leaf - 1, SEED_LEN - 1) + 1 for leaf in found}
        if len(found) == MAX_LEAVES:  # there may have been more: those that were matched stay
            for leaf, length in match.items():
                if leaf + 1 not in matched and self._token(leaf) == token_id:
                    matched[leaf + 1] = length + 1
            if len(matched) > 2 * MAX_LEAVES:
                longest = sorted(matched.items(), key=lambda one: (one[1], one[0]), reverse=True)
                return dict(longest[:MAX_LEAVES])
        return matched

    def draft(self, match: Match, limit: int) -> Draft:
        """What may come next behind a match; at most `limit` tokens."""
        best = NO_DRAFT
        if not match or limit < 1:
            return best
        longest = self._rule.max_depth - 1
        if len(match) == 1:
            ((leaf, length),) = match.items()
            return self._path([leaf], self._most(0, min(length, longest), limit))
        by_len = sorted(match, key=lambda leaf: (match[leaf], leaf), reverse=True)
        lens = [min(match[leaf], longest) for leaf in by_len]
        end, num_leaves = 0, len(by_len)
        while end < num_leaves:
            length = lens[end]
            while end < num_leaves and lens[end] == length:
                end += 1
            most = self._most(lens[end] if end < num_leaves else 0, length, limit)
            if most > best.score:
                found = self._path(by_len[:end], most)
                if found.score > best.score:
                    best = found
        return best

    def _most(self, above: int, length: int, limit: int) -> int:
        """Tokens of the longest draft behind a match that is longer than `above` and no longer than `length`."""
        return min(limit, self._num_drafted[min(max(self._best_len, above + 1), length)])

    def _path(self, leaves: Sequence[Leaf], most: int) -> Draft:
        """The likeliest path down from a node; of two tokens that came as often, the one behind the first leaf."""
        ways = [self._behind(leaf, most) for leaf in leaves]
        if ways.count(ways[0]) == len(ways):
            return Draft(ways[0], float(len(ways[0])), leaves[0])
        token_ids: list[int] = []
        prob, score = 1.0, 0.0
        for place in range(most):
            counts = Counter([way[place] for way in ways if len(way) > place])
            if not counts:
                break
            token_id, count = counts.most_common(1)[0]
            prob *= count / len(ways)
            if prob < self._rule.min_prob:
                break
            token_ids.append(token_id)
            score += prob
            if count < len(ways):
                ways = [way for way in ways if len(way) > place and way[place] == token_id]
        return Draft(token_ids, score, leaves[0])

    def _behind(self, leaf: Leaf, num_tokens: int) -> list[int]:
        text = self._texts.get(leaf >> _OFFSET_BITS)
        offset = leaf & _OFFSET_MASK
        return [] if text is None else text[offset : offset + num_tokens]

    def _token(self, leaf: Leaf) -> int | None:
        behind = self._behind(leaf, 1)
        return behind[0] if behind else None

    def _add(self, seed: int, leaf: Leaf) -> None:
        found = self._leaves.get(seed)
        if found is None:
            self._leaves[seed] = leaf
        elif isinstance(found, int):
            self._leaves[seed] = [found, leaf]
        else:
            found.append(leaf)
            if len(found) > MAX_LEAVES:
                del found[0]

    def _discard(self, seed: int, leaf: Leaf) -> None:
        """Removes a leaf, which may have been dropped for later ones."""
        found = self._leaves.get(seed)
        if isinstance(found, list):
            if leaf in found:
                found.remove(leaf)
                if len(found) == 1:
                    self._leaves[seed] = found[0]
        elif found == leaf:
            del self._leaves[seed]
