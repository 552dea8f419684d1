"""Engines for the runner: one in this process, or a server.

Both accept all requests at once and keep the engine full. The number in flight is limited by the engine's queue, or by
the server's reported capacity.

For each choice of a question the harness requests a pair: the tokens of the context, and those of the choice. Pairs
with the same context become one call. Choices of one token, mostly letters, are cheaper: one sample after the context
returns the log-probabilities of all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from jpaged.client import AsyncClient, Client
from jpaged.client.batch import compute_window
from jpaged.config import api_key_from_environment
from jpaged.errors import InvalidArgument, JpagedError, PermissionDenied, TryLater, Unsupported
from jpaged.llm import LLM, MakeBar, ProgressBar, TokensPrompt
from jpaged.outputs import without_errors
from jpaged.types import ModelInfo, RequestOutput, SamplingParams, Usage

TokenIds = tuple[int, ...]
Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, and of its continuation."""
Likelihood = tuple[float, bool]
"""Log-probability of a continuation (natural), and True if each of its tokens is the likeliest one."""

MAX_TOLD_TOKENS = 32
"""Maximum number of token log-probabilities per sample."""
MAX_CONTINUATIONS = 1024
"""Maximum number of continuations per call."""


@dataclass(frozen=True, slots=True)
class ContinuationGroup:
    """Distinct continuations of one context: each of one token, or each of several."""

    context: TokenIds
    continuations: tuple[TokenIds, ...]

    @property
    def is_of_tokens(self) -> bool:
        """Return True if each continuation is one token."""
        return len(self.continuations[0]) == 1


def fitted(pair: Pair, max_length: int) -> tuple[TokenIds, TokenIds]:
    """Cut the beginning of a context that does not fit.

    Args:
        max_length: tokens that the model reads; the last token of the continuation is not read.

    Raises:
        InvalidArgument: there is no context, or the continuation alone does not fit.
    """
    context, continuation = tuple(pair[0]), tuple(pair[1])
    if not context:
        raise InvalidArgument("context", "is empty: at least one token is needed")
    if len(continuation) > max_length:
        raise InvalidArgument("continuation", f"{len(continuation)} tokens are over max_length ({max_length})")
    return context[-(max_length + 1 - len(continuation)) :], continuation


def grouped(pairs: Iterable[tuple[TokenIds, TokenIds]]) -> list[ContinuationGroup]:
    """Group pairs by context; sorted, so that contexts with a common beginning are adjacent.

    Pairs without a continuation are omitted.
    """
    by_context: dict[tuple[TokenIds, bool], dict[TokenIds, None]] = {}
    for context, continuation in pairs:
        if continuation:
            by_context.setdefault((context, len(continuation) == 1), {})[continuation] = None
    groups: list[ContinuationGroup] = []
    for (context, is_of_tokens), continuations in sorted(by_context.items(), key=lambda item: item[0]):
        width = MAX_TOLD_TOKENS if is_of_tokens else MAX_CONTINUATIONS
        groups += [ContinuationGroup(context, part) for part in _parts(tuple(continuations), width)]
    return groups


def by_pair(groups: Sequence[ContinuationGroup], likelihoods: Sequence[Sequence[Likelihood]]) -> dict[Pair, Likelihood]:
    """Return the likelihood of each pair of the groups."""
    return {
        (group.context, continuation): likelihood
        for group, each in zip(groups, likelihoods, strict=True)
        for continuation, likelihood in zip(group.continuations, each, strict=True)
    }


def _parts(continuations: tuple[TokenIds, ...], width: int) -> Iterator[tuple[TokenIds, ...]]:
    for first in range(0, len(continuations), width):
        yield continuations[first : first + width]


_PROBE = "The quick brown fox jumps over 13 lazy dogs.\n\n"

_Ask = TypeVar("_Ask")
_Answer = TypeVar("_Answer")


