"""The third-party APIs that a port serves, and reflection of services with messages in several descriptor pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf import descriptor_pool
from grpc import aio
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged.config import ServerOptions
from jpaged.server.compat import open_inference, vllm_engine
from jpaged.server.grpc_server import MessagesInHand
from jpaged.service.service import Service

_T = TypeVar("_T")


class Pools:
    """Combines pools for gRPC's reflection: each lookup returns the first pool's match.

    The methods are named as in `google.protobuf.descriptor_pool.DescriptorPool`, and raise KeyError likewise.
    """

    def __init__(self, pools: Sequence[Any]) -> None:
        self._pools = pools

    def FindFileByName(self, name: str) -> Any:
        return self._first(lambda pool: pool.FindFileByName(name))

    def FindFileContainingSymbol(self, name: str) -> Any:
        return self._first(lambda pool: pool.FindFileContainingSymbol(name))

    def FindMessageTypeByName(self, name: str) -> Any:
        return self._first(lambda pool: pool.FindMessageTypeByName(name))

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return message.file.pool.FindAllExtensions(message)

    def _first(self, find: Callable[[Any], _T]) -> _T:
        for pool in self._pools[:-1]:
            try:
                return find(pool)
            except KeyError:
                continue
        return find(self._pools[-1])


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
