"""The third-party APIs that a port serves."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool
from grpc import aio
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged.config import ServerOptions
from jpaged.server.faces.descriptors import Pools
from jpaged.server.faces.open_inference import servicer as open_inference
from jpaged.server.faces.vllm_engine import servicer as vllm_engine
from jpaged.server.port import MessagesInHand
from jpaged.service.service import Service


class Faces:
    """The third-party APIs enabled by the options, over one service.

    Attributes:
        names: names of the services, for health and reflection.
    """

    def __init__(self, service: Service, options: ServerOptions, max_message_bytes: int) -> None:
        self._open_inference = (
            open_inference.OpenInferenceServicer(service, MessagesInHand(max_message_bytes))
            if options.enable_open_inference
            else None
        )
        self._vllm_engine = vllm_engine.VllmEngineServicer(service) if options.enable_vllm_engine else None
        on = {
            open_inference.SERVICE_NAME: self._open_inference is not None,
            vllm_engine.SERVICE_NAME: self._vllm_engine is not None,
        }
        self.names = tuple(name for name, is_on in on.items() if is_on)

    def add_to(self, server: aio.Server) -> None:
        """Register them on a server that has not started."""
        if self._open_inference is not None:
            inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self._open_inference, server)
            server.add_registered_method_handlers(open_inference.SERVICE_NAME, open_inference.refused_methods())
        if self._vllm_engine is not None:
            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._vllm_engine, server)

    async def end(self, timeout_s: float) -> None:
        """End the calls that would wait for more client messages, within `timeout_s`."""
        if self._open_inference is not None:
            await self._open_inference.end(timeout_s)


def descriptors() -> Any:
    """Return the descriptor pools of all services on the port, for reflection."""
    return Pools((inference_pb2.DESCRIPTOR.pool, descriptor_pool.Default()))
