"""Fields of vLLM's request classes that OpenAI's API lacks, and its paths."""

from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest

import tests.server.harness as harness_module
from jpaged.checkpoints.pooler import CheckpointPooler, Dense
from jpaged.errors import InvalidArgument
from jpaged.openai.embeddings import How
from jpaged.openai.request import chat_job, completion_job
from jpaged.testing import ByteTokenizer, expected_tokens
from jpaged.types import SamplingParams
from tests.http.generate.asking import asking
from tests.server.harness import running

MESSAGES = [{"role": "user", "content": "hey"}]
GREEDY: Any = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


async def test_fields_of_tokens_and_ids() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def completed(prompt: str, **fields: Any) -> Any:
            response = await client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
            assert response.status_code == 200, response.text
            return response

        ids = expected_tokens(list(b"hello"), 4)
        named = (await completed("hello", logprobs=1, return_tokens_as_token_ids=True)).json()["choices"][0]["logprobs"]
        assert named["tokens"] == [f"token_id:{one}" for one in ids]
        assert [*named["top_logprobs"][0]] == [f"token_id:{ids[0]}"]
        assert named["bytes"] == [[one] for one in ids]
        zero = (await completed("hello", logprobs=0)).json()["choices"][0]["logprobs"]
        assert [list(top.values()) for top in zero["top_logprobs"]] == [[one] for one in zero["token_logprobs"]]

        for side, kept in (("left", b"llo"), ("right", b"hel")):
            how = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
            (cut,) = (await completed("hello", **how)).json()["choices"]
            assert cut["prompt_token_ids"] == list(kept)
            assert cut["token_ids"] == expected_tokens(list(kept), 4)

        mine = await completed("hello", request_id="mine")
        assert mine.headers["x-request-id"] == "mine" and mine.json()["id"] == "cmpl-mine"
        header = await client.post(
            "/v1/completions", json={"prompt": "a", "request_id": "mine", **GREEDY}, headers={"x-request-id": "other"}
        )
        assert header.json()["id"] == "cmpl-other"
        bad = await client.post("/v1/completions", json={"prompt": "a", "request_id": "a\nb", **GREEDY})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_echo_of_a_chat_begins_with_the_message_that_it_continues(is_streamed: bool) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "An apple"}]
    how: Any = {"add_generation_prompt": False, "continue_final_message": True, "ignore_eos": True}
    async with asking() as (_, client):

        async def told(role: str, *, echo: bool) -> tuple[str, str]:
            last = [{**one, "role": role} if one is messages[-1] else one for one in messages]
            body: Any = {"model": "fake", "messages": last, "temperature": 0.0, "max_tokens": 4}
            body["extra_body"] = {**how, "echo": echo}
            if not is_streamed:
                message = (await client.chat.completions.create(**body)).choices[0].message
                return message.role, message.content or ""
            roles, text = [], ""
            async for chunk in await client.chat.completions.create(stream=True, **body):
                roles += [chunk.choices[0].delta.role] if chunk.choices[0].delta.role else []
                text += chunk.choices[0].delta.content or ""
            (only,) = roles
            return only, text

        for role in ("assistant", "critic"):
            plain, echoed = await told(role, echo=False), await told(role, echo=True)
            assert plain[0] == echoed[0] == role
            assert echoed[1] == f"An apple{plain[1]}"


