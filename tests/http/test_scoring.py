"""/v1/embeddings, /v1/score and /score over HTTP, with the real openai client where it has a word for them."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import openai
import pytest

from jpaged.client import AsyncClient
from jpaged.testing import ByteTokenizer, with_adapters
from tests.server.harness import FakePooler, Harness, eventually, running


def openai_of(harness: Harness) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=0)


async def test_embeddings_are_those_of_the_grpc_face() -> None:
    async with running(http_port=0) as harness, openai_of(harness) as client, AsyncClient(harness.target) as ours:
        wanted = await ours.embed(["one", "three"])
        # The package asks for base64 unless it is told otherwise, and decodes it.
        told = await client.embeddings.create(model="fake", input=["one", "three"])
        assert [one.index for one in told.data] == [0, 1]
        for one, vector in zip(told.data, wanted, strict=True):
            assert np.allclose(one.embedding, vector)
        assert told.usage.prompt_tokens == told.usage.total_tokens == wanted.usage.prompt_tokens
        plain = await client.embeddings.create(model="fake", input=[111, 110, 101], encoding_format="float", user="me")
        assert np.allclose(plain.data[0].embedding, wanted[0])
        width = len(wanted[0])
        whole = await client.embeddings.create(model="fake", input="one", dimensions=width)
        assert len(whole.data[0].embedding) == width
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model="fake", input="one", dimensions=width + 1)
        assert refused.value.param == "dimensions"
        units = await client.embeddings.create(model="fake", input="three", extra_body={"normalize": True})
        assert np.isclose(np.linalg.norm(units.data[0].embedding), 1.0)


async def test_base64_is_float32_in_little_endian_order() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        body = {"model": "fake", "input": [[1, 2], [3]]}
        plain = (await client.post("/v1/embeddings", json=body)).json()
        packed = (await client.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
        for one, other in zip(plain["data"], packed["data"], strict=True):
            assert np.allclose(np.frombuffer(base64.b64decode(other["embedding"]), "<f4"), one["embedding"])


async def test_pooling_returns_a_vector_for_each_input_or_token() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def pooled(**body: Any) -> Any:
            answer = await client.post("/pooling", json=body, headers={"x-request-id": "mine"})
            assert answer.status_code == 200, answer.text
            return answer.json()

        raw = await pooled(model="fake", input=["one", [51, 52]], task="embed", use_activation=False)
        assert (raw["id"], raw["object"], raw["model"]) == ("pooling-mine", "list", "fake")
        assert [(one["index"], one["object"]) for one in raw["data"]] == [(0, "pooling"), (1, "pooling")]
        plain = (await client.post("/v1/embeddings", json={"input": ["one", [51, 52]]})).json()
        assert [one["data"] for one in raw["data"]] == [one["embedding"] for one in plain["data"]]
        assert raw["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        units = await pooled(input="one")
        assert np.isclose(np.linalg.norm(units["data"][0]["data"]), 1.0)

        tokens = await pooled(input=["one", [51, 52]], task="token_embed", use_activation=False)
        values = [np.array(one["data"]) for one in tokens["data"]]
        assert [one.shape for one in values] == [(3, 3), (2, 3)]
        assert [one[-1].tolist() for one in values] == [one["data"] for one in raw["data"]]
        packed = await pooled(input="one", task="token_embed", use_activation=False, encoding_format="base64")
        assert np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4").tolist() == values[0].ravel().tolist()
        scaled = await pooled(input="one", task="token_embed", dimensions=3, truncate_prompt_tokens=2)
        assert np.allclose(np.linalg.norm(scaled["data"][0]["data"], axis=1), [1.0, 1.0])
        chat = await pooled(messages=[{"role": "user", "content": "one"}], task="token_embed")
        assert len(chat["data"][0]["data"]) == chat["usage"]["prompt_tokens"] > 3
        named = await client.post("/pooling", json={"input": "a", "request_id": "theirs"})
        assert named.json()["id"] == "pooling-theirs" and named.headers["x-request-id"] == "theirs"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_pairs_and_continuations_are_scored(path: str) -> None:
    async with (
        running(http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
        AsyncClient(harness.target) as ours,
    ):
        pairs = (await client.post(path, json={"model": "fake", "text_1": "a", "text_2": ["a", "bc"]})).json()
        assert [one["object"] for one in pairs["data"]] == ["score", "score"]
        assert np.isclose(pairs["data"][0]["score"], 1.0)
        wanted = await ours.score("say", [" yes", " no"])
        told = (await client.post(path, json={"prompt": "say", "continuations": [" yes", " no"]})).json()
        assert [one["logprob"] for one in told["data"]] == [pytest.approx(one.logprob) for one in wanted]
        assert [one["is_greedy"] for one in told["data"]] == [one.is_greedy for one in wanted]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/embeddings", {"input": ""}, 400, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "task": "classify"}, 400, "task"),
        ("/v1/embeddings", {"input": "a", "user": 3}, 400, "user"),
        ("/v1/embeddings", {"input": [[1, 300]]}, 400, "inputs[0]"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, None),
        ("/v1/embeddings", {"input": "a" * 500}, 400, "input"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, 400, "text_2"),
        ("/pooling", {"input": "a", "task": "classify"}, 400, "task"),
        ("/pooling", {"input": "a", "task": "score"}, 400, "task"),
        ("/pooling", {"input": "a", "dimensions": 2}, 400, "dimensions"),
        ("/pooling", {"input": "a", "model": "other"}, 404, None),
        ("/pooling", {"input": "a", "normalize": True}, 400, "normalize"),
        ("/pooling", {"input": "a" * 500, "task": "token_embed"}, 400, "input"),
        ("/pooling", {"data": {"image": "x"}}, 400, "data"),
        ("/classify", {"input": "a"}, 501, None),
        ("/classify", {"messages": [{"role": "user", "content": "a"}]}, 501, None),
        ("/classify", {"input": "a", "model": "other"}, 404, None),
        ("/classify", {"input": []}, 400, "input"),
        ("/v1/score", {"prompt": "a", "continuations": []}, 400, "continuations"),
    ],
)
async def test_what_cannot_be_answered_says_why(
    path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param


async def test_a_body_that_is_too_large_or_no_json_is_refused() -> None:
    async with (
        running(http_port=0, max_request_size=0.0625) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        large = await client.post("/v1/embeddings", json={"input": "a" * (1 << 17)})
        assert large.status_code == 413 and large.json()["error"]["code"] == "REQUEST_TOO_LONG"
        for content in (b"{", b"[]", b"\xff"):
            as_json = {"content-type": "application/json"}
            refused = await client.post("/tokenize", content=content, headers=as_json)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "body"


async def test_vectors_of_tokens_are_limited_before_they_are_computed() -> None:
    async with (
        running(http_port=0, max_response_size=0.0625) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        body = {"input": [[1] * 100] * 10, "task": "token_embed"}
        refused = await client.post("/pooling", json=body)
        assert refused.status_code == 400 and "max_response_size" in refused.json()["error"]["message"]
        assert harness.executor.num_steps == 0
        assert (await client.post("/pooling", json={**body, "encoding_format": "base64"})).status_code == 200


async def test_vectors_are_the_bytes_of_a_body_on_demand() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def answered(path: str, **body: Any) -> httpx2.Response:
            answer = await client.post(path, json={"input": ["one", "three"], **body})
            assert answer.status_code == 200, answer.text
            return answer

        vectors = [one["embedding"] for one in (await answered("/v1/embeddings")).json()["data"]]
        big = {"embed_dtype": "float16", "endianness": "big"}
        for how, dtype in (({}, "<f4"), (big, ">f2")):
            answer = await answered("/v1/embeddings", encoding_format="bytes", **how)
            metadata = json.loads(answer.headers["metadata"])
            assert answer.headers["content-type"] == "application/octet-stream"
            for item, vector in zip(metadata["data"], vectors, strict=True):
                assert item["embed_dtype"] == how.get("embed_dtype", "float32")
                found = np.frombuffer(answer.content[item["start"] : item["end"]], dtype).reshape(item["shape"])
                assert np.allclose(found, vector, rtol=1e-2)
            assert metadata["usage"]["prompt_tokens"] == 8 and metadata["model"] == "fake"
        for name, dtype in (("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)):
            eight = await answered("/v1/embeddings", encoding_format="bytes_only", embed_dtype=name, normalize=True)
            found = np.frombuffer(eight.content, dtype).astype(np.float32).reshape(2, -1)
            assert np.allclose(np.sum(found * vectors, -1), np.linalg.norm(vectors, axis=-1), rtol=0.1)
        plain = await answered("/v1/embeddings", encoding_format="bytes_only")
        assert "metadata" not in plain.headers
        assert np.allclose(np.frombuffer(plain.content, "<f4"), np.concatenate(vectors))
        pooled = await answered("/pooling", encoding_format="bytes", task="token_embed")
        shapes = [one["shape"] for one in json.loads(pooled.headers["metadata"])["data"]]
        assert shapes == [[3, len(vectors[0])], [5, len(vectors[0])]]
        many = await client.post("/v1/embeddings", json={"input": ["a"] * 500, "encoding_format": "bytes"})
        assert many.status_code == 400 and "use bytes_only" in many.json()["error"]["message"]


async def test_special_tokens_are_left_out_of_pooled_texts_on_demand() -> None:
    class Tokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + super().encode(text)

    async with (
        running(tokenizer=Tokenizer(), http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        for added in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            for path in ("/pooling", "/v1/embeddings"):
                answer = await client.post(path, json={"input": ["a", [7]], **added})
                assert answer.json()["usage"]["prompt_tokens"] == 2 + added.get("add_special_tokens", True)
        answer = await client.post("/classify", json={"input": "a", "add_special_tokens": "no"})
        assert answer.json()["error"]["param"] == "add_special_tokens"


async def test_a_model_may_be_an_adapters_name(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("5")
    executor = with_adapters(2)()
    async with (
        running(executor=executor, http_port=0, enable_lora=True) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
        AsyncClient(harness.target) as ours,
    ):
        await ours.load_adapter("other", str(tmp_path / "other"))
        body = {"prompt": "say", "continuations": [" yes"]}
        by_name = (await client.post("/score", json={**body, "model": "other"})).json()
        by_field = (await client.post("/score", json={**body, "model": "fake", "adapter": "other"})).json()
        plain = (await client.post("/score", json={**body, "model": "fake"})).json()
        assert by_name["data"] == by_field["data"] != plain["data"]


async def test_a_caller_that_leaves_ends_all_its_requests() -> None:
    async with running(http_port=0) as harness:
        harness.faults.gate.clear()
        async with httpx2.AsyncClient(base_url=harness.http_url) as client:
            call = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["a", "b", "c"]}))
            await eventually(lambda: harness.num_open_calls == 3)
            call.cancel()
            await asyncio.wait((call,))
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)


class PairTokenizer(ByteTokenizer):
    """Joins two texts with a zero, of which the second begins behind it."""

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], int | None]:
        token_ids = [*self.encode(first), 0, *self.encode(second)]
        return token_ids[:limit], None


async def test_a_classifier_returns_labels_and_probabilities() -> None:
    pooler = FakePooler(("no", "yes"), 2)
    async with (
        running(http_port=0, pooler=pooler) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
        AsyncClient(harness.target) as ours,
    ):
        texts: list[str | list[int]] = ["one", [1, 2, 1, 1], [51, 52]]
        logits = [vector[:2] for vector in await ours.embed(texts, pooling="mean")]
        found = (await client.post("/classify", json={"model": "fake", "input": texts})).json()
        assert [one["index"] for one in found["data"]] == [0, 1, 2]
        for one, values in zip(found["data"], logits, strict=True):
            assert one["probs"] == pytest.approx([2 * value for value in values])
            assert (one["label"], one["num_classes"]) == (pooler.labels[int(np.argmax(values))], 2)
        assert (found["model"], found["usage"]) == ("fake", {"prompt_tokens": 9, "total_tokens": 9})
        plain = (await client.post("/classify", json={"input": "one", "use_activation": False})).json()
        assert plain["data"][0]["probs"] == pytest.approx(list(logits[0]))
        pooled = (await client.post("/pooling", json={"input": "one", "task": "classify"})).json()
        assert pooled["data"][0]["data"] == pytest.approx([2 * value for value in logits[0]])
        for path, body, status, words in (
            ("/pooling", {"input": "a", "task": "token_classify"}, 400, "only 'classify'"),
            ("/v1/embeddings", {"input": "a"}, 501, "classifies texts"),
            ("/score", {"text_1": "a", "text_2": "b"}, 501, "has 2 labels"),
        ):
            refused = await client.post(path, json=body)
            assert refused.status_code == status and words in refused.text


async def test_a_cross_encoder_scores_pairs() -> None:
    async with (
        running(http_port=0, pooler=FakePooler(("score",), 1), tokenizer=PairTokenizer()) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
        AsyncClient(harness.target) as ours,
    ):
        wanted = [
            vector[0] for vector in await ours.embed([list(b"a\0b"), list(b"a\0cd"), list(b"a\0c")], pooling="mean")
        ]
        told = (await client.post("/score", json={"text_1": "a", "text_2": ["b", "cd"]})).json()
        assert [one["score"] for one in told["data"]] == pytest.approx([2 * value for value in wanted[:2]])
        assert told["usage"]["prompt_tokens"] == 3 + 4
        cut = (await client.post("/score", json={"text_1": "a", "text_2": "cd", "truncate_prompt_tokens": 3})).json()
        assert cut["data"][0]["score"] == pytest.approx(2 * wanted[2])
        ranks = (await client.post("/rerank", json={"query": "a", "documents": ["b", "cd"]})).json()
        order = sorted(range(2), key=lambda i: -wanted[i])
        assert [one["index"] for one in ranks["results"]] == order


async def test_an_embedding_model_has_prompts_a_norm_and_fewer_dimensions() -> None:
    pooler = FakePooler(
        pooling="last", normalizes=True, prompts={"query": "q ", "document": "d "}, default_prompt="document",
        can_shorten=True,
    )  # fmt: skip
    async with (
        running(http_port=0, pooler=pooler) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
        AsyncClient(harness.target) as ours,
    ):

        async def embedded(**body: Any) -> list[float]:
            answer = await client.post("/v1/embeddings", json={"input": "x", **body})
            assert answer.status_code == 200, answer.text
            return list(answer.json()["data"][0]["embedding"])

        given = [list(text) for text in (b"d x", b"q x")]
        as_document, as_query = map(np.array, await ours.embed(given, pooling="last"))
        assert await embedded() == pytest.approx(as_document / np.linalg.norm(as_document))
        assert await embedded(prompt_name="query", normalize=False) == pytest.approx(as_query)
        assert await embedded(pooling="last") == pytest.approx(as_document)
        short = await embedded(dimensions=2)
        assert short == pytest.approx(as_document[:2] / np.linalg.norm(as_document[:2]))
        for wrong, words in (
            ({"dimensions": 4}, "3 or fewer dimensions"),
            ({"prompt_name": "title"}, "query, document"),
            ({"pooling": "last", "prompt_name": "title"}, "title"),
        ):
            refused = await client.post("/v1/embeddings", json={"input": "x", **wrong})
            assert refused.status_code == 400 and words in refused.text
