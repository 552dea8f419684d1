"""`AsyncClient`: for asyncio. The same calls as `Client`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from jpaged._proto.v1 import inference_pb2
from jpaged.client import wire
from jpaged.client.channel import CHANNEL_OPTIONS, NOT_READY, NOT_READY_PAUSE_S, Attempts, require_target
from jpaged.client.failures import error_of
from jpaged.client.wire import Assembler, Call, GenerateChunk, ServerInfo
from jpaged.errors import Cancelled, DeadlineExceeded, JpagedError
from jpaged.load import Load
from jpaged.types import ModelInfo, Prompt, RequestOutput, SamplingParams

_T = TypeVar("_T")


class AsyncGenerateStream:
    """The chunks of one request. Iterate over it; closing it, or letting go of it, cancels the request."""

    def __init__(self, begin: Callable[[float | None], Any], timeout_s: float | None, request_id: str) -> None:
        self.request_id = request_id
        self._is_closed = True  # until the call has begun, which can fail
        self._begin = begin
        self._attempts = Attempts(timeout_s)
        self._call = begin(timeout_s)
        self._messages = aiter(self._call)
        self._has_begun = False
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[GenerateChunk]:
        return self

    async def __anext__(self) -> GenerateChunk:
        while not self._is_closed:
            try:
                chunk = wire.chunk_of(await anext(self._messages))
            except asyncio.CancelledError as error:
                if self._is_closed:  # by another task: grpc.aio tells a reader of a closed call this way
                    break
                self._is_closed = True
                _refuse_closed(error)
                raise
            except aio.AioRpcError as error:
                wait_s = None if self._has_begun else self._attempts.wait_s(error.code())
                if wait_s is None:
                    self._is_closed = True
                    raise _translated(error) from error
                await asyncio.sleep(wait_s)
                if not self._is_closed:
                    self._call = self._begin(self._attempts.remaining_s)
                    self._messages = aiter(self._call)
            else:
                self._has_begun = True
                return chunk
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancels the request unless it has ended; further iteration ends at once."""
        self._is_closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()


class AsyncClient:
    """Speaks to one server.

    Args:
        target: "host:port", or a target with one of gRPC's schemes ("dns:///name:port", "unix:/path").
        timeout_s: what a call may take when it brings no timeout of its own; None is no limit.
        model: sent along with every request: a server of another model answers NotFound.
        tenant: whose requests, ids and pinned prefixes these are.

    Every method raises the errors of `jpaged.errors` that the server raised, with their fields.
    """

    def __init__(
        self, target: str, *, timeout_s: float | None = None, model: str | None = None, tenant: str = ""
    ) -> None:
        require_target("target", target)
        self._channel = aio.insecure_channel(target, options=list(CHANNEL_OPTIONS))
        self._generate = self._channel.unary_stream(
            wire.GENERATE_PATH,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        self._watch = self._channel.unary_stream(
            wire.WATCH_PATH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        self._target = target
        self._is_closed = False
        self._timeout_s = timeout_s
        self._model = model
        self._metadata = wire.metadata_of(tenant)

    def generate(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerateStream:
        """Begins a request and returns its stream at once. Exactly one of the three prompts is given."""
        return self._begin(wire.prompt_of(prompt, prompt_token_ids, messages), sampling, request_id, timeout_s)

    async def complete(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Runs a request to its end and returns all of it."""
        what = wire.prompt_of(prompt, prompt_token_ids, messages)
        assembler = Assembler(what, sampling)
        async with self._begin(what, sampling, request_id, timeout_s) as stream:
            async for chunk in stream:
                assembler.add(chunk)
        return assembler.output()

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """The ids that a text or a conversation becomes."""
        prompt = wire.prompt_of(text, None, messages)
        return await self._run(wire.tokenize_call(prompt, add_special_tokens=add_special_tokens, model=self._model))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text that ids stand for."""
        return await self._run(
            wire.detokenize_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model)
        )

    async def server_info(self) -> ServerInfo:
        """What the server is; answered in every state."""
        return await self._run(wire.server_info_call())

    async def model_info(self) -> ModelInfo:
        """Which model is served."""
        return await self._run(wire.model_info_call())

    async def load(self) -> Load:
        """How busy the server is."""
        return await self._run(wire.load_call())

    async def abort(self, request_id: str) -> None:
        """Ends a request by its id; its stream gets a last chunk with finish reason "abort".

        Raises:
            NotFound: no such request is in flight.
        """
        await self._run(wire.abort_call(request_id))

    async def pin_prefix(
        self,
        name: str,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> int:
        """Keeps a prefix computed, under a name; returns how many of its tokens. Exactly one of the two is given.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: there is nothing to pin, or no room.
            Unsupported: the server has no prefix cache.
        """
        prefix = wire.prompt_of(text, prompt_token_ids)
        return await self._run(wire.pin_prefix_call(name, prefix, cache_salt))

    async def unpin_prefix(self, name: str) -> None:
        """Lets a pinned prefix go.

        Raises:
            NotFound: none of that name is pinned.
        """
        await self._run(wire.unpin_prefix_call(name))

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until the server takes requests, also for one that is not there yet, or that ends and comes again.

        Raises:
            Cancelled: the client was closed.
            DeadlineExceeded: it was not ready in time.
        """
        until_s = time.monotonic() + timeout_s
        while (remaining_s := until_s - time.monotonic()) > 0:
            self._require_open()
            watch = self._watch(health_pb2.HealthCheckRequest(), timeout=remaining_s, wait_for_ready=True)
            try:
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        watch.cancel()
                        return
            except grpc.RpcError as error:
                if error.code() not in NOT_READY:
                    raise _translated(error) from error
            except asyncio.CancelledError as error:
                _refuse_closed(error)
                raise
            await asyncio.sleep(min(NOT_READY_PAUSE_S, max(0.0, until_s - time.monotonic())))
        raise DeadlineExceeded(f"{self._target} was not ready after {timeout_s} s")

    async def close(self) -> None:
        """Cancels what is open and closes the connection."""
        self._is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _begin(
        self, prompt: Prompt, sampling: SamplingParams | None, request_id: str | None, timeout_s: float | None
    ) -> AsyncGenerateStream:
        request = wire.generate_request(prompt, sampling, request_id=request_id, model=self._model)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._require_open()
        return AsyncGenerateStream(
            lambda left_s: self._generate(request, timeout=left_s, metadata=self._metadata),
            timeout_s,
            request.request_id,
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise _closed()

    async def _run(self, call: Call[_T]) -> _T:
        method = self._channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response_kind.FromString,
        )
        attempts = Attempts(self._timeout_s)
        while True:
            self._require_open()
            try:
                return call.read(await method(call.request, timeout=attempts.remaining_s, metadata=self._metadata))
            except aio.AioRpcError as error:
                wait_s = attempts.wait_s(error.code())
                if wait_s is None:
                    raise _translated(error) from error
            except asyncio.CancelledError as error:
                _refuse_closed(error)
                raise
            await asyncio.sleep(wait_s)


def _closed() -> Cancelled:
    return Cancelled("the client was closed")


def _refuse_closed(error: asyncio.CancelledError) -> None:
    """Raises Cancelled unless this task is cancelled: grpc.aio says the same where the channel was closed."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise _closed() from error


def _translated(error: grpc.RpcError) -> JpagedError:
    if not isinstance(error, aio.AioRpcError):
        return JpagedError(str(error))
    return error_of(error.code(), error.details(), error.trailing_metadata())
