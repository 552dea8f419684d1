"""Envoy's configuration is made of its messages, names clusters that are there, asks servers, and cuts no stream."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jpaged import json_text
from tests.deploy.manifests import ROOT, load

TOOLS = Path(sys.prefix) / "envoy"
"""What `make test-long` installs of the extra `envoy`."""
FILE = ROOT / "deploy" / "envoy" / "envoy.yaml"


def read() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


def routes_of(written: dict[str, Any]) -> list[dict[str, Any]]:
    (listener,) = written["static_resources"]["listeners"]
    (host,) = listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    return list(host["routes"])


def problems(written: dict[str, Any]) -> list[str]:
    """What is wrong with a configuration."""
    clusters = {one["name"]: one for one in written["static_resources"]["clusters"]}
    (headless,) = [
        one for one in load(ROOT / "deploy" / "kubernetes" / "services.yaml") if one["spec"].get("clusterIP") == "None"
    ]
    where = {"address": headless["metadata"]["name"], "port_value": headless["spec"]["ports"][0]["port"]}
    found = []
    for one in routes_of(written):
        name = one["route"]["cluster"]
        if name not in clusters:
            found.append(f"{name}: there is no such cluster")
        if one["route"].get("timeout") != "0s":
            found.append(f"{name}: streams are cut off after {one['route'].get('timeout')}")
        by_hash = clusters.get(name, {}).get("lb_policy") in ("MAGLEV", "RING_HASH")
        if by_hash != ("hash_policy" in one["route"]):
            found.append(f"{name}: the policy and the hash do not go together")
    if "headers" in routes_of(written)[-1]["match"]:
        found.append("the last route does not take every call")
    for name, one in clusters.items():
        endpoint = one["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        if endpoint["address"]["socket_address"] != where:
            found.append(f"{name}: its servers are not those of the headless Service")
        if not any("grpc_health_check" in check for check in one.get("health_checks", ())):
            found.append(f"{name}: nobody asks servers how they are")
        (options,) = one["typed_extension_protocol_options"].values()
        if "http2_protocol_options" not in options["explicit_http_config"]:
            found.append(f"{name}: does not speak HTTP/2")
    return found


def test_the_file_is_in_order():
    assert problems(read()) == []


PLANTED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda it: routes_of(it)[0]["route"].update(cluster="gone"), "gone: there is no such cluster"),
    (lambda it: routes_of(it)[1]["route"].pop("timeout"), "streams are cut off after None"),
    (lambda it: routes_of(it)[0]["route"].pop("hash_policy"), "do not go together"),
    (lambda it: routes_of(it)[1]["match"].update(headers=[]), "does not take every call"),
    (lambda it: it["static_resources"]["clusters"][0].pop("health_checks"), "nobody asks servers how they are"),
    (lambda it: it["static_resources"]["clusters"][1].update(lb_policy="RING_HASH"), "do not go together"),
    (
        lambda it: it["static_resources"]["clusters"][1]["load_assignment"]["endpoints"][0]["lb_endpoints"][0][
            "endpoint"
        ].update(address={"socket_address": {"address": "other", "port_value": 1}}),
        "are not those of the headless Service",
    ),
]


@pytest.mark.parametrize(("plant", "message"), PLANTED)
def test_a_planted_mistake_is_found(plant, message):
    written = copy.deepcopy(read())
    plant(written)
    assert any(message in problem for problem in problems(written)), problems(written)


# --- Envoy's own messages ---------------------------------------------------------------------------------------------


def complaints(written: list[dict[str, Any]]) -> list[str]:
    """What Envoy's published messages object to in each of some configurations; "" where to nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.envoy_protos"],
        input=json_text.dumps(written),
        env={**os.environ, "PYTHONPATH": f"{TOOLS}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return list(json.loads(done.stdout))


def manager_of(written: dict[str, Any]) -> dict[str, Any]:
    (listener,) = written["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    found: dict[str, Any] = manager["typed_config"]
    return found


def cluster_of(written: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = written["static_resources"]["clusters"][0]
    return found


UNKNOWN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda it: it.update(static_resource={}), 'no field named "static_resource"'),
    (lambda it: manager_of(it).update(stream_idle_timout="0s"), 'no field named "stream_idle_timout"'),
    (lambda it: manager_of(it).update(codec_type="HTTP4"), "HTTP4"),
    (lambda it: manager_of(it).update(stream_idle_timeout="forever"), "forever"),
    (lambda it: routes_of(it)[0]["route"].update(timeouts="0s"), 'no field named "timeouts"'),
    (lambda it: routes_of(it)[0]["route"]["retry_policy"].update(num_retries="many"), "num_retries"),
    (lambda it: cluster_of(it).update(lb_policy="PREFIX"), "PREFIX"),
    (lambda it: cluster_of(it)["health_checks"][0].update(grpc_health_check={"port": 1}), 'no field named "port"'),
    (
        lambda it: manager_of(it)["http_filters"][0]["typed_config"].update(
            {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Rooter"}
        ),
        "envoy.extensions.filters.http.router.v3.Rooter",
    ),
    # rules of fields that are there
    (lambda it: cluster_of(it)["health_checks"][0].pop("interval"), "interval: is required"),
    (lambda it: cluster_of(it)["health_checks"][0].update(timeout="0s"), "timeout: 0.0 is not gt 0.0"),
    (lambda it: cluster_of(it)["health_checks"][0].pop("grpc_health_check"), "needs one of http_health_check"),
    (lambda it: cluster_of(it)["outlier_detection"].update(max_ejection_percent=150), "150 is not lte 100"),
    (
        lambda it: cluster_of(it)["common_lb_config"]["consistent_hashing_lb_config"].update(hash_balance_factor=50),
        "hash_balance_factor: 50 is not gte 100",
    ),
    (lambda it: cluster_of(it).update(name=""), "clusters[0].name: '' is not min_len 1"),
    (lambda it: manager_of(it).update(stat_prefix=""), "typed_config.stat_prefix: '' is not min_len 1"),
    (lambda it: manager_of(it).update(codec_type=9), "codec_type: 9 is no CodecType"),
    (lambda it: manager_of(it)["route_config"]["virtual_hosts"][0].update(domains=[]), "[] is not min_items 1"),
    (lambda it: routes_of(it)[0]["route"].pop("cluster"), "route: needs one of cluster"),
    (lambda it: routes_of(it)[0]["match"]["headers"][0].update(name="x\n"), "is not well_known_regex"),
]


@pytest.mark.long
def test_the_file_is_made_of_envoys_messages_and_what_is_not_is_found():
    planted = [copy.deepcopy(read()) for _ in UNKNOWN]
    for written, (plant, _) in zip(planted, UNKNOWN, strict=True):
        plant(written)
    as_it_is, *found = complaints([read(), *planted])
    assert as_it_is == ""
    missed = [(message, said) for said, (_, message) in zip(found, UNKNOWN, strict=True) if message not in said]
    assert missed == []
