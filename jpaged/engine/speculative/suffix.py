"""Suffix decoding: proposes what followed earlier occurrences of the last tokens, here or in earlier outputs.

    own tree      the sequence's prompt and output
    shared tree   the outputs of earlier requests with the same sharing key

Both trees are searched and the draft with the better score is used, the sequence's own if equal. The length of a draft
depends on the length of the match and the confidence of the counts, so little data yields short or no drafts. The
options are vLLM's (https://docs.vllm.ai/en/latest/features/speculative_decoding/suffix/).

An earlier output is stored with the end of the prompt, so that the same prompt matches it at the first token. A
sequence can use it from its next token on.

Suffix tree with counts: how often a string occurred, and what followed.

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

Outputs of earlier requests, for requests that share them, within limits.

    sharing A  [ text 0 ][ text 3 ][ text 4 ]        a tree for each sharing key: no request reads, or is sped up by,
    sharing B  [ text 1 ]                            texts of another key
               └ least recently used

If room is short, the key with the largest share drops its least recently used text. So a key with less than an equal
share loses nothing to others, and cannot observe their activity by the speed of the key's requests.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.config import SpeculativeOptions
from jpaged.engine.speculative.ngram import MAX_INDEXED_TOKENS

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


class SuffixDraft(NamedTuple):
    """Likely next tokens.

    Attributes:
        score: expected number of accepted tokens, from the counts.
        text_number: the text they come from, the most recent of several.
    """

    token_ids: list[int]
    score: float
    text_number: int


NO_DRAFT = SuffixDraft([], 0.0, 0)


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
        seed = _pack_seed(token_ids[max(0, begin - SEED_LEN) : begin])
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
            old = _pack_seed(token_ids[before:first])
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

    def draft(self, match: Match, limit: int) -> SuffixDraft:
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

    def _path(self, leaves: Sequence[Leaf], most: int) -> SuffixDraft:
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
            return SuffixDraft(token_ids, float(len(token_ids)), leaves[0] >> _OFFSET_BITS)
        token_ids = []
        prob, score = 1.0, 0.0
        for offset in range(most):
            column = [way[offset] for way in ways if len(way) > offset]
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
                ways = [way for way in ways if len(way) > offset and way[offset] == token_id]
        return SuffixDraft(token_ids, score, leaves[0] >> _OFFSET_BITS)

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


def _pack_seed(token_ids: list[int]) -> int:
    """Return the last tokens as one number; 0 for none."""
    seed = 0
    for token_id in token_ids:
        seed = (seed << _TOKEN_BITS | token_id + 1) & _SEED_MASK
    return seed


_MAX_TOKENS = 1 << 19
"""Maximum number of tokens of all texts; one takes about 130 bytes."""


@dataclass(slots=True, eq=False)
class _Holding:
    """Texts of one sharing key.

    Attributes:
        num_tokens_of: tokens of each text, the least recently used first.
        num_tokens: tokens of all texts.
    """

    tree: SuffixTree
    num_tokens_of: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_tokens: int = 0


class SharedTexts:
    """Store of texts by sharing key, with limits over all keys.

    Args:
        rule: rule for drafts from them.
        max_texts: maximum number of texts; 0 stores none.
        max_tokens: maximum number of tokens of all texts.
    """

    def __init__(self, rule: DraftRule, max_texts: int, max_tokens: int = _MAX_TOKENS) -> None:
        self._rule = rule
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._holdings: dict[bytes, _Holding] = {}
        self._by_share: list[tuple[float, bytes]] = []  # max-heap by share; stale entries remain
        self._unsettled: deque[tuple[SuffixTree, int, int, int]] = deque()  # tree, text, tokens indexed, tokens
        self._last_number = 0
        self._num_texts = 0
        self._num_tokens = 0

    @property
    def num_texts(self) -> int:
        return self._num_texts

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_unsettled(self) -> int:
        """Return the number of texts, removed ones included, that are not fully indexed."""
        return len(self._unsettled)

    @property
    def num_leaves(self) -> int:
        return sum(holding.tree.num_leaves for holding in self._holdings.values())

    def tree(self, sharing: bytes) -> SuffixTree | None:
        """Return the tree of a sharing key, or None if it has no text."""
        holding = self._holdings.get(sharing)
        return None if holding is None else holding.tree

    def add(self, sharing: bytes, token_ids: list[int]) -> None:
        """Store a text, truncated at the front to the limit, and drop others to make room.

        It is proposed from only after `commit_full_blocks` has indexed it.
        """
        token_ids = token_ids[-self._max_tokens :]
        if not self._max_texts or len(token_ids) < 2:
            return
        holding = self._holdings.get(sharing)
        if holding is None:
            holding = self._holdings[sharing] = _Holding(SuffixTree(self._rule))
        self._last_number += 1
        holding.tree.put(self._last_number, token_ids)
        self._unsettled.append((holding.tree, self._last_number, 0, len(token_ids)))
        holding.num_tokens_of[self._last_number] = len(token_ids)
        holding.num_tokens += len(token_ids)
        self._num_texts += 1
        self._num_tokens += len(token_ids)
        self._rank(sharing, holding)
        while self._num_texts > self._max_texts or self._num_tokens > self._max_tokens:
            self._give_up()
        if len(self._unsettled) > 2 * self._num_texts + 64:  # most were removed before
            self._unsettled = deque(one for one in self._unsettled if one[0].has(one[1]))

    def settle(self, num_tokens: int) -> None:
        """Index up to num_tokens tokens of new texts, in order of arrival."""
        while self._unsettled and num_tokens > 0:
            tree, number, begin, length = self._unsettled.popleft()
            if not tree.has(number):
                continue
            end = min(length, begin + num_tokens)
            tree.index(number, begin, end)
            num_tokens -= end - begin
            if end < length:
                self._unsettled.appendleft((tree, number, end, length))

    def used(self, sharing: bytes, number: int) -> None:
        """Record that a draft came from a text."""
        holding = self._holdings.get(sharing)
        if holding is not None and number in holding.num_tokens_of:
            holding.num_tokens_of.move_to_end(number)

    def _share(self, holding: _Holding) -> float:
        """Return the share of a holding: the larger one of texts and of tokens."""
        return max(len(holding.num_tokens_of) / self._max_texts, holding.num_tokens / self._max_tokens)

    def _rank(self, sharing: bytes, holding: _Holding) -> None:
        heapq.heappush(self._by_share, (-self._share(holding), sharing))
        if len(self._by_share) > 64 + 2 * len(self._holdings):  # most entries are stale
            self._by_share = [(-self._share(one), key) for key, one in self._holdings.items()]
            heapq.heapify(self._by_share)

    def _give_up(self) -> None:
        """Drop one text of the holding with the largest share."""
        while True:
            share, sharing = heapq.heappop(self._by_share)
            holding = self._holdings.get(sharing)
            if holding is not None and -share == self._share(holding):
                break
        number, num_tokens = holding.num_tokens_of.popitem(last=False)
        holding.tree.remove(number)
        holding.num_tokens -= num_tokens
        self._num_texts -= 1
        self._num_tokens -= num_tokens
        if holding.num_tokens_of:
            self._rank(sharing, holding)
        else:
            del self._holdings[sharing]


_MAX_OWN_TOKENS = 1 << 15
"""Maximum number of recent tokens in a sequence's own tree; one takes about 130 bytes."""
_NUM_SETTLED = 16
"""Tokens of earlier outputs that one `propose` indexes if `remove` left some: the end of a long one."""


