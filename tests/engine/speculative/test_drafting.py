"""What is proposed is run with its sequence's row, and changes no token, whatever else runs."""

from collections.abc import Sequence
from typing import Any

import pytest

from jpaged.errors import InternalError
from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.harness import Harness
from tests.engine.proposing import Always, Guesses

PROMPT = [3, 1, 4]


def harness(num_speculative_tokens: int = 4, **fields: Any) -> Harness:
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 8} | {
        name: fields.pop(name) for name in ("num_blocks", "block_size", "max_num_seqs") if name in fields
    }
    return Harness(FakeExecutor(**sizes), num_speculative_tokens=num_speculative_tokens, **fields)


def right(h: Harness, *names: str, max_tokens: int = 20, **sampling: Any) -> dict[str, list[int]]:
    """Submits requests of which the proposer knows the answers, and says what those are."""
    answers = {name: expected_tokens([*PROMPT, ord(name)], max_tokens) for name in names}
    h.known_outputs += answers.values()
    for name in names:
        h.submit(name, [*PROMPT, ord(name)], max_tokens=max_tokens, **sampling)
    return answers


def test_what_was_proposed_and_is_drawn_takes_no_step_of_its_own():
    for name in "abc":
        h = harness()
        answers = right(h, name)
        h.run()
        assert h.tokens(name) == answers[name]
        load = h.engine.load().speculation
        assert load.num_accepted_tokens == h.adaptation.num_accepted > 5
        assert h.executor.num_steps == 20 - load.num_accepted_tokens
        assert h.engine.load().num_generation_tokens == 20
    assert load.num_accepted_tokens < load.num_draft_tokens


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_rows_with_and_without_proposals_go_in_one_step(num_scheduler_steps):
    h = harness(num_scheduler_steps=num_scheduler_steps)
    answers = right(h, "a", "b")
    h.submit("c", [9, 9], max_tokens=20, frequency_penalty=0.5)
    h.submit("d", [8], max_tokens=20, logprobs=2)
    h.submit("e", [7], max_tokens=6, beam_width=2, n=2)
    plain = harness(0)
    for name, prompt, more in (("c", [9, 9], {"frequency_penalty": 0.5}), ("d", [8], {"logprobs": 2})):
        plain.submit(name, prompt, max_tokens=20, **more)
    plain.submit("e", [7], max_tokens=6, beam_width=2, n=2)
    h.run()
    plain.run()
    assert {name: h.tokens(name) for name in answers} == answers
    assert [h.tokens("c"), h.tokens("d")] == [plain.tokens("c"), plain.tokens("d")]
    assert [h.tokens("e", i) for i in range(2)] == [plain.tokens("e", i) for i in range(2)]
    told = [[one.logprobs for one in some.events["d"]] for some in (h, plain)]
    assert told[0] == told[1]
    assert h.adaptation.num_accepted > 10


