"""Follows `/page/events` of a server. The standard library's HTTP client suffices for one stream."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator
from http.client import HTTPException
from urllib.parse import urlsplit

from jpaged.errors import InvalidArgument, Unavailable, sentence_of
from jpaged.pool import FrameReader

_TIMEOUT_S = 10.0
"""A server sends at least one keep-alive per second."""


def url_of(given: str, *, is_tls: bool = False) -> str:
    """Return the address of a server: as given, or HOST:PORT with http:// or https:// prepended.

    Raises:
        InvalidArgument: it is invalid, or not https although TLS flags are given.
    """
    url = given if "://" in given else f"{'https' if is_tls else 'http'}://{given}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or any(ord(letter) < 33 or ord(letter) > 126 for letter in url):
        raise InvalidArgument("URL", f"{given!r} is neither http://HOST:PORT nor HOST:PORT")
    if is_tls and parts.scheme != "https":
        raise InvalidArgument("URL", f"{given!r} must begin with https:// if TLS options are given")
    return url.rstrip("/")


def frames(
    url: str, token: str, context: ssl.SSLContext | None = None, proxy: str = ""
) -> Generator[FrameReader, None, None]:
    """Follow the pools of a server; yield them after each frame, and after each second without one.

    Args:
        token: the API key; "" for none.
        context: TLS context; None for the system's CAs.
        proxy: URL of an HTTP proxy; "" for none, whatever the environment has.

    Raises:
        Unavailable: the server is unavailable, has no such page, or the stream ends.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    tls = urllib.request.HTTPSHandler(context=context)
    proxies = urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else {})
    opener = urllib.request.build_opener(proxies, tls)
    reader = FrameReader()
    try:
        with opener.open(urllib.request.Request(f"{url}/page/events", headers=headers), timeout=_TIMEOUT_S) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    reader.take(line.removeprefix(b"data: "))
                    yield reader
                elif line.startswith(b":") and reader.pools:
                    yield reader
    except urllib.error.HTTPError as error:
        raise Unavailable(f"{url} returned {error.code}: {_message_of(error)}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        through = f" (through the proxy {proxy.rpartition('@')[2]})" if proxy else ""
        problem = sentence_of(reason) if isinstance(reason, OSError) else reason
        raise Unavailable(f"{url}{through}: {problem}") from error
    raise Unavailable(f"{url}: the server closed the stream")


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        told = json.loads(error.read(65536))["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason
    return str(told)
