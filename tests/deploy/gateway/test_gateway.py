"""The inference gateway's files are what its kinds take, and mean each other and our servers; mistakes are found."""

import asyncio
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.deploy import manifests
from tests.deploy.gateway import rules
from tests.deploy.manifests import Document
from tests.deploy.metrics import names_in, scrape


@pytest.fixture(scope="module")
def text() -> str:
    """What a live server answers."""
    return asyncio.run(scrape())


@pytest.fixture(scope="module")
def metrics(text) -> set[str]:
    """The names of its metrics."""
    return names_in(text)


def test_the_folder_is_in_order(metrics):
    assert rules.problems(rules.load(), metrics) == []


def test_the_kustomization_names_every_file():
    (kustomization,) = manifests.load(rules.FOLDER / "kustomization.yaml")
    assert manifests.schema_problems(kustomization) == []
    assert sorted(kustomization["resources"]) == list(rules.FILES)
    found = {path.name for path in rules.FOLDER.iterdir()}
    assert found == {*rules.FILES, "kustomization.yaml"}


def test_every_metric_that_the_picker_reads_is_needed(metrics):
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "lora_requests_info"):
        found = rules.problems(rules.load(), metrics - {f"vllm:{name}"})
        assert [f"the server has no metric 'vllm:{name}'" in problem for problem in found] == [True]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("vllm:cache_config_info", {"block_size", "num_gpu_blocks"}),
        ("vllm:lora_requests_info", {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}),
    ],
)
def test_metrics_whose_labels_the_picker_reads_have_them(text, name, labels):
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}{{"))
    assert labels <= set(re.findall(r"(\w+)=\"", line))


# --- planted mistakes -------------------------------------------------------------------------------------------------


def server_of(documents: list[Document]) -> Document:
    (pod,), _ = rules.pods_in(documents)
    return next(each for each in documents if f"{each['kind']}/{each['metadata']['name']}" == pod.where)


def picker_of(documents: list[Document]) -> Document:
    _, pod = rules.pods_in(documents)
    return next(each for each in documents if f"{each['kind']}/{each['metadata']['name']}" == pod.where)


def containers_of(deployment: Document) -> list[Document]:
    return list(deployment["spec"]["template"]["spec"]["containers"])


def args_of(deployment: Document, place: int = 0) -> list[str]:
    found: list[str] = containers_of(deployment)[place]["args"]
    return found


def replaced(words: list[str], old: str, new: str) -> None:
    """Edits the one word that begins with `old`."""
    (place,) = (i for i, word in enumerate(words) if word.startswith(old))
    words[place] = new


def spec(kind: str, edit: Callable[[Document], Any]) -> Callable[[list[Document]], None]:
    return lambda documents: edit(rules.only(documents, kind)["spec"])


def server_args(old: str, new: str) -> Callable[[list[Document]], None]:
    return lambda documents: replaced(args_of(server_of(documents)), old, new)


def picker_args(old: str, new: str, place: int = 0) -> Callable[[list[Document]], None]:
    return lambda documents: replaced(args_of(picker_of(documents), place), old, new)


def settings(edit: Callable[[Document], Any]) -> Callable[[list[Document]], None]:
    """A mistake in the picker's own configuration."""

    def plant(documents: list[Document]) -> None:
        written = rules.config_of(documents)
        edit(written)
        rules.only(documents, "ConfigMap")["data"] = {"picker.yaml": yaml.safe_dump(written)}

    return plant


def parameters(kind: str, **values: Any) -> Callable[[list[Document]], None]:
    return settings(lambda it: rules.parameters_of(it, kind).update(values))


def engine(**values: Any) -> Callable[[list[Document]], None]:
    return settings(lambda it: rules.parameters_of(it, "core-metrics-extractor")["engineConfigs"][0].update(values))


def profile(edit: Callable[[list[Document]], Any]) -> Callable[[list[Document]], None]:
    return settings(lambda it: edit(it["schedulingProfiles"][0]["plugins"]))


def labels(deployment: Document) -> Document:
    found: Document = deployment["spec"]["template"]["metadata"]["labels"]
    return found


PRODUCER = "precise-prefix-cache-producer"
MISTAKES: list[tuple[Callable[[list[Document]], Any], str]] = [
    # fields
    (spec("InferencePool", lambda it: it.update(targetPortNumber=8000)), "'targetPortNumber' was unexpected"),
    (spec("InferencePool", lambda it: it.update(targetPorts=[])), "[] should be non-empty"),
    (spec("InferencePool", lambda it: it["endpointPickerRef"].pop("port")), "'port' is a required property"),
    (spec("InferencePool", lambda it: it["endpointPickerRef"].update(failureMode="Open")), "'Open' is not one of"),
    (
        lambda it: rules.only(it, "InferencePool").update(apiVersion="inference.networking.x-k8s.io/v1alpha2"),
        "was expected",
    ),
    (spec("Gateway", lambda it: it["listeners"][0].update(ports=1)), "'ports' was unexpected"),
    (spec("HTTPRoute", lambda it: it["rules"][0].update(timeout="0s")), "'timeout' was unexpected"),
    (spec("HTTPRoute", lambda it: it["rules"][0]["timeouts"].update(request="0")), "does not match"),
    (lambda it: picker_of(it)["spec"].update(replica=1), "'replica' was unexpected"),
    (settings(lambda it: it.update(apiVersion="llm-d.ai/v1")), "'llm-d.ai/v1alpha1' was expected"),
    (settings(lambda it: it["plugins"].append({"type": "prefix-scorer"})), "'prefix-scorer' is not one of"),
    (parameters(PRODUCER, blockSize=32), "'blockSize' was unexpected"),
    (parameters("token-producer", url="http://localhost:8000"), "'url' was unexpected"),
    # the way of a call
    (spec("HTTPRoute", lambda it: it["parentRefs"][0].update(name="other")), "not on the Gateway jpaged-gateway"),
    (spec("HTTPRoute", lambda it: it["rules"][0]["backendRefs"][0].update(name="other")), "no InferencePool other"),
    (spec("HTTPRoute", lambda it: it["rules"][0]["backendRefs"][0].pop("kind")), "Service, which is no pool"),
    (spec("HTTPRoute", lambda it: it["rules"][0].pop("timeouts")), "streams are cut off after None"),
    (spec("InferencePool", lambda it: it["selector"]["matchLabels"].update(app="x")), "selects no server"),
    (spec("InferencePool", lambda it: it["targetPorts"][0].update(number=8001)), "calls ports [8001]"),
    (spec("InferencePool", lambda it: it.update(appProtocol="kubernetes.io/h2c")), "speaks kubernetes.io/h2c"),
    (spec("InferencePool", lambda it: it["endpointPickerRef"].update(name="other")), "there is no Service other"),
    (spec("InferencePool", lambda it: it["endpointPickerRef"]["port"].update(number=9090)), "9090 is not where"),
    (spec("Service", lambda it: it["selector"].update(app="x")), "Service: selects no picker"),
    # servers
    (server_args("--http-port", "--http-prot=8000"), "unrecognized arguments: --http-prot=8000"),
    (server_args("--http-port", "--http-port=8001"), "ports are"),
    (server_args("--kv-events-endpoint", "--kv-events-endpoint=udp://*:5557"), "tells udp://*:5557"),
    (server_args("--kv-events-endpoint", "--kv-events-endpoint=tcp://127.0.0.1:5557"), "tells tcp://127.0.0.1:5557"),
    (server_args("--kv-events-topic", "--kv-events-topic=kv-events"), "the topic kv-events is not kv@$(POD_IP):8000@"),
    (server_args("--kv-events-topic", "--kv-events-topic=kv@$(POD_IP)@llama-3.1-8b"), "is not kv@$(POD_IP):8000@"),
    (server_args("--block-size", "--block-size=64"), "blocks are of 32 tokens; those of"),
    (server_args("--served-model-name", "--served-model-name=llama"), "serves llama"),
    (lambda it: args_of(server_of(it)).append("--no-enable-prefix-caching"), "prefix"),
    (lambda it: containers_of(server_of(it))[0].pop("env"), "POD_IP is not the pod's address"),
    (lambda it: labels(server_of(it)).pop("llm-d.ai/engine-type"), "its engine is None; the picker knows ['vllm']"),
    # the picker
    (picker_args("--pool-name=", "--pool-name=other"), "not for jpaged"),
    (picker_args("--pool-group", "--pool-grop=x"), "has no flag --pool-grop"),
    (picker_args("--config-file", "--config-file=/etc/picker.yaml"), "/etc/picker.yaml is not mounted"),
    (picker_args("--grpc-port", "--grpc-port=9004"), "9002 is not where the picker listens"),
    (picker_args("--grpc-health-port", "--grpc-health-port=9004"), "readinessProbe asks port 9003"),
    (lambda it: picker_of(it)["spec"].update(replicas=2), "several pickers each know a part"),
    (lambda it: containers_of(picker_of(it))[1].pop("securityContext"), "keeps privileges"),
    (lambda it: picker_of(it)["spec"]["template"]["spec"].pop("serviceAccountName"), "is not bound to the role"),
    (lambda it: rules.only(it, "RoleBinding")["roleRef"].update(name="other"), "there is no Role other"),
    (lambda it: rules.only(it, "Role")["rules"][0].update(verbs=["get"]), "may not watch core/pods"),
    (lambda it: rules.only(it, "Role")["rules"].pop(1), "may not watch inference.networking.k8s.io/inferencepools"),
    # its configuration
    (profile(lambda it: it[0].update(pluginRef="prefix-scorer")), "there is no plugin prefix-scorer"),
    (profile(lambda it: it.pop(1)), "no profile asks queue-scorer"),
    (settings(lambda it: it["plugins"].append({"type": "queue-scorer"})), "queue-scorer is there twice"),
    (settings(lambda it: it["dataLayer"]["sources"].pop(1)), "is not told of pods that come and go"),
    (parameters("prefix-cache-scorer", prefixMatchInfoProducerName="approx"), "but guesses"),
    (engine(queuedRequestsSpec="vllm:requests_waiting"), "queuedRequestsSpec: the server has no metric"),
    (engine(name="jpaged"), "its engine is vllm; the picker knows ['jpaged']"),
    (parameters(PRODUCER, tokenProcessorConfig={"blockSizeTokens": 16}), "blocks are of 16 tokens"),
    (parameters(PRODUCER, kvEventsConfig={}), "reads port None"),
    (parameters("token-producer", modelName="llama"), "makes tokens for llama"),
    (parameters("token-producer", vllm={"url": "http://localhost:8080"}), "the renderer listens on 8000"),
    (picker_args("/models", "/models/other", place=1), "renders /models/other as llama-3.1-8b"),
]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("plant", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_planted_mistake_is_found(plant, message, metrics):
    documents = copy.deepcopy(rules.load())
    plant(documents)
    found = rules.problems(documents, metrics)
    assert any(message in problem for problem in found), found


def test_several_replicas_behind_one_port_are_found(metrics):
    documents = rules.load()
    args_of(server_of(documents)).append("--data-parallel-size=2")
    containers_of(server_of(documents))[0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
    assert any("2 replicas tell on as many sockets" in problem for problem in rules.problems(documents, metrics))
