"""inference.GRPCInferenceService: a method for each RPC. Errors are statuses, but messages in streams.

As in Triton, a stream continues after a failed request and reports the error in `error_message`. A call with
`triton_grpc_error: true` in its metadata ends with the status instead.

Requests and responses are tensors, named as in vLLM's backend for Triton. `Responses` writes the requested tensors,
with one element per sequence.

In a stream each response has elements for all sequences; those without news are empty. Its parameter
`triton_final_response` marks the request's last response.

`InferStream` runs concurrent requests on one call. Each is answered as soon as possible, by responses that carry its
id:

    requests ──read──> a task each ──responses──> one queue ──> the call

The number of open requests is limited; more are not read. A slow reader blocks the tasks, and the events of their
requests are merged in the meantime.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc

from jpaged import json_text
from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged.errors import InvalidArgument, NotFound, Unavailable, Unsupported
from jpaged.server.compat import completed, estimate_size, naming, whole_size
from jpaged.server.compat.open_inference_request import (
    OUTPUTS,
    VERSION,
    Ask,
    add_output,
    build_config,
    build_metadata,
    parse_ask,
    require_version,
)
from jpaged.server.grpc_server import MessagesInHand, ServicerContext, abort, error_for, get_status, status_on_error
from jpaged.server.servicer import get_caller, get_tenant
from jpaged.service.calls import Call, Caller
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.service import Service, Stage
from jpaged.types import OutputEvent, PositionLogprobs, RequestOutput
from jpaged.version import __version__

FINAL = "triton_final_response"
_UNFINISHED = "None"
TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class ResponsePiece:
    """Content of one response for one sequence.

    Attributes:
        finish_reason: "None" while it is running, as in vLLM's backend.
        cumulative_logprob: sum over all tokens of the sequence so far.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: str = _UNFINISHED
    cumulative_logprob: float = 0.0


class Responses:
    """Builds the responses of one request.

    Args:
        model: name of the model, as requested.
        token_text: returns the text of a single token.
    """

    def __init__(self, ask: Ask, model: str, token_text: TokenText) -> None:
        self._ask = ask
        self._model = model
        self._token_text = token_text
        self._so_far = [ResponsePiece()] * ask.sampling.n

    def whole(self, output: RequestOutput) -> inference_pb2.ModelInferResponse:
        """Return the response of a finished request that is not streamed."""
        pieces = [
            ResponsePiece(
                text=self._ask.prefix + one.text,
                token_ids=one.token_ids,
                logprobs=one.logprobs or (),
                finish_reason=one.finish_reason or _UNFINISHED,
                cumulative_logprob=one.cumulative_logprob or 0.0,
            )
            for one in output.outputs
        ]
        return self._response(pieces, output.usage.prompt_tokens)

    def next(self, event: OutputEvent) -> inference_pb2.ModelInferResponse:
        """Return the response of an event of a streamed request."""
        before = self._so_far[event.index]
        self._so_far[event.index] = ResponsePiece(
            finish_reason=_UNFINISHED if event.finish is None else event.finish.reason.value,
            cumulative_logprob=before.cumulative_logprob
            if event.cumulative_logprob is None
            else event.cumulative_logprob,
        )
        pieces = [*self._so_far]
        pieces[event.index] = replace(
            pieces[event.index], text=event.text, token_ids=event.token_ids, logprobs=event.logprobs
        )
        response = self._response(pieces, event.usage.prompt_tokens)
        response.parameters[FINAL].bool_param = event.is_last
        return response

    def _response(self, pieces: Sequence[ResponsePiece], num_input_tokens: int) -> inference_pb2.ModelInferResponse:
        ask = self._ask
        response = inference_pb2.ModelInferResponse(model_name=self._model, model_version=VERSION, id=ask.id)
        for name in ask.outputs:
            elements = [num_input_tokens] if name == "num_input_tokens" else self._elements(name, pieces)
            add_output(response, name, OUTPUTS[name].datatype, elements, is_typed=ask.is_typed)
        return response

    def _elements(self, name: str, pieces: Sequence[ResponsePiece]) -> list[Any]:
        match name:
            case "text_output":
                return [one.text.encode() for one in pieces]
            case "finish_reason":
                return [one.finish_reason.encode() for one in pieces]
            case "cumulative_logprob":
                return [one.cumulative_logprob for one in pieces]
            case "logprobs":
                return [self._logprobs(one).encode() for one in pieces]
            case "num_output_tokens":
                return [len(one.token_ids) for one in pieces]
            case _:
                return [token_id for one in pieces for token_id in one.token_ids]

    def _logprobs(self, piece: ResponsePiece) -> str:
        """Return JSON with an object per position: token ids with their log-probabilities, ranks and texts."""
        if not self._ask.has_logprobs:
            return "null"
        return json_text.dumps(
            [
                {
                    str(one.token_id): {
                        "logprob": one.logprob,
                        "rank": one.rank,
                        "decoded_token": self._token_text(one.token_id),
                    }
                    for one in (position.chosen, *position.top, *position.asked)
                }
                for position in piece.logprobs
            ]
        )


