"""The manifests are what Kubernetes takes and what the server needs, and planted mistakes are found."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy import manifests
from tests.deploy.manifests import FOLDER, Document
from tests.deploy.metrics import names_in, scrape

FILES = manifests.load_all()
ALL = [(name, document) for name, documents in FILES.items() for document in documents]
PODS = [pod for _, document in ALL for pod in manifests.pods(document)]
IDS = [f"{name}-{document['kind']}-{document.get('metadata', {}).get('name', '')}" for name, document in ALL]


def find(name: str, kind: str) -> Document:
    """A copy of the first document of a kind in a file."""
    return copy.deepcopy(next(document for document in FILES[name] if document["kind"] == kind))


def everything() -> list[Document]:
    return [copy.deepcopy(document) for _, document in ALL]


def test_there_is_every_kind():
    assert {document["kind"] for _, document in ALL} == {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "JobSet",
        "Kustomization",
        "LeaderWorkerSet",
        "PodDisruptionBudget",
        "Service",
    }


@pytest.mark.parametrize(("name", "document"), ALL, ids=IDS)
def test_a_document_is_what_the_schemas_allow(name, document):
    assert manifests.schema_problems(document) == []


@pytest.mark.parametrize("pod", PODS, ids=[f"{number}-{pod.where}" for number, pod in enumerate(PODS)])
def test_a_pod_fits_its_server(pod):
    assert manifests.pod_problems(pod) == []


@pytest.mark.parametrize("name", ["leaderworkerset-tpu.yaml", "leaderworkerset-gpu.yaml"])
def test_a_group_has_the_devices_of_its_model(name):
    assert manifests.group_problems(find(name, "LeaderWorkerSet")) == []


def test_the_batch_job_finds_its_server_and_ends_it():
    assert manifests.jobset_problems(find("jobset-batch.yaml", "JobSet")) == []


def test_services_budgets_and_autoscalers_find_what_they_mean():
    assert manifests.selector_problems(everything()) == []


async def test_the_autoscaler_reads_a_metric_of_the_server():
    assert manifests.autoscaler_problems(everything(), names_in(await scrape())) == []


def test_the_kustomization_names_files_that_are_there():
    resources = find("kustomization.yaml", "Kustomization")["resources"]
    assert [name for name in resources if not (FOLDER / name).is_file()] == []
    assert "deployment.yaml" in resources


# --- planted mistakes -------------------------------------------------------------------------------------------------


def at(document: Document, path: str) -> Any:
    """The part of a document at a dotted path; numbers are places in lists."""
    part: Any = document
    for word in path.split("."):
        part = part[int(word)] if word.isdigit() else part[word]
    return part


SERVER = "spec.template.spec.containers.0"
LEADER = "spec.leaderWorkerTemplate.leaderTemplate.spec"
BATCH = "spec.replicatedJobs.1.template.spec"


@pytest.mark.parametrize(
    ("name", "kind", "path", "key", "value", "message"),
    [
        ("deployment.yaml", "Deployment", "spec", "replica", 2, "'replica' was unexpected"),
        ("deployment.yaml", "Deployment", f"{SERVER}.readinessProbe", "grcp", {}, "'grcp' was unexpected"),
        ("deployment.yaml", "Deployment", f"{SERVER}.readinessProbe.grpc", "port", "grpc", "is not of type 'integer'"),
        ("services.yaml", "Service", "spec.ports.0", "apProtocol", "grpc", "'apProtocol' was unexpected"),
        ("horizontalpodautoscaler.yaml", "HorizontalPodAutoscaler", "spec", "maxReplicas", None, "None is not of type"),
        ("leaderworkerset-tpu.yaml", "LeaderWorkerSet", "spec", "replica", 2, "'replica' was unexpected"),
        ("leaderworkerset-tpu.yaml", "LeaderWorkerSet", "spec.leaderWorkerTemplate", "restartPolicy", "Always", "enum"),
        ("leaderworkerset-gpu.yaml", "LeaderWorkerSet", LEADER, "nodeSelectors", {}, "'nodeSelectors' was unexpected"),
        ("jobset-batch.yaml", "JobSet", "spec.network", "dns", True, "'dns' was unexpected"),
        ("jobset-batch.yaml", "JobSet", BATCH, "backofLimit", 3, "'backofLimit' was unexpected"),
        ("jobset-batch.yaml", "JobSet", f"{BATCH}.template.spec.containers.0", "arg", [], "'arg' was unexpected"),
        ("kustomization.yaml", "Kustomization", "", "resource", [], "'resource' was unexpected"),
    ],
)
def test_a_planted_mistake_in_a_field_is_found(name, kind, path, key, value, message):
    document = find(name, kind)
    (at(document, path) if path else document)[key] = value
    found = manifests.schema_problems(document)
    assert len(found) == 1
    assert message.replace("enum", "is not one of") in found[0]


def test_a_kind_that_kubernetes_does_not_have_is_found():
    document = {"apiVersion": "apps/v1", "kind": "Deploymint", "metadata": {"name": "x"}}
    assert "Couldn't find schema for kind Deploymint" in manifests.schema_problems(document)[0]


@pytest.mark.parametrize(
    ("path", "key", "value", "message"),
    [
        (SERVER, "args", ["demo", "--max-seqs", "8"], "unrecognized arguments: --max-seqs 8"),
        (SERVER, "args", ["demo", "--max-num-seqs", "0"], "--max-num-seqs: 0 is below the limit of 1"),
        (SERVER, "args", ["demo", "--port", "50052"], "startupProbe.grpc.port is 50051; the server listens on 50052"),
        (SERVER, "args", ["demo", "--metrics-port", "9401"], "prometheus.io/port is 9400, not 9401"),
        (SERVER, "args", ["demo", "--host", "127.0.0.1"], "listens on 127.0.0.1"),
        (SERVER, "args", ["demo", "--swap-space", "6"], "--swap-space 6 GiB does not fit into 6Gi"),
        (
            SERVER,
            "args",
            ["demo", "--shutdown-timeout", "90"],
            "terminationGracePeriodSeconds is 90, not above the 97 s",
        ),
        ("spec.template.spec", "terminationGracePeriodSeconds", 30, "is 30, not above the 67 s"),
        ("spec.template.spec", "securityContext", {"runAsUser": 0}, "runs as root"),
        (f"{SERVER}.securityContext", "readOnlyRootFilesystem", False, "may write to its image"),
        (f"{SERVER}.securityContext", "capabilities", {}, "keeps privileges"),
        (f"{SERVER}.readinessProbe.grpc", "port", 9400, "readinessProbe.grpc.port is 9400"),
        (f"{SERVER}.volumeMounts.0", "mountPath", "/cache", "writes to /var/cache/jpaged, which is not mounted"),
        (f"{SERVER}.volumeMounts.0", "name", "gone", "mounts gone, which is no volume"),
        (f"{SERVER}.resources", "limits", {"cpu": "1"}, "resources.limits lacks cpu or memory"),
    ],
)
def test_a_planted_mistake_in_a_pod_is_found(path, key, value, message):
    document = find("deployment.yaml", "Deployment")
    at(document, path)[key] = value
    (pod,) = manifests.pods(document)
    assert any(message in problem for problem in manifests.pod_problems(pod)), manifests.pod_problems(pod)


@pytest.mark.parametrize(
    ("path", "key", "value", "message"),
    [
        ("spec.leaderWorkerTemplate", "size", 2, "8 devices for options that ask for 16"),
        ("spec.leaderWorkerTemplate", "restartPolicy", "None", "restartPolicy must be RecreateGroupOnPodRestart"),
        (f"{LEADER}.nodeSelector", "cloud.google.com/gke-tpu-topology", "2x4", "2x4 does not have 16 chips"),
        (f"{LEADER}.containers.0", "args", ["demo", "--tensor-parallel-size=16"], "are started differently"),
        (f"{LEADER}.containers.0", "args", ["demo", "--data-parallel-size=2"], "2 works in one process"),
    ],
)
def test_a_planted_mistake_in_a_group_is_found(path, key, value, message):
    document = find("leaderworkerset-tpu.yaml", "LeaderWorkerSet")
    at(document, path)[key] = value
    assert any(message in problem for problem in manifests.group_problems(document))


def test_a_probe_of_a_pod_that_opens_no_port_is_found():
    document = find("leaderworkerset-tpu.yaml", "LeaderWorkerSet")
    template = document["spec"]["leaderWorkerTemplate"]
    template["workerTemplate"] = template["leaderTemplate"]
    _, worker = manifests.pods(document)
    assert any("nothing that answers it" in problem for problem in manifests.pod_problems(worker))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec["network"].update(subdomain="other"), "the server is jpaged-batch-server-0-0.other:50051"),
        (lambda spec: spec["replicatedJobs"][1].pop("dependsOn"), "does not wait for server"),
        (lambda spec: spec["successPolicy"].pop("targetReplicatedJobs"), "is not complete when batch is"),
    ],
)
def test_a_planted_mistake_in_the_batch_job_is_found(change: Callable[[Document], Any], message):
    document = find("jobset-batch.yaml", "JobSet")
    change(document["spec"])
    assert any(message in problem for problem in manifests.jobset_problems(document))


@pytest.mark.parametrize(
    ("kind", "path", "key", "value", "message"),
    [
        ("Service", "spec.selector", "app.kubernetes.io/instance", "other", "selects no pod"),
        ("Service", "spec.ports.0", "targetPort", "http", "has no port http"),
        ("PodDisruptionBudget", "spec.selector.matchLabels", "app", "other", "selects no pod"),
        ("HorizontalPodAutoscaler", "spec.scaleTargetRef", "name", "other", "there is no Deployment/other"),
    ],
)
def test_a_planted_mistake_in_a_selector_is_found(kind, path, key, value, message):
    documents = everything()
    at(next(document for document in documents if document["kind"] == kind), path)[key] = value
    assert any(message in problem for problem in manifests.selector_problems(documents))


async def test_a_planted_mistake_in_a_metric_is_found():
    metrics = names_in(await scrape())
    documents = everything()
    scaler = next(document for document in documents if document["kind"] == "HorizontalPodAutoscaler")
    scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] = "vllm_requests_waiting"
    assert "no adapter offers vllm_requests_waiting" in manifests.autoscaler_problems(documents, metrics)[0]
    without = metrics - {"vllm:num_requests_waiting"}
    assert (
        "the server has no metric vllm:num_requests_waiting" in manifests.autoscaler_problems(everything(), without)[0]
    )
