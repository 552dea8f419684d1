"""The list of servers: named ones, those of a file that may change, and all addresses of a DNS name.

    HOST:PORT
    HOST:PORT,kv-events=tcp://*:5557,kv-events-replay=tcp://*:5558     address of the KV events, if it differs from
    HOST:PORT,kv-events=none                                           the server's own report; * is its host

If a lookup finds nothing, a name keeps its addresses, and if a file is invalid, its targets stay: queries show which
servers are gone.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jpaged.access.tls import BackgroundLook, FileWatch
from jpaged.client.channel import require_target
from jpaged.errors import InvalidArgument, describe_error

_LOG = logging.getLogger(__name__)

_LOOK_TIMEOUT_S = 1.0
"""Timeout for reading the file; a slower read takes effect when it ends."""
MAX_TARGETS = 4096
"""Each server is queried once a second."""
_DNS = re.compile(r"dns:(?:///)?(\[[^\s\[\]]+\]|[^\s:/\[\],]+):([0-9]+)")
NOWHERE = "none"
"""Value in place of an endpoint: do not subscribe to the server."""
_EVENTS, _REPLAY = "kv-events", "kv-events-replay"
_ENDPOINT = re.compile(r"tcp://(?:\[[^\s\[\]]+\]|[^\s:/\[\]]+):([0-9]{1,5})|ipc://\S+")
_MAX_PORT = 65535
_RESOLVE_EVERY = 5
"""Names are looked up every this many looks, files at each."""


@dataclass(frozen=True, slots=True)
class Address:
    """One server.

    Attributes:
        target: gRPC target of the channel.
        name: name that its certificate must have, if `target` is a resolved address.
        events: address of the KV events, or `NOWHERE`; None for the server's own report.
        replay: address for replays of missed events.
    """

    target: str
    name: str | None = None
    events: str | None = None
    replay: str | None = None


def parse_target(field: str, text: str) -> Address:
    """Parse a target, which may be a name of several addresses.

    Raises:
        InvalidArgument: it is invalid; names the field.
    """
    parts = text.split(",")  # a gRPC target may contain commas itself
    first = next((i for i, part in enumerate(parts) if part.startswith(_EVENTS)), len(parts))
    target, words = ",".join(parts[:first]), parts[first:]
    require_target(field, target)
    said: dict[str, str] = {}
    for word in words:
        name, found, value = word.partition("=")
        if not found or name not in (_EVENTS, _REPLAY) or name in said:
            raise InvalidArgument(field, f"{text!r}: {word!r} is neither {_EVENTS}=... nor {_REPLAY}=..., once each")
        match = _ENDPOINT.fullmatch(value)
        is_none = name == _EVENTS and value == NOWHERE
        if not is_none and (match is None or not 1 <= int(match[1] or 1) <= _MAX_PORT):
            raise InvalidArgument(field, f"{text!r}: {word!r} is neither tcp://HOST:PORT nor ipc://PATH")
        said[name] = value
    if _REPLAY in said and said.get(_EVENTS, NOWHERE) == NOWHERE:
        raise InvalidArgument(field, f"{text!r}: {_REPLAY} requires {_EVENTS}=tcp://...")
    return Address(target, None, said.get(_EVENTS), said.get(_REPLAY))


def read_targets(path: str) -> tuple[str, ...]:
    """Return the targets of a file: one per line; comments (#) and empty lines are ignored.

    Raises:
        InvalidArgument: it cannot be read, has no target, an invalid one or a duplicate.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("targets_file", f"{path} cannot be read: {describe_error(error)}") from None
    found = tuple(word for line in lines if (word := line.partition("#")[0].strip()))
    try:
        require_targets("targets_file", found)
    except InvalidArgument as error:
        raise InvalidArgument("targets_file", f"{path}: {error.problem}") from None
    return found


def require_targets(field: str, targets: Sequence[str]) -> None:
    """Reject an invalid list of targets.

    Raises:
        InvalidArgument: it is empty or too long, has a duplicate or an invalid target.
    """
    if not targets:
        raise InvalidArgument(field, "names no target")
    if len(targets) > MAX_TARGETS:
        raise InvalidArgument(field, f"names {len(targets)} targets; at most {MAX_TARGETS}")
    named = [parse_target(field, text).target for text in targets]
    twice = {target for target in named if named.count(target) > 1} if len(set(named)) < len(named) else set()
    if twice:
        raise InvalidArgument(field, f"names {', '.join(sorted(twice)[:4])} twice")


class BackendTargets:
    """The current list of servers.

    Args:
        named: targets of the command line.
        path: path of a file with more targets; None for none.

    Raises:
        InvalidArgument: the list is invalid; names the option.
    """

    def __init__(self, named: Sequence[str], path: str | None) -> None:
        if named or path is None:
            require_targets("target", named)
        self._named = _parsed(named)
        self._path = path
        self._watch = None if path is None else FileWatch([path])
        self._look = BackgroundLook("targets_file", self._read_again)
        self._of_file = () if path is None else _parsed(read_targets(path))
        self._resolved: dict[str, tuple[Address, ...]] = {}
        self._num_looks = self._num_left_out = 0

    async def now(self) -> tuple[Address, ...]:
        """Look again, and return all servers without duplicates."""
        if self._watch is not None:
            await self._look.run(_LOOK_TIMEOUT_S)
        names: dict[str, Address] = {}
        for one in (*self._named, *self._of_file):
            names.setdefault(one.target, one)
        is_due = self._num_looks % _RESOLVE_EVERY == 0
        self._num_looks += 1
        for target in names:
            if _DNS.fullmatch(target) and (is_due or target not in self._resolved):
                await self._resolve(target)
        self._resolved = {target: addresses for target, addresses in self._resolved.items() if target in names}
        every: dict[str, Address] = {}
        for one in names.values():
            for found in self._resolved.get(one.target) or _plain(one.target):
                every.setdefault(found.target, replace(found, events=one.events, replay=one.replay))
        self._note_left_out(max(0, len(every) - MAX_TARGETS))
        return tuple(every.values())[:MAX_TARGETS]

    def _note_left_out(self, num: int) -> None:
        if num > self._num_left_out:
            limit = f"at most {MAX_TARGETS} are used; {num} are left out"
            _LOG.error("target: names resolve to %d addresses; %s", MAX_TARGETS + num, limit)
        self._num_left_out = num

    def expire(self) -> None:
        """Make the next look read the file even if it is unchanged."""
        if self._watch is not None:
            self._watch.expire()

    def _read_again(self) -> None:
        if self._path is None or self._watch is None or not self._watch.has_changed():
            return
        try:
            self._of_file = _parsed(read_targets(self._path))
        except InvalidArgument as error:
            _LOG.error("the targets were not reloaded: %s", error)
        else:
            _LOG.info("targets_file: reloaded %s: %d targets", self._path, len(self._of_file))

    async def _resolve(self, target: str) -> None:
        match = _DNS.fullmatch(target)
        if match is None:
            return
        host, port = match[1].strip("[]"), int(match[2])
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if target not in self._resolved:
                _LOG.warning("target: %s: cannot be resolved: %s", target, error)
                self._resolved[target] = ()
            return
        # A server with both an IPv4 and an IPv6 address would count twice.
        of_ipv4 = [str(address[4][0]) for address in found if address[0] == socket.AF_INET]
        chosen = of_ipv4 or [str(address[4][0]) for address in found]
        addresses = {f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in chosen}
        self._resolved[target] = tuple(Address(one, host) for one in sorted(addresses))


def _plain(target: str) -> tuple[Address, ...]:
    return () if _DNS.fullmatch(target) else (Address(target),)


def _parsed(targets: Sequence[str]) -> tuple[Address, ...]:
    return tuple(parse_target("target", text) for text in targets)
