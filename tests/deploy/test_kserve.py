"""KServe's runtimes and services: their fields, and what they mean to each other and to servers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy import manifests
from tests.deploy.manifests import ROOT, Document, Pod

FOLDER = ROOT / "deploy" / "kserve"
DOCUMENTS = [one for name in ("runtimes", "services") for one in manifests.load(FOLDER / f"{name}.yaml")]
MODEL_FOLDER = "/mnt/models"


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    return {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == kind}


def pod_of(name: str, runtime: Document, predictor: Document) -> Pod:
    """The pod that KServe makes of a service and its runtime."""
    container = copy.deepcopy(runtime["containers"][0])
    container["args"] = [word.replace("{{.Name}}", name) for word in container["args"]]
    for port in container["ports"]:
        port["name"] = {"h2c": "grpc"}.get(port["name"], port["name"])
    extra = ("terminationGracePeriodSeconds", "nodeSelector", "securityContext")
    spec = {each: predictor[each] for each in extra if each in predictor}
    spec |= {"containers": [container], "volumes": runtime.get("volumes", [])}
    return Pod(f"InferenceService/{name}", {}, runtime.get("annotations", {}), spec)


def problems(documents: list[Document]) -> list[str]:
    """What is wrong with the fields, and with services and runtimes together."""
    if found := [problem for one in documents for problem in manifests.schema_problems(one)]:
        return found
    runtimes = of_kind(documents, "ServingRuntime")
    for name, spec in of_kind(documents, "InferenceService").items():
        predictor, model = spec["predictor"], spec["predictor"]["model"]
        if (runtime := runtimes.get(model.get("runtime", ""))) is None:
            found.append(f"{name}: there is no runtime {model.get('runtime')}")
            continue
        formats = [each["name"] for each in runtime["supportedModelFormats"]]
        if model["modelFormat"]["name"] not in formats:
            found.append(f"{name}: the runtime has the formats {formats}, not {model['modelFormat']['name']}")
        protocols, protocol = runtime.get("protocolVersions", []), model.get("protocolVersion")
        if protocols and protocol not in protocols:
            found.append(f"{name}: the runtime speaks {protocols}, not {protocol}")
        container = runtime["containers"][0]
        first = container["ports"][0]["name"]
        if first != (wanted := "h2c" if protocol == "grpc-v2" else "http"):
            found.append(f"{name}: KServe's Service takes the port {first}, not {wanted}")
        if container["name"] != "kserve-container" or container["args"][0] != MODEL_FOLDER:
            found.append(f"{name}: KServe puts the model into {MODEL_FOLDER} of kserve-container")
        found += manifests.pod_problems(pod_of(name, runtime, predictor))
    return found


def test_the_folder_is_in_order():
    assert problems(DOCUMENTS) == []
    assert sorted(path.name for path in FOLDER.iterdir()) == ["runtimes.yaml", "services.yaml"]


def container_of(documents: list[Document], place: int = 0) -> Document:
    found: Document = documents[place]["spec"]["containers"][0]
    return found


def predictor_of(documents: list[Document], place: int = 2) -> Document:
    found: Document = documents[place]["spec"]["predictor"]
    return found


MISTAKES: list[tuple[Callable[[list[Document]], Any], str]] = [
    (lambda it: it[0].update(apiVersion="serving.kserve.io/v1beta1"), "'serving.kserve.io/v1alpha1' was expected"),
    (lambda it: it[0]["spec"].update(protocolVersion="v2"), "'protocolVersion' was unexpected"),
    (lambda it: it[1]["spec"].update(protocolVersions=["grpc"]), "'grpc' is not one of"),
    (lambda it: it[0]["spec"]["supportedModelFormats"][0].update(priority=0), "0 is less than the minimum of 1"),
    (lambda it: container_of(it).update(arg=[]), "'arg' was unexpected"),
    (lambda it: it[0]["spec"]["volumes"][0].update(emptyDirs={}), "'emptyDirs' was unexpected"),
    (lambda it: predictor_of(it).update(maxReplica=2), "'maxReplica' was unexpected"),
    (lambda it: predictor_of(it)["deploymentStrategy"].update(kind="Recreate"), "'kind' was unexpected"),
    (lambda it: predictor_of(it)["model"].update(runtime="jpaged"), "there is no runtime jpaged"),
    (lambda it: predictor_of(it)["model"]["modelFormat"].update(name="onnx"), "not onnx"),
    (lambda it: predictor_of(it, 3)["model"].update(protocolVersion="v2"), "speaks ['grpc-v2'], not v2"),
    (lambda it: predictor_of(it, 3)["model"].update(runtime="jpaged-openai"), "takes the port http, not h2c"),
    (lambda it: predictor_of(it).pop("terminationGracePeriodSeconds"), "is killed after 30 s"),
    (lambda it: container_of(it).update(name="server"), "KServe puts the model into /mnt/models of kserve-container"),
    (lambda it: container_of(it)["args"].append("--max-seqs=8"), "unrecognized arguments: --max-seqs=8"),
    (lambda it: container_of(it)["readinessProbe"]["grpc"].update(port=50051), "readinessProbe asks port 50051"),
    (lambda it: container_of(it)["securityContext"].pop("runAsUser"), "runs as root"),
    (lambda it: container_of(it, 1)["ports"].pop(1), "ports are"),
]


@pytest.mark.parametrize(("plant", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_planted_mistake_is_found(plant, message):
    documents = copy.deepcopy(DOCUMENTS)
    plant(documents)
    found = problems(documents)
    assert any(message in problem for problem in found), found
