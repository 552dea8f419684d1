"""Requests that leave sampling parameters out get those of the model's generation config, in every API."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from jpaged import AsyncClient, SamplingParams
from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged._proto.v1 import inference_pb2 as own_pb2
from jpaged.checkpoints.hub import read_default_sampling
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.openai.lines import Line, parse_line
from jpaged.openai.lines import parse_job as parse_line_job
from jpaged.service.input_processor import InputProcessor
from tests.server import harness as harnesses
from tests.server.harness import Harness, collect, running

DEFAULTS = {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5, "max_tokens": 3}
API = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(harnesses, "MODEL", dataclasses.replace(harnesses.MODEL, default_sampling=DEFAULTS))
    async with running(http_port=0) as harness:
        yield harness


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The six parameters of each request that reaches the engine."""
    found: list[dict[str, Any]] = []
    make = InputProcessor.make_request

    def spy(self: InputProcessor, **given: Any) -> Any:
        request = make(self, **given)
        found.append({name: getattr(request.sampling, name) for name in DEFAULTS})
        return request

    monkeypatch.setattr(InputProcessor, "make_request", spy)
    return found


async def test_grpc(harness: Harness, made: list[dict[str, Any]]) -> None:
    async def ask(**fields: Any) -> None:
        message = own_pb2.GenerateRequest(text="x", sampling=own_pb2.SamplingParams(**fields))
        await collect(harness.inference.Generate(message))

    await ask()
    await ask(temperature=0, top_k=0, min_p=0, max_tokens=5)
    await ask(min_tokens=4)
    await ask(beam_width=2, temperature=0)
    assert made == [
        DEFAULTS,
        {**DEFAULTS, "temperature": 0, "top_k": 0, "min_p": 0, "max_tokens": 5},
        {**DEFAULTS, "max_tokens": 4},
        {**API, "temperature": 0, "max_tokens": 3},
    ]


async def test_the_python_client_sends_what_it_is_given(harness: Harness, made: list[dict[str, Any]]) -> None:
    async with AsyncClient(harness.target) as client:
        assert (await client.model_info()).default_sampling == DEFAULTS
        await client.complete("x")
        await client.complete("x", SamplingParams(max_tokens=2))
    assert made == [DEFAULTS, {**API, "max_tokens": 2}]


async def test_requests_that_share_a_call(harness: Harness, made: list[dict[str, Any]]) -> None:
    given = [None, SamplingParams(max_tokens=2)] * 4
    async with AsyncClient(harness.target) as client:
        await asyncio.gather(*(client.complete("x", sampling) for sampling in given))
    assert sorted(made, key=lambda one: one["max_tokens"]) == [{**API, "max_tokens": 2}] * 4 + [DEFAULTS] * 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("responses", {"input": "x"}),
    ],
)
async def test_http(harness: Harness, made: list[dict[str, Any]], path: str, body: dict[str, Any]) -> None:
    length = "max_output_tokens" if path == "responses" else "max_tokens"
    async with httpx2.AsyncClient(base_url=harness.http_url) as client:
        for more in ({"temperature": None}, {"temperature": 0, "top_p": 1, length: 2}):
            answer = await client.post(f"/v1/{path}", json={**body, **more})
            assert answer.status_code == 200, answer.text
    assert made == [DEFAULTS, {**DEFAULTS, "temperature": 0, "top_p": 1, "max_tokens": 2}]
    if path == "responses":
        assert (answer.json()["temperature"], answer.json()["top_p"]) == (0, 1)


async def test_the_other_grpc_apis(harness: Harness, made: list[dict[str, Any]]) -> None:
    vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(harness.channel)
    for fields in ({}, {"temperature": 0, "top_k": 5, "max_tokens": 2}):
        sampling = vllm_engine_pb2.SamplingParams(**fields)
        await collect(vllm.Generate(vllm_engine_pb2.GenerateRequest(text="x", sampling_params=sampling)))
    triton: Any = inference_pb2_grpc.GRPCInferenceServiceStub(harness.channel)
    tensor = inference_pb2.ModelInferRequest.InferInputTensor(
        name="text_input",
        datatype="BYTES",
        shape=[1],
        contents=inference_pb2.InferTensorContents(bytes_contents=[b"x"]),
    )
    for given in ({}, {"top_k": inference_pb2.InferParameter(int64_param=1)}):
        await triton.ModelInfer(inference_pb2.ModelInferRequest(model_name="fake", inputs=[tensor], parameters=given))
    assert made == [
        DEFAULTS,
        {**DEFAULTS, "temperature": 0, "top_k": 5, "max_tokens": 2},
        DEFAULTS,
        DEFAULTS | {"top_k": 1},
    ]


def test_lines_of_a_batch() -> None:
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "x", "top_k": 2},
    }
    parsed = parse_line(1, json.dumps(line))
    assert isinstance(parsed, Line)
    job = parse_line_job(parsed, DEFAULTS)
    assert (job.sampling.temperature, job.sampling.top_k, job.prompts[0].max_filled) == (0.5, 2, 3)


def options(**given: Any) -> Any:
    return EngineConfig.load(given).model


def test_the_generation_config_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_default_sampling(tmp_path, options()) == {}
    own = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 99, "eos_token_id": 1, "min_p": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    read = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert read_default_sampling(tmp_path, options()) == read
    assert "generation_config.json: min_p 7 is out of range: must be a number from 0 to 1; it is ignored" in caplog.text
    for name in ("none", "vllm"):
        assert read_default_sampling(tmp_path, options(generation_config=name)) == {}
        given = options(generation_config=name, override_generation_config={"top_p": 0.5, "max_new_tokens": 4})
        assert read_default_sampling(tmp_path, given) == {"top_p": 0.5, "max_tokens": 4}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(InvalidArgument, match=r"^generation_config: \S*generation_config.json does not exist"):
        read_default_sampling(tmp_path, options(generation_config=str(other)))
    (other / "generation_config.json").write_text('{"temperature": 2}')
    for path in (other, other / "generation_config.json"):
        given = options(generation_config=str(path), override_generation_config='{"top_k": 3}')
        assert read_default_sampling(tmp_path, given) == {"temperature": 2, "top_k": 3}
    (other / "generation_config.json").write_text('{"temperature": -2}')
    with pytest.raises(InvalidArgument, match=r"^generation_config.temperature: -2 is out of range"):
        read_default_sampling(tmp_path, options(generation_config=str(other)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}x", "override_generation_config: {}x is not JSON"),
        ('{"seed": 1}', "override_generation_config.seed: is unknown: must be one of temperature, top_p"),
        ('{"top_p": 2}', "override_generation_config.top_p: 2 is out of range: must be a number above 0"),
    ],
)
def test_an_invalid_override_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_default_sampling(tmp_path, options(override_generation_config=text))
    assert str(raised.value).startswith(message)
