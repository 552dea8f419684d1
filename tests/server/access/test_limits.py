"""Limits of tenants on every face: what a call over one ends with, and that what was not used comes back."""

from typing import Any

import grpc
import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.client import AsyncClient
from jpaged.errors import InvalidArgument, QuotaExceeded, RequestTooLong
from jpaged.types import SamplingParams
from tests.access.test_keys import KEY
from tests.server.harness import Harness, collect, error_details, eventually, failure_of, request, running


def stop_clock(harness: Harness) -> None:
    """Let nothing come back by waiting: a slow machine must not change what is left."""
    quotas = harness.server._gate.quotas
    assert quotas is not None
    quotas._clock = lambda: 1000.0


A, B = (("x-jpaged-tenant", "a"),), (("x-jpaged-tenant", "b"),)


async def test_a_call_over_a_quota_is_told_when_to_come_back():
    async with running(tenant_requests_per_minute=1) as harness:
        stop_clock(harness)
        await collect(harness.inference.Generate(request(), metadata=A))
        error = await failure_of(harness.inference.Generate(request(), metadata=A))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "requests_per_minute of tenant 'a' (1) is used up"
        details = error_details(error)
        assert details["ErrorInfo"].reason == "QUOTA_EXCEEDED"
        assert 0 < details["RetryInfo"].retry_delay.ToSeconds() <= 60
        await collect(harness.inference.Generate(request(), metadata=B))
        async with AsyncClient(harness.target, tenant="a") as client:
            with pytest.raises(QuotaExceeded) as refusal:
                await client.complete("hello")
            assert 0 < refusal.value.retry_after_s <= 60


async def test_streams_of_a_tenant_are_counted_until_they_end():
    async with running(tenant_max_streams=1) as harness:
        harness.faults.hold_after(3)
        call = harness.inference.Generate(request(max_tokens=100), metadata=A)
        await call.read()
        assert "max_streams" in (await failure_of(harness.inference.Generate(request(), metadata=A))).details()
        call.cancel()
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await collect(harness.inference.Generate(request(), metadata=A))


async def test_tokens_that_were_not_generated_come_back():
    async with running(tenant_tokens_per_minute=60) as harness, AsyncClient(harness.target, tenant="a") as client:
        stop_clock(harness)
        long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        with pytest.raises(RequestTooLong, match=r"sampling.max_tokens: 5 prompt tokens and 2 x 40 .* make 85"):
            await client.complete("hello", SamplingParams(max_tokens=40, n=2))
        harness.faults.hold_after(3)
        stream = client.generate("hello", long)
        await anext(stream)
        with pytest.raises(QuotaExceeded, match=r"45 tokens; tenant 'a' has 15 left"):
            await client.complete("hello", long)
        await client.abort(stream.request_id)
        harness.faults.release()
        async for _ in stream:
            pass
        used = 5 + 10  # at most so many before the hold
        await client.complete("hello", SamplingParams(max_tokens=60 - used - 5, temperature=0.0))


async def test_n_and_prompts_have_limits():
    async with running(tenant_max_n=2, tenant_max_prompt_tokens=8) as harness, AsyncClient(harness.target) as client:
        for params in (SamplingParams(n=3), SamplingParams(n=1, best_of=3)):
            with pytest.raises(InvalidArgument, match=r"sampling.(n|best_of): 3 is over max_n of tenant '' \(2\)"):
                await client.complete("hello", params)
        with pytest.raises(InvalidArgument, match=r"sampling.beam_width: 3 is over max_n"):
            await client.complete("hello", SamplingParams(beam_width=3))
        with pytest.raises(RequestTooLong, match=r"prompt: 9 tokens are over max_prompt_tokens"):
            await client.complete("123456789")
        with pytest.raises(RequestTooLong, match=r"over max_prompt_tokens"):
            await client.embed(["ok", "123456789"])
        assert len((await client.complete("hello", SamplingParams(n=2))).outputs) == 2


async def test_a_call_of_several_requests_is_one_and_all_its_tokens_count():
    async with running(tenant_requests_per_minute=2, tenant_tokens_per_minute=15) as harness:
        stop_clock(harness)
        async with AsyncClient(harness.target, tenant="a") as client:
            embedded = await client.embed(["hello", "hello", "hello", "hello"])
            assert embedded.usage.prompt_tokens == 20
            with pytest.raises(QuotaExceeded, match=r"tokens_per_minute of tenant 'a' \(15\) is used up"):
                await client.score("a", ["b"])


async def test_a_file_of_keys_says_otherwise(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("[tenants.a]\nmax_n = 3\n" + KEY)
    options: dict[str, Any] = {"api_keys": str(keys), "tenant_max_n": 1, "tenant_max_streams": 5}
    async with running(**options) as harness, AsyncClient(harness.target, api_key="0123456789abcdef") as client:
        assert len((await client.complete("hello", SamplingParams(n=3))).outputs) == 3
        with pytest.raises(InvalidArgument, match=r"4 is over max_n of tenant 'a' \(3\)"):
            await client.complete("hello", SamplingParams(n=4))


async def test_who_only_tokenizes_uses_nothing():
    async with running(tenant_requests_per_minute=1) as harness:
        stop_clock(harness)
        for _ in range(3):
            await harness.inference.Tokenize(inference_pb2.TokenizeRequest(text="hello"), metadata=A)
        await collect(harness.inference.Generate(request(), metadata=A))
