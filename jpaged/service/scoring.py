"""Scores and embeddings as requests: prompts that are told of, with one token behind them that is dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jpaged.errors import InternalError, InvalidArgument
from jpaged.service.input_processor import InputProcessor
from jpaged.types import Embedding, Prompt, RequestOutput, SamplingParams, Score

MAX_PARTS = 1024
"""Continuations of one prompt, or prompts of one call that embeds."""
SCORE_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
EMBED_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

GivenContinuation = str | Sequence[int]


def require_parts(field: str, num: int) -> None:
    """Refuses none and too many.

    Raises:
        InvalidArgument: names the field.
    """
    if not 1 <= num <= MAX_PARTS:
        raise InvalidArgument(field, f"{num} are given; from 1 to {MAX_PARTS}")


def continued(
    processor: InputProcessor, prompt: Prompt, continuations: Sequence[GivenContinuation]
) -> tuple[list[list[int]], int]:
    """The prompt with each of its continuations as token ids, and how many of them are the prompt's.

    Where the prompt is a text, a text goes on with it as one text: a continuation is the tokens of both together but so
    many as the prompt has by itself.

    Raises:
        InvalidArgument: there are none or too many, or one is empty; RequestTooLong.
    """
    require_parts("continuations", len(continuations))
    prompt_ids = list(prompt.token_ids) if prompt.token_ids is not None else processor.tokenize(prompt)
    if not prompt_ids:
        raise InvalidArgument("prompt", "is empty: at least one token is needed")
    return [
        _whole(processor, f"continuations[{i}]", prompt, prompt_ids, one) for i, one in enumerate(continuations)
    ], len(prompt_ids)


def _whole(
    processor: InputProcessor, field: str, prompt: Prompt, prompt_ids: list[int], continuation: GivenContinuation
) -> list[int]:
    if not continuation:
        raise InvalidArgument(field, "is empty")
    if not isinstance(continuation, str):
        return [*prompt_ids, *continuation]
    if prompt.text is not None:
        token_ids = processor.tokenize(Prompt(text=prompt.text + continuation))
    else:
        token_ids = prompt_ids + processor.tokenize(Prompt(text=continuation), add_special_tokens=False)
    if len(token_ids) <= len(prompt_ids):
        raise InvalidArgument(field, "adds no token to the prompt")
    return token_ids


def score_of(output: RequestOutput) -> Score:
    """What came of a request that is told of from its continuation on."""
    if output.prompt_logprobs is None:
        raise InternalError(f"request {output.request_id!r} was told nothing of its prompt")
    told = [position.chosen for position in output.prompt_logprobs if position is not None]
    return Score(tuple(told), all(one.rank == 1 for one in told), output.usage)


def embedding_of(output: RequestOutput, *, normalize: bool = False) -> Embedding:
    """What came of a request whose hidden states are pooled; scaled to a length of 1 where that is wanted."""
    if output.embedding is None:
        raise InternalError(f"request {output.request_id!r} was told no hidden states")
    values = output.embedding
    if normalize:
        length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
        values = tuple(value / length for value in values)
    return Embedding(output.prompt_token_ids, values, output.usage)
