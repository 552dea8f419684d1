"""The server's certificate and whom it believes in turn: PEM files, read again when they change.

Connections that are open go on as they were agreed; a handshake that begins after a change sees the new files.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from jpaged.access.watching import FileWatch
from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument, sentence_of

_LOG = logging.getLogger(__name__)


class _Context(ssl.SSLContext):
    """What a port of Python's listens with."""

    def resume_nothing(self) -> None:
        """Have every handshake begin anew.

        Who goes on with a session shows no certificate again, whose authority may have been taken away meanwhile.
        """
        self.num_tickets = 0
        self.options |= ssl.OP_NO_TICKET


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the files say at one time.

    Attributes:
        chain: the server's certificate, and those between it and what clients know; PEM.
        key: its private key; PEM.
        client_ca: whose certificates clients have to show; PEM, None where they need none.
        context: the same for Python's TLS.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class CertificateFiles:
    """The files of one server.

    Attributes:
        now: what they said when they could be understood last.

    Raises:
        InvalidArgument: they cannot be read or understood.
    """

    def __init__(self, options: AccessOptions) -> None:
        self._options = options
        self._watch = FileWatch([path for path in _paths(options) if path is not None])
        self.now = read_certificates(options)

    def look_again(self) -> None:
        """Read the files if they have changed; where they do not go together (yet), all stays as it was."""
        if not self._watch.has_changed():
            return
        try:
            self.now = read_certificates(self._options)
        except InvalidArgument as error:
            _LOG.error("the certificates are unchanged: %s", error)
        else:
            _LOG.warning("tls_cert: reloaded %s", self._options.tls_cert)

    def expire(self) -> None:
        """Have the next look read the files, changed or not."""
        self._watch.expire()

    def context(self) -> ssl.SSLContext:
        """Return what a port of Python's listens with: each handshake begins with the files as they are then."""
        listening = self.now.context

        def turn_to_newest(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = self.now.context

        listening.sni_callback = turn_to_newest
        return listening


def read_certificates(options: AccessOptions) -> Certificates:
    """Read the files that the options name.

    Raises:
        InvalidArgument: one cannot be read, or they do not go together; names it.
    """
    chain, key, client_ca = _paths(options)
    if chain is None or key is None:
        raise InvalidArgument("tls_cert", "is missing")
    chain_pem, key_pem = _read("tls_cert", chain), _read("tls_key", key)
    client_ca_pem = None if client_ca is None else _read("tls_client_ca", client_ca)
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(chain, key, password="")  # an encrypted key is refused, not asked about
    except (OSError, ValueError) as error:
        raise InvalidArgument("tls_cert", f"{chain} and {key} are no certificate and its key: {error}") from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            raise InvalidArgument("tls_client_ca", f"{client_ca} has no certificate: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
        context.resume_nothing()
    return Certificates(chain_pem, key_pem, client_ca_pem, context)


def _paths(options: AccessOptions) -> tuple[str | None, str | None, str | None]:
    return options.tls_cert, options.tls_key, options.tls_client_ca


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(name, f"cannot be read: {sentence_of(error)}") from None
