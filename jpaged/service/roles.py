"""Roles of disaggregated prefill: a server computes only prompts, or only the decode part of requests.

The decode role: prefill servers compute long prompts, and requests continue here after their first token.

    ask ──> first tokens ──> sent to the client at once
    │                  └──> blocks ──> host memory ──> the engine, which finds them like any cached prefix
    └── concurrently, host memory is reserved
    on any failure      the engine computes what is missing: the same tokens, later

A request has its slot among those in flight from the beginning, so that none is refused after its first token.

The prefill role: computes prompts for other servers; keeps the blocks and sends them after the first token.

a part is ready ──> bytes copied on a thread ──> sent        the next parts are staged while these are sent

`PrefillKVExport` exports a prompt's blocks after the request's last event:

chain, on a thread ──┐
last event ──────────┴──> requested from the engine before it schedules another step ──> held, staged
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jpaged.config import RoleOptions
from jpaged.engine.executor import BlockArrays, BlockOffer, BlockPort, BlockPull
from jpaged.engine.kv_cache.blocks import BlockHash, root_block_hash
from jpaged.engine.kv_cache.connector import TransferRate
from jpaged.engine.kv_cache.offload.transfer import (
    BlockExport,
    BlockHashChain,
    BlockPosition,
    KVTransfer,
    PrefixExport,
    PrefixImport,
)
from jpaged.engine.sequence import OutputCallback
from jpaged.errors import DeadlineExceeded, InternalError, InvalidArgument, JpagedError, Unavailable, Unsupported
from jpaged.service.calls import RemotePrefillRequest
from jpaged.service.handoff import Begun, BlockFormat, PrefillAnswer, PrefillServers, begun
from jpaged.service.kv_protocol import BlockPiece, Receiving, cut
from jpaged.service.service import AdmittedCall, BlockingPools
from jpaged.types import OutputEvent, Request, RequestTimes

if TYPE_CHECKING:
    from jpaged.service.loaded_model import LoadedModel


def why_here(request: Request, min_tokens: int) -> str | None:
    """Return the reason to compute a prompt on this server; None if a prefill server may compute it.

    Prompt log-probabilities, hidden states and input embeddings are not transferred, nor is state beyond tokens: beams,
    sums of best_of, thinking budgets, grammars with `always_complete`.

    Args:
        min_tokens: shorter prompts stay. Longer ones may also stay if cached, which only their blocks show.
    """
    sampling = request.sampling
    if len(request.prompt_token_ids) < min_tokens:
        return "short"
    if not sampling.use_prefix_cache:
        return "uncached"
    if sampling.beam_width or sampling.num_samples > sampling.n:
        return "ranked"
    if request.prompt_logprobs_start is not None or request.pooling is not None:
        return "told_of"
    if request.continued:
        return "continued"
    if request.embeds is not None:
        return "embedded"
    outputs = sampling.structured_outputs
    if request.thinking is not None or (outputs is not None and outputs.always_complete):
        return "budget"
    return None


class CurrentBlockFormat:
    """The format of this server's blocks with its current weights. Bound to the service's event loop.

    `sleep` of level 2 and `wake_up` read the weights again, from files that may have changed.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._weights: bytes | None = None
        self._found = BlockFormat(b"", 0)

    async def get(self) -> BlockFormat:
        """Return the format. Reads every weight if they are others than at the last call: a second per gigabyte.

        Raises:
            Unsupported: the pool has no transferable blocks; states why.
            Unavailable: the weights are others, and may be asleep.
        """
        model, transfer = self._model, self._model.engine.kv_transfer
        try:
            while self._weights != (weights := transfer.weights):
                if model.engine.is_paused:
                    raise Unavailable("generation is paused after the weights were read again")
                identity = await asyncio.to_thread(transfer.kv_identity)
                self._found, self._weights = BlockFormat(identity, transfer.block_size), weights
                if model.block_port is not None:
                    facts = model.block_port.protocol, compute_model_identity(model)
                    self._found = BlockFormat(identity, transfer.block_size, *facts)
        except Unsupported as error:
            problem = f"{model.config.roles.role} transfers blocks of the prefix cache: {error}"
            raise Unsupported(f"role: {problem}") from error
        return self._found


