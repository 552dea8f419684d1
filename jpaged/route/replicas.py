"""Where a prompt goes among servers that somebody else knows and calls, as Ray Serve does its replicas. No I/O.

order ──> somebody sends it to the first that takes it ──> sent ──> ended
          or asks again, when none does
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
    """What one caller of several servers has sent them.

    Args:
        max_known_prefixes: hashes of beginnings that are kept, about 200 bytes each.
    """

    def __init__(self, max_known_prefixes: int) -> None:
        self._directory = Directory(max_known_prefixes)
        self._names: frozenset[str] = frozenset()
        self._num_open = Counter[str]()
        self._open = set[tuple[str, str]]()

    def update(self, names: Iterable[str]) -> None:
        """These servers are there, and no others; one that is new holds nothing."""
        there = frozenset(names)
        for name in self._names - there:
            self._directory.end(name)
            del self._num_open[name]
        self._open = {one for one in self._open if one[1] in there}
        for name in there - self._names:
            self._directory.begin(name)
        self._names = there

    def order(self, key: Beginning, told_busy: Mapping[str, int]) -> list[str]:
        """Return the servers as a prompt is offered to them: where its longest beginning is, and the others by calls.

        Args:
            key: of the prompt's beginnings.
            told_busy: servers that may take it, and how many calls each has of everybody, as far as is known.
        """
        usable = [_Replica(name, self._num_busy(name, told)) for name, told in told_busy.items()]
        if not usable:
            return []
        first = self._directory.choose(key, not_ahead(usable))
        others = sorted((one for one in usable if one is not first), key=lambda one: (one.num_busy, one.name))
        return [first.name, *(one.name for one in others)]

    def sent(self, call: str, key: Beginning | None, name: str) -> None:
        """A server has taken a call; the key is None where that has no prompt."""
        if name in self._names and (call, name) not in self._open:
            self._open.add((call, name))
            self._num_open[name] += 1
            if key is not None:
                self._directory.note(key, name)

    def ended(self, call: str, name: str) -> None:
        """A call has ended, however it did; nothing where the server had not taken it, or is gone."""
        if (call, name) in self._open:
            self._open.remove((call, name))
            self._num_open[name] -= 1

    def _num_busy(self, name: str, told: int) -> int:
        return max(told, self._num_open[name])
