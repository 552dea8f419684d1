"""Real servers that evict: a router sends a prompt where its beginning is, and no longer where it was."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged.client import AsyncClient
from jpaged.route.prefix_table import parse_prompt_prefix
from jpaged.types import SamplingParams
from tests.processes import Process
from tests.route.rig import routed
from tests.route.test_held import ask, held_of, went_to
from tests.server.harness import collect, eventually

SERVE = ("-m", "jpaged", "serve", "demo", "--max-num-seqs", "4", "--num-blocks", "48", "--max-model-len", "256")
PROMPT = list(range(300, 460))
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
pytestmark = pytest.mark.long


@pytest.fixture
def servers(tmp_path: Path, swap_space: str) -> Iterator[dict[str, Process]]:
    made = [
        Process((*SERVE, "--port", "0", "--swap-space", swap_space,
                 "--kv-events-endpoint", f"ipc://{tmp_path}/{name}",
                 "--kv-events-replay-endpoint", f"ipc://{tmp_path}/{name}r"))
        for name in "ab"
    ]  # fmt: skip
    found: dict[str, Any] = {one.wait_for(r"^ready on (127\.0\.0\.1:\d+)$").group(1): one for one in made}
    yield found
    for one in made:
        if one.popen.poll() is None:
            one.end(signal.SIGKILL)


async def push_out(name: str, is_over: Callable[[], bool]) -> None:
    """Has a server compute other prompts, which the router does not see."""
    async with AsyncClient(name) as direct:
        for turn in range(64):
            await direct.complete(prompt_token_ids=[(turn * 7 + i * 3) % 900 for i in range(200)], sampling=ONE)
            if is_over():
                break


@pytest.mark.parametrize("swap_space", ["0.1"])
async def test_what_went_to_host_memory_is_where_it_was(servers: dict[str, Process]) -> None:
    beginning = parse_prompt_prefix(ask(PROMPT), b"")
    assert beginning is not None
    async with routed(*servers) as router:
        held = held_of(router)
        await eventually(lambda: all(held.is_heard(name) for name in servers))
        first = await went_to(router, ask(PROMPT))
        await eventually(lambda: held.num_tokens(beginning)[first] >= 128)
        num_pool = held.num_blocks(first)
        await push_out(first, lambda: held.num_blocks(first) > num_pool + 96)  # twice what the device has
        await eventually(lambda: held.num_blocks(first) > num_pool + 96)
        assert held.num_tokens(beginning)[first] >= 128
        told = await collect(router.inference.Generate(ask(PROMPT)))
        assert told[-1].usage.cached_tokens >= 128


@pytest.mark.parametrize("swap_space", ["0"])
async def test_where_a_prefix_was_evicted_no_prompt_goes_for_it(servers: dict[str, Process]) -> None:
    beginning = parse_prompt_prefix(ask(PROMPT), b"")
    assert beginning is not None
    async with routed(*servers) as router:
        held, directory = held_of(router), router.router.fleet.directory
        await eventually(lambda: all(held.is_heard(name) for name in servers))
        first = await went_to(router, ask(PROMPT))
        (second,) = servers.keys() - {first}
        await eventually(lambda: held.num_tokens(beginning)[first] >= 128)
        assert await went_to(router, ask(PROMPT)) == first
        told = await collect(router.inference.Generate(ask(PROMPT)))
        assert told[-1].usage.cached_tokens >= 128
        await push_out(first, lambda: not held.num_tokens(beginning)[first])
        await eventually(lambda: held.num_tokens(beginning)[first] == 0)
        hits = directory.num_hits
        async with AsyncClient(second) as direct:
            await direct.complete(prompt_token_ids=PROMPT, sampling=ONE)
        await eventually(lambda: held.num_tokens(beginning)[second] >= 128)
        assert {await went_to(router, ask(PROMPT)) for _ in range(4)} == {second}
        assert directory.num_hits == hits + 4
        servers[second].end(signal.SIGKILL)
        await router.until(1)
        await until_nothing(router, second)
        assert await went_to(router, ask(PROMPT)) == first
        assert directory.num_hits == hits + 4


async def until_nothing(router: Any, name: str) -> None:
    held = held_of(router)
    await eventually(lambda: held.is_heard(name) is False and held.num_blocks(name) == 0)
