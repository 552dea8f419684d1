"""Addresses of the servers' KV events: from their own report, or from their target.

    a server is bound to                is reached
    tcp://*:5557, tcp://0.0.0.0:5557    at the host of the target
    tcp://10.0.0.7:5557                 there
    tcp://127.0.0.1:5557, ipc://PATH    there, if the target is on this machine

The address in a target is used as it is, except * for its host. Each replica has separate addresses, counted from
these.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jpaged.errors import Unavailable
from jpaged.kvevents.publisher import with_rank
from jpaged.route.targets import NOWHERE, Address

_TCP = re.compile(r"tcp://(\[[^\[\]]*\]|[^:\[\]]+):([0-9]+)")
_HERE = "127.0.0.1"
_LOCAL_NAMES = ("localhost", "ip6-localhost")
MAX_REPLICAS = 256
"""Each replica's events are read on a separate thread."""


@dataclass(frozen=True, slots=True)
class Telling:
    """KV-event sources of a server.

    Attributes:
        sockets: per replica: address of events, and of replays of missed ones (None for none).
        isolates_tenants: tenants share no prefixes there.
        checks_keys: the tenant of a call depends on its key there.
    """

    sockets: tuple[tuple[str, str | None], ...]
    isolates_tenants: bool
    checks_keys: bool


def telling_of(address: Address, info: Any) -> Telling | None:
    """Return the KV-event sources of a server; None if it has none, or `NOWHERE` is set.

    Args:
        info: its GetServerInfo.

    Raises:
        Unavailable: the address cannot be reached from here.
    """
    said: Mapping[str, str] = {option.name: option.value for option in info.options}
    events, replay = address.events, address.replay
    if events is None and "kv-events-endpoint" in said:
        host = _host_of(address.target)
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
    return Telling(sockets, said.get("isolate-tenants") == "True", "api-keys" in said)


def _num_replicas(said: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,2}", said) or int(said) > MAX_REPLICAS:
        raise Unavailable(f"its data-parallel-size is {said[:8]!r}, not a number from 1 to {MAX_REPLICAS}")
    return int(said)


def _at(endpoint: str, address: Address) -> str:
    """Return the endpoint of a target with its host in place of *."""
    return endpoint.replace("://*", f"://{_host_of(address.target) or _HERE}") if "://*" in endpoint else endpoint


def _host_of(target: str) -> str | None:
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
