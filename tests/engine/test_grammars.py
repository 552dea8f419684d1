"""Rows whose text follows a grammar: the tokens are those of one step at a time, whatever else runs."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jpaged.engine.structured_output import StructuredOutputManager
from jpaged.errors import InvalidArgument
from jpaged.structured import ThinkingBudget, ThinkingGrammar
from jpaged.testing import FakeExecutor, FedExecutor, SeveralStepsExecutor
from jpaged.testing.fake_model import FakeGrammar, FakeGrammarState
from tests.engine.harness import Harness

V, EOS = 61, 60


def harness(**fields: Any) -> Harness:
    executor = fields.pop("executor", FakeExecutor)(
        vocab_size=V,
        num_blocks=fields.pop("num_blocks", 64),
        max_num_seqs=fields.pop("max_num_seqs", 8),
        num_host_blocks=fields.pop("num_host_blocks", 0),
        max_num_batched_tokens=fields.pop("max_num_batched_tokens", 32),
    )
    return Harness(executor=executor, eos_token_ids=frozenset({EOS}), **fields)


def alone(prompt: list[int], grammar: FakeGrammar | None = None, **sampling: Any) -> list[int]:
    """The tokens of a request by itself, each sampled in a step of its own."""
    h = harness(overlap=False)
    h.submit("alone", prompt, grammar=grammar, logprobs=0, **sampling)
    h.run()
    assert h.engine.load().num_forced_tokens == 0
    return h.tokens("alone")


def requests_of(seed: int, count: int = 10, share_free: float = 0.0) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and sampling of a mix, a third of them without a grammar."""
    rng, found = random.Random(seed), []
    for salt in range(count):
        fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 20), "temperature": 1.0, "seed": rng.randrange(2**32)}
        if salt % 3:
            grammar = FakeGrammar(V, EOS, rng.randrange(1, 16), salt=rng.randrange(99))
            fields["grammar"] = replace(grammar, is_free=rng.random() < share_free)
        found.append(([rng.randrange(V) for _ in range(rng.randrange(1, 24))], fields))
    return found


WAYS: dict[str, dict[str, Any]] = {
    "overlapping": {},
    "in turn": {"overlap": False},
    "few blocks": {"num_blocks": 14},
    "few blocks, swapped": {"num_blocks": 14, "num_host_blocks": 64, "preemption_mode": "swap"},
    "small chunks": {"max_num_batched_tokens": 9},
    "static": {"batching": "static"},
    "several steps": {"num_scheduler_steps": 4, "executor": SeveralStepsExecutor},
    "several steps, fed": {"num_scheduler_steps": 4, "executor": FedExecutor},
    "several steps, fed, in turn": {"num_scheduler_steps": 4, "executor": FedExecutor, "overlap": False},
    "fed, few blocks, swapped": {
        "num_scheduler_steps": 4,
        "executor": FedExecutor,
        "num_blocks": 14,
        "num_host_blocks": 64,
        "preemption_mode": "swap",
    },
    "drafts": {"num_speculative_tokens": 5, "max_num_seqs": 32},
    "drafts, few blocks": {"num_speculative_tokens": 3, "num_blocks": 20, "max_num_seqs": 16},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.thinned(9)
def test_tokens_are_those_of_one_step_at_a_time(way, seed):
    h, expected = harness(**WAYS[way]), {}
    for number, (prompt, fields) in enumerate(requests_of(seed)):
        h.submit(str(number), prompt, **fields)
        expected[str(number)] = alone(prompt, **fields)
        h.known_outputs.append(expected[str(number)])
        if number % 4 == 3:
            h.step()
    h.run()
    for request_id, tokens in expected.items():
        assert h.tokens(request_id) == tokens
        assert h.last(request_id).finish.reason.value == ("stop" if tokens[-1] == EOS else "length")
        assert h.last(request_id).usage.completion_tokens == len(tokens)
    assert h.engine.load().num_forced_tokens > 0
    assert h.adaptation.num_accepted > 0 or "drafts" not in way


@pytest.mark.parametrize("kind", [SeveralStepsExecutor, FedExecutor])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 14])
@pytest.mark.parametrize("num_steps", [2, 5, 16])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.thinned(11)
def test_tokens_are_the_same_where_several_steps_are_decided_at_once(seed, num_steps, num_blocks, overlap, kind):
    """Some have a choice everywhere, and go several steps; rows end on the way, and others come."""
    h = harness(executor=kind, num_scheduler_steps=num_steps, num_blocks=num_blocks, overlap=overlap)
    expected = {}
    for number, (prompt, fields) in enumerate(requests_of(seed, share_free=0.95)):
        expected[str(number)] = alone(prompt, **fields)
        h.submit(str(number), prompt, **fields)
        if number % 5 == 4:
            h.step()
    h.run()
    assert {request_id: h.tokens(request_id) for request_id in expected} == expected
    assert h.engine.load().num_steps - h.executor.num_steps in (0, 1)  # of rows that had all ended, none is run


