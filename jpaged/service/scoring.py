"""Scores and embeddings as requests: prompts with log-probabilities or hidden states, and one sampled token to drop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jpaged.errors import InternalError, InvalidArgument, RequestTooLong
from jpaged.service.input_processor import InputProcessor
from jpaged.types import Embedding, Prompt, RequestOutput, SamplingParams, Score

MAX_PARTS = 1024
"""Maximum continuations of one prompt, or prompts of one embed call."""
MAX_SCORE_SIZE = 4 << 20
"""Maximum characters and token ids of one call's prompt with each of its continuations, in total: 0.25 s of tokenizing.
"""
SCORE_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
EMBED_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

GivenContinuation = str | Sequence[int]


def require_parts(field: str, num: int) -> None:
    """Reject an empty or too long list.

    Raises:
        InvalidArgument: names the field.
    """
    if not 1 <= num <= MAX_PARTS:
        raise InvalidArgument(field, f"{num} are given; must be from 1 to {MAX_PARTS}")


def require_score_size(size: int) -> None:
    """Reject a prompt and continuations that are too much work together, judged by their sizes.

    Raises:
        InvalidArgument: names the continuations.
    """
    if size > MAX_SCORE_SIZE:
        problem = f"have {size} characters and token ids, each with the prompt; at most {MAX_SCORE_SIZE} per call"
        raise InvalidArgument("continuations", problem)


@contextmanager
def errors_named(field: str) -> Iterator[None]:
    """Rename the field of errors about a part's prompt to the part; errors about shared fields keep their names."""
    try:
        yield
    except InvalidArgument as error:
        if error.field in ("pooling", "adapter"):
            raise
        raise type(error)(field, error.problem) from error


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt and its continuations as token ids. Shared tokens are stored once.

    Attributes:
        prompt_ids: token ids of the prompt.
        tails: for each continuation, the number of leading prompt_ids it shares, and the token ids after them.
    """

    prompt_ids: tuple[int, ...]
    tails: tuple[tuple[int, tuple[int, ...]], ...]

    def __len__(self) -> int:
        return len(self.tails)

    def size(self, i: int) -> int:
        """Return the number of tokens of the prompt with a continuation."""
        num_shared, tail = self.tails[i]
        return num_shared + len(tail)

    def prompt(self, i: int) -> Prompt:
        """Return the prompt with a continuation, with log-probabilities requested for the continuation."""
        num_shared, tail = self.tails[i]
        return Prompt(token_ids=[*self.prompt_ids[:num_shared], *tail], told_from=len(self.prompt_ids))


def continued(processor: InputProcessor, prompt: Prompt, continuations: Sequence[GivenContinuation]) -> Continued:
    """Return the prompt with each continuation.

    If the prompt is a text, a text continuation is tokenized together with it as one text. The tokens of both are split
    after the number of tokens that the prompt has alone.

    Raises:
        InvalidArgument: there are none or too many, or one is empty or neither text nor token ids.
        RequestTooLong: one is not below max_model_len with the prompt.
    """
    require_parts("continuations", len(continuations))
    for i, continuation in enumerate(continuations):
        if not len(continuation):
            raise InvalidArgument(f"continuations[{i}]", "is empty")
    with errors_named("prompt"):
        prompt_ids = _fitting(processor, prompt)
    tails = []
    for i, continuation in enumerate(continuations):
        with errors_named(f"continuations[{i}]"):
            tails.append(_tail(processor, prompt, prompt_ids, continuation))
    return Continued(prompt_ids, tuple(tails))


def embeddable(processor: InputProcessor, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt.

    Raises:
        InvalidArgument: one is empty, or has an id outside the vocabulary.
        RequestTooLong: one is not below max_model_len.
    """
    found = []
    for i, prompt in enumerate(prompts):
        with errors_named(f"inputs[{i}]"):
            found.append(_fitting(processor, prompt))
    return found


def _fitting(processor: InputProcessor, prompt: Prompt) -> tuple[int, ...]:
    token_ids = processor.prefix(prompt)
    if not token_ids:
        raise InvalidArgument("prompt", "is empty: at least one token is needed")
    return token_ids if prompt.token_ids is not None else processor.prefix(Prompt(token_ids=token_ids))


def _tail(
    processor: InputProcessor, prompt: Prompt, prompt_ids: tuple[int, ...], continuation: GivenContinuation
) -> tuple[int, tuple[int, ...]]:
    if not isinstance(continuation, str):
        whole = (*prompt_ids, *continuation)
    elif prompt.text is not None:
        whole = processor.prefix(Prompt(text=prompt.text + continuation))
    else:
        whole = (*prompt_ids, *processor.tokenize(Prompt(text=continuation), add_special_tokens=False))
    if len(whole) <= len(prompt_ids):
        raise InvalidArgument("continuation", "adds no token to the prompt")
    try:
        processor.prefix(Prompt(token_ids=whole))
    except RequestTooLong as error:
        raise RequestTooLong("continuation", f"with the prompt, {error.problem}") from error
    num_shared = next((i for i, (a, b) in enumerate(zip(whole, prompt_ids, strict=False)) if a != b), len(prompt_ids))
    return num_shared, whole[num_shared:]


def score_of(output: RequestOutput) -> Score:
    """Return the score of a finished request made by `Continued.prompt`."""
    if output.prompt_logprobs is None:
        raise InternalError(f"request {output.request_id!r} has no prompt log-probabilities")
    told = [position.chosen for position in output.prompt_logprobs if position is not None]
    return Score(tuple(told), all(one.rank == 1 for one in told), output.usage)


def embedding_of(output: RequestOutput, *, normalize: bool = False) -> Embedding:
    """Return the embedding of a finished request with pooling; scaled to length 1 if `normalize`."""
    if output.embedding is None:
        raise InternalError(f"request {output.request_id!r} has no hidden states")
    values = output.embedding
    if normalize:
        length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
        values = tuple(value / length for value in values)
    return Embedding(output.prompt_token_ids, values, output.usage)
