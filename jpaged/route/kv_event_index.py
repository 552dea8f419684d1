"""Index of the prefixes that servers hold, from their KV events; for prompts of token ids.

    thread of each server's replica ── events, some blocks at a time ──┐
                                      a lock: Directory
    the router's event loop ── cached tokens of this prompt? ──────────┘

The lock is kept for some hundred blocks, about 1 ms, so that events do not delay calls for longer. A server whose
events cannot be received is treated as one without events: its entry is what was sent to it.

The address of a server's events is in its own report, or in its target:

    a server is bound to                is reached
    tcp://*:5557, tcp://0.0.0.0:5557    at the host of the target
    tcp://10.0.0.7:5557                 there
    tcp://127.0.0.1:5557, ipc://PATH    there, if the target is on this machine

The address in a target is used as it is, except * for its host. Each replica has separate addresses, counted from
these.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq

from jpaged.errors import InvalidArgument, Unavailable
from jpaged.kvevents.directory import Directory
from jpaged.kvevents.encoding import Event, RemovedBlocks, StoredBlocks
from jpaged.kvevents.publisher import with_rank
from jpaged.kvevents.subscriber import Subscriber
from jpaged.pool import PrefixOwner
from jpaged.route.prefix_table import PromptPrefix
from jpaged.route.targets import NOWHERE, Address

_TCP = re.compile(r"tcp://(\[[^\[\]]*\]|[^:\[\]]+):([0-9]+)")
_HERE = "127.0.0.1"
_LOCAL_NAMES = ("localhost", "ip6-localhost")
MAX_REPLICAS = 256
"""Each replica's events are read on a separate thread."""


@dataclass(frozen=True, slots=True)
class KVEventEndpoints:
    """KV-event sources of a server.

    Attributes:
        sockets: per replica: address of events, and of replays of missed ones (None for none).
        isolates_tenants: tenants share no prefixes there.
        checks_keys: the tenant of a call depends on its key there.
    """

    sockets: tuple[tuple[str, str | None], ...]
    isolates_tenants: bool
    checks_keys: bool


def resolve_kv_event_endpoints(address: Address, info: Any) -> KVEventEndpoints | None:
    """Return the KV-event sources of a server; None if it has none, or `NOWHERE` is set.

    Args:
        info: its GetServerInfo.

    Raises:
        Unavailable: the address cannot be reached from here.
    """
    said: Mapping[str, str] = {option.name: option.value for option in info.options}
    events, replay = address.events, address.replay
    if events is None and "kv-events-endpoint" in said:
        host = _get_host(address.target)
        events = _reached(said["kv-events-endpoint"], host)
        replay = _reached(said["kv-events-replay-endpoint"], host) if "kv-events-replay-endpoint" in said else None
    elif events is not None:
        events, replay = _at(events, address), None if replay is None else _at(replay, address)
    if events is None or events == NOWHERE:
        return None
    sockets = tuple(
        (with_rank(events, rank), None if replay is None else with_rank(replay, rank))
        for rank in range(_num_replicas(said.get("data-parallel-size", "1")))
    )
    return KVEventEndpoints(sockets, said.get("isolate-tenants") == "True", "api-keys" in said)


def _num_replicas(said: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,2}", said) or int(said) > MAX_REPLICAS:
        raise Unavailable(f"its data-parallel-size is {said[:8]!r}, not a number from 1 to {MAX_REPLICAS}")
    return int(said)


def _at(endpoint: str, address: Address) -> str:
    """Return the endpoint of a target with its host in place of *."""
    return endpoint.replace("://*", f"://{_get_host(address.target) or _HERE}") if "://*" in endpoint else endpoint


def _get_host(target: str) -> str | None:
    """Return the host of a target; None if it is a Unix socket of this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return None
    if "," in target:
        raise Unavailable(
            f"{target} has several addresses: give the KV event endpoint of one, or each address as a target"
        )
    return re.sub(r"^(?:ipv[46]|dns):(?://[^/]*/)?", "", target).rpartition(":")[0]


def _reached(endpoint: str, host: str | None) -> str:
    """Return the address at which a server's bound endpoint is reached from here."""
    is_here = host is None or _is_local(host)
    match = _TCP.fullmatch(endpoint)
    if match is None:
        if is_here and endpoint.startswith("ipc://"):
            return endpoint
        raise Unavailable(f"{endpoint} can be reached only on the server's own machine")
    bound, port = match[1], match[2]
    try:
        ip = ipaddress.ip_address(bound.strip("[]"))
    except ValueError:
        ip = None  # *, or the name of an interface or of the server
    if ip is not None and ip.is_loopback and not is_here:
        raise Unavailable(f"{endpoint} can be reached only on the server's own machine")
    at = bound if ip is not None and not ip.is_unspecified else host or _HERE
    return f"tcp://{at}:{port}"


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in _LOCAL_NAMES


