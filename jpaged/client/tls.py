"""TLS certificates of a client, and connections with or without TLS."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from jpaged.client.channel import CHANNEL_OPTIONS, proxy_options
from jpaged.errors import InvalidArgument, sentence_of


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
        raise InvalidArgument(f"tls.{name}", f"cannot be read: {sentence_of(error)}") from None
