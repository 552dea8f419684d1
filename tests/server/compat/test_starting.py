"""What other people's services say while the model loads, and when it cannot be loaded."""

import asyncio

import grpc
import pytest
from grpc import aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from tests.server.compat import test_open_inference as open_inference
from tests.server.compat import test_vllm_engine as vllm_engine
from tests.server.harness import failure_of
from tests.server.test_lifecycle import Starting


@pytest.mark.parametrize("failure", [None, RuntimeError("no such weights")])
async def test_a_server_that_starts_tells_what_it_can_and_refuses_the_rest(failure):
    starting = Starting(failure)
    port = await starting.server.start()
    run = asyncio.create_task(starting.server.run())
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        triton = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert (await triton.ServerLive(inference_pb2.ServerLiveRequest())).live
        assert not (await triton.ServerReady(inference_pb2.ServerReadyRequest())).ready
        assert not (await triton.ModelReady(inference_pb2.ModelReadyRequest(name="fake"))).ready
        assert not (await triton.RepositoryIndex(inference_pb2.RepositoryIndexRequest())).models
        assert (await triton.ServerMetadata(inference_pb2.ServerMetadataRequest())).name == "jpaged"
        health = await vllm.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "starting")
        assert (await vllm.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())).max_num_seqs == 0
        for call in (
            triton.ModelInfer(open_inference.request()),
            triton.ModelMetadata(inference_pb2.ModelMetadataRequest(name="fake")),
            triton.ModelConfig(inference_pb2.ModelConfigRequest(name="fake")),
            vllm.Generate(vllm_engine.request()),
            vllm.Embed(vllm_engine_pb2.EmbedRequest()),
            vllm.Abort(vllm_engine_pb2.AbortRequest(request_ids=["x"])),
            vllm.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest()),
            vllm.GetLoads(vllm_engine_pb2.GetLoadsRequest()),
            vllm.GetTokenizer(common_pb2.GetTokenizerRequest()),
            vllm.FlushCache(common_pb2.FlushCacheRequest()),
        ):
            assert (await failure_of(call)).code() is grpc.StatusCode.UNAVAILABLE
        starting.release.set()
        if failure is None:
            ready = False
            while not ready:
                ready = (await triton.ModelReady(inference_pb2.ModelReadyRequest(name="fake"))).ready
            index = await triton.RepositoryIndex(inference_pb2.RepositoryIndexRequest(ready=True))
            assert [one.name for one in index.models] == ["fake"]
            starting.server.request_stop()
    assert await run == (0 if failure is None else 1)
