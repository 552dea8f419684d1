"""What a router remembers of the beginnings that it has sent to each replica.

A beginning is a tenant's system prompt or a conversation up to its last answer. A replica is believed to have what it
was sent last, as many tokens as its pool holds; what it really has is the memory's (`PagedMemory`), which the hits of a
simulation are counted by.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray


class Beginnings:
    """Who was sent what. Replicas are places from 0.

    Args:
        capacities: tokens that the pool of each place holds.
    """

    def __init__(self, capacities: list[int]) -> None:
        self._capacities = capacities
        self._sent = [OrderedDict[tuple[str, int], int]() for _ in capacities]
        self._num_tokens = [0] * len(capacities)
        self._holders: dict[tuple[str, int], dict[int, int]] = {}

    def matched(self, tenant: int, system_tokens: int, session: int, count: int) -> NDArray[np.int64]:
        """Tokens of a prompt that each of the first `count` places was sent before.

        Args:
            system_tokens: that all prompts of the tenant begin with.
        """
        matched_p = np.zeros(count, np.int64)
        shared = self._holders.get(("tenant", tenant))
        if shared and system_tokens:
            matched_p[list(shared)] = system_tokens
        for place, num_tokens in self._holders.get(("session", session), {}).items():
            matched_p[place] = num_tokens
        return matched_p

    def note(self, place: int, tenant: int, system_tokens: int, session: int, num_tokens: int) -> None:
        """A replica was sent a prompt of so many tokens."""
        if system_tokens:
            self._put(place, ("tenant", tenant), system_tokens)
        self._put(place, ("session", session), num_tokens)

    def forget(self, place: int) -> None:
        """A replica has nothing any more: another one is in its place."""
        for name in self._sent[place]:
            self._drop_holder(name, place)
        self._sent[place].clear()
        self._num_tokens[place] = 0

    def _put(self, place: int, name: tuple[str, int], num_tokens: int) -> None:
        sent = self._sent[place]
        self._num_tokens[place] += num_tokens - sent.get(name, 0)
        sent[name] = num_tokens
        sent.move_to_end(name)
        self._holders.setdefault(name, {})[place] = num_tokens
        while self._num_tokens[place] > self._capacities[place] and len(sent) > 1:
            oldest, freed = sent.popitem(last=False)
            self._num_tokens[place] -= freed
            self._drop_holder(oldest, place)

    def _drop_holder(self, name: tuple[str, int], place: int) -> None:
        holders = self._holders[name]
        del holders[place]
        if not holders:
            del self._holders[name]
