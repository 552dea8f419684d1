"""One method for each RPC: decode, ask the engine, encode. Every call ends with one status, set in one place."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from grpc import aio

from jpaged._proto.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from jpaged.errors import (
    AlreadyExists,
    InternalError,
    InvalidArgument,
    JpagedError,
    NotFound,
    PermissionDenied,
    QueueFull,
)
from jpaged.server import wire
from jpaged.server.status import CallContext, refuse
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.stream import Bridge, OutputStream
from jpaged.service.workers import Workers
from jpaged.types import FinishReason, OutputEvent, Request, SequenceFinish

_LOG = logging.getLogger(__name__)

_RETRY_S = 1.0
"""When to come back, where no request's end is waited for."""


class ServiceState(Protocol):
    """What the servicers ask of the server that they run in."""

    def serving(self) -> LoadedModel:
        """The loaded model, to run requests on; raises Unavailable while it loads and when the server drains."""
        ...

    def loaded(self) -> LoadedModel:
        """The loaded model, to ask about it; raises Unavailable while it loads."""
        ...

    def describe(self) -> control_pb2.GetServerInfoResponse: ...


class _Answering:
    """Turns whatever the body raises into the call's status. A cancelled call has no one to tell."""

    def __init__(self, context: CallContext) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, JpagedError):
            await refuse(self._context, error)
        is_peer_gone = isinstance(error, aio.InternalError)
        if isinstance(error, Exception) and not is_peer_gone:
            _LOG.error("a call failed", exc_info=error)
            await refuse(self._context, InternalError(f"{type(error).__name__}: {error}"))


def _tenant(serving: LoadedModel, context: CallContext) -> str:
    """Whose ids, names and prefixes a call speaks of; "" for everybody's where tenants are not kept apart."""
    tenant = wire.tenant_from(context.invocation_metadata() or ())
    return tenant if serving.config.server.isolate_tenants else ""


def _check_model(serving: LoadedModel, message: inference_pb2.GenerateRequest | _TokenMessage) -> None:
    if message.HasField("model") and message.model != serving.model.name:
        raise NotFound(f"model: {message.model!r} is not served here; {serving.model.name!r} is")


_TokenMessage = inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest


