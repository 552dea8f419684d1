"""vllm.grpc.engine.VllmEngine: a method for each RPC. Errors are statuses with jpaged's usual details."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator
from typing import NoReturn

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from jpaged.access import entry as access
from jpaged.errors import InvalidArgument, NotFound, PermissionDenied, Unsupported
from jpaged.server.faces.completing import completed, whole_size
from jpaged.server.faces.naming import naming
from jpaged.server.faces.vllm_engine.facts import Loads, model_info_of, server_info_of
from jpaged.server.faces.vllm_engine.request import name_of, read, refuse_unsupported, size_of
from jpaged.server.faces.vllm_engine.responses import Chunks, ends_of
from jpaged.server.faces.vllm_engine.tokenizer import Bundle, bundle_of
from jpaged.server.servicer import caller_of, tenant_of
from jpaged.server.status import CallContext, answering
from jpaged.service.loaded_model import LoadedModel, Stage
from jpaged.service.records import Caller, RequestRecord
from jpaged.service.score_embed import EMBED_SAMPLING, embeddable, embedding_of
from jpaged.service.service import SMALL, Call, Service
from jpaged.types import Prompt

SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_ABORTS = 4096
_NOT_HERE = {
    "StartProfile": "profiling at run time is not supported",
    "StopProfile": "profiling at run time is not supported",
    "SubscribeKvEvents": "use GetLoads, which returns block counts",
}


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Servicer over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loads = Loads()
        self._bundle: Bundle | None = None
        self._began_s = time.monotonic()
        self._last_receive_s = 0.0

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: CallContext) -> None:
        """Stream chunks, or respond once at the end; a client disconnect aborts the request."""
        async with answering(context):
            with naming(name_of):
                async with contextlib.aclosing(self._generated(request, context)) as messages:
                    async for message in messages:
                        await context.write(message)

    async def Embed(self, request: vllm_engine_pb2.EmbedRequest, context: CallContext) -> vllm_engine_pb2.EmbedResponse:
        """Return the last token's hidden state scaled to length 1, vLLM's default pooling."""
        async with answering(context):
            self._receive()
            tenant, caller = tenant_of(context), _caller_of(context)
            record = RequestRecord(operation="embeddings", tenant=tenant, caller=caller, adapter="")
            with naming(name_of):
                async with self._service.several(None, record) as model:
                    call = Call(
                        read=lambda: (_embeddable(request, model), EMBED_SAMPLING),
                        size=len(request.tokenized.input_ids),
                        request_id=request.request_id or None,
                        tenant=tenant,
                        remaining_s=context.time_remaining(),
                        is_whole=True,
                        caller=caller,
                        record=record,
                    )
                    found = embedding_of(await self._service.complete(call, model), normalize=True)
            return vllm_engine_pb2.EmbedResponse(
                embedding=found.values, prompt_tokens=found.usage.prompt_tokens, embedding_dim=len(found.values)
            )

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: CallContext
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Return the same health as grpc.health.v1."""
        state = self._service.state
        is_healthy = state.stage is Stage.SERVING and state.failure is None
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_healthy, message=state.stage.value)

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: CallContext) -> vllm_engine_pb2.AbortResponse:
        """Abort requests in flight; unknown ids are ignored, as in vLLM."""
        async with answering(context):
            if len(request.request_ids) > MAX_ABORTS:
                raise InvalidArgument("request_ids", f"{len(request.request_ids)} are given; at most {MAX_ABORTS}")
            tenant = tenant_of(context)
            with naming(lambda field: "request_ids" if field == "request_id" else field):
                for request_id in request.request_ids:
                    with contextlib.suppress(NotFound):
                        self._service.abort(request_id, tenant)
            return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: CallContext
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Return the model's properties, fixed at startup."""
        async with answering(context):
            return model_info_of(self._service.state.loaded())

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: CallContext
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Return the server's properties, in every state."""
        async with answering(context):
            return server_info_of(self._service.state, self._last_receive_s, time.monotonic() - self._began_s)

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: CallContext
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Return a snapshot of each replica's load."""
        async with answering(context):
            return self._loads.of(self._service.state.loaded(), request)

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: CallContext) -> None:
        """Stream the files of the tokenizer, in a zip that is built once."""
        async with answering(context):
            model = self._service.state.loaded()
            if self._bundle is None:
                self._bundle = await self._service.work(lambda: bundle_of(model.tokenizer), SMALL)
            for chunk in self._bundle.chunks():
                await context.write(chunk)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: CallContext
    ) -> common_pb2.FlushCacheResponse:
        """Reset the prefix cache without waiting for requests in flight, which keep their blocks."""
        async with answering(context):
            access.require_control("FlushCache")
            model = self._service.state.serving()
            if model.config.server.disable_control:
                raise PermissionDenied("FlushCache is turned off on this server (disable_control)")
            num_blocks = await asyncio.wrap_future(model.engine.reset_prefix_cache())
            return common_pb2.FlushCacheResponse(
                success=True, message=f"removed {num_blocks} blocks from the prefix cache"
            )

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: CallContext) -> None:
        """Refuse: not supported."""
        await _refuse("StartProfile", context)

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: CallContext) -> None:
        """Refuse: not supported."""
        await _refuse("StopProfile", context)

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: CallContext) -> None:
        """Refuse: not supported."""
        await _refuse("SubscribeKvEvents", context)

    async def _generated(
        self, request: vllm_engine_pb2.GenerateRequest, context: CallContext
    ) -> AsyncGenerator[vllm_engine_pb2.GenerateResponse, None]:
        model = self._receive()
        refuse_unsupported(request, len(model.engine.replica_loads()))
        call = Call(
            read=lambda: read(request),
            size=size_of(request),
            request_id=request.request_id or None,
            tenant=tenant_of(context),
            remaining_s=context.time_remaining(),
            is_whole=not request.stream,
            caller=_caller_of(context),
        )
        told = request.sampling_params.prompt_logprobs if request.sampling_params.HasField("prompt_logprobs") else None
        if not request.stream:
            output = await completed(self._service, call)
            for message in await self._service.work(lambda: [*ends_of(output, told)], whole_size(output)):
                yield message
            return
        async with self._service.generate(call) as generation:
            chunks = Chunks(generation.prompt_token_ids, told)
            async for event in generation:
                for message in await self._service.work(functools.partial(chunks.all_of, event), chunks.size_of(event)):
                    yield message

    def _receive(self) -> LoadedModel:
        """Record the arrival of a request; return the model for it."""
        self._last_receive_s = time.time()
        return self._service.state.serving()


def _caller_of(context: CallContext) -> Caller:
    return dataclasses.replace(caller_of(context), face="vllm")


def _embeddable(request: vllm_engine_pb2.EmbedRequest, model: LoadedModel) -> Prompt:
    if not request.HasField("tokenized"):
        raise InvalidArgument("tokenized", "is missing: Embed requires token ids")
    (token_ids,) = embeddable(model.input_processor, [Prompt(token_ids=request.tokenized.input_ids)])
    return Prompt(token_ids=token_ids, pooling="last")


async def _refuse(method: str, context: CallContext) -> NoReturn:
    async with answering(context):
        raise Unsupported(f"{method}: {_NOT_HERE[method]}")
