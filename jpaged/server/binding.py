"""Address of a gRPC server: a host and a port of this machine, with TLS if there are certificates."""

from __future__ import annotations

import socket
from typing import Any

import grpc
from grpc import aio

from jpaged.access.certificates import CertificateFiles, Certificates
from jpaged.errors import InvalidArgument


def bind(server: aio.Server, field: str, host: str, port: int, certificates: CertificateFiles | None) -> int:
    """Bind a server to an address; return the port, which for 0 is a free one.

    Args:
        field: the option that names the port.

    Raises:
        InvalidArgument: the host or the port cannot be bound; names it.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _require_host(field, host)
    if problem := _problem_of_port(host, port):  # check first: gRPC core only logs the reason
        raise InvalidArgument(field, f"{address} cannot be bound: {problem}")
    try:
        if certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials_of(certificates))
    except (RuntimeError, UnicodeError) as error:
        raise InvalidArgument(field, f"{address} cannot be bound: {error}") from error
    if bound == 0:
        raise InvalidArgument(field, f"{address} cannot be bound")
    return bound


def credentials_of(files: CertificateFiles) -> grpc.ServerCredentials:
    """Return a port's TLS credentials; each handshake checks if the certificate files have changed."""
    told = files.now

    def newest() -> Any:  # None if unchanged: gRPC accepts it, but its stubs do not
        nonlocal told
        if files.now is told:
            return None
        told = files.now
        return _configuration(told)

    wants_clients = told.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(told), newest, wants_clients)


def _configuration(now: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.client_ca)


def _problem_of_port(host: str, port: int) -> str:
    """Return the operating system's reason why a port cannot be bound, or "" if it can."""
    try:
        _bind_once(host, port)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _bind_once(host: str, port: int) -> None:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in found[:1]:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: ignore ended connections
            probe.bind(address)


def _require_host(field: str, host: str) -> None:
    """Raise InvalidArgument if the host is not an address of this machine."""
    try:
        _bind_once(host, 0)
    except (OSError, ValueError) as error:  # ValueError: an invalid name
        name = field.removesuffix("port") + "host"
        raise InvalidArgument(name, f"{host!r} is not an address of this machine: {error}") from error
