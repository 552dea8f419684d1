"""What both clients share: their servers, and what a stream keeps. Waiting is in sync.py and aio.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack

import grpc

from jpaged._proto.v1 import inference_pb2
from jpaged.chat import ChatOptions, ChatWords, chat_options_of
from jpaged.client import wire
from jpaged.client.channel import require_target
from jpaged.client.routing.course import Course
from jpaged.client.routing.endpoints import key_of
from jpaged.client.routing.tries import Resuming, Tries
from jpaged.client.tls import Tls
from jpaged.client.wire import GenerateChunk
from jpaged.errors import Cancelled, InternalError, InvalidArgument
from jpaged.types import Prompt, SamplingParams

DEFAULT_RESUMING = Resuming()
"""Streams look for a server for a minute."""
_StreamT = TypeVar("_StreamT", bound="BaseStream")
_T = TypeVar("_T")


class BaseStream:
    """The chunks of one request, whichever servers run it. Iterate over it; closing or dropping it cancels it."""

    def __init__(self, begin: Callable[[], Course], require_open: Callable[[], None], request_id: str) -> None:
        self.request_id = request_id
        self._is_closed = True  # until the call has begun, which can fail
        self._require_open = require_open
        self._ready: deque[GenerateChunk] = deque()
        self._course = self._call(begin)
        self._is_closed = False

    @property
    def num_tries(self) -> int:
        """How often it was begun, at this server or at another: once where nothing went wrong."""
        return self._course.num_tries

    def close(self) -> None:
        """Cancels the request unless it has ended; further iteration ends at once."""
        self._is_closed = True
        self._ready.clear()
        self._course.call.cancel()
        self._course.end()

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    def _take(self, message: inference_pb2.GenerateResponse) -> None:
        try:
            self._ready.extend([wire.chunk_of(one) for one in self._course.take(message)])
        except InternalError:
            self._is_closed = True
            raise

    def _wait_s(self, error: grpc.RpcError) -> float:
        """Returns how long to wait before the request goes on; where it does not, raises what its call ended with."""
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
            self._is_closed = True  # where that fails
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
    """Speaks to one server, or to several of one model.

    Requests go to a server that is there, to the same one where they begin alike, unless it is busier than others; what
    is lost with a server goes on at another (`routing`). Prefixes and adapters are pinned and loaded on each in turn;
    whatever asks for facts asks any.

    Args:
        target: "host:port", or a target with one of gRPC's schemes ("dns:///name:port", "unix:/path"); one, or several.
        timeout_s: what a call may take when it brings no timeout of its own, all its tries together; None is no limit.
        model: sent along with every request: a server of another model answers NotFound.
        tenant: whose requests, ids and pinned prefixes these are; that of the key when left out.
        api_key: what a server with keys lets this client in with.
        tls: whom it believes and what it shows; None connects in clear.
        proxy: URL of an HTTP proxy, or "none"; None reads grpc_proxy, https_proxy, http_proxy and no_proxy of the
            environment, as gRPC does. Loopback addresses are always connected to directly.
        resuming: how long a stream whose server is gone looks for one to go on with; None ends it with the server.

    Every method raises the errors of `jpaged.errors` that the server raised, with their fields.

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
        resuming: Resuming | None = DEFAULT_RESUMING,
    ) -> None:
        targets = (target,) if isinstance(target, str) else tuple(target)
        if not targets or len(set(targets)) < len(targets):
            raise InvalidArgument("target", f"{list(targets)} must name at least one server, and none twice")
        for name in targets:
            require_target("target", name)
        self._metadata = wire.metadata_of(tenant, api_key)
        self._is_closed = False
        self._servers = self._reach(targets, self._metadata, timeout_s, self._require_open, tls, proxy)
        self.prefixes = self._prefix_calls(self._servers, self._metadata, self._require_open)
        self._timeout_s = timeout_s
        self._model = model
        self._resuming = resuming

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
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        tries = Tries(self._servers.endpoints, key_of(request), timeout_s, self._resuming)
        return self._stream(lambda: Course(request, tries, self._metadata), self._require_open, request.request_id)

    def _require_open(self) -> None:
        if self._is_closed:
            raise Cancelled("the client was closed")
