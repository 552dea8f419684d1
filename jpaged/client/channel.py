"""Connections of a client: parameters and retry limits, TLS certificates, and a single check of grpc.health.v1.

gRPC's own retries are off: with them a stream whose server dies during a retry may never end (grpcio 1.85: three hangs
in about ten such deaths). `routing/retry.py` decides what is retried, and where. The health check has no retries:
callers decide about failures.
"""

from __future__ import annotations

import ipaddress
import math
import random
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.client.errors import translated
from jpaged.config import proxy_from_environment
from jpaged.errors import InvalidArgument, describe_error
from jpaged.types import is_loopback, require_whole_characters

MAX_ATTEMPTS = 4
_FIRST_BACKOFF_S = 0.1
_BACKOFF_FACTOR = 3.0
_JITTER = 0.2

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # A stream is silent during prefill; a ping every 10 s distinguishes a long prompt from a dead server.
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
"""Status codes of a call to a server that is unreachable, starting, or ending."""
NOT_READY_PAUSE_S = 0.05
"""Interval between checks of a server that answers at once that it is not ready."""

_HOST_PORT = re.compile(r"(?:\[[^\s\[\]]+\]|[^\s:/\[\]]+):([0-9]+)")
_SCHEME = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")
_MAX_PORT = 65535


def require_target(field: str, target: str) -> None:
    """Reject a target that is neither HOST:PORT nor of one of gRPC's schemes: gRPC would take a port modulo 65536.

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
    """Return True if a gRPC target or an HTTP URL is on this machine: a loopback address or a Unix socket."""
    hosts = _hosts(target)
    return hosts is None or all(map(is_loopback, hosts))


def proxy_for(target: str, proxy: str | None) -> str:
    """Return the URL of the HTTP proxy for connections to a target; "" for a direct connection.

    Args:
        proxy: None reads the environment, as gRPC does; "none" or a URL overrides it.

    Raises:
        InvalidArgument: the proxy is not a URL.
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
    """Return gRPC's channel arguments for the proxy of `proxy_for`."""
    chosen = proxy_for(target, proxy)
    if not chosen:
        return [("grpc.enable_http_proxy", 0)]
    return [] if proxy is None else [("grpc.http_proxy", chosen)]


def proxy_name(target: str, proxy: str | None) -> str:
    """Return the proxy of connections to a target for messages, without its password; "" for a direct connection."""
    chosen = proxy_for(target, proxy)
    host = chosen.rpartition("@")[2].partition("://")[2] or chosen.rpartition("@")[2]
    return f"http://{host}" if host else ""


def require_proxy(field: str, proxy: str) -> None:
    """Reject a proxy that is neither http://HOST:PORT nor "none".

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
        raise InvalidArgument(field, f"{proxy!r} is neither http://HOST:PORT nor 'none'")


def _hosts(target: str) -> list[str] | None:
    """Return the hosts of a target; None if its scheme names no machine."""
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
    """Exponential backoff up to a limit."""

    def __init__(self, first_s: float, factor: float, max_s: float = math.inf) -> None:
        self._wait_s, self._factor, self._max_s = first_s, factor, max_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the next delay, with jitter, so that the clients of a failed server do not return all at once."""
        wait_s = max(self._wait_s, at_least_s) * random.uniform(1 - _JITTER, 1 + _JITTER)
        self._wait_s = min(self._factor * self._wait_s, self._max_s)
        return wait_s


class Attempts:
    """The attempts of one call: the timeout of each, and whether another follows."""

    def __init__(self, timeout_s: float | None) -> None:
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0
        self._backoff = Backoff(_FIRST_BACKOFF_S, _BACKOFF_FACTOR)

    @property
    def remaining_s(self) -> float | None:
        """Remaining time for the next attempt: all attempts share one timeout."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def wait_s(self, code: grpc.StatusCode | None) -> float | None:
        """Return the delay before another attempt after a failure with `code`; None if there is none."""
        self._num_failed += 1
        if code is not grpc.StatusCode.UNAVAILABLE or self._num_failed == MAX_ATTEMPTS:
            return None
        return self.within(self._backoff.next_s())

    def within(self, wait_s: float) -> float | None:
        """Return the delay if it ends before the timeout; otherwise None."""
        remaining_s = self.remaining_s
        return wait_s if remaining_s is None or wait_s < remaining_s else None


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM format, read when a client connects.

    Attributes:
        ca: CA certificates that verify servers; None for the system's.
        cert: client certificate, for servers that require one; None for none.
        key: the private key of `cert`.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument(
                "tls.cert" if self.cert is None else "tls.key", "is missing: give both the certificate and the key"
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            InvalidArgument: one cannot be read; names it.
        """
        ca, key, cert = (_read(name, getattr(self, name)) for name in ("ca", "key", "cert"))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def context(self) -> ssl.SSLContext:
        """Read the files for a client of Python's standard library.

        Raises:
            InvalidArgument: one cannot be read, or is not a certificate or key.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(
                    self.cert, self.key, password=""
                )  # reject an encrypted key instead of prompting for its password
        except (OSError, ValueError) as error:
            raise InvalidArgument("tls", f"the files cannot be used: {error}") from None
        return context


def open_channel(
    library: Any,
    target: str,
    tls: Tls | None,
    *,
    name: str | None = None,
    more: Sequence[tuple[str, int]] = (),
    proxy: str | None = None,
) -> Any:
    """Return a channel of `grpc` or `grpc.aio`; without `tls` it is unencrypted.

    Args:
        more: gRPC options in addition to those of every client.
        name: name that the server's certificate must have, if it is not the target's host.
        proxy: URL of an HTTP proxy, or "none"; None reads the environment. Never used for loopback addresses.
    """
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, *more, *proxy_options(target, proxy)]
    if name is not None:
        options += [("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)]
    if tls is None:
        return library.insecure_channel(target, options=options)
    return library.secure_channel(target, tls.credentials(), options=options)


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"tls.{name}", f"cannot be read: {describe_error(error)}") from None


def check_health(
    target: str, *, service: str = "", timeout_s: float, tls: Tls | None = None, proxy: str | None = None
) -> str:
    """Return the status by name: SERVING, or NOT_SERVING while a server loads or drains.

    Args:
        target: host:port.
        service: name of the service; "" for the server as a whole.
        timeout_s: timeout for connecting and answering.
        tls: None connects without TLS.
        proxy: URL of an HTTP proxy, or "none"; None reads the environment. Never used for loopback addresses.

    Raises:
        InvalidArgument: the target is not HOST:PORT.
        Unavailable: no server listens there.
        DeadlineExceeded: no answer came in time.
        NotFound: there is no such service.
    """
    require_target("target", target)
    with open_channel(grpc, target, tls, proxy=proxy) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            raise translated(error, proxy_name(target, proxy)) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
