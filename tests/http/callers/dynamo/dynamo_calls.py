"""NVIDIA Dynamo's router as a reader of KV events, in its environment: `python dynamo_calls.py WORKERS BLOCK_SIZE`.

WORKERS is a JSON list of the servers' addresses. Prints a JSON object: blocks of prompts that each worker has cached,
and the workers that it selects.
"""

import asyncio
import json
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from dynamo._core import SelectionService

NUM_BLOCKS = 4
WAIT_S = 60.0


def post(url: str, body: dict[str, Any]) -> None:
    """Send a request; raise if it fails."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        response.read()


def compute(worker: dict[str, str], prompt: list[int]) -> None:
    """Let a server compute a prompt."""
    post(f"{worker['url']}/v1/completions", {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0})


async def start(workers: list[dict[str, str]], block_size: int) -> SelectionService:
    """Return a router that reads the events of the servers, whose ids count from 1."""
    service = SelectionService(indexer_threads=1)
    for number, worker in enumerate(workers, 1):
        await service.upsert_worker(
            {
                "worker_id": number,
                "model_name": "demo",
                "endpoint": worker["url"],
                "kv_events_endpoints": {0: worker["kv_events"]},
                "replay_endpoint": worker["kv_replay"],
                "block_size": block_size,
            }
        )
    assert service.ready()["ready"], service.ready()
    return service


async def overlap(service: SelectionService, prompt: list[int]) -> list[int]:
    """Return the blocks of a prompt that each worker has cached."""
    found = await service.overlap_scores({"model_name": "demo", "token_ids": prompt})
    return [one["device_blocks"] for one in sorted(found["workers"], key=lambda one: one["worker_id"])]


async def eventually(call: Callable[[], Awaitable[list[int]]], expected: list[int]) -> list[int]:
    """Return a result when it is as expected, or the last one."""
    found: list[int] = []
    for _ in range(round(10 * WAIT_S)):
        if (found := await call()) == expected:
            break
        await asyncio.sleep(0.1)
    return found


async def main(workers: list[dict[str, str]], block_size: int) -> dict[str, Any]:
    length = NUM_BLOCKS * block_size
    prompts = [[300 + i + 7 * number for i in range(length)] for number in range(len(workers))]
    other = list(range(600, 600 + length))
    early = await start(workers, block_size)
    for number, (worker, prompt) in enumerate(zip(workers, prompts, strict=True)):
        compute(worker, prompt)
        cached = [NUM_BLOCKS * (number == i) for i in range(len(workers))]
        await eventually(partial(overlap, early, prompt), cached)
    found: dict[str, Any] = {
        "overlaps": [await overlap(early, prompt) for prompt in prompts],
        "selected": [
            (await early.select({"model_name": "demo", "token_ids": [*prompt, *other]}))["worker_id"]
            for prompt in prompts
        ],
        "half": await overlap(early, [*prompts[0][: length // 2], *other]),
        "unknown": await overlap(early, other),
    }
    late = await start(workers, block_size)
    compute(workers[0], other)  # its event shows the late reader that others came before
    found["replayed"] = await eventually(partial(overlap, late, prompts[0]), [NUM_BLOCKS, 0])
    post(f"{workers[0]['url']}/reset_prefix_cache", {})
    removed = [await eventually(partial(overlap, early, prompts[0]), [0, 0]), await overlap(early, prompts[1])]
    found["removed"] = [removed[0][0], removed[1][1]]
    for service in (early, late):
        service.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))))
