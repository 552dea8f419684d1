"""Prefixes that travel between two server processes, of which one is killed now and then."""

from __future__ import annotations

import contextlib
import threading

import pytest

from jpaged.client import Client
from jpaged.errors import JpagedError
from jpaged.types import SamplingParams
from tests.processes import Process, load_at_rest

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SERVE = ("-m", "jpaged", "serve", "demo", "--port", "0", "--swap-space", "0.05", "--max-model-len", "512")


def start(*options: str) -> tuple[Process, str]:
    """A server of the demo, and where it is."""
    process = Process((*SERVE, *options))
    return process, process.wait_for(r"(127\.0\.0\.1:\d+)")[1]


@pytest.mark.long
def test_a_killed_server_costs_a_fetch_and_never_a_token() -> None:
    text = "Once upon a time there was a little girl who lived in a village near the forest. " * 8
    there, source = start()
    here, target = start("--prefix-peers", source)
    try:
        with Client(source) as a, Client(target) as b:
            a.wait_until_ready(300)
            b.wait_until_ready(300)
            wanted = a.complete(text, GREEDY)
            arrival = b.prefixes.fetch(source, text)
            assert arrival.num_tokens == arrival.num_found_tokens > 100
            again = b.complete(text, GREEDY)
            assert again.usage.cached_tokens >= arrival.num_tokens - 16
            assert again.outputs[0].token_ids == wanted.outputs[0].token_ids
            others = [f"{number} {text}" for number in range(6)]
            told = [a.complete(other, GREEDY) for other in others]
            killer = threading.Timer(0.05, there.popen.kill)
            killer.start()
            for other, output in zip(others, told, strict=True):
                with contextlib.suppress(JpagedError):  # it is gone: what came before is whole
                    b.prefixes.fetch(source, other)
                assert b.complete(other, GREEDY).outputs[0].token_ids == output.outputs[0].token_ids
            killer.join()
            load = load_at_rest(b)
            assert (load.num_blocks_used, load.num_compiles_after_warm_up) == (0, 0)
    finally:
        for process in (there, here):
            process.popen.kill()
            process.wait()
