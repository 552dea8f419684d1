"""Bodies of embeddings and scores: what they ask for, what is refused, and what a fake server's numbers become."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from jpaged.chat import ReasoningOptions
from jpaged.client.aio import AsyncClient
from jpaged.client.batch import BatchOptions, run_batch
from jpaged.client.results import failure_in
from jpaged.errors import InternalError, InvalidArgument, NotFound
from jpaged.json_text import check_values
from jpaged.openai.embeddings import (
    EmbedJob,
    How,
    ScoreJob,
    SimilarityJob,
    embed_job,
    parse_detokenize_job,
    parse_tokenize_job,
    pooling_job,
    rerank_job,
    score_job,
)
from jpaged.openai.lines import MAX_PARTS_OF_CALL, Answers, Line, compute_seed, parse_scoring_job
from jpaged.openai.request import Streaming, chat_job, completion_job
from jpaged.openai.responses import parse_responses_request
from jpaged.outputs import Evaluated
from jpaged.server.servicer import InferenceServicer
from jpaged.types import Pooling, RequestOutput, SamplingParams, Score, TokenLogprob, Usage
from tests.client.test_batch import ignore, results, write_input
from tests.server.harness import MODEL, running

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"


class FakeServer:
    """Scores and embeds: the vector of a text is its length and the code of its first character."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def complete(
        self, prompt: str | None = None, sampling: SamplingParams | None = None, **more: Any
    ) -> RequestOutput:
        raise AssertionError("nothing is generated")

    async def tokenize(self, text: str | None = None, **more: Any) -> Sequence[int]:
        raise AssertionError("nobody counts tokens but the server")

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise AssertionError("nothing is generated")

    async def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Sequence[bytes]:
        raise AssertionError("nothing is generated")

    async def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[Score]:
        self.asked.append((prompt, tuple(continuations), adapter, cache_salt, priority))
        scores = [
            Score(tuple(TokenLogprob(7, -1.0, 1 + i) for i in range(len(one))), len(one) == 1) for one in continuations
        ]
        return Evaluated(scores, Usage(sum(len(prompt) + len(one) for one in continuations)))

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]:
        self.asked.append((tuple(inputs), pooling, normalize, adapter, cache_salt, priority))
        vectors = [(float(len(one)), float(ord(one[0]) if isinstance(one, str) else one[0])) for one in inputs]
        return Evaluated(vectors, Usage(sum(map(len, inputs))))


async def answered(url: str, body: dict[str, Any], server: Any = None) -> dict[str, Any]:
    answer = await Answers(MODEL).answer(server or FakeServer(), Line(1, "a", url, body))
    line = json.loads(answer.text)
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 200)
    return dict(line["response"]["body"])


@pytest.mark.parametrize(
    ("url", "body", "job"),
    [
        (EMBEDDINGS, {"input": "x"}, EmbedJob(("x",))),
        (EMBEDDINGS, {"input": ["x", "y"], "model": "fake", "dimensions": None}, EmbedJob(("x", "y"), How("fake"))),
        (EMBEDDINGS, {"input": [1, 2]}, EmbedJob(((1, 2),))),
        (EMBEDDINGS, {"input": [[1, 2], "x", [3]]}, EmbedJob(((1, 2), "x", (3,)))),
        (
            EMBEDDINGS,
            {"input": "x", "pooling": "mean", "encoding_format": "base64", "dimensions": 2},
            EmbedJob(("x",), How(), "mean", "base64", 2),
        ),
        (SCORE, {"prompt": "p", "continuations": ["x", [1]]}, ScoreJob("p", ("x", (1,)))),
        (SCORE, {"prompt": [7], "continuations": ["x"], "model": "m"}, ScoreJob((7,), ("x",), How("m"))),
        (SCORE, {"text_1": "p", "text_2": "x"}, SimilarityJob((("p", "x"),))),
        (SCORE, {"text_1": "p", "text_2": ["x", "y"]}, SimilarityJob((("p", "x"), ("p", "y")))),
        (SCORE, {"text_1": ["p"], "text_2": ["x", "y"]}, SimilarityJob((("p", "x"), ("p", "y")))),
        (SCORE, {"text_1": ["p", "q"], "text_2": ["x", "y"]}, SimilarityJob((("p", "x"), ("q", "y")))),
        (
            EMBEDDINGS,
            {"input": "x", "normalize": True, "adapter": "a", "cache_salt": "s", "priority": -3},
            EmbedJob(("x",), How(None, "a", "s", -3), normalize=True),
        ),
        (
            SCORE,
            {"prompt": "p", "continuations": ["x"], "adapter": "a", "cache_salt": "s", "priority": 2},
            ScoreJob("p", ("x",), How(None, "a", "s", 2)),
        ),
        (SCORE, {"text_1": "p", "text_2": "x", "pooling": "mean"}, SimilarityJob((("p", "x"),), How(), "mean")),
    ],
)
def test_bodies_are_read(url, body, job):
    assert parse_scoring_job(Line(1, "a", url, body)) == job


