"""Rows whose logits are changed: what is counted of them is what they are, whatever happens to their sequences."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import numpy as np
import pytest

from jpaged.engine.executor.io import MASK_BITS, NUM_SINGLES
from jpaged.engine.scheduler.logits_processors import CountSlots, build_mask, nothing_left
from jpaged.engine.sequence import Sequence
from jpaged.testing import FakeExecutor, SeveralStepsExecutor
from jpaged.testing.fake_executor import seeing
from jpaged.types import Prompt, Request, SamplingParams
from tests.engine.harness import Harness

VOCAB = 257
KINDS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.25},
    "bias": {"logit_bias": {7: -100.0, 9: -1.0}},
    "allowed": {"allowed_token_ids": list(range(5, 90))},
    "bad words": {"bad_words": ["q", "zz", "abc"]},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "typical": {"typical_p": 0.9},
}


def next_token(context: list[int], num_prompt: int, request: Request) -> int:
    """The fake's next token of a greedy row, from lists alone."""
    sampling, output = request.sampling, context[num_prompt:]
    token = sum((i + 1) * one for i, one in enumerate(context))
    if sampling.needs_counts:
        token += round(
            4
            * (
                (np.float32(sampling.repetition_penalty) - 1) * len(set(context))
                + np.float32(sampling.frequency_penalty) * len(output)
                + np.float32(sampling.presence_penalty) * len(set(output))
            )
        )
    allowed = set(range(VOCAB) if sampling.allowed_token_ids is None else sampling.allowed_token_ids)
    allowed -= {one for one, bias in (sampling.logit_bias or {}).items() if bias < 0}
    for word in request.bad_word_ids:
        if context[len(context) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
            allowed.discard(word[-1])
    return next(one % VOCAB for one in range(token, token + VOCAB) if one % VOCAB in allowed)


def expected(prompt: list[int], request: Request) -> list[int]:
    context = list(prompt)
    while len(context) < len(prompt) + request.sampling.max_num_tokens:
        context.append(next_token(context, len(prompt), request))
    return context[len(prompt) :]


def submit(h: Harness, name: str, prompt: list[int], **sampling: Any) -> list[int]:
    """What is expected of a request that was submitted."""
    return expected(prompt, h.submit(name, prompt, **sampling))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_gets_the_tokens_that_its_edits_say(kind: str, overlap: bool) -> None:
    h = Harness(overlap=overlap)
    want = submit(h, "a", [5, 6, 7, 7], max_tokens=30, **KINDS[kind])
    h.run()
    assert h.tokens("a") == want


def random_kind(rng: random.Random) -> dict[str, Any]:
    chosen = rng.sample(list(KINDS), rng.choice([0, 1, 1, 2, 3]))
    return {name: value for kind in chosen for name, value in KINDS[kind].items()}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("seed", range(6))
def test_every_mix_in_a_short_memory(seed: int, overlap: bool, mode: str) -> None:
    """Chunked, preempted, behind prefixes, several of a request, aborted in between: counts are right in every step."""
    rng = random.Random(seed)
    executor = SeveralStepsExecutor if seed % 2 else FakeExecutor
    h = Harness(
        executor=executor(num_blocks=24, block_size=2, max_num_batched_tokens=12, num_host_blocks=40, max_num_seqs=6),
        overlap=overlap,
        preemption_mode=mode,
    )
    shared = [rng.randrange(VOCAB) for _ in range(9)]
    want, seen = {}, 0
    for i in range(24):
        prompt = shared[: rng.choice([0, 4, 9])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        n = rng.choice([1, 1, 1, 2])
        params = random_kind(rng)
        seen += SamplingParams(**params).needs_counts
        want[f"r{i}"] = submit(h, f"r{i}", prompt, max_tokens=rng.randint(1, 14), n=n, **params), n
        for _ in range(rng.randint(0, 4)):
            h.step()
        if rng.random() < 0.2:
            h.engine.abort(f"r{rng.randrange(i + 1)}")
    h.run()
    assert h.engine.load().num_preemptions > 0 and seen > 4
    for name, (tokens, n) in want.items():
        for index in range(n):
            got = h.tokens(name, index)
            assert got == tokens[: len(got)], name
            finish = h.events[name][-1].finish
            assert finish is not None
            assert got == tokens or finish.reason.value == "abort", name
    editing = h.engine._loop.scheduler.rows.logits_processors
    assert len(editing.slots) == 0 and not editing._constants


def test_a_preempted_request_frees_its_slot() -> None:
    h = Harness(executor=FakeExecutor(max_num_seqs=1), policy="priority")
    params: dict[str, Any] = {"max_tokens": 12, "frequency_penalty": 1.0}
    want = {"late": submit(h, "late", [5, 6, 7], priority=1, **params)}
    for _ in range(4):
        h.step()
    want["urgent"] = submit(h, "urgent", [7, 6, 5], priority=0, **params)
    h.run()
    assert h.engine.load().num_preemptions == 1
    assert {name: h.tokens(name) for name in want} == want


def test_windows_do_not_change_what_is_counted() -> None:
    h = Harness(executor=seeing((None, 8))(num_blocks=40, block_size=2))
    params = {"max_tokens": 20, "frequency_penalty": 1.0}
    h.submit("a", [1, 2, 3], **params)
    h.run()
    assert len(h.tokens("a")) == 20


def test_rows_that_change_nothing_stay_among_those_that_decode() -> None:
    h = Harness()
    h.submit("plain", [1, 2], max_tokens=9)
    h.submit("edited", [1, 2], max_tokens=9, logit_bias={3: 1.0})
    for _ in range(4):
        h.step()
    rows = h.engine._loop.scheduler.rows
    assert [group.request.request_id for group in rows._groups] == ["plain"]


@pytest.mark.parametrize("name", ["plain", "overlap"])
def test_a_phrase_is_forbidden_where_its_beginning_was_sampled(name: str) -> None:
    """A phrase of two tokens and one of three; the last token before may be in flight."""
    h = Harness(overlap=name == "overlap")
    free = submit(h, "free", [9, 8], max_tokens=12)
    h.run()
    assert h.tokens("free") == free
    for length in (2, 3):
        phrase = tuple(free[4 : 4 + length])
        request = h.input_processor.make_request(
            request_id=f"of {length}",
            sampling=SamplingParams(temperature=0.0, max_tokens=12, bad_words=["x"]),
            prompt=Prompt(token_ids=[9, 8]),
        )
        request = dataclasses.replace(request, bad_word_ids=(phrase,))
        h.engine.submit(request, h.receive)
        h.run()
        got = h.tokens(f"of {length}")
        assert got == expected([9, 8], request)
        assert got[: 3 + length] == free[: 3 + length] and got[3 + length] != free[3 + length]


def test_a_slot_is_one_sequences() -> None:
    slots, sequences = CountSlots(2), [Sequence(i, [1], None) for i in range(3)]  # type: ignore[arg-type]
    first, second = slots.take(sequences[0]), slots.take(sequences[1])
    assert {first, second} == {1, 2}
    slots.give_back(sequences[0])
    slots.give_back(sequences[0])
    assert slots.take(sequences[2]) == first and slots.find(sequences[0]) is None and len(slots) == 2


def test_a_mask_has_a_bit_for_each_token() -> None:
    mask = build_mask([0, 31, 32, 100], VOCAB).astype(np.uint32)
    assert [t for t in range(VOCAB) if mask[t // MASK_BITS] >> np.uint32(t % MASK_BITS) & 1] == [0, 31, 32, 100]


def test_the_longest_lists_have_room() -> None:
    h = Harness(executor=FakeExecutor(vocab_size=70_000))
    words = [chr(1000 + i) * 2 for i in range(128)]
    h.submit("a", [1], max_tokens=2, logit_bias=dict.fromkeys(range(300), -100.0), bad_words=words)
    h.run()
    assert len(h.tokens("a")) == 2 and NUM_SINGLES >= 300 + 2 * 128


@pytest.mark.parametrize(
    ("sampling", "bad_words", "output", "problem"),
    [
        ({"allowed_token_ids": [3], "min_tokens": 2}, (), (), "2 forbids .* allowed_token_ids is an end.*: .* token 1"),
        ({"allowed_token_ids": [3], "min_tokens": 2}, (), (3,), "2 forbids .* sampled as output token 2"),
        ({"allowed_token_ids": [3], "min_tokens": 2}, (), (3, 3), None),
        ({"allowed_token_ids": [0, 3], "min_tokens": 2}, (), (), None),
        (
            {"allowed_token_ids": [0, 3], "min_tokens": 1, "stop_token_ids": [0]},
            (),
            (),
            "is a stop token or an end-of-sequence token: no",
        ),
        (
            {"allowed_token_ids": [0, 3], "min_tokens": 1},
            ((0,),),
            (),
            "is an end-of-sequence token, or a bad word: no",
        ),
        ({"allowed_token_ids": [0]}, ((0,),), (), "bad_words: forbid every token of allowed_token_ids: .* token 1"),
        ({"allowed_token_ids": [0]}, ((1, 2, 0),), (), "bad_words: forbid"),  # behind the prompt
        ({"allowed_token_ids": [0]}, ((1, 2, 0),), (0,), None),
        ({"allowed_token_ids": [0]}, ((9, 1, 2, 0),), (), None),
        ({}, ((0,), (1,), (2,), (3,)), (), "bad_words: forbid every token: no"),
        ({}, ((0,), (1,), (2,)), (), None),
        ({"min_tokens": 1}, ((0,), (1,), (2,)), (), "1 forbids tokens .* every token is an end"),
        ({"min_tokens": 1}, ((0,), (1,)), (), None),
    ],
)
def test_fields_that_forbid_every_token_are_named(sampling, bad_words, output, problem):
    request = Request("a", (1, 2), SamplingParams(**sampling), bad_word_ids=bad_words)
    error = nothing_left(request, [1, 2, *output], frozenset({3}), 4)
    if problem is None:
        assert error is None
    else:
        assert error is not None and re.search(problem, str(error))
        assert error.field == ("sampling.bad_words" if "bad_words:" in problem else "sampling.min_tokens")
