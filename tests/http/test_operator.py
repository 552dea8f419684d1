"""What an operator asks over HTTP, and what an answer always has."""

import httpx2

from jpaged.version import __version__
from tests.server.harness import running


async def test_health_version_metrics_and_models_are_told() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for path in ("/health", "/ping"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/version")).json() == {"version": __version__}
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert 'vllm:num_requests_running{model_name="fake"}' in metrics.text
        models = (await client.get("/v1/models")).json()
        assert [one["id"] for one in models["data"]] == ["fake"]
        assert (await client.get("/v1/models/fake")).json() == models["data"][0]


async def test_a_path_that_is_not_here_is_an_error_of_openais_form() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        missing = await client.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "NOT_FOUND"
        assert (await client.post("/version")).status_code == 405
        assert (await client.get("/v1/models/another")).json()["error"]["type"] == "not_found_error"


async def test_an_answer_has_the_id_of_its_request() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        named = await client.get("/health", headers={"X-Request-Id": "mine"})
        assert named.headers["x-request-id"] == "mine"
        made_up = {(await client.get("/health")).headers["x-request-id"] for _ in range(2)}
        assert len(made_up) == 2 and "" not in made_up


async def test_load_options_and_tokenizer_are_told() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        info = (await client.get("/server_info")).json()
        assert info["version"] == __version__ and info["state"] and info["config"]["dtype"] == "auto"
        tokenizer = (await client.get("/tokenizer_info")).json()
        assert tokenizer["tokenizer_class"] == "ByteTokenizer" and tokenizer["model_max_length"] == 128
