"""Which server has which beginning in its cache: as servers tell it, else from where prompts were sent. No I/O.

    hash of a beginning -> the lives of servers that were sent a prompt with it
                                  the oldest that nobody asked for is forgotten first, its longest beginnings first

A server that starts again has another life, and nothing of what it had; so what its former one was sent counts no more.
Of a prompt of token ids a server that tells what it holds has what it tells, and the prompts of the calls that are open
there: their blocks are in use, or will be when it has computed them.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from jpaged.client.routing.endpoints import S, rank
from jpaged.route.prefixes import Beginning, Chain


class Told(Protocol):
    """What servers tell of what they hold."""

    def num_tokens(self, prompt: Beginning) -> Mapping[str, int]:
        """Return the tokens of a prompt's beginning that servers hold, of those alone that tell it."""


class Directory:
    """Where prompts belong: the placement of a router's calls.

    Args:
        max_entries: hashes that are kept, about 200 bytes each.
        told: what servers tell; None where none does.

    Attributes:
        num_placed: prompts that were placed.
        num_hits: those that went to a server which had been sent their beginning, or told that it holds it.
        num_passed_over: those that one had, which was too far ahead of the others.
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
        """A server has come, or has started again: it holds nothing yet."""
        self.end(name)
        life = next(self._numbers)
        self._life_of[name], self._name_of[life] = life, name
        self._open[life] = Counter()

    def end(self, name: str) -> None:
        """A server is gone, and what it held."""
        life = self._life_of.pop(name, None)
        if life is not None:
            del self._name_of[life], self._open[life]

    def life_of(self, name: str) -> int | None:
        """Which life of a server it is now; None where it is none."""
        return self._life_of.get(name)

    def place(self, key: Beginning, usable: Sequence[S]) -> S:
        """Return the server that `choose` names, which is sent this prompt now. See `Placement`."""
        chosen = self.choose(key, usable)
        self.note(key, chosen.name)
        return chosen

    def choose(self, key: Beginning, usable: Sequence[S]) -> S:
        """Return the server with the longest beginning; of several, and where none has any, the least busy.

        Of equally busy ones it is the one whose turn the beginning is, so that several routers that
        know nothing agree.
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
        """A server has been sent this prompt. The longest beginning is noted first: it is the first to be forgotten."""
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
        """A call that was placed has ended, in the life of its server in which it began."""
        calls = self._open.get(life)
        if calls is not None and key.token_ids is not None:
            for digest in key.chain:
                calls[digest] -= 1
                if calls[digest] <= 0:
                    del calls[digest]

    def _longest(self, key: Beginning, names: Set[str], told: Mapping[str, int]) -> tuple[int, Set[str]]:
        """Return how long a beginning some servers have at most, in hashes or tokens, and which of them have it."""
        depth, holders = self._longest_sent(key.chain, names - told.keys())
        lengths = dict.fromkeys(holders, depth if key.token_ids is None else key.num_tokens(depth))
        for name in names & told.keys() & self._life_of.keys():
            lengths[name] = max(told[name], key.num_tokens(self._num_open(key.chain, name)))
        longest = max(lengths.values(), default=0)
        return longest, {name for name, length in lengths.items() if length == longest}

    def _longest_sent(self, chain: Chain, names: Set[str]) -> tuple[int, Set[str]]:
        """Return how many hashes of a chain some servers were sent at most, and which of them were sent so many."""
        depth, holders = 0, {life for name in names if (life := self._life_of.get(name)) is not None}
        for digest in chain:
            left = holders & self._lives_of.get(digest, frozenset())
            if not left:
                break
            depth, holders = depth + 1, left
        return depth, {self._name_of[life] for life in holders} if depth else set()

    def _num_open(self, chain: Chain, name: str) -> int:
        """Return how many hashes of a chain a call has that is open at a server."""
        calls = self._open[self._life_of[name]]
        return sum(1 for _ in itertools.takewhile(calls.__contains__, chain))
