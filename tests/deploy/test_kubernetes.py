"""The manifests are what Kubernetes takes and what the server needs, and planted mistakes are found."""

import asyncio
import copy
import re
from typing import Any

import pytest
import yaml

from tests.deploy import manifests
from tests.deploy.manifests import FOLDER, Document
from tests.deploy.metrics import names_in, scrape

FILES = manifests.load_all()
ALL = [(name, document) for name, documents in FILES.items() for document in documents]
IDS = [f"{name}-{document['kind']}-{document.get('metadata', {}).get('name', '')}" for name, document in ALL]


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """Those of a live server."""
    return names_in(asyncio.run(scrape()))


def copies() -> dict[str, list[Document]]:
    return copy.deepcopy(FILES)


def flat(files: dict[str, list[Document]]) -> list[Document]:
    return [document for documents in files.values() for document in documents]


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
def test_a_document_is_in_order(name, document):
    assert manifests.document_problems(document) == []


def test_documents_find_what_they_mean(metrics):
    assert manifests.problems_together(flat(copies()), metrics) == []


def test_the_kustomization_names_files_that_are_there():
    (kustomization,) = FILES["kustomization.yaml"]
    resources = kustomization["resources"]
    assert [name for name in resources if not (FOLDER / name).is_file()] == []
    assert "deployment.yaml" in resources


def merged(document: Document, change: Document) -> None:
    """Add a fragment of a manifest: mappings by their keys, entries of lists by their names."""
    for key, value in change.items():
        if isinstance(value, dict):
            merged(document.setdefault(key, {}), value)
        elif isinstance(value, list):
            for entry in value:
                by_name = {one["name"]: one for one in document.setdefault(key, [])}
                if entry["name"] not in by_name:
                    document[key].append(entry)
                else:
                    merged(by_name[entry["name"]], entry)
        else:
            document[key] = value