@dataclass(slots=True, eq=False)
class _Admission:
    """One Generate call that was let in.

    The engine knows a request by a name of ours, which is never used twice: an id that a caller uses again at once must
    not meet the end of its first request.

    Attributes:
        tenant: whose request it is.
        cache_tenant: whose id it is, and whose prefixes it may share.
        preparing: makes the engine's request of the message; None once the engine has it.
    """

    request_id: str
    engine_id: str
    deadline_s: float | None
    tenant: str
    cache_tenant: str
    stream: OutputStream
    preparing: asyncio.Task[Request] | None = None

    def end(self, finish: SequenceFinish | None = None, error: JpagedError | None = None) -> None:
        """Ends the stream for its reader, after what has come so far; it need not wait for its request to be made."""
        self.stream.add(OutputEvent(self.engine_id, finish=finish, is_last=True, error=error))
        if self.preparing is not None:
            self.preparing.cancel()


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """jpaged.v1.InferenceService.

    Attributes:
        workers: threads for what grows with a request.
        is_idle: set while no Generate call is open; for the server to wait on, never to set.
    """

    def __init__(self, host: ServiceState, bridge: Bridge) -> None:
        self._host = host
        self._bridge = bridge
        self._counter = itertools.count()
        self._open: dict[tuple[str, str], _Admission] = {}
        self.workers = Workers()
        self._num_calls = 0
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    def end_open_calls(self, error: JpagedError) -> None:
        """Ends every open Generate call with `error`, after what it already has to send."""
        for admission in self._open.values():
            admission.end(error=error)

    def abort(self, serving: LoadedModel, tenant: str, request_id: str) -> bool:
        """Ends a request by its caller's id; False when the tenant has none in flight."""
        admission = self._open.get((tenant, request_id))
        if admission is None:
            return False
        if admission.preparing is None:
            return serving.engine.abort(admission.engine_id)
        admission.end(SequenceFinish(FinishReason.ABORT))
        return True

    async def Generate(self, request: inference_pb2.GenerateRequest, context: CallContext) -> None:
        """Streams one request; its blocks are free within a step, however the call ends."""
        self._num_calls += 1
        self.is_idle.clear()
        try:
            async with _Answering(context):
                serving = self._host.serving()
                _check_model(serving, request)
                admission = self._admit(serving, request, context)
                try:
                    await self._stream(serving, admission, request, context)
                finally:
                    self._forget(admission)
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self.is_idle.set()

    def _admit(self, serving: LoadedModel, message: inference_pb2.GenerateRequest, context: CallContext) -> _Admission:
        request_id = wire.request_id_from(message) or uuid.uuid4().hex
        cache_tenant = _tenant(serving, context)
        other = self._open.get((cache_tenant, request_id))
        if other is not None and not other.stream.is_ended:  # one that has ended may not be read yet
            raise AlreadyExists(f"request_id: a request {request_id!r} is in flight")
        self._require_readers(serving)
        remaining_s: float | None = context.time_remaining()
        admission = _Admission(
            request_id=request_id,
            engine_id=f"{next(self._counter)}/{request_id}",
            deadline_s=None if remaining_s is None else serving.engine.clock() + remaining_s,
            tenant=wire.tenant_from(context.invocation_metadata() or ()),
            cache_tenant=cache_tenant,
            stream=self._bridge.open(),
        )
        self._open[cache_tenant, request_id] = admission
        return admission

    def _require_readers(self, serving: LoadedModel) -> None:
        """Bounds the calls whose requests have ended and whose answers, which are kept, nobody reads.

        Raises:
            QueueFull: there are more open calls than requests in flight, by as many again.
        """
        limit = 2 * serving.engine.max_num_in_flight
        if self._num_calls > limit:
            raise QueueFull(
                f"{self._num_calls - 1} calls are open, the limit is {limit}; at least half are answered and not read",
                retry_after_s=_RETRY_S,
            )

    def _forget(self, admission: _Admission) -> None:
        """Sets an id free; a second time it may be someone else's."""
        key = admission.cache_tenant, admission.request_id
        if self._open.get(key) is admission:
            del self._open[key]

    async def _stream(
        self,
        serving: LoadedModel,
        admission: _Admission,
        message: inference_pb2.GenerateRequest,
        context: CallContext,
    ) -> None:
        request = await self._prepare(serving, admission, message)
        first_only: tuple[int, ...] = ()
        if request is not None:
            serving.engine.submit(request, admission.stream.put)
            first_only = request.prompt_token_ids if message.return_prompt_token_ids else ()
        is_ended = False
        try:
            while not is_ended:
                event = await admission.stream.read()
                if event.is_last:
                    is_ended = True
                    self._forget(admission)
                await context.write(wire.response_of(event, admission.request_id, first_only))
                first_only = ()
        finally:
            if not is_ended:
                serving.engine.drop(admission.engine_id)

    async def _prepare(
        self, serving: LoadedModel, admission: _Admission, message: inference_pb2.GenerateRequest
    ) -> Request | None:
        """Makes the engine's request; None when the stream was ended meanwhile."""
        making = self.workers.run(lambda: _make_request(serving, admission, message), wire.prompt_size(message))
        admission.preparing = asyncio.create_task(making)
        try:
            request = await admission.preparing
            return None if admission.stream.is_ended else request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not admission.stream.is_ended or (task is not None and task.cancelling()):
                raise  # it is the call that was cancelled
            return None
        finally:
            admission.preparing = None

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: CallContext
    ) -> inference_pb2.TokenizeResponse:
        """Checks what Generate checks, but for the length: texts may be longer than a prompt."""
        async with _Answering(context):
            serving = self._host.serving()
            _check_model(serving, request)
            return await self.workers.run(lambda: _tokenize(serving, request), wire.prompt_size(request))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: CallContext
    ) -> inference_pb2.DetokenizeResponse:
        """Takes more ids than a sequence has."""
        async with _Answering(context):
            serving = self._host.serving()
            _check_model(serving, request)
            return await self.workers.run(lambda: _detokenize(serving, request), len(request.token_ids))


