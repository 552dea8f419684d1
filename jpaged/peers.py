"""Client of prefill servers, for a decode server: tries available servers one after another, the least loaded first.

A server that is unreachable, or does not answer, is skipped for a second, and until it is connected again; if none is
available, the call fails at once. While a server is silent, health checks distinguish a long prompt from a server that
is stopped or out of reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged._proto.v1 import inference_pb2, prefill_pb2, prefill_pb2_grpc
from jpaged.client import convert
from jpaged.client.channel import Tls, open_channel, proxy_name, require_target
from jpaged.client.errors import translated
from jpaged.config import RoleOptions
from jpaged.errors import InternalError, InvalidArgument, JpagedError, TryLater, Unavailable, describe_error
from jpaged.service.handoff import BlockFormat, FirstToken, KVPart, build_offer, prompt_alone
from jpaged.service.kv_protocol import MAX_PIECES, BlockPiece
from jpaged.types import Request

_LOG = logging.getLogger(__name__)

_ABSENT_S = 1.0
_PATIENT = 0.9
"""A server silent for this share of the first-token timeout counts as absent."""
_MAX_KEY_BYTES = 4096
_REPORT_S = 5.0
"""Timeout of a report of an offer's end."""
_SILENCE_S, _CHECK_S = 2.0, 3.0
"""Time without a message after which a server's health is checked, and the timeout of the check."""


