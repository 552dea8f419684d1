"""Transfer of prefixes: saved as bytes (for example to a file), loaded into a server, or fetched from another server.

file    MAGIC, then messages, each after its length (4 bytes, little endian): a header, and pieces of blocks
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from jpaged._proto.v1 import inference_pb2, prefixes_pb2
from jpaged.client import convert
from jpaged.client.convert import UnaryCall
from jpaged.client.errors import ServerStatus, translated
from jpaged.client.routing.endpoints import get_key
from jpaged.client.routing.servers import AsyncServers, Servers
from jpaged.errors import InvalidArgument
from jpaged.types import Prompt

MAGIC = b"jpaged-prefix/1\n"
"""First bytes of a saved prefix."""
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PrefixArrival:
    """Result of importing a prefix into a server.

    Attributes:
        num_tokens: prefix tokens that the next request finds cached, including those already there.
        num_found_tokens: tokens that were cached at the source.
        num_loaded_blocks: blocks imported.
        num_known_blocks: blocks received that were already cached.
        is_short_of_room: host memory had no room for the rest.
    """

    num_tokens: int
    num_found_tokens: int
    num_loaded_blocks: int
    num_known_blocks: int
    is_short_of_room: bool


class PrefixCalls:
    """The methods of `Client.prefixes`.

    They raise the errors of `jpaged.errors` that the server raised: Unsupported if prefixes cannot be transferred,
    Incompatible if the servers' blocks differ, PermissionDenied for a key without the role control.
    """

    def __init__(
        self, servers: Servers, metadata: tuple[tuple[str, str], ...], require_open: Callable[[], None]
    ) -> None:
        self._servers = servers
        self._metadata = metadata
        self._require_open = require_open

    def save(
        self,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
        num_known_tokens: int = 0,
    ) -> Iterator[bytes]:
        """Yield the cached blocks of a prompt as bytes for `load`. Give exactly one of text and prompt_token_ids.

        Args:
            cache_salt: of the requests that share the prefix; the same holds for `adapter`.
            num_known_tokens: leading tokens whose blocks are left out.
        """
        prompt = convert.get_prompt(text, prompt_token_ids)
        request = _save_request(prompt, cache_salt, adapter, num_known_tokens)
        self._require_open()
        endpoint = self._servers.endpoints.enter(get_key(request))
        call = endpoint.methods["SavePrefix"](request, metadata=self._metadata)
        try:
            yield MAGIC
            for message in call:
                yield _framed(message)
        except grpc.RpcError as error:
            raise translated(error, endpoint.proxy) from error
        finally:
            call.cancel()
            self._servers.endpoints.leave(endpoint)

    def load(self, saved: Iterable[bytes]) -> PrefixArrival:
        """Import the bytes of `save` into a server, in chunks of any size; an open file works too.

        Raises:
            InvalidArgument: it is not a saved prefix, or damaged.
        """
        self._require_open()
        endpoint = self._servers.endpoints.enter(None)
        messages = _SavedPrefix(_build_messages(saved))
        try:
            answer = endpoint.methods["LoadPrefix"](messages, metadata=self._metadata)
            return _get_arrival(answer.arrival)
        except grpc.RpcError as error:
            if messages.failure is not None:  # it ended the call
                raise messages.failure from error
            raise translated(error, endpoint.proxy) from error
        finally:
            self._servers.endpoints.leave(endpoint)

    def fetch(
        self,
        source: str,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> PrefixArrival:
        """Make a server fetch a prefix from another one, by the name in its option --prefix-peers."""
        prompt = convert.get_prompt(text, prompt_token_ids)
        return self._servers.run(_fetch_call(source, prompt, cache_salt, adapter))


class AsyncPrefixCalls:
    """The methods of `AsyncClient.prefixes`; see `PrefixCalls`."""

    def __init__(
        self, servers: AsyncServers, metadata: tuple[tuple[str, str], ...], require_open: Callable[[], None]
    ) -> None:
        self._servers = servers
        self._metadata = metadata
        self._require_open = require_open

    async def save(
        self,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
        num_known_tokens: int = 0,
    ) -> AsyncIterator[bytes]:
        """See `PrefixCalls.save`."""
        prompt = convert.get_prompt(text, prompt_token_ids)
        request = _save_request(prompt, cache_salt, adapter, num_known_tokens)
        self._require_open()
        endpoint = self._servers.endpoints.enter(get_key(request))
        call = endpoint.methods["SavePrefix"](request, metadata=self._metadata)
        try:
            yield MAGIC
            async for message in call:
                yield _framed(message)
        except aio.AioRpcError as error:
            raise translated(error, endpoint.proxy) from error
        finally:
            call.cancel()
            self._servers.endpoints.leave(endpoint)

    async def load(self, saved: AsyncIterable[bytes] | Iterable[bytes]) -> PrefixArrival:
        """See `PrefixCalls.load`."""
        self._require_open()
        endpoint = self._servers.endpoints.enter(None)
        reader = _ChunkDecoder()
        failures = list[Exception]()

        async def requests() -> AsyncIterator[prefixes_pb2.LoadPrefixRequest]:
            try:
                async for chunk in _chunks(saved):
                    for message in reader.add(chunk):
                        yield message
                reader.finish()
            except Exception as error:
                failures.append(error)
                call.cancel()

        call = endpoint.methods["LoadPrefix"](requests(), metadata=self._metadata)
        status = ServerStatus(call)
        try:
            return _get_arrival((await call).arrival)
        except BaseException as error:
            if failures:  # it ended the call
                raise failures[0] from error
            if isinstance(error, aio.AioRpcError):
                raise translated(await status.restored(error), endpoint.proxy) from error
            raise
        finally:
            self._servers.endpoints.leave(endpoint)

    async def fetch(
        self,
        source: str,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> PrefixArrival:
        """See `PrefixCalls.fetch`."""
        prompt = convert.get_prompt(text, prompt_token_ids)
        return await self._servers.run(_fetch_call(source, prompt, cache_salt, adapter))


class _ChunkDecoder:
    """Decoder: chunks of a saved prefix -> messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._has_begun = False

    def add(self, chunk: bytes) -> Iterator[prefixes_pb2.LoadPrefixRequest]:
        """Yield the messages completed by a chunk."""
        buffer = self._buffer
        buffer += chunk
        if not self._has_begun:
            if not MAGIC.startswith(bytes(buffer[: len(MAGIC)])):
                raise InvalidArgument("saved", "is not a saved prefix: its first bytes are wrong")
            if len(buffer) < len(MAGIC):
                return
            del buffer[: len(MAGIC)]
            self._has_begun = True
        start = 0
        while len(buffer) >= start + _LENGTH_BYTES:
            length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "little")
            if length > _MAX_MESSAGE_BYTES:
                raise InvalidArgument(
                    "saved", f"is damaged: a message of {length} bytes is over the limit of {_MAX_MESSAGE_BYTES}"
                )
            end = start + _LENGTH_BYTES + length
            if len(buffer) < end:
                break
            yield _parsed(bytes(buffer[start + _LENGTH_BYTES : end]))
            start = end
        del buffer[:start]

    def finish(self) -> None:
        """Reject a prefix that ends inside a message."""
        if self._buffer or not self._has_begun:
            raise InvalidArgument("saved", "is truncated")


