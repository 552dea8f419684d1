"""What the engine relies on: jumps change no token, proposals are told, copies of a state go their own way."""

from typing import Any

import numpy as np
import pytest

from jpaged.service.structured_output.compiler import GrammarCompiler, LlguidanceMasks, compile_now
from jpaged.structured import StructuredOutputs, ThinkingBudget, ThinkingGrammar
from jpaged.structured.grammar import Grammar, GrammarMasks, GrammarState
from tests.service.structured_output.schemas import random_schema, with_definitions
from tests.service.structured_output.texts import (
    EOS,
    VOCAB_SIZE,
    allowed,
    generate,
    packaged_tokenizer,
    packaged_vocabulary,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "color": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "color"],
    "additionalProperties": False,
}
FORCING: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": r"the (little|large) (dog|cat) said: [a-z ]{0,9}\."},
    {"choice": ["once upon a time", "once upon a hill", "never"]},
    {"grammar": 'root ::= "begin " x " end"\nx ::= "(" x ")" | "middle"'},
    {"structural_tag": {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}},
]


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(packaged_vocabulary())
    yield compiler
    compiler.close()


def grammar_of(compiler, **fields) -> Grammar:
    return compile_now(compiler, StructuredOutputs(**fields))


def ids(text):
    return packaged_tokenizer().encode(text)


def assert_jumps_change_no_token(grammar, rng):
    """Walk a token at a time, and hold every jump against the masks that the walk sees."""
    state, num_jumped = grammar.start(), 0
    promised: list[int] = []
    for _ in range(80):
        choices = allowed(state)
        if not promised:
            promised = state.forced(100)
            assert state.forced(2) == promised[:2]
            num_jumped += len(promised)
        if promised:
            assert choices == promised[:1]
        assert EOS not in promised
        token_id = int(rng.choice(choices))
        if token_id == EOS:
            break
        assert state.accept(token_id)
        promised = promised[1:]
    return num_jumped


@pytest.mark.parametrize("fields", FORCING)
def test_a_jump_is_what_masks_leave_step_by_step(compiler, fields):
    grammar = grammar_of(compiler, **fields)
    num_jumped = [assert_jumps_change_no_token(grammar, np.random.default_rng(seed)) for seed in range(6)]
    assert "structural_tag" in fields or sum(num_jumped) > 10


def test_a_jump_is_what_masks_leave_for_random_schemas(compiler):
    for seed in range(20):
        schema = with_definitions(random_schema(seed))
        grammar = grammar_of(compiler, json=schema, disable_any_whitespace=seed % 2 == 0)
        assert_jumps_change_no_token(grammar, np.random.default_rng(seed))


def test_a_token_that_may_not_come_moves_nothing(compiler):
    state = grammar_of(compiler, choice=["ab", "ac"]).start()
    before = allowed(state)
    assert not state.accept(ids("z")[0])
    assert not state.accept(EOS)
    assert (allowed(state), state.failure) == (before, None)
    assert state.accept(ids("a")[0])
    assert set(allowed(state)) == {ids("b")[0], ids("c")[0]}


def test_a_text_may_end_where_it_is_complete_and_has_to_where_nothing_follows(compiler):
    state = grammar_of(compiler, regex="ab?").start()
    assert (state.is_complete, state.has_ended) == (False, False)
    state.accept(ids("a")[0])
    assert (state.is_complete, state.has_ended) == (True, False)
    assert EOS in allowed(state)
    state.accept(ids("b")[0])
    assert (state.is_complete, state.has_ended, allowed(state), state.forced(9)) == (True, True, [EOS], [])
    assert not state.accept(ids("b")[0])
    assert state.accept(EOS)
    assert (state.is_complete, state.has_ended, allowed(state)) == (True, True, [EOS])


def test_an_end_where_the_text_could_go_on_is_the_end(compiler):
    state = grammar_of(compiler, regex="a*").start()
    assert state.accept(EOS)
    assert (state.has_ended, allowed(state)) == (True, [EOS])


def test_a_proposal_is_told_up_to_the_first_token_that_may_not_come(compiler):
    state = grammar_of(compiler, json=PERSON, disable_any_whitespace=True).start()
    good = ids('{"name":"Tim","color":"red"}')
    assert state.num_accepted(good) == len(good)
    assert state.num_accepted([*good, EOS]) == len(good) + 1
    assert state.num_accepted([*good, EOS, good[0]]) == len(good) + 1
    assert state.num_accepted([*good[:5], EOS, *good[5:]]) == 5
    assert state.num_accepted([good[1]]) == 0
    assert state.num_accepted([]) == 0
    assert all(state.accept(token_id) for token_id in good)
    assert state.num_accepted([EOS, good[0]]) == 1


