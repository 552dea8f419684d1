"""Sources of a request's pictures: data URIs, web servers and files that the options allow.

A URL could reach what only this machine may reach. So a server is asked only if an option names its domain, and each
connection goes to an address that was checked, so that a name cannot point elsewhere a moment later:

    URL -> domain allowed? -> addresses of the name -> all public? -> connect to one of them -> redirect: start again

Proxies of the environment are not used.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from jpaged.errors import InvalidArgument
from jpaged.service.images import MAX_FILE_BYTES

FETCH_TIMEOUT_S = 10.0
"""Time for one URL, with name lookup and redirects."""
MAX_REDIRECTS = 3
_MAX_URL_CHARS = 4096
_SHOWN_CHARS = 80
_READ_BYTES = 1 << 16
_PART_CHARS = 1 << 18
"""Characters that are decoded without interruption, in about 1 ms; all of 64 MiB would delay other threads by 1 s."""
_REDIRECTS = (301, 302, 303, 307, 308)
_ANY_DOMAIN = "*"
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\U0010ffff\\]")
_SPACE = re.compile(r"\s+")
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses of IPv4 servers (NAT64)."""
Resolve = Callable[[str, int], Sequence[str]]


def is_public(address: str) -> bool:
    """Return True if an IP address is one of the internet: not private, loopback, link-local, multicast or reserved."""
    found: Any = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            found = inner
    is_of_site = isinstance(found, ipaddress.IPv6Address) and found.is_site_local
    return bool(found.is_global and not (found.is_multicast or found.is_reserved or is_of_site))


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raise OSError if there are none."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class ImageSources:
    """Reads the bytes of pictures. Thread-safe; calls block.

    Args:
        domains: hosts that URLs may name; `*` for any. Empty refuses URLs.
        folder: folder with the files that may be read; None refuses files.
        is_allowed: returns True for addresses that may be connected to.
        resolve: returns the addresses of a host.
    """

    def __init__(
        self,
        domains: Sequence[str] = (),
        folder: str | None = None,
        *,
        is_allowed: Callable[[str], bool] = is_public,
        resolve: Resolve = resolve,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._folder = None if folder is None else Path(folder).resolve()
        self._is_allowed = is_allowed
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._tls: ssl.SSLContext | None = None

    def read(self, field: str, url: str) -> bytes:
        """Return the bytes that a URL or a path names.

        Raises:
            InvalidArgument: it is malformed, not allowed, too large or cannot be read.
        """
        scheme = url[:32].partition(":")[0].strip().lower()
        if scheme == "data":
            return read_data_uri(field, url)
        if len(url) > _MAX_URL_CHARS:
            raise InvalidArgument(field, f"is a URL of {len(url)} characters, over the limit of {_MAX_URL_CHARS}")
        if scheme in ("http", "https"):
            return self._fetch(field, url)
        if scheme == "file" or url.startswith("/"):
            return self._read_file(field, url)
        raise InvalidArgument(field, f"{url[:_SHOWN_CHARS]!r} is neither a data URI nor a URL of http, https or file")

    def _read_file(self, field: str, url: str) -> bytes:
        if self._folder is None:
            raise InvalidArgument(field, "names a file, which needs the option allowed_local_media_path")
        path = url
        if not url.startswith("/"):
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost"):
                raise InvalidArgument(field, f"{url[:_SHOWN_CHARS]!r} names a file of another machine")
            path = unquote(parts.path)
        try:
            found = Path(os.path.realpath(path))  # reveals nothing about files elsewhere, not even whether they exist
            if not found.is_relative_to(self._folder):
                raise InvalidArgument(field, f"{path[:_SHOWN_CHARS]!r} is not in the folder allowed_local_media_path")
            with contextlib.closing(_OpenFile(found)) as file:
                return file.read(field)
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidArgument):
                raise
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidArgument(field, f"{path[:_SHOWN_CHARS]!r} cannot be read: {reason}") from error

    def _fetch(self, field: str, url: str) -> bytes:
        end_s = time.monotonic() + self._timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            try:
                content, target = self._fetch_once(field, url, end_s)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, InvalidArgument):
                    raise
                late = f"no complete answer within {self._timeout_s:g} s"
                reason = late if time.monotonic() >= end_s else str(error)[:_SHOWN_CHARS] or type(error).__name__
                raise InvalidArgument(field, f"{url[:_SHOWN_CHARS]!r} cannot be fetched: {reason}") from error
            if target is None:
                return content
            url = urljoin(url, target)
        raise InvalidArgument(field, f"is redirected more than {MAX_REDIRECTS} times")

    def _fetch_once(self, field: str, url: str, end_s: float) -> tuple[bytes, str | None]:
        """Return the content of a URL, or the URL of the redirect."""
        parts, host, port = self._check_url(field, url)
        addresses = _call_until(end_s, lambda: self._resolve(host, port))
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise InvalidArgument(field, f"{host!r} has an address that is not public, to which no request is sent")
        connection = _CheckedConnection(host, port, addresses, end_s, self._context(parts.scheme))
        with contextlib.closing(connection), _closing_at(end_s, connection):
            target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
            headers = {"Host": parts.netloc, "Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "jpaged"}
            connection.request("GET", target if target.startswith("/") else f"/{target}", headers=headers)
            with connection.getresponse() as response:
                if response.status in _REDIRECTS and (location := response.getheader("Location")):
                    return b"", location
                if response.status != 200:
                    raise InvalidArgument(field, f"{url[:_SHOWN_CHARS]!r} is answered with status {response.status}")
                content = _read_body(field, response)
            if time.monotonic() >= end_s:  # the connection was shut down: the content may be a part
                raise TimeoutError
            return content, None

    def _check_url(self, field: str, url: str) -> tuple[SplitResult, str, int]:
        """Return the parts of a URL, its host and port; raise InvalidArgument unless it is allowed."""
        if not self._domains:
            raise InvalidArgument(field, "is a URL, which needs the option allowed_media_domains; send a data URI")
        if _UNSAFE.search(url):
            raise InvalidArgument(field, f"{url[:_SHOWN_CHARS]!a} has characters that must be written as %XX")
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidArgument(field, f"{url[:_SHOWN_CHARS]!r} is not a URL of http or https with a host")
        if parts.username is not None or parts.password is not None:
            raise InvalidArgument(field, "is a URL with a user or password, which are not sent")
        if _ANY_DOMAIN not in self._domains and host not in self._domains:
            raise InvalidArgument(field, f"{host[:_SHOWN_CHARS]!r} is not one of the allowed_media_domains")
        return parts, host, port or (443 if parts.scheme == "https" else 80)

    def _context(self, scheme: str) -> ssl.SSLContext | None:
        if scheme == "http":
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _read_body(field: str, response: http.client.HTTPResponse) -> bytes:
    """Return the body of a response; raise InvalidArgument if it is too large."""
    if response.length is not None and response.length > MAX_FILE_BYTES:
        _refuse_size(field, response.length)
    content = bytearray()
    while part := response.read(_READ_BYTES):
        content += part
        if len(content) > MAX_FILE_BYTES:
            _refuse_size(field, len(content))
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(content)


class _OpenFile:
    """A regular file whose symbolic links have been resolved: the last part of the path must not be one by now."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, field: str) -> bytes:
        """Return the content; raise InvalidArgument if it is too large or not that of a regular file."""
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(field, "names something else than a regular file")
        if status.st_size > MAX_FILE_BYTES:
            _refuse_size(field, status.st_size)
        parts, num_bytes = list[bytes](), 0
        while num_bytes <= MAX_FILE_BYTES and (part := os.read(self._descriptor, 1 << 20)):
            parts.append(part)
            num_bytes += len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class _CheckedConnection(http.client.HTTPConnection):
    """A connection to one of some addresses, whatever the host's name resolves to now.

    Attributes:
        opened: its socket, also while a response has taken it over.
    """

    def __init__(
        self, host: str, port: int, addresses: Sequence[str], end_s: float, context: ssl.SSLContext | None
    ) -> None:
        super().__init__(host, port)
        self._addresses = addresses
        self._end_s = end_s
        self._tls = context
        self.opened: socket.socket | None = None

    def close(self) -> None:
        """Close the connection, also if a response has taken its socket over."""
        super().close()
        if self.opened is not None:
            self.opened.close()

    def connect(self) -> None:
        """Connect to the first address that accepts."""
        failure: OSError = OSError("the host has no address")
        for address in self._addresses:
            try:
                left_s = max(self._end_s - time.monotonic(), 0.001)
                plain = socket.create_connection((address, self.port), timeout=left_s)
            except OSError as error:
                failure = error
                continue
            self.opened = self.sock = plain
            if self._tls is not None:
                secure = self._tls.wrap_socket(plain, server_hostname=self.host, do_handshake_on_connect=False)
                self.opened = self.sock = secure
                secure.do_handshake()
            return
        raise failure


def _call_until(end_s: float, call: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return the result of a call that cannot be interrupted; raise TimeoutError if it does not return in time."""
    done: Future[Sequence[str]] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="jpaged-lookup", daemon=True).start()
    return done.result(max(end_s - time.monotonic(), 0))