def _build_messages(saved: Iterable[bytes]) -> Iterator[prefixes_pb2.LoadPrefixRequest]:
    reader = _ChunkDecoder()
    for chunk in saved:
        yield from reader.add(chunk)
    reader.finish()


class _SavedPrefix:
    """Iterator that keeps its error: gRPC reports only that there was one."""

    def __init__(self, messages: Iterator[prefixes_pb2.LoadPrefixRequest]) -> None:
        self.failure: Exception | None = None
        self._messages = messages

    def __iter__(self) -> Iterator[prefixes_pb2.LoadPrefixRequest]:
        return self

    def __next__(self) -> prefixes_pb2.LoadPrefixRequest:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise


def _parsed(content: bytes) -> prefixes_pb2.LoadPrefixRequest:
    try:
        return prefixes_pb2.LoadPrefixRequest.FromString(content)
    except DecodeError:
        raise InvalidArgument("saved", f"is damaged: {len(content)} bytes are not a message") from None


def _framed(message: prefixes_pb2.SavePrefixResponse) -> bytes:
    content = message.SerializeToString()
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


async def _chunks(saved: AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(saved, AsyncIterable):
        async for chunk in saved:
            yield chunk
    else:
        for chunk in saved:
            yield chunk


def _save_request(
    prompt: Prompt, cache_salt: str, adapter: str, num_known_tokens: int
) -> prefixes_pb2.SavePrefixRequest:
    return prefixes_pb2.SavePrefixRequest(
        text=prompt.text,
        token_ids=_build_ids(prompt),
        cache_salt=cache_salt,
        adapter=adapter,
        num_known_tokens=num_known_tokens,
    )


def _fetch_call(source: str, prompt: Prompt, cache_salt: str, adapter: str) -> UnaryCall[PrefixArrival]:
    request = prefixes_pb2.FetchPrefixRequest(
        source=source, text=prompt.text, token_ids=_build_ids(prompt), cache_salt=cache_salt, adapter=adapter
    )
    return UnaryCall("FetchPrefix", request, lambda answer: _get_arrival(answer.arrival))


def _build_ids(prompt: Prompt) -> inference_pb2.TokenIds | None:
    if prompt.token_ids is None:
        return None
    return inference_pb2.TokenIds(ids=convert.checked_ids("prompt.token_ids", prompt.token_ids))


def _get_arrival(message: Any) -> PrefixArrival:
    return PrefixArrival(
        message.num_tokens,
        message.num_found_tokens,
        message.num_loaded_blocks,
        message.num_known_blocks,
        message.is_short_of_room,
    )
