"""inference.GRPCInferenceService: a method for each RPC. Errors are statuses, but messages in streams.

As in Triton, a stream continues after a failed request and reports the error in `error_message`. A call with
`triton_grpc_error: true` in its metadata ends with the status instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import NoReturn

import grpc

from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged.errors import InvalidArgument, NotFound, Unavailable, Unsupported
from jpaged.server.faces.completing import completed, size_of, whole_size
from jpaged.server.faces.naming import naming
from jpaged.server.faces.open_inference.model import VERSION, config_of, metadata_of, require_version
from jpaged.server.faces.open_inference.request import Ask, ask_of
from jpaged.server.faces.open_inference.responses import FINAL, Responses, TokenText, failure_of
from jpaged.server.faces.open_inference.stream import InferStream
from jpaged.server.port import MessagesInHand
from jpaged.server.servicer import caller_of, tenant_of
from jpaged.server.status import CallContext, answering, error_for, refuse, status_of
from jpaged.service.loaded_model import LoadedModel, Stage
from jpaged.service.records import Caller
from jpaged.service.service import Call, Service
from jpaged.version import __version__

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
EXTENSIONS = ("model_configuration", "schedule_policy", "parameters")
"""Triton's documented extensions that are supported; of schedule_policy only `priority` and `timeout`."""
GRPC_ERRORS = "triton_grpc_error"
_NO_SHARED_MEMORY = "shared memory is not supported: send tensors in messages"
_ONE_MODEL = "a server has one model, which never changes"
_LOGGED_ELSEWHERE = "is configured when the server is started"
REFUSED_METHODS = {
    "ModelStatistics": "use GetLoad of jpaged.v1.ControlService, or the metrics",
    "RepositoryModelLoad": f"{_ONE_MODEL}; load adapters with jpaged.v1.ControlService",
    "RepositoryModelUnload": f"{_ONE_MODEL}; unload adapters with jpaged.v1.ControlService",
    **{
        f"{kind}SharedMemory{verb}": _NO_SHARED_MEMORY
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    },
    "TraceSetting": f"tracing {_LOGGED_ELSEWHERE}",
    "LogSettings": f"logging {_LOGGED_ELSEWHERE}",
}
"""Triton's other methods, and why they are not supported."""


class OpenInferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Servicer over one service.

    Args:
        in_hand: limits the total size of stream messages in process.
    """

    def __init__(self, service: Service, in_hand: MessagesInHand) -> None:
        self._service = service
        self._in_hand = in_hand
        self._streams: set[InferStream] = set()
        self._are_closed = asyncio.Event()
        self._are_closed.set()
        self._has_ended = False

    async def ServerLive(
        self, request: inference_pb2.ServerLiveRequest, context: CallContext
    ) -> inference_pb2.ServerLiveResponse:
        """Return False only if the engine has failed."""
        return inference_pb2.ServerLiveResponse(live=self._service.state.stage is not Stage.FAILED)

    async def ServerReady(
        self, request: inference_pb2.ServerReadyRequest, context: CallContext
    ) -> inference_pb2.ServerReadyResponse:
        """Return the same readiness as grpc.health.v1."""
        return inference_pb2.ServerReadyResponse(ready=self._is_ready())

    async def ModelReady(
        self, request: inference_pb2.ModelReadyRequest, context: CallContext
    ) -> inference_pb2.ModelReadyResponse:
        """Return False for an unknown model, as Triton does."""
        return inference_pb2.ModelReadyResponse(ready=self._is_ready() and self._is_here(request.name, request.version))

    async def ServerMetadata(
        self, request: inference_pb2.ServerMetadataRequest, context: CallContext
    ) -> inference_pb2.ServerMetadataResponse:
        """Return name and version, in every state."""
        return inference_pb2.ServerMetadataResponse(name="jpaged", version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(
        self, request: inference_pb2.ModelMetadataRequest, context: CallContext
    ) -> inference_pb2.ModelMetadataResponse:
        """Return the tensors of the model: `INPUTS` and `OUTPUTS`."""
        async with answering(context):
            return metadata_of(self._named(request.name, request.version))

    async def ModelConfig(
        self, request: inference_pb2.ModelConfigRequest, context: CallContext
    ) -> inference_pb2.ModelConfigResponse:
        """Return the tensors as Triton's model configuration."""
        async with answering(context):
            return config_of(self._named(request.name, request.version))

    async def RepositoryIndex(
        self, request: inference_pb2.RepositoryIndexRequest, context: CallContext
    ) -> inference_pb2.RepositoryIndexResponse:
        """Return the one model, or none while it loads."""
        async with answering(context):
            if request.repository_name:
                raise InvalidArgument("repository_name", f"{request.repository_name!r}: repositories are not supported")
            model, is_ready = self._service.state.model, self._is_ready()
            if model is None or (request.ready and not is_ready):
                return inference_pb2.RepositoryIndexResponse()
            index = inference_pb2.RepositoryIndexResponse.ModelIndex(
                name=model.model.name,
                version=VERSION,
                state="READY" if is_ready else "UNAVAILABLE",
                reason="" if is_ready else self._service.state.stage.value,
            )
            return inference_pb2.RepositoryIndexResponse(models=[index])

    async def ModelInfer(
        self, request: inference_pb2.ModelInferRequest, context: CallContext
    ) -> inference_pb2.ModelInferResponse:
        """Run a request and respond when it has ended; a client disconnect aborts it."""
        async with answering(context):
            model = self._serving(request)
            ask = await self._service.work(lambda: ask_of(request), request.ByteSize())
            if ask.is_streamed:
                raise InvalidArgument("inputs.stream", "true requires ModelStreamInfer")
            responses = Responses(ask, model.model.name, _token_text(model))
            with naming(ask.name_of):
                call = _call(ask, _asker(context), context.time_remaining(), model=request.model_name)
                output = await completed(self._service, call)
            return await self._service.work(lambda: responses.whole(output), whole_size(output))

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[inference_pb2.ModelInferRequest], context: CallContext
    ) -> AsyncIterator[inference_pb2.ModelStreamInferResponse]:
        """Run requests concurrently; a client disconnect aborts all of them."""
        async with answering(context):
            if self._has_ended:
                raise _ended()
            asker = _asker(context)
            ends_with_status = (GRPC_ERRORS, "true") in (context.invocation_metadata() or ())

            async def answer(
                request: inference_pb2.ModelInferRequest,
            ) -> AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]:
                request_id, model = request.id, request.model_name
                try:
                    with self._in_hand.counted(request.ByteSize()) as too_much:
                        if too_much is not None:
                            raise too_much
                        async with aclosing(self._responses(request, asker, context.time_remaining())) as responses:
                            async for response in responses:
                                yield inference_pb2.ModelStreamInferResponse(infer_response=response)
                except Exception as error:
                    if ends_with_status:
                        raise
                    yield failure_of(request_id, model, status_of(error_for(error)).message)

            stream = InferStream(request_iterator, answer)
            self._streams.add(stream)
            self._are_closed.clear()
            try:
                async with aclosing(stream.responses()) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._streams.discard(stream)
                if not self._streams:
                    self._are_closed.set()

    async def end(self, timeout_s: float) -> None:
        """End the open streams with UNAVAILABLE, and wait up to `timeout_s` until the clients have the status."""
        self._has_ended = True
        for stream in self._streams:
            stream.end(_ended())
        try:
            async with asyncio.timeout(timeout_s):
                await self._are_closed.wait()
        except TimeoutError:
            return

    async def _responses(
        self, request: inference_pb2.ModelInferRequest, asker: tuple[str, Caller], remaining_s: float | None
    ) -> AsyncGenerator[inference_pb2.ModelInferResponse, None]:
        model = self._serving(request)
        ask = await self._service.work(lambda: ask_of(request), request.ByteSize())
        responses = Responses(ask, model.model.name, _token_text(model))
        with naming(ask.name_of):
            call = _call(ask, asker, remaining_s, model=request.model_name)
            if not ask.is_streamed:
                output = await completed(self._service, call)
                whole = await self._service.work(lambda: responses.whole(output), whole_size(output))
                whole.parameters[FINAL].bool_param = True
                yield whole
                return
            async with self._service.generate(call) as generation:
                async for event in generation:
                    size = size_of(event.token_ids, event.logprobs)
                    yield await self._service.work(functools.partial(responses.next, event), size)

    def _serving(self, request: inference_pb2.ModelInferRequest) -> LoadedModel:
        model = self._service.state.serving()
        self._named(request.model_name, request.model_version)
        return model

    def _named(self, name: str, version: str) -> str:
        """Return the model's name; raise NotFound if `name` is another model."""
        served = self._service.state.loaded().model.name
        if name != served:
            raise NotFound(f"model_name: {name!r} is not served here; {served!r} is")
        require_version(version)
        return served

    def _is_here(self, name: str, version: str) -> bool:
        try:
            self._named(name, version)
        except NotFound:
            return False
        return True

    def _is_ready(self) -> bool:
        state = self._service.state
        return state.stage is Stage.SERVING and state.failure is None


def _asker(context: CallContext) -> tuple[str, Caller]:
    """Return the tenant and the caller of a call."""
    return tenant_of(context), dataclasses.replace(caller_of(context), face="oip")


def _call(ask: Ask, asker: tuple[str, Caller], remaining_s: float | None, *, model: str) -> Call:
    tenant, caller = asker
    limits = [limit for limit in (remaining_s, ask.timeout_s) if limit is not None]
    return Call(
        read=lambda: (ask.prompt, ask.sampling),
        size=ask.prompt.size,
        model=model,
        tenant=tenant,
        remaining_s=min(limits, default=None),
        is_whole=not ask.is_streamed,
        adapter=ask.adapter,
        caller=caller,
    )


def _token_text(model: LoadedModel) -> TokenText:
    return lambda token_id: model.tokenizer.decode([token_id], skip_special_tokens=False)


def _ended() -> Unavailable:
    return Unavailable("the server has shut down")


def refused_methods() -> dict[str, grpc.RpcMethodHandler]:
    """Return handlers of Triton's unsupported methods: UNIMPLEMENTED, with the reason."""

    def refusing(name: str, reason: str) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: CallContext) -> NoReturn:
            await refuse(context, Unsupported(f"{name}: {reason}"))

        return grpc.unary_unary_rpc_method_handler(answer, request_deserializer=bytes)

    return {name: refusing(name, reason) for name, reason in REFUSED_METHODS.items()}
