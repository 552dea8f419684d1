"""Where a client connects, how, and how often it tries. No I/O.

gRPC's own retries are off: with them a stream whose server dies while it is retried may never end (grpcio 1.85: three
hangs in about ten such deaths). What is tried again, and where, is in `routing/tries.py`.
"""

from __future__ import annotations

import ipaddress
import math
import random
import re
import time
from urllib.parse import urlsplit

import grpc

from jpaged.config import proxy_from_environment
from jpaged.errors import InvalidArgument
from jpaged.types import is_loopback, require_whole_characters

MAX_ATTEMPTS = 4
_FIRST_BACKOFF_S = 0.1
_BACKOFF_FACTOR = 3.0
_JITTER = 0.2

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # A stream is silent while its prompt is computed; a ping every 10 s tells a long prompt from a dead server.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

NOT_READY = frozenset(
    grpc.StatusCode[name] for name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN")
)
"""The codes of a call to a server that is not there, that is starting, or that ends during the call."""
NOT_READY_PAUSE_S = 0.05
"""The pause between two looks at a server that answers at once that it is not ready."""

_HOST_PORT = re.compile(r"(?:\[[^\s\[\]]+\]|[^\s:/\[\]]+):([0-9]+)")
_SCHEME = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")
_MAX_PORT = 65535


def require_target(field: str, target: str) -> None:
    """Refuses what is neither HOST:PORT nor of one of gRPC's schemes: gRPC takes a port modulo 65536.

    Raises:
        InvalidArgument: names the field, the target and the limit.
    """
    require_whole_characters(field, target)
    if _SCHEME.match(target):
        ports = re.findall(r":([0-9]+)(?=,|$)", target) if target.startswith(("dns", "ipv")) else []
    else:
        match = _HOST_PORT.fullmatch(target)
        ports = ["0"] if match is None else [match[1]]
    if not all(len(port) <= len(str(_MAX_PORT)) and 1 <= int(port) <= _MAX_PORT for port in ports):
        raise InvalidArgument(field, f"{target!r} is not HOST:PORT with a port from 1 to {_MAX_PORT}")


def is_local(target: str) -> bool:
    """Return True if a target of gRPC or a URL of HTTP names this machine: a loopback address or a Unix socket."""
    hosts = _hosts(target)
    return hosts is None or all(map(is_loopback, hosts))


def proxy_for(target: str, proxy: str | None) -> str:
    """Return the URL of the HTTP proxy of connections to a target; "" is a direct connection.

    Args:
        proxy: None reads the environment, as gRPC does; "none" or a URL takes its place.

    Raises:
        InvalidArgument: the proxy is no URL.
    """
    if proxy is not None:
        require_proxy("proxy", proxy)
    if proxy == "none" or is_local(target):
        return ""
    if proxy is not None:
        return proxy
    url, excluded = proxy_from_environment()
    hosts = _hosts(target) or ()
    return "" if hosts and all(_is_excluded(host, excluded) for host in hosts) else url


def proxy_options(target: str, proxy: str | None) -> list[tuple[str, str | int]]:
    """Return the channel arguments of gRPC that make it use the proxy of `proxy_for`."""
    chosen = proxy_for(target, proxy)
    if not chosen:
        return [("grpc.enable_http_proxy", 0)]
    return [] if proxy is None else [("grpc.http_proxy", chosen)]


def proxy_name(target: str, proxy: str | None) -> str:
    """Return the proxy of connections to a target for a message: without its password; "" is a direct connection."""
    chosen = proxy_for(target, proxy)
    host = chosen.rpartition("@")[2].partition("://")[2] or chosen.rpartition("@")[2]
    return f"http://{host}" if host else ""


def require_proxy(field: str, proxy: str) -> None:
    """Refuse what is neither http://HOST:PORT nor "none".

    Raises:
        InvalidArgument: names the field and the proxy.
    """
    if proxy == "none":
        return
    try:
        parts = urlsplit(proxy)
        is_good = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        is_good = False
    if not is_good:
        raise InvalidArgument(field, f"{proxy!r} is not http://HOST:PORT, and not 'none'")


def _hosts(target: str) -> list[str] | None:
    """Return the hosts of a target; None of a scheme that names no machine."""
    scheme, _, rest = target.partition(":") if _SCHEME.match(target) else ("", "", target)
    if scheme in ("unix", "unix-abstract", "vsock"):
        return None
    return [_host(one.rpartition("/")[2]) for one in rest.removesuffix("/").split(",")]


def _host(address: str) -> str:
    """Return the host of HOST:PORT, [HOST]:PORT or HOST."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] or address


def _is_excluded(host: str, excluded: tuple[str, ...]) -> bool:
    """Return True if gRPC connects to a host without the proxy: a suffix of a name, or a network of addresses."""
    for one in excluded:
        if host.lower().endswith(one.lower()):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(one, strict=False):
                return True
        except ValueError:
            continue
    return False


class Backoff:
    """Waits that grow by a factor, up to a limit."""

    def __init__(self, first_s: float, factor: float, max_s: float = math.inf) -> None:
        self._wait_s, self._factor, self._max_s = first_s, factor, max_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the next wait, with jitter: the clients of a server that went away do not all come back at once."""
        wait_s = max(self._wait_s, at_least_s) * random.uniform(1 - _JITTER, 1 + _JITTER)
        self._wait_s = min(self._factor * self._wait_s, self._max_s)
        return wait_s


class Attempts:
    """The tries of one call: what time each has, and whether another follows."""

    def __init__(self, timeout_s: float | None) -> None:
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0
        self._backoff = Backoff(_FIRST_BACKOFF_S, _BACKOFF_FACTOR)

    @property
    def remaining_s(self) -> float | None:
        """The time that the next try may take: all tries share one timeout."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def wait_s(self, code: grpc.StatusCode | None) -> float | None:
        """How long to wait before another try, after one failed with `code`; None when there is to be none."""
        self._num_failed += 1
        if code is not grpc.StatusCode.UNAVAILABLE or self._num_failed == MAX_ATTEMPTS:
            return None
        return self.within(self._backoff.next_s())

    def within(self, wait_s: float) -> float | None:
        """The wait, where time is left behind it; else None."""
        remaining_s = self.remaining_s
        return wait_s if remaining_s is None or wait_s < remaining_s else None
