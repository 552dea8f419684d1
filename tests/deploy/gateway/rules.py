"""Holds deploy/gateway to what a gateway, an endpoint picker and a server mean by it; names what is wrong.

HTTPRoute ──> InferencePool ──> pods of servers.yaml: --http-port, --kv-events-endpoint, --kv-events-topic
                    └─> Service ──> picker ──> EndpointPickerConfig: metrics, block size, socket, model
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import yaml

from jpaged.config import EngineConfig
from tests.deploy import manifests
from tests.deploy.manifests import ROOT, Document, Pod
from tests.deploy.servers import serve_config

FOLDER = ROOT / "deploy" / "gateway"
FILES = ("gateway.yaml", "picker.yaml", "servers.yaml")
POOL_GROUP = "inference.networking.k8s.io"
_FLAGS = frozenset(
    {"pool-group", "pool-namespace", "pool-name", "config-file", "grpc-port", "grpc-health-port", "metrics-port"}
    | {"metrics-endpoint-auth", "tracing", "zap-encoder", "v", "secure-serving", "cert-path", "enable-cert-reload"}
    | {"ha-enable-leader-election", "enable-pprof", "refresh-metrics-interval", "metrics-staleness-threshold"}
)
"""Those of the picker's flags that a file here may have (llm-d's router 0.9)."""
_SPECS = ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec")


def load() -> list[Document]:
    """All documents of the folder but the kustomization."""
    return [document for name in FILES for document in manifests.load(FOLDER / name)]


def only(documents: list[Document], kind: str) -> Document:
    """The document of a kind of which there is one."""
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def pods_in(documents: list[Document]) -> tuple[list[Pod], Pod]:
    """The pods of servers, and the picker's."""
    every = [pod for document in documents for pod in manifests.pods(document)]
    servers = [pod for pod in every if str(pod.container["image"]).startswith("jpaged:")]
    (picker,) = (pod for pod in every if pod not in servers)
    return servers, picker


def flags_of(container: Document) -> dict[str, str]:
    """The flags of a container that has them as --name=value."""
    words = [str(word).partition("=") for word in container["args"] if str(word).startswith("--")]
    return {name.removeprefix("--"): value for name, _, value in words}


def config_of(documents: list[Document]) -> Document:
    """The picker's own configuration."""
    (text,) = only(documents, "ConfigMap")["data"].values()
    return dict(yaml.safe_load(text))


def parameters_of(config: Document, kind: str) -> Document:
    """The parameters of the plugin of a type; empty where it is not there."""
    found: list[Document] = [each.get("parameters", {}) for each in config["plugins"] if each["type"] == kind]
    return found[0] if found else {}


# --- rules ------------------------------------------------------------------------------------------------------------


def problems(documents: list[Document], exposed: set[str]) -> list[str]:
    """What is wrong with the folder's documents: with their fields first, then with what they mean by each other.

    Args:
        exposed: the names of a live server's metrics.
    """
    if found := [problem for document in documents for problem in manifests.schema_problems(document)]:
        return found
    config = config_of(documents)
    try:
        manifests.hold_to(config, "endpointpickerconfig.json")
    except jsonschema.ValidationError as error:
        return [f"EndpointPickerConfig: {'.'.join(map(str, error.absolute_path))}: {error.message}"]
    servers, picker = pods_in(documents)
    if found := [problem for pod in servers for problem in manifests.pod_problems(pod)]:
        return found
    return [
        *_route_problems(documents),
        *_pool_problems(documents, servers, picker),
        *_picker_problems(documents, picker),
        *_access_problems(documents, picker),
        *_reference_problems(config),
        *_metric_problems(config, servers, exposed),
        *_prefix_problems(documents, config, servers, picker),
    ]


def _route_problems(documents: list[Document]) -> Iterator[str]:
    route, gateway, pool = (only(documents, kind) for kind in ("HTTPRoute", "Gateway", "InferencePool"))
    parents = [(each.get("kind", "Gateway"), each["name"]) for each in route["spec"]["parentRefs"]]
    if parents != [("Gateway", gateway["metadata"]["name"])]:
        yield f"HTTPRoute: hangs on {parents}, not on the Gateway {gateway['metadata']['name']}"
    for rule in route["spec"]["rules"]:
        for each in rule.get("backendRefs", ()):
            if (each.get("group", ""), each.get("kind", "Service")) != (POOL_GROUP, "InferencePool"):
                yield f"HTTPRoute: sends to {each.get('group', '')}/{each.get('kind', 'Service')}, which is no pool"
            if each["name"] != pool["metadata"]["name"]:
                yield f"HTTPRoute: there is no InferencePool {each['name']}"
        if (limit := rule.get("timeouts", {}).get("request")) != "0s":
            yield f"HTTPRoute: streams are cut off after {limit}"


