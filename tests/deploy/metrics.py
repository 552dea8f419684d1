"""What a live server answers to Prometheus."""

from __future__ import annotations

import asyncio
import urllib.request

from tests.server.harness import running


async def scrape() -> str:
    """The text of one scrape."""
    async with running(metrics_port=0) as harness:
        url = f"http://127.0.0.1:{harness.server.metrics_port}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(read)


def names_in(text: str) -> set[str]:
    """The names of all series of a scrape, as Prometheus stores them."""
    return {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
