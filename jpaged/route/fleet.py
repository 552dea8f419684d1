"""The backend servers of a router: names, health, model, and admission.

    named ──watch: SERVING──> its model? ──the fleet's──> control calls in effect ──> admitted ──> calls
       ^                          └─another─> not admitted                               │
       └──────────────── NOT_SERVING (loading, draining, stalled), or gone ──────────────┘

Each server's health is watched, so that a draining server gets no new calls; its open calls continue. All servers have
one model, that of the first one admitted, as long as one with that model is named. Models are equal if the servers
report equal properties and, if both report one, equal checkpoint fingerprints.

A connection uses the certificates of the time when it was made. When they change, servers that are not admitted are
reconnected, and others when their connection is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2

from jpaged._proto.v1 import control_pb2
from jpaged.access.tls import FileWatch
from jpaged.client.channel import Backoff, Tls, open_channel, proxy_name
from jpaged.client.convert import get_metadata
from jpaged.client.errors import error_details, translated
from jpaged.client.routing.endpoints import ASK_TIMEOUT_S, SERVING, Endpoint, Endpoints, Question
from jpaged.errors import InvalidArgument, JpagedError, Unavailable, describe_error
from jpaged.route.kv_event_index import KVEventEndpoints, KVEventIndex, resolve_kv_event_endpoints
from jpaged.route.methods import VIA_KEY, channel_methods
from jpaged.route.prefix_table import PrefixTable
from jpaged.route.targets import Address, BackendTargets

_LOG = logging.getLogger(__name__)

LOOK_S = 0.25
"""Interval of due queries."""
_CLOSE_GRACE_S = 5.0
"""The last calls of a dropped server have this time between their last message, which ends them, and their status."""
_LOOKS_A_LIST = 4
"""The list of targets is read once a second."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0),)
"""Keeps the receive window of a stream at 64 KiB if it is not read; otherwise it grows to MiBs under load."""
Bring = Callable[["Backend"], Awaitable[None]]


class RouterCounts:
    """Counters of a router. Written on its event loop, read on the thread of a scrape.

    Attributes:
        ended: ended calls, by method and status.
        begun: calls started at a server, by server; a retried call counts several times.
        retried: calls retried because a server was gone, refused them or failed, by server.
        resumed: streams resumed on a server, by server.
        messages: stream messages forwarded, by source server.
        tokens: tokens in those messages.
        open: open calls.
    """

    def __init__(self) -> None:
        self.ended = Counter[tuple[str, str]]()
        self.begun = Counter[str]()
        self.retried = Counter[str]()
        self.resumed = Counter[str]()
        self.messages = Counter[str]()
        self.tokens = Counter[str]()
        self.open = 0

    def forget(self, target: str) -> None:
        """Remove the counters of a server."""
        for count in (self.begun, self.retried, self.resumed, self.messages, self.tokens):
            count.pop(target, None)

    def note_open(self, by: int) -> None:
        """Add to the number of open calls."""
        self.open += by


ROUTER_OPTION = "router-id"
"""Name of the option in GetServerInfo that holds the id of a router."""
_UPSTREAM_S, _MAX_UPSTREAM = 30.0, 1024


