"""Calls about all servers: total load, common adapters, abort, and control calls that apply to every server.

    PinPrefix, LoadAdapter       every server does it; on a failure the others undo it, and the call fails likewise
    UnpinPrefix, UnloadAdapter   every server that has it undoes it; NOT_FOUND if none has
    a new server                 repeats all calls in effect before it is admitted
    a returning server           also undoes what was undone in the meantime, and what it may have done of failed calls

Prefixes and adapters from the servers' start options are not tracked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from jpaged._proto.v1 import control_pb2
from jpaged.client.channel import Backoff
from jpaged.client.errors import build_error
from jpaged.client.routing.endpoints import Endpoint
from jpaged.errors import (
    AlreadyExists,
    DeadlineExceeded,
    JpagedError,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from jpaged.route.fleet import ROUTER_OPTION, Backend, BackendPool
from jpaged.route.methods import Metadata, caused, get_owner
from jpaged.route.relay import CountedTries, Proxy
from jpaged.version import __version__

_LOG = logging.getLogger(__name__)

UNDOING: Mapping[str, str] = {"PinPrefix": "UnpinPrefix", "LoadAdapter": "UnloadAdapter"}
DOING: Mapping[str, str] = {undo: do for do, undo in UNDOING.items()}
_REQUESTS: Mapping[str, Any] = {name: vars(control_pb2)[f"{name}Request"] for name in (*UNDOING, *DOING)}
_OF_TENANTS = "PinPrefix"
"""Prefix names are scoped by tenant; adapter names are global."""
MAX_STANDING_BYTES = 256 << 20
ACT_TIMEOUT_S = 600.0
"""A server that exceeds this timeout counts as gone."""
_MAX_UNDONE = 4096
"""Limit of pending undo calls per absent server, for names that were not set through this router."""
_LOST = (Unavailable, DeadlineExceeded)
"""Errors after which a server may still have done the call."""
_MAY_NOT = (Unauthenticated, PermissionDenied)
ControlKey = tuple[str, bytes, str]


@dataclass(frozen=True, slots=True)
class ControlOperation:
    """One control call to a server."""

    method: str
    content: bytes
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class DesiredState:
    """A control call in effect.

    Attributes:
        at: names of servers that did it; one of them may be away, or have restarted.
    """

    act: ControlOperation
    at: set[str]


class ReplicatedControl:
    """Replicates control calls to all servers of a fleet, one at a time."""

    def __init__(self, fleet: BackendPool) -> None:
        self._fleet = fleet
        self._lock = asyncio.Lock()
        self._standing: dict[ControlKey, DesiredState] = {}
        self._undone: dict[str, dict[ControlKey, ControlOperation]] = {}
        self._running = set[asyncio.Future[bytes]]()

    async def run(self, method: str, request: Any, metadata: Metadata) -> bytes:
        """Run a call on all servers and return one of the responses. Continues even if the caller is cancelled.

        Raises:
            JpagedError: not all servers did it; the first error.
        """
        act = ControlOperation(method, request.SerializeToString(), metadata)
        task = asyncio.ensure_future(self._do(act) if method in UNDOING else self._undo(act))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def reconcile(self, member: Backend) -> None:
        """Bring a new or returning server to the state of the fleet.

        Raises:
            Unavailable: one of the calls failed.
        """
        async with self._lock:
            for key, act in list(self._undone.get(member.name, {}).items()):
                if key not in self._standing:
                    await self._repeat(member, act, NotFound)
                del self._undone[member.name][key]
            self._undone.pop(member.name, None)
            for key, one in list(self._standing.items()):
                if await self._repeat(member, one.act, AlreadyExists):
                    one.at.add(member.name)
                else:
                    del self._standing[key]

    async def _repeat(self, member: Backend, act: ControlOperation, is_done: type[JpagedError]) -> bool:
        """Repeat a call on one server; return False if the caller is no longer authorized."""
        _, error = (await _each([member], act))[0]
        if isinstance(error, _MAY_NOT):
            _LOG.error("%s is no longer repeated, because its caller lacks permission: %s", act.method, error)
            return False
        if error is not None and not isinstance(error, is_done):
            raise Unavailable(f"{act.method} fails on this server, but succeeded on the others: {error}") from error
        return True

    async def _do(self, act: ControlOperation) -> bytes:
        key = _key(act)
        async with self._lock:
            members = self._members()
            if sum(len(one.act.content) for one in self._standing.values()) + len(act.content) > MAX_STANDING_BYTES:
                raise LimitExceeded(
                    f"{act.method}: the operations kept for new servers are over {MAX_STANDING_BYTES} bytes"
                )
            answers = await _each(members, act)
            failed = [(one, error) for one, (_, error) in zip(members, answers, strict=True) if error is not None]
            if failed:
                done = [one for one, (_, error) in zip(members, answers, strict=True) if error is None]
                # it existed before, so must not be undone
                is_known = any(isinstance(error, AlreadyExists) for _, error in failed)
                unsure = [one for one, error in failed if isinstance(error, _LOST) and not is_known]
                await self._take_back(done, unsure, key, act)
                raise _of_one(failed, len(members), "the other servers have undone it" if done else "")
            self._standing[key] = DesiredState(act, {one.name for one in members})
            return answers[0][0]

    async def _undo(self, act: ControlOperation) -> bytes:
        key = _key(act)
        async with self._lock:
            members = self._members()
            answers = await _each(members, act)
            failed = [(one, error) for one, (_, error) in zip(members, answers, strict=True) if error is not None]
            hard = [pair for pair in failed if not isinstance(pair[1], NotFound)]
            if len(failed) < len(members) or (key in self._standing and len(hard) < len(members)):
                self._forget(key, act, {one.name for one in members} - {one.name for one, _ in hard})
            if hard or len(failed) == len(members):
                raise _of_one(hard or failed, len(members), "")
            return next(content for content, error in answers if error is None)

    def _forget(self, key: ControlKey, act: ControlOperation, undone_at: Set[str]) -> None:
        """Drop a call in effect; servers that did it and have not undone it will undo it when they return."""
        self._undone = {name: acts for name, acts in self._undone.items() if name in self._fleet.members}
        standing = self._standing.pop(key, None)
        for name, member in self._fleet.members.items():
            missed = self._undone.get(name, {})
            has_it = name in standing.at if standing else not member.is_admitted and len(missed) < _MAX_UNDONE
            if has_it and name not in undone_at:
                self._undone[name] = missed | {key: act}

    async def _take_back(
        self, done: Sequence[Backend], unsure: Sequence[Backend], key: ControlKey, act: ControlOperation
    ) -> None:
        """Undo a call on the servers that did it; those that may have done it will undo it when they return."""
        request = _REQUESTS[UNDOING[act.method]](name=key[2])
        undo = ControlOperation(UNDOING[act.method], request.SerializeToString(), act.metadata)
        left = list(unsure)
        for member, (_, error) in zip(done, await _each(done, undo), strict=True):
            if error is not None and not isinstance(error, NotFound):
                _LOG.error("%s: %s %s could not be undone: %s", member.name, act.method, key[2], error)
                left.append(member)
        for member in left:
            self._undone.setdefault(member.name, {})[key] = undo

    def _members(self) -> list[Backend]:
        members = self._fleet.admitted()
        if not members:
            raise Unavailable(f"no server accepts calls: {self._fleet.problems()}")
        return members


def _key(act: ControlOperation) -> ControlKey:
    request = _REQUESTS[act.method].FromString(act.content)
    kind = DOING.get(act.method, act.method)
    return kind, get_owner(act.metadata) if kind == _OF_TENANTS else b"", request.name


async def _each(members: Sequence[Backend], act: ControlOperation) -> list[tuple[bytes, JpagedError | None]]:
    """Call several servers concurrently; return the response or error of each."""

    async def ask(member: Backend) -> tuple[bytes, JpagedError | None]:
        try:
            method = member.endpoint.methods[act.method]
            return await method(act.content, timeout=ACT_TIMEOUT_S, metadata=act.metadata), None
        except aio.AioRpcError as error:
            return b"", caused(error, member.endpoint.proxy)

    return list(await asyncio.gather(*(ask(one) for one in members)))


def _of_one(failed: Sequence[tuple[Backend, JpagedError]], num_members: int, more: str) -> JpagedError:
    """Return the first failure for the caller, with its server and the number of failed servers."""
    member, error = failed[0]
    cause = error.__cause__
    if num_members == 1 or not isinstance(cause, aio.AioRpcError):
        return error
    where = f"at {member.name}, one of {len(failed)} of {num_members} servers that failed"
    text = f"{cause.details()} ({where}{'; ' if more else ''}{more})"
    code: grpc.StatusCode = cause.code()
    return build_error(code, text, tuple(cause.trailing_metadata() or ()))


_MEAN_OVER = {"slot_use": "num_steps"}
"""Load fields that are means, and their weights; all others are summed."""
_LIST_TIMEOUT_S = 5.0
_ABORT_WITHIN_S = 30.0
_ABORT_PAUSE_S, _MAX_ABORT_PAUSE_S = 0.05, 1.0
Options = Sequence[tuple[str, str, str]]


class AggregateCalls:
    """Answers calls about all servers.

    Args:
        options: options of the router: name, value, source.
        is_draining: returns True during a drain.
    """

    def __init__(self, fleet: BackendPool, relay: Proxy, options: Options, is_draining: Callable[[], bool]) -> None:
        self._fleet = fleet
        self._relay = relay
        self._options = options
        self._is_draining = is_draining
        self._start_time = Timestamp()
        self._start_time.GetCurrentTime()

    async def server_info(self) -> bytes:
        """Return the properties of the router and of the servers' backends."""
        members, num_all = self._fleet.admitted(), len(self._fleet.members)
        state = control_pb2.SERVER_STATE_SERVING if members else control_pb2.SERVER_STATE_STARTING
        if self._is_draining():
            state = control_pb2.SERVER_STATE_DRAINING
        told = control_pb2.GetServerInfoResponse(
            server_version=__version__,
            api_version="v1",
            state=state,
            start_time=self._start_time,
            checkpoint=self._fleet.checkpoint if members else "",
            role=", ".join(dict.fromkeys(one.info.role for one in members)),
        )
        if not members:
            told.startup.CopyFrom(control_pb2.StartupProgress(what="servers", done=0, total=max(1, num_all)))
        if members:
            told.backend.CopyFrom(_together([one.info.backend for one in members]))
        told.options.add(name=ROUTER_OPTION, value=self._fleet.router_id, source="this process")
        for name, value, source in self._options:
            told.options.add(name=name, value=value, source=source)
        for member in list(self._fleet.members.values()):
            told.options.add(name=f"target {member.name}", value=member.problem or "accepts calls", source="its health")
            if member.kv_event_endpoints is not None and self._fleet.held is not None:
                is_heard, where = self._fleet.held.is_heard(member.name), member.kv_event_endpoints.sockets[0][0]
                value = f"{self._fleet.held.num_blocks(member.name)} blocks" if is_heard else "not connected"
                told.options.add(name=f"kv-events {member.name}", value=value, source=where)
        return told.SerializeToString()

    async def load(self, metadata: Metadata) -> bytes:
        """Return the total load of all servers.

        Raises:
            JpagedError: no server answered.
        """
        answers = await self._asked("GetLoad", b"", metadata)
        return total_load([control_pb2.GetLoadResponse.FromString(one) for one in answers]).SerializeToString()

    async def adapters(self, metadata: Metadata) -> bytes:
        """Return the adapters that every server has.

        Raises:
            JpagedError: no server answered.
        """
        answers = await self._asked("ListAdapters", b"", metadata)
        lists = [control_pb2.ListAdaptersResponse.FromString(one).adapters for one in answers]
        names = set.intersection(*({adapter.name for adapter in one} for one in lists))
        common = [adapter for adapter in lists[0] if adapter.name in names]
        return control_pb2.ListAdaptersResponse(adapters=common).SerializeToString()

    async def abort(self, request: control_pb2.AbortRequest, metadata: Metadata, remaining_s: float | None) -> bytes:
        """Abort a request on the server that runs it; wait for a request that is moving between servers.

        Raises:
            JpagedError: no server runs it, or the error of the server that does.
        """
        key, content = (get_owner(metadata), request.request_id), request.SerializeToString()
        pauses = Backoff(_ABORT_PAUSE_S, 2.0, _MAX_ABORT_PAUSE_S)  # each attempt calls all servers
        until_s = time.monotonic() + min(_ABORT_WITHIN_S, _ABORT_WITHIN_S if remaining_s is None else remaining_s)
        while True:
            error = await self._abort_once(content, metadata, self._relay.flights.get(key))
            if error is None:
                return b""
            if not isinstance(error, NotFound | Unavailable) or key not in self._relay.flights:
                raise error
            if time.monotonic() >= until_s:
                raise error
            await asyncio.sleep(pauses.next_s())

    async def _abort_once(self, content: bytes, metadata: Metadata, flight: CountedTries | None) -> JpagedError | None:
        asked = [
            one.endpoint for one in self._fleet.members.values() if one.model
        ]  # draining servers run requests, too
        if flight is not None and flight.last is not None and flight.last not in asked:
            asked.append(flight.last)  # it is no longer named
        answers = await asyncio.gather(*(_ask(one, "Abort", content, metadata) for one in asked))
        errors = [answer for answer in answers if isinstance(answer, JpagedError)]
        if len(errors) < len(answers):
            return None
        others = [error for error in errors if not isinstance(error, NotFound | Unavailable)]
        unknown = [error for error in errors if isinstance(error, NotFound)]
        none = Unavailable(f"no server accepts calls: {self._fleet.problems()}")
        return (others or unknown or errors or [none])[0]

    async def _asked(self, method: str, content: bytes, metadata: Metadata) -> list[bytes]:
        """Return the responses of all servers that answered."""
        members = self._fleet.admitted()
        answers = await asyncio.gather(*(_ask(one.endpoint, method, content, metadata) for one in members))
        told = [answer for answer in answers if isinstance(answer, bytes)]
        errors = [answer for answer in answers if isinstance(answer, JpagedError)]
        refused = [error for error in errors if not isinstance(error, Unavailable | DeadlineExceeded)]
        if refused or not told:
            none = Unavailable(f"no server accepts calls: {self._fleet.problems()}")
            raise (refused or errors or [none])[0]
        return told


