"""Holds Kubernetes manifests to the schemas, to the server's options, and to each other; names what is wrong.

Core kinds are validated by the schemas of the package kubernetes-validate, closed to unknown fields; LeaderWorkerSet,
JobSet, and those of KServe and the Gateway API by schemas/*.json beside this file, and their pods by the core schemas.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from jpaged.config import EngineConfig
from jpaged.distributed_env import MultiHost
from jpaged.errors import InvalidArgument
from tests.deploy import dockerfile
from tests.deploy.servers import Server, num_devices, parse, route_targets, serve_config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.32", "1.37")
"""The oldest Kubernetes that the manifests are for, and the newest whose schemas there are."""
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template: where it is (`Deployment/jpaged`), its labels, annotations and spec."""

    where: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Document

    @property
    def container(self) -> Document:
        """The one that runs jpaged."""
        return dict(self.spec["containers"][0])


def load(path: Path) -> list[Document]:
    """The documents of a file."""
    return copy.deepcopy(_documents(path.read_text()))


@cache
def _documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def load_all() -> dict[str, list[Document]]:
    """Every file of deploy/kubernetes by name."""
    return {path.name: load(path) for path in sorted(FOLDER.glob("*.yaml"))}


# --- schemas ----------------------------------------------------------------------------------------------------------


def schema_problems(document: Document) -> list[str]:
    """What the schemas object to; a document that was asked of before is not validated again."""
    words = repr(document)
    if words not in _PROBLEMS:
        _PROBLEMS[words] = _schema_problems(document)
    return [*_PROBLEMS[words]]


_PROBLEMS: dict[str, list[str]] = {}


def _schema_problems(document: Document) -> list[str]:
    kind = str(document.get("kind"))
    try:
        if kind == "Kustomization":
            jsonschema.validate(document, _KUSTOMIZATION)
        elif kind in ("Gateway", "HTTPRoute", "InferencePool"):
            validate_custom(document)
        elif kind in ("LeaderWorkerSet", "JobSet", "ServingRuntime", "InferenceService"):
            validate_custom(document)
            for part in _core_parts(document):
                _validate_core(part)
        else:
            _validate_core(document)
    except jsonschema.ValidationError as error:
        return [f"{kind}: {'.'.join(map(str, error.absolute_path))}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"{kind}: {error.message}"]
    return []


_KUSTOMIZATION = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "kustomize.config.k8s.io/v1beta1"},
        "kind": {"const": "Kustomization"},
        "resources": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["apiVersion", "kind", "resources"],
    "additionalProperties": False,
}


def validate_custom(document: Document) -> None:
    """Holds a document of a kind that is not Kubernetes' own to schemas/*.json.

    Raises:
        jsonschema.ValidationError: what it objects to.
    """
    hold_to(document, f"{document['kind'].lower()}.json")


def hold_to(document: Document, schema: str) -> None:
    """Holds a document to a file of schemas/.

    Raises:
        jsonschema.ValidationError: what it objects to most.
    """
    if error := best_match(_validator(schema).iter_errors(document)):
        raise error


@cache
def _validator(schema: str) -> Validator:
    contents = json.loads((Path(__file__).with_name("schemas") / schema).read_text())
    kind = validator_for(contents)
    kind.check_schema(contents)
    return kind(contents)


