"""Flags of client commands for an API key and TLS."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from jpaged.client.channel import require_proxy
from jpaged.client.tls import Tls
from jpaged.config import api_key_from_environment
from jpaged.errors import InvalidArgument, sentence_of


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a client."""

    api_key: str = ""
    tls: Tls | None = None
    proxy: str | None = None


def add_credential_flags(parser: argparse.ArgumentParser, *, prefix: str = "", title: str = "access") -> None:
    """Add a flag group for a key and for TLS.

    Args:
        prefix: prefix of the flags' names, for a command that is also a server.
    """
    group = parser.add_argument_group(title)
    group.add_argument(
        f"--{prefix}api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key for the server (default: JPAGED_API_KEY from the environment, if set)",
    )
    tls = f"--{prefix}tls"
    group.add_argument(tls, action="store_true", help="use TLS and trust the system's certificate authorities")
    group.add_argument(
        f"{tls}-ca", metavar="FILE", help="use TLS and trust only the certificate authorities in this PEM file"
    )
    group.add_argument(f"{tls}-cert", metavar="FILE", help="use TLS and present this client certificate (PEM)")
    group.add_argument(f"{tls}-key", metavar="FILE", help=f"private key of {tls}-cert (PEM)")
    if not prefix:
        group.add_argument(
            "--proxy",
            metavar="URL",
            help="HTTP proxy, http://HOST:PORT, or none; loopback addresses are reached directly (default: for "
            "gRPC the one in grpc_proxy, https_proxy, http_proxy and no_proxy, for HTTP none)",
        )


def credentials_from(arguments: argparse.Namespace, *, prefix: str = "") -> Credentials:
    """Return the credentials of the flags, or else of the environment.

    Args:
        prefix: as in `add_credential_flags`.

    Raises:
        InvalidArgument: a file cannot be read, or two flags conflict; names the flag.
    """
    tls, given, start = None, vars(arguments), prefix.replace("-", "_")
    files = tuple(given[f"{start}tls_{name}"] for name in ("ca", "cert", "key"))
    if given[f"{start}tls"] or any(files):
        try:
            tls = Tls(*files)
            tls.credentials()
        except InvalidArgument as error:
            raise InvalidArgument(f"--{prefix}{error.field.replace('.', '-')}", error.problem) from error
    flag, path = f"--{prefix}api-key-file", given[f"{start}api_key_file"]
    proxy = None if prefix else given["proxy"]
    if proxy is not None:
        require_proxy("--proxy", proxy)
    if path is None:
        return Credentials(api_key_from_environment(), tls, proxy)
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = sentence_of(error) if isinstance(error, OSError) else f"{path} is not ASCII"
        raise InvalidArgument(flag, f"cannot be read: {problem}") from None
    if not key:
        raise InvalidArgument(flag, f"{path} is empty")
    if " " in key or not key.isprintable():
        raise InvalidArgument(flag, f"{path} must contain one API key without spaces")
    return Credentials(key, tls, proxy)
