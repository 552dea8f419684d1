"""Keys, tenants and limits hold for other people's services as they do for ours; records say by which they came.

Streams of requests are asked by gRPC's client with threads. That of asyncio says INTERNAL, "Internal error from Core",
where a call has ended while it wrote to it, and forgets the status that came (grpcio 1.85): also of one that a server
refuses before it reads.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged.service.calls import RequestRecord
from tests.access.test_keys import FILE, HASHED, OTHER, TOKEN
from tests.server.compat import test_open_inference as open_inference
from tests.server.compat import test_vllm_engine as vllm_engine
from tests.server.compat.triton import GREEDY, asked, client_of, each, inputs, strings
from tests.server.harness import collect, failure_of, running

TOKENIZED = vllm_engine_pb2.TokenizedInput(input_ids=b"ab")
INFERENCE, CONTROL, OBSERVE = ((("authorization", f"Bearer {token}"),) for token in (TOKEN, OTHER, HASHED))


def requests_of(harness: Any, metadata: Any = ()) -> Iterator[Any]:
    """A call of each RPC that runs a request, one after the other."""
    vllm, triton = vllm_engine.stub_of(harness), open_inference.stub_of(harness)
    yield vllm.Generate(vllm_engine.request(), metadata=metadata)
    yield vllm.Embed(vllm_engine_pb2.EmbedRequest(tokenized=TOKENIZED), metadata=metadata)
    yield triton.ModelInfer(open_inference.request(), metadata=metadata)
    yield stream_infer(harness, (*metadata, ("triton_grpc_error", "true")))


async def stream_infer(harness: Any, metadata: Any) -> grpc.StatusCode:
    """How a ModelStreamInfer of one request ends."""

    def ask() -> grpc.StatusCode:
        with grpc.insecure_channel(harness.target) as channel:
            stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelStreamInfer(iter([open_inference.request()]), metadata=metadata)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            code: grpc.StatusCode = call.code()
            return code

    return await asyncio.to_thread(ask)


async def code_of(call: Any) -> grpc.StatusCode:
    if asyncio.iscoroutine(call):
        of_stream: grpc.StatusCode = await call
        return of_stream
    with contextlib.suppress(aio.AioRpcError):
        await (call if isinstance(call, aio.UnaryUnaryCall) else collect(call))
    code: grpc.StatusCode = await call.code()
    return code


@pytest.fixture
async def locked(tmp_path):
    """A server that wants keys."""
    (tmp_path / "keys.toml").write_text(FILE)
    async with running(api_keys=str(tmp_path / "keys.toml")) as harness:
        yield harness


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ((), grpc.StatusCode.UNAUTHENTICATED),
        (OBSERVE, grpc.StatusCode.PERMISSION_DENIED),
        ((*INFERENCE, ("x-jpaged-tenant", "bolt")), grpc.StatusCode.PERMISSION_DENIED),
        (INFERENCE, grpc.StatusCode.OK),
    ],
)
async def test_a_request_wants_a_key_that_is_for_requests(locked, metadata, code):
    for call in requests_of(locked, metadata):
        assert await code_of(call) is code


async def test_what_is_told_wants_a_key_and_any_does(locked):
    def asking(metadata: Any) -> list[Any]:
        vllm, triton = vllm_engine.stub_of(locked), open_inference.stub_of(locked)
        return [
            vllm.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), metadata=metadata),
            triton.ModelMetadata(inference_pb2.ModelMetadataRequest(name="fake"), metadata=metadata),
        ]

    for call in asking(()):
        assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
    for call in asking(OBSERVE):
        assert await code_of(call) is grpc.StatusCode.OK


async def test_probes_of_health_want_no_key(locked):
    vllm, triton = vllm_engine.stub_of(locked), open_inference.stub_of(locked)
    assert (await vllm.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
    assert (await triton.ServerLive(inference_pb2.ServerLiveRequest())).live
    assert (await triton.ServerReady(inference_pb2.ServerReadyRequest())).ready


async def test_the_cache_of_all_is_forgotten_by_those_who_control_alone(locked):
    flush = common_pb2.FlushCacheRequest()
    error = await failure_of(vllm_engine.stub_of(locked).FlushCache(flush, metadata=INFERENCE))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert error.details() == "FlushCache needs a key of the role control; the role of this key is inference"
    assert (await vllm_engine.stub_of(locked).FlushCache(flush, metadata=CONTROL)).success


async def test_a_tenant_over_its_limit_is_told_so_on_each_service():
    async with running(tenant_requests_per_minute=1) as harness:
        quotas = harness.server._gate.quotas
        assert quotas is not None
        quotas._clock = lambda: 1000.0  # a slow machine gives nothing back
        metadata = (("x-jpaged-tenant", "a"),)
        assert await code_of(next(requests_of(harness, metadata))) is grpc.StatusCode.OK
        for call in requests_of(harness, metadata):
            assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with client_of(harness) as client:
            responses = client.stream_infer(each(asked()), headers=dict(metadata))
            ((_, error),) = [one async for one in responses]
        assert error.message() == "requests_per_minute of tenant 'a' (1) is used up"


async def test_records_say_by_which_service_a_request_came(harness, monkeypatch):
    records: list[RequestRecord] = []
    kept = harness.server._service._records.observing

    def noting(record: RequestRecord, *others: Any) -> Any:
        records.append(record)
        return kept(record, *others)

    monkeypatch.setattr(harness.server._service._records, "observing", noting)
    for call in requests_of(harness, (("x-jpaged-tenant", "a"), ("traceparent", "00-1-2-01"))):
        assert await code_of(call) is grpc.StatusCode.OK
    seen = {(one.caller.face, one.operation, one.tenant, one.model, one.status) for one in records}
    assert seen == {
        ("vllm", "text_completion", "a", "fake", "OK"),
        ("vllm", "embeddings", "a", "fake", "OK"),
        ("oip", "text_completion", "a", "fake", "OK"),
    }
    assert {one.caller.trace["traceparent"] for one in records} == {"00-1-2-01"}
    assert all(one.usage.prompt_tokens for one in records)


async def test_a_client_of_triton_brings_its_key_as_a_header(locked):
    async with client_of(locked) as client:
        header = {"authorization": f"Bearer {TOKEN}"}
        result = await client.infer("fake", inputs(exclude_input_in_output=True), parameters=GREEDY, headers=header)
    assert strings(result, "text_output") == [open_inference.TEXT]