def _validate_core(document: Document) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def _core_parts(document: Document) -> Iterator[Document]:
    """The parts of a custom kind that are of core kinds, as documents of their own."""
    if document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        return
    if document["kind"] == "ServingRuntime":
        spec = {name: document["spec"][name] for name in ("containers", "volumes") if name in document["spec"]}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "predictor"}, "spec": spec}
        return
    if document["kind"] == "InferenceService":
        if "deploymentStrategy" in (predictor := document["spec"]["predictor"]):
            labels, container = {"a": "b"}, {"name": "c", "image": "d"}
            template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
            spec = {"selector": {"matchLabels": labels}, "template": template}
            spec["strategy"] = predictor["deploymentStrategy"]
            yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "predictor"}, "spec": spec}
        return
    template = document["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        if role in template:
            yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": template[role]}


# --- pods -------------------------------------------------------------------------------------------------------------


def pods(document: Document) -> list[Pod]:
    """Every pod template of a document."""
    kind, spec = document["kind"], document.get("spec", {})
    name = f"{kind}/{document.get('metadata', {}).get('name')}"
    found: list[tuple[str, Document]] = []
    if kind == "Deployment":
        found = [(name, spec["template"])]
    elif kind == "LeaderWorkerSet":
        roles = spec["leaderWorkerTemplate"]
        found = [(f"{name}.{role}", roles[role]) for role in ("leaderTemplate", "workerTemplate")]
    elif kind == "JobSet":
        found = [(f"{name}.{job['name']}", job["template"]["spec"]["template"]) for job in spec["replicatedJobs"]]
    return [
        Pod(where, dict(t["metadata"]["labels"]), dict(t["metadata"].get("annotations", {})), dict(t["spec"]))
        for where, t in found
    ]


def command_of(container: Document) -> list[str]:
    """What the container starts: its own command, or the entry point of its image, and its arguments."""
    image = dockerfile.load(str(container["image"]).partition(":")[2])
    return [*container.get("command", image.entrypoint), *map(str, container.get("args", ()))]


def is_follower(pod: Pod) -> bool:
    """Whether another process takes requests for this one: it opens the port of probes at most."""
    return pod.where.endswith(".workerTemplate")


def pod_problems(pod: Pod) -> list[str]:
    """What is wrong with a pod by itself."""
    try:
        config = serve_config(command_of(pod.container))
    except InvalidArgument as error:
        return [f"{pod.where}: {error}"]
    found = [*security_problems(pod)]
    if config is not None:
        found += _server(pod, config).problems()
        if not is_follower(pod):
            found += _port_problems(pod, config)
    found += _probe_problems(pod, config)
    return [f"{pod.where}: {problem}" for problem in found]


def _server(pod: Pod, config: EngineConfig) -> Server:
    """What the pod says about its server; a follower opens nothing, and a group's devices are `group_problems`'."""
    container, probes = pod.container, ("startupProbe", "readinessProbe", "livenessProbe")
    memory = str(container.get("resources", {}).get("limits", {}).get("memory", "0Gi"))
    is_router = bool(route_targets(command_of(container)))  # it has no pool, and swaps nothing
    asked = {name: container.get(name, {}).get("grpc", {}).get("port") for name in probes}
    return Server(
        config,
        probed={} if is_follower(pod) else asked,
        grace_s=pod.spec.get("terminationGracePeriodSeconds", 30),
        sleep_s=container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0),
        memory_gib=float(memory.removesuffix("Gi")) if memory.endswith("Gi") and not is_router else None,
        num_devices=None if "LeaderWorkerSet" in pod.where else _num_devices(pod),
    )


def _probe_problems(pod: Pod, config: EngineConfig | None) -> Iterator[str]:
    """What probes ask: of a follower on its port of probes; of liveness nothing that passes by itself."""
    probes = {name: probe.get("grpc", {}) for name, probe in pod.container.items() if name.endswith("Probe")}
    if probes and (config is None or (is_follower(pod) and config.server.probe_port is None)):
        yield "has a probe, and nothing that answers it"
        return
    for name, asked in probes.items():
        if is_follower(pod) and config is not None and asked.get("port") != config.server.probe_port:
            yield f"{name} asks port {asked.get('port')}; a follower answers on {config.server.probe_port}"
        service = "liveness" if name == "livenessProbe" else ""
        if asked.get("service", "") != service:
            yield f"{name} asks for {asked.get('service', '')!r}, not for {service!r}"


