"""The server's certificate and client CAs: PEM files, reloaded when they change.

Open connections keep their parameters; a handshake after a change uses the new files.
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
    """TLS context of ports based on Python's ssl."""

    def resume_nothing(self) -> None:
        """Disable session resumption.

        A resumed session shows no certificate, and its CA may have been removed in the meantime.
        """
        self.num_tickets = 0
        self.options |= ssl.OP_NO_TICKET


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the files at one time.

    Attributes:
        chain: the server's certificate and intermediate certificates; PEM.
        key: its private key; PEM.
        client_ca: CA certificates for client certificates; PEM, None if clients need none.
        context: the same for Python's TLS.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class CertificateFiles:
    """The files of one server.

    Attributes:
        now: their last valid contents.

    Raises:
        InvalidArgument: they cannot be read or parsed.
    """

    def __init__(self, options: AccessOptions) -> None:
        self._options = options
        self._watch = FileWatch([path for path in _paths(options) if path is not None])
        self.now = read_certificates(options)

    def look_again(self) -> None:
        """Reload the files if they have changed; keep the old contents if the new ones are inconsistent."""
        if not self._watch.has_changed():
            return
        try:
            self.now = read_certificates(self._options)
        except InvalidArgument as error:
            _LOG.error("the certificates were not reloaded: %s", error)
        else:
            _LOG.warning("tls_cert: reloaded %s", self._options.tls_cert)

    def expire(self) -> None:
        """Make the next look reload the files even if unchanged."""
        self._watch.expire()

    def context(self) -> ssl.SSLContext:
        """Return a listening context for Python's TLS; each handshake uses the current files."""
        listening = self.now.context

        def turn_to_newest(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = self.now.context

        listening.sni_callback = turn_to_newest
        return listening


def read_certificates(options: AccessOptions) -> Certificates:
    """Read the files that the options name.

    Raises:
        InvalidArgument: one cannot be read, or they are inconsistent; names it.
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
        # reject an encrypted key instead of prompting for its password
        context.load_cert_chain(chain, key, password="")
    except (OSError, ValueError) as error:
        raise InvalidArgument("tls_cert", f"{chain} and {key} are not a certificate and its key: {error}") from None
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
