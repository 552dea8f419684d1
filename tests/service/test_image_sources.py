"""Pictures are read from data URIs, allowed servers and an allowed folder, and from nothing else."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from jpaged.errors import InvalidArgument
from jpaged.service import image_sources
from jpaged.service.image_sources import ImageSources, is_public, read_base64

FIELD = "messages[0].content[0].image_url"
CONTENT = bytes(range(256)) * 3


class Handler(BaseHTTPRequestHandler):
    """Answers by path: a picture, redirects, endless and broken answers."""

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/loop":
            self.send_response(301)
            self.send_header("Location", "/loop")
            self.end_headers()
        elif self.path == "/missing":
            self.send_error(404)
        elif self.path == "/huge":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"abc")
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.server.released.wait()  # type: ignore[attr-defined]
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(1 << 17))
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True)
    thread.start()
    yield server.server_port
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


class Names:
    """Names of hosts: `a.test` is this machine, and so is `b.test` after its first lookup."""

    def __init__(self) -> None:
        self.looked_up: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.looked_up.append(host)
        if host == "b.test":
            return ["203.0.113.9" if self.looked_up.count(host) == 1 else "127.0.0.1"]
        return {"a.test": ["127.0.0.1"], "mixed.test": ["127.0.0.1", "10.0.0.1"]}.get(host, ["10.0.0.1"])


def web(*domains: str, names: Names | None = None, timeout_s: float = 5.0) -> ImageSources:
    """Sources for which this machine is a public one."""
    allowed = {"127.0.0.1"}
    found = names or Names()
    return ImageSources(domains, is_allowed=allowed.__contains__, resolve=found, timeout_s=timeout_s)


@pytest.mark.parametrize(
    "head",
    ["data:image/png;base64,", "data:;base64,", "DATA:image/png;charset=utf-8;BASE64,", "data:image/png;base64 ,"],
)
def test_data_uris_are_read_liberally(head: str) -> None:
    text = base64.b64encode(CONTENT).decode()
    lines = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    safe = base64.urlsafe_b64encode(CONTENT).decode()
    for given in (text, lines, text.rstrip("="), safe, text.replace("+", "%2B").replace("/", "%2F")):
        assert ImageSources().read(FIELD, head + given) == CONTENT
    assert ImageSources().read(FIELD, "data:image/bmp,%42%4D%00") == b"BM\0"


@pytest.mark.parametrize("num_chars", [5, 7, 64])
def test_texts_are_decoded_in_parts(num_chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run between two parts, wherever these end."""
    monkeypatch.setattr(image_sources, "_PART_CHARS", num_chars)
    for size in range(1, 80):
        content = CONTENT[3 * size : 4 * size]
        text = base64.b64encode(content).decode()
        for given in (text, text.rstrip("="), base64.encodebytes(content).decode() + " \n" * 9):
            assert read_base64(FIELD, given) == content
        assert ImageSources().read(FIELD, "data:;base64," + quote(text, safe="")) == content
        assert ImageSources().read(FIELD, "data:," + quote(content)) == content
        for wrong in ("AA=" + text, "AAAA" * 20 + "A", text[:4] + "*" + text[4:]):
            with pytest.raises(InvalidArgument, match="is not base64"):
                read_base64(FIELD, wrong)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a*b", "is not base64"), ("abcde", "is not base64"), ("", "is empty"), ("é", "is not base64")],
)
def test_other_texts_are_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        read_base64(FIELD, text)
    assert caught.value.field == FIELD


def test_allowed_hosts_are_asked(port: int) -> None:
    sources = web("a.test")
    for url in (f"http://a.test:{port}/x", f"HTTP://A.TEST:{port}/x?y=%20#z", f"http://a.test.:{port}", "data:,a"):
        assert sources.read(FIELD, url) in (CONTENT, b"a")
    assert sources.read(FIELD, f"http://a.test:{port}/to//x") == CONTENT
    assert sources.read(FIELD, f"http://a.test:{port}/to/http://a.test:{port}/x") == CONTENT


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://c.test:PORT/", "'c.test' is not one of the allowed_media_domains"),
        ("http://a.test@c.test:PORT/", "with a user or password"),
        ("http://c.test:PORT\\@a.test/", "characters that must be written as %XX"),
        ("http://a.test:PORT/a b", "characters that must be written as %XX"),
        ("http://a.test:PORT/\r\nX: y", "characters that must be written as %XX"),
        ("http://private.test:PORT/", "has an address that is not public"),
        ("http://mixed.test:PORT/", "has an address that is not public"),
        ("http://10.0.0.1:PORT/", "has an address that is not public"),
        ("http:///a", "is not a URL of http or https with a host"),
        ("http://a.test:99999/", "cannot be fetched: Port out of range"),
        ("http://a.test:PORT/to/http://private.test/", "'private.test' has an address that is not public"),
        ("http://a.test:PORT/to/http://c.test/", "'c.test' is not one of the allowed_media_domains"),
        ("http://a.test:PORT/to/file:///etc/passwd", "is not a URL of http or https"),
        ("http://a.test:PORT/loop", "is redirected more than 3 times"),
        ("http://a.test:PORT/missing", "is answered with status 404"),
        ("http://a.test:PORT/huge", "1099511627776 bytes are over the limit"),
        ("http://a.test:PORT/short", "cannot be fetched"),
        ("https://a.test:PORT/", "cannot be fetched"),
        ("ftp://a.test/", "is neither a data URI nor a URL"),
        ("http://a.test/" + "a" * 5000, "is a URL of 5014 characters, over the limit of 4096"),
    ],
)
def test_other_urls_are_named(port: int, url: str, problem: str) -> None:
    sources = web("a.test", "private.test", "mixed.test", "10.0.0.1")
    with pytest.raises(InvalidArgument, match=problem) as caught:
        sources.read(FIELD, url.replace("PORT", str(port)))
    assert caught.value.field == FIELD
    assert len(str(caught.value)) < 300


