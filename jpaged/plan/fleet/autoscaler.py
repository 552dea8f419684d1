"""The horizontal pod autoscaler of Kubernetes, as deploy/ configures it, over simulated pods.

    replica's gauge ──every scrape──> Prometheus ──mean over [1m]──> adapter ──every sync──> autoscaler ──> replicas

    desired = ceil(mean of the pods' values / target * pods), but unchanged within the tolerance of a tenth
    up      the minimum of desired in the window of scaleUp, limited by its policies
    down    the maximum of desired in the window of scaleDown, limited by its policies

The rules are those of the controller (pkg/controller/podautoscaler of Kubernetes): a pod that is not ready yet has no
value, and counts as 0 for scaling up, and as the target for scaling down. Sync period and tolerance are the
controller's defaults. The settings are read from files in deploy/:

kubernetes/horizontalpodautoscaler.yaml      limits, metric and policies
kubernetes/prometheus-adapter-config.yaml    source gauge of the metric, and range of the mean
prometheus/kubernetes.yaml                   scrape interval
kubernetes/deployment.yaml                   termination time of a pod
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jpaged.config import ServerOptions
from jpaged.errors import InvalidArgument
from jpaged.plan.fleet.day import PoolLoad
from jpaged.server_load import ReplicaLoad

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


_GAUGES = {
    metric.name: field.name
    for field in dataclasses.fields(ReplicaLoad)
    if field.name in PoolLoad._fields and (metric := field.metadata.get("gauge")) is not None
}
"""The server's metric -> the field of a simulated replica."""
_DURATION = re.compile(r"(\d+)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m?)")
_DEFAULT_UP = (Policy("Percent", 100, 15.0), Policy("Pods", 4, 15.0))
_DEFAULT_DOWN = (Policy("Percent", 100, 15.0),)


def read_autoscaling(folder: Path) -> Autoscaling:
    """Read the settings from a folder like deploy/.

    Raises:
        InvalidArgument: a file is missing or no YAML, or has unsupported settings; names file and field.
    """
    scaler = _document(folder / "kubernetes" / "horizontalpodautoscaler.yaml", "HorizontalPodAutoscaler")
    where = "horizontalpodautoscaler.yaml: spec"
    spec = _get(scaler, "spec", dict, where)
    name, target = _metric(spec, where)
    series, mean_s = _adapted(folder / "kubernetes" / "prometheus-adapter-config.yaml", name)
    behavior = spec.get("behavior", {})
    pod = _get(
        _get(_get(_document(folder / "kubernetes" / "deployment.yaml", "Deployment"), "spec", dict, "deployment.yaml"),
             "template", dict, "deployment.yaml: spec"),
        "spec", dict, "deployment.yaml: spec.template",
    )  # fmt: skip
    found = Autoscaling(
        min_replicas=spec.get("minReplicas", 1),
        max_replicas=_get(spec, "maxReplicas", int, where),
        metric=_GAUGES[series],
        target=target,
        up=_direction(behavior.get("scaleUp", {}), f"{where}.behavior.scaleUp", 0.0, _DEFAULT_UP),
        down=_direction(behavior.get("scaleDown", {}), f"{where}.behavior.scaleDown", 300.0, _DEFAULT_DOWN),
        scrape_s=_scrape_s(folder / "prometheus" / "kubernetes.yaml"),
        mean_s=mean_s,
        drain_s=_drain_s(pod),
    )
    if not 1 <= found.min_replicas <= found.max_replicas:
        raise InvalidArgument(
            f"{where}.minReplicas", f"{found.min_replicas} is not from 1 to maxReplicas ({found.max_replicas})"
        )
    return found


def _metric(spec: dict[str, Any], where: str) -> tuple[str, float]:
    metrics = _get(spec, "metrics", list, where)
    if len(metrics) != 1 or metrics[0].get("type") != "Pods":
        raise InvalidArgument(f"{where}.metrics", "must be one metric of type Pods; no other type is simulated")
    pods = _get(metrics[0], "pods", dict, f"{where}.metrics[0]")
    name = _get(_get(pods, "metric", dict, f"{where}.metrics[0].pods"), "name", str, f"{where}.metrics[0].pods.metric")
    target = pods.get("target", {})
    match = _QUANTITY.fullmatch(str(target.get("averageValue", "")))
    if target.get("type") != "AverageValue" or match is None or not float(match[1]):
        raise InvalidArgument(f"{where}.metrics[0].pods.target", f"{target} is not an AverageValue above 0")
    return name, float(match[1]) / (1000 if match[2] else 1)