@pytest.mark.parametrize("kind", [SeveralStepsExecutor, FedExecutor])
@pytest.mark.parametrize("overlap", [True, False])
def test_rows_with_grammars_go_several_steps_at_once_until_one_of_them_ends(overlap, kind):
    h = harness(executor=kind, num_scheduler_steps=8, overlap=overlap)
    free = [FakeGrammar(V, EOS, length, salt=length, is_free=True) for length in (5, 40)]
    for name, grammar in zip("ab", free, strict=True):
        h.submit(name, [3, 1], grammar=grammar, max_tokens=60, temperature=1.0, seed=7)
    h.submit("plain", [2], max_tokens=41, ignore_eos=True)
    while not h.ended("a"):
        h.step()
    assert len(h.tokens("b")) in (6, 7)  # a's sixth token is the end, and one step more was under way
    h.run()
    assert h.executor.num_steps < 45
    assert h.engine.load().num_steps - h.executor.num_steps in (0, 1)
    assert h.num_steps < 15
    for name, grammar in zip("ab", free, strict=True):
        assert h.tokens(name) == alone([3, 1], grammar, max_tokens=60, temperature=1.0, seed=7)


def test_steps_are_not_fed_on_beside_a_row_that_a_stop_string_has_ended():
    """Which shows when its tokens are taken in: by then the next dispatch is under way, and has two steps."""
    h, grammars = (
        harness(executor=FedExecutor, num_scheduler_steps=8),
        [FakeGrammar(V, EOS, 50, i, None, True) for i in (1, 2)],
    )
    sampling = {"max_tokens": 40, "temperature": 1.0, "seed": 7}
    tokens = alone([3, 1], grammars[0], **sampling)
    stop = next(one for one in tokens[2:7] if tokens.index(one) > 1)
    h.submit("a", [3, 1], grammar=grammars[0], stop=[chr(stop)], **sampling)
    h.submit("b", [3, 1], grammar=grammars[1], **sampling)
    while not h.ended("a"):
        h.step()
    assert len(h.tokens("b")) == 12  # of the prompt, a step beside it, eight and two
    h.run()
    assert h.tokens("b") == alone([3, 1], grammars[1], **sampling)


def test_rows_with_little_choice_jump_instead():
    h = harness(executor=SeveralStepsExecutor, num_scheduler_steps=8)
    h.submit("a", [3, 1], grammar=FakeGrammar(V, EOS, 100, salt=3), max_tokens=101)
    h.run()
    assert len(h.tokens("a")) == 101
    assert h.executor.num_steps < 90
    assert h.engine.load().num_forced_tokens > 20


def test_rows_that_are_fed_jump_where_they_have_hardly_a_choice():
    h = harness(executor=FedExecutor, num_scheduler_steps=8)
    given = tuple(number % 50 for number in range(99))
    thinking = ThinkingGrammar(ThinkingBudget((), given, 1, is_open_at_start=True))
    h.submit("a", [3, 1], grammar=thinking, max_tokens=100)
    h.run()
    assert tuple(h.tokens("a")[1:]) == given
    assert h.executor.num_steps < 60
    assert h.engine.load().num_forced_tokens > 40


