"""Requests of every route at the largest accepted size are answered as expected, next to another client's stream.

How long that stream waits depends on the machine: `python -m benchmarks.stalls --limit-ms 250` is the benchmark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from benchmarks.stalls import (
    Attack,
    Server,
    attacks,
    hostile_attacks,
    hostile_copy,
    http_attacks,
    large_answers,
    measure,
)

MAX_GROWTH_MIB = 1024
"""Limit on the growth of the server's memory over all requests. One answer may take `max_response_size` twice."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        pytest.param("demo", lambda: (*attacks(), *large_answers()), id="grpc"),
        pytest.param("demo", http_attacks, id="http"),
        pytest.param("hostile", hostile_attacks, id="templates"),
    ],
)
def test_the_largest_requests_get_their_status_and_leave_no_memory(
    model: str, kinds: Callable[[], Iterable[Attack]], tmp_path: Path
) -> None:
    server = Server(str(hostile_copy(tmp_path / "demo")) if model == "hostile" else model, str(tmp_path / "batches"))
    chosen = list(kinds())
    try:
        alone, *results = asyncio.run(measure(server, chosen, 1, settle_s=0.0))
    finally:
        server.stop()
    expected = {attack.name: attack.expected for attack in chosen}
    assert len(expected) == len(chosen) == len(results)
    assert {one.request: one.status for one in results} == expected
    assert results[-1].rss_after_mib - alone.rss_before_mib < MAX_GROWTH_MIB
