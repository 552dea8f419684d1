"""First tokens of another server: what cannot be those of a request is refused before anything of it is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from jpaged.errors import InternalError
from jpaged.service.handoff import FirstToken, begun
from jpaged.testing import ByteTokenizer
from jpaged.types import PositionLogprobs, Request, SamplingParams, TokenLogprob, Usage

VOCAB_SIZE = 257
GOOD = PositionLogprobs(TokenLogprob(65, -0.5, 1), (TokenLogprob(65, -0.5, 1), TokenLogprob(66, -1.0, 2)))
NAMED = PositionLogprobs(TokenLogprob(65, -0.5, 1), (), (TokenLogprob(7, -9.0, 200),))


def told(num_cached_tokens: int = 2, **changes: Any) -> object:
    """Take first tokens of a request that names token 7, or two likeliest tokens; `changes` are of what is told."""
    names = {"logprob_token_ids": (7,)} if "asked" in changes else {"logprobs": 2}
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, **names)
    request = Request("r", (1, 2, 3), sampling)
    logprobs = dataclasses.replace(NAMED if "asked" in changes else GOOD, **changes)
    tokenizer = ByteTokenizer()
    return begun(request, [FirstToken(0, 65, logprobs)], num_cached_tokens, tokenizer, frozenset(), VOCAB_SIZE)


@pytest.mark.parametrize("num_cached_tokens", [0, 3])
def test_what_can_be_is_taken(num_cached_tokens: int) -> None:
    assert told(num_cached_tokens)
    assert told(chosen=TokenLogprob(65, 1e-4, 1), top=GOOD.top[:1])
    assert told(asked=(TokenLogprob(7, -math.inf, None),))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_usage_counts_the_first_tokens_one_by_one(max_tokens: int) -> None:
    request = Request("r", (1, 2, 3), SamplingParams(n=2, max_tokens=max_tokens, temperature=1.0))
    tokens = [FirstToken(0, 65, None), FirstToken(1, 66, None)]
    found = begun(request, tokens, 2, ByteTokenizer(), frozenset(), VOCAB_SIZE)
    events, left = found.events, found.request
    assert [(one.index, one.text, one.usage) for one in events] == [(0, "A", Usage(3, 1, 2)), (1, "B", Usage(3, 2, 2))]
    assert [one.is_last for one in events] == [False, max_tokens == 1]
    assert (left is None) == (max_tokens == 1)


@pytest.mark.parametrize("num_cached_tokens", [-1, 4, 4294967295])
def test_more_cached_tokens_than_the_prompt_has_are_refused(num_cached_tokens: int) -> None:
    with pytest.raises(InternalError, match="cached tokens for a prompt of 3"):
        told(num_cached_tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"chosen": TokenLogprob(66, -0.5, 1)},
        {"chosen": TokenLogprob(65, math.nan, 1)},
        {"chosen": TokenLogprob(65, 0.5, 1)},
        {"chosen": TokenLogprob(65, math.inf, 1)},
        {"chosen": TokenLogprob(65, -0.5, 0)},
        {"chosen": TokenLogprob(65, -0.5, VOCAB_SIZE + 1)},
        {"top": (*GOOD.top, TokenLogprob(67, -2.0, 3))},
        {"top": (GOOD.top[0], GOOD.top[0])},
        {"top": (TokenLogprob(VOCAB_SIZE, -0.5, 1),)},
        {"top": (TokenLogprob(65, math.nan, 1),)},
        {"asked": ()},
        {"asked": (TokenLogprob(8, -9.0, 200),)},
        {"asked": (TokenLogprob(7, math.nan, 200),)},
    ],
)
def test_log_probabilities_that_cannot_be_are_refused(changes: Mapping[str, Any]) -> None:
    with pytest.raises(InternalError, match="the prefill server returned"):
        told(**changes)