@pytest.mark.parametrize("kind", [SeveralStepsExecutor, FedExecutor])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_grammar_that_takes_too_much_between_steps_ends_its_request_alone(overlap, kind):
    h = harness(overlap=overlap, executor=kind, num_scheduler_steps=8)
    failing, fine = (FakeGrammar(V, EOS, 30, salt=1, fails_after=n, is_free=True) for n in (7, None))
    h.submit("a", [3], grammar=failing, max_tokens=20)
    h.submit("b", [3], grammar=fine, max_tokens=20)
    h.run()
    assert "as configured" in str(h.last("a").error)
    assert h.tokens("a") == h.tokens("b")[:7]
    assert len(h.tokens("b")) == 20


def test_forced_tokens_take_no_step_of_their_own():
    grammar, steps = FakeGrammar(V, EOS, 40, salt=3), {}
    for logprobs in (None, 0):
        h = harness(overlap=False)
        h.submit("a", [1, 2], grammar=grammar, max_tokens=41, logprobs=logprobs)
        h.run()
        steps[logprobs] = h.executor.num_steps
        assert len(h.tokens("a")) == 41
    assert steps[None] + 20 < steps[0] == 41


def test_rows_beside_are_as_without():
    h, plain = harness(), harness()
    for one in (h, plain):
        one.submit("beside", [5, 6, 7], max_tokens=20, temperature=1.0, seed=4)
    h.submit("bound", [5, 6], grammar=FakeGrammar(V, EOS, 12), max_tokens=20)
    h.run()
    plain.run()
    assert h.tokens("beside") == plain.tokens("beside")


def test_several_sequences_go_their_own_ways():
    h, grammar = harness(), FakeGrammar(V, EOS, 12, salt=1)
    h.submit("a", [3, 1], grammar=grammar, max_tokens=13, temperature=1.0, seed=9, n=4)
    h.run()
    answers = [h.tokens("a", index) for index in range(4)]
    assert len({tuple(answer) for answer in answers}) > 1
    for answer in answers:
        state = grammar.start()
        assert all(state.accept(token_id) for token_id in answer[:-1])
        assert answer[-1] == EOS


def test_a_text_that_is_cut_says_so():
    h = harness()
    h.submit("a", [3, 1], grammar=FakeGrammar(V, EOS, 30), max_tokens=7)
    h.run()
    assert len(h.tokens("a")) == 7
    assert h.last("a").finish.reason.value == "length"


def test_nothing_left_between_a_grammar_and_allowed_tokens_ends_that_request_alone():
    h, grammar = harness(), FakeGrammar(V, EOS, 5, salt=2)
    first = grammar.allowed_after([])
    h.submit("a", [3], grammar=grammar, max_tokens=9, allowed_token_ids=[t for t in range(V) if t not in first])
    h.submit("b", [3], max_tokens=9)
    h.run()
    error = h.last("a").error
    assert isinstance(error, InvalidArgument)
    assert "sampling.allowed_token_ids: leaves no token that the grammar allows as output token 1" in str(error)
    assert len(h.tokens("b")) == 9


def test_nothing_left_between_a_grammar_and_bad_words_is_said():
    grammars = (FakeGrammar(V, EOS, 9, salt=salt) for salt in range(1000))
    grammar = next(one for one in grammars if all(33 <= token_id < EOS for token_id in one.allowed_after([])))
    h = harness()
    h.submit("a", [3], grammar=grammar, max_tokens=9, bad_words=[chr(one) for one in grammar.allowed_after([])])
    h.run()
    error = h.last("a").error
    assert isinstance(error, InvalidArgument)
    assert "sampling.bad_words: leaves no token that the grammar allows as output token 1" in str(error)


def test_a_text_shorter_than_min_tokens_ends_when_those_are_there():
    h = harness()
    h.submit("a", [3], grammar=FakeGrammar(V, EOS, 4), max_tokens=12, min_tokens=8)
    h.run()
    assert h.tokens("a")[4:] == [EOS] * (len(h.tokens("a")) - 4)
    assert len(h.tokens("a")) >= 8
    assert h.last("a").finish.reason.value == "stop"


def test_a_grammar_that_takes_too_much_ends_its_request_with_why():
    h = harness()
    h.submit("a", [3], grammar=FakeGrammar(V, EOS, 30, fails_after=4), max_tokens=20)
    h.submit("b", [3], max_tokens=20)
    h.run()
    assert "structured_outputs: the grammar exceeds the limit of a step: as configured" in str(h.last("a").error)
    assert len(h.tokens("b")) == 20


