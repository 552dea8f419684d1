"""Input embeddings in place of a prompt, over gRPC and HTTP. Those of the fake model name the tokens that they are."""

from __future__ import annotations

import base64
from typing import Any

import grpc
import numpy as np
import openai
import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.client import AsyncClient
from jpaged.errors import InvalidArgument
from jpaged.testing import with_embeds
from jpaged.types import SamplingParams
from tests.http.generate.asking import GREEDY, PAST_THE_END, asking, text_of
from tests.server.harness import collect, error_details, failure_of, running
from tests.service.torch_files import storage, tensor, torch_file

ONE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def rows(text: str, dtype: str = "float32") -> np.ndarray:
    return np.array([[byte, 0.5] for byte in text.encode()], dtype)


def encoded(text: str) -> str:
    values = rows(text)
    described = tensor(storage(size=values.size), values.shape, (2, 1))
    return base64.b64encode(torch_file(described, values.tobytes())).decode()


def message(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return inference_pb2.GenerateRequest(prompt_embeds=inference_pb2.PromptEmbeds(**fields), sampling=sampling)


async def test_a_call_with_embeddings_gives_the_tokens_of_the_text() -> None:
    async with running(executor=with_embeds()(), enable_prompt_embeds=True) as harness:
        call = harness.inference.Generate(message(values=rows("hello").tobytes(), num_tokens=5))
        messages = await collect(call)
        assert "".join(one.text for one in messages) == text_of("hello", 8)
        assert messages[-1].usage.prompt_tokens == 5
        async with AsyncClient(harness.target) as client:
            for given in (
                rows("hello"),
                rows("hello", "float16"),
                rows("hello", "float64"),
                rows("hello", ">f4"),
                rows("hello").tolist(),
                rows("hello")[None],
            ):
                output = await client.complete({"prompt_embeds": given}, ONE)
                assert output.outputs[0].text == text_of("hello", 8)
            assert output.prompt_token_ids == (0,) * 5
            with pytest.raises(InvalidArgument, match="prompt_embeds: is no dense array of numbers"):
                await client.complete({"prompt_embeds": [[1.0, 2.0], [3.0]]}, ONE)
            stream = client.generate({"prompt_embeds": base64.b64decode(encoded("hey"))}, ONE)
            assert "".join([chunk.text async for chunk in stream]) == text_of("hey", 8)


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"values": b"123", "num_tokens": 1}, "prompt_embeds.values", "3 bytes of float32 are not rows of 1 tokens"),
        ({"values": b"1234"}, "prompt_embeds.values", "4 bytes of float32 are not rows of 0 tokens"),
        ({}, "prompt_embeds.values", "0 bytes of float32 are not rows of 0 tokens"),
        ({"values": b"1234", "num_tokens": 1}, "prompt_embeds", "has the shape (1, 1); the model takes (tokens, 2)"),
        ({"values": b"12", "num_tokens": 1, "dtype": "int8"}, "prompt_embeds.dtype", "'int8' is not one of float32"),
        ({"values": b"1", "torch_file": b"1"}, "prompt_embeds.torch_file", "takes the place of values"),
        ({"torch_file": b"1"}, "prompt_embeds", "is not a file of torch.save"),
        ({"values": np.full(2, np.nan, "<f4").tobytes(), "num_tokens": 1}, "prompt_embeds", "has nan at [0, 0]"),
    ],
)
async def test_a_wrong_message_is_named(fields: dict[str, Any], field: str, problem: str) -> None:
    async with running(executor=with_embeds()(), enable_prompt_embeds=True) as harness:
        error = await failure_of(harness.inference.Generate(message(**fields)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = error_details(error)["BadRequest"].field_violations
        assert (violation.field, problem in violation.description) == (field, True), violation


async def test_a_server_without_the_option_names_it() -> None:
    async with asking() as (harness, client):
        error = await failure_of(harness.inference.Generate(message(values=rows("a").tobytes(), num_tokens=1)))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "--enable-prompt-embeds" in error.details()
        with pytest.raises(openai.APIStatusError, match="without --enable-prompt-embeds"):
            await client.completions.create(prompt=None, extra_body={"prompt_embeds": encoded("a")}, **GREEDY)


async def complete(client: openai.AsyncOpenAI, prompt: Any, embeds: Any, **fields: Any) -> Any:
    body = {"prompt_embeds": embeds, **PAST_THE_END}
    extra = {name: fields.pop(name) for name in ("prompt_logprobs",) if name in fields}
    words = {**GREEDY, "max_tokens": 6, **fields}
    return await client.completions.create(prompt=prompt, extra_body=body | extra, **words)


async def test_completions_begin_with_those_of_embeddings() -> None:
    async with asking(executor=with_embeds()(), enable_prompt_embeds=True) as (_, client):
        for given, others, texts in (
            (encoded("hello"), None, ["hello"]),
            (encoded("hello"), "", ["hello"]),  # as in vLLM's examples
            ([encoded("hello"), encoded("hey")], None, ["hello", "hey"]),
            (encoded("hello"), "a text", ["hello", "a text"]),
            ([], "a text", ["a text"]),
        ):
            answer = await complete(client, others, given)
            assert [choice.text for choice in answer.choices] == [text_of(text, 6) for text in texts]
            assert answer.usage.prompt_tokens == sum(map(len, texts))
            stream = await complete(client, others, given, stream=True)
            pieces = [""] * len(texts)
            async for chunk in stream:
                pieces[chunk.choices[0].index] += chunk.choices[0].text
            assert pieces == [text_of(text, 6) for text in texts]
        answer = await complete(client, None, encoded("hello"), logprobs=1)
        assert len(answer.choices[0].logprobs.token_logprobs) == 6


@pytest.mark.parametrize(
    ("embeds", "fields", "problem"),
    [
        ("invalid_base64", {}, "prompt_embeds: is not base64"),
        (["QUFB", encoded("a")], {}, r"prompt_embeds\[0\]: is not a file of torch\.save"),
        (7, {}, "prompt_embeds: 7 is neither a base64 text nor a list of these"),
        ([7], {}, "prompt_embeds: .7. is neither a base64 text nor a list of these"),
        ([], {}, "prompt: must be a string"),
        (encoded("a"), {"echo": True}, "echo: is not compatible with prompt_embeds"),
        (encoded("a"), {"prompt_logprobs": True}, "prompt_logprobs: is not compatible with prompt_embeds"),
        (encoded("a" * 200), {}, r"prompt_embeds: 200 tokens are over max_model_len \(128\)"),
        (encoded("a" * 9000), {}, r"prompt_embeds: \d+ bytes, over the limit of \d+ for max_model_len \(128\)"),
        (encoded("a" * 128), {}, "prompt_embeds: 128 prompt tokens and 6 to generate make 134"),
    ],
)
async def test_a_wrong_body_is_a_bad_request(embeds: Any, fields: dict[str, Any], problem: str) -> None:
    async with asking(executor=with_embeds()(), enable_prompt_embeds=True) as (_, client):
        with pytest.raises(openai.BadRequestError, match=problem):
            await complete(client, None, embeds, **fields)


async def test_errors_number_texts_and_embeddings_separately() -> None:
    async with asking(executor=with_embeds()(), enable_prompt_embeds=True) as (_, client):
        for prompt, embeds, field in (
            (["a", ""], [encoded("a")], r"prompt\[1\]: is empty"),
            ("a" * 128, [encoded("a")], "prompt: 128 prompt tokens"),
            ("a", [encoded("a"), encoded("a" * 128)], r"prompt_embeds\[1\]: 128 prompt tokens"),
        ):
            with pytest.raises(openai.BadRequestError, match=field):
                await complete(client, prompt, embeds)