@dataclass(slots=True, eq=False)
class _PrefillServer:
    """One prefill server.

    Attributes:
        proxy: the HTTP proxy of the connection, for messages; "" for none.
        num_open: open calls from this server.
        absent_until_s: it is skipped until this time; 0 if it was available the last time.
        reports: running reports of the ends of offers.
    """

    target: str
    channel: aio.Channel
    stub: Any
    proxy: str
    num_open: int = 0
    absent_until_s: float = 0.0
    num_asked: int = 0
    reports: set[asyncio.Future[None]] = field(default_factory=set)

    def enter(self) -> None:
        """Record the start of a call."""
        self.num_open += 1
        self.num_asked += 1

    def leave(self) -> None:
        """Record the end of a call."""
        self.num_open -= 1

    async def check(self) -> None:
        """Check that it answers, whatever it answers.

        Raises:
            Unavailable: it does not.
        """
        health: Any = health_pb2_grpc.HealthStub(self.channel)
        try:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=_CHECK_S)
        except aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                problem = f"{self.target} is silent, and a health check had no answer within {_CHECK_S:g} s"
                raise Unavailable(problem) from error

    def report(self, message: prefill_pb2.FinishPullRequest, metadata: Any) -> None:
        """Start to report the end of an offer; errors are ignored."""
        call = self.stub.FinishPull(message, timeout=_REPORT_S, metadata=metadata)
        task = asyncio.ensure_future(_ignoring_errors(call))
        self.reports.add(task)
        task.add_done_callback(self.reports.discard)

    @property
    def is_connected(self) -> bool:
        """True if there is a connection; otherwise one is attempted."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    @property
    def is_there(self) -> bool:
        """True if it is believed to be available."""
        return not self.absent_until_s or (self.is_connected and self.absent_until_s <= time.monotonic())

    def note_absence(self) -> None:
        """Record that it is unreachable, or does not answer."""
        if self.absent_until_s == 0.0:
            through = f" (through the proxy {self.proxy})" if self.proxy else ""
            _LOG.warning("prefill server %s is unreachable%s", self.target, through)
        self.absent_until_s = time.monotonic() + _ABSENT_S

    def note_answer(self) -> None:
        """Record an answer."""
        if self.absent_until_s:
            _LOG.warning("prefill server %s is reachable again", self.target)
        self.absent_until_s = 0.0


class PrefillCall:
    """Implementation of `jpaged.service.handoff.PrefillAnswer` over one call."""

    def __init__(self, server: _PrefillServer, call: Any, metadata: Any) -> None:
        self.target = server.target
        self._metadata = metadata
        self._proxy = server.proxy
        self.tokens: Sequence[FirstToken] = ()
        self.num_cached_tokens = 0
        self._server: _PrefillServer | None = server
        self._call = call
        server.enter()

    async def begin(self, num_sequences: int) -> None:
        """Wait for the first token of each sequence.

        Raises:
            JpagedError: they do not come.
        """
        tokens = list[FirstToken]()
        with _translating(self._proxy):
            while len(tokens) < num_sequences:
                message = await self._read()
                if message is aio.EOF or not message.HasField("told"):
                    raise InternalError(f"{self.target} returned {len(tokens)} of {num_sequences} first tokens")
                chunk = convert.parse_chunk(message.told)
                if len(chunk.token_ids) != 1 or len(chunk.logprobs) > 1:
                    raise InternalError(f"{self.target} returned {len(chunk.token_ids)} first tokens for a sequence")
                logprobs = chunk.logprobs[0] if chunk.logprobs else None
                tokens.append(FirstToken(chunk.index, chunk.token_ids[0], logprobs))
                self.num_cached_tokens = chunk.usage.cached_tokens
        self.tokens = tokens

    async def parts(self) -> AsyncIterator[KVPart]:
        """Yield the blocks of the prompt in pieces, some at a time, or offers of them."""
        with _translating(self._proxy):
            while (message := await self._read()) is not aio.EOF:
                if message.HasField("offer"):
                    yield _offer_from(message.offer, self.target)
                    continue
                if len(message.pieces.pieces) > MAX_PIECES:
                    raise InternalError(f"{self.target} sent a message of more than {MAX_PIECES} pieces")
                yield [
                    BlockPiece(one.index, one.kv_group, one.offset, one.contents, one.key, one.hash)
                    for one in message.pieces.pieces
                ]

    async def _read(self) -> Any:
        """Return the next message; raise Unavailable if none comes and the server does not answer health checks."""
        reading = asyncio.ensure_future(self._call.read())
        try:
            while not (await asyncio.wait((reading,), timeout=_SILENCE_S))[0]:
                if (server := self._server) is None:
                    continue
                try:
                    await server.check()
                except Unavailable:
                    if not reading.done():
                        server.note_absence()
                        raise
            return reading.result()
        finally:
            reading.cancel()

    def finish_pull(self, uuid: int, *, is_received: bool) -> None:
        """Start to report the end of an offer. If that fails, the server withdraws the offer with the call's end."""
        if self._server is not None:
            message = prefill_pb2.FinishPullRequest(uuid=uuid, is_received=is_received)
            self._server.report(message, self._metadata)

    def close(self) -> None:
        """Release the server."""
        if self._server is not None:
            self._server.leave()
            self._server = None
            self._call.cancel()


class Prefills:
    """Implementation of `jpaged.service.handoff.PrefillServers`. Create it on the event loop that uses it.

    Raises:
        InvalidArgument: a target is invalid, or a file cannot be read.
    """

    def __init__(self, options: RoleOptions) -> None:
        for target in options.prefill_target:
            require_target("prefill_target", target)
        tls, self._key = _get_tls(options), _get_key(options)
        self._servers = []
        self._patience_s = options.prefill_timeout
        for target in options.prefill_target:
            channel = open_channel(aio, target, tls)
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            self._servers.append(_PrefillServer(target, channel, stub, proxy_name(target, None)))

    async def ask(
        self, request: Request, num_known: int, blocks: BlockFormat, wait_s: float, timeout_s: float
    ) -> PrefillCall:
        """Send a prompt to a prefill server; see `PrefillServers.ask`."""
        message = _build_message(request, num_known, blocks)
        # A key determines the tenant, and may act for all; without keys, the policy `fair` needs the prompt's tenant.
        metadata = convert.get_metadata("" if self._key else request.tenant, self._key)
        failure: JpagedError = Unavailable(f"no prefill server is available: {', '.join(self._names)}")
        until_s = asyncio.get_running_loop().time() + wait_s
        for server in self._in_order():
            call = server.stub.Prefill(message, timeout=timeout_s, metadata=metadata)
            answer = PrefillCall(server, call, metadata)
            began_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(until_s):
                    await answer.begin(request.sampling.n)
            except TimeoutError:
                answer.close()
                # otherwise the request's own deadline may be the cause
                if until_s - began_s >= _PATIENT * self._patience_s:
                    server.note_absence()
                raise
            except (Unavailable, TryLater) as error:
                answer.close()
                failure = error
                if isinstance(error, Unavailable):
                    server.note_absence()
            except BaseException:
                answer.close()
                raise
            else:
                server.note_answer()
                return answer
        raise failure

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers:
            await server.channel.close()

    @property
    def _names(self) -> list[str]:
        return [server.target for server in self._servers]

    def _in_order(self) -> list[_PrefillServer]:
        """Return the available servers: connected ones first, then by open calls, then by number of calls so far."""
        there = [server for server in self._servers if server.is_there]
        return sorted(there, key=lambda server: (not server.is_connected, server.num_open, server.num_asked))


