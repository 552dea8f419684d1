"""States of the places of replicas, and the time for which each is billed.

    empty ──start──> starting ──ready_s──> ready ──drain──> draining ──nothing in flight, or time limit──> empty
                         └───────────────────┴──────fail──────┴──> failed ──restart──> starting

A place is billed from start to end, including loading and the replacement of a failed replica.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class State(enum.Enum):
    """State of a place."""

    EMPTY = "empty"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PoolKind:
    """Cost and size of one kind of replica.

    Attributes:
        name: of the topology.
        family: alternative key of prices.
        capacity: tokens that the KV pool holds.
        cold_start_s: from the start of a pod until it accepts requests.
        usd_per_hour: price of all its chips; None without a price.
    """

    name: str
    family: str
    capacity: int
    num_chips: int
    cold_start_s: float
    usd_per_hour: float | None


class Pods:
    """All places, each for one kind of replica.

    Args:
        kinds: kinds of replicas.
        kind_of: index of the kind of each place.
    """

    def __init__(self, kinds: Sequence[PoolKind], kind_of: Sequence[int]) -> None:
        self.kinds = kinds
        self.kind_of = kind_of
        count = len(kind_of)
        self._states = [State.EMPTY] * count
        self._ready_s = [0.0] * count
        self._since_s = [0.0] * count
        self._until_s = [0.0] * count
        self._paid_s = [0.0] * count
        self._is_to_restart = [False] * count

    def __len__(self) -> int:
        return len(self._states)

    def state(self, place: int) -> State:
        """Return the state of a place."""
        return self._states[place]

    def where(self, *states: State) -> list[int]:
        """Return the places in one of some states."""
        return [place for place, state in enumerate(self._states) if state in states]

    def start(self, place: int, now_s: float, *, is_warm: bool = False) -> None:
        """Start a pod; with `is_warm` it is ready at once."""
        if self._states[place] is State.EMPTY:
            self._since_s[place] = now_s
        self._states[place] = State.STARTING
        self._ready_s[place] = now_s if is_warm else now_s + self.kinds[self.kind_of[place]].cold_start_s

    def become_ready(self, now_s: float) -> list[int]:
        """Mark the pods that have finished loading as ready, and return their places."""
        loaded = [place for place in self.where(State.STARTING) if self._ready_s[place] <= now_s]
        for place in loaded:
            self._states[place] = State.READY
        return loaded

    def drain(self, place: int, until_s: float, *, restarts: bool) -> None:
        """Stop sending requests to a pod, which ends by `until_s`; with `restarts` another one follows."""
        self._states[place] = State.DRAINING
        self._until_s[place] = until_s
        self._is_to_restart[place] = restarts

    def restarting(self) -> list[int]:
        """Return the places of draining pods that will be replaced."""
        return [place for place in self.where(State.DRAINING) if self._is_to_restart[place]]

    def follow_by_none(self, place: int) -> None:
        """Do not replace a draining pod."""
        self._is_to_restart[place] = False

    def is_over(self, place: int, now_s: float) -> bool:
        """Return True if a draining pod has reached its time limit."""
        return self._until_s[place] <= now_s

    def end(self, place: int, now_s: float) -> bool:
        """Record the end of a pod. Return True if it is to be replaced."""
        restarts, self._is_to_restart[place] = self._is_to_restart[place], False
        self._paid_s[place] += now_s - self._since_s[place]
        self._states[place] = State.EMPTY
        return restarts

    def since_s(self, place: int) -> float:
        """Return the start time of the pod in a place."""
        return self._since_s[place]

    def paid_s(self, place: int, now_s: float) -> float:
        """Return the seconds for which a place has been billed."""
        going = 0.0 if self._states[place] is State.EMPTY else now_s - self._since_s[place]
        return self._paid_s[place] + going

    def usd(self, now_s: float) -> float | None:
        """Return the total price; None without prices."""
        prices = [self.kinds[kind].usd_per_hour for kind in self.kind_of]
        if any(price is None for price in prices):
            return None
        return sum((price or 0.0) * self.paid_s(place, now_s) / 3600 for place, price in enumerate(prices))

    def replica_hours(self, now_s: float) -> float:
        """Return the billed hours of all places."""
        return sum(self.paid_s(place, now_s) for place in range(len(self))) / 3600
