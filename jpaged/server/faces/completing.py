"""Reads a request to its end: all that came of it, log-probabilities too; and how much work it is to tell it."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.completions import Completions
from jpaged.service.service import Call, Service
from jpaged.types import PositionLogprobs, RequestOutput


async def completed(service: Service, call: Call) -> RequestOutput:
    """Run a request to its end; raises what it has failed with.

    Where log-probabilities were not asked for there are none: an empty tuple, of the prompt its first token's None.
    """
    completions = Completions(has_logprobs=True, has_prompt_logprobs=True)
    async with service.generate(call) as generation:
        async for event in generation:
            completions.add(event)
        return completions.output(generation.request_id, None, generation.prompt_token_ids)


def size_of(token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None] | None) -> int:
    """Return how many numbers there are to tell: tokens, and those whose log-probabilities are told."""
    positions = [one for one in logprobs or () if one is not None]
    return len(token_ids) + sum(1 + len(one.top) + len(one.asked) for one in positions)


def whole_size(output: RequestOutput) -> int:
    """Return the same of all that came of a request, and of its prompt as often as there are sequences."""
    of_prompt = size_of((), output.prompt_logprobs)
    return sum(of_prompt + size_of(one.token_ids, one.logprobs) for one in output.outputs)
