"""Many requests that are aborted, cancelled and late at random: the rest get their tokens, and nothing is kept."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

import pytest
from grpc import aio

from jpaged._proto.v1 import control_pb2, inference_pb2
from tests.server.harness import Harness, collect, eventually, request, running
from tests.server.roles.test_roles import LONG, Pair, fake, folded, pair

NUM_REQUESTS = 150
ABORT = inference_pb2.FINISH_REASON_ABORT

pytestmark = pytest.mark.long


def message_of(rng: random.Random, number: int) -> inference_pb2.GenerateRequest:
    text = f"{rng.randrange(20)} {LONG}"[: rng.randrange(9, 70)]
    sampling = {"max_tokens": rng.choice([1, 2, 20]), "n": rng.choice([1, 3]), "temperature": 1.0, "seed": number}
    message: inference_pb2.GenerateRequest = request(text, request_id=f"request {number}", **sampling)
    return message


async def end(both: Pair, call: Any, request_id: str, how: str) -> None:
    """Ends a call early, unless it has ended."""
    if how == "cancel":
        call.cancel()
    if how == "abort":
        try:
            await both.decode.control.Abort(control_pb2.AbortRequest(request_id=request_id))
        except aio.AioRpcError as error:
            if error.code().name != "NOT_FOUND":
                raise


async def one(both: Pair, alone: Harness, rng: random.Random, number: int) -> None:
    """A request that comes at some time and may end at another: what is told of it begins what one server tells."""
    await asyncio.sleep(rng.random())
    message, how = message_of(rng, number), rng.choice(["", "", "abort", "cancel", "deadline"])
    timeout = {"timeout": rng.random() * 0.3} if how == "deadline" else {}
    call = both.decode.inference.Generate(message, **timeout)
    ending = asyncio.get_running_loop().create_task(
        _later(rng.random() * 0.15, end(both, call, message.request_id, how))
    )
    try:
        told = await collect(call)
    except aio.AioRpcError as error:
        if (how, error.code().name) == ("deadline", "DEADLINE_EXCEEDED"):
            return
        raise
    except asyncio.CancelledError:
        if how == "cancel":
            return
        raise
    finally:
        await ending
    found, wanted = folded(told), folded(await collect(alone.inference.Generate(message)))
    assert told[-1].is_last
    if not any(each.finish.reason == ABORT for each in told):
        assert found == wanted
        return
    assert how == "abort"
    for index, (token_ids, text, _, ends) in found.items():
        assert token_ids == wanted[index][0][: len(token_ids)]
        assert wanted[index][1].startswith(text.rstrip("\ufffd"))  # as far as its characters were whole
        assert len(ends) == 1


async def _later(pause_s: float, work: Any) -> None:
    await asyncio.sleep(pause_s)
    await work


def holds_nothing(harness: Harness) -> bool:
    """No place, no block of either memory, and nothing of the role."""
    role: Any = harness.server._role
    if any(getattr(role, name, None) for name in ("_left", "_arrivings", "_departures")):
        return False
    engine: Any = harness.serving.engine
    memories = [(each._in_flight, each._loop.memory) for each in getattr(engine, "_engines", [engine])]
    return not any(len(places) or [*memory.held.tables()] or memory.host._held for places, memory in memories)


@pytest.mark.parametrize("seed", range(6))
async def test_whoever_ends_nothing_of_it_stays_and_all_others_are_right(seed: int) -> None:
    rng = random.Random(seed)
    prefill = {"others": [fake()] if seed % 2 else [], "prefill_hold": rng.choice([0.02, 10.0])}
    decode = {
        "others": [fake()] if seed % 3 == 1 else [],
        "transfer_timeout": rng.choice([0.02, 10.0]),
        "prefill_timeout": rng.choice([0.05, 30.0]),
        "max_num_seqs": 4,
        "max_num_queued_reqs": NUM_REQUESTS,
    }
    async with pair(prefill=prefill, decode=decode) as both, running(executor=fake()) as alone:
        await asyncio.gather(*(one(both, alone, rng, number) for number in range(NUM_REQUESTS)))
        for harness in (both.prefill, both.decode):
            await eventually(functools.partial(holds_nothing, harness))
