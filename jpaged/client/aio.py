"""`AsyncClient`: the methods of `Client` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from grpc import aio

from jpaged.chat import ChatKwargs, ChatOptions, build_chat_options
from jpaged.client import convert
from jpaged.client.base import BaseClient, BaseStream, ClientOptions
from jpaged.client.convert import AdapterInfo, Assembler, GenerateChunk, ServerInfo, UnaryCall
from jpaged.client.prefixes import AsyncPrefixCalls
from jpaged.client.routing.servers import AsyncServers, refuse_closed
from jpaged.errors import InvalidArgument
from jpaged.outputs import Evaluated
from jpaged.server_load import Load
from jpaged.types import EmbedsInput, ImagesInput, ModelInfo, Pooling, RequestOutput, SamplingParams, Score

_T = TypeVar("_T")


class AsyncGenerateStream(BaseStream):
    """Async iterator over the chunks of one request; see `BaseStream`."""

    def __aiter__(self) -> AsyncIterator[GenerateChunk]:
        return self

    async def __anext__(self) -> GenerateChunk:
        while not self._ready and not self._is_closed:
            try:
                self._take(await anext(aiter(self._course.call)))
            except asyncio.CancelledError as error:
                if self._is_closed:  # closed by another task: grpc.aio cancels the reader
                    break
                self._is_closed = True
                self._course.end()
                refuse_closed(error)
                raise
            except aio.AioRpcError as error:
                await asyncio.sleep(self._wait_s(error))
                self._begin_again()
            except StopAsyncIteration:
                self._is_closed = True
                self._course.require_end()
        if self._ready:
            return self._ready.popleft()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


class AsyncClient(BaseClient[AsyncGenerateStream]):
    """Client of one or several servers, for asyncio.

        async with AsyncClient("localhost:50051") as client:
            output = await client.complete("Hello", SamplingParams(max_tokens=32))
            async for chunk in client.generate("Hello"): ...

    Concurrent requests to one server share calls (GenerateMultiplexed), which takes less processor time. A request that
    runs alone has a separate call.

    Args:
        max_requests_per_call: requests that share one call; 1 makes a call for each. A proxy that balances calls sends
            all requests of a call to one server.

    Other arguments and errors: see `BaseClient`.
    """

    prefixes: AsyncPrefixCalls
    _stream = AsyncGenerateStream
    _prefix_calls = AsyncPrefixCalls

    def __init__(
        self, target: str | Sequence[str], *, max_requests_per_call: int = 64, **options: Unpack[ClientOptions]
    ) -> None:
        if max_requests_per_call < 1:
            raise InvalidArgument("max_requests_per_call", f"{max_requests_per_call} is below the limit of 1")
        self._reach = partial(AsyncServers, max_requests_per_call=max_requests_per_call)
        super().__init__(target, **options)

    async def complete(
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
        """See `Client.complete`."""
        what = convert.get_prompt(prompt, prompt_token_ids, messages, chat_options)
        assembler = Assembler(what, sampling)
        async with self._begin(what, sampling, request_id, timeout_s, whole=True, adapter=adapter) as stream:
            async for chunk in stream:
                assembler.add(chunk)
        return assembler.output()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        adapter: str = "",
        **words: Unpack[ChatKwargs],
    ) -> RequestOutput:
        """See `Client.chat`."""
        return await self.complete(
            None,
            sampling,
            messages=messages,
            chat_options=build_chat_options(**words),
            request_id=request_id,
            timeout_s=timeout_s,
            adapter=adapter,
        )

    async def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[Score]:
        """See `Client.score`."""
        asker = convert.CallOptions(self._model, adapter, cache_salt, priority)
        call = convert.score_call(prompt, continuations, asker)
        return await self._run(call)

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]:
        """See `Client.embed`."""
        asker = convert.CallOptions(self._model, adapter, cache_salt, priority)
        call = convert.embed_call(inputs, asker, pooling=pooling, normalize=normalize)
        return await self._run(call)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """See `Client.tokenize`."""
        prompt = convert.get_prompt(text, None, messages, chat_options)
        return await self._run(convert.tokenize_call(prompt, add_special_tokens=add_special_tokens, model=self._model))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Client.detokenize`."""
        return await self._run(
            convert.detokenize_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model)
        )

    async def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[bytes, ...]:
        """See `Client.token_bytes`."""
        return await self._run(
            convert.token_bytes_call(token_ids, skip_special_tokens=skip_special_tokens, model=self._model)
        )

    async def server_info(self) -> ServerInfo:
        """See `Client.server_info`."""
        return await self._run(convert.server_info_call())

    async def model_info(self) -> ModelInfo:
        """See `Client.model_info`."""
        return await self._run(convert.model_info_call())

    async def load(self) -> Load:
        """See `Client.load`."""
        return await self._run(convert.load_call())

    async def abort(self, request_id: str) -> None:
        """See `Client.abort`."""
        await self._run(convert.abort_call(request_id))

    async def pin_prefix(
        self,
        name: str,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> int:
        """See `Client.pin_prefix`."""
        prefix = convert.get_prompt(text, prompt_token_ids)
        return await self._run(convert.pin_prefix_call(name, prefix, cache_salt, adapter))

    async def unpin_prefix(self, name: str) -> None:
        """See `Client.unpin_prefix`."""
        await self._run(convert.unpin_prefix_call(name))

    async def load_adapter(self, name: str, path: str) -> int:
        """See `Client.load_adapter`."""
        return await self._run(convert.load_adapter_call(name, path))

    async def update_weights(
        self,
        weights: str | convert.GivenWeights,
        *,
        mode: convert.UpdateMode = "keep",
        version: str | int | None = None,
    ) -> str:
        """See `Client.update_weights`."""
        if isinstance(weights, str):
            return await self._run(convert.update_weights_call(weights, mode, version))
        result = ""
        for call in convert.send_weights_calls(weights, mode, version):
            result = await self._run(call)
        return result

    async def unload_adapter(self, name: str) -> None:
        """See `Client.unload_adapter`."""
        await self._run(convert.unload_adapter_call(name))

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """See `Client.list_adapters`."""
        return await self._run(convert.list_adapters_call())

    async def wait_until_ready(self, timeout_s: float) -> None:
        """See `Client.wait_until_ready`."""
        await self._servers.wait_until_ready(timeout_s)

    async def close(self) -> None:
        """See `Client.close`."""
        self._is_closed = True
        await self._servers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _run(self, call: UnaryCall[_T]) -> _T:
        return await self._servers.run(call)