def compute_model_identity(model: LoadedModel) -> bytes:
    """Return a digest of what blocks depend on, except their layout and the code that computed them.

    The checkpoint's fingerprint covers samples of the weights (`jpaged.checkpoints.hub.fingerprint`). Empty after they
    were read again, because the files may have changed.
    """
    transfer = model.engine.kv_transfer
    if transfer.weights:
        return b""
    facts = (model.checkpoint, model.model.architecture, model.model.dtype, model.config.cache.kv_cache_dtype)
    lossy = model.model.lossy_kv_window, model.model.lossy_kv_sinks, model.config.model.activation_dtype
    return hashlib.sha256(repr((*facts, *lossy, transfer.num_kv_groups)).encode()).digest()


def _get_chains(transfer: KVTransfer, request: Request) -> tuple[BlockHashChain, Sequence[BlockHash]]:
    """Return the blocks of a prompt by this server's keys, and their keys as sent in messages.

    Run on a thread if the prompt is long: a block takes 3 us.
    """
    owner = request.sampling.cache_salt, request.cache_tenant, request.adapter_digest
    bare, weights = transfer.chain(root_block_hash(*owner), request.prompt_token_ids), transfer.weights
    if not weights:
        return bare, bare.keys
    return transfer.chain(root_block_hash(*owner, weights), request.prompt_token_ids), bare.keys


class PrefillKVExport:
    """Export of the blocks of one prompt. All of them are cached when a one-token request emits its last event.

    Args:
        chains: future of `_get_chains`.
        start: starts the export of a chain.
        put: callback for the request's events.

    Attributes:
        keys: keys of the prompt's blocks, as sent in messages; set before the export starts.
    """

    def __init__(
        self,
        chains: Future[tuple[BlockHashChain, Sequence[BlockHash]]],
        start: Callable[[BlockHashChain], Future[Any]],
        put: OutputCallback,
    ) -> None:
        self.keys: Sequence[BlockHash] = ()
        self._chains = chains
        self._start = start
        self._put = put
        self._asked: Future[Future[Any] | None] = Future()
        self._asked.set_running_or_notify_cancel()
        self._others: list[Future[PrefixExport]] = []

    def pass_on(self, event: OutputEvent) -> None:
        """Handle an event of the request, on the engine's thread."""
        if event.is_last:
            if event.error is None:
                self._chains.add_done_callback(self._leave)
            else:
                self._asked.set_result(None)
        self._put(event)

    async def leaving(self) -> PrefixExport | BlockExport | None:
        """Wait for the held blocks; return None if the prompt was not computed."""
        asked = await asyncio.wrap_future(self._asked)
        if asked is None:
            return None
        leaving: PrefixExport | BlockExport = await asyncio.wrap_future(asked)
        return leaving

    def add(self, leaving: Future[PrefixExport]) -> None:
        """Close another export, too."""
        self._others.append(leaving)

    def close(self) -> None:
        """Release the held blocks, or cancel the pending hold. Call on a thread: it waits for readers."""
        self._asked.add_done_callback(_close_asked)
        for leaving in self._others:
            _close_when_done(leaving)

    def _leave(self, chains: Future[tuple[BlockHashChain, Sequence[BlockHash]]]) -> None:
        try:
            chain, self.keys = chains.result()
            self._asked.set_result(self._start(chain))
        except JpagedError as error:
            self._asked.set_exception(error)


def _close_asked(asked: Future[Future[Any] | None]) -> None:
    leaving = None if asked.exception() is not None else asked.result()
    if leaving is not None:
        _close_when_done(leaving)


def _close_when_done(leaving: Future[Any]) -> None:
    leaving.add_done_callback(lambda done: None if done.exception() is not None else done.result().close())


_SWEEP_S = 0.02
_PULL_POLL_S = 0.001
_MAX_OPEN_OFFERS = 2
"""Maximum of one prompt's offers that are not finished: one is pulled while the next one is read."""


