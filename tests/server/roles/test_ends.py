"""Requests that end while others compute their prompts, or send the blocks, and first tokens that cannot be theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jpaged import peers as prefill_module
from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.service import kv_protocol, roles
from jpaged.service.handoff import FirstToken
from jpaged.service.roles import TransferRates
from tests.server.harness import collect, eventually, failure_of, request
from tests.server.roles.test_roles import LONG, Pair, alone, fake, folded, pair
from tests.server.travel.pairs import is_at_rest

ABORT = inference_pb2.FINISH_REASON_ABORT


@asynccontextmanager
async def slow_to_send(monkeypatch: pytest.MonkeyPatch, **decode: Any) -> AsyncIterator[Pair]:
    """A pair whose prefill server tells first tokens, and sends no blocks until the end."""
    cut, may_send = kv_protocol.cut, threading.Event()

    def wait(*of: Any) -> Any:
        may_send.wait()
        return cut(*of)

    monkeypatch.setattr(roles, "cut", wait)
    async with pair(prefill={"prefill_hold": 3600.0}, decode=decode) as both:
        try:
            yield both
        finally:
            may_send.set()


async def abort(both: Pair) -> None:
    await both.decode.control.Abort(control_pb2.AbortRequest(request_id="mine"))


@pytest.mark.parametrize("others", [[], [fake()]], ids=["one engine", "replicas"])
async def test_whoever_is_aborted_leaves_its_place_to_the_next(others: list[Any]) -> None:
    async with pair(decode={"max_num_seqs": 1, "max_num_queued_reqs": 1, "others": others}) as both:
        both.prefill.faults.hold_after(0)
        for number in range(5):
            call = both.decode.inference.Generate(request(f"{number} {LONG}", request_id="mine"))
            await eventually(lambda: both.prefill.num_open_calls == 1)
            await abort(both)
            (told,) = await collect(call)
            assert told.finish.reason == ABORT
            assert told.usage.prompt_tokens == len(LONG) + 2
            await eventually(lambda: both.prefill.num_open_calls == 0)
        both.prefill.faults.release()


async def test_whoever_ends_with_its_first_token_leaves_its_place_to_the_next() -> None:
    async with pair(decode={"max_num_seqs": 1, "max_num_queued_reqs": 1}) as both:
        for number in range(5):
            (told,) = await both.generate(request(f"{number} {LONG}", max_tokens=1))
            assert told.finish.reason == inference_pb2.FINISH_REASON_LENGTH
        assert both.received.num_asked == 5


async def test_an_abort_ends_every_sequence_whose_first_token_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_to_send(monkeypatch, max_num_seqs=3, max_num_queued_reqs=1) as both:
        for number in range(3):  # each of which keeps a thread of the prefill server waiting
            call = both.decode.inference.Generate(request(f"{number} {LONG}", request_id="mine", n=3))
            told = [await call.read() for _ in range(3)]
            await abort(both)
            rest = await collect(call)
            assert [one.index for one in told] == [one.index for one in rest] == [0, 1, 2]
            assert [one.finish.reason for one in rest] == [ABORT] * 3
            assert [one.is_last for one in rest] == [False, False, True]
            assert (rest[-1].usage.prompt_tokens, rest[-1].usage.completion_tokens) == (len(LONG) + 2, 3)
            await is_at_rest(both.prefill)  # although nobody has read the blocks


async def test_transfers_that_time_out_count_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_to_send(monkeypatch, transfer_timeout=0.05) as both:
        recorded: list[tuple[int, float, bool]] = []

        def record(_: TransferRates, num_bytes: int, seconds: float, *, is_port: bool) -> None:
            recorded.append((num_bytes, seconds, is_port))

        monkeypatch.setattr(TransferRates, "record", record)
        async with asyncio.timeout(300):
            await collect(both.decode.inference.Generate(request(LONG)))
        ((num_bytes, seconds, is_port),) = recorded
        assert num_bytes > 0 and seconds >= 0.05 and not is_port


async def test_a_deadline_holds_while_blocks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_to_send(monkeypatch, default_deadline=0.3, transfer_timeout=3600.0) as both:
        async with asyncio.timeout(300):
            error = await failure_of(both.decode.inference.Generate(request(LONG)))
        assert error.code().name == "DEADLINE_EXCEEDED"
        await eventually(lambda: both.prefill.num_open_calls == 0)


LIES: dict[str, Callable[[Sequence[FirstToken]], Sequence[FirstToken]]] = {
    "no such token": lambda tokens: [dataclasses.replace(tokens[0], token_id=1 << 20), *tokens[1:]],
    "one twice": lambda tokens: [tokens[0], tokens[0]],
    "another sequence": lambda tokens: [dataclasses.replace(tokens[0], index=7), *tokens[1:]],
    "more than there are": lambda tokens: [*tokens, dataclasses.replace(tokens[0], index=2)],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_first_tokens_that_cannot_be_the_requests_are_not_told(
    lie: Callable[[Sequence[FirstToken]], Sequence[FirstToken]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = prefill_module.PrefillCall.begin

    async def lying(answer: prefill_module.PrefillCall, num_sequences: int) -> None:
        await begin(answer, num_sequences)
        answer.tokens = lie(answer.tokens)

    monkeypatch.setattr(prefill_module.PrefillCall, "begin", lying)
    message = request(LONG, n=2, temperature=1.0, seed=3)
    async with pair() as both:
        assert folded(await both.generate(message)) == folded(await alone(message))
        assert both.failures == {"prefill": 1}
