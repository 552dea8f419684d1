"""A server without a model: it tells all of its streams a token at one time, so many times a second, as an engine does.

python -m benchmarks.route.server --rate 1.5     prints its port; ends with its standard input
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jpaged._proto.v1 import control_pb2, control_pb2_grpc, inference_pb2

_SERVICE = "jpaged.v1.InferenceService"
_WORDS = (" the", " little", " fox", " ran", " home", ".")


class Control(control_pb2_grpc.ControlServiceServicer):
    """What a router asks before it sends calls."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._start_time = Timestamp()
        self._start_time.GetCurrentTime()

    async def GetServerInfo(self, request: Any, context: Any) -> control_pb2.GetServerInfoResponse:
        return control_pb2.GetServerInfoResponse(start_time=self._start_time, state=control_pb2.SERVER_STATE_SERVING)

    async def GetModelInfo(self, request: Any, context: Any) -> control_pb2.GetModelInfoResponse:
        return control_pb2.GetModelInfoResponse(name="none", vocab_size=32000, max_model_len=1 << 20)

    async def GetLoad(self, request: Any, context: Any) -> control_pb2.GetLoadResponse:
        return control_pb2.GetLoadResponse(num_running=len(self._speaker.streams))


class Speaker:
    """All streams of a server.

    Attributes:
        streams: those that are open, each with how many tokens it was told.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.streams: dict[Any, int] = {}
        self._step = asyncio.Event()

    async def run(self) -> None:
        """Tell a token at a time, until it is cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s += 1.0 / self._rate
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Tell tokens until nobody reads them."""
        request_id = request.request_id
        await context.send_initial_metadata((("x-jpaged-request-id", request_id),))
        self.streams[context] = 0
        try:
            while True:
                await self._step.wait()
                count = self.streams[context] = self.streams[context] + 1
                message = inference_pb2.GenerateResponse(
                    request_id=request_id,
                    text=_WORDS[count % len(_WORDS)],
                    token_ids=[1000 + count],
                    usage=inference_pb2.Usage(prompt_tokens=16, completion_tokens=count),
                )
                if count == 1:
                    message.seed = 7
                await context.write(message.SerializeToString())
        finally:
            del self.streams[context]


async def serve(rate: float) -> None:
    """Serve on a free port until standard input ends."""
    server, speaker = aio.server(), Speaker(rate)
    handlers: dict[str, Any] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            speaker.generate, request_deserializer=inference_pb2.GenerateRequest.FromString
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    control_pb2_grpc.add_ControlServiceServicer_to_server(Control(speaker), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    speaking = asyncio.create_task(speaker.run())
    await asyncio.to_thread(sys.stdin.read)
    speaking.cancel()
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve streams without a model.")
    parser.add_argument("--rate", type=float, required=True)
    asyncio.run(serve(parser.parse_args().rate))
