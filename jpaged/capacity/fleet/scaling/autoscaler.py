"""The horizontal pod autoscaler of Kubernetes, as deploy/ configures it, over simulated pods.

    replica's gauge ──every scrape──> Prometheus ──mean over [1m]──> adapter ──every sync──> autoscaler ──> replicas

    desired = ceil(mean of the pods' values / target * pods), but unchanged within the tolerance of a tenth
    up      the minimum of desired in the window of scaleUp, limited by its policies
    down    the maximum of desired in the window of scaleDown, limited by its policies

The rules are those of the controller (pkg/controller/podautoscaler of Kubernetes): a pod that is not ready yet has no
value, and counts as 0 for scaling up, and as the target for scaling down. Sync period and tolerance are the
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
    """Limit of changes within a period: a number of pods, or a percentage of them."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Direction:
    """Limits of scaling in one direction.

    Attributes:
        window_s: stabilization window.
        takes_most: select the policy with the largest change; otherwise the smallest.
    """

    window_s: float
    policies: tuple[Policy, ...]
    takes_most: bool = True
    is_disabled: bool = False


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Autoscaling settings of deploy/.

    Attributes:
        metric: a field of `PoolLoad`.
        target: target of the mean over pods.
        scrape_s, mean_s: scrape interval, and range of the mean.
        drain_s: time limit of a stopping pod for its requests in flight.
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
    """Recent gauge values of each pod, as in Prometheus."""

    def __init__(self, scrape_s: float, mean_s: float) -> None:
        self._scrape_s = scrape_s
        self._most = max(1, round(mean_s / scrape_s))
        self._seen: dict[int, deque[float]] = {}
        self._next_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Return True if the pods are to be scraped now."""
        if now_s < self._next_s:
            return False
        self._next_s += self._scrape_s
        return True

    def read(self, values: dict[int, float]) -> None:
        """Record a value for each ready pod; other pods are dropped."""
        self._seen = {pod: self._seen.get(pod, deque(maxlen=self._most)) for pod in values}
        for pod, value in values.items():
            self._seen[pod].append(value)

    def means(self, pods: Sequence[int]) -> list[float]:
        """Return the mean of each of these pods that has values."""
        return [sum(seen) / len(seen) for pod in pods if (seen := self._seen.get(pod))]


class Autoscaler:
    """Decides the number of pods."""

    def __init__(self, options: Autoscaling) -> None:
        self._options = options
        self._next_s = SYNC_S
        self._wanted = deque[tuple[float, int]]()
        self._changes = deque[tuple[float, int]]()

    def is_due(self, now_s: float) -> bool:
        """Return True if it is time for a decision."""
        if now_s < self._next_s:
            return False
        self._next_s += SYNC_S
        return True

    def decide(self, now_s: float, values: Sequence[float], current: int) -> int:
        """Return the number of pods to run.

        Args:
            values: gauge values of the pods that have one.
            current: number of pods, including those that are not ready.
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
        """Return the pods added and removed within a period."""
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
    """Return the number of pods for which the mean would be the target.

    It is the current number within the tolerance, or without values.
    """
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
