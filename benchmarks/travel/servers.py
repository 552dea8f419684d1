"""Two servers of one checkpoint, each a process on cores of its own, and streams that note when their tokens come."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jpaged.client import Client
from jpaged.errors import DeadlineExceeded
from jpaged.types import SamplingParams

_READY_S, _END_S = 600.0, 30.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(model: Path, port: int, log: Path, core: int | None, options: Sequence[str] = ()) -> Iterator[Client]:
    """A server, and a client of it; both end with the context."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    command = [*pinned, sys.executable, "-m", "jpaged", "serve", str(model), "--port", str(port), *options]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            with Client(f"127.0.0.1:{port}") as client:
                _await(client, process, log)
                yield client
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until a server takes requests; raises RuntimeError where it ends before."""
    until_s = time.monotonic() + _READY_S
    while True:
        try:
            client.wait_until_ready(1.0)
        except DeadlineExceeded:
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"no server came up: {log.read_text()[-1000:]}") from None
        else:
            return


class Streams:
    """Requests that generate all the time, and the gaps between their messages.

    Args:
        prompts: one of each stream.
        num_tokens: that each generates; it begins anew when it ends.
    """

    def __init__(self, client: Client, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self._client = client
        self._num_tokens = num_tokens
        self._stop = threading.Event()
        self._gaps: list[tuple[float, float]] = []
        self._threads = [threading.Thread(target=self._run, args=(list(prompt),)) for prompt in prompts]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Milliseconds between two messages of a stream, of those that ended in a span of time."""
        return [1000 * gap_s for at_s, gap_s in list(self._gaps) if begin_s <= at_s <= end_s]

    def _run(self, prompt: list[int]) -> None:
        sampling = SamplingParams(max_tokens=self._num_tokens, temperature=0.0, ignore_eos=True)
        while not self._stop.is_set():
            with self._client.generate(prompt_token_ids=prompt, sampling=sampling) as stream:
                last_s: float | None = None
                for _ in stream:
                    now_s = time.perf_counter()
                    if last_s is not None:
                        self._gaps.append((now_s, now_s - last_s))
                    last_s = now_s
                    if self._stop.is_set():
                        return