@dataclass(slots=True)
class RefusingState(FakeGrammarState):
    """Refuses its second token, because it takes too much."""

    def accept(self, token_id: int) -> bool:
        if self.token_ids:
            self.failure = "too many states"
            return False
        return FakeGrammarState.accept(self, token_id)


@dataclass(frozen=True, slots=True)
class Refusing(FakeGrammar):
    def start(self) -> FakeGrammarState:
        return RefusingState(self)


@pytest.mark.parametrize("way", [{"overlap": False}, {"executor": FedExecutor, "num_scheduler_steps": 4}])
def test_a_token_that_a_grammar_fails_to_accept_ends_its_request_with_why(way):
    h = harness(**way)
    h.submit("a", [3], grammar=Refusing(V, EOS, 30, is_free=True), max_tokens=20)
    h.submit("b", [3], max_tokens=9)
    h.run()
    assert "the grammar exceeds the limit of a step: too many states" in str(h.last("a").error)
    assert len(h.tokens("b")) == 9


@dataclass(frozen=True, slots=True)
class FirstStartFails(FakeGrammar):
    """The state of the first sample fails after its first token; each token after the first is forced."""

    starts: list[FakeGrammarState] = field(default_factory=list)

    def start(self) -> FakeGrammarState:
        fails_after = None if self.starts else 1
        self.starts.append(FakeGrammarState(replace(self, fails_after=fails_after)))
        return self.starts[-1]

    def allowed_after(self, token_ids: list[int]) -> list[int]:
        return FakeGrammar.allowed_after(self, token_ids)[: 1 if token_ids else None]


def test_a_sample_with_a_forced_token_ends_with_the_sample_that_fails_their_request():
    h = harness()
    grammar = FirstStartFails(V, EOS, 12, is_free=True)
    h.submit("a", [3, 1], grammar=grammar, max_tokens=13, n=2)
    h.submit("b", [3], max_tokens=9)
    h.run()
    assert "as configured" in str(h.last("a").error)
    assert [len(h.tokens("a", index)) for index in range(2)] == [1, 1]
    assert h.engine.load().num_forced_tokens == 0
    assert len(h.tokens("b")) == 9


def test_beams_and_grammars_are_not_asked_for_together():
    with pytest.raises(InvalidArgument, match="structured_outputs"):
        harness().submit("a", [3], grammar=FakeGrammar(V, EOS, 30), beam_width=2)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thinking_ends_when_its_budget_is_used_up(budget, overlap):
    h, plain, closes = harness(overlap=overlap), harness(overlap=overlap), (50, 51, 52)
    thinking = ThinkingGrammar(ThinkingBudget((), closes, budget, is_open_at_start=True))
    h.submit("a", [5, 6], max_tokens=12, temperature=1.0, seed=3, grammar=thinking)
    plain.submit("a", [5, 6], max_tokens=12, temperature=1.0, seed=3)
    h.run()
    plain.run()
    tokens = h.tokens("a")
    assert tokens[:budget] == plain.tokens("a")[:budget]
    assert tuple(tokens[budget : budget + 3]) == closes
    assert len(tokens) == 12
    assert h.engine.load().num_forced_tokens == (3 if budget else 2)  # the first is sampled with the prompt


def test_a_loop_that_fails_between_steps_that_are_fed_leaves_no_program_waiting(monkeypatch):
    h, feeds = harness(executor=FedExecutor, num_scheduler_steps=8), []
    decode_fed = h.executor.decode_with_masks

    def noted(*step):
        feeds.append(decode_fed(*step)[1])
        return feeds[-1], feeds[-1]

    monkeypatch.setattr(h.executor, "decode_with_masks", noted)
    h.submit("a", [3, 1], grammar=FakeGrammar(V, EOS, 30, is_free=True), max_tokens=30)
    h.step()

    def fill(*_):
        raise RuntimeError("no masks any more")

    monkeypatch.setattr(StructuredOutputManager, "fill", fill)
    with pytest.raises(RuntimeError, match="no masks any more"):
        h.run()
    assert [feed.is_over for feed in feeds] == [True]
