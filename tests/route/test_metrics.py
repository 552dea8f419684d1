"""A router's numbers: every call, message and server is counted, under names that docs/route.md has."""

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jpaged.client import AsyncClient
from tests.client.routing.cutting import wire
from tests.client.routing.test_resuming import SHAPES, all_of, server
from tests.route.rig import Routed, routed
from tests.server.harness import collect, eventually, failure_of, request

PAGE = Path(__file__).resolve().parents[2] / "docs" / "route.md"


async def scraped(router: Routed) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels, in the order of their names."""
    url = f"http://127.0.0.1:{router.router.metrics_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    families: Any = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value for sample in samples}


async def test_what_is_done_is_counted():
    async with (
        server() as first,
        server() as second,
        wire(second.port) as cut,
        routed(first.target, cut.target, server={"metrics_port": 0}) as router,
    ):
        same = "the same beginning " * 5
        for _ in range(3):
            await collect(router.inference.Generate(request(same)))
        await failure_of(router.inference.Generate(request(max_tokens=5000)))
        found = await scraped(router)
        assert found["jpaged:route_calls_total", "OK", "Generate"] == 3
        assert found["jpaged:route_calls_total", "INVALID_ARGUMENT", "Generate"] == 1
        assert found["jpaged:route_placed_prompts_total",] == 4
        assert found["jpaged:route_prefix_hits_total",] == 2
        assert found["jpaged:route_target_up", first.target] == found["jpaged:route_target_up", cut.target] == 1
        of_tokens = [value for (name, *_), value in found.items() if name == "jpaged:route_tokens_total"]
        assert sum(of_tokens) == 24
        of_messages = [value for (name, *_), value in found.items() if name == "jpaged:route_messages_total"]
        assert 3 <= sum(of_messages) <= 24
        for one in (first, second):
            one.faults.gate.clear()
        async with AsyncClient(router.target, resuming=None) as client:
            reading = [asyncio.ensure_future(all_of(client.generate(f"{i}", SHAPES["greedy"]))) for i in range(4)]
            await eventually(lambda: first.num_open_calls + second.num_open_calls == 4)
            assert (await scraped(router))["jpaged:route_open_calls",] == 4
            lost = second.num_open_calls
            cut.kill()
            first.faults.release()
            await asyncio.gather(*reading)
            second.faults.release()
        found = await scraped(router)
        assert found["jpaged:route_retried_calls_total", cut.target] == lost > 0
        assert found["jpaged:route_target_up", cut.target] == 0
        assert found["jpaged:route_open_calls",] == 0


async def test_the_page_has_every_name():
    async with server() as harness, routed(harness.target, server={"metrics_port": 0}) as router:
        await collect(router.inference.Generate(request()))
        names = {name.removesuffix("_total").removesuffix("_created") for name, *_ in await scraped(router)}
    text = PAGE.read_text()
    assert {name for name in names if f"`{name}`" not in text} == set()
