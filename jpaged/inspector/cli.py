"""The subcommand `top`: the KV pool of a running server in a terminal, like the dashboard."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jpaged import json_text
from jpaged.cli.options import add_credential_flags, credentials_from
from jpaged.client.channel import proxy_for

if TYPE_CHECKING:
    from jpaged.inspector.frames import FrameReader

DESCRIPTION = """\
Watch the KV pool of a server through its HTTP port: blocks colored by request, queues and events.

    jpaged serve demo
    jpaged top http://127.0.0.1:8000

q quits; tab shows the next replica. If the output is not a terminal, one line is printed per second.
"""
_DEFAULT_URL = "http://127.0.0.1:8000"
_REDRAW_S = 0.12
_LINE_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the address and the output format."""
    parser.add_argument(
        "url", nargs="?", default=_DEFAULT_URL, metavar="URL", help=f"HTTP URL of the server (default: {_DEFAULT_URL})"
    )
    parser.add_argument("--once", action="store_true", help="print the current state once and exit")
    parser.add_argument("--json", action="store_true", help="print JSON objects instead of text lines")
    add_credential_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the pool; return 0 when quit or after one output. Raises if the server is not available or ends."""
    from jpaged.inspector.top_screen import Rate, frames, get_url, line, summary

    shown = credentials_from(arguments)
    url = get_url(arguments.url, is_tls=shown.tls is not None)
    proxy = "" if shown.proxy is None else proxy_for(url, shown.proxy)
    following = frames(url, shown.api_key, None if shown.tls is None else shown.tls.context(), proxy)
    if sys.stdout.isatty() and not (arguments.once or arguments.json):
        return _draw(url, following)
    rate, said_s = Rate(), 0.0
    for reader in following:
        rate.take(reader)
        if not arguments.once and time.monotonic() - said_s < _LINE_S:
            continue
        said_s = time.monotonic()
        told = json_text.dumps(summary(reader, rate)) if arguments.json else line(reader, rate)
        print(told, flush=True)
        if arguments.once:
            break
    return 0


def _draw(url: str, following: Iterable[FrameReader]) -> int:
    from rich.live import Live

    from jpaged.inspector.top_screen import Screen, pressed

    screen, drawn_s = Screen(url), 0.0
    with pressed() as keys, Live(screen, screen=True, auto_refresh=False) as live:
        for reader in following:
            screen.take(reader)
            if time.monotonic() - drawn_s > _REDRAW_S:
                live.refresh()
                drawn_s = time.monotonic()
            taken = keys.taken()
            if "q" in taken or "\x1b" in taken:
                break
            if "\t" in taken:
                screen.show_next()
    return 0
