"""A server as a backend answers as its engine does in this process; what it refuses ends the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jpaged.client import Client
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.evaluation.backends import ContinuationGroup, RemoteBackend
from jpaged.types import SamplingParams
from tests.server.harness import eventually, running

GROUPS = [ContinuationGroup((1, 2, 3, n), ((5, 6), (7, 8, 9))) for n in range(20)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)


def made(target: str, **options: Any) -> RemoteBackend:
    return RemoteBackend(target, **options)


async def test_every_group_and_prompt_gets_its_answer_in_order() -> None:
    async with running(max_num_queued_reqs=4) as h:
        backend = await asyncio.to_thread(made, h.target, max_concurrency=8)
        assert backend.max_model_len == 128
        found = await asyncio.to_thread(backend.score, GROUPS, False)
        outputs = await asyncio.to_thread(backend.complete, [group.context for group in GROUPS], [GREEDY] * 20, False)

        def one_by_one() -> tuple[list[Any], list[Any]]:
            with Client(h.target) as client:
                scores = [client.score(group.context, group.continuations) for group in GROUPS]
                return scores, [client.complete(prompt_token_ids=group.context, sampling=GREEDY) for group in GROUPS]

        scores, completions = await asyncio.to_thread(one_by_one)
    assert found == [[(one.logprob, one.is_greedy) for one in each] for each in scores]
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in completions]


async def test_it_can_be_asked_where_a_loop_runs() -> None:
    async with running() as h:
        target = h.target

        async def inside() -> list[Any]:
            return made(target).score(GROUPS[:2], False)

        found = await asyncio.to_thread(asyncio.run, inside())
    assert [len(each) for each in found] == [2, 2]


async def test_the_first_refusal_is_raised_as_it_is() -> None:
    async with running() as h:
        backend = await asyncio.to_thread(made, h.target)
        wrong = ContinuationGroup((1, 2), ((5, 100_000),))
        with pytest.raises(InvalidArgument, match="100000"):
            await asyncio.to_thread(backend.score, [*GROUPS, wrong], False)
        await eventually(lambda: h.num_blocks_used == 0)


async def test_a_server_that_is_not_there_is_said_at_once() -> None:
    async with running() as h:
        target = h.target
    with pytest.raises(Unavailable):
        await asyncio.to_thread(made, target, timeout_s=5.0)


async def test_another_models_tokenizer_is_refused() -> None:
    async with running() as h:
        backend = await asyncio.to_thread(made, h.target)
        await asyncio.to_thread(backend.require_tokenizer, lambda text: list(text.encode()))
        with pytest.raises(InvalidArgument, match=r"^tokenizer: .*another model than 'fake'"):
            await asyncio.to_thread(backend.require_tokenizer, lambda text: list(text.encode())[:-1])
