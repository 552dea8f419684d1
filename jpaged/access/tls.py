"""The server's certificate and client CAs: PEM files, reloaded when they change.

Open connections keep their parameters; a handshake after a change uses the new files.

`FileWatch` detects that a file was replaced, written to, or relinked.

A file may block its reader: a FIFO, or a mount whose server is gone. Looks run on daemon threads, which neither an
event loop nor the process's exit waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument, describe_error

_LOG = logging.getLogger(__name__)
_SLOW_S = 10.0
"""A look that takes longer is logged, once."""

Stamp = tuple[tuple[int, int, int, int] | None, ...]


class FileWatch:
    """Detects changes of files between two checks; links are followed."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._stamp = self._look()

    def has_changed(self) -> bool:
        """Check again; a file that is gone or has returned counts as changed."""
        before, self._stamp = self._stamp, self._look()
        return before != self._stamp

    def expire(self) -> None:
        """Make the next check report a change."""
        self._stamp = ()

    def _look(self) -> Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def is_pipe(path: str) -> bool:
    """Return True for a FIFO, which can be read once, and blocks its next reader."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


class BackgroundLook:
    """Runs one look at a time on a daemon thread; while one is blocked, no other begins.

    Args:
        what: the option that names the files, for the log.
    """

    def __init__(self, what: str, look: Callable[[], None]) -> None:
        self._what = what
        self._look = look
        self._done: asyncio.Event | None = None
        self._began_s = 0.0
        self._is_slow = False

    async def run(self, timeout_s: float) -> None:
        """Start a look, unless one is running, and wait for its end up to the timeout."""
        loop = asyncio.get_running_loop()
        done = self._done
        if done is None or done.is_set():
            done = self._done = asyncio.Event()
            self._began_s, self._is_slow = loop.time(), False
            threading.Thread(target=self._run, args=(loop, done), name="jpaged-look", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await done.wait()
        if not done.is_set() and not self._is_slow and loop.time() - self._began_s > _SLOW_S:
            self._is_slow = True
            _LOG.error("%s: reading takes more than %g s: the previous contents stay in use", self._what, _SLOW_S)

    def _run(self, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
        try:
            self._look()
        except Exception as error:
            _LOG.error("%s: checking for changes failed", self._what, exc_info=error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)


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
        raise InvalidArgument(name, f"cannot be read: {describe_error(error)}") from None
