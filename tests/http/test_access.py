"""Keys at the HTTP port: every path but those for health wants one."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument
from jpaged.http.app import duration, is_open, require_free_path
from tests.access.test_keys import FILE, TOKEN
from tests.server.harness import running


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return str(path)


async def test_paths_of_a_proxy_are_those_of_the_server(keys: str) -> None:
    options: dict[str, Any] = {"api_keys": keys, "root_path": "/some/llm/", "public_page": True}
    async with running(http_port=0, **options) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for path in ("/health", "/some/llm/health", "/some/llm/"):
            assert (await client.get(path)).status_code == 200, path
        page = await client.get("/some/llm?a=1")  # links of the page are relative
        assert (page.status_code, page.headers["location"]) == (307, "/some/llm/?a=1")
        assert page.headers["x-request-id"]
        assert (await client.post("/some/llm")).status_code == 401
        for path in ("/v1/models", "/some/llm/v1/models", "/some/llmx/health", "/some/llm/some/llm/health"):
            assert (await client.get(path)).status_code == 401, path
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        assert (await client.get("/some/llm/v1/models")).json() == (await client.get("/v1/models")).json()
        assert (await client.get("/some/llmx/health")).status_code == 404


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/chat", "/health", "/page", "/page/x", "/v1/models/me", "/v1/files/x/y", "/metrics"]
)
def test_a_path_of_a_proxy_that_hides_one_of_the_api_is_rejected(path: str) -> None:
    with pytest.raises(InvalidArgument, match="is the start of the API's own path /") as error:
        require_free_path(path)
    assert error.value.field == "root_path"


@pytest.mark.parametrize("path", [None, "/llm", "/v1x", "/llm/v1", "/healthy", "/v1/chats", "/api"])
def test_other_paths_of_a_proxy_are_accepted(path: str | None) -> None:
    require_free_path(path)


async def test_ollamas_api_keeps_its_path_behind_a_proxy_at_api() -> None:
    async with (
        running(http_port=0, root_path="/api") as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        for path in ("/api/v1/models", "/v1/models", "/api/health", "/api/tags", "/api/api/tags", "/api/load"):
            assert (await client.get(path)).status_code == 200, path
        assert "models" in (await client.get("/api/tags")).json()
        assert (await client.get("/api/nothing")).status_code == 404


async def test_a_server_does_not_start_with_a_path_of_the_api() -> None:
    with pytest.raises(InvalidArgument, match="root_path: /v1 is the start of"):
        async with running(http_port=0, root_path="/v1"):
            raise AssertionError("the server has started")


async def test_a_path_wants_a_key_unless_it_is_for_health(keys: str) -> None:
    async with running(http_port=0, api_keys=keys) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for path in ("/health", "/ping", "/livez", "/readyz"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/nothing", "/health/"):
            refused = await client.get(path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-request-id"]
            assert refused.json()["error"]["type"] == "authentication_error"
            assert refused.json()["error"]["code"] == "UNAUTHENTICATED"
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/nothing")).status_code == 404
        other = await client.get("/v1/models", headers={"x-jpaged-tenant": "bolt"})
        assert (other.status_code, other.json()["error"]["code"]) == (403, "PERMISSION_DENIED")
        assert (await client.get("/v1/models", headers={"authorization": "Bearer wrong"})).status_code == 401


async def test_metrics_are_for_all_where_the_operator_says_so(keys: str) -> None:
    options: dict[str, Any] = {"http_port": 0, "api_keys": keys, "public_metrics": True}
    async with running(**options) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


def test_what_needs_no_key_is_only_looked_at() -> None:
    closed, opened = AccessOptions(public_page=False), AccessOptions(public_metrics=True)
    assert all(
        is_open("GET", path, one) for path in ("/health", "/ping", "/livez", "/readyz") for one in (closed, opened)
    )
    assert is_open("POST", "/ping", closed)
    for path in ("/", "/page/feed", "/metrics", "/version"):
        assert is_open("GET", path, opened)
        assert not is_open("POST", path, opened)
        assert not is_open("GET", path, closed)
    assert not any(is_open("GET", path, opened) for path in ("/v1/models", "//health", "/page", "/metricsx", "/docs"))


async def test_quotas_are_told_in_openais_headers_and_one_that_is_used_up_says_when_to_come_back() -> None:
    options: dict[str, Any] = {"http_port": 0, "tenant_requests_per_minute": 1, "tenant_tokens_per_minute": 60}
    async with running(**options) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        quotas = harness.server._gate.quotas
        assert quotas is not None
        quotas._clock = lambda: 1000.0
        body = {"model": "fake", "input": "hello"}
        answer = await client.post("/v1/embeddings", json=body, headers={"x-jpaged-tenant": "a"})
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert answer.headers["x-ratelimit-limit-tokens"] == "60"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 60
        refused = await client.post("/v1/embeddings", json=body, headers={"x-jpaged-tenant": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "QUOTA_EXCEEDED")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        other = await client.post("/v1/embeddings", json=body, headers={"x-jpaged-tenant": "b"})
        assert other.status_code == 200


def test_times_are_written_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0.0, 0.0201, 1.5, 59.9999, 360.0)] == ["0ms", "21ms", "1.5s", "1m0s", "6m0s"]