@dataclass(slots=True, eq=False)
class _SequenceMatches:
    """One sequence and its matches in both trees.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        sharing: key of the texts it may use; None for none.
        num_read: tokens that are in its own tree.
        seed: last of these tokens as a seed.
        num_matched: number of tokens at the last match in its own tree; 0 before the first.
        num_matched_shared: the same for the shared tree.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    sharing: bytes | None
    tree: SuffixTree
    num_read: int = 0
    seed: int = 0
    num_matched: int = 0
    num_matched_shared: int = 0
    own: Match = field(default_factory=dict)
    shared: Match = field(default_factory=dict)


class SuffixProposer:
    """Proposer of the likeliest continuation in own and earlier texts.

    Args:
        rule: rule for drafts.
        texts: outputs of earlier requests.
        max_own_tokens: maximum number of tokens in a sequence's own tree.
    """

    def __init__(self, rule: DraftRule, texts: SharedTexts, max_own_tokens: int = _MAX_OWN_TOKENS) -> None:
        self.texts = texts
        self._rule = rule
        self._longest = rule.num_tokens(rule.best_len)
        self._max_own_tokens = max_own_tokens
        self._readers: dict[int, _SequenceMatches] = {}

    @classmethod
    def of(cls, options: SpeculativeOptions) -> SuffixProposer:
        rule = DraftRule(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        return cls(rule, SharedTexts(rule, options.suffix_decoding_max_cached_requests))

    @property
    def num_own_leaves(self) -> int:
        return sum(reader.tree.num_leaves for reader in self._readers.values())

    def begin(self, sequence_key: int, token_ids: Sequence[int], sharing: bytes | None) -> None:
        text = list(token_ids)
        tree = SuffixTree(self._rule, self._max_own_tokens)
        self._readers[sequence_key] = _SequenceMatches(text, len(text), sharing, tree)

    def extend(self, sequence_key: int, new_token_ids: Sequence[int]) -> None:
        self._readers[sequence_key].token_ids += new_token_ids

    def propose(self, sequence_key: int, limit: int) -> list[int]:
        reader = self._readers[sequence_key]
        self.texts.settle(_NUM_SETTLED)
        num_tokens = len(reader.token_ids)
        if not self._read(reader):
            return []
        num_new, reader.num_matched = num_tokens - reader.num_matched, num_tokens
        if num_new:
            reader.own = reader.tree.advance(reader.own, reader.seed, reader.token_ids, num_new)
        best = reader.tree.draft(reader.own, limit)
        if reader.sharing is None or best.score >= min(limit, self._longest):
            return best.token_ids
        texts = self.texts.tree(reader.sharing)
        if texts is not None:
            num_new, reader.num_matched_shared = num_tokens - reader.num_matched_shared, num_tokens
            if num_new:
                reader.shared = texts.advance(reader.shared, reader.seed, reader.token_ids, num_new)
            theirs = texts.draft(reader.shared, limit)
            if theirs.score > best.score:
                self.texts.used(reader.sharing, theirs.text_number)
                best = theirs
        return best.token_ids

    def remove(self, sequence_key: int) -> None:
        """Store the output, if any, for sequences that share it."""
        reader = self._readers.pop(sequence_key)
        if reader.sharing is not None and len(reader.token_ids) > reader.num_prompt_tokens:
            begin = max(0, reader.num_prompt_tokens - self._rule.max_depth)
            self.texts.add(reader.sharing, reader.token_ids[begin:])
            self.texts.settle(MAX_INDEXED_TOKENS)

    def _read(self, reader: _SequenceMatches) -> bool:
        """Index new tokens in the own tree; return False if the limit per step leaves some."""
        token_ids, begin = reader.token_ids, reader.num_read
        end = min(len(token_ids), begin + MAX_INDEXED_TOKENS)
        if end > begin:
            reader.seed = reader.tree.grow(reader.seed, token_ids, begin, end)
            reader.num_read = end
        return end == len(token_ids)
