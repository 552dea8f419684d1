"""All HTTP routes and all gRPC methods of real servers, called with all roles: each is in the table, which holds."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf import descriptor_pool
from grpc import aio
from grpc.aio import _server
from starlette.applications import Starlette

from jpaged._proto.open_inference import inference_pb2 as open_inference_pb2
from jpaged.access.authenticator import GRPC, HTTP, Public, permission_of_route
from jpaged.access.keys import Role
from jpaged.server.compat.open_inference import REFUSED_METHODS
from tests.server.harness import running

TOKENS = {role: f"a-token-for-{role.name.lower()}-1" for role in Role}
KEYS = "".join(
    f'[[keys]]\nid = "{role.name}"\ntenant = "acme"\nrole = "{role.name.lower()}"\n'
    f'token = "sha256:{hashlib.sha256(token.encode()).hexdigest()}"\n'
    for role, token in TOKENS.items()
)
DOCUMENTED = {
    Role.OBSERVE: {
        "GET /load",
        "GET /metrics",
        "GET /server_info",
        "GET /tokenizer_info",
        "GET /is_sleeping",
        "GET /is_paused",
        "GET /weight_version",
        "GET /v1/models",
        "GET /v1/models/{name:path}",
        "GET /version",
        "POST /detokenize",
        "POST /tokenize",
        "GET /api/tags",
        "GET /api/ps",
        "POST /api/show",
        "POST /api/pull",
        "GET /api/version",
        "POST /v1/messages/count_tokens",
        "POST /v1/responses/input_tokens",
        "GET /",
        "GET /page/{path}",
    },
    Role.CONTROL: {
        "POST /page/limit",
        "POST /reset_prefix_cache",
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
        "POST /sleep",
        "POST /wake_up",
        "POST /pause",
        "POST /resume",
        "POST /update_weights",
        "POST /update_weights_from_disk",
    },
}
"""What docs/access.md says of paths; all others but those for health require the role inference."""


def keys_in(folder: Path) -> str:
    path = folder / "keys.toml"
    path.write_text(KEYS)
    return str(path)


def routes_of(app: Any) -> list[tuple[str, str]]:
    """The methods and paths of the real application, inside all that surrounds it."""
    while not isinstance(app, Starlette):
        app = app._app
    routes: Any = app.routes
    return [(method, route.path) for route in routes for method in sorted(route.methods)]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[str]]:
    """The full names of the methods that are registered at real servers, by the id of the server."""
    found: dict[int, set[str]] = {}
    add = _server.Server.add_registered_method_handlers

    def noting(server: Any, service: str, handlers: Any) -> None:
        found.setdefault(id(server), set()).update(f"/{service}/{name}" for name in handlers)
        add(server, service, handlers)

    monkeypatch.setattr(_server.Server, "add_registered_method_handlers", noting)
    return found


def test_the_table_is_what_the_documentation_says() -> None:
    for (method, route), permission in HTTP.items():
        name = f"{method} {route}"
        role = next((role for role, names in DOCUMENTED.items() if name in names), Role.INFERENCE)
        if permission.public is not Public.ALWAYS:
            assert permission.role is role, name
    assert {route for (_, route), one in HTTP.items() if one.public is Public.ALWAYS} == {
        "/health",
        "/livez",
        "/readyz",
        "/ping",
    }


@pytest.mark.parametrize("has_batches", [True, False])
async def test_every_route_answers_the_roles_of_the_table_alone(tmp_path: Path, has_batches: bool) -> None:
    options: dict[str, Any] = {"http_port": 0, "api_keys": keys_in(tmp_path), "public_page": False}
    if has_batches:
        options["batch_dir"] = str(tmp_path / "batches")
    async with running(**options) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        app = harness.server._http._server.config.app  # type: ignore[union-attr]
        routes = routes_of(app)
        assert len(routes) > 30
        if not has_batches:  # the others are the same
            routes = [(method, route) for method, route in routes if route.startswith(("/v1/files", "/v1/batches"))]
        for method, route in routes:
            permission = permission_of_route(method, route)
            listed = "/page/{path}" if method in ("GET", "HEAD") and route.startswith("/page/") else route
            assert ("GET" if method == "HEAD" else method, listed) in HTTP, f"{method} {route} is not in the table"
            names = {"rest": "x", "file_id": "file-x", "batch_id": "batch_x", "response_id": "resp_x"}
            path = route.replace(":path", "").format(name="fake", **names)
            if permission.public is Public.ALWAYS:
                assert (await client.request(method, path)).status_code == 200
                continue
            assert (await client.request(method, path)).status_code == 401, f"{method} {path}"
            for role, token in TOKENS.items():
                header = {"authorization": f"Bearer {token}"}
                if path == "/page/events" and role >= permission.role:
                    continue  # a stream without an end
                answer = await client.request(method, path, headers=header)
                is_refused = answer.status_code == 403
                assert is_refused == (role < permission.role), (method, path, role, answer.text)


@pytest.mark.parametrize("options", [{}, {"control_port": 0}])
async def test_every_method_answers_the_roles_of_the_table_alone(
    tmp_path: Path, options: dict[str, Any], registered: dict[int, set[str]]
) -> None:
    async with running(api_keys=keys_in(tmp_path), **options) as harness:
        has_control_port = "control_port" in options
        servers = [(harness.server._grpc, harness.target, not has_control_port)]
        if has_control_port:
            control = f"127.0.0.1:{harness.server.control_port}"
            servers.append((harness.server._control, control, True))  # type: ignore[arg-type]
        for server, target, takes_control in servers:
            methods = sorted(registered[id(server)])
            assert len(methods) > 10
            async with aio.insecure_channel(target) as channel:
                for method in methods:
                    assert method in GRPC, f"{method} is not in the table"
                    permission = GRPC[method]
                    if permission.public is Public.ALWAYS:
                        continue  # they answer without a key: the tests of health call them
                    assert await code_of(channel, method, None) is grpc.StatusCode.UNAUTHENTICATED, method
                    for role in Role:
                        code = await code_of(channel, method, role)
                        may = role >= permission.role and (takes_control or not permission.on_control_port)
                        assert (code is grpc.StatusCode.PERMISSION_DENIED) == (not may), (method, role, code)
                for token, code in (
                    (None, grpc.StatusCode.UNAUTHENTICATED),
                    (Role.OBSERVE, grpc.StatusCode.UNIMPLEMENTED),
                ):
                    for method in ("/jpaged.v1.ControlService/Nothing", "/no.Service/Method"):
                        assert await code_of(channel, method, token) is code


def test_every_method_of_every_service_that_is_served_is_in_the_table() -> None:
    pools = (descriptor_pool.Default(), open_inference_pb2.DESCRIPTOR.pool)
    found = 0
    for service in {method.split("/")[1] for method in GRPC}:
        for pool in pools:
            try:
                methods = pool.FindServiceByName(service).methods_by_name
            except KeyError:
                continue
            for name in methods:
                found += 1
                assert f"/{service}/{name}" in GRPC
    assert found > 40
    assert all(f"/inference.GRPCInferenceService/{name}" in GRPC for name in REFUSED_METHODS)


async def code_of(channel: aio.Channel, method: str, role: Role | None) -> grpc.StatusCode:
    """The status of a call with bytes that are no message, which only calls that are let in come to."""
    metadata = () if role is None else (("authorization", f"Bearer {TOKENS[role]}"),)
    ask: Any = channel.unary_stream(method)
    call = ask(b"\xff", metadata=metadata, timeout=5)
    with contextlib.suppress(aio.AioRpcError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code
