"""What both clients share: the methods of a channel, and what a stream keeps. Waiting is in sync.py and aio.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2_grpc

from jpaged._proto.v1 import control_pb2_grpc, inference_pb2_grpc
from jpaged.chat import ChatOptions, ChatWords, chat_options_of
from jpaged.client import wire
from jpaged.client.channel import CHANNEL_OPTIONS, Attempts, require_target
from jpaged.client.failures import translated
from jpaged.errors import Cancelled
from jpaged.types import Prompt, SamplingParams

_StreamT = TypeVar("_StreamT", bound="BaseStream")


class BaseStream:
    """The chunks of one request. Iterate over it; closing it, or letting go of it, cancels the request."""

    def __init__(self, begin: Callable[[float | None], Any], timeout_s: float | None, request_id: str) -> None:
        self.request_id = request_id
        self._is_closed = True  # until the call has begun, which can fail
        self._begin = begin
        self._attempts = Attempts(timeout_s)
        self._call = begin(timeout_s)
        self._has_begun = False
        self._is_closed = False

    def close(self) -> None:
        """Cancels the request unless it has ended; further iteration ends at once."""
        self._is_closed = True
        self._call.cancel()

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    def _wait_s(self, error: grpc.RpcError) -> float:
        """Returns how long to wait before the call begins again; where it does not, raises what it ended with."""
        wait_s = None if self._has_begun else self._attempts.wait_s(error.code())
        if wait_s is None:
            self._is_closed = True
            raise translated(error) from error
        return wait_s

    def _begin_again(self) -> None:
        if not self._is_closed:
            self._call = self._begin(self._attempts.remaining_s)


class BaseClient(Generic[_StreamT]):
    """Speaks to one server.

    Args:
        target: "host:port", or a target with one of gRPC's schemes ("dns:///name:port", "unix:/path").
        timeout_s: what a call may take when it brings no timeout of its own; None is no limit.
        model: sent along with every request: a server of another model answers NotFound.
        tenant: whose requests, ids and pinned prefixes these are; that of the key when left out.
        api_key: what a server with keys lets this client in with.

    Every method raises the errors of `jpaged.errors` that the server raised, with their fields.
    """

    _connect: Callable[..., Any]
    _stream: type[_StreamT]

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = None,
        model: str | None = None,
        tenant: str = "",
        api_key: str = "",
    ) -> None:
        require_target("target", target)
        self._channel = self._connect(target, options=list(CHANNEL_OPTIONS))
        inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        control = control_pb2_grpc.ControlServiceStub(self._channel)
        self._methods: Mapping[str, Any] = vars(inference) | vars(control)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._target = target
        self._is_closed = False
        self._timeout_s = timeout_s
        self._model = model
        self._metadata = wire.metadata_of(tenant, api_key)

    def generate(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        adapter: str = "",
    ) -> _StreamT:
        """Begins a request and returns its stream at once. Exactly one of the three prompts is given.

        Args:
            chat_options: with messages alone: tools, and how the model is to call them and to think.
            adapter: the name of an adapter that the server has loaded.
        """
        what = wire.prompt_of(prompt, prompt_token_ids, messages, chat_options)
        return self._begin(what, sampling, request_id, timeout_s, adapter=adapter)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        adapter: str = "",
        **words: Unpack[ChatWords],
    ) -> _StreamT:
        """Begins the assistant's next turn and returns its stream at once.

        Chunks have what the model says in `text`, and apart from it what it thinks in `reasoning_content` and parts of
        what it calls in `tool_calls`, where the server knows how the model writes them.

        Args:
            messages: as OpenAI's API has them.
            words: tools, and how the model is to call them and to think.
        """
        what = wire.prompt_of(None, None, messages, chat_options_of(**words))
        return self._begin(what, sampling, request_id, timeout_s, adapter=adapter)

    def _begin(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        request_id: str | None,
        timeout_s: float | None,
        *,
        whole: bool = False,
        adapter: str = "",
    ) -> _StreamT:
        request = wire.generate_request(
            prompt, sampling, request_id=request_id, model=self._model, whole=whole, adapter=adapter
        )
        self._require_open()
        return self._stream(
            lambda left_s: self._methods["Generate"](request, timeout=left_s, metadata=self._metadata),
            self._timeout_s if timeout_s is None else timeout_s,
            request.request_id,
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise Cancelled("the client was closed")
