"""Pairs of tokens, grouped so that a context is computed once.

For each choice of a question the harness requests a pair: the tokens of the context, and those of the choice. Pairs
with the same context become one call. Choices of one token, mostly letters, are cheaper: one sample after the context
returns the log-probabilities of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jpaged.errors import InvalidArgument

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
class Group:
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


def grouped(pairs: Iterable[tuple[TokenIds, TokenIds]]) -> list[Group]:
    """Group pairs by context; sorted, so that contexts with a common beginning are adjacent.

    Pairs without a continuation are omitted.
    """
    by_context: dict[tuple[TokenIds, bool], dict[TokenIds, None]] = {}
    for context, continuation in pairs:
        if continuation:
            by_context.setdefault((context, len(continuation) == 1), {})[continuation] = None
    groups: list[Group] = []
    for (context, is_of_tokens), continuations in sorted(by_context.items(), key=lambda item: item[0]):
        width = MAX_TOLD_TOKENS if is_of_tokens else MAX_CONTINUATIONS
        groups += [Group(context, part) for part in _parts(tuple(continuations), width)]
    return groups


def by_pair(groups: Sequence[Group], likelihoods: Sequence[Sequence[Likelihood]]) -> dict[Pair, Likelihood]:
    """Return the likelihood of each pair of the groups."""
    return {
        (group.context, continuation): likelihood
        for group, each in zip(groups, likelihoods, strict=True)
        for continuation, likelihood in zip(group.continuations, each, strict=True)
    }


def _parts(continuations: tuple[TokenIds, ...], width: int) -> Iterator[tuple[TokenIds, ...]]:
    for first in range(0, len(continuations), width):
        yield continuations[first : first + width]