class OfferTable:
    """The open offers of a data port. Bound to the service's event loop."""

    def __init__(self, port: BlockPort) -> None:
        self.port = port
        self._finished: dict[int, asyncio.Future[bool]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def open(self, contents: BlockArrays, positions: Sequence[BlockPosition], key: BlockHash) -> BlockOffer:
        """Offer the blocks of a part; raise Unavailable if the port has no room."""
        offer = self.port.offer(contents)
        self._finished[offer.uuid] = asyncio.get_running_loop().create_future()
        rows = tuple((position.index, position.kv_group) for position in positions)
        return dataclasses.replace(offer, positions=rows, last_key=key)

    def finish(self, uuid: int, *, is_received: bool) -> None:
        """Record the end of an offer; unknown ones are ignored."""
        future = self._finished.pop(uuid, None)
        if future is None:
            return
        if is_received:
            self.port.release(uuid)
        else:
            self.port.withdraw(uuid)
            if self._sweeper is None or self._sweeper.done():
                self._sweeper = asyncio.create_task(self._sweep())
        if not future.done():
            future.set_result(is_received)

    async def wait(self, offer: BlockOffer) -> bool:
        """Wait for the end of an offer; return True if its blocks were received."""
        future = self._finished.get(offer.uuid)
        return future is not None and await asyncio.shield(future)

    async def _sweep(self) -> None:
        while not self.port.is_settled:
            self.port.sweep()
            await asyncio.sleep(_SWEEP_S)


class OfferedPrompt:
    """The offers of one prompt.

    Attributes:
        num_sent: leading blocks of the prompt that the decode server has.
        is_complete: all parts were received.

    Args:
        keys: keys of the prompt's blocks, as sent in messages.
    """

    def __init__(self, table: OfferTable, leaving: BlockExport, keys: Sequence[BlockHash], num_known: int) -> None:
        self.num_sent = num_known
        self.is_complete = False
        self._table = table
        self._leaving = leaving
        self._keys = keys
        self._open: deque[BlockOffer] = deque()

    async def offers(self) -> AsyncIterator[BlockOffer]:
        """Yield an offer for each part; end at the first one that fails."""
        leaving, keys = self._leaving, self._keys
        try:
            for part in range(leaving.num_parts):
                contents = await asyncio.wrap_future(leaving.read(part))
                positions = leaving.get_positions(part)
                last = max(position.index for position in positions)
                offer = self._table.open(contents, positions, keys[last])
                self._open.append(offer)
                yield offer
                while len(self._open) >= _MAX_OPEN_OFFERS:
                    if not await self._finish_first():
                        return
            while self._open:
                if not await self._finish_first():
                    return
            self.is_complete = True
        except Unavailable:  # no room for the next part
            while self._open and await self._finish_first():
                pass
        finally:
            self.close()

    def close(self) -> None:
        """Withdraw open offers."""
        while self._open:
            self._table.finish(self._open.popleft().uuid, is_received=False)

    async def _finish_first(self) -> bool:
        is_received = await self._table.wait(self._open[0])
        offer = self._open.popleft()
        if is_received:
            self.num_sent = max(self.num_sent, 1 + max(index for index, _ in offer.positions))
        return is_received


_BIG = 1 << 62
"""A work size that always runs on a thread."""


class PrefillRole:
    """Computes prompts. Accepts ordinary requests only if they generate one token."""

    def __init__(self) -> None:
        self._format: CurrentBlockFormat | None = None
        self._offers: OfferTable | None = None
        self._departures: dict[str, PrefillKVExport] = {}
        self._asked: dict[str, RemotePrefillRequest] = {}
        self._prompts: dict[str, OfferedPrompt] = {}
        self._workers = BlockingPools()

    async def prepare(self, model: LoadedModel) -> None:
        """Compute the KV fingerprint of this server."""
        self._format = CurrentBlockFormat(model)
        await self._format.get()
        if model.block_port is not None:
            self._offers = OfferTable(model.block_port)

    async def check_identity(self, kv_identity: bytes, model_identity: bytes = b"", data_protocol: str = "") -> bool:
        """Reject servers with incompatible blocks; return False if blocks may be offered but not sent.

        Whether the caller may act for all tenants is checked before.
        """
        if self._format is None:
            raise Unavailable("this server is not ready")
        here = await self._format.get()
        if kv_identity == here.kv_identity:
            return True
        is_of_model = model_identity != b"" and model_identity == here.model_identity
        if self._offers is not None and is_of_model and data_protocol == self._protocol:
            return False
        mine, other = here.kv_identity.hex()[:16], kv_identity.hex()[:16]
        problem = f"{other}... is not {mine}...: model, weights, dtype, layout or block size differ"
        raise InvalidArgument("kv_identity", problem)

    @property
    def _protocol(self) -> str:
        return "" if self._offers is None else self._offers.port.protocol

    def begin(
        self, model: LoadedModel, request: Request, generation: AdmittedCall, asked: RemotePrefillRequest | None
    ) -> None:
        """Submit a request; one from another server holds its blocks from its first token on."""
        max_tokens, put = request.sampling.max_num_tokens, generation.stream.put
        if max_tokens > 1:
            problem = f"{max_tokens} is over the limit of 1: this server only computes prompts (role prefill)"
            raise InvalidArgument("sampling.max_tokens", f"{problem}; servers of the role decode generate")
        if asked is None:
            model.engine.submit(request, put)
            return
        if (reason := why_here(request, 1)) is not None:
            raise InvalidArgument("request", f"{reason}: the decode server must compute such a prompt itself")
        if request.adapter_digest != asked.adapter_digest:
            raise InvalidArgument("adapter_digest", "the adapter of this name has different contents on this server")
        transfer = model.engine.kv_transfer
        _check_block_size(transfer, asked)
        chains = self._workers.start(lambda: _get_chains(transfer, request))
        departure = PrefillKVExport(chains, self._get_export(transfer, asked), put)
        model.engine.submit(request, departure.pass_on)
        self._departures[generation.engine_id] = departure
        self._asked[generation.engine_id] = asked
        model.role_counts.add(num_prefills_for_others=1)

    def _get_export(self, transfer: KVTransfer, asked: RemotePrefillRequest) -> Callable[[BlockHashChain], Future[Any]]:
        if self._offers is not None and asked.data_protocol == self._protocol:
            num_known = asked.num_known * (asked.block_size or transfer.block_size) // transfer.block_size
            return lambda chain: transfer.export(chain, num_known)
        return lambda chain: transfer.leave(chain, asked.num_known, is_hurried=True)

    def submit_now(self, model: LoadedModel, generation: AdmittedCall) -> bool:
        """Return False: every request is submitted to the engine at once."""
        return False

    def end(self, model: LoadedModel, generation: AdmittedCall) -> None:
        """Release the blocks of a request, and withdraw its offers."""
        self._asked.pop(generation.engine_id, None)
        departure = self._departures.pop(generation.engine_id, None)
        if departure is not None:
            self._workers.start(departure.close)
        prompt = self._prompts.pop(generation.engine_id, None)
        if prompt is not None:
            prompt.close()

    def finish_pull(self, uuid: int, *, is_received: bool) -> None:
        """Record the end of an offer."""
        if self._offers is not None:
            self._offers.finish(uuid, is_received=is_received)

    async def parts(
        self, model: LoadedModel, generation: AdmittedCall
    ) -> AsyncIterator[Sequence[BlockPiece] | BlockOffer]:
        """Yield the blocks of a request that has emitted its first tokens, some at a time, as far as available."""
        departure, asked = self._departures[generation.engine_id], self._asked[generation.engine_id]
        leaving, keys = await departure.leaving(), departure.keys
        counts, transfer = model.role_counts, model.engine.kv_transfer
        if isinstance(leaving, BlockExport):
            assert self._offers is not None
            num_known = asked.num_known * asked.block_size // transfer.block_size
            self._offers.port.admit(asked.host)
            prompt = OfferedPrompt(self._offers, leaving, keys, num_known)
            self._prompts[generation.engine_id] = prompt
            async for offer in prompt.offers():
                yield offer
                num_bytes = sum(offer.sizes) * transfer.bytes_per_block
                counts.add(num_blocks_sent=len(offer.positions), num_bytes_sent=num_bytes)
            if prompt.is_complete or not asked.has_same_layout:
                return
            again = transfer.leave(leaving.chain, prompt.num_sent, is_hurried=True)
            departure.add(again)
            leaving = await asyncio.wrap_future(again)
        for part in range(0 if leaving is None else leaving.num_parts):
            assert leaving is not None
            await asyncio.wrap_future(leaving.when_there(part))
            for pieces in await self._workers.run(functools.partial(cut, leaving, part, keys), _BIG):
                yield pieces
                counts.add(num_bytes_sent=sum(len(piece.contents) for piece in pieces))
            counts.add(num_blocks_sent=len(leaving.get_positions(part)))


def _check_block_size(transfer: KVTransfer, asked: RemotePrefillRequest) -> None:
    """Raise InvalidArgument if blocks cannot be offered in another size."""
    if asked.has_same_layout or asked.block_size == transfer.block_size:
        return
    geometry = transfer.each[0].geometry
    if len(geometry.windows) > 1 or geometry.windows[0] is not None or geometry.num_sink_tokens:
        problem = f"{asked.block_size} is not {transfer.block_size}, which a model with sliding windows requires"
        raise InvalidArgument("block_size", problem)


_FIRST_BYTES_PER_S, _FIRST_LATENCY_S = 1e9, 0.001
_MIN_MEASURED = 4
"""Transfers of a transport before its rate prevents others."""
_RETRY_EACH = 16


class TransferRates:
    """Measured rates of both transports, which choose between them, and between transferring and computing.

    The data port is preferred, until blocks that were sent as pieces after a failure came faster. What is slower is
    tried again for each 16th prompt. A port whose first pulls all fail has no rate, and prevents no comparison.
    """

    def __init__(self) -> None:
        self._rates: dict[bool, TransferRate] = {}
        self._num_measured: Counter[bool] = Counter()
        self._num_without_port = self._num_computed = self._num_failed_pulls = 0

    def record(self, num_bytes: int, seconds: float, *, is_port: bool) -> None:
        """Add a transfer of a prompt's blocks."""
        if is_port not in self._rates:
            self._rates[is_port] = TransferRate(_FIRST_BYTES_PER_S, _FIRST_LATENCY_S)
        self._rates[is_port].record(num_bytes, seconds)
        self._num_measured[is_port] += 1

    def record_timeout(self, num_bytes: int, seconds: float, *, is_port: bool) -> None:
        """Add a transfer that did not end in this time, unless this size is expected to take longer."""
        rate = self._rates.get(is_port)
        if num_bytes and (rate is None or seconds > rate.seconds(num_bytes)):
            self.record(num_bytes, seconds, is_port=is_port)

    def note_failed_pull(self) -> None:
        """Count a pull without a result."""
        self._num_failed_pulls += 1

    def choose_port(self, num_bytes: int) -> bool:
        """Return True if blocks of this size are to be pulled from a data port."""
        if len(self._rates) < 2 or self._rates[True].seconds(num_bytes) <= self._rates[False].seconds(num_bytes):
            return True
        self._num_without_port += 1
        return self._num_without_port % _RETRY_EACH == 0

    def compare(self, num_bytes: int, compute_s: float, *, has_port: bool) -> float | None:
        """Return the seconds of a transfer that takes longer than computing; None if it should be tried."""
        measured = [rate for is_port, rate in self._rates.items() if self._num_measured[is_port] >= _MIN_MEASURED]
        transfer_s = min((rate.seconds(num_bytes) for rate in measured), default=0.0)
        is_untried = has_port and True not in self._rates and self._num_failed_pulls < _MIN_MEASURED
        if transfer_s <= compute_s or is_untried:
            return None
        self._num_computed += 1
        return None if self._num_computed % _RETRY_EACH == 0 else transfer_s


class DecodeRole:
    """Sends prompts to prefill servers.

    Args:
        servers: the prefill servers.
    """

    def __init__(self, options: RoleOptions, servers: PrefillServers) -> None:
        self._options = options
        self._servers = servers
        self._format: CurrentBlockFormat | None = None
        self._port: BlockPort | None = None
        self._pull_timeout_s = 0.0
        self._rates = TransferRates()
        self._workers = BlockingPools()
        self._arrivings: dict[str, PrefixImport] = {}
        # By engine id, for requests with a reserved slot that the engine has not received: the rest of the request
        # (None if
        # nothing is left) and its callback.
        self._left: dict[str, tuple[Request | None, OutputCallback]] = {}

    async def prepare(self, model: LoadedModel) -> None:
        """Compute the KV fingerprint of this server."""
        self._format, self._port = CurrentBlockFormat(model), model.block_port
        await self._format.get()
        if (options := model.config.cache.data_port) is not None:
            self._pull_timeout_s = options.pull_timeout

    def begin(
        self, model: LoadedModel, request: Request, generation: AdmittedCall, asked: RemotePrefillRequest | None
    ) -> None:
        """Submit a request to the engine, or start its remote prefill in a new task."""
        if asked is not None:
            raise InternalError("a decode server received a remote prefill request")
        reason = why_here(request, self._options.prefill_min_tokens)
        if reason is not None:
            model.role_counts.here(reason)
            model.engine.submit(request, generation.stream.put)
            return
        transfer = model.engine.reserve_slot(request)
        self._left[generation.engine_id] = request, generation.stream.put
        generation.set_task(asyncio.create_task(self._run(model, transfer, request, generation)))

    def end(self, model: LoadedModel, generation: AdmittedCall) -> None:
        """Stop the request's task and transfer; the service then makes the engine drop it if it has not ended."""
        generation.set_task(None)
        self._let_go(generation)
        self._left.pop(generation.engine_id, None)

    def submit_now(self, model: LoadedModel, generation: AdmittedCall) -> bool:
        """Submit the rest of a request to the engine now, without waiting for its transfer."""
        if generation.engine_id not in self._left:
            return False
        generation.set_task(None)
        self._hand_over(model, generation.engine_id)
        return True

    def _hand_over(self, model: LoadedModel, engine_id: str) -> None:
        left, sink = self._left.pop(engine_id)
        if left is None:
            model.engine.drop(engine_id)
        else:
            model.engine.submit(left, sink)

    def _let_go(self, generation: AdmittedCall) -> None:
        """Stop writing blocks for a request."""
        arriving = self._arrivings.pop(generation.engine_id, None)
        if arriving is not None:
            arriving.close()

    async def _run(self, model: LoadedModel, transfer: KVTransfer, request: Request, generation: AdmittedCall) -> None:
        try:
            await self._begin_elsewhere(model, transfer, request, generation)
            self._hand_over(model, generation.engine_id)
        except JpagedError as error:
            generation.end(error=error)
        except Exception as error:  # the reader must receive the error
            generation.end(error=InternalError(f"{type(error).__name__}: {error}"))
            raise
        finally:
            generation.set_task(None, is_done=True)

    async def _begin_elsewhere(
        self, model: LoadedModel, transfer: KVTransfer, request: Request, generation: AdmittedCall
    ) -> None:
        """Run the remote prefill of a request as far as it succeeds; `_left` holds the rest of the request."""
        counts, size = model.role_counts, len(request.prompt_token_ids)
        coming = await self._workers.run(lambda: _PendingTransfer.of(transfer, request), size)
        if size - coming.num_known * transfer.block_size < self._options.prefill_min_tokens:
            counts.here("cached")
            return
        num_bytes = coming.num_missing * coming.arriving.bytes_per_block
        if self._options.prefill_policy == "auto":
            compute_s = transfer.prefill_s(coming.num_known * transfer.block_size, size)
            transfer_s = self._rates.compare(num_bytes, compute_s, has_port=self._port is not None)
            if transfer_s is not None:
                counts.note_slow_transfer(size, transfer_s, compute_s)
                return
        began_s, clock = model.engine.clock(), model.engine.clock
        counts.add(num_asked=1)
        arriving = self._arrivings[generation.engine_id] = coming.arriving
        homes = arriving.reserve(coming.num_missing, is_early=True)  # while waiting for the first token
        try:
            answer = await self._ask(request, coming.num_known, num_bytes, began_s)
        except (JpagedError, TimeoutError) as error:
            counts.failed("prefill", error)
            self._let_go(generation)
            return
        try:
            try:
                behind = await self._publish_token(model, request, answer, generation, began_s)
            except InternalError as error:
                counts.failed("prefill", error)
                self._let_go(generation)
                return
            first_s = clock()
            rest = _RemainingPrompt(arriving, began_s, first_s, answer.num_cached_tokens, generation.stream.put)
            self._left[generation.engine_id] = behind.request, rest.pass_on
            counts.add(prefill_wait_s=first_s - began_s)
            if behind.request is not None:
                until_s = first_s + self._options.transfer_timeout
                until_s = until_s if request.deadline_s is None else min(until_s, request.deadline_s)
                await self._fetch(model, coming, await _whole(coming, homes), answer, until_s - clock())
                counts.add(transfer_wait_s=clock() - first_s)
        finally:
            answer.close()

    async def _ask(self, request: Request, num_known: int, num_bytes: int, now_s: float) -> PrefillAnswer:
        options = self._options
        wait_s = options.prefill_timeout
        if request.deadline_s is not None:
            wait_s = min(wait_s, request.deadline_s - now_s)
        if wait_s <= 0:
            raise DeadlineExceeded("no time is left to ask a prefill server")
        whole_s = wait_s + options.transfer_timeout
        assert self._format is not None
        blocks = await self._format.get()
        if self._port is None or not self._rates.choose_port(num_bytes):
            blocks = dataclasses.replace(blocks, data_protocol="")
        return await self._servers.ask(request, num_known, blocks, wait_s, whole_s)

    async def _publish_token(
        self, model: LoadedModel, request: Request, answer: PrefillAnswer, generation: AdmittedCall, began_s: float
    ) -> Begun:
        """Emit the first tokens. If they cannot be the request's, raise InternalError before emitting any."""
        eos, vocab_size = model.input_processor.eos_token_ids, model.engine.geometry.vocab_size

        def work() -> Begun:
            tokens = answer.tokens
            return begun(request, tokens, answer.num_cached_tokens, model.tokenizer, eos, vocab_size)

        behind = await self._workers.run(work, len(request.prompt_token_ids))
        *others, last = behind.events
        if behind.request is None:  # the engine emits no event for it, so the times are set here
            now_s = model.engine.clock()
            last = dataclasses.replace(last, times=RequestTimes(began_s, began_s, now_s, now_s))
        for event in (*others, last):
            generation.stream.put(event)
        return behind

    async def _fetch(
        self, model: LoadedModel, coming: _PendingTransfer, homes: Sequence[int], answer: PrefillAnswer, wait_s: float
    ) -> None:
        """Transfer the blocks that the peer has. Count why blocks are missing; the engine computes them."""
        counts, clock, began_s = model.role_counts, model.engine.clock, model.engine.clock()
        arriving, moved, is_port = coming.arriving, {True: 0, False: 0}, False
        most = len(arriving.chain.keys) * arriving.num_kv_groups  # some blocks that arrive may already be here
        receiving = Receiving(arriving, most, coming.keys)
        receiving.give(homes)
        if len(homes) < coming.num_missing:
            counts.add(num_blocks_without_room=coming.num_missing - len(homes))
        try:
            async with asyncio.timeout(wait_s):
                async for part in answer.parts():
                    num_before = receiving.num_blocks
                    is_port = isinstance(part, BlockOffer)
                    if isinstance(part, BlockOffer):
                        num_bytes = await self._pull(model, receiving, coming, answer, part)
                    else:
                        await self._workers.run(functools.partial(receiving.take, part), _BIG)
                        num_bytes = sum(len(piece.contents) for piece in part)
                    moved[is_port] += num_bytes
                    counts.add(num_blocks_received=receiving.num_blocks - num_before, num_bytes_received=num_bytes)
                    if receiving.is_full:
                        return
            if any(moved.values()) and not all(moved.values()):
                self._rates.record(sum(moved.values()), clock() - began_s, is_port=moved[True] > 0)
            num_written = receiving.num_blocks - receiving.num_known
            if num_written < len(homes):
                counts.add(num_blocks_missing=len(homes) - num_written)
        except (JpagedError, TimeoutError) as error:
            counts.failed("transfer", error)
            if isinstance(error, TimeoutError | DeadlineExceeded):  # all blocks would have taken at least this long
                self._rates.record_timeout(len(homes) * arriving.bytes_per_block, clock() - began_s, is_port=is_port)

    async def _pull(
        self,
        model: LoadedModel,
        receiving: Receiving,
        coming: _PendingTransfer,
        answer: PrefillAnswer,
        offer: BlockOffer,
    ) -> int:
        """Pull an offer, and return the bytes; 0 if that fails, after which the server sends the blocks as pieces."""
        began_s, counts, is_received = model.engine.clock(), model.role_counts, False
        arriving, block_size = coming.arriving, model.engine.kv_transfer.block_size
        try:
            if self._port is None:
                raise Unavailable("no data port")
            last = max(index for index, _ in offer.positions)
            is_same_size = offer.block_shape[1] == block_size
            if is_same_size and tuple(coming.keys[last : last + 1]) != (offer.last_key,):
                raise InvalidArgument("last_key", "is not the key of the block's tokens")
            port, place = self._port, arriving.place
            pull = await self._workers.run(lambda: port.pull(offer, place), _BIG)
            await _wait_for_pull(pull, self._pull_timeout_s)
            contents, positions = await self._workers.run(pull.take, _BIG)
            await self._workers.run(lambda: receiving.take_arrays(contents, positions), _BIG)
            is_received = True
        except (JpagedError, TimeoutError) as error:
            counts.note_failed_pull(error)
            self._rates.note_failed_pull()
            return 0
        finally:
            answer.finish_pull(offer.uuid, is_received=is_received)
        num_bytes = len(offer.positions) * arriving.bytes_per_block * offer.block_shape[1] // block_size
        counts.add(num_pulls=1, num_bytes_pulled=num_bytes, pull_s=model.engine.clock() - began_s)
        return num_bytes


async def _wait_for_pull(pull: BlockPull, timeout_s: float) -> None:
    """Wait until a pull is done; abandon it after a timeout, or if the request ends."""
    until_s, is_done = asyncio.get_running_loop().time() + timeout_s, False
    try:
        while not (is_done := pull.is_done):
            if asyncio.get_running_loop().time() > until_s:
                raise TimeoutError(f"a pull of blocks took over {timeout_s:g} s")
            await asyncio.sleep(_PULL_POLL_S)
    finally:
        if not is_done:
            pull.abandon()


async def _whole(coming: _PendingTransfer, homes: Future[list[int]]) -> list[int]:
    """Wait for host blocks, and reserve the remainder if the early reservation got only some."""
    early: list[int] = await asyncio.wrap_future(homes)
    if len(early) == coming.num_missing:
        return early
    rest: list[int] = await asyncio.wrap_future(coming.arriving.reserve(coming.num_missing - len(early)))
    return early + rest


@dataclasses.dataclass(frozen=True, slots=True)
class _PendingTransfer:
    """The blocks of a prompt that are to be transferred.

    Attributes:
        num_known: leading blocks that are here, or on disk if loading is faster than computing.
        num_missing: missing blocks after those, of all KV groups.
        keys: keys of the prompt's blocks, as sent in messages.
    """

    arriving: PrefixImport
    keys: Sequence[BlockHash]
    num_known: int
    num_missing: int

    @classmethod
    def of(cls, transfer: KVTransfer, request: Request) -> _PendingTransfer:
        """Look up the blocks of a prompt. Run on a thread, as `_get_chains`."""
        chain, keys = _get_chains(transfer, request)
        arriving, num_known = transfer.arrive(chain), transfer.num_findable(chain)
        return cls(arriving, keys, num_known, len(arriving.missing(num_known)))


@dataclasses.dataclass(slots=True)
class _RemainingPrompt:
    """Rewrites the events after the first tokens as if the engine had run the whole request.

    The first event implies that the engine has the blocks that it needs of the transfer, so the transfer is closed.
    """

    arriving: PrefixImport
    began_s: float
    first_s: float
    num_cached_tokens: int
    put: OutputCallback
    has_begun: bool = False

    def pass_on(self, event: OutputEvent) -> None:
        """Handle an event, on the engine's thread."""
        if not self.has_begun:
            self.has_begun = True
            self.arriving.close()
        if event.usage.cached_tokens != self.num_cached_tokens:
            usage = dataclasses.replace(event.usage, cached_tokens=self.num_cached_tokens)
            event = dataclasses.replace(event, usage=usage)
        if event.times is not None:
            times = dataclasses.replace(
                event.times, arrival_s=self.began_s, first_scheduled_s=self.began_s, first_token_s=self.first_s
            )
            event = dataclasses.replace(event, times=times)
        self.put(event)
