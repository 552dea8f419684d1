"""Third-party gRPC APIs on the same port: their messages in, calls of the service, their messages out.

faces.py                   the enabled APIs of a port, their names, and the end of their calls at shutdown; reflection
open_inference.py          inference.GRPCInferenceService, for clients of KServe and Triton
open_inference_request.py  its requests: tensors and parameters -> a parsed request
vllm_engine.py             vllm.grpc.engine.VllmEngine, for gateways

They share the functions below. Results include log-probabilities. Field names in errors are translated to those of the
caller's message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from jpaged.errors import InvalidArgument
from jpaged.outputs import Completions
from jpaged.service.calls import Call
from jpaged.service.service import Service
from jpaged.types import PositionLogprobs, RequestOutput

SAMPLING = "sampling."
"""Prefix of the fields in errors of `SamplingParams`."""


@contextmanager
def naming(name: Callable[[str], str]) -> Iterator[None]:
    """Rename the field of an InvalidArgument raised inside, by `name`."""
    try:
        yield
    except InvalidArgument as error:
        if (field := name(error.field)) == error.field:
            raise
        raise type(error)(field, error.problem) from error


async def completed(service: Service, call: Call) -> RequestOutput:
    """Run a request to its end; raise the error that it failed with.

    Log-probabilities that were not requested are an empty tuple; for the prompt, only the first token's None.
    """
    completions = Completions(has_logprobs=True, has_prompt_logprobs=True)
    async with service.generate(call) as generation:
        async for event in generation:
            completions.add(event)
        return completions.output(generation.request_id, None, generation.prompt_token_ids)


def estimate_size(token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None] | None) -> int:
    """Return the number of values to convert: tokens, and tokens with log-probabilities."""
    positions = [one for one in logprobs or () if one is not None]
    return len(token_ids) + sum(1 + len(one.top) + len(one.asked) for one in positions)


def whole_size(output: RequestOutput) -> int:
    """Return the size of a whole result, with the prompt counted once per sequence."""
    of_prompt = estimate_size((), output.prompt_logprobs)
    return sum(of_prompt + estimate_size(one.token_ids, one.logprobs) for one in output.outputs)
