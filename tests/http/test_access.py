"""Keys at the HTTP port: every path but those for health wants one."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from jpaged.config import AccessOptions
from jpaged.http.access import is_open
from tests.access.test_keys import FILE, TOKEN
from tests.server.harness import running


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return str(path)


async def test_a_path_wants_a_key_unless_it_is_for_health(keys: str) -> None:
    async with running(http_port=0, api_keys=keys) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for path in ("/health", "/ping"):
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
    assert all(is_open("GET", path, one) for path in ("/health", "/ping") for one in (closed, opened))
    assert is_open("POST", "/ping", closed)
    for path in ("/", "/page/feed", "/metrics", "/version"):
        assert is_open("GET", path, opened)
        assert not is_open("POST", path, opened)
        assert not is_open("GET", path, closed)
    assert not any(is_open("GET", path, opened) for path in ("/v1/models", "//health", "/page", "/metricsx", "/docs"))