def _make_request(serving: LoadedModel, admission: _Admission, message: inference_pb2.GenerateRequest) -> Request:
    prompt, sampling = wire.prompt_from(message), wire.sampling_from(message.sampling)
    request = serving.input_processor.make_request(
        request_id=admission.engine_id,
        sampling=sampling,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        messages=prompt.messages,
        deadline_s=admission.deadline_s,
        tenant=admission.tenant,
    )
    return dataclasses.replace(request, cache_tenant=admission.cache_tenant)


def _tokenize(serving: LoadedModel, message: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
    match message.WhichOneof("input"):
        case "text":
            is_adding = message.add_special_tokens if message.HasField("add_special_tokens") else True
            token_ids = serving.input_processor.tokenize(message.text, add_special_tokens=is_adding)
        case "chat":
            if message.HasField("add_special_tokens"):
                raise InvalidArgument("add_special_tokens", "goes with text only: a chat template brings its own")
            token_ids = serving.input_processor.tokenize_chat(wire.messages_from(message.chat))
        case _:
            raise InvalidArgument("input", "is missing: set text or chat")
    return inference_pb2.TokenizeResponse(token_ids=token_ids)


def _detokenize(serving: LoadedModel, message: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
    is_skipping = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    text = serving.input_processor.detokenize(message.token_ids, skip_special_tokens=is_skipping)
    return inference_pb2.DetokenizeResponse(text=text)


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """jpaged.v1.ControlService."""

    def __init__(self, host: ServiceState, inference: InferenceServicer) -> None:
        self._host = host
        self._inference = inference

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: CallContext
    ) -> control_pb2.GetServerInfoResponse:
        """Answers in every state."""
        async with _Answering(context):
            return self._host.describe()

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: CallContext
    ) -> control_pb2.GetModelInfoResponse:
        """The facts that were fixed at start-up."""
        async with _Answering(context):
            return wire.model_info_of(self._host.loaded().model)

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: CallContext) -> control_pb2.GetLoadResponse:
        """A snapshot: the engine goes on meanwhile."""
        async with _Answering(context):
            engine = self._host.loaded().engine
            return wire.load_of(engine.load(), engine.replica_loads())

    async def Abort(self, request: control_pb2.AbortRequest, context: CallContext) -> control_pb2.AbortResponse:
        """The aborted stream, not this call, says what was generated."""
        async with _Answering(context):
            serving = self._controlled("Abort", self._host.loaded())
            if not request.request_id:
                raise InvalidArgument("request_id", "is empty")
            if not self._inference.abort(serving, _tenant(serving, context), request.request_id):
                raise NotFound(f"request_id: no request {request.request_id!r} is in flight")
            return control_pb2.AbortResponse()

    async def PinPrefix(
        self, request: control_pb2.PinPrefixRequest, context: CallContext
    ) -> control_pb2.PinPrefixResponse:
        """A caller that goes away changes nothing: the prefix is pinned."""
        async with _Answering(context):
            serving = self._controlled("PinPrefix", self._host.serving())
            tenant = _tenant(serving, context)
            name, prefix = wire.pin_name_from(request), wire.prefix_from(request)

            def pin() -> Future[int]:
                token_ids = serving.input_processor.prefix(text=prefix.text, token_ids=prefix.token_ids)
                return serving.engine.pin_prefix(name, token_ids, request.cache_salt, tenant)

            pinned = await self._inference.workers.run(pin, prefix.size)
            num_tokens = await asyncio.shield(asyncio.wrap_future(pinned))
            return control_pb2.PinPrefixResponse(num_pinned_tokens=num_tokens)

    async def UnpinPrefix(
        self, request: control_pb2.UnpinPrefixRequest, context: CallContext
    ) -> control_pb2.UnpinPrefixResponse:
        """Requests that share the prefix go on."""
        async with _Answering(context):
            serving = self._controlled("UnpinPrefix", self._host.serving())
            name = wire.pin_name_from(request)
            if not serving.engine.unpin_prefix(name, _tenant(serving, context)):
                raise NotFound(f"name: no prefix {name!r} is pinned")
            return control_pb2.UnpinPrefixResponse()

    @staticmethod
    def _controlled(method: str, serving: LoadedModel) -> LoadedModel:
        """The server, for a call that acts on it by name."""
        if serving.config.server.disable_control:
            raise PermissionDenied(f"{method} is turned off on this server (disable_control)")
        return serving
