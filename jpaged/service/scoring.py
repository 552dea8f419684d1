"""Scores and embeddings as requests of the engine: prompts that are told of, with one token behind them that is dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jpaged.errors import InternalError, InvalidArgument
from jpaged.service.input_processor import InputProcessor
from jpaged.types import Embedding, LoadedAdapter, Pooling, Prompt, Request, RequestOutput, SamplingParams, Score

MAX_CONTINUATIONS = 1024
"""Of one prompt."""
_ONE = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


class Scoring:
    """Makes such requests of one model, and reads what came of them. Safe to call from several threads."""

    def __init__(self, processor: InputProcessor) -> None:
        self._processor = processor

    def score_requests(
        self,
        request_id: str,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        sampling: SamplingParams = _ONE,
        adapter: LoadedAdapter | None = None,
        deadline_s: float | None = None,
        tenant: str = "",
        cache_tenant: str = "",
    ) -> list[Request]:
        """One for each continuation; where the prompt is a text, a text goes on with it as one text.

        So a continuation is the tokens of both together but so many as the prompt has by itself.

        Raises:
            InvalidArgument, RequestTooLong: there are none or too many, one is empty, or too long with its prompt.
        """
        if not 1 <= len(continuations) <= MAX_CONTINUATIONS:
            raise InvalidArgument("continuations", f"{len(continuations)} are given; from 1 to {MAX_CONTINUATIONS}")
        prompt_ids = list(prompt.token_ids) if prompt.token_ids is not None else self._processor.tokenize(prompt)
        sampling = dataclasses.replace(sampling, prompt_logprobs=0)
        requests = []
        for i, continuation in enumerate(continuations):
            token_ids = self._whole(i, prompt, prompt_ids, continuation)
            requests.append(
                self._processor.make_request(
                    request_id=f"{request_id}/{i}",
                    sampling=sampling,
                    prompt=Prompt(token_ids=token_ids),
                    deadline_s=deadline_s,
                    tenant=tenant,
                    cache_tenant=cache_tenant,
                    is_whole=True,
                    adapter=adapter,
                    told_from=len(prompt_ids),
                )
            )
        return requests

    def embed_request(
        self,
        request_id: str,
        prompt: Prompt,
        pooling: Pooling,
        *,
        sampling: SamplingParams = _ONE,
        adapter: LoadedAdapter | None = None,
        deadline_s: float | None = None,
        tenant: str = "",
        cache_tenant: str = "",
    ) -> Request:
        """One for a prompt.

        Raises:
            InvalidArgument, RequestTooLong: as of every prompt, or there is no such pooling.
        """
        if pooling not in ("last", "mean"):
            raise InvalidArgument("pooling", f"{pooling!r} is neither 'last' nor 'mean'")
        return self._processor.make_request(
            request_id=request_id,
            sampling=sampling,
            prompt=prompt,
            deadline_s=deadline_s,
            tenant=tenant,
            cache_tenant=cache_tenant,
            is_whole=True,
            adapter=adapter,
            pooling=pooling,
        )

    def _whole(self, i: int, prompt: Prompt, prompt_ids: list[int], continuation: str | Sequence[int]) -> list[int]:
        field = f"continuations[{i}]"
        if isinstance(continuation, str):
            if not continuation:
                raise InvalidArgument(field, "is empty")
            if prompt.text is not None:
                token_ids = self._processor.tokenize(Prompt(text=prompt.text + continuation))
            else:
                text = Prompt(text=continuation)
                token_ids = prompt_ids + self._processor.tokenize(text, add_special_tokens=False)
        else:
            token_ids = [*prompt_ids, *continuation]
        if len(token_ids) <= len(prompt_ids):
            raise InvalidArgument(field, "adds no token to the prompt")
        return token_ids


def score_of(request: Request, output: RequestOutput) -> Score:
    """What came of a request of `Scoring.score_requests`."""
    if output.prompt_logprobs is None or request.told_from is None:
        raise InternalError(f"request {request.request_id!r} was told nothing of its prompt")
    told = [position.chosen for position in output.prompt_logprobs if position is not None]
    return Score(
        tuple(one.token_id for one in told),
        tuple(one.logprob for one in told),
        all(one.rank == 1 for one in told),
        output.usage,
    )


def embedding_of(output: RequestOutput) -> Embedding:
    """What came of a request of `Scoring.embed_request`."""
    if output.embedding is None:
        raise InternalError(f"request {output.request_id!r} was told no hidden states")
    return Embedding(output.prompt_token_ids, output.embedding, output.usage)