@pytest.mark.parametrize(
    "sampling",
    [
        {"logit_bias": {5: 3.0}},
        {"allowed_token_ids": list(range(200))},
        {"logprobs": 3},
        {"min_tokens": 9, "stop_token_ids": list(range(32))},
        {"temperature": 1.0, "seed": 5, "n": 3},
        {"presence_penalty": 0.3, "temperature": 1.0, "seed": 6},
        {"bad_words": ["a"]},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_every_field_means_what_it_does_without(sampling):
    plain, h = harness(0), harness()
    plain.submit("a", PROMPT, max_tokens=16, **sampling)
    plain.run()
    count = sampling.get("n", 1)
    h.known_outputs += [plain.tokens("a", i) for i in range(count)]
    h.submit("a", PROMPT, max_tokens=16, **sampling)
    h.run()
    assert [h.tokens("a", i) for i in range(count)] == [plain.tokens("a", i) for i in range(count)]
    positions = [[one for event in some.events["a"] for one in event.logprobs] for some in (h, plain)]
    assert positions[0] == positions[1]
    assert h.last("a").finish == plain.last("a").finish
    assert h.last("a").cumulative_logprob == plain.last("a").cumulative_logprob
    depends = any(name in sampling for name in ("presence_penalty", "bad_words")) or sampling.get("logprobs") == -1
    assert (h.adaptation.num_accepted > 0) != depends


def test_the_end_of_a_text_in_the_middle_of_a_draft_ends_it():
    answer = expected_tokens([*PROMPT, ord("a")], 20)
    for place in range(1, 8):
        if answer[place] in answer[:place]:
            continue
        h = harness(7)
        right(h, "a", stop_token_ids=[answer[place]])
        h.run()
        assert h.tokens("a") == answer[: place + 1]
        assert h.last("a").finish.reason.value == "stop"


def test_nobody_leaves_for_a_draft():
    h, plain = (harness(k, num_blocks=9, block_size=4, max_num_seqs=4) for k in (4, 0))
    for one in (h, plain):
        right(one, "a", "b", max_tokens=12)
        one.run()
    assert h.engine.load().num_preemptions == plain.engine.load().num_preemptions == 0
    assert h.tokens("a") == plain.tokens("a") and h.tokens("b") == plain.tokens("b")
    assert h.adaptation.num_accepted > 0


def test_logits_that_are_not_finite_behind_a_proposal_fail_at_that_token_and_no_other():
    answer = expected_tokens([*PROMPT, ord("a")], 20)
    for place in range(1, 12):
        ends = []
        for num_speculative_tokens in (0, 4):
            h = harness(num_speculative_tokens)
            h.executor.faults.nan_token_ids = frozenset({answer[place]})
            right(h, "a")
            h.run()
            error = h.last("a").error
            assert isinstance(error, InternalError)
            ends.append((h.tokens("a"), str(error)))
        assert ends[0] == ends[1]
        assert ends[0][0] == answer[: len(ends[0][0])]


def test_what_was_not_drawn_holds_no_blocks():
    h = harness(7, block_size=1, num_blocks=100)
    right(h, "b", "c")
    while h.step():
        held = [
            (sequence.kv.num_blocks, sequence.num_computed_tokens)
            for group in h.engine._loop.scheduler.queues.running
            for sequence in group.live
            if not sequence.num_in_flight_tokens
        ]
        assert all(num_blocks == num_tokens for num_blocks, num_tokens in held)
    load = h.engine.load().speculation
    assert 0 < load.num_accepted_tokens < load.num_draft_tokens


# --- what the adaptation is told ------------------------------------------------------------------------------------


class Silent(Guesses):
    """Proposes nothing."""

    def propose(self, sequence_key: int, limit: int) -> list[int]:
        return []


class Noting(Always):
    """Keeps what it is asked and told."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self.available: list[tuple[int, ...]] = []
        self.plain: list[tuple[int, int]] = []
        self.observed: list[tuple[int, int, int]] = []

    def choose(
        self, sequence_keys: Sequence[int], num_available: Sequence[int], num_other_tokens: int = 0
    ) -> list[int]:
        self.available.append(tuple(num_available))
        return super().choose(sequence_keys, num_available, num_other_tokens)

    def took_plain(self, num_rows: int, num_other_tokens: int, seconds: float) -> None:
        self.plain.append((num_rows, num_other_tokens))

    def observe(
        self,
        sequence_keys: Sequence[int],
        num_proposals: Sequence[int],
        num_accepted: Sequence[int],
        seconds: float,
        num_other_tokens: int = 0,
    ) -> None:
        self.observed.append((len(sequence_keys), sum(num_proposals), num_other_tokens))
        super().observe(sequence_keys, num_proposals, num_accepted, seconds, num_other_tokens)


def noting(num_speculative_tokens: int, proposer: type[Guesses] = Guesses) -> tuple[Harness, Noting]:
    h, one = harness(), Noting(num_speculative_tokens)
    drafter: Any = h.engine._loop._drafter
    drafter._adaptation = one
    drafter._proposer = proposer(h.outputs, h.executor.geometry.vocab_size)
    return h, one


def test_rows_without_proposals_are_told_of_as_such():
    h, one = noting(4, Silent)
    right(h, "a", "b", max_tokens=6)
    h.run()
    assert set(one.available) - {()} == {(0, 0)} and not one.observed and not one.plain


def test_steps_without_drafts_are_told_of_once_none_was_asked_for():
    h, one = noting(0)
    right(h, "a", "b", max_tokens=6)
    h.run()
    assert set(one.plain) == {(2, 0)} and len(one.plain) >= 4
    assert not one.available and not one.observed


def test_steps_with_drafts_are_told_of_with_the_prompts_beside_them():
    h, one = noting(4)
    right(h, "a")
    for _ in range(4):
        h.step()
    h.submit("b", [9] * 5, max_tokens=1)
    h.run()
    assert all(num_rows == 1 and num_run > 0 for num_rows, num_run, _ in one.observed)
    assert sorted(others for *_, others in one.observed)[-2:] == [0, 5]