def test_a_proposal_is_told_as_steps_would_tell_it(compiler):
    rng = np.random.default_rng(0)
    grammar = grammar_of(compiler, json=PERSON)
    for _ in range(20):
        proposal = generate(grammar.start(), rng, 30)
        proposal[int(rng.integers(len(proposal)))] = int(rng.integers(1, VOCAB_SIZE))
        state = grammar.start()
        told = state.num_accepted(proposal)
        num_stepped = next((i for i, token_id in enumerate(proposal) if not state.accept(token_id)), len(proposal))
        assert told == num_stepped


def test_copies_go_their_own_way(compiler):
    grammar = grammar_of(compiler, regex="[0-9]{3}")
    first = grammar.start()
    first.accept(ids("1")[0])
    second = first.copy()
    assert all(first.accept(token_id) for token_id in ids("23"[0]) + ids("3"))
    assert first.has_ended
    assert not second.has_ended
    assert second.num_accepted(ids("2") + ids("3") + ids("4")) == 2
    assert not grammar.start().is_complete


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_of_a_batch_are_those_of_its_rows(compiler, num_threads):
    masks: GrammarMasks = LlguidanceMasks(packaged_vocabulary().num_words, num_threads)
    states = [grammar_of(compiler, **fields).start() for fields in FORCING]
    states[0].accept(ids("{")[0])
    closing = grammar_of(compiler, regex="[a-z]*").start()
    closing.closing(0)
    thinking = ThinkingGrammar(ThinkingBudget((), (50, 51), 0, is_open_at_start=True)).start()
    rows: list[GrammarState | None] = [states[0], None, *states[1:], None, closing, thinking]
    mask_rw = np.full((len(rows), masks.num_words), 7, np.int32)
    masks.fill(rows, mask_rw)
    for row, state in enumerate(rows):
        expected = list(range(VOCAB_SIZE)) if state is None else allowed(state)
        flags = [mask_rw[row, token_id // 32] >> (token_id % 32) & 1 for token_id in range(VOCAB_SIZE)]
        assert np.flatnonzero(flags).tolist() == expected
    strided_rw = np.zeros((len(rows), 2 * masks.num_words), np.int32)[:, ::2]
    masks.fill(rows, strided_rw)
    assert (strided_rw == mask_rw).all()
    masks.fill([None], mask_rw[:1])


@pytest.mark.parametrize("is_closing", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_go_several_steps_together_go_as_each_would_by_itself(compiler, seed, is_closing):
    """At random through grammars of several kinds, to their ends and beyond; other rows keep their masks."""
    rng, masks = np.random.default_rng(seed), LlguidanceMasks(packaged_vocabulary().num_words)
    together = [grammar_of(compiler, **fields).start() for fields in FORCING]
    if is_closing:
        together[2].closing(12)
    singly, rows = [state.copy() for state in together], [3, 0, 1, 7, 5, 2]
    batch, mask_rw = masks.batch(together, rows), np.full((8, masks.num_words), 7, np.int32)
    for _ in range(40):
        assert batch.fill(mask_rw)
        token_ids = []
        for row, state in zip(rows, singly, strict=True):
            expected_w = np.zeros(masks.num_words, np.int32)
            state.fill(expected_w)
            assert (mask_rw[row] == expected_w).all()
            token_ids.append(int(rng.choice(allowed(state))))
        assert (mask_rw[[4, 6]] == 7).all()
        assert batch.accept(token_ids) == []
        assert all(state.accept(token_id) for state, token_id in zip(singly, token_ids, strict=True))
    assert any(state.has_ended for state in together)


def test_rows_whose_token_may_not_come_are_named(compiler):
    states = [grammar_of(compiler, regex="[0-9]{3}").start() for _ in range(3)]
    masks = LlguidanceMasks(packaged_vocabulary().num_words)
    batch = masks.batch(states, range(3))
    assert batch.accept([ids("1")[0], ids("x")[0], ids("2")[0]]) == [1]
    assert states[1].failure is not None
    assert not batch.fill(np.zeros((3, masks.num_words), np.int32))
