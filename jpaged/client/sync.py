"""`Client`: for threads. Safe to share between them; one connection carries all calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from jpaged.chat import ChatOptions, ChatWords, chat_options_of
from jpaged.client import evaluations, wire
from jpaged.client.base import BaseClient, BaseStream
from jpaged.client.prefixes import PrefixCalls
from jpaged.client.routing.threads import Servers
from jpaged.client.wire import AdapterInfo, Assembler, Call, GenerateChunk, ServerInfo
from jpaged.completions import Evaluated
from jpaged.load import Load
from jpaged.types import ModelInfo, Pooling, RequestOutput, SamplingParams, Score

_T = TypeVar("_T")


class GenerateStream(BaseStream):
    """The chunks of one request, to iterate over; see `BaseStream`."""

    def __iter__(self) -> Iterator[GenerateChunk]:
        return self

    def __next__(self) -> GenerateChunk:
        while not self._ready and not self._is_closed:
            try:
                self._take(next(self._course.call))
            except grpc.RpcError as error:
                time.sleep(self._wait_s(error))
                self._begin_again()
            except StopIteration:
                self._is_closed = True
                self._course.require_end()
        if self._ready:
            return self._ready.popleft()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Client(BaseClient[GenerateStream]):
    """Speaks to one server or several, for threads; see `BaseClient`."""

    prefixes: PrefixCalls
    _reach = Servers
    _stream = GenerateStream
    _prefix_calls = PrefixCalls

    def complete(
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
    ) -> RequestOutput:
        """Runs a request to its end and returns all of it; see `generate`."""
        what = wire.prompt_of(prompt, prompt_token_ids, messages, chat_options)
        assembler = Assembler(what, sampling)
        with self._begin(what, sampling, request_id, timeout_s, whole=True, adapter=adapter) as stream:
            for chunk in stream:
                assembler.add(chunk)
        return assembler.output()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        adapter: str = "",
        **words: Unpack[ChatWords],
    ) -> RequestOutput:
        """Runs the assistant's next turn to its end and returns all of it; see `stream_chat`.

        Its outputs have `tool_calls` and `reasoning_content` beside `text`.
        """
        return self.complete(
            None,
            sampling,
            messages=messages,
            chat_options=chat_options_of(**words),
            request_id=request_id,
            timeout_s=timeout_s,
            adapter=adapter,
        )

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[Score]:
        """How likely continuations of a prompt are, each of which is a text or token ids: one score for each, in order.

        A text behind a text is tokenised with it. The prompt is computed once, and many continuations in a step.

        Args:
            adapter: the name of an adapter that the server has loaded.
            cache_salt: as in `SamplingParams`.
            priority: as in `SamplingParams`.
        """
        asker = evaluations.Asker(self._model, adapter, cache_salt, priority)
        call = evaluations.score_call(prompt, continuations, asker)
        return self._run(call)

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]:
        """Texts or token ids as vectors: hidden states behind the last norm, of the last token or the mean of all.

        Args:
            normalize: scale each vector to a length of 1.
            adapter: as in `score`, with cache_salt and priority.
        """
        asker = evaluations.Asker(self._model, adapter, cache_salt, priority)
        call = evaluations.embed_call(inputs, asker, pooling=pooling, normalize=normalize)
        return self._run(call)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """The ids that a text or a conversation becomes."""
        prompt = wire.prompt_of(text, None, messages, chat_options)
        return self._run(wire.tokenize_call(prompt, add_special_tokens=add_special_tokens, model=self._model))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text that ids stand for."""
        return self._run(wire.detokenize_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model))

    def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[bytes, ...]:
        """Return the bytes that each token adds to a text, which may be a part of a character.

        Args:
            skip_special_tokens: special tokens have no bytes.

        Raises:
            Unsupported: the server is older and returns texts alone.
        """
        return self._run(wire.token_bytes_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model))

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
        adapter: str = "",
    ) -> int:
        """Keeps a prefix computed, under a name; returns how many of its tokens. Exactly one of the two is given.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: there is nothing to pin, or no room.
            Unsupported: the server has no prefix cache.
        """
        prefix = wire.prompt_of(text, prompt_token_ids)
        return self._run(wire.pin_prefix_call(name, prefix, cache_salt, adapter))

    def unpin_prefix(self, name: str) -> None:
        """Lets a pinned prefix go.

        Raises:
            NotFound: none of that name is pinned.
        """
        self._run(wire.unpin_prefix_call(name))

    def load_adapter(self, name: str, path: str) -> int:
        """Has the server read an adapter from a path of its own, for requests that name it; returns its bytes.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: the path is missing or not understood, or too many are loaded.
            Unsupported: the server takes no adapters, or not this kind.
        """
        return self._run(wire.load_adapter_call(name, path))

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter from requests to come; those that have it go on.

        Raises:
            NotFound: there is none of that name.
        """
        self._run(wire.unload_adapter_call(name))

    def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests can have."""
        return self._run(wire.list_adapters_call())

    def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until the server takes requests, also for one that is not there yet, or that ends and comes again.

        Raises:
            Cancelled: the client was closed.
            DeadlineExceeded: it was not ready in time.
        """
        self._servers.wait_until_ready(timeout_s)

    def close(self) -> None:
        """Cancels what is open and closes the connections."""
        self._is_closed = True
        self._servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, call: Call[_T]) -> _T:
        return self._servers.run(call)