def total_load(loads: Sequence[control_pb2.GetLoadResponse]) -> control_pb2.GetLoadResponse:
    """Return the combined load of several servers."""
    total = control_pb2.GetLoadResponse()
    for spec in total.DESCRIPTOR.fields:
        values: list[Any] = [getattr(load, spec.name) for load in loads]
        if spec.message_type is not None:
            for value in values:
                getattr(total, spec.name).extend(value)
        elif spec.name in _MEAN_OVER:
            weights = [getattr(load, _MEAN_OVER[spec.name]) for load in loads]
            mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(1, sum(weights))
            setattr(total, spec.name, mean)
        else:
            setattr(total, spec.name, sum(values))
    return total


def _together(backends: Sequence[control_pb2.Backend]) -> control_pb2.Backend:
    """Return the combined backend of all servers: differing kinds are listed, devices are added."""
    names = ("platform", "device_kind", "attention", "jax_version")
    told = {name: ", ".join(dict.fromkeys(getattr(one, name) for one in backends)) for name in names}
    return control_pb2.Backend(num_devices=sum(one.num_devices for one in backends), **told)


async def _ask(endpoint: Endpoint, method: str, content: bytes, metadata: Metadata) -> bytes | JpagedError:
    try:
        answer: bytes = await endpoint.methods[method](content, timeout=_LIST_TIMEOUT_S, metadata=metadata)
    except aio.AioRpcError as error:
        return caused(error, endpoint.proxy)
    return answer