MESSAGES = [{"role": "user", "content": "a"}]
PLAIN = How(model=None, adapter="", cache_salt="", priority=0, truncate_prompt_tokens=None, truncation_side="left")
CHAT_DEFAULTS: dict[str, Any] = {
    "tools": (),
    "template_kwargs": {},
    "tool_choice": None,
    "parallel_tool_calls": True,
    "reasoning": ReasoningOptions(effort=None, enabled=None, thinking_token_budget=None, include=True),
    "add_generation_prompt": True,
    "continue_final_message": False,
    "documents": (),
    "chat_template": None,
    "add_special_tokens": False,
}
JOB_DEFAULTS: dict[str, Any] = {
    "model": None,
    "adapter": None,
    "has_echo": False,
    "shows_prompt_logprobs": True,
    "is_only_told": False,
    "has_token_ids": False,
    "names_token_ids": False,
    "request_id": None,
    "echoed": "",
    "role": "assistant",
    "user": None,
    "streaming": None,
}


def values_of(value: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def test_a_body_without_optional_fields_has_the_documented_defaults():
    vectors = {"pooling": None, "encoding": "float", "dimensions": None, "normalize": None}
    embed = embed_job({"input": "a"})
    assert (embed.inputs, embed.how, embed.messages, values_of(embed, vectors)) == (("a",), PLAIN, None, vectors)
    chat = embed_job({"messages": MESSAGES})
    assert (chat.inputs, chat.how, values_of(chat, vectors)) == ((), PLAIN, vectors)
    assert values_of(chat.chat_options, CHAT_DEFAULTS) == CHAT_DEFAULTS | {"add_generation_prompt": False}
    assert score_job({"prompt": "p", "continuations": ["c"]}) == ScoreJob("p", ("c",), PLAIN)
    assert score_job({"text_1": "a", "text_2": "b"}) == SimilarityJob((("a", "b"),), PLAIN, None, None)
    ranked = rerank_job({"query": "q", "documents": ["a", "b"]})
    for found, name in ((score_job({"queries": "a", "documents": "b"}), "queries"), (ranked, "query")):
        assert isinstance(found, SimilarityJob) and found.name == name
    assert ranked == SimilarityJob((("q", "a"), ("q", "b")), PLAIN, None, 2)

    tokenize = {"add_special_tokens": True, "wants_texts": False, "model": None}
    assert values_of(parse_tokenize_job({"prompt": "a"}), tokenize) == tokenize
    of_chat = parse_tokenize_job({"messages": MESSAGES})
    assert values_of(of_chat, tokenize) == tokenize
    assert values_of(of_chat.prompt.chat_options, CHAT_DEFAULTS) == CHAT_DEFAULTS
    detokenize = {"token_ids": (1,), "skip_special_tokens": False, "model": None}
    assert values_of(parse_detokenize_job({"tokens": [1]}), detokenize) == detokenize
    for job_without_name in (  # as vLLM, which serves its model for an empty name
        parse_tokenize_job({"prompt": "a", "model": ""}),
        parse_detokenize_job({"tokens": [1], "model": ""}),
        completion_job({"prompt": "a", "model": ""}),
    ):
        assert job_without_name.model is None

    for job in (completion_job({"prompt": "a"}), chat_job({"messages": MESSAGES})):
        assert values_of(job, JOB_DEFAULTS) == JOB_DEFAULTS
        assert job.sampling == SamplingParams(max_tokens=1)  # the least that must fit
        length = {"fills_length": True, "max_filled": None, "truncation_side": "left", "is_only_told": False}
        (prompt,) = job.prompts
        assert values_of(prompt, length) == length
    assert completion_job({"prompt": "a"}).prompts[0].add_special_tokens
    assert values_of(chat_job({"messages": MESSAGES}).prompts[0].chat_options, CHAT_DEFAULTS) == CHAT_DEFAULTS
    streamed = completion_job({"prompt": "a", "stream": True}).streaming
    assert streamed == Streaming(include_usage=False, continuous_usage_stats=False)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("read", "last", "out", "field"),
    [
        (lambda n: embed_job({"input": ["a"] * n}), 1, 0, "input"),
        (lambda n: embed_job({"input": ["a"] * n}), 2048, 2049, "input"),
        (lambda n: embed_job({"input": [n]}), 0, -1, "input"),
        (lambda n: embed_job({"input": "a", "dimensions": n}), 1, 0, "dimensions"),
        (lambda n: rerank_job({"query": "q", "documents": ["a"], "top_n": n}), 0, -1, "top_n"),
        (lambda n: completion_job({"prompt": ["a"] * n}), 1, 0, "prompt"),
        (lambda n: completion_job({"prompt": ["a"] * n}), 1024, 1025, "prompt"),
        (lambda n: completion_job({"prompt": "a", "user": "u" * n}), 512, 513, "user"),
        (lambda n: completion_job({"prompt": "a", "logit_bias": {"1" * n: 1}}), 10, 11, "logit_bias"),
        (lambda n: check_values("body", {"a": nested(n)}), 63, 64, "body"),
        (lambda n: check_values("body", {"a": n}), 2**64 - 1, 2**64, "a"),
        (lambda n: check_values("body", {"a": n}), -(2**64) + 1, -(2**64), "a"),
        (
            lambda n: parse_responses_request({"input": "a", "metadata": {f"k{i}": "v" for i in range(n)}}),
            16,
            17,
            "metadata",
        ),
        (lambda n: parse_responses_request({"input": "a", "metadata": {"k": "v" * n}}), 512, 513, "metadata.k"),
    ],
)
def test_bodies_pass_up_to_their_limits_and_no_further(read: Any, last: int, out: int, field: str) -> None:
    read(last)
    with pytest.raises(InvalidArgument) as raised:
        read(out)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (EMBEDDINGS, {}, "body.input: must be a non-empty list"),
        (EMBEDDINGS, {"input": []}, "body.input: must be a non-empty list"),
        (EMBEDDINGS, {"input": ""}, "body.input: '' is neither a non-empty string nor a list of token ids"),
        (EMBEDDINGS, {"input": 7}, "body.input: must be a non-empty list"),
        (EMBEDDINGS, {"input": ["x", 7]}, "body.input: \"['x', 7]\" is neither"),
        (EMBEDDINGS, {"input": [True]}, "body.input: 'True' is neither"),
        (EMBEDDINGS, {"input": [-1]}, "body.input: '[-1]' is neither"),
        (EMBEDDINGS, {"input": ["x"] * 2049}, "body.input: 2049 are over the limit of 2048"),
        (
            EMBEDDINGS,
            {"input": "x", "encoding_format": "int8"},
            "body.encoding_format: 'int8' is not one of float, base64",
        ),
        (EMBEDDINGS, {"input": "x", "pooling": "sum"}, "body.pooling: 'sum' is not one of last, mean, cls, max"),
        (EMBEDDINGS, {"input": "x", "dimensions": 0}, "body.dimensions: 0 is not an integer of 1 or more"),
        (EMBEDDINGS, {"input": "x", "dimensions": True}, "body.dimensions: True is not an integer"),
        (EMBEDDINGS, {"input": "x", "user": 3}, "body.user: 3 is not a string"),
        (EMBEDDINGS, {"input": "x", "model": 3}, "body.model: 3 is not a string"),
        (EMBEDDINGS, {"input": "x", "normalize": 1}, "body.normalize: 1 is not true or false"),
        (EMBEDDINGS, {"input": "x", "adapter": 3}, "body.adapter: 3 is not a string"),
        (SCORE, {"text_1": "p", "text_2": "x", "priority": "high"}, "body.priority: 'high' is out of range"),
        (SCORE, {"prompt": "p", "continuations": ["x"], "cache_salt": "s" * 257}, "body.cache_salt: "),
        (SCORE, {}, "body.text_1: must be a non-empty list"),
        (SCORE, {"text_1": "p"}, "body.text_2: must be a non-empty list"),
        (SCORE, {"text_1": "p", "text_2": [""]}, "body.text_2: '' is not a non-empty string"),
        (SCORE, {"text_1": ["p", "q"], "text_2": "x"}, "body.text_2: 1 texts for 2 of text_1"),
        (SCORE, {"text_1": "p", "text_2": "x", "prompt": "p"}, "body.text_"),
        (SCORE, {"prompt": "p"}, "body.continuations: must be a non-empty list"),
        (SCORE, {"continuations": ["x"]}, "body.prompt: 'None' is neither"),
        (SCORE, {"prompt": "p", "continuations": ["x"], "pooling": "mean"}, "body.pooling: is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_named(url, body, message):
    with pytest.raises(InvalidArgument) as raised:
        parse_scoring_job(Line(1, "a", url, body))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", ["dimensions", "normalize", "pooling", "encoding_format", "x" * 100_000])
def test_an_error_shows_the_beginning_of_what_is_long(name):
    with pytest.raises(InvalidArgument) as raised:
        embed_job({"input": "a", name: ["x" * 100_000]})
    assert raised.value.field == name[:80] and len(str(raised.value)) < 300


async def test_embeddings_are_numbers_or_base64_of_float32():
    server = FakeServer()
    body = await answered(EMBEDDINGS, {"input": ["ab", [7, 8, 9]], "pooling": "mean"}, server)
    assert server.asked == [(("ab", (7, 8, 9)), "mean", None, "", "", 0)]
    assert (body["object"], body["model"]) == ("list", "fake")
    assert body["data"] == [
        {"object": "embedding", "index": 0, "embedding": [2.0, 97.0]},
        {"object": "embedding", "index": 1, "embedding": [3.0, 7.0]},
    ]
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    packed = await answered(EMBEDDINGS, {"input": "ab", "encoding_format": "base64", "dimensions": 2})
    data = base64.b64decode(packed["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), np.array([2.0, 97.0], np.float32))


@pytest.mark.parametrize(
    ("dtype", "order", "expected"),
    [
        ("float32", "little", np.array([1.5, -70000.0], "<f4").tobytes()),
        ("float32", "big", np.array([1.5, -70000.0], ">f4").tobytes()),
        ("float16", "native", np.array([1.5, -np.inf], "<f2").tobytes()),
        ("bfloat16", "little", bytes((0xC0, 0x3F, 0x89, 0xC7))),
        ("bfloat16", "big", bytes((0x3F, 0xC0, 0xC7, 0x89))),
        ("fp8_e4m3", "big", bytes((0x3C, 0xFE))),
        ("fp8_e5m2", "little", bytes((0x3E, 0xFC))),
    ],
)
def test_base64_has_the_type_and_byte_order_of_the_request(dtype, order, expected):
    fields = {"input": "a", "encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
    for job in (embed_job(fields), pooling_job(fields)):
        assert base64.b64decode(str(job.encoded([1.5, -70000.0]))) == expected
    assert embed_job({**fields, "encoding_format": "float"}).encoded([1.5]) == [1.5]
    with pytest.raises(InvalidArgument, match="embed_dtype: 'fp8' is not one of float32, float16, bfloat16, fp8_e4m3"):
        embed_job({**fields, "embed_dtype": "fp8"})
    with pytest.raises(InvalidArgument, match="endianness: 'middle' is not one of native, little, big"):
        pooling_job({**fields, "endianness": "middle"})


async def test_dimensions_that_are_not_the_models_are_refused():
    with pytest.raises(
        InvalidArgument, match=r"body\.dimensions: 256 is not supported: the model's vectors have 2 dimensions"
    ):
        await answered(EMBEDDINGS, {"input": "ab", "dimensions": 256})


async def test_continuations_have_their_log_probabilities():
    server = FakeServer()
    body = await answered(SCORE, {"prompt": "p", "continuations": ["x", [1, 2, 3]]}, server)
    assert server.asked == [("p", ("x", (1, 2, 3)), "", "", 0)]
    tokens = [{"token_id": 7, "logprob": -1.0, "rank": rank} for rank in (1, 2, 3)]
    assert body["data"] == [
        {"object": "loglikelihood", "index": 0, "logprob": -1.0, "is_greedy": True, "tokens": tokens[:1]},
        {"object": "loglikelihood", "index": 1, "logprob": -3.0, "is_greedy": False, "tokens": tokens},
    ]
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


async def test_pairs_have_the_cosine_of_their_vectors_and_each_text_is_embedded_once():
    server = FakeServer()
    body = await answered(SCORE, {"text_1": "ab", "text_2": ["ab", "b"]}, server)
    assert server.asked == [(("ab", "b"), None, None, "", "", 0)]
    cosine = (2 * 1 + 97 * 98) / (math.hypot(2, 97) * math.hypot(1, 98))
    assert [entry["score"] for entry in body["data"]] == pytest.approx([1.0, cosine])
    assert body["usage"]["prompt_tokens"] == 3


async def test_another_model_and_a_short_answer_are_errors():
    with pytest.raises(NotFound, match=r"^model: 'other' is not served; 'fake' is"):
        await answered(EMBEDDINGS, {"input": "x", "model": "other"})
    with pytest.raises(NotFound) as raised:
        await answered(EMBEDDINGS, {"input": "x", "model": "o" * 100_000})
    assert len(str(raised.value)) < 300

    class Short(FakeServer):
        async def embed(self, inputs: Sequence[str | Sequence[int]], **more: Any) -> Evaluated[tuple[float, ...]]:
            whole = await super().embed(inputs, **more)
            return Evaluated(whole[1:], whole.usage)

    with pytest.raises(InternalError, match="the server answered 1 of 2 inputs"):
        await answered(EMBEDDINGS, {"input": ["x", "y"]}, Short())


async def test_what_a_body_says_besides_reaches_the_server():
    server = FakeServer()
    more = {"adapter": "a", "cache_salt": "s", "priority": 5}
    await answered(EMBEDDINGS, {"input": "x", "normalize": True, **more}, server)
    await answered(SCORE, {"prompt": "p", "continuations": ["x"], **more}, server)
    await answered(SCORE, {"text_1": "p", "text_2": "x", **more}, server)
    assert server.asked == [
        (("x",), None, True, "a", "s", 5),
        ("p", ("x",), "a", "s", 5),
        (("p", "x"), None, None, "a", "s", 5),
    ]


async def test_a_line_of_many_parts_is_several_calls_and_one_answer():
    server = FakeServer()
    texts = [f"{i:04}" for i in range(2 * MAX_PARTS_OF_CALL + 1)]
    body = await answered(EMBEDDINGS, {"input": texts}, server)
    assert [len(asked[0]) for asked in server.asked] == [MAX_PARTS_OF_CALL, MAX_PARTS_OF_CALL, 1]
    assert [entry["index"] for entry in body["data"]] == list(range(len(texts)))
    assert body["usage"]["prompt_tokens"] == 4 * len(texts)
    body = await answered(SCORE, {"prompt": "p", "continuations": texts}, server)
    assert len(body["data"]) == len(texts)
    assert body["usage"]["prompt_tokens"] == 5 * len(texts)


async def test_scores_that_make_too_large_an_answer_are_refused():
    line = Line(1, "a", SCORE, {"prompt": "p", "continuations": ["x" * 100]})
    with pytest.raises(InvalidArgument, match=r"^continuations: 1 with 100 tokens make .* over the limit of"):
        await Answers(MODEL, max_bytes=1000).answer(FakeServer(), line)
    assert (await Answers(MODEL, max_bytes=1 << 20).answer(FakeServer(), line)).prompt_tokens == 101


SCORING_BODIES: list[tuple[str, dict[str, Any]]] = [
    (EMBEDDINGS, {"input": "ab"}),
    (SCORE, {"prompt": "p", "continuations": ["x", [1, 2]]}),
    (SCORE, {"text_1": "p", "text_2": "x"}),
]


async def test_batches_score_and_embed(tmp_path):
    source, target = write_input(tmp_path / "in", SCORING_BODIES), tmp_path / "out"
    async with running() as harness, AsyncClient(harness.target) as client:
        summary = await run_batch(BatchOptions(source, target, harness.target), ignore)
        (vector,) = await client.embed(["ab"])
        scores = await client.score("p", ["x", [1, 2]])
    assert (summary.num_succeeded, summary.num_failed, summary.prompt_tokens) == (3, 0, 2 + (2 + 3) + 2)
    embedded, scored, compared = (line["response"]["body"] for _, line in sorted(results(target).items()))
    assert embedded["data"] == [{"object": "embedding", "index": 0, "embedding": list(vector)}]
    assert [entry["logprob"] for entry in scored["data"]] == [score.logprob for score in scores]
    assert [len(entry["tokens"]) for entry in scored["data"]] == [1, 2]
    assert -1 <= compared["data"][0]["score"] <= 1


async def test_a_server_without_these_methods_is_a_failed_line_that_says_so(tmp_path, monkeypatch):
    async def unknown(self: object, request: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    monkeypatch.setattr(InferenceServicer, "Score", unknown)
    monkeypatch.setattr(InferenceServicer, "Embed", unknown)
    source, target = write_input(tmp_path / "in", SCORING_BODIES), tmp_path / "out"
    async with running() as harness:
        summary = await run_batch(BatchOptions(source, target, harness.target), ignore)
    assert (summary.num_succeeded, summary.num_failed) == (0, 3)
    assert {line["response"]["status_code"] for line in results(target).values()} == {501}
    assert {failure_in(line) for line in results(target).values()} == {"UNSUPPORTED"}


@pytest.mark.parametrize("url", [EMBEDDINGS, SCORE, "/v1/completions", "/v1/chat/completions"])
async def test_a_line_names_an_adapter_as_its_model(url):
    bodies: dict[str, dict[str, Any]] = {
        EMBEDDINGS: {"input": "ab"},
        SCORE: {"prompt": "a", "continuations": ["b"]},
        "/v1/completions": {"prompt": "ab", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    }
    adapters: list[str] = []

    class Noting(FakeServer):
        async def score(self, *given: Any, adapter: str = "", **how: Any) -> Any:
            adapters.append(adapter)
            return await super().score(*given, adapter=adapter, **how)

        async def embed(self, *given: Any, adapter: str = "", **how: Any) -> Any:
            adapters.append(adapter)
            return await super().embed(*given, adapter=adapter, **how)

        async def complete(self, *given: Any, adapter: str = "", **how: Any) -> RequestOutput:
            adapters.append(adapter)
            return RequestOutput("r", None, (1,), (), Usage(1, 0, 0))

    answers = Answers(MODEL, adapters=lambda: {"sql"})
    answered = await answers.answer(Noting(), Line(1, "a", url, bodies[url] | {"model": "sql"}))
    assert adapters == ["sql"] and json.loads(answered.text)["response"]["body"]["model"] == "sql"
    with pytest.raises(InvalidArgument, match="'other' is not 'sql'"):
        await answers.answer(Noting(), Line(1, "a", url, bodies[url] | {"model": "sql", "adapter": "other"}))


def test_a_seed_is_a_function_of_the_custom_id_alone():
    assert compute_seed("a") == compute_seed("a") != compute_seed("b")
    assert 0 <= compute_seed("\udc00") < 2**64
    assert replace(SamplingParams(), seed=compute_seed("x" * 1000)).seed == compute_seed("x" * 1000)
