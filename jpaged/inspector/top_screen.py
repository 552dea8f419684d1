"""A pool in a terminal: two cells above each other per character, and several blocks per cell if space is short.

▀  the upper half is one cell, the lower half another

The frames are those of `/page/events` of a server; the standard library's HTTP client suffices for one stream. Numbers
are computed from a frame: blocks by kind, tokens per second, requests by state. Keys are read one at a time, without
waiting for a line.
"""

from __future__ import annotations

import colorsys
import contextlib
import json
import math
import os
import select
import ssl
import sys
import termios
import tty
import urllib.request
from collections import deque
from collections.abc import Generator, Iterator
from functools import lru_cache
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from jpaged.errors import InvalidArgument, Unavailable, describe_error
from jpaged.inspector.frames import BlockState, FrameReader, PoolView, unpack

_WINDOW_S = 1.5
_NUM_KEPT = 240


class Rate:
    """Tokens per second, from counters.

    Attributes:
        history: rates over about a tenth of a second each, the latest last.
    """

    def __init__(self) -> None:
        self.history: deque[float] = deque(maxlen=_NUM_KEPT)
        self._points: deque[tuple[float, int]] = deque()

    def take(self, reader: FrameReader) -> None:
        """Add the counts of a frame."""
        now_s = max(pool.last["time_s"] for pool in reader.pools)
        num_tokens = sum(pool.last["totals"]["num_generation_tokens"] for pool in reader.pools)
        if self._points and now_s <= self._points[-1][0]:
            return
        if self._points:
            then_s, before = self._points[-1]
            self.history.append((num_tokens - before) / (now_s - then_s))
        self._points.append((now_s, num_tokens))
        while len(self._points) > 2 and self._points[0][0] < now_s - _WINDOW_S:
            self._points.popleft()

    @property
    def now(self) -> float:
        """Mean over about the last second."""
        if len(self._points) < 2:
            return 0.0
        (then_s, before), (now_s, num_tokens) = self._points[0], self._points[-1]
        return (num_tokens - before) / (now_s - then_s)


def census(pool: PoolView) -> dict[str, int]:
    """Return the number of blocks of each kind."""
    counts = np.bincount(unpack(pool.cells)[0][1:], minlength=len(BlockState))
    return {kind.name.lower(): int(counts[kind]) for kind in BlockState}


def summary(reader: FrameReader, rate: Rate) -> dict[str, Any]:
    """Return everything except single blocks and events."""
    pools = [
        {
            "num_blocks": pool.last["num_blocks"],
            "block_size": pool.last["block_size"],
            "limit": pool.last["limit"],
            "blocks": census(pool),
            "num_host_blocks": pool.last["num_host_blocks"],
            "host_blocks_held": int(np.count_nonzero(unpack(pool.host_cells)[0] == BlockState.HELD)),
            "num_waiting": pool.last["num_waiting"],
            "requests": pool.last["requests"],
            "totals": pool.last["totals"],
        }
        for pool in reader.pools
    ]
    return {"tokens_per_second": round(rate.now, 1), "pools": pools}


def line(reader: FrameReader, rate: Rate) -> str:
    """Return the same in one line, for all pools together."""
    counts = [census(pool) for pool in reader.pools]
    held = sum(count["held"] + count["pinned"] for count in counts)
    cached = sum(count["cached"] for count in counts)
    limit = sum(pool.last["limit"] for pool in reader.pools)
    states = [one["status"] for pool in reader.pools for one in pool.last["requests"]]
    waiting = sum(pool.last["num_waiting"] for pool in reader.pools)
    totals = [pool.last["totals"] for pool in reader.pools]
    preemptions = sum(total["num_preemptions"] for total in totals)
    copies = sum(total["num_copies_on_write"] for total in totals)
    queues = f"{states.count('running')} running, {states.count('swapped')} swapped, {waiting} waiting"
    return (
        f"{rate.now:.0f} tokens/s, {held} of {limit} blocks in use, {cached} cached, {queues}, "
        f"{preemptions} preemptions, {copies} copies on write"
    )