def _direction(rules: dict[str, Any], where: str, window_s: float, policies: tuple[Policy, ...]) -> Direction:
    select = rules.get("selectPolicy", "Max")
    if select not in ("Max", "Min", "Disabled"):
        raise InvalidArgument(f"{where}.selectPolicy", f"{select!r} is not Max, Min or Disabled")
    given = tuple(_policy(rule, f"{where}.policies") for rule in rules.get("policies", ()))
    return Direction(
        float(rules.get("stabilizationWindowSeconds", window_s)),
        given or policies,
        takes_most=select == "Max",
        is_disabled=select == "Disabled",
    )


def _policy(rule: dict[str, Any], where: str) -> Policy:
    kind, value = rule.get("type"), _get(rule, "value", int, where)
    if kind not in ("Pods", "Percent") or value < 1:
        raise InvalidArgument(where, f"{rule} must have type Pods or Percent and a value of at least 1")
    return Policy(kind, value, float(_get(rule, "periodSeconds", int, where)))


def _drain_s(pod: dict[str, Any]) -> float:
    """Return how long a stopping pod runs: preStop sleep, then the server's drain, limited by the grace period."""
    where = "deployment.yaml: spec.template.spec"
    (container, *_) = _get(pod, "containers", list, where) or [{}]
    words = [str(word) for word in container.get("args", ())]
    timeout_s, sleep = str(ServerOptions().shutdown_timeout), (container.get("lifecycle") or {}).get("preStop") or {}
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--shutdown-timeout":
            timeout_s = value if equals else words[number + 1] if number + 1 < len(words) else ""
    try:
        goes_on_s = float(timeout_s) + float(sleep.get("sleep", {}).get("seconds", 0))
        return min(goes_on_s, float(pod.get("terminationGracePeriodSeconds", 30)))
    except (TypeError, ValueError, AttributeError):
        problem = f"--shutdown-timeout {timeout_s!r}, preStop {sleep} and the grace period must be numbers"
        raise InvalidArgument(where, problem) from None


def _scrape_s(path: Path) -> float:
    documents = _documents(path)
    text = str(documents[0].get("global", {}).get("scrape_interval", "1m")) if documents else ""
    return _seconds(text, f"{path.name}: global.scrape_interval")


def _adapted(path: Path, name: str) -> tuple[str, float]:
    """Return the source gauge of a metric, and the seconds of the query's range: `avg_over_time(...[1m])`."""
    text = _get(_get(_document(path, "ConfigMap"), "data", dict, path.name), "config.yaml", str, f"{path.name}: data")
    where = f"{path.name}: rules"
    documents = _parsed(text, path)
    rules = _get(documents[0], "rules", list, path.name) if documents else []
    made = [rule for rule in rules if isinstance(rule, dict) and (rule.get("name") or {}).get("as") == name]
    if len(made) != 1:
        raise InvalidArgument(
            where, f"{len(made)} rules define {name}, which the autoscaler uses; expected exactly one"
        )
    series = str(made[0].get("seriesQuery", "")).partition("{")[0]
    if series not in _GAUGES:
        raise InvalidArgument(f"{where}.seriesQuery", f"{series!r} is not one of {', '.join(_GAUGES)}")
    match = re.fullmatch(r"avg_over_time\(.*\[(\w+)\]\)", str(made[0].get("metricsQuery", "")))
    if match is None:
        raise InvalidArgument(f"{where}.metricsQuery", "is not an avg_over_time over a range, for example [1m]")
    return series, _seconds(match[1], f"{where}.metricsQuery")


def _seconds(text: str, where: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidArgument(where, f"{text!r} is not a duration such as 10s")
    return int(match[1]) * _SECONDS[match[2]]


def _document(path: Path, kind: str) -> dict[str, Any]:
    found = [document for document in _documents(path) if document.get("kind") == kind]
    if len(found) != 1:
        raise InvalidArgument(path.name, f"has {len(found)} documents of kind {kind}; expected exactly one")
    return found[0]


def _documents(path: Path) -> list[dict[str, Any]]:
    try:
        return _parsed(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("--autoscale", f"{path} cannot be read: {error}") from error


def _parsed(text: str, path: Path) -> list[dict[str, Any]]:
    yaml = importlib.import_module("yaml")  # takes 20 ms to import
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise InvalidArgument("--autoscale", f"{path} cannot be read: {error}") from error
    return [document for document in documents if isinstance(document, dict)]


def _get(values: dict[str, Any], name: str, kind: type, where: str) -> Any:
    value = values.get(name)
    if not isinstance(value, kind):
        raise InvalidArgument(f"{where}.{name}", f"{value!r} is not of type {kind.__name__}")
    return value
