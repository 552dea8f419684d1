"""`Client`: for threads. Safe to share between them; one connection carries all calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
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


class GenerateStream:
    """The chunks of one request. Iterate over it; closing it, or letting go of it, cancels the request."""

    def __init__(self, begin: Callable[[float | None], Any], timeout_s: float | None, request_id: str) -> None:
        self.request_id = request_id
        self._is_closed = True  # until the call has begun, which can fail
        self._begin = begin
        self._attempts = Attempts(timeout_s)
        self._call = begin(timeout_s)
        self._has_begun = False
        self._is_closed = False

    def __iter__(self) -> Iterator[GenerateChunk]:
        return self

    def __next__(self) -> GenerateChunk:
        while not self._is_closed:
            try:
                chunk = wire.chunk_of(next(self._call))
            except grpc.RpcError as error:
                wait_s = None if self._has_begun else self._attempts.wait_s(error.code())
                if wait_s is None:
                    self._is_closed = True
                    raise _translated(error) from error
                time.sleep(wait_s)
                if not self._is_closed:
                    self._call = self._begin(self._attempts.remaining_s)
            else:
                self._has_begun = True
                return chunk
        raise StopIteration

    def close(self) -> None:
        """Cancels the request unless it has ended; further iteration ends at once."""
        self._is_closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()


class Client:
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
        self._channel = grpc.insecure_channel(target, options=list(CHANNEL_OPTIONS))
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
    ) -> GenerateStream:
        """Begins a request and returns its stream at once. Exactly one of the three prompts is given."""
        return self._begin(wire.prompt_of(prompt, prompt_token_ids, messages), sampling, request_id, timeout_s)

    def complete(
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
        with self._begin(what, sampling, request_id, timeout_s) as stream:
            for chunk in stream:
                assembler.add(chunk)
        return assembler.output()

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """The ids that a text or a conversation becomes."""
        prompt = wire.prompt_of(text, None, messages)
        return self._run(wire.tokenize_call(prompt, add_special_tokens=add_special_tokens, model=self._model))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text that ids stand for."""
        return self._run(wire.detokenize_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model))

    def server_info(self) -> ServerInfo:
        """What the server is; answered in every state."""
        return self._run(wire.server_info_call())

    def model_info(self) -> ModelInfo:
        """Which model is served."""
        return self._run(wire.model_info_call())

    def load(self) -> Load:
        """How busy the server is."""
        return self._run(wire.load_call())

    def abort(self, request_id: str) -> None:
        """Ends a request by its id; its stream gets a last chunk with finish reason "abort".

        Raises:
            NotFound: no such request is in flight.
        """
        self._run(wire.abort_call(request_id))

    def pin_prefix(
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
        return self._run(wire.pin_prefix_call(name, prefix, cache_salt))

    def unpin_prefix(self, name: str) -> None:
        """Lets a pinned prefix go.

        Raises:
            NotFound: none of that name is pinned.
        """
        self._run(wire.unpin_prefix_call(name))

    def wait_until_ready(self, timeout_s: float) -> None:
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
                for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        watch.cancel()
                        return
            except grpc.RpcError as error:
                if error.code() not in NOT_READY:
                    raise _translated(error) from error
            time.sleep(min(NOT_READY_PAUSE_S, max(0.0, until_s - time.monotonic())))
        raise DeadlineExceeded(f"{self._target} was not ready after {timeout_s} s")

    def close(self) -> None:
        """Cancels what is open and closes the connection."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self, prompt: Prompt, sampling: SamplingParams | None, request_id: str | None, timeout_s: float | None
    ) -> GenerateStream:
        request = wire.generate_request(prompt, sampling, request_id=request_id, model=self._model)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._require_open()
        return GenerateStream(
            lambda left_s: self._generate(request, timeout=left_s, metadata=self._metadata),
            timeout_s,
            request.request_id,
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise Cancelled("the client was closed")

    def _run(self, call: Call[_T]) -> _T:
        method = self._channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response_kind.FromString,
        )
        attempts = Attempts(self._timeout_s)
        while True:
            self._require_open()
            try:
                return call.read(method(call.request, timeout=attempts.remaining_s, metadata=self._metadata))
            except grpc.RpcError as error:
                wait_s = attempts.wait_s(error.code())
                if wait_s is None:
                    raise _translated(error) from error
            time.sleep(wait_s)


def _translated(error: grpc.RpcError) -> JpagedError:
    if not isinstance(error, grpc.Call):
        return JpagedError(str(error))
    return error_of(error.code(), error.details(), error.trailing_metadata())
