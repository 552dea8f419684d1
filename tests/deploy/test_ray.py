"""What can be said of the Ray Serve application without Ray; `make ray` runs it."""

import ast
import importlib
from pathlib import Path
from typing import Any

import yaml
from grpc_health.v1 import health_pb2

from jpaged._proto.v1 import inference_pb2
from jpaged.config import EngineConfig

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
)
NOT_OFFERED = {"List", "GenerateMultiplexed"}
"""List of grpc.health.v1 is for servers of many services; clients that share calls use Generate if it is missing."""


def serve_yaml() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "serve.yaml").read_text()))


def app_class() -> ast.ClassDef:
    tree = ast.parse((FOLDER / "app.py").read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "JpagedReplica")


def test_every_rpc_of_the_services_has_a_method():
    methods = {node.name for node in app_class().body if isinstance(node, ast.AsyncFunctionDef)}
    rpcs = {method.name for service in SERVICES for method in service.methods}
    assert rpcs - NOT_OFFERED <= methods


def test_the_services_can_be_imported_where_ray_looks_for_them():
    found = []
    for path in serve_yaml()["grpc_options"]["grpc_servicer_functions"]:
        module, _, name = path.rpartition(".")
        found.append(callable(getattr(importlib.import_module(module), name)))
    assert found == [True] * len(SERVICES)


def test_the_engines_options_are_options():
    (application,) = serve_yaml()["applications"]
    config = EngineConfig.load(application["args"]["engine"])
    assert application["import_path"] == "app:build"
    assert config.scheduler.max_num_seqs is not None
    assert application["args"]["target_ongoing_requests"] <= config.scheduler.max_num_seqs
