"""A Deployment's controller and its hosts, as far as a rollout needs them: each pod takes all chips of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Deadlock(Exception):
    """No pod can start, and none may end."""


class RunningPod(Protocol):
    """What a host runs."""

    def wait_until_ready(self) -> None:
        """Return when the pod's startup probe has succeeded."""

    def end(self) -> None:
        """Drain and end, within the grace period."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How many pods may exist beyond the replicas, and how many of these may be missing."""

    surge: int
    unavailable: int

    @classmethod
    def from_manifest(cls, document: Mapping[str, Any]) -> Strategy:
        """Return that of a Deployment or a LeaderWorkerSet."""
        spec = document["spec"]
        given = spec.get("strategy") or spec.get("rolloutStrategy") or {}
        rolling = given.get("rollingUpdate") or given.get("rollingUpdateConfiguration") or {}
        return cls(_count(rolling.get("maxSurge", 1)), _count(rolling.get("maxUnavailable", 1)))


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number of pods: of few replicas, a percentage is none or all")
    return value


@dataclass(slots=True)
class Rollout:
    """Replaces the pods of a version, as Kubernetes' controller of Deployments does.

    Attributes:
        num_hosts: hosts with chips; a pod beyond them is pending.
        start: starts a pod of a version on a host that is free.
        is_ready: pods that take requests, in this order: an ended one is taken out before it drains.
    """

    num_hosts: int
    num_replicas: int
    strategy: Strategy
    start: Callable[[int], RunningPod]
    ready: list[RunningPod] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    least_ready: int = 0

    def create(self, version: int) -> None:
        """Start all replicas of the first version."""
        for _ in range(self.num_replicas):
            self._start(version)
        self.least_ready = len(self.ready)

    def run(self, version: int) -> None:
        """Replace every pod by one of another version.

        Raises:
            Deadlock: the strategy needs a host that does not come.
        """
        while old := [pod for pod in self.ready if self.versions[id(pod)] != version]:
            num_new = len(self.ready) - len(old)
            may_start = len(self.ready) < self.num_replicas + self.strategy.surge and num_new < self.num_replicas
            if may_start and len(self.ready) < self.num_hosts:
                self._start(version)
            elif len(self.ready) > self.num_replicas - self.strategy.unavailable:
                self._end(old[0])
            else:
                raise Deadlock(f"{len(self.ready)} pods hold all {self.num_hosts} hosts, and none may end")
        while len(self.ready) < self.num_replicas:
            self._start(version)

    def _start(self, version: int) -> None:
        pod = self.start(version)
        pod.wait_until_ready()
        self.versions[id(pod)] = version
        self.ready.append(pod)

    def _end(self, pod: RunningPod) -> None:
        self.ready.remove(pod)
        self.least_ready = min(self.least_ready, len(self.ready))
        pod.end()


def startup_budget_s(container: Mapping[str, Any]) -> float:
    """Return how long a container may take until its startup probe succeeds."""
    probe = container["startupProbe"]
    return float(
        probe.get("initialDelaySeconds", 0) + probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    )
