"""Experts of tokens over gRPC and HTTP."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

from jpaged.client import AsyncClient
from jpaged.engine.output import processor
from jpaged.errors import InvalidArgument
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.server.harness import running

PROMPT = [3, 4, 5, 6, 7]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def keeping() -> FakeExecutor:
    executor = FakeExecutor()
    executor.keeps_routes = True
    return executor


def decoded(text: str) -> NDArray[Any]:
    found: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)))
    return found


async def streamed(http: httpx2.AsyncClient, body: dict[str, Any]) -> NDArray[Any]:
    """The experts of a stream, which only the last chunk of its choice has."""
    text = (await http.post("/v1/completions", json={**body, "stream": True})).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (last,) = (choice for choice in choices if "routed_experts" in choice)
    assert last["finish_reason"] == "length"
    return decoded(last["routed_experts"])


async def test_both_protocols_return_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(http_port=0, executor=keeping()) as harness, AsyncClient(harness.target) as client:
        (one,) = (await client.complete(prompt_token_ids=PROMPT, sampling=GREEDY)).outputs
        want = one.routed_experts
        assert want is not None
        assert want.shape == (8, 3, 2)
        assert want.dtype == np.uint8
        assert want[:, 1:].any()
        cut = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, routed_experts_prompt_start=5)
        (one,) = (await client.complete(prompt_token_ids=PROMPT, sampling=cut)).outputs
        np.testing.assert_array_equal(one.routed_experts, want[5:])
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        async with httpx2.AsyncClient(base_url=harness.http_url) as http:
            (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
            np.testing.assert_array_equal(decoded(choice["routed_experts"]), want)
            (choice,) = (await http.post("/v1/completions", json={**body, "routed_experts_prompt_start": 5})).json()[
                "choices"
            ]
            np.testing.assert_array_equal(decoded(choice["routed_experts"]), want[5:])
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0.0}
            answer = (await http.post("/v1/chat/completions", json=chat)).json()
            length = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1
            assert decoded(answer["choices"][0]["routed_experts"]).shape == (length, 3, 2)
            np.testing.assert_array_equal(await streamed(http, body), want)
            refused = await http.post("/v1/completions", json={**body, "routed_experts_prompt_start": 6})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "routed_experts_prompt_start")
            monkeypatch.setattr(processor, "_MAX_EXPERT_BYTES", 20)  # several messages
            np.testing.assert_array_equal(await streamed(http, body), want)
        (one,) = (await client.complete(prompt_token_ids=PROMPT, sampling=GREEDY)).outputs
        np.testing.assert_array_equal(one.routed_experts, want)
        with pytest.raises(InvalidArgument, match="beam_width"):
            await client.complete(prompt_token_ids=PROMPT, sampling=SamplingParams(beam_width=2, n=2, max_tokens=3))


async def test_servers_return_none_by_default() -> None:
    async with running(http_port=0) as harness, AsyncClient(harness.target) as client:
        (one,) = (await client.complete(prompt_token_ids=PROMPT, sampling=GREEDY)).outputs
        assert one.routed_experts is None
        async with httpx2.AsyncClient(base_url=harness.http_url) as http:
            (choice,) = (await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})).json()["choices"]
            assert "routed_experts" not in choice
