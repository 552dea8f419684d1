"""The horizontal pod autoscaler of Kubernetes, as deploy/ sets it up, over simulated pods.

    replica's gauge ──every scrape──> Prometheus ──mean over [1m]──> adapter ──every sync──> autoscaler ──> replicas

    wanted = ceil(mean of the pods' values / target * pods), but the same within a tenth
    up     the least that was wanted within the window of scaleUp, and no faster than its policies
    down   the most that was wanted within the window of scaleDown, and no faster than its policies

The rules are those of the controller (pkg/controller/podautoscaler of Kubernetes): a pod that is not ready yet has no
value, and counts as 0 where more are wanted, as the target where fewer are. Sync period and tolerance are the
controller's defaults.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SYNC_S = 15.0
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Policy:
    """So many pods, or so many percent of them, within a period."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Direction:
    """How fast replicas come, or go.

    Attributes:
        window_s: of stabilisation.
        takes_most: of several policies the one that changes most, else the one that changes least.
    """

    window_s: float
    policies: tuple[Policy, ...]
    takes_most: bool = True
    is_disabled: bool = False


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """What deploy/ says.

    Attributes:
        metric: a field of `PoolLoad`.
        target: its mean over pods.
        scrape_s, mean_s: how often it is read, and over how long its mean is taken.
        drain_s: what a pod has from its end on, for what it has in flight.
    """

    min_replicas: int
    max_replicas: int
    metric: str
    target: float
    up: Direction
    down: Direction
    scrape_s: float
    mean_s: float
    drain_s: float


class Gauges:
    """What Prometheus has of each pod's gauge."""

    def __init__(self, scrape_s: float, mean_s: float) -> None:
        self._scrape_s = scrape_s
        self._most = max(1, round(mean_s / scrape_s))
        self._seen: dict[int, deque[float]] = {}
        self._next_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether pods are to be read now."""
        if now_s < self._next_s:
            return False
        self._next_s += self._scrape_s
        return True

    def read(self, values: dict[int, float]) -> None:
        """Takes a value of each pod that is ready; others are forgotten."""
        self._seen = {pod: self._seen.get(pod, deque(maxlen=self._most)) for pod in values}
        for pod, value in values.items():
            self._seen[pod].append(value)

    def means(self, pods: Sequence[int]) -> list[float]:
        """The mean of each of these that has values."""
        return [sum(seen) / len(seen) for pod in pods if (seen := self._seen.get(pod))]


class Autoscaler:
    """Decides how many pods there are to be."""

    def __init__(self, options: Autoscaling) -> None:
        self._options = options
        self._next_s = SYNC_S
        self._wanted = deque[tuple[float, int]]()
        self._changes = deque[tuple[float, int]]()

    def is_due(self, now_s: float) -> bool:
        """Whether it looks now."""
        if now_s < self._next_s:
            return False
        self._next_s += SYNC_S
        return True

    def decide(self, now_s: float, values: Sequence[float], current: int) -> int:
        """How many pods there are to be.

        Args:
            values: of the pods that have one.
            current: pods, those that are not ready included.
        """
        options = self._options
        wanted = wanted_pods(values, current, options.target)
        keep_s = now_s - max(options.up.window_s, options.down.window_s)
        if not self._wanted:
            self._wanted.append((now_s, current))
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < keep_s:
            self._wanted.popleft()
        stable = self._stabilised(now_s, wanted, current)
        chosen = min(max(stable, options.min_replicas), options.max_replicas)
        if chosen > current:
            chosen = min(chosen, max(current, self._limit_up(now_s, current)))
        elif chosen < current:
            chosen = max(chosen, min(current, self._limit_down(now_s, current)))
        if chosen != current:
            self._changes.append((now_s, chosen - current))
        return chosen

    def _stabilised(self, now_s: float, wanted: int, current: int) -> int:
        up, down = wanted, wanted
        for at_s, number in self._wanted:
            if at_s > now_s - self._options.up.window_s:
                up = min(up, number)
            if at_s > now_s - self._options.down.window_s:
                down = max(down, number)
        return min(max(current, up), down)

    def _changed(self, now_s: float, period_s: float) -> tuple[int, int]:
        """Pods that came, and that went, within a period."""
        recent = [change for at_s, change in self._changes if at_s > now_s - period_s]
        return sum(change for change in recent if change > 0), -sum(change for change in recent if change < 0)

    def _limit_up(self, now_s: float, current: int) -> int:
        direction = self._options.up
        if direction.is_disabled:
            return current
        limits = []
        for policy in direction.policies:
            came, went = self._changed(now_s, policy.period_s)
            start = current - came + went
            grown = start + policy.value if policy.kind == "Pods" else math.ceil(start * (1 + policy.value / 100))
            limits.append(grown)
        return max(limits) if direction.takes_most else min(limits)

    def _limit_down(self, now_s: float, current: int) -> int:
        direction = self._options.down
        if direction.is_disabled:
            return current
        limits = []
        for policy in direction.policies:
            came, went = self._changed(now_s, policy.period_s)
            start = current - came + went
            left = start - policy.value if policy.kind == "Pods" else int(start * (1 - policy.value / 100))
            limits.append(left)
        return min(limits) if direction.takes_most else max(limits)


def wanted_pods(values: Sequence[float], current: int, target: float) -> int:
    """Pods for which the mean would be the target; as many as there are where it nearly is, or nothing is known."""
    if not values:
        return current
    ratio = sum(values) / len(values) / target
    num_missing = current - len(values)
    if num_missing <= 0:
        return current if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * len(values))
    filled = target * num_missing if ratio < 1 else 0.0
    again = (sum(values) + filled) / current / target
    if abs(again - 1) <= TOLERANCE or (ratio < 1) != (again < 1):
        return current
    wanted = math.ceil(again * current)
    return current if (again < 1 and wanted > current) or (again > 1 and wanted < current) else wanted
