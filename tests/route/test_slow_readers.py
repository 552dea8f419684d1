"""Callers who do not read hold up their own streams, and a router keeps next to nothing of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.route.server import Control, Speaker
from jpaged._proto.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.route.rig import routed
from tests.server.harness import eventually

NUM_STREAMS, TEXT = 20, "x" * 8000
MAX_BYTES_OF_STREAM = 1 << 20
"""Windows of 64 KiB on either side of the router, some messages, and room."""


class Flood(Speaker):
    """Tells of each stream as much as it can, as long as somebody takes it."""

    num_messages = 0

    async def generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        self.streams[context] = 0
        try:
            while True:
                message = inference_pb2.GenerateResponse(request_id=request.request_id, text=TEXT, token_ids=[1])
                await context.write(message.SerializeToString())
                self.num_messages += 1
        finally:
            del self.streams[context]


@asynccontextmanager
async def flooding() -> AsyncIterator[tuple[str, Flood]]:
    server, speaker, healthy = aio.server(), Flood(1.0), health.aio.HealthServicer()
    read = inference_pb2.GenerateRequest.FromString
    handler: Any = grpc.unary_stream_rpc_method_handler(speaker.generate, request_deserializer=read)
    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Generate": handler}),))
    control_pb2_grpc.add_ControlServiceServicer_to_server(Control(speaker), server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", speaker
    finally:
        await server.stop(None)


async def test_a_router_keeps_little_of_streams_that_nobody_reads():
    async with flooding() as (target, speaker), routed(target) as router:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with aio.insecure_channel(router.target, options=options) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.Generate(inference_pb2.GenerateRequest(text="x")) for _ in range(NUM_STREAMS)]
            await eventually(lambda: len(speaker.streams) == NUM_STREAMS and speaker.num_messages > NUM_STREAMS)
            before = 0
            while speaker.num_messages > before:  # ends when all are held up
                before = speaker.num_messages
                assert before * len(TEXT) < NUM_STREAMS * MAX_BYTES_OF_STREAM
                await asyncio.sleep(0.5)
            assert len(speaker.streams) == router.router.counts.open == NUM_STREAMS
            for call in calls:
                call.cancel()
            await eventually(lambda: not speaker.streams and router.router.counts.open == 0)
