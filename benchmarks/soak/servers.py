"""Two servers of the demo model: one that lives through the run, and one that is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from jpaged.client import AsyncClient

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_STEADY_FLAGS = ("--wait-for-all-programs", "--num-blocks", "768", "--swap-space", "0.03")
"""Flags of the server whose memory must not grow: compiled programs, pool (48 MiB) and host blocks take theirs early.

The pages of a pool become resident when its blocks are first used.
"""


class Child:
    """A `jpaged serve demo` on ports of its own, which it has again when it is started again."""

    def __init__(self, log: Path, flags: tuple[str, ...] = ()) -> None:
        self.port, self.http_port = _free_port(), _free_port()
        self.num_kills = 0
        self._log, self._flags = log, flags
        self._process: asyncio.subprocess.Process | None = None

    @property
    def target(self) -> str:
        """Where gRPC is."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where OpenAI's API is."""
        return f"http://127.0.0.1:{self.http_port}/v1"

    @property
    def resident_mib(self) -> float:
        """Its memory now."""
        if self._process is None:
            return 0.0
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    async def start(self) -> None:
        """Start it, and wait until it takes requests."""
        await self.begin()
        await self.until_ready()

    async def begin(self) -> None:
        """Start it, and wait for nothing."""
        ports = ("--port", str(self.port), "--http-port", str(self.http_port))
        command = (sys.executable, "-m", "jpaged", "serve", "demo", *ports, *self._flags)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def until_ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            RuntimeError: it ended before.
            ExceptionGroup: of DeadlineExceeded, where it does neither.
        """
        assert self._process is not None
        async with AsyncClient(self.target) as client, asyncio.TaskGroup() as group:
            ready = group.create_task(client.wait_until_ready(_START_TIMEOUT_S))
            ended = group.create_task(self._process.wait())
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            has_ended = ended.done()
            for task in (ready, ended):
                task.cancel()
        if has_ended:
            raise RuntimeError(f"no server came up: {self.last_words}")

    @property
    def has_ended(self) -> bool:
        """Whether it ended, or never began."""
        return self._process is None or self._process.returncode is not None

    @property
    def last_words(self) -> str:
        """Its status, where it has ended, and the end of its log."""
        status = None if self._process is None else self._process.returncode
        return f"status {status}, {self._log.read_text(errors='replace')[-1000:]}"

    async def kill(self) -> None:
        """Kill it as kill -9 does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                self._process.kill()
            await self._process.wait()
            self.num_kills += 1

    async def stop(self) -> int:
        """Have it drain; return its exit code."""
        if self._process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            return await self._process.wait()


@asynccontextmanager
async def pair(folder: Path, flags: tuple[str, ...]) -> AsyncIterator[tuple[Child, Child]]:
    """The server that lives and the one that is killed, both ready; none is left behind.

    The one that lives has made all its programs before: what that takes is not memory that grows with requests.
    """
    steady = Child(folder / "steady.log", (*_STEADY_FLAGS, *flags))
    children = steady, Child(folder / "mortal.log", flags)
    try:
        for child in children:
            await child.start()
        yield children
    finally:
        for child in children:
            await child.kill()


async def kill_again_and_again(child: Child, every_s: float) -> None:
    """Kill it whenever it has taken requests for so long, and start it again, until this is cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await child.kill()
        await child.start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
