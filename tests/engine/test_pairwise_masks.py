"""Fields that can forbid every token, each with each other: the caller gets the error, and the alarm stays quiet."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jpaged.errors import InvalidArgument
from jpaged.structured import ThinkingBudget, ThinkingGrammar
from jpaged.testing import FakeExecutor
from jpaged.testing.fake_model import FakeGrammar
from jpaged.types import Request
from tests.engine.harness import Harness

V, EOS = 61, 60
ZERO, ONE, SPACE = 48, 49, 32
"""Tokens of the texts "0", "1" and " "."""
PROMPT = [ZERO, 3, SPACE]
FIELDS: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": FakeGrammar(V, EOS, 5, salt=2)},
    "free grammar": {"grammar": FakeGrammar(V, EOS, 5, salt=2, is_free=True)},
    "thinking budget": {"grammar": ThinkingGrammar(ThinkingBudget((), (ZERO, ONE), 2, is_open_at_start=True))},
    "allowed digits": {"allowed_token_ids": [ZERO, ONE]},
    "allowed end": {"allowed_token_ids": [EOS]},
    "allowed others": {"allowed_token_ids": [1, 2, EOS]},
    "bad digits": {"bad_words": ["0", "1"]},
    "bad pairs": {"bad_words": ["00", "01", "10", "11"]},
    "min_tokens": {"min_tokens": 3},
    "stop digits": {"stop_token_ids": [ZERO, ONE]},
    "stop others": {"stop_token_ids": [1, 2]},
    "ignore_eos": {"ignore_eos": True},
    "biases": {"logit_bias": {ZERO: -100.0, ONE: -100.0, EOS: -100.0}},
    "penalty": {"repetition_penalty": 100.0},
    "samples": {"n": 2, "temperature": 1.0, "seed": 3},
}
NAMES_OF = {"grammar": "structured_outputs"}
PAIRS, TRIPLES = (
    [
        names
        for names in itertools.combinations(FIELDS, size)
        if len({key for name in names for key in FIELDS[name]}) == sum(len(FIELDS[name]) for name in names)
    ]
    for size in (2, 3)
)


def harness(overlap: bool) -> Harness:
    executor = FakeExecutor(vocab_size=V, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32)
    return Harness(executor, overlap=overlap, max_num_queued_reqs=1024, eos_token_ids=frozenset({EOS}))


def left(request: Request, output: list[int]) -> set[int]:
    """The tokens that a request leaves after its output, from its fields alone."""
    sampling, context = request.sampling, [*request.prompt_token_ids, *output]
    found = set(range(V)) if sampling.allowed_token_ids is None else set(sampling.allowed_token_ids)
    for word in request.bad_word_ids:
        if context[len(context) - len(word) + 1 :] == list(word[:-1]):
            found.discard(word[-1])
    state = None if request.grammar is None else request.grammar.start()
    if state is not None:
        assert all(state.accept(token_id) for token_id in output)
        mask_w = np.zeros(2, np.int32)
        state.fill(mask_w)
        found = {token_id for token_id in found if mask_w.view(np.uint32)[token_id // 32] >> token_id % 32 & 1}
    if len(output) >= sampling.min_tokens:
        return found
    others = found - sampling.ending_ids(frozenset({EOS}))
    return found if state is not None and not others else others  # a grammar's text may end before min_tokens


@pytest.mark.parametrize("overlap", [True, False])
def check(cases: list[tuple[str, ...]], *, overlap: bool) -> None:
    """Run all cases in one engine, with rows next to them that no case may change."""
    h, alone, refused = harness(overlap), harness(overlap), dict[str, InvalidArgument]()
    alone.submit("beside", [5, 6], max_tokens=40, ignore_eos=True)
    alone.run()
    h.submit("beside", [5, 6], max_tokens=40, ignore_eos=True)
    requests = dict[str, Request]()
    for names in cases:
        fields = {key: value for name in names for key, value in FIELDS[name].items()}
        case = " and ".join(names)
        try:
            requests[case] = h.submit(case, PROMPT, max_tokens=9, **fields)
        except InvalidArgument as error:
            refused[case] = error
    h.run()
    assert h.tokens("beside") == alone.tokens("beside")
    assert h.engine.load().num_nonfinite_requests == 0
    errors: dict[str, Exception | None] = {**refused, **{case: h.last(case).error for case in requests}}
    for case, request in requests.items():
        outputs = [h.tokens(case, index) for index in range(request.sampling.n)]
        for tokens in outputs:
            assert all(token in left(request, tokens[:place]) for place, token in enumerate(tokens)), case
        assert errors[case] is None or any(not left(request, tokens) for tokens in outputs), case
    for case, problem in errors.items():
        if problem is not None:
            given = {NAMES_OF.get(key, key) for name in case.split(" and ") for key in FIELDS[name]}
            assert isinstance(problem, InvalidArgument), case
            assert problem.field.removeprefix("sampling.") in given, case
            assert "output token" in problem.problem, case
    assert any(errors.values())


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pair_of_masks_that_leaves_nothing_is_the_callers_error(overlap: bool) -> None:
    check(PAIRS, overlap=overlap)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [True, False])
def test_three_masks_that_leave_nothing_are_the_callers_error(overlap: bool) -> None:
    check(TRIPLES, overlap=overlap)
