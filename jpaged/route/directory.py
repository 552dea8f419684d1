"""Which server has which beginning in its cache, as far as one can tell from where prompts were sent. No I/O.

    hash of a beginning -> the lives of servers that were sent a prompt with it
                                  the oldest that nobody asked for is forgotten first, its longest beginnings first

A server that starts again has another life, and nothing of what it had; so what its former one was sent counts no more.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence, Set

from jpaged.client.routing.endpoints import Endpoint, rank
from jpaged.route.prefixes import Chain


class Directory:
    """Where prompts belong: the placement of a router's calls.

    Args:
        max_entries: hashes that are kept, about 200 bytes each.

    Attributes:
        num_placed: prompts that were placed.
        num_hits: those that went to a server which had been sent their beginning.
        num_passed_over: those that one had, which was too far ahead of the others.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._lives_of = OrderedDict[bytes, frozenset[int]]()
        self._life_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._numbers = itertools.count()
        self.num_placed = self.num_hits = self.num_passed_over = 0

    def __len__(self) -> int:
        return len(self._lives_of)

    def begin(self, name: str) -> None:
        """A server has come, or has started again: it holds nothing yet."""
        self.end(name)
        life = next(self._numbers)
        self._life_of[name], self._name_of[life] = life, name

    def end(self, name: str) -> None:
        """A server is gone, and what it held."""
        life = self._life_of.pop(name, None)
        if life is not None:
            del self._name_of[life]

    def place(self, key: Chain, usable: Sequence[Endpoint]) -> Endpoint:
        """Return the server with the longest beginning; of several, and where none has any, the least busy.

        See `Placement`. Of equally busy ones it is the one whose turn the beginning is, so that several routers that
        know nothing agree.
        """
        depth, holders = self._longest(key, {one.name for one in usable})
        anywhere = depth if len(usable) == len(self._life_of) else self._longest(key, self._life_of.keys())[0]
        self.num_placed += 1
        self.num_hits += depth > 0
        self.num_passed_over += anywhere > depth
        among = [one for one in usable if one.name in holders] if depth else usable
        least = min(one.num_busy for one in among)
        chosen = max((one for one in among if one.num_busy == least), key=lambda one: rank(key[0], one.name))
        self._note(key, chosen.name)
        return chosen

    def _longest(self, key: Chain, names: Set[str]) -> tuple[int, Set[str]]:
        """Return how many hashes of a chain some servers have at most, and which of them have so many."""
        depth, holders = 0, set[str]()
        for digest in key:
            held = {self._name_of.get(life) for life in self._lives_of.get(digest, ())}
            left = {name for name in held if name in names and (not depth or name in holders)}
            if not left:
                break
            depth, holders = depth + 1, {name for name in left if name is not None}
        return depth, holders

    def _note(self, key: Chain, name: str) -> None:
        """A server has been sent this prompt. The longest beginning is noted first: it is the first to be forgotten."""
        life = self._life_of.get(name)
        if life is None:
            return
        alone, entries = frozenset((life,)), self._lives_of
        for digest in reversed(key):
            held = entries.get(digest)
            if held is None:
                entries[digest] = alone
            elif life not in held:
                entries[digest] = alone.union(one for one in held if one in self._name_of)
            entries.move_to_end(digest)
        while len(entries) > self._max_entries:
            entries.popitem(last=False)