def test_options_that_become_others() -> None:
    def sampled(**fields: Any) -> SamplingParams:
        return completion_job({"prompt": "x", "max_tokens": 5, **fields}).sampling

    beams = sampled(use_beam_search=True, n=2, temperature=0.7)
    assert (beams.beam_width, beams.n) == (2, 2)
    assert sampled(use_beam_search=False) == sampled()
    assert sampled(guided_json={"type": "object"}) == sampled(structured_outputs={"json": {"type": "object"}})
    assert sampled(guided_choice=["a", "b"]) == sampled(structured_outputs={"choice": ["a", "b"]})

    def options(**fields: Any) -> Any:
        return chat_job({"messages": MESSAGES, **fields}).prompts[0].chat_options

    assert sampled(thinking_token_budget=7).thinking_token_budget == 7
    assert sampled(thinking_token_budget=-1) == sampled()
    chat = chat_job({"messages": MESSAGES, "max_tokens": 5, "thinking_token_budget": 7})
    assert chat.sampling.thinking_token_budget is None
    assert options(thinking_token_budget=7).reasoning.thinking_token_budget == 7
    assert options(thinking_token_budget=-1) == options()
    assert options(add_special_tokens=True).add_special_tokens and not options().add_special_tokens
    assert options(chat_template_kwargs={"enable_thinking": False}).template_kwargs == {"enable_thinking": False}
    assert not completion_job({"prompt": "x", "add_special_tokens": False}).prompts[0].add_special_tokens


async def test_a_variable_that_the_template_does_not_use_passes() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        body = {"messages": MESSAGES, **GREEDY}
        plain = await client.post("/v1/chat/completions", json=body)
        set_off = await client.post(
            "/v1/chat/completions", json={**body, "chat_template_kwargs": {"enable_thinking": False}}
        )
        assert set_off.status_code == 200 and set_off.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", **GREEDY}),
        ("/v1/completions", {"prompt": "a", "stream": True, **GREEDY}),
        ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/score", {"prompt": "a", "continuations": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_invocations_answer_every_kind_of_body(path: str, body: dict[str, Any]) -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        expected, given = await client.post(path, json=body), await client.post("/invocations", json=body)
        assert (given.status_code, given.headers["content-type"]) == (200, expected.headers["content-type"])
        if body.get("stream"):
            assert given.text.endswith("data: [DONE]\n\n") and expected.text.endswith("data: [DONE]\n\n")
            return
        varying = {"id", "created", "usage"}
        assert {k: v for k, v in given.json().items() if k not in varying} == {
            k: v for k, v in expected.json().items() if k not in varying
        }