def build_failure(ask_id: str, model: str, message: str) -> inference_pb2.ModelStreamInferResponse:
    """Return the stream response of a request that failed, or could not be parsed."""
    answer = inference_pb2.ModelInferResponse(model_name=model, model_version=VERSION, id=ask_id)
    answer.parameters[FINAL].bool_param = True
    return inference_pb2.ModelStreamInferResponse(error_message=message, infer_response=answer)


MAX_OPEN = 1024
"""Maximum open requests of one call; more wait in the client."""
_MAX_QUEUED = 16

Answer = Callable[[inference_pb2.ModelInferRequest], AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]]


class InferStream:
    """One call of ModelStreamInfer. Bound to one event loop.

    Args:
        requests: incoming requests; open ones continue after the last.
        answer: yields the responses to one request; an error of it ends the call.
    """

    def __init__(self, requests: AsyncIterator[inference_pb2.ModelInferRequest], answer: Answer) -> None:
        self._requests = requests
        self._answer = answer
        self._queue: asyncio.Queue[inference_pb2.ModelStreamInferResponse | Exception | None] = asyncio.Queue(
            _MAX_QUEUED
        )
        self._free = asyncio.Semaphore(MAX_OPEN)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reading = asyncio.create_task(self._read())
        self._finishing = asyncio.create_task(self._finish())
        self._ending: Exception | None = None

    async def responses(self) -> AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]:
        """Yield responses until all requests are answered; closing it aborts open requests.

        Raises:
            Exception: the error of a request, of reading them, or the one passed to `end`.
        """
        try:
            while (one := await self._queue.get()) is not None:
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            tasks = [self._reading, self._finishing, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, error: Exception) -> None:
        """Stop reading requests; the call ends with the error after the responses of open requests."""
        self._ending = error
        self._reading.cancel()

    async def _read(self) -> None:
        async for request in self._requests:
            await self._free.acquire()
            self._start(request)

    async def _finish(self) -> None:
        """Queue the end of the call, once no request is read any more and the open ones are answered."""
        await asyncio.wait((self._reading,))
        is_cut = self._reading.cancelled()
        failure = None if is_cut else self._reading.exception()
        while self._tasks and failure is None:
            await asyncio.wait(self._tasks)
        if failure is None or isinstance(failure, Exception):
            await self._queue.put(self._ending if is_cut else failure)

    def _start(self, request: inference_pb2.ModelInferRequest) -> None:
        task = asyncio.create_task(self._run(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: inference_pb2.ModelInferRequest) -> None:
        try:
            async with aclosing(self._answer(request)) as responses:
                async for response in responses:
                    await self._queue.put(response)
        except Exception as error:
            await self._queue.put(error)
        finally:
            self._free.release()


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
        self, request: inference_pb2.ServerLiveRequest, context: ServicerContext
    ) -> inference_pb2.ServerLiveResponse:
        """Return False only if the engine has failed."""
        return inference_pb2.ServerLiveResponse(live=self._service.state.stage is not Stage.FAILED)

    async def ServerReady(
        self, request: inference_pb2.ServerReadyRequest, context: ServicerContext
    ) -> inference_pb2.ServerReadyResponse:
        """Return the same readiness as grpc.health.v1."""
        return inference_pb2.ServerReadyResponse(ready=self._is_ready())

    async def ModelReady(
        self, request: inference_pb2.ModelReadyRequest, context: ServicerContext
    ) -> inference_pb2.ModelReadyResponse:
        """Return False for an unknown model, as Triton does."""
        return inference_pb2.ModelReadyResponse(ready=self._is_ready() and self._is_here(request.name, request.version))

    async def ServerMetadata(
        self, request: inference_pb2.ServerMetadataRequest, context: ServicerContext
    ) -> inference_pb2.ServerMetadataResponse:
        """Return name and version, in every state."""
        return inference_pb2.ServerMetadataResponse(name="jpaged", version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(
        self, request: inference_pb2.ModelMetadataRequest, context: ServicerContext
    ) -> inference_pb2.ModelMetadataResponse:
        """Return the tensors of the model: `INPUTS` and `OUTPUTS`."""
        async with status_on_error(context):
            return build_metadata(self._named(request.name, request.version))

    async def ModelConfig(
        self, request: inference_pb2.ModelConfigRequest, context: ServicerContext
    ) -> inference_pb2.ModelConfigResponse:
        """Return the tensors as Triton's model configuration."""
        async with status_on_error(context):
            return build_config(self._named(request.name, request.version))

    async def RepositoryIndex(
        self, request: inference_pb2.RepositoryIndexRequest, context: ServicerContext
    ) -> inference_pb2.RepositoryIndexResponse:
        """Return the one model, or none while it loads."""
        async with status_on_error(context):
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
        self, request: inference_pb2.ModelInferRequest, context: ServicerContext
    ) -> inference_pb2.ModelInferResponse:
        """Run a request and respond when it has ended; a client disconnect aborts it."""
        async with status_on_error(context):
            model = self._serving(request)
            ask = await self._service.run_blocking(
                lambda: parse_ask(request, self._service.state.default_sampling), request.ByteSize()
            )
            if ask.is_streamed:
                raise InvalidArgument("inputs.stream", "true requires ModelStreamInfer")
            responses = Responses(ask, model.model.name, _token_text(model))
            with naming(ask.get_name):
                call = _call(ask, _asker(context), context.time_remaining(), model=request.model_name)
                output = await completed(self._service, call)
            return await self._service.run_blocking(lambda: responses.whole(output), whole_size(output))

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[inference_pb2.ModelInferRequest], context: ServicerContext
    ) -> AsyncIterator[inference_pb2.ModelStreamInferResponse]:
        """Run requests concurrently; a client disconnect aborts all of them."""
        async with status_on_error(context):
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
                    yield build_failure(request_id, model, get_status(error_for(error)).message)

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
        ask = await self._service.run_blocking(
            lambda: parse_ask(request, self._service.state.default_sampling), request.ByteSize()
        )
        responses = Responses(ask, model.model.name, _token_text(model))
        with naming(ask.get_name):
            call = _call(ask, asker, remaining_s, model=request.model_name)
            if not ask.is_streamed:
                output = await completed(self._service, call)
                whole = await self._service.run_blocking(lambda: responses.whole(output), whole_size(output))
                whole.parameters[FINAL].bool_param = True
                yield whole
                return
            async with self._service.generate(call) as generation:
                async for event in generation:
                    size = estimate_size(event.token_ids, event.logprobs)
                    yield await self._service.run_blocking(functools.partial(responses.next, event), size)

    def _serving(self, request: inference_pb2.ModelInferRequest) -> LoadedModel:
        model = self._service.state.serving()
        self._named(request.model_name, request.model_version)
        return model

    def _named(self, name: str, version: str) -> str:
        """Return the model's name; raise NotFound if `name` is another model."""
        model = self._service.state.loaded()
        served = model.model.name
        if name not in model.names:
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


def _asker(context: ServicerContext) -> tuple[str, Caller]:
    """Return the tenant and the caller of a call."""
    return get_tenant(context), dataclasses.replace(get_caller(context), face="oip")


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
        async def answer(request: bytes, context: ServicerContext) -> NoReturn:
            await abort(context, Unsupported(f"{name}: {reason}"))

        return grpc.unary_unary_rpc_method_handler(answer, request_deserializer=bytes)

    return {name: refusing(name, reason) for name, reason in REFUSED_METHODS.items()}
