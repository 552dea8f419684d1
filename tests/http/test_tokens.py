"""/tokenize and /detokenize, in vLLM's forms."""

from typing import Any

import httpx2
import pytest

from tests.server.harness import running

MESSAGES = [{"role": "user", "content": "hé"}]


async def test_texts_and_chats_become_ids_and_ids_become_texts() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        told = (await client.post("/tokenize", json={"model": "fake", "prompt": "héy"})).json()
        ids = list("héy".encode())
        assert told == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
        named = (await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})).json()
        assert named["token_strs"] == ["h", "i"]
        chat = (await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": True})).json()
        assert bytes(chat["tokens"]).decode() == "user: hé\nassistant: "
        assert (await client.post("/detokenize", json={"tokens": [*ids, 256]})).json() == {"prompt": "héy<eos>"}
        bare = await client.post("/detokenize", json={"tokens": [*ids, 256], "skip_special_tokens": True})
        assert bare.json() == {"prompt": "héy"}


async def test_a_model_has_every_served_name() -> None:
    aliases = ["further"]
    async with (
        running(http_port=0, served_model_aliases=aliases) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        for name in ("fake", "further"):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).json()["model"] == name
            assert (await client.post("/tokenize", json={"model": name, "prompt": "a"})).status_code == 200
            embedded = await client.post("/v1/embeddings", json={"model": name, "input": "a"})
            assert embedded.json()["model"] == name
            ranked = await client.post("/v1/rerank", json={"model": name, "query": "a", "documents": ["b"]})
            assert ranked.json()["model"] == name
            assert (await client.get(f"/v1/models/{name}")).json()["root"] == "fake"
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["fake", "further"]
        assert (await client.post("/tokenize", json={"model": "other", "prompt": "a"})).status_code == 404


async def test_large_ones_go_over_threads_and_are_the_same() -> None:
    text = "long text " * 2000
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        told = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert told["count"] == len(text) and "".join(told["token_strs"]) == text
        assert (await client.post("/detokenize", json={"tokens": told["tokens"]})).json() == {"prompt": text}


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": 5}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, None),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [999]}, 400, "tokens"),
    ],
)
async def test_what_is_no_text_or_chat_says_why(
    path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