async def _ignoring_errors(call: Any) -> None:
    with contextlib.suppress(grpc.RpcError):
        await call


def _offer_from(message: prefill_pb2.BlockOffer, target: str) -> KVPart:
    """Convert a message to an offer; raise InternalError if it contradicts itself."""
    is_sound = len(message.indices) == len(message.kv_groups) == sum(message.num_rows) > 0
    if not is_sound or len(message.sizes) != len(message.num_rows):
        raise InternalError(f"{target} sent an offer of {len(message.indices)} blocks that contradicts itself")
    return build_offer(
        (message.uuid, message.address),
        (message.dtype, message.block_shape),
        [(part.begin, part.shape) for part in message.parts],
        (message.sizes, message.num_rows),
        zip(message.indices, message.kv_groups, strict=True),
        message.last_key,
    )


def _build_message(request: Request, num_known: int, blocks: BlockFormat) -> prefill_pb2.PrefillRequest:
    adapter = request.adapter
    return prefill_pb2.PrefillRequest(
        request=inference_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=inference_pb2.TokenIds(ids=request.prompt_token_ids),
            sampling=convert.sampling_message(prompt_alone(request.sampling)),
            adapter="" if adapter is None else adapter.name,
        ),
        kv_identity=blocks.kv_identity,
        data_protocol=blocks.data_protocol,
        block_size=blocks.block_size if blocks.data_protocol else 0,
        model_identity=blocks.model_identity,
        adapter_digest=request.adapter_digest,
        cache_tenant=request.cache_tenant,
        num_known_blocks=num_known,
    )


@contextlib.contextmanager
def _translating(proxy: str) -> Any:
    """Convert gRPC errors to those of jpaged.errors; raise Unavailable if the connection was closed."""
    try:
        yield
    except grpc.RpcError as error:
        raise translated(error, proxy) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable("the connection was closed") from error


def _get_tls(options: RoleOptions) -> Tls | None:
    files = options.prefill_tls_ca, options.prefill_tls_cert, options.prefill_tls_key
    if not options.prefill_tls and not any(files):
        return None
    try:
        tls = Tls(*files)
        tls.credentials()
    except InvalidArgument as error:
        raise InvalidArgument(f"prefill_{error.field.replace('.', '_')}", error.problem) from error
    return tls


def _get_key(options: RoleOptions) -> str:
    path = options.prefill_api_key_file
    if path is None:
        return ""
    try:
        key = Path(path).read_bytes()[: _MAX_KEY_BYTES + 1].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("prefill_api_key_file", f"{path} cannot be read: {describe_error(error)}") from None
    if not 0 < len(key) <= _MAX_KEY_BYTES:
        raise InvalidArgument("prefill_api_key_file", f"{path} has {len(key)} characters, not 1 to {_MAX_KEY_BYTES}")
    try:
        convert.get_metadata("", key)
    except InvalidArgument as error:
        raise InvalidArgument("prefill_api_key_file", f"{path} {error.problem}") from error
    return key
