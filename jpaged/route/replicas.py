"""Placement of prompts on servers that another program knows and calls, such as Ray Serve's replicas. No I/O.

order ──> the program sends it to the first that accepts it ──> sent ──> ended
          or asks again, if none does
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jpaged.client.routing.endpoints import not_ahead
from jpaged.route.directory import Directory
from jpaged.route.prefixes import Beginning


@dataclass(frozen=True, slots=True)
class _Replica:
    name: str
    num_busy: int


class Replicas:
    """Placement state of one caller of several servers.

    Args:
        max_known_prefixes: maximum number of hashes of beginnings, about 200 bytes each.
    """

    def __init__(self, max_known_prefixes: int) -> None:
        self._directory = Directory(max_known_prefixes)
        self._names: frozenset[str] = frozenset()
        self._num_open = Counter[str]()
        self._open = set[tuple[str, str]]()

    def update(self, names: Iterable[str]) -> None:
        """Set the available servers; a new one holds nothing."""
        there = frozenset(names)
        for name in self._names - there:
            self._directory.end(name)
            del self._num_open[name]
        self._open = {one for one in self._open if one[1] in there}
        for name in there - self._names:
            self._directory.begin(name)
        self._names = there

    def order(self, key: Beginning, told_busy: Mapping[str, int]) -> list[str]:
        """Return the servers in order of preference: the longest cached beginning first, then by load.

        Args:
            key: key of the prompt's beginnings.
            told_busy: servers that may take it, with their reported number of calls from all callers.
        """
        usable = [_Replica(name, self._num_busy(name, told)) for name, told in told_busy.items()]
        if not usable:
            return []
        first = self._directory.choose(key, not_ahead(usable))
        others = sorted((one for one in usable if one is not first), key=lambda one: (one.num_busy, one.name))
        return [first.name, *(one.name for one in others)]

    def sent(self, call: str, key: Beginning | None, name: str) -> None:
        """Record that a server accepted a call; the key is None if it has no prompt."""
        if name in self._names and (call, name) not in self._open:
            self._open.add((call, name))
            self._num_open[name] += 1
            if key is not None:
                self._directory.note(key, name)

    def ended(self, call: str, name: str) -> None:
        """Record the end of a call; ignored if the server had not accepted it, or is gone."""
        if (call, name) in self._open:
            self._open.remove((call, name))
            self._num_open[name] -= 1

    def _num_busy(self, name: str, told: int) -> int:
        return max(told, self._num_open[name])
