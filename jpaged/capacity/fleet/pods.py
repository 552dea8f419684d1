"""The places that replicas are in: who takes requests, who begins, who ends, and since when each is paid for.

    empty ──start──> starting ──ready_s──> ready ──drain──> draining ──nothing in flight, or its time is over──> empty
                         └───────────────────┴──────fail──────┴──> failed ──restart──> starting

A place is paid for from start to end, also while it loads and while a failed one is replaced.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class State(enum.Enum):
    """Where a place is."""

    EMPTY = "empty"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PoolKind:
    """What replicas of one kind cost and take.

    Attributes:
        name: of the topology.
        family: what prices are named by, besides.
        capacity: tokens that the KV pool holds.
        cold_start_s: from the start of a pod until it takes requests.
        usd_per_hour: of all its chips; None without a price.
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
        kinds: of replicas.
        kind_of: the number of the kind of each place.
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
        """Where a place is."""
        return self._states[place]

    def where(self, *states: State) -> list[int]:
        """The places in one of some states."""
        return [place for place, state in enumerate(self._states) if state in states]

    def start(self, place: int, now_s: float, *, is_warm: bool = False) -> None:
        """A pod begins to load; `is_warm` it is ready at once."""
        if self._states[place] is State.EMPTY:
            self._since_s[place] = now_s
        self._states[place] = State.STARTING
        self._ready_s[place] = now_s if is_warm else now_s + self.kinds[self.kind_of[place]].cold_start_s

    def become_ready(self, now_s: float) -> list[int]:
        """The places whose pods are ready by now, which they are from now on."""
        loaded = [place for place in self.where(State.STARTING) if self._ready_s[place] <= now_s]
        for place in loaded:
            self._states[place] = State.READY
        return loaded

    def drain(self, place: int, until_s: float, *, restarts: bool) -> None:
        """A pod takes nothing more, and ends by a time at the latest; another one comes then where it restarts."""
        self._states[place] = State.DRAINING
        self._until_s[place] = until_s
        self._is_to_restart[place] = restarts

    def restarting(self) -> list[int]:
        """The places whose pods drain and are followed by others."""
        return [place for place in self.where(State.DRAINING) if self._is_to_restart[place]]

    def follow_by_none(self, place: int) -> None:
        """Lets no other pod come behind one that drains."""
        self._is_to_restart[place] = False

    def is_over(self, place: int, now_s: float) -> bool:
        """Whether a pod that drains has no time left."""
        return self._until_s[place] <= now_s

    def end(self, place: int, now_s: float) -> bool:
        """A pod has ended; True where another one is to come."""
        restarts, self._is_to_restart[place] = self._is_to_restart[place], False
        self._paid_s[place] += now_s - self._since_s[place]
        self._states[place] = State.EMPTY
        return restarts

    def since_s(self, place: int) -> float:
        """When the pod in a place was started."""
        return self._since_s[place]

    def paid_s(self, place: int, now_s: float) -> float:
        """Seconds that a place has been paid for."""
        going = 0.0 if self._states[place] is State.EMPTY else now_s - self._since_s[place]
        return self._paid_s[place] + going

    def usd(self, now_s: float) -> float | None:
        """What all has cost; None without prices."""
        prices = [self.kinds[kind].usd_per_hour for kind in self.kind_of]
        if any(price is None for price in prices):
            return None
        return sum((price or 0.0) * self.paid_s(place, now_s) / 3600 for place, price in enumerate(prices))

    def replica_hours(self, now_s: float) -> float:
        """Hours that all places have been paid for."""
        return sum(self.paid_s(place, now_s) for place in range(len(self))) / 3600
