"""Rollouts of pods that hold all chips of a host: the strategy and the probes of the manifests."""

import pytest

from tests.deploy import manifests
from tests.deploy.rollout import Deadlock, Rollout, Strategy, startup_budget_s

ON_TPUS = {name: documents for name, documents in manifests.load_all().items() if name.endswith("-tpu.yaml")}
DEPLOYMENT = ON_TPUS["deployment-tpu.yaml"][0]


class Counted:
    """A pod that is ready at once."""

    def __init__(self) -> None:
        self.num_ended = 0

    def wait_until_ready(self) -> None:
        """It is."""

    def end(self) -> None:
        self.num_ended += 1


def rollout(num_hosts: int, num_replicas: int, strategy: Strategy) -> Rollout:
    found = Rollout(num_hosts, num_replicas, strategy, lambda version: Counted())
    found.create(1)
    found.run(2)
    return found


@pytest.mark.parametrize("name", ON_TPUS)
@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_the_manifests_roll_out_without_a_free_host(name, num_replicas):
    document = next(one for one in ON_TPUS[name] if one["kind"] in ("Deployment", "LeaderWorkerSet"))
    done = rollout(num_replicas, num_replicas, Strategy.from_manifest(document))
    assert [done.versions[id(pod)] for pod in done.ready] == [2] * num_replicas
    assert done.least_ready == num_replicas - 1


def test_a_surge_needs_a_free_host():
    with pytest.raises(Deadlock, match="2 pods hold all 2 hosts, and none may end"):
        rollout(2, 2, Strategy(surge=1, unavailable=0))
    assert rollout(3, 2, Strategy(surge=1, unavailable=0)).least_ready == 2
    assert rollout(2, 2, Strategy(surge=1, unavailable=1)).least_ready == 1


@pytest.mark.parametrize("name", ON_TPUS)
def test_a_pod_may_compile_for_longer_than_the_plan_says(name):
    """docs/tpus.md has 37 minutes for all programs of the largest example, on the processors of one machine."""
    budgets = [startup_budget_s(pod.container) for one in ON_TPUS[name] for pod in manifests.pods(one)[:1]]
    assert budgets and min(budgets) >= 60 * 60
    for one in ON_TPUS[name]:
        if one["kind"] == "Deployment":
            assert one["spec"]["progressDeadlineSeconds"] > max(budgets)
