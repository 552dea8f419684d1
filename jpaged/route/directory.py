"""Table of the servers that have a prompt's beginning cached: from KV events, or from where prompts were sent. No I/O.

    hash of a beginning -> the lives of servers that were sent a prompt with it
                           least recently used entries are evicted first, the longest beginnings first

A restarted server has a new life and an empty cache; entries of the former life no longer count.

For a prompt of token ids, a server with KV events has what the events report, plus the prompts of open calls: their
blocks are in use, or will be once computed.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from jpaged.client.routing.endpoints import S, rank
from jpaged.route.prefixes import Beginning, Chain


class Told(Protocol):
    """Index of the prefixes that servers report by KV events."""

    def num_tokens(self, prompt: Beginning) -> Mapping[str, int]:
        """Return the number of cached leading tokens per server, only for servers that report them."""


class Directory:
    """Placement of a router's calls by prompt beginning.

    Args:
        max_entries: maximum number of hashes, about 200 bytes each.
        told: index of KV events; None if there is none.

    Attributes:
        num_placed: prompts placed.
        num_hits: prompts placed on a server that has their beginning.
        num_passed_over: prompts whose best server was skipped because of too much load.
    """

    def __init__(self, max_entries: int, told: Told | None = None) -> None:
        self._max_entries = max_entries
        self._told = told
        self._lives_of = OrderedDict[bytes, frozenset[int]]()
        self._life_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._open: dict[int, Counter[bytes]] = {}
        self._numbers = itertools.count()
        self.num_placed = self.num_hits = self.num_passed_over = 0

    def __len__(self) -> int:
        return len(self._lives_of)

    def begin(self, name: str) -> None:
        """Add a server, or restart it: it holds nothing yet."""
        self.end(name)
        life = next(self._numbers)
        self._life_of[name], self._name_of[life] = life, name
        self._open[life] = Counter()

    def end(self, name: str) -> None:
        """Remove a server and its entries."""
        life = self._life_of.pop(name, None)
        if life is not None:
            del self._name_of[life], self._open[life]

    def life_of(self, name: str) -> int | None:
        """Return the current life of a server; None if unknown."""
        return self._life_of.get(name)

    def place(self, key: Beginning, usable: Sequence[S]) -> S:
        """Choose a server and record that the prompt is sent there. See `Placement`."""
        chosen = self.choose(key, usable)
        self.note(key, chosen.name)
        return chosen

    def choose(self, key: Beginning, usable: Sequence[S]) -> S:
        """Return the server with the longest cached beginning; among equals, the least loaded.

        Ties are broken by rendezvous hashing, so that several routers without entries agree.
        """
        told = {} if self._told is None else self._told.num_tokens(key)
        length, holders = self._longest(key, {one.name for one in usable}, told)
        anywhere = length if len(usable) == len(self._life_of) else self._longest(key, self._life_of.keys(), told)[0]
        self.num_placed += 1
        self.num_hits += length > 0
        self.num_passed_over += anywhere > length
        among = [one for one in usable if one.name in holders] if length else usable
        least = min(one.num_busy for one in among)
        return max((one for one in among if one.num_busy == least), key=lambda one: rank(key.chain[0], one.name))

    def note(self, key: Beginning, name: str) -> None:
        """Record that a server was sent this prompt. The longest beginning is entered first, and so evicted first."""
        life = self._life_of.get(name)
        if life is None:
            return
        if self._told is not None and key.token_ids is not None:
            self._open[life].update(key.chain)
        alone, entries = frozenset((life,)), self._lives_of
        for digest in reversed(key.chain):
            held = entries.get(digest)
            if held is None:
                entries[digest] = alone
            elif life not in held:
                entries[digest] = alone.union(one for one in held if one in self._name_of)
            entries.move_to_end(digest)
        while len(entries) > self._max_entries:
            entries.popitem(last=False)

    def ended(self, key: Beginning, life: int) -> None:
        """Record the end of a placed call, in the life of the server that began it."""
        calls = self._open.get(life)
        if calls is not None and key.token_ids is not None:
            for digest in key.chain:
                calls[digest] -= 1
                if calls[digest] <= 0:
                    del calls[digest]

    def _longest(self, key: Beginning, names: Set[str], told: Mapping[str, int]) -> tuple[int, Set[str]]:
        """Return the length of the longest cached beginning, in hashes or tokens, and the servers that have it."""
        depth, holders = self._longest_sent(key.chain, names - told.keys())
        lengths = dict.fromkeys(holders, depth if key.token_ids is None else key.num_tokens(depth))
        for name in names & told.keys() & self._life_of.keys():
            lengths[name] = max(told[name], key.num_tokens(self._num_open(key.chain, name)))
        longest = max(lengths.values(), default=0)
        return longest, {name for name, length in lengths.items() if length == longest}

    def _longest_sent(self, chain: Chain, names: Set[str]) -> tuple[int, Set[str]]:
        """Return the maximum number of leading hashes sent to some servers, and the servers that were sent them."""
        depth, holders = 0, {life for name in names if (life := self._life_of.get(name)) is not None}
        for digest in chain:
            left = holders & self._lives_of.get(digest, frozenset())
            if not left:
                break
            depth, holders = depth + 1, left
        return depth, {self._name_of[life] for life in holders} if depth else set()

    def _num_open(self, chain: Chain, name: str) -> int:
        """Return the number of leading hashes that an open call at a server has."""
        calls = self._open[self._life_of[name]]
        return sum(1 for _ in itertools.takewhile(calls.__contains__, chain))