class EvaluationBackend(Protocol):
    """Engine interface for the runner.

    Attributes:
        max_model_len: maximum number of tokens of a sequence, generated ones included.
    """

    max_model_len: int

    def complete(
        self, prompts: Sequence[TokenIds], sampling: Sequence[SamplingParams], use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        """Generate a continuation of each prompt, in order."""

    def score(self, groups: Sequence[ContinuationGroup], use_tqdm: bool | MakeBar) -> list[list[Likelihood]]:
        """Return the likelihood of each continuation of each group, in order."""

    def close(self) -> None: ...


class OfflineBackend:
    """Engine in this process.

    Args:
        adapter: name of a loaded adapter; "" for the base model.
    """

    def __init__(self, llm: LLM, adapter: str = "") -> None:
        self._llm = llm
        self._adapter = adapter or None
        length = llm.config.model.max_model_len
        if length is None:
            raise InvalidArgument("max_model_len", "is not resolved")
        self.max_model_len = length

    def complete(
        self, prompts: Sequence[TokenIds], sampling: Sequence[SamplingParams], use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        """See `EvaluationBackend`."""
        outputs = self._llm.generate(_tokens(prompts), list(sampling), use_tqdm=use_tqdm, adapter=self._adapter)
        return without_errors(outputs)

    def score(self, groups: Sequence[ContinuationGroup], use_tqdm: bool | MakeBar) -> list[list[Likelihood]]:
        """See `EvaluationBackend`."""
        contexts = _tokens([group.context for group in groups])
        continuations = [list(group.continuations) for group in groups]
        scores = self._llm.score_continuations(contexts, continuations, use_tqdm=use_tqdm, adapter=self._adapter)
        return [[(one.logprob, one.is_greedy) for one in each] for each in scores]

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """Close the engine and free the device memory."""
        self._llm.close()


class RemoteBackend:
    """Server.

    Args:
        max_concurrency: maximum number of calls in flight, regardless of the server's reported capacity.
        timeout_s: timeout of each call; None for none.

    Raises:
        JpagedError: the server is unreachable, or does not report its model.
    """

    def __init__(
        self, target: str, *, adapter: str = "", max_concurrency: int = 256, timeout_s: float | None = None
    ) -> None:
        self._target, self._adapter, self._timeout_s = target, adapter, timeout_s
        self._num_at_once = max_concurrency
        self._api_key = api_key_from_environment()
        with Client(target, timeout_s=timeout_s, api_key=self._api_key) as client:
            self.model: ModelInfo = client.model_info()
            with contextlib.suppress(PermissionDenied, Unsupported):
                self._num_at_once = compute_window(client.load(), 0, max_concurrency)
        self.max_model_len = self.model.max_model_len

    def require_tokenizer(self, encode: Callable[[str], Sequence[int]]) -> None:
        """Check that a tokenizer encodes texts as the server does.

        Raises:
            InvalidArgument: it does not, so that other texts would be scored.
        """
        with Client(self._target, timeout_s=self._timeout_s, api_key=self._api_key) as client:
            theirs = client.tokenize(_PROBE, add_special_tokens=False)
        ours = tuple(encode(_PROBE))
        if ours != theirs:
            what = f"{_PROBE!r} has {len(ours)} tokens that differ from the {len(theirs)} of the server's tokenizer"
            raise InvalidArgument("tokenizer", f"{what}: it belongs to another model than {self.model.name!r}")

    def complete(
        self, prompts: Sequence[TokenIds], sampling: Sequence[SamplingParams], use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        """See `EvaluationBackend`."""

        async def one(client: AsyncClient, ask: tuple[TokenIds, SamplingParams]) -> tuple[RequestOutput, Usage]:
            output = await client.complete(prompt_token_ids=ask[0], sampling=ask[1], adapter=self._adapter)
            return output, output.usage

        return _run(self._each(one, list(zip(prompts, sampling, strict=True)), use_tqdm))

    def score(self, groups: Sequence[ContinuationGroup], use_tqdm: bool | MakeBar) -> list[list[Likelihood]]:
        """See `EvaluationBackend`."""

        async def one(client: AsyncClient, group: ContinuationGroup) -> tuple[list[Likelihood], Usage]:
            scores = await client.score(group.context, group.continuations, adapter=self._adapter)
            num_tokens = len(group.context) + sum(map(len, group.continuations))
            return [(score.logprob, score.is_greedy) for score in scores], Usage(prompt_tokens=num_tokens)

        return _run(self._each(one, groups, use_tqdm))

    def close(self) -> None:
        """Do nothing: there are no connections between calls."""

    async def _each(
        self,
        work: Callable[[AsyncClient, _Ask], Awaitable[tuple[_Answer, Usage]]],
        asks: Sequence[_Ask],
        use_tqdm: bool | MakeBar,
    ) -> list[_Answer]:
        """Call `work` for each ask, with limited concurrency; raise the first error, which cancels the others."""
        answers: dict[int, _Answer] = {}
        places = iter(range(len(asks)))
        bar = ProgressBar(use_tqdm, len(asks))

        async def pull(client: AsyncClient) -> None:
            for place in places:
                answers[place], usage = await _patiently(functools.partial(work, client, asks[place]))
                bar.note_done(usage)

        try:
            asking = AsyncClient(self._target, timeout_s=self._timeout_s, api_key=self._api_key)
            async with asking as client, asyncio.TaskGroup() as group:
                for _ in range(min(self._num_at_once, len(asks))):
                    group.create_task(pull(client))
        except* JpagedError as errors:
            error = errors
        else:
            return [answers[place] for place in range(len(asks))]
        finally:
            bar.close()
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first


async def _patiently(call: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Repeat a call while the server's queue is full."""
    while True:
        try:
            return await call()
        except TryLater as error:
            await asyncio.sleep(error.retry_after_s)


def _run(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Run a coroutine to its end, even if an event loop is running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _tokens(prompts: Sequence[TokenIds]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
