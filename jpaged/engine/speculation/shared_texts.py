"""Outputs of earlier requests, for requests that share them, within limits.

    sharing A  [ text 0 ][ text 3 ][ text 4 ]        a tree for each sharing key: no request reads, or is sped up by,
    sharing B  [ text 1 ]                            texts of another key
               └ least recently used

If room is short, the key with the largest share drops its least recently used text. So a key with less than an equal
share loses nothing to others, and cannot observe their activity by the speed of the key's requests.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from jpaged.engine.speculation.suffix_tree import DraftRule, SuffixTree

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

        It is proposed from only after `settle` has indexed it.
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
