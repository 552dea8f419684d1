"""Rollouts of pods that hold all chips of a host: the strategy of the manifests, and a rehearsal with processes."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jpaged.client import Client
from jpaged.errors import Unavailable
from jpaged.types import SamplingParams
from tests.deploy import manifests
from tests.deploy.rollout import Deadlock, Rollout, Strategy, startup_budget_s
from tests.processes import Process

ON_TPUS = {name: documents for name, documents in manifests.load_all().items() if name.endswith("-tpu.yaml")}
DEPLOYMENT = ON_TPUS["deployment-tpu.yaml"][0]
OPTIONS = ("--max-num-seqs", "2", "--num-blocks", "64", "--max-num-batched-tokens", "32", "--wait-for-all-programs")
PROMPT, PARAMS = "Once upon a time", SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


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


class ServerPod:
    """`jpaged serve` with a cache folder that ends with it, and the bucket of all pods."""

    def __init__(self, folder: Path, bucket: Path) -> None:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JPAGED_CACHE_DIR": str(folder),
            "JPAGED_CACHE_URL": f"file://{bucket}",
        }
        words = ("-m", "jpaged", "serve", "demo", "--port", "0", "--shutdown-timeout", "60", *OPTIONS)
        self.begun_s, self.startup_s, self.drain_s = time.monotonic(), 0.0, 0.0
        self.process = Process(words, environment)
        self.address = ""

    def wait_until_ready(self) -> None:
        self.address = self.process.wait_for(r"^ready on (\S+)").group(1).rstrip(",")
        self.startup_s = time.monotonic() - self.begun_s

    def end(self) -> None:
        begun_s = time.monotonic()
        assert self.process.end(signal.SIGTERM) == 0, "".join(self.process.lines)
        self.drain_s = time.monotonic() - begun_s

    @property
    def programs(self) -> str:
        """Where its programs came from."""
        return self.process.wait_for(r"\d+ programs: (.*)").group(1)


class Caller(threading.Thread):
    """Calls the pods that are ready in turn; a call that a draining pod refuses is made again."""

    def __init__(self, done: Rollout) -> None:
        super().__init__()
        self._rollout = done
        self.texts: list[str] = []
        self.errors: list[Exception] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            ready: list[Any] = list(self._rollout.ready)
            pod = ready[len(self.texts) % len(ready)]
            try:
                with Client(pod.address) as client:
                    self.texts.append(client.complete(PROMPT, PARAMS).outputs[0].text)
            except Unavailable:
                if pod in self._rollout.ready:  # else it drains, and another pod is asked
                    self.errors.append(RuntimeError("a pod that is ready refused a call"))
            except Exception as error:
                self.errors.append(error)


@pytest.mark.long
def test_a_rollout_of_servers_loses_no_call_and_compiles_once(tmp_path):
    pods: list[ServerPod] = []

    def start(version: int) -> ServerPod:
        pods.append(ServerPod(tmp_path / f"cache{len(pods)}", tmp_path / "bucket"))
        return pods[-1]

    done = Rollout(2, DEPLOYMENT["spec"]["replicas"], Strategy.from_manifest(DEPLOYMENT), start)
    try:
        done.create(1)
        caller = Caller(done)
        caller.start()
        done.run(2)
        caller.is_over.set()
        caller.join()
        for pod in list(done.ready):
            pod.end()
    finally:
        for pod in pods:
            if pod.process.popen.poll() is None:
                pod.process.end(signal.SIGKILL)
    assert (len(pods), done.least_ready, caller.errors) == (4, 1, [])
    assert len(caller.texts) > 1 and len(set(caller.texts)) == 1
    (first, *others) = [pod.programs for pod in pods]
    assert first.endswith("compiled") and {text.partition(" ")[2] for text in others} == {"from the cache"}
    template = DEPLOYMENT["spec"]["template"]["spec"]
    assert max(pod.drain_s for pod in pods) < template["terminationGracePeriodSeconds"]
    assert max(pod.startup_s for pod in pods) < startup_budget_s(template["containers"][0])