def _pool_problems(documents: list[Document], servers: list[Pod], picker: Pod) -> Iterator[str]:
    spec = only(documents, "InferencePool")["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    if not servers or not all(wanted <= pod.labels.items() for pod in servers):
        yield "InferencePool: selects no server"
    if wanted <= picker.labels.items():
        yield "InferencePool: selects the picker"
    ports = [each["number"] for each in spec["targetPorts"]]
    for pod in servers:
        if ports != [_config(pod).http.http_port]:
            yield f"InferencePool: calls ports {ports}; {pod.where} answers HTTP on {_config(pod).http.http_port}"
    if spec.get("appProtocol", "http") != "http":
        yield f"InferencePool: speaks {spec['appProtocol']} to an HTTP port"
    service = only(documents, "Service")
    found = {each["port"]: each["targetPort"] for each in service["spec"]["ports"]}
    named = {each["name"]: str(each["containerPort"]) for each in picker.container["ports"]}
    reference = spec["endpointPickerRef"]
    if (reference.get("kind", "Service"), reference["name"]) != ("Service", service["metadata"]["name"]):
        yield f"InferencePool: there is no Service {reference['name']}"
    elif named.get(found.get(reference["port"]["number"], "")) != flags_of(picker.container).get("grpc-port"):
        yield f"InferencePool: port {reference['port']['number']} is not where the picker listens"
    if not service["spec"]["selector"].items() <= picker.labels.items():
        yield "Service: selects no picker"


def _picker_problems(documents: list[Document], picker: Pod) -> Iterator[str]:
    container, flags = picker.container, flags_of(picker.container)
    for name in sorted(flags.keys() - _FLAGS):
        yield f"{picker.where}: the picker has no flag --{name}"
    pool = only(documents, "InferencePool")["metadata"]["name"]
    if (flags.get("pool-group"), flags.get("pool-name")) != (POOL_GROUP, pool):
        yield f"{picker.where}: picks for {flags.get('pool-group')}/{flags.get('pool-name')}, not for {pool}"
    settings = only(documents, "ConfigMap")
    volumes = {each["name"]: each.get("configMap", {}).get("name") for each in picker.spec["volumes"]}
    files = {
        f"{mount['mountPath']}/{name}"
        for mount in container["volumeMounts"]
        if volumes.get(mount["name"]) == settings["metadata"]["name"]
        for name in settings["data"]
    }
    if flags.get("config-file") not in files:
        yield f"{picker.where}: {flags.get('config-file')} is not mounted; {sorted(files)} are"
    ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    told = {name: flags.get(flag) for name, flag in _PORT_FLAGS.items()}
    if ports != told:
        yield f"{picker.where}: ports are {ports}; the picker opens {told}"
    for name, probe in container.items():
        if name.endswith("Probe") and str(probe["grpc"]["port"]) != flags.get("grpc-health-port"):
            yield f"{picker.where}: {name} asks port {probe['grpc']['port']}"
    if only([each for each in documents if _is_of(each, picker)], "Deployment")["spec"]["replicas"] != 1:
        yield f"{picker.where}: several pickers each know a part of what caches hold"
    for each in picker.spec["containers"]:
        alone = Pod(f"{picker.where}.{each['name']}", picker.labels, {}, {**picker.spec, "containers": [each]})
        yield from (f"{alone.where}: {problem}" for problem in manifests.security_problems(alone))


_PORT_FLAGS = {"grpc": "grpc-port", "health": "grpc-health-port", "metrics": "metrics-port"}


def _is_of(document: Document, pod: Pod) -> bool:
    return f"{document['kind']}/{document['metadata']['name']}" == pod.where


def _access_problems(documents: list[Document], picker: Pod) -> Iterator[str]:
    """The picker may read what it reads: pods, the pool, and what llm-d adds to it."""
    account, role, binding = (only(documents, kind) for kind in ("ServiceAccount", "Role", "RoleBinding"))
    names = {each["metadata"]["name"] for each in (account, role)} | {picker.spec.get("serviceAccountName")}
    bound = [(each["kind"], each["name"]) for each in binding["subjects"]]
    if len(names) != 1 or bound != [("ServiceAccount", account["metadata"]["name"])]:
        yield f"{picker.where}: its account, {picker.spec.get('serviceAccountName')}, is not bound to the role"
    if (binding["roleRef"]["kind"], binding["roleRef"]["name"]) != ("Role", role["metadata"]["name"]):
        yield f"RoleBinding: there is no {binding['roleRef']['kind']} {binding['roleRef']['name']}"
    may = {
        (group, resource)
        for rule in role["rules"]
        if {"get", "list", "watch"} <= set(rule["verbs"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    needed = {("", "pods"), (POOL_GROUP, "inferencepools"), ("llm-d.ai", "inferenceobjectives")}
    yield from (f"Role: may not watch {group or 'core'}/{resource}" for group, resource in sorted(needed - may))


def _reference_problems(config: Document) -> Iterator[str]:
    names = [each.get("name", each["type"]) for each in config["plugins"]]
    yield from (
        f"EndpointPickerConfig: {name} is there twice" for name in sorted({n for n in names if names.count(n) > 1})
    )
    meant: list[str] = []
    for source in config.get("dataLayer", {}).get("sources", ()):
        meant += [source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])]
    meant += [each["pluginRef"] for each in config.get("requestHandler", {}).get("parsers", ())]
    meant += [each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]]
    yield from (f"EndpointPickerConfig: there is no plugin {name}" for name in sorted(set(meant) - set(names)))
    used = {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]}
    idle = [name for name in names if name.endswith("-scorer") and name not in used]
    yield from (f"EndpointPickerConfig: no profile asks {name}" for name in idle)


