"""Calls about all servers: total load, common adapters, abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from jpaged._proto.v1 import control_pb2
from jpaged.client.channel import Backoff
from jpaged.client.routing.endpoints import Endpoint
from jpaged.errors import DeadlineExceeded, JpagedError, NotFound, Unavailable
from jpaged.route.callers import Metadata, caused, owner_of
from jpaged.route.fleet import ROUTER_OPTION, Fleet
from jpaged.route.relay import CountedTries, Relay
from jpaged.version import __version__

_MEAN_OVER = {"slot_use": "num_steps"}
"""Load fields that are means, and their weights; all others are summed."""
_LIST_TIMEOUT_S = 5.0
_ABORT_WITHIN_S = 30.0
_ABORT_PAUSE_S, _MAX_ABORT_PAUSE_S = 0.05, 1.0
Options = Sequence[tuple[str, str, str]]


class Fleetwide:
    """Answers calls about all servers.

    Args:
        options: options of the router: name, value, source.
        is_draining: returns True during a drain.
    """

    def __init__(self, fleet: Fleet, relay: Relay, options: Options, is_draining: Callable[[], bool]) -> None:
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
            if member.telling is not None and self._fleet.held is not None:
                is_heard, where = self._fleet.held.is_heard(member.name), member.telling.sockets[0][0]
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
        key, content = (owner_of(metadata), request.request_id), request.SerializeToString()
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