def security_problems(pod: Pod) -> Iterator[str]:
    """What a pod's first container may do, and needs not; where it writes, and what it may take."""
    who = {**pod.spec.get("securityContext", {}), **pod.container.get("securityContext", {})}
    if not who.get("runAsNonRoot") or not who.get("runAsUser"):
        yield "runs as root: runAsNonRoot and a runAsUser above 0 are needed"
    if who.get("allowPrivilegeEscalation", True) or who.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps privileges: allowPrivilegeEscalation: false and capabilities.drop: [ALL] are needed"
    if not who.get("readOnlyRootFilesystem"):
        yield "may write to its image: readOnlyRootFilesystem is needed"
    mounted = {mount["mountPath"]: mount["name"] for mount in pod.container.get("volumeMounts", ())}
    volumes = {volume["name"] for volume in pod.spec.get("volumes", ())}
    written = ["/tmp"]
    if "command" not in pod.container:
        image = dockerfile.load(str(pod.container["image"]).partition(":")[2])
        written.append(image.environment["JPAGED_CACHE_DIR"])
    yield from (f"writes to {path}, which is not mounted" for path in written if path not in mounted)
    yield from (f"mounts {name}, which is no volume" for name in mounted.values() if name not in volumes)
    for kind in ("requests", "limits"):
        if not {"cpu", "memory"} <= pod.container.get("resources", {}).get(kind, {}).keys():
            yield f"resources.{kind} lacks cpu or memory"


def _port_problems(pod: Pod, config: EngineConfig) -> Iterator[str]:
    """Services mean ports by their names."""
    ports = {port["name"]: port["containerPort"] for port in pod.container.get("ports", ())}
    opened = {"grpc": config.server.port, "metrics": config.server.metrics_port}
    if config.http.http_port is not None:
        opened["http"] = config.http.http_port
    if (events := config.kv_events.kv_events_endpoint) is not None:
        opened["kv-events"] = int(events.rpartition(":")[2])
    if ports != opened:
        yield f"ports are {ports}; the server opens {' and '.join(map(str, opened.values()))}"
    if (port := pod.annotations.get("prometheus.io/port")) != str(config.server.metrics_port):
        yield f"prometheus.io/port is {port}, not {config.server.metrics_port}"


def _num_devices(pod: Pod) -> int:
    limits = pod.container.get("resources", {}).get("limits", {})
    return int(limits.get("nvidia.com/gpu", limits.get("google.com/tpu", 0)))


# --- documents beside each other --------------------------------------------------------------------------------------


def group_problems(document: Document) -> list[str]:
    """A LeaderWorkerSet's devices, its two templates, and what becomes of a group that loses a pod."""
    leader, worker = pods(document)
    template = document["spec"]["leaderWorkerTemplate"]
    num_chips = template["size"] * _num_devices(leader)
    config = serve_config(command_of(leader.container))
    assert config is not None
    found = []
    try:
        config.for_multihost(MultiHost(f"leader:{config.server.port}", template["size"], 0, "LeaderWorkerSet"))
    except InvalidArgument as error:
        found.append(str(error))
    if num_chips != num_devices(config):
        found.append(f"{num_chips} devices for options that ask for {num_devices(config)}")
    topology = leader.spec.get("nodeSelector", {}).get("cloud.google.com/gke-tpu-topology")
    if topology is not None and prod(map(int, topology.split("x"))) != num_chips:
        found.append(f"the topology {topology} does not have {num_chips} chips")
    if command_of(leader.container) != command_of(worker.container):
        found.append("leader and worker are started differently")
    if _num_devices(worker) != _num_devices(leader):
        found.append("leader and worker have different devices")
    if template.get("restartPolicy") != "RecreateGroupOnPodRestart":
        found.append("restartPolicy must be RecreateGroupOnPodRestart: a group does not outlive a process")
    return [f"LeaderWorkerSet/{document['metadata']['name']}: {problem}" for problem in found]