_MAX_NAMES = 1000
_BARS = " ▁▂▃▄▅▆▇█"
_QUIET = {
    BlockState.FREE: "#1e2533",
    BlockState.CACHED: "#43537a",
    BlockState.PINNED: "#d6a842",
    BlockState.ASIDE: "#15181f",
    BlockState.RESERVED: "#4a4036",
}
_NAMES = {
    "admission": ("admitted", "green"),
    "resumption": ("resumed", "blue"),
    "fork": ("forked", "magenta"),
    "copy_on_write": ("copied on write", "yellow"),
    "prefix_copy": ("prefix copied", "yellow"),
    "swap_out": ("swapped out", "blue"),
    "swap_in": ("swapped in", "blue"),
    "eviction": ("evicted to host memory", "bright_black"),
    "prefix_in": ("loaded from host memory", "bright_black"),
    "prefix_out": ("offloaded to disk or a server", "bright_black"),
    "preemption_swap": ("preempted, swapped to host memory", "red"),
    "preemption_recompute": ("preempted, will be recomputed", "red"),
    "end": ("ended", "bright_black"),
}


class Screen:
    """The drawing of a server's pools; call `take` before the first drawing.

    Attributes:
        place: index of the shown replica.
    """

    def __init__(self, url: str) -> None:
        self.place = 0
        self.rate = Rate()
        self._url = url
        self._reader: FrameReader | None = None
        self._log: deque[Text] = deque(maxlen=60)
        self._shown: dict[int, int] = {}
        self._names: dict[tuple[int, int], str] = {}

    def take(self, reader: FrameReader) -> None:
        """Apply a frame."""
        self._reader = reader
        self.rate.take(reader)
        for place, pool in enumerate(reader.pools):
            last = self._shown.get(place, 0)
            for number, kind, request, count, blocks, why in pool.last["happenings"]:
                if number > last:
                    self._shown[place] = number
                    if kind == "admission":
                        self._names[place, request] = _name(why)
                    who = "" if request is None else f"#{request} {self._names.get((place, request), '')}"
                    self._log.appendleft(_happening(kind, who, count, blocks, why))
        for key in [*self._names][:-_MAX_NAMES]:
            del self._names[key]

    def show_next(self) -> None:
        """Show the next replica."""
        if self._reader is not None:
            self.place = (self.place + 1) % len(self._reader.pools)

    def __rich__(self) -> RenderableType:
        if self._reader is None:
            return Text("waiting for the first snapshot")
        pool = self._reader.pools[min(self.place, len(self._reader.pools) - 1)]
        several = (
            f" · replica {self.place} of {len(self._reader.pools)} (tab: next)" if len(self._reader.pools) > 1 else ""
        )
        layout = Layout()
        layout.split_column(Layout(name="head", size=3), Layout(name="cells", ratio=3), Layout(name="below", ratio=2))
        layout["head"].update(Group(*self._head(pool)))
        layout["cells"].update(
            Panel(Cells(pool), title=f"{self._url}{several}", subtitle="q: quit", border_style="bright_black")
        )
        layout["below"].split_row(Layout(name="requests"), Layout(name="log"))
        layout["requests"].update(Panel(_requests(pool), title=_queues(pool), border_style="bright_black"))
        layout["log"].update(Panel(Group(*self._log), title="events", border_style="bright_black"))
        return layout

    def _head(self, pool: PoolView) -> list[Text]:
        counts, totals = census(pool), pool.last["totals"]
        history = list(self.rate.history)[-40:]
        most = max([10.0, *history])
        spark = "".join(_BARS[min(8, math.ceil(8 * max(0.0, rate) / most))] for rate in history)
        first = Text.assemble(
            (f"{self.rate.now:6.0f}", "bold"), " tokens/s  ", (spark, "cyan"), "  ",
            (f"{counts['held'] + counts['pinned']}", "bold"), " of ", (f"{pool.last['limit']}", "bold"),
            f" blocks in use, {counts['cached']} cached, {counts['free']} free",
        )  # fmt: skip
        second = Text(
            f"forks {totals['num_forks']} · copies on write {totals['num_copies_on_write']} · preemptions "
            f"{totals['num_preemptions']} · blocks swapped out {totals['num_blocks_swapped_out']}, in "
            f"{totals['num_blocks_swapped_in']}",
            style="bright_black",
        )
        return [first, second]


class Cells:
    """The blocks of a pool, fitted to the available space."""

    def __init__(self, pool: PoolView) -> None:
        self._cells = pool.cells[1:]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        kinds = unpack(self._cells)[0]
        used = np.flatnonzero(kinds != BlockState.ASIDE)
        shown = self._cells[: int(used[-1]) + 1] if len(used) else self._cells
        if not len(shown) or width < 1 or height < 1:
            return
        each = max(1, math.ceil(len(shown) / (width * height * 2)))
        colours = [*map(_colour, summarised(shown, each).tolist())]
        rows = [colours[start : start + width] for start in range(0, len(colours), width)]
        for upper, lower in zip(rows[::2], [*rows[1::2], []], strict=False):
            text = Text(no_wrap=True)
            for column, colour in enumerate(upper):
                text.append("▀", _style(colour, lower[column] if column < len(lower) else None))
            yield text