def _metric_problems(config: Document, servers: list[Pod], exposed: set[str]) -> Iterator[str]:
    """Metrics that are read are those of a server, of an engine that the pods say they are."""
    parameters = parameters_of(config, "core-metrics-extractor")
    engines: dict[str, Any] = {each["name"]: each for each in parameters.get("engineConfigs", ())}
    for pod in servers:
        name = pod.labels.get(parameters.get("engineLabelKey", ""))
        if name not in engines:
            yield f"{pod.where}: its engine is {name}; the picker knows {sorted(engines)}"
    for name, engine in engines.items():
        for spec in _SPECS:
            if engine.get(spec, "").partition("{")[0] not in exposed:
                yield f"EndpointPickerConfig: {name}.{spec}: the server has no metric {engine.get(spec, '')!r}"


def _prefix_problems(documents: list[Document], config: Document, servers: list[Pod], picker: Pod) -> Iterator[str]:
    """Blocks that the picker looks for are those that servers tell: size, socket, topic, model, tokens."""
    producer = "precise-prefix-cache-producer"
    parameters = parameters_of(config, producer)
    if parameters_of(config, "prefix-cache-scorer").get("prefixMatchInfoProducerName") != producer:
        yield f"prefix-cache-scorer: does not ask {producer}, but guesses"
    sources = {each["pluginRef"]: each["extractors"] for each in config.get("dataLayer", {}).get("sources", ())}
    if {"pluginRef": producer} not in sources.get("endpoint-notification-source", []):
        yield f"{producer}: is not told of pods that come and go"
    events, tokens = parameters.get("kvEventsConfig", {}), parameters_of(config, "token-producer")
    socket = events.get("podDiscoveryConfig", {}).get("socketPort")
    size = parameters.get("tokenProcessorConfig", {}).get("blockSizeTokens")
    (port,) = (each["number"] for each in only(documents, "InferencePool")["spec"]["targetPorts"])
    for pod in servers:
        own = _config(pod)
        model, topic = own.server.served_model_name, f"kv@$(POD_IP):{port}@{own.server.served_model_name}"
        if own.kv_events.kv_events_endpoint != f"tcp://*:{socket}" or not events.get("discoverPods"):
            yield f"{producer}: reads port {socket}; {pod.where} tells {own.kv_events.kv_events_endpoint}"
        if own.kv_events.kv_events_topic != topic or not topic.startswith(events.get("topicFilter", "?")):
            yield f"{pod.where}: the topic {own.kv_events.kv_events_topic} is not {topic}"
        if _POD_IP not in pod.container.get("env", ()):
            yield f"{pod.where}: POD_IP is not the pod's address"
        if own.cache.block_size != size or not own.cache.enable_prefix_caching:
            yield f"{producer}: blocks are of {size} tokens; those of {pod.where} are of {own.cache.block_size}"
        if own.parallel.data_parallel_size != 1:
            yield f"{pod.where}: {own.parallel.data_parallel_size} replicas tell on as many sockets; one is read"
        if tokens.get("modelName") != model:
            yield f"token-producer: makes tokens for {tokens.get('modelName')}; {pod.where} serves {model}"
        yield from _renderer_problems(pod, picker, tokens)


_POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def _renderer_problems(server: Pod, picker: Pod, tokens: Document) -> Iterator[str]:
    """What makes tokens beside the picker has the server's model, under its name, where it is asked."""
    (renderer,) = (each for each in picker.spec["containers"] if each["command"][:1] == ["vllm"])
    flags = flags_of(renderer)
    if tokens.get("vllm", {}).get("url") != f"http://localhost:{flags.get('port')}":
        yield f"token-producer: asks {tokens.get('vllm', {}).get('url')}; the renderer listens on {flags.get('port')}"
    model, own = renderer["args"][0], server.container["args"][0]
    if (model, flags.get("served-model-name")) != (own, tokens.get("modelName")):
        yield f"{picker.where}: renders {model} as {flags.get('served-model-name')}; {server.where} has {own}"


def _config(pod: Pod) -> EngineConfig:
    config = _parsed(tuple(manifests.command_of(pod.container)))
    assert config is not None
    return config


_parsed = cache(serve_config)
