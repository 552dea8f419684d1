"""The flags with which commands that are clients show who they are, and whom they believe."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from jpaged.client.tls import Tls
from jpaged.config import api_key_from_environment
from jpaged.errors import InvalidArgument, sentence_of


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """What a client brings."""

    api_key: str = ""
    tls: Tls | None = None


def add_credential_flags(parser: argparse.ArgumentParser) -> None:
    """Add a group for a key and for TLS."""
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="a file with the key that the server lets in (default: JPAGED_API_KEY of the environment, if it is set)",
    )
    group.add_argument("--tls", action="store_true", help="speak TLS, and believe whom the system believes")
    group.add_argument("--tls-ca", metavar="FILE", help="speak TLS, and believe certificates signed by one of these")
    group.add_argument("--tls-cert", metavar="FILE", help="speak TLS, and show this certificate")
    group.add_argument("--tls-key", metavar="FILE", help="the private key of --tls-cert")


def credentials_from(arguments: argparse.Namespace) -> Credentials:
    """Return what the flags, else the environment, say.

    Raises:
        InvalidArgument: a file cannot be read, or two do not go together; names the flag.
    """
    tls = None
    if arguments.tls or arguments.tls_ca or arguments.tls_cert or arguments.tls_key:
        try:
            tls = Tls(arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
            tls.credentials()
        except InvalidArgument as error:
            raise InvalidArgument(f"--{error.field.replace('.', '-')}", error.problem) from error
    path = arguments.api_key_file
    if path is None:
        return Credentials(api_key_from_environment(), tls)
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = sentence_of(error) if isinstance(error, OSError) else f"{path}: is not ASCII"
        raise InvalidArgument("--api-key-file", f"cannot be read: {problem}") from None
    if not key:
        raise InvalidArgument("--api-key-file", f"{path} is empty")
    if " " in key or not key.isprintable():
        raise InvalidArgument("--api-key-file", f"{path} holds no key: a key is one word")
    return Credentials(key, tls)