@contextlib.contextmanager
def _closing_at(end_s: float, connection: _CheckedConnection) -> Iterator[None]:
    """Shut a connection down at a time, so that a server cannot hold it open with a byte now and then."""

    def shut_down() -> None:
        if connection.opened is not None:
            with contextlib.suppress(OSError):
                connection.opened.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(end_s - time.monotonic(), 0), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_data_uri(field: str, uri: str) -> bytes:
    """Return the content of a data URI: base64 with or without padding, line breaks or a media type, or %XX.

    Raises:
        InvalidArgument: it is malformed.
    """
    head, comma, text = uri.partition(",")
    if not comma:
        raise InvalidArgument(field, "is a data URI without a comma before its content")
    if head.lower().rstrip().endswith(";base64"):
        return read_base64(field, text, is_quoted="%" in text)
    if len(text) > 3 * MAX_FILE_BYTES:
        _refuse_size(field, len(text) // 3)
    return b"".join(map(unquote_to_bytes, _split(text, is_quoted=True)))


def read_base64(field: str, text: str, *, is_quoted: bool = False) -> bytes:
    """Return the content of a base64 text, of either alphabet; whitespace and missing padding are accepted.

    Args:
        is_quoted: characters may be written as %XX.

    Raises:
        InvalidArgument: it is not base64, or empty.
    """
    if len(text) * 3 // 4 > MAX_FILE_BYTES * (4 if is_quoted else 2):
        _refuse_size(field, len(text) * 3 // 4)
    content, rest = list[bytes](), ""
    try:
        for part in _split(text.strip(), is_quoted=is_quoted):
            rest += _SPACE.sub("", unquote(part) if is_quoted else part)
            size = (len(rest) - 1) // 4 * 4  # the last characters may be padding
            content.append(_decode_base64(rest[:size]))
            rest = rest[size:]
        rest = rest.rstrip("=")
        content.append(_decode_base64(rest + "=" * (-len(rest) % 4), is_padded=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(field, f"is not base64: {error}") from error
    if not any(content):
        raise InvalidArgument(field, "is empty: a picture is needed")
    return b"".join(content)


def _split(text: str, *, is_quoted: bool) -> Iterator[str]:
    """Yield a text in parts, after each of which other threads may run; parts end between two characters as %XX."""
    start = 0
    while start < len(text):
        end = start + _PART_CHARS
        if is_quoted and end < len(text) and (begin := text.rfind("%", end - 2, end)) > start:
            end = begin
        yield text[start:end]
        start = end


def _decode_base64(text: str, *, is_padded: bool = False) -> bytes:
    if not is_padded and "=" in text:
        raise ValueError("padding before the end")
    if "-" in text or "_" in text:
        text = text.translate({ord("-"): "+", ord("_"): "/"})
    return base64.b64decode(text, validate=True)


def _refuse_size(field: str, num_bytes: int) -> None:
    raise InvalidArgument(field, f"{num_bytes} bytes are over the limit of {MAX_FILE_BYTES} for a picture")
