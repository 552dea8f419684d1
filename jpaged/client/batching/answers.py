"""One line -> one line of output, by whatever completes, scores and embeds: a client, or an engine in this process.

A body without a seed gets one from its line's custom_id. A server would give it one by the order in which requests come
to it, so that results would depend on which server ran a line, beside which others, and on whether the run was resumed.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jpaged.client.batching.scoring import (
    EmbedJob,
    ScoreJob,
    SimilarityJob,
    Text,
    embeddings_body,
    loglikelihoods_body,
    scoring_job_of,
    similarities_body,
)
from jpaged.client.openai import EMBEDDINGS_URL, SCORE_URL, Job, Line, job_of, response_line, success_line
from jpaged.errors import NotFound, Unsupported
from jpaged.types import ModelInfo, Pooling, RequestOutput, SamplingParams, Score


class Completer(Protocol):
    """What runs completions and chats. Its methods are `AsyncClient`'s."""

    async def complete(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        adapter: str = "",
    ) -> RequestOutput: ...

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[Mapping[str, str]] | None = None
    ) -> Sequence[int]: ...

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@runtime_checkable
class Scorer(Protocol):
    """What knows how likely continuations are."""

    async def score(self, prompt: Text, continuations: Sequence[Text]) -> Sequence[Score]: ...


@runtime_checkable
class Embedder(Protocol):
    """What makes a vector of each input."""

    async def embed(self, inputs: Sequence[Text], *, pooling: Pooling) -> Sequence[Sequence[float]]: ...


MAX_PARTS = 1024
"""Inputs or continuations of one call, as `inference.proto` bounds them; a line may have more."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A line of output, and what it took."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Answers:
    """Answers lines; it keeps the texts of the tokens that log-probabilities speak of.

    Args:
        model: what all servers serve; a line that names another is refused.
    """

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._token_texts: dict[int, str] = {}

    async def answer(self, server: Completer, line: Line) -> Answered:
        """Run a line; raises the JpagedError that it failed with, InvalidArgument where the line is at fault."""
        if line.url in (EMBEDDINGS_URL, SCORE_URL):
            return await self._scored(server, line)
        job = job_of(line)
        self._require_model(job.model)
        output = await self._complete(server, line.custom_id, job)
        await self._name_tokens(server, output)
        text = success_line(line, output, model=self._model.name, token_text=self._token_texts.__getitem__)
        return Answered(text, output.usage.prompt_tokens, output.usage.completion_tokens)

    async def _complete(self, server: Completer, custom_id: str, job: Job) -> RequestOutput:
        sampling, adapter = _seeded(job.sampling, custom_id), job.adapter or ""
        if not job.fills_length:
            return await server.complete(
                job.prompt,
                sampling,
                prompt_token_ids=job.prompt_token_ids,
                messages=job.messages,
                adapter=adapter,
            )
        token_ids = await server.tokenize(messages=job.messages)
        max_tokens = max(1, self._model.max_model_len - len(token_ids))
        return await server.complete(
            prompt_token_ids=token_ids, sampling=replace(sampling, max_tokens=max_tokens), adapter=adapter
        )

    async def _name_tokens(self, server: Completer, output: RequestOutput) -> None:
        """Learns the texts of the tokens that the output's log-probabilities speak of."""
        positions = [position for one in output.outputs for position in one.logprobs or ()]
        positions += [position for position in output.prompt_logprobs or () if position is not None]
        tokens = {token for one in positions for token in (one.chosen, *one.top, *one.asked)}
        token_ids = {token.token_id for token in tokens}
        for token_id in token_ids - self._token_texts.keys():
            self._token_texts[token_id] = await server.detokenize([token_id], skip_special_tokens=False)

    async def _scored(self, server: Completer, line: Line) -> Answered:
        job = scoring_job_of(line)
        self._require_model(job.model)
        body, prompt_tokens = await self._scored_body(server, line.url, job)
        return Answered(response_line(line.custom_id, uuid.uuid4().hex, body), prompt_tokens)

    async def _scored_body(
        self, server: Completer, url: str, job: EmbedJob | ScoreJob | SimilarityJob
    ) -> tuple[dict[str, Any], int]:
        model = self._model.name
        if isinstance(job, ScoreJob):
            if not isinstance(server, Scorer):
                raise Unsupported(f"the server does not offer {url} of continuations")
            scores = [one for part in _parts(job.continuations) for one in await server.score(job.prompt, part)]
            return loglikelihoods_body(job, scores, model=model), 0
        if not isinstance(server, Embedder):
            raise Unsupported(f"the server does not offer {url}{'' if isinstance(job, EmbedJob) else ' of texts'}")
        inputs = job.inputs if isinstance(job, EmbedJob) else job.texts
        vectors = [one for part in _parts(inputs) for one in await server.embed(part, pooling=job.pooling)]
        num_tokens = sum([len(await server.tokenize(one) if isinstance(one, str) else one) for one in inputs])
        if isinstance(job, EmbedJob):
            return embeddings_body(job, vectors, model=model, prompt_tokens=num_tokens), num_tokens
        return similarities_body(job, vectors, model=model, prompt_tokens=num_tokens), num_tokens

    def _require_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            raise NotFound(f"body.model: {name!r} is not served; {self._model.name!r} is")


def _parts(texts: Sequence[Text]) -> Iterator[Sequence[Text]]:
    """The texts, in as many as one call may have."""
    return (texts[start : start + MAX_PARTS] for start in range(0, len(texts), MAX_PARTS))


def seed_of(custom_id: str) -> int:
    """Return the seed of a line that brings none: the same wherever and however often it runs."""
    return int.from_bytes(hashlib.sha256(custom_id.encode(errors="surrogatepass")).digest()[:8])


def _seeded(sampling: SamplingParams, custom_id: str) -> SamplingParams:
    if sampling.seed is not None or sampling.is_greedy:
        return sampling
    return replace(sampling, seed=seed_of(custom_id))