def summarised(cells: NDArray[np.uint32], each: int) -> NDArray[np.uint32]:
    """Merge `each` cells into one: the most referenced one, or the first that is not free."""
    if each == 1:
        return cells
    padded = np.zeros(-(-len(cells) // each) * each, np.uint32)
    padded[: len(cells)] = cells
    rows = padded.reshape(-1, each)
    kinds, counts, _ = unpack(rows)
    weight = counts.astype(np.int64) * 8 + kinds
    return rows[np.arange(len(rows)), weight.argmax(axis=1)]


@lru_cache(maxsize=1 << 14)
def _colour(cell: int) -> str:
    kind, count, owner = cell & 7, (cell >> 3) & 255, cell >> 11
    if kind != BlockState.HELD:
        return _QUIET[BlockState(kind)]
    strength = min(1.0, math.log2(max(1, count)) / 3)
    hue = (owner * 137.508 + 205) % 360 / 360
    red, green, blue = colorsys.hls_to_rgb(hue, 0.42 + 0.36 * strength, 0.58 + 0.32 * strength)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


@lru_cache(maxsize=1 << 15)
def _style(upper: str, lower: str | None) -> Style:
    return Style(color=upper, bgcolor=lower)


def _queues(pool: PoolView) -> str:
    states = [one["status"] for one in pool.last["requests"]]
    return f"{states.count('running')} running, {states.count('swapped')} swapped, {pool.last['num_waiting']} waiting"


def _requests(pool: PoolView) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, ratio=1)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    order = {"running": 0, "finished": 0, "swapped": 1, "waiting": 2}
    for one in sorted(pool.last["requests"], key=lambda one: (order[one["status"]], one["number"])):
        number = one["number"]
        tokens = sum(count - one["prompt"] for _, count in one["sequences"])
        blocks = {
            block_id
            for (of, _, _, is_host), ids in pool.tables.items()
            if of == number and not is_host
            for block_id in ids
            if block_id
        }
        style = (
            _colour(int(BlockState.HELD) | 2 << 3 | (number & 0x1FFFFF) << 11)
            if one["status"] != "waiting"
            else "bright_black"
        )
        name = Text.assemble(("■ ", style), f"#{number} {_name(one['id'])}")
        several = f"{len(one['sequences'])} x " if len(one["sequences"]) > 1 else ""
        again = f", preempted {one['preemptions']}x" if one["preemptions"] else ""
        table.add_row(
            name, f"{one['status']}{again}", f"{several}{one['prompt']}+{max(0, tokens)}", f"{len(blocks)} blocks"
        )
    return table


def _name(request_id: str) -> str:
    """Return the caller's id of a request, without the service's prefix."""
    return request_id.partition("/")[2] or request_id


def _happening(kind: str, who: str, count: int, blocks: list[int], why: str) -> Text:
    words, style = _NAMES.get(kind, (kind, ""))
    if kind in ("copy_on_write", "prefix_copy"):
        rest = f"{blocks[0]} → {blocks[1]}"
    elif not who:
        rest = f"{count} block{'' if count == 1 else 's'}"
    else:
        rest = f"{who}: {count} more share its blocks" if kind == "fork" else who
        rest += f": {why}" if kind == "end" else ""
    return Text.assemble((words, style), " ", rest, no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def pressed() -> Iterator[PressedKeys]:
    """Read single keys while the context is open; none if standard input is not a terminal."""
    if not sys.stdin.isatty():
        yield PressedKeys(None)
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield PressedKeys(number)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


class PressedKeys:
    """Pressed keys."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def taken(self) -> str:
        """Return the keys pressed since the last call."""
        taken = ""
        while self._number is not None and select.select([self._number], [], [], 0)[0]:
            key = os.read(self._number, 64)
            if not key:
                break
            taken += key.decode("utf-8", "replace")
        return taken


_TIMEOUT_S = 10.0
"""A server sends at least one keep-alive per second."""


def get_url(given: str, *, is_tls: bool = False) -> str:
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
        raise Unavailable(f"{url} returned {error.code}: {_get_message(error)}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        through = f" (through the proxy {proxy.rpartition('@')[2]})" if proxy else ""
        problem = describe_error(reason) if isinstance(reason, OSError) else reason
        raise Unavailable(f"{url}{through}: {problem}") from error
    raise Unavailable(f"{url}: the server closed the stream")


def _get_message(error: urllib.error.HTTPError) -> str:
    try:
        told = json.loads(error.read(65536))["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason
    return str(told)
