"""Which replica a request goes to: the placement of `jpaged route` itself, and simpler rules beside it.

    random        any that is ready
    least-load    the one with the fewest requests in flight
    prefix        the one that was sent most of the prompt; of several the least busy
    prefix+load   the same among those that are not ahead of the others: what the router does

Both of the last are `jpaged.route.directory`, asked with the beginnings that the router makes of prompts of token ids,
and `prefix+load` passes over whom the router passes over (`not_ahead`). What the rules know is what a router knows:
which requests it has sent where and has not seen end. Nothing of it is asked of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jpaged.capacity.fleet.attempts import Attempt
from jpaged.capacity.fleet.prompts import prompt_of
from jpaged.client.routing.endpoints import not_ahead
from jpaged.route.directory import Directory
from jpaged.route.prefixes import MAX_KNOWN_PREFIXES, beginning_of_ids

Rule = Literal["random", "least-load", "prefix", "prefix+load"]
RULES: tuple[Rule, ...] = ("random", "least-load", "prefix", "prefix+load")


@dataclass(slots=True)
class _Replica:
    name: str
    num_busy: int = 0


class Router:
    """Sends requests to replicas, which are places from 0.

    Args:
        seed: of what is drawn: by `random`, and by `least-load` among equals.
    """

    def __init__(self, rule: Rule, num_places: int, seed: int) -> None:
        self._rule = rule
        self._generator = np.random.default_rng([seed, 1])
        self._directory = Directory(MAX_KNOWN_PREFIXES)
        self._replicas = [_Replica(str(place)) for place in range(num_places)]
        self._usable: list[_Replica] = []

    def begin(self, place: int) -> None:
        """A replica has come, or has started again: it holds nothing yet."""
        self._directory.begin(self._replicas[place].name)

    def end(self, place: int) -> None:
        """A replica is gone, and what it held."""
        self._directory.end(self._replicas[place].name)

    def use(self, places: Sequence[int]) -> None:
        """Requests go to these from now on."""
        self._usable = [self._replicas[place] for place in places]

    def num_busy(self, place: int) -> int:
        """Requests that a replica was sent and that have not ended."""
        return self._replicas[place].num_busy

    def send(self, attempt: Attempt) -> int:
        """Chooses the place that an attempt goes to, of one or more in use; it is in flight there until `ended`."""
        chosen = self._choose(attempt)
        chosen.num_busy += 1
        return int(chosen.name)

    def ended(self, place: int) -> None:
        """A request has ended, however it did."""
        self._replicas[place].num_busy -= 1

    def _choose(self, attempt: Attempt) -> _Replica:
        if self._rule == "random":
            return self._any_of(self._usable)
        if self._rule == "least-load":
            least = min(one.num_busy for one in self._usable)
            return self._any_of([one for one in self._usable if one.num_busy == least])
        beginning = beginning_of_ids(prompt_of(attempt), str(attempt.session.tenant).encode())
        return self._directory.place(beginning, self._usable if self._rule == "prefix" else not_ahead(self._usable))

    def _any_of(self, replicas: Sequence[_Replica]) -> _Replica:
        return replicas[int(self._generator.random() * len(replicas))]