class Backend:
    """One named server. Written only by `BackendPool`.

    Attributes:
        endpoint: its connection and load.
        model: its model properties; empty until known.
        info: its server properties.
        is_admitted: it takes part in everything that the fleet does.
        problem: why it is not admitted, as text.
        is_other: it serves, but is not admitted because its model differs from the fleet's.
        files_number: generation of the connection's certificate files, counted from the start.
        kv_event_endpoints: source of the KV events; None if it has none, or is not listened to.
    """

    def __init__(self, address: Address, endpoint: Endpoint, files_number: int = 0) -> None:
        self.address, self.endpoint, self.files_number = address, endpoint, files_number
        self.model = b""
        self.info = control_pb2.GetServerInfoResponse()
        self.is_admitted = self.is_other = False
        self.problem = "it has not responded yet"
        self.kv_event_endpoints: KVEventEndpoints | None = None
        self.following: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Its target."""
        return self.endpoint.name

    @property
    def life(self) -> int:
        """Start time of the server process in nanoseconds; identifies the process."""
        return int(self.info.start_time.ToNanoseconds())


class BackendPool:
    """All servers of a router. Bound to its event loop: `run` until cancelled, then `close`.

    Args:
        held: subscriber of the servers' KV events; None for none.

    Attributes:
        endpoints: the admitted servers.
        members: all named servers, by target.
        model: properties of the fleet's model, as a message; empty if unknown.
        checkpoint: fingerprint of the weights; empty if unknown.
        router_id: id of this router in the metadata of calls, to detect loops.
        model_number: changes when the fleet switches to another model.
    """

    def __init__(
        self,
        targets: BackendTargets,
        directory: PrefixTable,
        counts: RouterCounts,
        tls: Tls | None,
        api_key: str,
        held: KVEventIndex | None = None,
    ) -> None:
        self.directory, self.counts, self.held = directory, counts, held
        self.endpoints = Endpoints(
            (), lambda one, question: self._start(self._hear(one, question)), placement=directory, is_watched=True
        )
        self.members: dict[str, Backend] = {}
        self.model, self.checkpoint = b"", ""
        self.model_number = 0
        self._bring: Bring = _bring_nothing
        self._targets = targets
        self._tls = tls
        files = () if tls is None else (tls.ca, tls.cert, tls.key)
        self._files, self._files_number = FileWatch([path for path in files if path is not None]), 0
        self.router_id = uuid.uuid4().hex
        self._metadata = (*get_metadata("", api_key), (VIA_KEY, self.router_id))
        self._upstream: dict[str, float] = {}
        self._tasks = set[asyncio.Task[None]]()
        self._leaving: list[Backend] = []
        self._news = asyncio.Event()

    def set_bring(self, bring: Bring) -> None:
        """Set the function that brings a server to the fleet's control state; call before `run`."""
        self._bring = bring

    def note_upstream(self, router_ids: Iterable[str]) -> None:
        """Record routers that send calls here: they are not admitted for a while, or calls would loop."""
        now_s = time.monotonic()
        for router_id in router_ids:
            self._upstream.pop(router_id, None)
            self._upstream[router_id] = now_s
            if len(self._upstream) > _MAX_UPSTREAM:
                del self._upstream[next(iter(self._upstream))]

    def admitted(self) -> list[Backend]:
        """Return the admitted servers."""
        return [one for one in self.members.values() if one.is_admitted]

    async def until_any(self, within_s: float) -> None:
        """Wait until a server is available.

        Raises:
            Unavailable: none was available in time; gives the reason of each.
        """
        until_s = time.monotonic() + within_s
        while not self.endpoints.has_any():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise Unavailable(f"no server accepts calls: {self.problems()}")
            news = self._news
            try:
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await news.wait()
            except TimeoutError:
                continue

    def problems(self) -> str:
        """Return the reasons why servers are not admitted, for some of them."""
        found = [f"{one.name}: {one.problem}" for one in self.members.values() if not one.is_admitted]
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        return "; ".join(found[:4]) + more if found else "all are unreachable"

    async def run(self) -> None:
        """Follow the list of targets, and query servers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_lists())
            while True:
                self.endpoints.look()
                self._let_go()
                await asyncio.sleep(LOOK_S)

    async def _follow_lists(self) -> None:
        """Follow the list of targets in a separate task, because name lookups may take long."""
        while True:
            if self._tls is not None and await asyncio.to_thread(self._files.has_changed):
                self._files_number += 1
                _LOG.info("certificates have changed: new connections use the new ones")
            self._follow_list(await self._targets.now())
            await asyncio.sleep(_LOOKS_A_LIST * LOOK_S)

    async def close(self) -> None:
        """Cancel queries, and close the connections."""
        ending = [task for task in (*self._tasks, *(one.following for one in self.members.values())) if task]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for member in (*self.members.values(), *self._leaving):
            await member.endpoint.channel.close()
        if self.held is not None:
            await asyncio.to_thread(self.held.end)

    def _follow_list(self, addresses: tuple[Address, ...]) -> None:
        wanted = {one.target: one for one in addresses}
        for target, member in list(self.members.items()):
            if wanted.get(target) != member.address:
                self._drop(self.members.pop(target), "it is no longer a target")
            elif not member.is_admitted and member.files_number != self._files_number:
                self._drop(self.members.pop(target), "it is reconnected, because certificates have changed")
        for target, address in wanted.items():
            if target not in self.members:
                try:
                    channel = open_channel(aio, target, self._tls, name=address.name, more=_SMALL_WINDOWS)
                except InvalidArgument as error:  # the files may be in the middle of a change: retry later
                    _LOG.error("%s: cannot connect: %s", target, error)
                    continue
                endpoint = Endpoint(target, channel, channel_methods(channel), proxy_name(target, None))
                member = Backend(address, endpoint, self._files_number)
                member.following = asyncio.get_running_loop().create_task(self._follow(member))
                self.members[target] = member

    def _drop(self, member: Backend, problem: str) -> None:
        """Give a server no new calls, and drop it when its last call has ended."""
        _LOG.warning("%s: %s; %d open calls continue there", member.name, problem, member.endpoint.num_open)
        self._dismiss(member, problem)
        self.directory.end(member.name)
        self._listen(member, None)
        if member.following is not None:
            member.following.cancel()
        self._leaving.append(member)

    def _let_go(self) -> None:
        """Close the connections of dropped servers without open calls."""
        for member in [one for one in self._leaving if not one.endpoint.num_open]:
            self._leaving.remove(member)
            self._start(self._disconnect(member))

    async def _disconnect(self, member: Backend) -> None:
        channel = member.endpoint.channel
        try:
            await channel.close(_CLOSE_GRACE_S)
        finally:
            await channel.close()  # without the rest of the grace, if the router stops
        if member.name not in self.members:
            self.counts.forget(member.name)

    async def _follow(self, member: Backend) -> None:
        """Watch one server's health as long as it is named."""
        pauses = _pauses()
        while True:
            watch = member.endpoint.health.Watch(health_pb2.HealthCheckRequest())
            try:
                async for answer in watch:
                    if answer.status == SERVING:
                        await self._admit(member)
                        pauses = _pauses()
                    else:
                        self._dismiss(member, "it is loading, draining or stalled: its health is not SERVING")
                self._dismiss(member, "it has ended the health watch")
            except aio.AioRpcError as error:
                self._dismiss(member, f"{error.code().name}: {error_details(error, member.endpoint.proxy)}")
            except JpagedError as error:
                self._dismiss(member, describe_error(error))
            except Exception as error:  # one server's error (it may not be jpaged) must not affect the others
                _LOG.exception("%s: cannot parse its response", member.name)
                self._dismiss(member, f"its response cannot be parsed: {type(error).__name__}: {error}")
            finally:
                watch.cancel()
            await asyncio.sleep(pauses.next_s())

    async def _admit(self, member: Backend) -> None:
        """Admit a server.

        Raises:
            JpagedError: the reason why it is not admitted.
        """
        methods, times = member.endpoint.methods, {"timeout": ASK_TIMEOUT_S, "metadata": self._metadata}
        try:
            model = await methods["model"](control_pb2.GetModelInfoRequest(), **times)
            info = await methods["info"](control_pb2.GetServerInfoRequest(), **times)
        except aio.AioRpcError as error:
            raise translated(error, member.endpoint.proxy) from error
        if model is None or info is None:
            raise Unavailable("its response is not a message of jpaged.v1")
        if info.role == "prefill":
            raise Unavailable("it only computes prompts for other servers (role prefill)")
        router_id = next((one.value for one in info.options if one.name == ROUTER_OPTION), "")
        if router_id and time.monotonic() - self._upstream.get(router_id, -math.inf) < _UPSTREAM_S:
            raise Unavailable("it is a router that sends calls to this one, which would be a loop")
        self._note_identity(member, model, info)
        others = [one for one in self.members.values() if one is not member and _is_alike(self, one)]
        if not _is_alike(self, member) and (not (self.model and others) or self._is_outvoted_by(member)):
            self._change_model(member)
        if not _is_alike(self, member):
            self._dismiss(member, problem := f"it serves another model than the fleet: {_differences(self, member)}")
            member.is_other = True
            raise Unavailable(problem)
        await self._bring(member)
        if self.members.get(member.name) is not member or not _is_alike(self, member):
            return
        self.checkpoint = self.checkpoint or member.info.checkpoint
        if not member.is_admitted:
            _LOG.info("%s accepts calls", member.name)
        self._note_admitted(member)

    def _note_identity(self, member: Backend, model: Any, info: Any) -> None:
        before = member.life
        member.model, member.info = model.SerializeToString(deterministic=True), info
        if member.life != before:
            self.directory.begin(member.name)
        try:
            telling = resolve_kv_event_endpoints(member.address, info)
        except Unavailable as error:
            _LOG.warning(
                "%s: its cached prefixes are unknown, because its KV events cannot be reached: %s", member.name, error
            )
            telling = None
        if member.life != before or telling != member.kv_event_endpoints:
            self._listen(member, telling)

    def _listen(self, member: Backend, telling: KVEventEndpoints | None) -> None:
        """Subscribe to a server's KV events from now on, and drop its earlier ones."""
        member.kv_event_endpoints = telling
        if self.held is None:
            return
        former = self.held.forget(member.name)
        if telling is not None:
            try:
                self.held.listen(member.name, telling)
            except InvalidArgument as error:
                _LOG.warning("%s: its cached prefixes are unknown: %s", member.name, error)
        if former:
            self._start(asyncio.to_thread(self.held.close, former))

    def _note_admitted(self, member: Backend) -> None:
        member.is_admitted, member.problem = True, ""
        self.endpoints.add(member.endpoint)
        self.endpoints.note_answer(member.endpoint)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _is_outvoted_by(self, member: Backend) -> bool:
        """Return True if more servers have this server's model than the fleet's."""
        like = [one for one in self.members.values() if one is member or (one.is_other and _are_alike(one, member))]
        return len(like) > len(self.admitted())

    def _change_model(self, member: Backend) -> None:
        self.model, self.checkpoint = member.model, member.info.checkpoint
        self.model_number += 1
        for other in self.members.values():
            if other.is_admitted and not _is_alike(self, other):
                self._dismiss(other, "it serves another model than the fleet")
                other.is_other = True

    def _dismiss(self, member: Backend, problem: str) -> None:
        """Give a server no new calls; its open calls continue."""
        if member.is_admitted or member.problem != problem:
            _LOG.warning("%s accepts no calls: %s", member.name, problem)
        member.is_other = member.is_other and member.problem == problem  # it is refused for the same reason again
        member.is_admitted, member.problem = False, problem
        self.endpoints.remove(member.endpoint)

    async def _hear(self, endpoint: Endpoint, question: Question) -> None:
        answer: Any = None
        failure: JpagedError | None = None
        try:
            if question == "health":
                answer = await endpoint.health.Check(health_pb2.HealthCheckRequest(), timeout=ASK_TIMEOUT_S)
            else:
                ask = control_pb2.GetLoadRequest()
                answer = await endpoint.methods["load"](ask, timeout=ASK_TIMEOUT_S, metadata=self._metadata)
            if answer is None:  # the response cannot be decoded
                failure = Unavailable(f"{endpoint.name} sent an invalid response to GetLoad")
        except aio.AioRpcError as error:
            failure = translated(error, endpoint.proxy)
        self.endpoints.handle_answer(endpoint, question, answer, failure)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _pauses() -> Backoff:
    return Backoff(_FIRST_PAUSE_S, 2.0, _MAX_PAUSE_S)


async def _bring_nothing(member: Backend) -> None:
    """Do nothing: the fleet has no control state."""


def _are_alike(one: Backend, other: Backend) -> bool:
    """Return True if two servers have the same model and checkpoint."""
    return one.model == other.model and one.info.checkpoint == other.info.checkpoint


def _is_alike(fleet: BackendPool, member: Backend) -> bool:
    """Return True if a server has the fleet's model, as far as known."""
    told = member.info.checkpoint
    return member.model == fleet.model and (not told or not fleet.checkpoint or told == fleet.checkpoint)


def _differences(fleet: BackendPool, member: Backend) -> str:
    """Return the fields in which a server's model differs from the fleet's."""
    ours, theirs = (control_pb2.GetModelInfoResponse.FromString(content) for content in (fleet.model, member.model))
    fields: Mapping[str, Any] = ours.DESCRIPTOR.fields_by_name
    found = [f"{name} is {getattr(theirs, name)}, not {getattr(ours, name)}" for name in fields
             if getattr(ours, name) != getattr(theirs, name)]  # fmt: skip
    weights = f"its weights differ: its checkpoint is {member.info.checkpoint}, not {fleet.checkpoint}"
    return ", ".join(found) or weights
