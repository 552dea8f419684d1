"""Envoy's configuration names clusters that are there and cuts no stream off; Envoy takes it, and does what it says."""

import asyncio
import copy
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc import aio

from jpaged._proto.v1 import inference_pb2_grpc
from tests.deploy.manifests import ROOT, load
from tests.server.harness import collect, eventually, request, running

ENVOY = Path(sys.prefix) / "envoy" / "envoy" / "_bin" / "envoy"
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
        if by_hash and one["route"]["retry_policy"]["host_selection_retry_max_attempts"] < 20:
            found.append(f"{name}: a hash may name the server that is gone at every attempt")
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
    (
        lambda it: routes_of(it)[0]["route"]["retry_policy"].update(host_selection_retry_max_attempts=5),
        "at every attempt",
    ),
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


# --- Envoy itself -----------------------------------------------------------------------------------------------------


def refusal(written: dict[str, Any], folder: Path) -> str:
    """What Envoy says to a configuration; "" where it takes it."""
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(written))
    command = [str(ENVOY), "--mode", "validate", "--config-path", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0 or "error" in done.stderr.lower(), done.stderr[-4000:]
    return "" if done.returncode == 0 else " ".join(done.stderr.split())  # protobuf varies how it sets words apart


def manager_of(written: dict[str, Any]) -> dict[str, Any]:
    (listener,) = written["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    found: dict[str, Any] = manager["typed_config"]
    return found


def cluster_of(written: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = written["static_resources"]["clusters"][0]
    return found


REFUSED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda it: it.update(static_resource={}), "no such field: 'static_resource'"),
    (lambda it: manager_of(it).update(stream_idle_timout="0s"), "no such field: 'stream_idle_timout'"),
    (lambda it: manager_of(it).update(codec_type="HTTP4"), "HTTP4"),
    (lambda it: manager_of(it).update(stream_idle_timeout="forever"), "forever"),
    (lambda it: routes_of(it)[0]["route"].update(timeouts="0s"), "no such field: 'timeouts'"),
    (lambda it: routes_of(it)[0]["route"]["retry_policy"].update(num_retries="many"), "num_retries"),
    (lambda it: cluster_of(it).update(lb_policy="PREFIX"), "PREFIX"),
    (lambda it: cluster_of(it)["health_checks"][0].update(grpc_health_check={"port": 1}), "no such field: 'port'"),
    (
        lambda it: manager_of(it)["http_filters"][0]["typed_config"].update(
            {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Rooter"}
        ),
        "envoy.extensions.filters.http.router.v3.Rooter",
    ),
    # rules of fields that are there
    (lambda it: cluster_of(it)["health_checks"][0].pop("interval"), "Interval: value is required"),
    (lambda it: cluster_of(it)["health_checks"][0].update(timeout="0s"), "Timeout: value must be greater than 0s"),
    (lambda it: cluster_of(it)["health_checks"][0].pop("grpc_health_check"), 'health_checker", reason: is required'),
    (
        lambda it: cluster_of(it)["outlier_detection"].update(max_ejection_percent=150),
        "MaxEjectionPercent: value must be less than or equal to 100",
    ),
    (
        lambda it: cluster_of(it)["common_lb_config"]["consistent_hashing_lb_config"].update(hash_balance_factor=50),
        "HashBalanceFactor: value must be greater than or equal to 100",
    ),
    (lambda it: cluster_of(it).update(name=""), "ClusterValidationError.Name: value length"),
    (lambda it: manager_of(it).update(stat_prefix=""), "StatPrefix: value length must be at least 1"),
    (lambda it: manager_of(it).update(codec_type=9), "CodecType: value must be one of the defined"),
    (
        lambda it: manager_of(it)["route_config"]["virtual_hosts"][0].update(domains=[]),
        "Domains: value must contain at least 1 item",
    ),
    (lambda it: routes_of(it)[0]["route"].pop("cluster"), 'cluster_specifier", reason: is required'),
    (
        lambda it: routes_of(it)[0]["match"]["headers"][0].update(name="x\n"),
        "HeaderMatcherValidationError.Name: value does not match",
    ),
]


@pytest.mark.long
def test_envoy_takes_the_file(tmp_path):
    assert refusal(read(), tmp_path) == ""


@pytest.mark.long
@pytest.mark.parametrize(("plant", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_envoy_refuses_a_planted_mistake(plant, message, tmp_path):
    written = copy.deepcopy(read())
    plant(written)
    assert message in refusal(written, tmp_path)


@asynccontextmanager
async def started(folder: Path, ports: Sequence[int], *, asks_each: str) -> AsyncIterator[Any]:
    """A channel to Envoy before servers of this machine, by the file but for ports and how often it asks for health."""
    written, file, admin = copy.deepcopy(read()), folder / "envoy.yaml", folder / "admin"
    local = {"address": "127.0.0.1", "port_value": 0}
    written["admin"]["address"]["socket_address"] = written["static_resources"]["listeners"][0]["address"][
        "socket_address"
    ] = local
    for cluster in written["static_resources"]["clusters"]:
        cluster["load_assignment"] = {
            "cluster_name": cluster["name"],
            "endpoints": [{"lb_endpoints": [_endpoint(port) for port in ports]}],
        }
        cluster["health_checks"][0]["interval"] = asks_each
    file.write_text(yaml.safe_dump(written))
    words = ["--config-path", str(file), "--admin-address-path", str(admin), "--use-dynamic-base-id"]
    process = await asyncio.create_subprocess_exec(ENVOY, *words, "--concurrency", "1", "--log-level", "error")
    try:
        await eventually(lambda: admin.exists() and admin.read_text() != "")
        told = await asyncio.to_thread(_get, f"http://{admin.read_text()}/listeners?format=json")
        (listener,) = json.loads(told)["listener_statuses"]
        port = listener["local_address"]["socket_address"]["port_value"]
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        process.terminate()
        await process.wait()


def _endpoint(port: int) -> dict[str, Any]:
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


async def call(channel: Any, session: str | None) -> tuple[int, ...]:
    """The tokens of one stream."""
    metadata = () if session is None else (("x-jpaged-session", session),)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    messages = await collect(stub.Generate(request(), metadata=metadata, wait_for_ready=True))
    return tuple(token_id for message in messages for token_id in message.token_ids)


@pytest.mark.long
async def test_a_session_stays_at_one_server_and_other_calls_reach_both(tmp_path):
    async with running() as one, running() as two, started(tmp_path, [one.port, two.port], asks_each="2s") as channel:
        alone = await call(one.channel, None)

        def counts() -> tuple[int, int]:
            first, second = one.serving.engine.load(), two.serving.engine.load()
            return first.num_first_tokens, second.num_first_tokens

        begun, places = counts(), []
        for session in range(12):
            before = counts()
            assert {await call(channel, f"session {session}") for _ in range(3)} == {alone}
            after = counts()
            places.append((after[0] - before[0], after[1] - before[1]))
        assert set(places) == {(3, 0), (0, 3)}
        between = counts()
        assert sum(between) - sum(begun) == 36
        for _ in range(24):
            assert await call(channel, None) == alone
        assert all(now > then for now, then in zip(counts(), between, strict=True))


@pytest.mark.long
async def test_a_server_that_drains_and_goes_has_no_call_lost(tmp_path):
    async with running() as one, running() as two, started(tmp_path, [one.port, two.port], asks_each="0.1s") as channel:
        alone = await call(two.channel, None)
        for session in range(12):
            assert await call(channel, f"session {session}") == alone
        assert one.serving.engine.load().num_first_tokens > 0
        one.server.request_stop()
        for session in range(12):  # while it drains, and when it is gone
            assert await call(channel, f"session {session}") == alone
            assert await call(channel, None) == alone
        await one.run
        before = two.serving.engine.load().num_first_tokens
        for session in range(12):
            assert await call(channel, f"session {session}") == alone
        assert two.serving.engine.load().num_first_tokens == before + 12
