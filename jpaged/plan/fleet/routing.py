"""Replica selection: the placement of `jpaged route` itself, and simpler rules for comparison.

    random        any ready replica
    least-load    the replica with the fewest requests in flight
    prefix        the replica that was sent most of the prompt; among several the least busy
    prefix+load   the same among those that are not overloaded: what the router does

The last two use `jpaged.route.prefix_table`, with the prefix hashes that the router computes from token ids, and
`prefix+load` skips the replicas that the router skips (`within_load_margin`). The rules know only what a router knows:
which requests it has sent to which replica and has not seen end. They read no state of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jpaged.client.routing.endpoints import within_load_margin
from jpaged.plan.fleet.day import Attempt, get_prompt
from jpaged.route.prefix_table import MAX_KNOWN_PREFIXES, PrefixTable, beginning_of_ids

Rule = Literal["random", "least-load", "prefix", "prefix+load"]
RULES: tuple[Rule, ...] = ("random", "least-load", "prefix", "prefix+load")


@dataclass(slots=True)
class _RoutedReplica:
    name: str
    num_busy: int = 0


class FleetRouter:
    """Sends requests to replicas, which are numbered from 0.

    Args:
        seed: seed of random choices: by `random`, and by `least-load` among equals.
    """

    def __init__(self, rule: Rule, num_places: int, seed: int) -> None:
        self._rule = rule
        self._generator = np.random.default_rng([seed, 1])
        self._directory = PrefixTable(MAX_KNOWN_PREFIXES)
        self._replicas = [_RoutedReplica(str(place)) for place in range(num_places)]
        self._usable: list[_RoutedReplica] = []

    def begin(self, place: int) -> None:
        """Record that a replica has started or restarted, with an empty cache."""
        self._directory.begin(self._replicas[place].name)

    def end(self, place: int) -> None:
        """Record that a replica and its cache are gone."""
        self._directory.end(self._replicas[place].name)

    def use(self, places: Sequence[int]) -> None:
        """Set the replicas that requests are sent to."""
        self._usable = [self._replicas[place] for place in places]

    def num_busy(self, place: int) -> int:
        """Return the number of requests in flight on a replica."""
        return self._replicas[place].num_busy

    def send(self, attempt: Attempt) -> int:
        """Choose the replica for an attempt, among those in use; it counts as in flight until `ended`."""
        chosen = self._choose(attempt)
        chosen.num_busy += 1
        return int(chosen.name)

    def ended(self, place: int) -> None:
        """Record that a request has ended, for any reason."""
        self._replicas[place].num_busy -= 1

    def _choose(self, attempt: Attempt) -> _RoutedReplica:
        if self._rule == "random":
            return self._pick_any(self._usable)
        if self._rule == "least-load":
            least = min(one.num_busy for one in self._usable)
            return self._pick_any([one for one in self._usable if one.num_busy == least])
        beginning = beginning_of_ids(get_prompt(attempt), str(attempt.session.tenant).encode())
        return self._directory.place(
            beginning, self._usable if self._rule == "prefix" else within_load_margin(self._usable)
        )

    def _pick_any(self, replicas: Sequence[_RoutedReplica]) -> _RoutedReplica:
        return replicas[int(self._generator.random() * len(replicas))]
