"""Shared base of both clients: their servers, and the state of a stream. sync.py and aio.py do the waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import grpc

from jpaged._proto.v1 import inference_pb2
from jpaged.chat import ChatKwargs, ChatOptions, build_chat_options
from jpaged.client import convert
from jpaged.client.channel import Tls, require_target
from jpaged.client.convert import GenerateChunk
from jpaged.client.routing.endpoints import get_key
from jpaged.client.routing.resumable_stream import ResumableStream
from jpaged.client.routing.retry import ResumePolicy, RetryState
from jpaged.errors import Cancelled, InternalError, InvalidArgument
from jpaged.types import EmbedsInput, ImagesInput, Prompt, SamplingParams

DEFAULT_RESUMING = ResumePolicy()
"""By default, streams look for another server for a minute."""
_StreamT = TypeVar("_StreamT", bound="BaseStream")
_T = TypeVar("_T")


class ClientOptions(TypedDict, total=False):
    """Options of `BaseClient`, by name."""

    timeout_s: float | None
    model: str | None
    tenant: str
    api_key: str
    tls: Tls | None
    proxy: str | None
    resuming: ResumePolicy | None


class BaseStream:
    """Iterator over the chunks of one request, on any number of servers. Closing or dropping it cancels the request."""

    def __init__(self, begin: Callable[[], ResumableStream], require_open: Callable[[], None], request_id: str) -> None:
        self.request_id = request_id
        self._is_closed = True  # until the call has begun, which can fail
        self._require_open = require_open
        self._ready: deque[GenerateChunk] = deque()
        self._course = self._call(begin)
        self._is_closed = False

    @property
    def num_tries(self) -> int:
        """Number of times the request was started, on any server; 1 if nothing failed."""
        return self._course.num_tries

    def close(self) -> None:
        """Cancel the request unless it has ended; further iteration ends at once."""
        self._is_closed = True
        self._ready.clear()
        self._course.call.cancel()
        self._course.end()

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    def _take(self, message: inference_pb2.GenerateResponse) -> None:
        try:
            self._ready.extend([convert.parse_chunk(one) for one in self._course.take(message)])
        except InternalError:
            self._is_closed = True
            raise

    def _wait_s(self, error: grpc.RpcError) -> float:
        """Return the delay before the request resumes; if it cannot, raise the call's error."""
        if self._course.has_ended:
            self._is_closed = True
            return 0.0
        try:
            return self._course.wait_s(error)
        except BaseException:
            self._is_closed = True
            raise

    def _begin_again(self) -> None:
        if not self._is_closed:
            self._is_closed = True  # if the retry fails
            self._require_open()
            self._call(self._course.begin_again)
            self._is_closed = False

    def _call(self, begin: Callable[[], _T]) -> _T:
        """Start a call; raise Cancelled if another thread has just closed the client."""
        try:
            return begin()
        except ValueError:  # gRPC's error for a closed channel
            self._require_open()
            raise


class BaseClient(Generic[_StreamT]):
    """Client of one server, or of several servers of one model.

    Prompts with the same beginning go to the same server, unless it has more load than the others. If a server fails,
    its streams resume on another one (`routing`). Prefixes and adapters are pinned and loaded on every server; queries
    go to any server. Every method raises the errors of `jpaged.errors` that the server raised, with their fields.

    Args:
        target: "host:port", or a target with one of gRPC's schemes ("dns:///name:port", "unix:/path"); one or several.
        timeout_s: default timeout of a call in seconds, including retries; None for no limit.
        model: name of the model, sent with every request; a server of another model answers NotFound.
        tenant: tenant of the requests, ids and pinned prefixes; by default that of the key.
        api_key: key for servers that require one.
        tls: certificates; None connects without TLS.
        proxy: URL of an HTTP proxy, or "none"; None reads grpc_proxy, https_proxy, http_proxy and no_proxy from the
            environment, as gRPC does. Connections to loopback addresses never use a proxy.
        resuming: how long a stream looks for another server if its server fails; None ends the stream.

    Attributes:
        prefixes: saves, loads and fetches cached prefixes.
    """

    _reach: Callable[..., Any]
    _stream: type[_StreamT]
    _prefix_calls: Callable[..., Any]

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        model: str | None = None,
        tenant: str = "",
        api_key: str = "",
        tls: Tls | None = None,
        proxy: str | None = None,
        resuming: ResumePolicy | None = DEFAULT_RESUMING,
    ) -> None:
        targets = (target,) if isinstance(target, str) else tuple(target)
        if not targets or len(set(targets)) < len(targets):
            raise InvalidArgument("target", f"{list(targets)} must name at least one server, and none twice")
        for name in targets:
            require_target("target", name)
        self._metadata = convert.get_metadata(tenant, api_key)
        self._is_closed = False
        self._servers = self._reach(targets, self._metadata, timeout_s, self._require_open, tls, proxy)
        self.prefixes = self._prefix_calls(self._servers, self._metadata, self._require_open)
        self._timeout_s = timeout_s
        self._model = model
        self._resuming = resuming

    def generate(
        self,
        prompt: str | EmbedsInput | ImagesInput | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        adapter: str = "",
    ) -> _StreamT:
        """Start a request and return its stream at once. Give exactly one of the three prompts.

        Args:
            prompt: the prompt as text; or `{"prompt_embeds": array}`, input embeddings `[tokens, hidden size]` as an
                array of NumPy or JAX, a tensor of PyTorch, or the bytes of a file of `torch.save`.
            sampling: sampling parameters; `SamplingParams()` by default.
            prompt_token_ids: the prompt as token ids.
            messages: the prompt as a conversation in OpenAI's format.
            chat_options: options of `messages`: tools, tool choice and reasoning.
            request_id: id for `abort`; generated by default.
            timeout_s: timeout of the request; the client's by default.
            adapter: name of an adapter loaded on the server.
        """
        what = convert.get_prompt(prompt, prompt_token_ids, messages, chat_options)
        return self._begin(what, sampling, request_id, timeout_s, adapter=adapter)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        adapter: str = "",
        **words: Unpack[ChatKwargs],
    ) -> _StreamT:
        """Start the assistant's next turn and return its stream at once.

        Each chunk has content in `text`, reasoning in `reasoning_content` and parts of tool calls in `tool_calls`. If
        the server does not know the model's format, everything is in `text`.

        Args:
            messages: the conversation, in OpenAI's format.
            words: chat options: tools, tool choice and reasoning.
        """
        what = convert.get_prompt(None, None, messages, build_chat_options(**words))
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
        request = convert.generate_request(
            prompt, sampling, request_id=request_id, model=self._model, whole=whole, adapter=adapter
        )
        self._require_open()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        endpoints = self._servers.endpoints
        key = get_key(request) if len(endpoints) > 1 else None
        tries = RetryState(endpoints, key, timeout_s, self._resuming)
        return self._stream(
            lambda: ResumableStream(request, tries, self._metadata), self._require_open, request.request_id
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise Cancelled("the client was closed")
