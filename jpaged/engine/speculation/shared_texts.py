"""What earlier requests made, for those that may profit from it, and no more of it than there is room for.

    sharing A  [ text 0 ][ text 3 ][ text 4 ]        a tree for each of them: nobody sees, or is sped up by, what
    sharing B  [ text 1 ]                            others made
               └ used longest ago

Where room is short, whoever holds most gives up the text that was used longest ago, whole. So one who holds less than
an equal part loses nothing to others, and cannot tell by the speed of its requests what they do.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from jpaged.engine.speculation.suffix_tree import DraftRule, SuffixTree

_MAX_TOKENS = 1 << 19
"""Tokens of all texts; one takes some 130 bytes."""


@dataclass(slots=True, eq=False)
class _Holding:
    """The texts that share.

    Attributes:
        num_tokens_of: of each text, the one used longest ago first.
        num_tokens: of all.
    """

    tree: SuffixTree
    num_tokens_of: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_tokens: int = 0


class SharedTexts:
    """Keeps texts under keys that tell who shares, within bounds over all of them.

    Args:
        rule: of the drafts from them.
        max_texts: texts at most; 0 keeps none.
        max_tokens: tokens of all texts at most.
    """

    def __init__(self, rule: DraftRule, max_texts: int, max_tokens: int = _MAX_TOKENS) -> None:
        self._rule = rule
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._holdings: dict[bytes, _Holding] = {}
        self._by_share: list[tuple[float, bytes]] = []  # a heap, the greatest share first; of old shares too
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
        """Texts, some of them given up, that are not ready to the end."""
        return len(self._unsettled)

    @property
    def num_leaves(self) -> int:
        return sum(holding.tree.num_leaves for holding in self._holdings.values())

    def tree(self, sharing: bytes) -> SuffixTree | None:
        """The tree of those who share; None where there is no text yet, or no more."""
        holding = self._holdings.get(sharing)
        return None if holding is None else holding.tree

    def add(self, sharing: bytes, token_ids: list[int]) -> None:
        """Keeps a text, the end of it where it is longer than all may be, and makes room for it.

        Nothing is proposed from it before it is settled.
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
        if len(self._unsettled) > 2 * self._num_texts + 64:  # most were given up before
            self._unsettled = deque(one for one in self._unsettled if one[0].has(one[1]))

    def settle(self, num_tokens: int) -> None:
        """Gets so many more tokens ready of the texts that came, the first of them first."""
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
        """A draft came from that text."""
        holding = self._holdings.get(sharing)
        if holding is not None and number in holding.num_tokens_of:
            holding.num_tokens_of.move_to_end(number)

    def _share(self, holding: _Holding) -> float:
        """The part that it takes of what is scarcer for it, places or tokens."""
        return max(len(holding.num_tokens_of) / self._max_texts, holding.num_tokens / self._max_tokens)

    def _rank(self, sharing: bytes, holding: _Holding) -> None:
        heapq.heappush(self._by_share, (-self._share(holding), sharing))
        if len(self._by_share) > 64 + 2 * len(self._holdings):  # most of it is old
            self._by_share = [(-self._share(one), key) for key, one in self._holdings.items()]
            heapq.heapify(self._by_share)

    def _give_up(self) -> None:
        """Drops one text of whoever holds most."""
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
