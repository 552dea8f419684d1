"""One method for each RPC: decode, ask the service, encode. Every call ends with one status, set in one place."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from types import TracebackType

from grpc import aio

from jpaged._proto.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from jpaged.server import wire
from jpaged.server.status import CallContext, error_for, refuse
from jpaged.service.service import Service


class _Answering:
    """Turns whatever the body raises into the call's status. A cancelled call has no one to tell."""

    def __init__(self, context: CallContext) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_peer_gone = isinstance(error, aio.InternalError)
        if isinstance(error, Exception) and not is_peer_gone:
            await refuse(self._context, error_for(error))


async def responses(
    service: Service,
    message: inference_pb2.GenerateRequest,
    metadata: Iterable[tuple[str, str | bytes]],
    remaining_s: float | None = None,
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """Stream one request; closing the iterator drops it."""
    async with service.generate(wire.call_from(message, metadata, remaining_s)) as generation:
        first_only = generation.prompt_token_ids if message.return_prompt_token_ids else ()
        async for event in generation:
            yield wire.response_of(event, generation.request_id, first_only)
            first_only = ()


async def tokenized(service: Service, message: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
    """Answer Tokenize."""
    token_ids = await service.tokenize(
        lambda: wire.text_or_chat_from(message),
        wire.prompt_size(message),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        model=wire.model_from(message),
    )
    return inference_pb2.TokenizeResponse(token_ids=token_ids)


async def detokenized(service: Service, message: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
    """Answer Detokenize."""
    text = await service.detokenize(
        message.token_ids,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        model=wire.model_from(message),
    )
    return inference_pb2.DetokenizeResponse(text=text)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """jpaged.v1.InferenceService."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(self, request: inference_pb2.GenerateRequest, context: CallContext) -> None:
        """Streams one request; its blocks are free within a step, however the call ends."""
        async with _Answering(context):
            metadata = context.invocation_metadata() or ()
            async with aclosing(responses(self._service, request, metadata, context.time_remaining())) as messages:
                async for message in messages:
                    await context.write(message)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: CallContext
    ) -> inference_pb2.TokenizeResponse:
        """Checks what Generate checks, but for the length: texts may be longer than a prompt."""
        async with _Answering(context):
            return await tokenized(self._service, request)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: CallContext
    ) -> inference_pb2.DetokenizeResponse:
        """Takes more ids than a sequence has."""
        async with _Answering(context):
            return await detokenized(self._service, request)


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """jpaged.v1.ControlService."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: CallContext
    ) -> control_pb2.GetServerInfoResponse:
        """Answers in every state."""
        async with _Answering(context):
            return wire.server_info_of(self._service.state)

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: CallContext
    ) -> control_pb2.GetModelInfoResponse:
        """The facts that were fixed at start-up."""
        async with _Answering(context):
            return wire.model_info_of(self._service.state.loaded().model)

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: CallContext) -> control_pb2.GetLoadResponse:
        """A snapshot: the engine goes on meanwhile."""
        async with _Answering(context):
            engine = self._service.state.loaded().engine
            return wire.load_of(engine.load(), engine.replica_loads())

    async def Abort(self, request: control_pb2.AbortRequest, context: CallContext) -> control_pb2.AbortResponse:
        """The aborted stream, not this call, says what was generated."""
        async with _Answering(context):
            self._service.abort(request.request_id, _tenant(context))
            return control_pb2.AbortResponse()

    async def PinPrefix(
        self, request: control_pb2.PinPrefixRequest, context: CallContext
    ) -> control_pb2.PinPrefixResponse:
        """A caller that goes away changes nothing: the prefix is pinned."""
        async with _Answering(context):
            prefix, tenant = wire.prefix_from(request), _tenant(context)
            num_tokens = await self._service.pin_prefix(request.name, prefix, request.cache_salt, tenant)
            return control_pb2.PinPrefixResponse(num_pinned_tokens=num_tokens)

    async def UnpinPrefix(
        self, request: control_pb2.UnpinPrefixRequest, context: CallContext
    ) -> control_pb2.UnpinPrefixResponse:
        """Requests that share the prefix go on."""
        async with _Answering(context):
            self._service.unpin_prefix(request.name, _tenant(context))
            return control_pb2.UnpinPrefixResponse()


def _tenant(context: CallContext) -> str:
    return wire.tenant_from(context.invocation_metadata() or ())
