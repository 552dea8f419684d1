"""What all servers have to keep: pinned prefixes and adapters that were loaded while they ran.

    PinPrefix, LoadAdapter       every server does it, or those that did undo it, and the call fails as the first did
    UnpinPrefix, UnloadAdapter   every server that has it undoes it; NOT_FOUND where none has
    a server comes later         does what stands before it takes calls
    a server comes again         undoes what was undone meanwhile, too

What servers were started with is theirs, and not known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from jpaged._proto.v1 import control_pb2
from jpaged.client.failures import error_of
from jpaged.errors import (
    AlreadyExists,
    JpagedError,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from jpaged.route.callers import Metadata, caused, owner_of
from jpaged.route.fleet import Fleet, Member

_LOG = logging.getLogger(__name__)

UNDOING: Mapping[str, str] = {"PinPrefix": "UnpinPrefix", "LoadAdapter": "UnloadAdapter"}
DOING: Mapping[str, str] = {undo: do for do, undo in UNDOING.items()}
_REQUESTS: Mapping[str, Any] = {name: vars(control_pb2)[f"{name}Request"] for name in (*UNDOING, *DOING)}
_OF_TENANTS = "PinPrefix"
"""Names of prefixes are of tenants; those of adapters are of all."""
MAX_STANDING_BYTES = 256 << 20
Key = tuple[str, bytes, str]


@dataclass(frozen=True, slots=True)
class Act:
    """One call that a server is asked for."""

    method: str
    content: bytes
    metadata: Metadata


class Acts:
    """Calls that all servers of a fleet answer alike. One at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = asyncio.Lock()
        self._standing: dict[Key, Act] = {}
        self._undone: dict[str, dict[Key, Act]] = {}
        self._running = set[asyncio.Future[bytes]]()

    async def run(self, method: str, request: Any, metadata: Metadata) -> bytes:
        """Have all servers do it; the answer is that of one. It goes on although the caller goes away meanwhile.

        Raises:
            JpagedError: not all did; what the first of them failed with.
        """
        act = Act(method, request.SerializeToString(), metadata)
        task = asyncio.ensure_future(self._do(act) if method in UNDOING else self._undo(act))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def bring(self, member: Member) -> None:
        """Have a server that comes keep what all keep.

        Raises:
            Unavailable: it cannot.
        """
        async with self._lock:
            for key, act in list(self._undone.pop(member.name, {}).items()):
                if key not in self._standing:
                    await self._repeat(member, act, NotFound)
            for key, act in list(self._standing.items()):
                try:
                    await self._repeat(member, act, AlreadyExists)
                except (Unauthenticated, PermissionDenied) as error:
                    _LOG.error("%s %s is not repeated any more, for who asked may not: %s", act.method, key[2], error)
                    del self._standing[key]

    async def _repeat(self, member: Member, act: Act, is_done: type[JpagedError]) -> None:
        _, error = (await _each([member], act))[0]
        if error is None or isinstance(error, is_done):
            return
        if isinstance(error, Unauthenticated | PermissionDenied):
            raise error
        raise Unavailable(f"{act.method} fails there, which the others did: {error}") from error

    async def _do(self, act: Act) -> bytes:
        key = _key(act)
        async with self._lock:
            members = self._members()
            if sum(len(one.content) for one in self._standing.values()) + len(act.content) > MAX_STANDING_BYTES:
                raise LimitExceeded(
                    f"{act.method}: what is kept for servers to come is over {MAX_STANDING_BYTES} bytes"
                )
            answers = await _each(members, act)
            failed = [(one, error) for one, (_, error) in zip(members, answers, strict=True) if error is not None]
            if failed:
                done = [one for one, (_, error) in zip(members, answers, strict=True) if error is None]
                await self._take_back(done, key, act)
                raise _of_one(failed, len(members), "those that did have undone it" if done else "")
            self._standing[key] = act
            for undone in self._undone.values():
                undone.pop(key, None)
            return answers[0][0]

    async def _undo(self, act: Act) -> bytes:
        key = _key(act)
        async with self._lock:
            members = self._members()
            answers = await _each(members, act)
            self._standing.pop(key, None)
            for name, member in self._fleet.members.items():
                if not member.is_admitted:
                    self._undone.setdefault(name, {})[key] = act
            self._undone = {name: acts for name, acts in self._undone.items() if name in self._fleet.members}
            failed = [(one, error) for one, (_, error) in zip(members, answers, strict=True) if error is not None]
            hard = [pair for pair in failed if not isinstance(pair[1], NotFound)]
            if hard or len(failed) == len(members):
                raise _of_one(hard or failed, len(members), "")
            return next(content for content, error in answers if error is None)

    async def _take_back(self, done: Sequence[Member], key: Key, act: Act) -> None:
        request = _REQUESTS[UNDOING[act.method]](name=key[2])
        undo = Act(UNDOING[act.method], request.SerializeToString(), act.metadata)
        for member, (_, error) in zip(done, await _each(done, undo), strict=True):
            if error is not None and not isinstance(error, NotFound):
                _LOG.error("%s: %s %s could not be undone: %s", member.name, act.method, key[2], error)
                self._undone.setdefault(member.name, {})[key] = undo

    def _members(self) -> list[Member]:
        members = self._fleet.admitted()
        if not members:
            raise Unavailable(f"no server takes calls: {self._fleet.problems()}")
        return members


def _key(act: Act) -> Key:
    request = _REQUESTS[act.method].FromString(act.content)
    kind = DOING.get(act.method, act.method)
    return kind, owner_of(act.metadata) if kind == _OF_TENANTS else b"", request.name


async def _each(members: Sequence[Member], act: Act) -> list[tuple[bytes, JpagedError | None]]:
    """Ask servers at one time; the answer of each, or what it failed with."""

    async def ask(member: Member) -> tuple[bytes, JpagedError | None]:
        try:
            return await member.endpoint.methods[act.method](act.content, metadata=act.metadata), None
        except aio.AioRpcError as error:
            return b"", caused(error)

    return list(await asyncio.gather(*(ask(one) for one in members)))


def _of_one(failed: Sequence[tuple[Member, JpagedError]], num_members: int, more: str) -> JpagedError:
    """Return the first failure as the caller is told of it: at which server, and of how many."""
    member, error = failed[0]
    cause = error.__cause__
    if num_members == 1 or not isinstance(cause, aio.AioRpcError):
        return error
    where = f"at {member.name}, one of {len(failed)} of {num_members} servers that did not do it"
    text = f"{cause.details()} ({where}{'; ' if more else ''}{more})"
    code: grpc.StatusCode = cause.code()
    return error_of(code, text, tuple(cause.trailing_metadata() or ()))
