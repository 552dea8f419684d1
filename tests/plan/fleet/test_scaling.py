"""The autoscaler decides as that of Kubernetes does, by the rules in deploy/."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from jpaged.config import ServerOptions
from jpaged.errors import InvalidArgument
from jpaged.plan.fleet.autoscaler import (
    SYNC_S,
    Autoscaler,
    Autoscaling,
    Direction,
    Gauges,
    Policy,
    read_autoscaling,
    wanted_pods,
)

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
OURS = Autoscaling(
    min_replicas=2,
    max_replicas=8,
    metric="num_waiting",
    target=8.0,
    up=Direction(30.0, (Policy("Pods", 2, 60.0),)),
    down=Direction(600.0, (Policy("Pods", 1, 120.0),)),
    scrape_s=10.0,
    mean_s=60.0,
    drain_s=65.0,  # 5 of preStop and 60 of --shutdown-timeout, of 90
)


def test_deploy_says_what_is_simulated():
    assert read_autoscaling(DEPLOY) == OURS


@pytest.mark.parametrize(
    ("old", "new", "drain_s"),
    [
        ("terminationGracePeriodSeconds: 90", "terminationGracePeriodSeconds: 20", 20.0),
        ('"--shutdown-timeout", "60"', '"--shutdown-timeout=30"', 35.0),
        ('"--shutdown-timeout", "60"', '"--seed", "1"', 5.0 + ServerOptions().shutdown_timeout),
    ],
)
def test_a_pod_that_is_to_go_goes_on_as_long_as_its_server_does(tmp_path, old, new, drain_s):
    for part in ("kubernetes", "prometheus"):
        shutil.copytree(DEPLOY / part, tmp_path / part)
    path = tmp_path / POD
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert read_autoscaling(tmp_path).drain_s == drain_s


@pytest.mark.parametrize(
    ("series", "metric"),
    [
        ("vllm:num_requests_running", "num_running"),
        ("vllm:num_requests_waiting", "num_waiting"),
        ("jpaged:blocks_referenced", "num_blocks_used"),
    ],
)
def test_the_metric_is_whichever_of_the_servers_gauges_the_adapter_makes_it_of(tmp_path, series, metric):
    for part in ("kubernetes", "prometheus"):
        shutil.copytree(DEPLOY / part, tmp_path / part)
    path = tmp_path / ADAPTER
    path.write_text(path.read_text().replace("seriesQuery: 'vllm:num_requests_waiting", f"seriesQuery: '{series}"))
    assert read_autoscaling(tmp_path) == dataclasses.replace(OURS, metric=metric)


@pytest.mark.parametrize(
    ("values", "current", "wanted"),
    [
        ([8, 8], 2, 2),
        ([8.7, 8.7], 2, 2),  # within a tenth
        ([9, 9], 2, 3),
        ([16, 16], 2, 4),
        ([0, 0, 0], 3, 0),
        ([4, 4, 4, 4], 4, 2),
        ([], 3, 3),
        ([16, 16], 3, 4),  # the third is not ready, and counts as 0: 32 / 3 of 8
        ([10, 10], 3, 3),  # with it there would be fewer than wanted, without more
        ([2, 2], 3, 2),  # it counts as the target: 12 / 3 of 8
        ([30], 4, 4),
    ],
)
def test_as_many_are_wanted_as_the_controller_wants(values, current, wanted):
    assert wanted_pods(values, current, 8.0) == wanted


def decisions(options, values, current, *, count):
    """What is decided at each sync, when what is decided is there at once."""
    scaler, found = Autoscaler(options), []
    for number in range(1, count + 1):
        current = scaler.decide(number * SYNC_S, [values(number)] * current, current)
        found.append(current)
    return found


def test_replicas_come_two_a_minute_once_the_queue_has_stood_for_the_window():
    assert decisions(OURS, lambda number: 100, 2, count=12) == [2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 8, 8]


def test_a_queue_shorter_than_the_window_brings_nobody():
    assert decisions(OURS, lambda number: 100 if number == 3 else 8, 2, count=8) == [2] * 8


def test_replicas_go_one_in_two_minutes_when_nothing_more_was_wanted_for_ten():
    found = decisions(OURS, lambda number: 0, 6, count=72)
    assert found[:40] == [6] * 40  # 600 s, and what was there at the beginning counts
    assert found[40:48] == [5] * 8
    assert found[-1] == 2
    assert min(found) == 2


def test_one_look_upwards_keeps_replicas_for_the_whole_window():
    found = decisions(OURS, lambda number: 8 if number == 20 else 0, 4, count=70)
    assert found[: 20 + 39] == [4] * 59
    assert found[60] == 3


def test_percent_min_and_disabled():
    up = Direction(0.0, (Policy("Percent", 50, 60.0), Policy("Pods", 1, 60.0)), takes_most=False)
    slow = dataclasses.replace(OURS, up=up, max_replicas=100)
    assert decisions(slow, lambda number: 100, 4, count=5) == [5, 5, 5, 5, 6]
    fast = dataclasses.replace(slow, up=dataclasses.replace(up, takes_most=True))
    assert decisions(fast, lambda number: 100, 4, count=5) == [6, 6, 6, 6, 9]
    still = dataclasses.replace(slow, up=dataclasses.replace(up, is_disabled=True))
    assert decisions(still, lambda number: 100, 4, count=5) == [4] * 5


def test_gauges_are_means_over_the_range_and_forget_who_is_gone():
    gauges = Gauges(10.0, 30.0)
    assert [gauges.is_due(now_s) for now_s in (0.0, 5.0, 10.0, 19.0, 20.0)] == [True, False, True, False, True]
    for value in (1.0, 2.0, 3.0, 6.0):
        gauges.read({0: value, 1: 0.0})
    assert gauges.means([0, 1, 2]) == [pytest.approx(11 / 3), 0.0]
    gauges.read({1: 3.0})
    assert gauges.means([0, 1]) == [1.0]


SCALER = "kubernetes/horizontalpodautoscaler.yaml"
POD = "kubernetes/deployment.yaml"
ADAPTER = "kubernetes/prometheus-adapter-config.yaml"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (SCALER, "name: vllm_num_requests_waiting", "name: cpu", "0 rules define cpu, which the autoscaler uses"),
        (SCALER, "name: vllm_num_requests_waiting", "name: 3", "metrics[0].pods.metric.name: 3 is not of type str"),
        (ADAPTER, "as: vllm_num_requests_waiting", "as: waiting", "0 rules define vllm_num_requests_waiting"),
        (ADAPTER, "seriesQuery: 'vllm:num_requests_w", "seriesQuery: 'vllm:w", "'vllm:waiting' is not one of"),
        (POD, '"60"]', '"many"]', "--shutdown-timeout 'many'"),
        (POD, "seconds: 5 ", "seconds: five ", "must be numbers"),
        (ADAPTER, "rules:", "rule:", "rules: None is not of type list"),
        (ADAPTER, "rules:", "rules: [", "cannot be read"),
        (
            "kubernetes/horizontalpodautoscaler.yaml",
            "type: Pods\n      pods",
            "type: Resource\n      pods",
            "of type Pods",
        ),
        (SCALER, '"8"', '"0"', "not an AverageValue above 0"),
        (
            "kubernetes/horizontalpodautoscaler.yaml",
            "minReplicas: 2",
            "minReplicas: 9",
            "9 is not from 1 to maxReplicas",
        ),
        (SCALER, "maxReplicas: 8", "maxReplicas: many", "'many' is not of type int"),
        (SCALER, "value: 1", "value: 0", "a value of at least 1"),
        (SCALER, "kind: Hor", "kind: Vert", "0 documents of kind"),
        (SCALER, "spec:", "spec: [", "cannot be read"),
        (ADAPTER, "[1m]", "[?]", "not an avg_over_time"),
        ("prometheus/kubernetes.yaml", "scrape_interval: 10s", "scrape_interval: often", "'often' is not a duration"),
        (POD, "template:", "templates:", "deployment.yaml: spec.template"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(tmp_path, file, old, new, message):
    folder = tmp_path / "deploy"
    for part in ("kubernetes", "prometheus"):
        shutil.copytree(DEPLOY / part, folder / part)
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidArgument, match=message.replace("[", "\\[")):
        read_autoscaling(folder)


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"--autoscale: .*horizontalpodautoscaler.yaml cannot be read"):
        read_autoscaling(tmp_path)