async def test_invocations_of_a_classifier_classify(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Dense(np.eye(3, 2, dtype=np.float32))
    pooler = CheckpointPooler(layers=(layer,), labels=("no", "yes"), function="softmax")
    make = harness_module.make_serving
    monkeypatch.setattr(harness_module, "make_serving", lambda *given: replace(make(*given), pooler=pooler))
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer,
        "encode",
        lambda tokenizer, text, *, add_special_tokens=True: [1] * add_special_tokens + encode(tokenizer, text),
    )
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        for body in ({"input": ["hello", "a"]}, {"messages": MESSAGES}):
            expected, given = await client.post("/classify", json=body), await client.post("/invocations", json=body)
            assert (expected.status_code, given.status_code) == (200, 200)
            assert expected.json()["data"] == given.json()["data"]
        named = await client.post("/classify", json={"input": "a", "request_id": "r-1"})
        assert (named.json()["id"], named.headers["x-request-id"]) == ("classify-r-1", "r-1")
        plain, bare = [
            (await client.post("/classify", json={"input": "a", "add_special_tokens": adds})).json()["usage"]
            for adds in (True, False)
        ]
        assert plain["prompt_tokens"] == bare["prompt_tokens"] + 1
        long = await client.post("/classify", json={"input": "hello", "truncate_prompt_tokens": 129})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_scores_of_a_cross_encoder_may_be_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    pooler = CheckpointPooler(layers=(Dense(np.full((3, 1), 0.001, np.float32)),), labels=("a",), function="sigmoid")
    make = harness_module.make_serving
    monkeypatch.setattr(harness_module, "make_serving", lambda *given: replace(make(*given), pooler=pooler))
    monkeypatch.setattr(ByteTokenizer, "encode_pair", encode_pair, raising=False)
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        bodies: dict[str, dict[str, Any]] = {
            "/score": {"queries": "a", "documents": "b"},
            "/rerank": {"query": "a", "documents": ["b"]},
        }
        for path, body in bodies.items():
            scores = []
            for fields in ({}, {"use_activation": True}, {"use_activation": False}, {"truncate_prompt_tokens": 1}):
                answer = (await client.post(path, json=body | fields)).json()
                scores.append(next(iter(answer.get("data") or answer["results"])))
            activated, named, logit, cut = (one.get("score", one.get("relevance_score")) for one in scores)
            assert activated == named == pytest.approx(1 / (1 + np.exp(-logit)))
            assert cut != activated
            long = await client.post(path, json={**body, "truncate_prompt_tokens": 129})
            assert (long.status_code, long.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def encode_pair(
    tokenizer: ByteTokenizer, first: str, second: str, limit: int | None = None
) -> tuple[list[int], int | None]:
    """Return the bytes of both texts, and where the second one begins."""
    return [*first.encode(), *second.encode()][:limit], len(first.encode())


async def test_an_invocation_of_nothing_is_refused() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        assert (await client.post("/invocations", json={})).status_code == 400


async def test_documents_are_ranked_and_texts_have_vllms_names() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def posted(path: str, **body: Any) -> Any:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        documents = ["b", "query", "c"]
        ranked = await posted("/rerank", query="query", documents=["b", {"text": "query"}, "c"])
        assert ranked["results"][0]["index"] == 1
        scores = [one["relevance_score"] for one in ranked["results"]]
        assert scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(1)
        assert all(one["document"]["text"] == documents[one["index"]] for one in ranked["results"])
        assert len((await posted("/v2/rerank", query="query", documents=documents, top_n=1))["results"]) == 1
        pairs = [await posted("/score", queries="query", documents=documents)]
        pairs += [await posted("/score", data_1="query", data_2=documents)]
        pairs += [await posted("/score", text_1="query", text_2=documents)]
        assert pairs[0]["data"] == pairs[1]["data"] == pairs[2]["data"]
        assert {one["index"]: one["score"] for one in pairs[0]["data"]} == pytest.approx(
            {one["index"]: one["relevance_score"] for one in ranked["results"]}
        )
        both = await client.post("/score", json={"queries": "a", "text_1": "a", "documents": "b"})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "queries")


async def test_texts_of_pairs_are_cut_to_their_limits() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def ranked(query: str, document: str, **body: Any) -> Any:
            response = await client.post("/rerank", json={"query": query, "documents": [document], **body})
            assert response.status_code == 200, response.text
            return response.json()["results"][0]["relevance_score"], response.json()["usage"]["prompt_tokens"]

        assert await ranked("hello", "world", max_tokens_per_doc=3) == await ranked("hello", "wor")
        assert await ranked("hello", "world", max_tokens_per_query=2) == await ranked("he", "world")
        assert await ranked("hello", "world", max_tokens_per_query=0, max_tokens_per_doc=9) == (
            await ranked("hello", "world")
        )
        for body in ({"max_tokens_per_doc": -5}, {"max_tokens_per_query": "a"}):
            refused = await client.post("/score", json={"queries": "a", "documents": "b", **body})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, *body)


async def test_embeddings_of_chats_and_of_truncated_inputs() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:

        async def embedded(**body: Any) -> tuple[list[float], int]:
            response = await client.post("/v1/embeddings", json=body)
            assert response.status_code == 200, response.text
            return response.json()["data"][0]["embedding"], response.json()["usage"]["prompt_tokens"]

        assert await embedded(messages=MESSAGES) == await embedded(input="user: hey\n")
        assert await embedded(messages=MESSAGES, add_generation_prompt=True) == await embedded(
            input="user: hey\nassistant: "
        )
        assert await embedded(input="hello", truncate_prompt_tokens=3) == await embedded(input="llo")
        assert await embedded(input=list(b"hello"), truncate_prompt_tokens=3, truncation_side="right") == (
            await embedded(input="hel")
        )
        assert await embedded(input="hello", truncate_prompt_tokens=-1) == await embedded(input="hello")
        assert (await embedded(input="a" * 500, truncate_prompt_tokens=-1))[1] == 128
        assert await embedded(input="hello", use_activation=True) == await embedded(input="hello", normalize=True)


