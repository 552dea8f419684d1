"""The dashboard of the KV pool: its paths, snapshots of the pools, and limits for experiments.

GET  /              the page
GET  /page/<file>   its script and its style sheet
GET  /page/about    the model, and the permissions of the page
GET  /page/frame    the current state of the pools, once
GET  /page/events   the same ten times a second, as server-sent events
POST /page/limit    {"blocks": 64} limits the pools; null removes the limit

All except the last are read-only.

`SnapshotBroadcaster` has one snapshot of the pools for all viewers: encoded once, and read by each at the viewer's
pace.

    engine ──pictures──> FrameWriter ──frame 17──> [ newest ] <── watcher that has 16: the change
            (its thread)  (a thread)                         <── watcher that has 12: the whole

A viewer requests the next frame when it has sent the last; a slow one skips frames, and nothing is buffered for it.
Without viewers nothing runs.

`PoolLimitSetter` limits the pools at run time, so that sharing and preemption become visible.

A limit affects all clients of the server. It requires a key of the role control, or a loopback address on a server
without keys. It is logged and exported as a metric, and it expires when its page stops renewing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jpaged.access.authenticator import current, require_control
from jpaged.errors import InvalidArgument, PermissionDenied, QueueFull, Unavailable
from jpaged.http.exchange import JSON, body_in
from jpaged.inspector.frames import Frame, FrameWriter
from jpaged.pool import PoolSnapshot
from jpaged.service.service import Service, Stage
from jpaged.version import __version__

MAX_WATCHERS = 64
_FRAME_INTERVAL_S = 0.1
_QUIET_S = 1.0
"""Interval of snapshots of idle pools, and time that a viewer waits for a frame before a keep-alive."""
_RETRY_S = 5.0


class SnapshotBroadcaster:
    """Takes snapshots while there are viewers. Bound to the event loop of the first viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._writer = FrameWriter()
        self._writing = asyncio.Lock()
        self._newest: Frame | None = None
        self._whole: Frame | None = None
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._loads: Sequence[Any] = ()
        self._looked_s = 0.0
        self.is_over = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Watch while the context is open.

        Raises:
            Unavailable: no model is loaded, or the engine has failed.
            QueueFull: there are too many viewers.
        """
        self._service.state.loaded()
        if self._num_watchers >= MAX_WATCHERS:
            raise QueueFull(
                f"{self._num_watchers} clients watch the pool, the limit is {MAX_WATCHERS}", retry_after_s=_RETRY_S
            )
        self._num_watchers += 1
        if self._looking is None:
            self._newest, self._loads = None, ()  # frames from before the first viewer are outdated
            self._looking = asyncio.create_task(self._look())
        try:
            yield Watcher(self)
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._looking.cancel()
                self._looking = None

    @property
    def number(self) -> int | None:
        """Number of the newest frame; None before the first."""
        return None if self._newest is None else self._newest.number

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next frame, the end or the timeout."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    async def frame_for(self, seen: int | None) -> Frame:
        """Return the frame that updates a viewer from frame `seen`; there must be a newer one."""
        newest = self._newest
        if newest is not None and newest.base is not None and newest.base == seen:
            return newest
        async with self._writing:
            if self._whole is None or self._whole.number != self._writer.number:
                self._whole = await asyncio.to_thread(self._writer.whole)
            return self._whole

    async def _look(self) -> None:
        try:
            while not self._ends():
                await self._look_once()
                await asyncio.sleep(_FRAME_INTERVAL_S)
        finally:
            self.is_over = self._ends()
            self._broadcast()

    async def _look_once(self) -> None:
        engine, now_s = self._service.state.loaded().engine, asyncio.get_running_loop().time()
        loads = engine.replica_loads()
        if loads == self._loads and now_s - self._looked_s < _QUIET_S:
            return
        snapshots = await self._snapshots()
        if snapshots is None:
            return
        self._loads, self._looked_s = loads, now_s
        async with self._writing:
            self._newest = await asyncio.to_thread(self._writer.change, snapshots)
        self._broadcast()

    async def _snapshots(self) -> list[PoolSnapshot] | None:
        """Return the next snapshots; None if the server ends."""
        asked = [asyncio.wrap_future(one) for one in self._service.state.loaded().engine.inspector.snapshots()]
        waiting: set[asyncio.Future[PoolSnapshot]] = set(asked)
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_QUIET_S)
            if waiting and self._ends():
                return None
        return [one.result() for one in asked]

    def _ends(self) -> bool:
        state = self._service.state
        is_drained = state.stage is Stage.DRAINING and self._service.is_idle.is_set()
        return is_drained or state.stage is Stage.FAILED or state.failure is not None

    def _broadcast(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Watcher:
    """One viewer."""

    def __init__(self, hub: SnapshotBroadcaster) -> None:
        self._hub = hub
        self._seen: int | None = None

    async def next(self) -> Frame | None:
        """Return the next frame; None if none came for a while."""
        if self._hub.number == self._seen:
            await self._hub.changed(_QUIET_S)
        if self._hub.number == self._seen:
            return None
        frame = await self._hub.frame_for(self._seen)
        self._seen = frame.number
        return frame

    @property
    def is_over(self) -> bool:
        """True if the server ends, so that no frame follows."""
        return self._hub.is_over


_LOG = logging.getLogger(__name__)

LEASE_S = 15.0
"""A limit expires after this time unless its page renews it; the page of a closed tab does not."""
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
_PATIENCE_S = 5.0
"""Maximum wait for blocks in use."""
_LIMIT_INTERVAL_S = 0.05


class PoolLimitSetter:
    """Sets the limit; of two concurrent calls the later one wins."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_asked = 0
        self._lease: asyncio.TimerHandle | None = None

    async def limit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Limit each pool to `blocks` blocks; null removes the limit.

        Returns:
            the limit, and the number of blocks still in use that it has to free later.

        Raises:
            InvalidArgument: it is not a number of blocks, or requests in flight and pins may need more.
            PermissionDenied: control operations are turned off, or not allowed with this key.
        """
        require_control("changing the limit of the pool")
        model = self._service.state.serving()
        if model.config.server.disable_control:
            raise PermissionDenied("the pool's limit is fixed on this server (disable_control)")
        blocks = _get_blocks(body)
        self._num_asked += 1
        mine, loop = self._num_asked, asyncio.get_running_loop()
        until_s = loop.time() + _PATIENCE_S
        while True:
            asked = model.engine.inspector.limit(blocks)
            left = sum(await asyncio.gather(*map(asyncio.wrap_future, asked)))
            if mine == self._num_asked:
                self._note(blocks)
            if left == 0 or mine != self._num_asked or loop.time() > until_s:
                return {"blocks": blocks, "blocks_in_use": left}
            await asyncio.sleep(_LIMIT_INTERVAL_S)

    def _renew(self, blocks: int | None) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None if blocks is None else asyncio.get_running_loop().call_later(LEASE_S, self._expire)

    def _expire(self) -> None:
        self._lease = None
        self._num_asked += 1  # makes a waiting call give up
        if self._service.state.failure is None:
            self._service.state.loaded().engine.inspector.limit(None)
            self._note(None)

    def _note(self, blocks: int | None) -> None:
        inspector = self._service.state.loaded().engine.inspector
        self._renew(blocks)
        if inspector.limited_to == blocks:
            return
        inspector.note_limit(blocks)
        entry = current()
        by = "a page that has been closed" if entry is None or entry.is_closed else entry.peer
        limit = (
            "all blocks of the pool are usable again" if blocks is None else f"{blocks} blocks of each pool are usable"
        )
        _LOG.warning("live page: %s, by %s", limit, by)


def require_local(request: Request) -> None:
    """Raise PermissionDenied for a caller without a key that is not on this machine."""
    if not is_local(request):
        raise PermissionDenied("changing the limit of the pool needs a key of the role control, or a loopback address")


def is_local(request: Request) -> bool:
    """Return True if a caller has a key, or is on this machine without a proxy."""
    entry = current()
    if entry is not None and entry.key is not None:
        return True
    if request.client is None or any(name in request.headers for name in _FORWARDED):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _get_blocks(body: dict[str, Any]) -> int | None:
    unknown = sorted(body.keys() - {"blocks"})
    if unknown:
        raise InvalidArgument(f"body.{unknown[0]}", "unknown field; the field is blocks")
    if "blocks" not in body:
        raise InvalidArgument("body.blocks", "is missing")
    blocks = body["blocks"]
    if blocks is None or (isinstance(blocks, int) and not isinstance(blocks, bool)):
        return blocks
    raise InvalidArgument("body.blocks", f"{str(blocks)[:80]!r} is neither a whole number nor null")


_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def page_routes(service: Service) -> list[Route]:
    """Return the routes of the dashboard."""
    hub, limits = SnapshotBroadcaster(service), PoolLimitSetter(service)

    async def about(request: Request) -> Response:
        model = service.state.loaded()
        has_keys = model.config.access.has_keys  # the page sends the key that the user enters later
        return JSON(
            {
                "model": model.model.name,
                "version": __version__,
                "max_model_len": model.model.max_model_len,
                "has_chat": model.model.has_chat_template,
                "can_limit": not model.config.server.disable_control and (has_keys or is_local(request)),
            }
        )

    async def frame(request: Request) -> Response:
        with hub.watching() as watcher:
            while not watcher.is_over:
                if (newest := await watcher.next()) is not None:
                    return Response(newest.data, media_type="application/json", headers=_STREAM_HEADERS)
        raise Unavailable("the server is shutting down")

    async def events(request: Request) -> Response:
        return _Events(hub)

    async def limit(request: Request) -> Response:
        # The body must be JSON: a browser sends that from another site's page only if this server allows it (CORS).
        require_local(request)
        body, _ = await body_in(service, request)
        return JSON(await limits.limit(body))

    files = [Route("/", _file("index.html"), methods=["GET"])]
    files += [Route(f"/page/{path.name}", _file(path.name), methods=["GET"]) for path in sorted(_STATIC.glob("*.*s"))]
    return [
        *files,
        Route("/page/about", about, methods=["GET"]),
        Route("/page/frame", frame, methods=["GET"]),
        Route("/page/events", events, methods=["GET"]),
        Route("/page/limit", limit, methods=["POST"]),
    ]


class _Events(StreamingResponse):
    """Frames as server-sent events, while the client is connected."""

    def __init__(self, hub: SnapshotBroadcaster) -> None:
        super().__init__((), media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._hub = hub

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._hub.watching() as watcher:
            self.body_iterator = _iter_frames(watcher)
            await super().__call__(scope, receive, send)


async def _iter_frames(watcher: Watcher) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    while not watcher.is_over:
        frame = await watcher.next()
        if frame is None:
            yield b": nothing new\n\n"
        else:
            yield b"id: %d\nevent: pool\ndata: %b\n\n" % (frame.number, frame.data)


def _file(name: str) -> Any:
    path = _STATIC / name
    content = path.read_bytes()

    async def file(request: Request) -> Response:
        return Response(content, media_type=_TYPES[path.suffix], headers=_HEADERS)

    return file
