"""`jpaged top` says what the server's page shows, in lines, as JSON, and drawn in a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jpaged.cli.main import main
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.inspector.frames import BlockState, FrameReader, unpack
from jpaged.inspector.top_screen import Cells, Screen, frames, get_url, summarised
from jpaged.testing import FakeExecutor
from tests.server.harness import Harness, eventually, request, running

ROOT = Path(__file__).parents[3]
KEYS = '[[keys]]\nid = "one"\ntenant = "t"\ntoken = "a-token-that-looks"\nrole = "observe"\n'


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Harness]:
    executor = FakeExecutor(num_blocks=40, block_size=4, num_host_blocks=20)
    async with running(executor=executor, http_port=0, **options) as harness:
        yield harness


async def top(*words: str) -> int:
    """Runs it on a thread, beside the server's loop."""
    return await asyncio.to_thread(main, ["top", *words])


async def test_it_says_once_how_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as harness:
        [_ async for _ in harness.inference.Generate(request("x" * 9, n=3, temperature=1.0))]
        assert await top(harness.http_url, "--once") == 0
        said = capsys.readouterr().out
        assert "0 of 40 blocks in use" in said and "0 running" in said
        assert await top(harness.http_url.removeprefix("http://"), "--once", "--json") == 0
        (pool,) = json.loads(capsys.readouterr().out)["pools"]
        assert sum(pool["blocks"].values()) == pool["num_blocks"] == 40
        assert pool["totals"]["num_generation_tokens"] == 24


async def test_lines_follow_until_the_server_ends(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as harness:
        following = asyncio.ensure_future(top(harness.http_url))
        await eventually(lambda: "blocks in use" in capsys.readouterr().out)
        harness.server.request_stop()
        assert await following == 1
        assert "closed the stream" in capsys.readouterr().err


async def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JPAGED_API_KEY", raising=False)
    keys, key = tmp_path / "keys.toml", tmp_path / "key"
    keys.write_text(KEYS)
    key.write_text("a-token-that-looks\n")
    async with served(api_keys=str(keys), public_page=False) as harness:
        assert await top(harness.http_url, "--once") == 1
        assert "401" in capsys.readouterr().err
        assert await top(harness.http_url, "--once", "--api-key-file", str(key)) == 0
        monkeypatch.setenv("JPAGED_API_KEY", "a-token-that-looks")
        assert await top(harness.http_url, "--once") == 0


async def test_what_is_no_server_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words_file = tmp_path / "words"
    words_file.write_text("no key and no certificate")
    for words, code, said in (
        (["ftp://x"], 2, "neither http://HOST:PORT nor HOST:PORT"),
        (["http://x:99999"], 2, "neither"),
        (["http://x y"], 2, "neither"),
        (["127.0.0.1:1", "--once"], 1, "http://127.0.0.1:1: Connection refused"),
        (["http://127.0.0.1:1", "--tls"], 2, "must begin with https:// if TLS options are given"),
        (["127.0.0.1:1", "--tls-ca", str(words_file)], 2, "tls: the files cannot be used"),
        (["127.0.0.1:1", "--api-key-file", str(words_file)], 2, "must contain one API key"),
        (["127.0.0.1:1", "--api-key-file", str(tmp_path / "none")], 2, "cannot be read"),
    ):
        assert await top(*words) == code
        assert said in capsys.readouterr().err
    assert get_url("localhost:80/") == "http://localhost:80"


def test_an_answer_that_is_no_stream_is_told() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404, "nothing here")

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(Unavailable, match="returned 404"):
            next(iter(frames(f"http://127.0.0.1:{server.server_port}", "")))
    with pytest.raises(InvalidArgument):
        get_url("http://")


async def test_a_screen_has_the_cells_the_queues_and_what_happened() -> None:
    async with served() as harness:
        screen, following = Screen(harness.http_url), frames(harness.http_url, "")
        screen.take(await asyncio.to_thread(next, following))
        [_ async for _ in harness.inference.Generate(request("x" * 9, request_id="mine", n=3, temperature=1.0))]
        console, drawn = Console(width=100, height=30, color_system=None, force_terminal=True), ""
        while "ended" not in drawn:
            screen.take(await asyncio.to_thread(next, following))
            with console.capture() as captured:
                console.print(screen, height=30)
            drawn = captured.get()
        assert "▀" in drawn and "0 running, 0 swapped, 0 waiting" in drawn
        assert "0 of 40 blocks in use" in drawn
        assert "forked" in drawn and "copied on write" in drawn and "#0 mine: length" in drawn
        await asyncio.to_thread(following.close)


def test_more_blocks_than_there_is_room_for_are_summarised() -> None:
    cells = np.zeros(1001, np.uint32)
    cells[500] = BlockState.HELD | 3 << 3 | 7 << 11
    cells[501] = BlockState.HELD | 1 << 3 | 8 << 11
    few = summarised(cells[1:], 10)
    assert len(few) == 100
    assert unpack(few)[2].tolist().count(7) == 1
    console = Console(width=20, height=5, force_terminal=True, color_system="truecolor")
    reader = FrameReader()
    reader.take(json.dumps({"number": 1, "base": None, "pools": [POOL]}))
    reader.pools[0].cells[:] = 0
    with console.capture() as captured:
        console.print(Cells(reader.pools[0]), height=5)
    assert captured.get().count("▀") == 100


POOL = {
    "time_s": 0.0,
    "num_blocks": 1600,
    "num_host_blocks": 0,
    "cells": "",
    "host_cells": "",
    "requests": [],
    "tables": [],
}


async def test_in_a_terminal_it_draws_and_q_ends_it() -> None:
    async with served() as harness:
        ours, its = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "jpaged", "top", harness.http_url),
            cwd=ROOT,
            stdin=its,
            stdout=its,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(its)
        drawn = b""
        while "▀".encode() not in drawn:
            drawn += await asyncio.to_thread(os.read, ours, 65536)
        os.write(ours, b"q")
        reading = asyncio.ensure_future(asyncio.to_thread(_drain, ours))
        assert await process.wait() == 0
        await reading
        os.close(ours)


def _drain(number: int) -> None:
    try:
        while os.read(number, 65536):
            """Until it ends."""
    except OSError:
        """A terminal whose other end is closed."""