def test_a_star_allows_any_public_host(port: int) -> None:
    assert web("*").read(FIELD, f"http://a.test:{port}/") == CONTENT
    with pytest.raises(InvalidArgument, match="not public"):
        web("*").read(FIELD, f"http://c.test:{port}/")


def test_a_name_is_looked_up_once_for_a_connection(port: int) -> None:
    """A name that points elsewhere after the check leads nowhere else: the checked address is the one in use."""
    names = Names()
    sources = ImageSources(["b.test"], is_allowed=is_public, resolve=names)
    with pytest.raises(InvalidArgument, match="not public"):
        sources.read(FIELD, f"http://b.test:{port}/")  # a documentation address
    assert names.looked_up == ["b.test"]
    names = Names()
    assert web("a.test", names=names).read(FIELD, f"http://a.test:{port}/") == CONTENT
    assert names.looked_up == ["a.test"]


def test_a_server_that_never_ends_is_left(port: int) -> None:
    before_s = time.monotonic()
    with pytest.raises(InvalidArgument, match=r"no complete answer within 0\.05 s"):
        web("a.test", timeout_s=0.05).read(FIELD, f"http://a.test:{port}/slow")
    assert time.monotonic() - before_s < 60


def test_a_name_that_is_not_found_in_time_is_left() -> None:
    released = threading.Event()

    def find(host: str, port: int) -> list[str]:
        released.wait(5)
        return []

    sources = ImageSources(["a.test"], resolve=find, timeout_s=0.05)
    with pytest.raises(InvalidArgument, match=r"cannot be fetched: no complete answer within 0\.05 s"):
        sources.read(FIELD, "http://a.test/x")
    released.set()


def test_an_answer_without_a_length_is_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_sources, "MAX_FILE_BYTES", 1 << 16)
    with pytest.raises(InvalidArgument, match="bytes are over the limit of 65536 for a picture"):
        web("a.test").read(FIELD, f"http://a.test:{port}/endless")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "192.0.2.1", "fec0::1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_files_of_the_allowed_folder_are_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "outside"
    inside.mkdir()
    (inside / "a b.png").write_bytes(CONTENT)
    outside.write_bytes(b"secret")
    (inside / "link").symlink_to(outside)
    (inside / "good").symlink_to(inside / "a b.png")
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "pipe")
    sources = ImageSources(folder=str(inside))
    for url in (f"file://{inside}/a%20b.png", f"{inside}/a b.png", f"file://localhost{inside}/good"):
        assert sources.read(FIELD, url) == CONTENT
    for url, problem in (
        (f"file://{inside}/link", "is not in the folder allowed_local_media_path"),
        (f"{inside}/../outside", "is not in the folder allowed_local_media_path"),
        (f"file://{inside}/%2e%2e/outside", "is not in the folder allowed_local_media_path"),
        (f"file://host{inside}/a", "names a file of another machine"),
        (f"{inside}/missing", "cannot be read: No such file"),
        (f"{inside}/loop", "cannot be read: Too many levels"),
        (f"{tmp_path}/missing", "is not in the folder allowed_local_media_path"),
        (f"{inside}/pipe", "names something else than a regular file"),
        (f"{inside}", "names something else than a regular file"),
        (f"file://{inside}/a%00b", "cannot be read"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            sources.read(FIELD, url)
    with pytest.raises(InvalidArgument, match="needs the option allowed_local_media_path"):
        ImageSources().read(FIELD, f"file://{inside}/a%20b.png")


def test_a_connection_goes_to_the_checked_address(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = []
    create = socket.create_connection

    def connect(address: Any, *args: Any, **options: Any) -> Any:
        connected.append(address)
        return create(address, *args, **options)

    monkeypatch.setattr(socket, "create_connection", connect)
    assert web("a.test").read(FIELD, f"http://a.test:{port}/") == CONTENT
    assert connected == [("127.0.0.1", port)]
