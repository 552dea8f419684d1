"""`Client`: blocking calls. Threads may share one; one connection per server carries all calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from jpaged.chat import ChatKwargs, ChatOptions, build_chat_options
from jpaged.client import convert
from jpaged.client.base import BaseClient, BaseStream
from jpaged.client.convert import AdapterInfo, Assembler, GenerateChunk, ServerInfo, UnaryCall
from jpaged.client.prefixes import PrefixCalls
from jpaged.client.routing.servers import Servers
from jpaged.outputs import Evaluated
from jpaged.server_load import Load
from jpaged.types import EmbedsInput, ImagesInput, ModelInfo, Pooling, RequestOutput, SamplingParams, Score

_T = TypeVar("_T")


class GenerateStream(BaseStream):
    """Iterator over the chunks of one request; see `BaseStream`."""

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
    """Client of one or several servers, with blocking calls. Thread-safe.

        with Client("localhost:50051") as client:
            output = client.complete("Hello", SamplingParams(max_tokens=32))
            for chunk in client.generate("Hello"): ...

    Arguments and errors: see `BaseClient`.
    """

    prefixes: PrefixCalls
    _reach = Servers
    _stream = GenerateStream
    _prefix_calls = PrefixCalls

    def complete(
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
    ) -> RequestOutput:
        """Run a request to its end and return the complete output; arguments as in `generate`."""
        what = convert.get_prompt(prompt, prompt_token_ids, messages, chat_options)
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
        **words: Unpack[ChatKwargs],
    ) -> RequestOutput:
        """Run the assistant's next turn to its end and return the complete output; see `stream_chat`.

        Its outputs have `tool_calls` and `reasoning_content` in addition to `text`.
        """
        return self.complete(
            None,
            sampling,
            messages=messages,
            chat_options=build_chat_options(**words),
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
        """Return the log-likelihood of each continuation of a prompt; continuations are texts or token ids.

        A text continuation is tokenized together with a text prompt. The prompt is computed once, and many
        continuations share a step.

        Args:
            adapter: name of an adapter loaded on the server.
            cache_salt: as in `SamplingParams`.
            priority: as in `SamplingParams`.
        """
        asker = convert.CallOptions(self._model, adapter, cache_salt, priority)
        call = convert.score_call(prompt, continuations, asker)
        return self._run(call)

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]:
        """Return vectors of texts or token ids: the model's own, or hidden states that are pooled another way.

        Args:
            pooling: "last" for the final hidden state of the last token, "mean" for the mean of all; None for the
                model's own pooling.
            normalize: scale each vector to length 1; None leaves it to the model.
            adapter: as in `score`, with cache_salt and priority.
        """
        asker = convert.CallOptions(self._model, adapter, cache_salt, priority)
        call = convert.embed_call(inputs, asker, pooling=pooling, normalize=normalize)
        return self._run(call)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation."""
        prompt = convert.get_prompt(text, None, messages, chat_options)
        return self._run(convert.tokenize_call(prompt, add_special_tokens=add_special_tokens, model=self._model))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._run(convert.detokenize_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model))

    def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[bytes, ...]:
        """Return the bytes that each token adds to a text, which may be a part of a character.

        Args:
            skip_special_tokens: special tokens have no bytes.

        Raises:
            Unsupported: the server is older and returns texts alone.
        """
        return self._run(
            convert.token_bytes_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model)
        )

    def server_info(self) -> ServerInfo:
        """Return the server's properties and state; works in every state."""
        return self._run(convert.server_info_call())

    def model_info(self) -> ModelInfo:
        """Return the properties of the served model."""
        return self._run(convert.model_info_call())

    def load(self) -> Load:
        """Return the load of the server."""
        return self._run(convert.load_call())

    def abort(self, request_id: str) -> None:
        """Abort a request by its id; its stream gets a last chunk with finish reason "abort".

        Raises:
            NotFound: no such request is in flight.
        """
        self._run(convert.abort_call(request_id))

    def pin_prefix(
        self,
        name: str,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> int:
        """Keep a prefix in the prefix cache under a name; return the number of pinned tokens.

        Give exactly one of text and prompt_token_ids.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: there is nothing to pin, or no room.
            Unsupported: the server has no prefix cache.
        """
        prefix = convert.get_prompt(text, prompt_token_ids)
        return self._run(convert.pin_prefix_call(name, prefix, cache_salt, adapter))

    def unpin_prefix(self, name: str) -> None:
        """Unpin a prefix.

        Raises:
            NotFound: no prefix of that name is pinned.
        """
        self._run(convert.unpin_prefix_call(name))

    def load_adapter(self, name: str, path: str) -> int:
        """Load an adapter from a path on the server, for requests that name it; return its size in bytes.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: the path is missing or invalid, or too many are loaded.
            Unsupported: the server takes no adapters, or not this kind.
        """
        return self._run(convert.load_adapter_call(name, path))

    def update_weights(
        self,
        weights: str | convert.GivenWeights,
        *,
        mode: convert.UpdateMode = "keep",
        version: str | int | None = None,
    ) -> str:
        """Replace the model's weights by those of a folder on the server, or by arrays; return their version.

        Args:
            weights: a path on the server, or arrays by name, which are sent in parts. The server changes nothing before
                it has all of them.
            mode: "keep" continues running requests with the new weights, "wait" lets them end first, "abort" ends them.
            version: name of the new weights; None counts the updates.

        Raises:
            InvalidArgument: the weights are missing, or not of this model.
            Unavailable: another update runs, or another client sends arrays.
            Unsupported: the server was started without --enable-sleep-mode, or its weights cannot be replaced.
        """
        if isinstance(weights, str):
            return self._run(convert.update_weights_call(weights, mode, version))
        result = ""
        for call in convert.send_weights_calls(weights, mode, version):
            result = self._run(call)
        return result

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that use it continue.

        Raises:
            NotFound: no adapter has that name.
        """
        self._run(convert.unload_adapter_call(name))

    def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters that requests can use."""
        return self._run(convert.list_adapters_call())

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the server accepts requests, even if it has not started yet or restarts.

        Raises:
            Cancelled: the client was closed.
            DeadlineExceeded: it was not ready in time.
        """
        self._servers.wait_until_ready(timeout_s)

    def close(self) -> None:
        """Cancel open calls and close the connections."""
        self._is_closed = True
        self._servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, call: UnaryCall[_T]) -> _T:
        return self._servers.run(call)