MAX_BLOCKS = 1 << 20
"""Maximum indexed blocks per replica, at about 500 bytes each; further blocks are ignored."""
_PIECE_BLOCKS = 256


class _Listening:
    """Subscription to one server. Written only by `KVEventIndex`."""

    def __init__(self, telling: KVEventEndpoints, keys: tuple[str, ...]) -> None:
        self.endpoints = telling
        self.keys = keys
        self.readers: tuple[Subscriber, ...] = ()

    @property
    def is_heard(self) -> bool:
        return all(reader.is_heard for reader in self.readers)


class KVEventIndex:
    """Index of cached prefixes by server. Methods except `take` belong to the router's event loop; `close` blocks.

    Args:
        max_blocks: maximum indexed blocks per replica.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._directory = Directory(max_blocks)
        self._lock = threading.Lock()
        self._listening: dict[str, _Listening] = {}
        self._keys = set[str]()
        self._num_begun = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def listen(self, name: str, telling: KVEventEndpoints) -> None:
        """Subscribe to a server that has no subscription.

        Raises:
            InvalidArgument: an address is invalid.
        """
        if self._context is None:
            self._context = zmq.Context()
        self._num_begun += 1
        ranks = range(len(telling.sockets))
        one = _Listening(telling, tuple(f"{name} {self._num_begun}.{rank}" for rank in ranks))
        with self._lock:
            self._keys.update(one.keys)
        try:
            for key, (events, missed) in zip(one.keys, telling.sockets, strict=True):
                take = functools.partial(self.take, key)
                one.readers += (Subscriber(events, take, replay_endpoint=missed, context=self._context),)
        except InvalidArgument:
            self._listening[name] = one
            self.close(self.forget(name))
            raise
        self._listening[name] = one

    def forget(self, name: str) -> list[Subscriber]:
        """Drop a server and its entries; return its readers, which the caller must close."""
        one = self._listening.pop(name, None)
        if one is None:
            return []
        with self._lock:
            for key in one.keys:
                self._keys.discard(key)
                self._directory.forget(key)
        return list(one.readers)

    def close(self, readers: Iterable[Subscriber]) -> None:
        """Close readers; blocks until their threads end."""
        for reader in readers:
            reader.close()

    def end(self) -> None:
        """Drop everything; blocks until all readers' threads end."""
        for name in list(self._listening):
            self.close(self.forget(name))
        if self._context is not None:
            self._context.term()

    def is_heard(self, name: str) -> bool | None:
        """Return True if a server's events are being received; None without a subscription."""
        one = self._listening.get(name)
        return None if one is None else one.is_heard

    def num_blocks(self, name: str) -> int:
        """Return the number of blocks that a server reports."""
        one = self._listening.get(name)
        if one is None:
            return 0
        with self._lock:
            return sum(self._directory.num_blocks(key) for key in one.keys)

    def num_tokens(self, prompt: PromptPrefix) -> Mapping[str, int]:
        """Return the cached leading tokens of a prompt on each connected server, 0 included; empty for texts.

        A server that checks keys is left out if the router does not know the call's tenant.
        """
        if prompt.token_ids is None:
            return {}
        asked: dict[bool, dict[str, str]] = {}
        found: dict[str, int] = {}
        for name, one in list(self._listening.items()):
            telling = one.endpoints
            if one.is_heard and not (telling.isolates_tenants and telling.checks_keys and prompt.has_unread_key):
                asked.setdefault(telling.isolates_tenants, {}).update(dict.fromkeys(one.keys, name))
                found[name] = 0
        for isolates_tenants, name_of in asked.items():
            owner = PrefixOwner(prompt.salt, prompt.tenant if isolates_tenants else "", prompt.adapter)
            with self._lock:
                held = self._directory.num_tokens_held(prompt.token_ids, owner, name_of)
            for key, num_tokens in held.items():
                found[name_of[key]] = max(found[name_of[key]], num_tokens)
        return found

    def take(self, key: str, events: Sequence[Event]) -> None:
        """Apply the events of a replica, on the thread that reads them; events after `forget` are ignored."""
        for event in events:
            for piece in _pieces(event):
                with self._lock:
                    if key in self._keys:
                        self._directory.take(key, (piece,))


def _pieces(event: Event) -> Iterator[Event]:
    """Split an event into equivalent events of fewer blocks."""
    if not isinstance(event, StoredBlocks | RemovedBlocks) or len(event.hashes) <= _PIECE_BLOCKS:
        yield event
        return
    for begin in range(0, len(event.hashes), _PIECE_BLOCKS):
        end = begin + _PIECE_BLOCKS
        hashes = event.hashes[begin:end]
        if isinstance(event, RemovedBlocks):
            yield replace(event, hashes=hashes)
            continue
        tokens = event.token_ids[begin * event.block_size : end * event.block_size] if event.token_ids else ()
        parent = event.parent if not begin else event.hashes[begin - 1]
        yield replace(event, hashes=hashes, parent=parent, token_ids=tokens)
