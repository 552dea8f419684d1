"""Pairs of tokens, grouped so that a context is computed once.

What the harness asks of each choice of a question is a pair: the tokens of its context, and those of the choice. Pairs
of one context become one call. Choices of one token, letters most often, become less: the engine tells of all of them
where it samples behind the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jpaged.errors import InvalidArgument

TokenIds = tuple[int, ...]
Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context, and of what comes behind it."""
Likelihood = tuple[float, bool]
"""The log-probability of a continuation (natural), and whether each of its tokens is the likeliest in its place."""

MAX_TOLD_TOKENS = 32
"""Tokens that a sample tells of."""
MAX_CONTINUATIONS = 1024
"""Continuations of one call."""


@dataclass(frozen=True, slots=True)
class Group:
    """Continuations of one context: each of one token, or each of several. None is there twice."""

    context: TokenIds
    continuations: tuple[TokenIds, ...]

    @property
    def is_of_tokens(self) -> bool:
        """Each continuation is one token."""
        return len(self.continuations[0]) == 1


def fitted(pair: Pair, max_length: int) -> tuple[TokenIds, TokenIds]:
    """Take from the beginning of a context what does not fit.

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
    """Group pairs by their contexts, which come in order: those that begin alike are beside each other.

    Pairs without a continuation are left out.
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
    """The likelihood of each pair of the groups."""
    return {
        (group.context, continuation): likelihood
        for group, each in zip(groups, likelihoods, strict=True)
        for continuation, likelihood in zip(group.continuations, each, strict=True)
    }


def _parts(continuations: tuple[TokenIds, ...], width: int) -> Iterator[tuple[TokenIds, ...]]:
    for first in range(0, len(continuations), width):
        yield continuations[first : first + width]
