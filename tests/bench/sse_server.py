"""A small server with OpenAI's streaming API, which answers what a test wants it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SseServer:
    """One server.

    Attributes:
        events: what a request is answered with, one event each; a str is sent as it is.
        requests: (path, body) of every request so far.
        status: of every answer.
        gate: holds every answer back until it is set.
        opened: may be acquired once for every request that came.
    """

    events: list[Any] = field(default_factory=list)
    status: str = "200 OK"
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    most_open: int = 0
    num_open: int = 0
    gate: asyncio.Event | None = None
    opened: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    url: str = ""

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.answer(reader, writer))
        self.answers.add(task)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                self.requests.append((head.split()[1], json.loads(body or b"{}")))
                await self._stream(writer)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.opened.release()
        self.most_open = max(self.most_open, self.num_open)
        if self.gate is not None:
            await self.gate.wait()
        head = f"HTTP/1.1 {self.status}\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for event in self.events:
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            data = text.encode()
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):  # an event may come in pieces
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
        self.num_open -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextlib.asynccontextmanager
async def running(server: SseServer) -> AsyncIterator[SseServer]:
    """Runs it on a free port; `server.url` says where."""
    listening = await asyncio.start_server(server.begin, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in server.answers:
            task.cancel()
        await asyncio.gather(*server.answers, return_exceptions=True)
        await asyncio.sleep(0)  # closed connections let go of their sockets in the next turn


def completion(text: str, finish: str | None = None) -> dict[str, Any]:
    """One event of /v1/completions."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The event that counts tokens."""
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


DONE = "data: [DONE]\n\n"