def jobset_problems(document: Document) -> list[str]:
    """The batch job's --target is the server's name in the JobSet's network."""
    spec, name = document["spec"], document["metadata"]["name"]
    server, batch = pods(document)
    config = serve_config(command_of(server.container))
    assert config is not None
    jobs = [job["name"] for job in spec["replicatedJobs"]]
    address = f"{name}-{jobs[0]}-0-0.{spec['network']['subdomain']}:{config.server.port}"
    target = parse(command_of(batch.container)).target
    found = [] if target == [address] else [f"JobSet/{name}: --target is {target}; the server is {address}"]
    if spec["replicatedJobs"][1].get("dependsOn") != [{"name": jobs[0], "status": "Ready"}]:
        found.append(f"JobSet/{name}: {jobs[1]} does not wait for {jobs[0]} to be ready")
    if spec["successPolicy"].get("targetReplicatedJobs") != [jobs[1]]:
        found.append(f"JobSet/{name}: is not complete when {jobs[1]} is: the server never ends by itself")
    return found


def selector_problems(documents: list[Document]) -> list[str]:
    """Services, budgets and autoscalers that mean pods, ports or deployments which are not there."""
    templates = [pod for document in documents for pod in pods(document)]
    names = {(each["kind"], each["metadata"]["name"]) for each in documents if "metadata" in each}
    found = []
    for each in documents:
        where, spec = f"{each['kind']}/{each.get('metadata', {}).get('name')}", each.get("spec", {})
        if each["kind"] in ("Service", "PodDisruptionBudget"):
            wanted = spec["selector"] if each["kind"] == "Service" else spec["selector"]["matchLabels"]
            meant = [pod for pod in templates if wanted.items() <= pod.labels.items()]
            if not meant:
                found.append(f"{where}: selects no pod")
            for port in spec.get("ports", ()):
                for pod in meant:
                    if port["targetPort"] not in {p["name"] for p in pod.container.get("ports", ())}:
                        found.append(f"{where}: {pod.where} has no port {port['targetPort']}")
        if each["kind"] == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            if (target["kind"], target["name"]) not in names:
                found.append(f"{where}: there is no {target['kind']}/{target['name']}")
    return found


def route_problems(documents: list[Document]) -> list[str]:
    """A router's targets are the addresses of pods, by a Service that has no address of its own."""
    headless = {
        f"dns:///{each['metadata']['name']}:{port['port']}"
        for each in documents
        if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None"
        for port in each["spec"]["ports"]
    }
    return [
        f"{pod.where}: {target} is no Service without an address of its own"
        for each in documents
        for pod in pods(each)
        for target in route_targets(command_of(pod.container))
        if target not in headless
    ]


def autoscaler_problems(documents: list[Document], exposed: set[str]) -> list[str]:
    """An autoscaler's metric is what the adapter makes of a metric that the server has."""
    found, offered = [], set()
    for each in documents:
        if each["kind"] == "ConfigMap" and "config.yaml" in each["data"]:
            for rule in yaml.safe_load(each["data"]["config.yaml"])["rules"]:
                series = rule["seriesQuery"].partition("{")[0]
                offered.add(rule["name"]["as"])
                if series not in exposed:
                    found.append(f"adapter: the server has no metric {series}")
                if rule["name"]["matches"] != f"^{series}$":
                    found.append(f"adapter: {rule['name']['matches']} does not match {series}")
    for each in documents:
        if each["kind"] == "HorizontalPodAutoscaler":
            for metric in each["spec"]["metrics"]:
                name = metric["pods"]["metric"]["name"]
                if name not in offered:
                    found.append(f"HorizontalPodAutoscaler/{each['metadata']['name']}: no adapter offers {name}")
    return found


# --- all rules --------------------------------------------------------------------------------------------------------

_OF_KIND = {"LeaderWorkerSet": group_problems, "JobSet": jobset_problems}


def document_problems(document: Document) -> list[str]:
    """What is wrong with a document by itself: with its fields, then with its pods and what its kind promises."""
    if found := schema_problems(document):
        return found
    found = [problem for pod in pods(document) for problem in pod_problems(pod)]
    of_kind = _OF_KIND.get(document["kind"])
    return found if of_kind is None else [*found, *of_kind(document)]


def problems_together(documents: list[Document], exposed: set[str]) -> list[str]:
    """What documents say of each other and of the server's metrics, and is not so."""
    return [*selector_problems(documents), *route_problems(documents), *autoscaler_problems(documents, exposed)]