def test_a_limit_of_minus_1_keeps_what_the_model_takes() -> None:
    assert How(truncate_prompt_tokens=-1).truncated(range(9), 4) == (5, 6, 7, 8)
    assert How(truncate_prompt_tokens=-1, truncation_side="right").truncated(range(9), 4) == (0, 1, 2, 3)
    assert How().truncated(range(3), 2) == (0, 1, 2)
    with pytest.raises(InvalidArgument, match=r"5 is over max_model_len \(4\)"):
        How(truncate_prompt_tokens=5).truncated(range(3), 4)


async def test_log_probabilities_of_named_tokens_take_the_place_of_the_top_ones() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        named: Any = {"logprob_token_ids": [7, 8, 7], "return_tokens_as_token_ids": True, **GREEDY}
        body = {"prompt": "hello", "logprobs": 1, **named}
        logprobs = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert [set(top) for top in logprobs["top_logprobs"]] == [
            {"token_id:7", "token_id:8", chosen} for chosen in logprobs["tokens"]
        ]
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **named}
        (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        for entry in choice["logprobs"]["content"]:
            shown = [one["token"] for one in entry["top_logprobs"]]
            assert len(shown) == len(set(shown)) and set(shown) == {"token_id:7", "token_id:8", entry["token"]}


async def test_an_echo_of_ids_has_their_special_tokens_and_log_probabilities_twice() -> None:
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        ids = [256, *b"hi"]
        body = {"prompt": ids, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 2, "temperature": 0.0}
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"].startswith("<eos>hi")
        assert choice["logprobs"]["text_offset"][:4] == [0, 5, 6, 7]
        alone = [
            None if one is None else one[str(i)]["logprob"]
            for i, one in zip(ids, choice["prompt_logprobs"], strict=True)
        ]
        assert alone == choice["logprobs"]["token_logprobs"][:3]
        assert choice["token_ids"] is choice["prompt_token_ids"] is None


async def test_options_of_the_server_add_usage_and_names_of_tokens() -> None:
    options = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    async with asking(**options) as (_, client):
        how: Any = {"prompt": "hello", "max_tokens": 2, "temperature": 0.0, "model": "fake", "logprobs": 1}
        (choice,) = (await client.completions.create(**how)).choices
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [f"token_id:{one}" for one in expected_tokens(list(b"hello"), 2)]
        chunks = [chunk async for chunk in await client.completions.create(stream=True, **how)]
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2 and all(chunk.usage for chunk in chunks)


async def test_unknown_fields_are_ignored_named_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    how: Any = {"prompt": "hello", "max_tokens": 2, "temperature": 0.0}
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        plain = await client.post("/v1/completions", json=how)
        for _ in range(2):
            answer = await client.post("/v1/completions", json={**how, "seeed": 1, "a\r\nb": 2})
            assert answer.headers["x-jpaged-ignored-fields"] == "seeed, a\\r\\nb"
            assert answer.json()["choices"] == plain.json()["choices"]
        stream = await client.post("/v1/completions", json={**how, "stream": True, "seeed": 1})
        assert "seeed" in stream.headers["x-jpaged-ignored-fields"]
        assert "x-jpaged-ignored-fields" not in plain.headers
        text = {"prompt": "hi", "seeed": 0}
        for path in ("/tokenize", "/invocations"):
            assert (await client.post(path, json=text)).headers["x-jpaged-ignored-fields"] == "seeed"
        metrics = (await client.get("/metrics")).text
    assert 'jpaged:ignored_request_fields_total{field="seeed",model_name="fake"} 5.0' in metrics
    assert len([one for one in caplog.messages if "'seeed'" in one]) == 1


async def test_unknown_fields_can_be_refused() -> None:
    running_strictly = running(http_port=0, unknown_fields="refuse")
    async with running_strictly as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hello", "seeed": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "seeed"
