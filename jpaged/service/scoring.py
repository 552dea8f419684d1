"""Scores and embeddings as requests: prompts that are told of, with one token behind them that is dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jpaged.errors import InternalError, InvalidArgument, RequestTooLong
from jpaged.service.input_processor import InputProcessor
from jpaged.types import Embedding, Prompt, RequestOutput, SamplingParams, Score

MAX_PARTS = 1024
"""Continuations of one prompt, or prompts of one call that embeds."""
MAX_SCORE_SIZE = 4 << 20
"""Characters and token ids of one call's prompt with each of its continuations, all together: a quarter of a second of
tokenising."""
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


def require_score_size(size: int) -> None:
    """Refuses a prompt and continuations that are too much work together, told by their sizes.

    Raises:
        InvalidArgument: names the continuations.
    """
    if size > MAX_SCORE_SIZE:
        problem = f"make {size} characters and token ids, each with the prompt; at most {MAX_SCORE_SIZE} in one call"
        raise InvalidArgument("continuations", problem)


@contextmanager
def errors_named(field: str) -> Iterator[None]:
    """Errors of a part's prompt name the part, as its caller knows it; what all parts have keeps its name."""
    try:
        yield
    except InvalidArgument as error:
        if error.field in ("pooling", "adapter"):
            raise
        raise type(error)(field, error.problem) from error


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt and its continuations as token ids. What they share is held once.

    Attributes:
        prompt_ids: of the prompt by itself.
        tails: of each continuation, with how many of prompt_ids it begins, and what follows.
    """

    prompt_ids: tuple[int, ...]
    tails: tuple[tuple[int, tuple[int, ...]], ...]

    def __len__(self) -> int:
        return len(self.tails)

    def size(self, i: int) -> int:
        """How many tokens the prompt has with a continuation."""
        num_shared, tail = self.tails[i]
        return num_shared + len(tail)

    def prompt(self, i: int) -> Prompt:
        """The prompt with a continuation, which is told of."""
        num_shared, tail = self.tails[i]
        return Prompt(token_ids=[*self.prompt_ids[:num_shared], *tail], told_from=len(self.prompt_ids))


def continued(processor: InputProcessor, prompt: Prompt, continuations: Sequence[GivenContinuation]) -> Continued:
    """The prompt with each of its continuations.

    Where the prompt is a text, a text goes on with it as one text: a continuation is the tokens of both together but so
    many as the prompt has by itself.

    Raises:
        InvalidArgument: there are none or too many, or one is empty or no text and no ids of tokens.
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
    """The token ids of each prompt.

    Raises:
        InvalidArgument: one is empty, or has an id that is none of the model's.
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
