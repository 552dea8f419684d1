"""Reads a request to its end: all that came of it, log-probabilities too."""

from __future__ import annotations

from jpaged.completions import Completions
from jpaged.service.service import Call, Service
from jpaged.types import RequestOutput


async def completed(service: Service, call: Call) -> RequestOutput:
    """Run a request to its end; raises what it has failed with.

    Where log-probabilities were not asked for there are none: an empty tuple, of the prompt its first token's None.
    """
    completions = Completions(has_logprobs=True, has_prompt_logprobs=True)
    async with service.generate(call) as generation:
        async for event in generation:
            completions.add(event)
        return completions.output(generation.request_id, None, generation.prompt_token_ids)