def test_the_bucket_of_the_page_of_tpus_fits_the_manifests():
    page = (manifests.ROOT / "docs/tpus.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    deployment = copies()["deployment-tpu.yaml"][0]
    merged(deployment["spec"]["template"], yaml.safe_load(text))
    assert manifests.document_problems(deployment) == []
    (pod,) = manifests.pods(deployment)
    paths = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
    assert paths["bucket"] == "/var/cache/jpaged/programs"  # compile_cache_dir() of the image


# --- planted mistakes -------------------------------------------------------------------------------------------------

POD = "spec.template.spec"
SERVER = f"{POD}.containers.0"
GROUP = "spec.leaderWorkerTemplate"
WORKER = "spec.leaderWorkerTemplate.workerTemplate.spec"
LEADER = f"{GROUP}.leaderTemplate.spec"
BATCH = "spec.replicatedJobs.1.template.spec"
MISSING = object()
"""What is planted where a field is left out."""


def plant(document: Document, path: str, value: Any) -> None:
    """Sets what lies at a dotted path, whose numbers are places in lists; "|" in a word stands for a dot."""
    part: Any = document
    *words, last = (word.replace("|", ".") for word in path.split("."))
    for word in words:
        part = part[int(word)] if word.isdigit() else part[word]
    if value is MISSING:
        del part[last]
    else:
        part[last] = value


def routed(place: int, word: str) -> list[str]:
    """A router's arguments with another word in one place."""
    words = list(FILES["router.yaml"][0]["spec"]["template"]["spec"]["containers"][0]["args"])
    words[place] = word
    return words


def workers_without_probes() -> list[Document]:
    """The containers of a group's worker, started without the image's options: no port answers probes."""
    group = next(one for one in FILES["leaderworkerset-tpu.yaml"] if one["kind"] == "LeaderWorkerSet")
    (container,) = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    return [container | {"command": ["jpaged", "serve", "--host", "0.0.0.0"], "args": ["demo"]}]


# File, kind, path -> what is planted there, and what is said about it.
MISTAKES: dict[tuple[str, str], list[tuple[str, Any, str]]] = {
    ("deployment", "Deployment"): [
        ("spec.replica", 2, "'replica' was unexpected"),
        (f"{SERVER}.readinessProbe.grcp", {}, "'grcp' was unexpected"),
        (f"{SERVER}.readinessProbe.grpc.port", "grpc", "is not of type 'integer'"),
        (f"{SERVER}.args", ["demo", "--max-seqs", "8"], "unrecognized arguments: --max-seqs 8"),
        (f"{SERVER}.args", ["demo", "--max-num-seqs", "0"], "--max-num-seqs: 0 is below the limit of 1"),
        (
            f"{SERVER}.args",
            ["demo", "--probe-port", "50053"],
            "startupProbe asks port 50052; the server answers health on 50053",
        ),
        (f"{SERVER}.args", ["demo", "--metrics-port", "9401"], "prometheus.io/port is 9400, not 9401"),
        (f"{SERVER}.args", ["demo", "--host", "127.0.0.1"], "listens on 127.0.0.1"),
        (f"{SERVER}.args", ["demo", "--swap-space", "6"], "--swap-space 6 GiB does not fit into 6 GiB"),
        (f"{SERVER}.args", ["demo", "--shutdown-timeout", "90"], "is killed after 90 s, not above the 97 s"),
        (f"{POD}.terminationGracePeriodSeconds", 30, "is killed after 30 s, not above the 67 s"),
        (f"{POD}.securityContext", {"runAsUser": 0}, "runs as root"),
        (f"{SERVER}.securityContext.readOnlyRootFilesystem", False, "may write to its image"),
        (f"{SERVER}.securityContext.capabilities", {}, "keeps privileges"),
        (f"{SERVER}.ports.0.containerPort", 50052, "ports are {'grpc': 50052, 'metrics': 9400}"),
        (f"{SERVER}.ports.0.name", "http", "ports are {'http': 50051, 'metrics': 9400}"),
        (f"{SERVER}.livenessProbe", MISSING, "livenessProbe asks port None"),
        (f"{SERVER}.readinessProbe.grpc.port", 9400, "readinessProbe asks port 9400"),
        (f"{SERVER}.livenessProbe.grpc.service", MISSING, "livenessProbe asks for '', not for 'liveness'"),
        (f"{SERVER}.readinessProbe.grpc.service", "liveness", "readinessProbe asks for 'liveness', not for ''"),
        (f"{SERVER}.volumeMounts.0.mountPath", "/cache", "writes to /var/cache/jpaged, which is not mounted"),
        (f"{SERVER}.volumeMounts.0.name", "gone", "mounts gone, which is no volume"),
        (f"{SERVER}.resources.limits", {"cpu": "1"}, "resources.limits lacks cpu or memory"),
    ],
    ("leaderworkerset-tpu", "LeaderWorkerSet"): [
        ("spec.replica", 2, "'replica' was unexpected"),
        (f"{GROUP}.restartPolicy", "Always", "is not one of"),
        (f"{GROUP}.size", 2, "8 devices for options that ask for 16"),
        (f"{GROUP}.restartPolicy", "None", "restartPolicy must be RecreateGroupOnPodRestart"),
        (f"{LEADER}.nodeSelector.cloud|google|com/gke-tpu-topology", "2x4", "2x4 does not have 16 chips"),
        (f"{LEADER}.containers.0.args", ["demo", "--tensor-parallel-size=16"], "are started differently"),
        (f"{LEADER}.containers.0.args", ["demo", "--data-parallel-size=3"], "3 does not divide the 4 processes"),
        (
            f"{WORKER}.containers.0.livenessProbe.grpc.port",
            50051,
            "livenessProbe asks port 50051; a follower answers on 50052",
        ),
        (f"{WORKER}.containers", workers_without_probes(), "has a probe, and nothing that answers it"),
    ],
    ("leaderworkerset-gpu", "LeaderWorkerSet"): [(f"{LEADER}.nodeSelectors", {}, "'nodeSelectors' was unexpected")],
    ("jobset-batch", "JobSet"): [
        ("spec.network.dns", True, "'dns' was unexpected"),
        (f"{BATCH}.backofLimit", 3, "'backofLimit' was unexpected"),
        (f"{BATCH}.template.spec.containers.0.arg", [], "'arg' was unexpected"),
        ("spec.network.subdomain", "other", "the server is jpaged-batch-server-0-0.other:50051"),
        ("spec.replicatedJobs.1.dependsOn", MISSING, "does not wait for server"),
        ("spec.successPolicy.targetReplicatedJobs", MISSING, "is not complete when batch is"),
    ],
    ("router", "Deployment"): [
        (f"{SERVER}.command", ["jpaged", "root"], "invalid choice: 'root'"),
        (f"{SERVER}.args", routed(0, "--target=jpaged"), "'jpaged' is not HOST:PORT"),
        (
            f"{SERVER}.args",
            routed(0, "--target=dns:///jpaged:50051"),
            "dns:///jpaged:50051 is no Service without an address",
        ),
        (
            f"{SERVER}.args",
            routed(0, "--target=dns:///jpaged-headless:50052"),
            "is no Service without an address of its own",
        ),
        (f"{SERVER}.args", routed(1, "--host=127.0.0.1"), "listens on 127.0.0.1"),
        (
            f"{SERVER}.args",
            routed(5, "--probe-port=50053"),
            "readinessProbe asks port 50052; the server answers health on 50053",
        ),
        (f"{SERVER}.args", routed(5, "--max-connections=512"), "probes share a port with strangers"),
        (f"{SERVER}.args", routed(4, "--shutdown-timeout=90"), "is killed after 90 s, not above the 97 s"),
        (f"{SERVER}.args", routed(3, "--pin-prefix=x"), "unrecognized arguments: --pin-prefix=x"),
        (f"{SERVER}.livenessProbe.grpc.service", MISSING, "livenessProbe asks for '', not for 'liveness'"),
    ],
    ("kustomization", "Kustomization"): [("resource", [], "'resource' was unexpected")],
    ("services", "Service"): [
        ("spec.ports.0.apProtocol", "grpc", "'apProtocol' was unexpected"),
        ("spec.selector.app|kubernetes|io/instance", "other", "selects no pod"),
        ("spec.ports.0.targetPort", "http", "has no port http"),
    ],
    ("poddisruptionbudget", "PodDisruptionBudget"): [("spec.selector.matchLabels.app", "other", "selects no pod")],
    ("horizontalpodautoscaler", "HorizontalPodAutoscaler"): [
        ("spec.maxReplicas", None, "None is not of type"),
        ("spec.scaleTargetRef.name", "other", "there is no Deployment/other"),
        ("spec.metrics.0.pods.metric.name", "vllm_requests_waiting", "no adapter offers vllm_requests_waiting"),
    ],
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("name", "kind", "path", "value", "message"),
    [(*place, *mistake) for place, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_planted_mistake_is_found(name, kind, path, value, message, metrics):
    files = copies()
    document = next(document for document in files[f"{name}.yaml"] if document["kind"] == kind)
    plant(document, path, value)
    found = manifests.document_problems(document) or manifests.problems_together(flat(files), metrics)
    assert any(message in problem for problem in found), found


def test_a_kind_that_kubernetes_does_not_have_is_found():
    document = {"apiVersion": "apps/v1", "kind": "Deploymint", "metadata": {"name": "x"}}
    assert "Couldn't find schema for kind Deploymint" in manifests.document_problems(document)[0]


def test_a_metric_that_the_server_does_not_have_is_found(metrics):
    found = manifests.problems_together(flat(copies()), metrics - {"vllm:num_requests_waiting"})
    assert "the server has no metric vllm:num_requests_waiting" in found[0]
