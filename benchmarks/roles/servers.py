"""Two server processes, each on a processor of its own: both of the role both, or one of prefill and one of decode."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from jpaged.client import Client

Way = Literal["mixed", "apart"]
WAYS: tuple[Way, ...] = ("mixed", "apart")
_READY = re.compile(r"^ready on \S*:(?P<port>\d+)")


def command(model: str, role_options: Sequence[str]) -> list[str]:
    """How a server is started: every token is sent by itself, so that gaps are those of tokens."""
    options = ("--port", "0", "--swap-space", "0.5", "--max-num-seqs", "32", "--max-messages-per-second", "100000")
    return [sys.executable, "-m", "jpaged", "serve", model, *options, "--wait-for-all-programs", *role_options]


@contextlib.contextmanager
def serving(model: str, processor: int, *role_options: str) -> Iterator[str]:
    """A server on one processor; its address."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    words = ["taskset", "-c", str(processor), *command(model, role_options)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        port, lines = 0, list[str]()
        for line in process.stderr:
            lines.append(line)
            if match := _READY.match(line):
                port = int(match["port"])
                break
        if not port:
            raise SystemExit(f"{' '.join(words)} ended with {process.wait()}:\n{''.join(lines)}")
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


@contextlib.contextmanager
def two(way: Way, model: str, processors: Sequence[int]) -> Iterator[list[str]]:
    """Both servers; those that clients speak to."""
    first, second = processors
    if way == "mixed":
        with serving(model, first) as one, serving(model, second) as other:
            yield [one, other]
        return
    with serving(model, first, "--role", "prefill") as prefill:
        always = ("--prefill-min-tokens", "64", "--prefill-policy", "always")
        options = ("--role", "decode", "--prefill-target", prefill, *always)
        with serving(model, second, *options) as decode:
            yield [decode]


def hit_tokens(targets: Sequence[str]) -> int:
    """Prompt tokens that were found in caches, of all servers so far: behind a journey they are."""
    total = 0
    for target in targets:
        with Client(target) as client:
            total += client.load().num_prefix_hit_tokens
    return total
