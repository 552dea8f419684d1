"""A text that has to be complete is so whatever is sampled, with few tokens, or is refused when it comes."""

import json

import jsonschema
import numpy as np
import pytest

from jpaged.errors import InvalidArgument
from jpaged.service.structured_output.budgeted_completion import BRIEF, Effort, find_completion
from jpaged.service.structured_output.compiler import compile_now
from jpaged.structured import StructuredOutputs
from tests.service.structured_output.schemas import random_schema, with_definitions
from tests.service.structured_output.texts import EOS, allowed, generate, packaged_tokenizer

EXTRA_TOKENS = (0, 1, 3, 10, 60)
EXPRESSION = 'root ::= term (("+" | "*") term)*\nterm ::= [0-9]+ | "(" root ")" | "f(" root ("," root){2} ")"'


def complete(compiler, **fields):
    return compile_now(compiler, StructuredOutputs(**fields, always_complete=True))


def texts_of(grammar, seed):
    """Texts of tokens chosen evenly from masks, with tokens enough for the shortest, and a few more."""
    needed = len(grammar.endings.shortest)
    for extra in EXTRA_TOKENS:
        state = grammar.start()
        state.closing(needed + extra)
        token_ids = generate(state, np.random.default_rng([seed, extra]), needed + extra)
        assert state.is_complete, (seed, extra)
        if len(token_ids) == needed + extra:
            assert allowed(state) == [EOS]
        yield packaged_tokenizer().decode(token_ids)


def assert_schemas_are_met(compiler, seeds):
    for seed in seeds:
        schema = with_definitions(random_schema(seed))
        grammar = complete(compiler, json=schema, disable_any_whitespace=seed % 2 == 1)
        for text in texts_of(grammar, seed):
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.long
def test_random_schemas_are_met_with_hardly_enough_tokens(compiler):
    assert_schemas_are_met(compiler, range(45, 49))


@pytest.mark.parametrize("seed", [508, pytest.param(610, marks=pytest.mark.long)])
def test_lists_whose_items_hold_texts_are_met(compiler, seed):
    assert_schemas_are_met(compiler, [seed])


@pytest.mark.long
def test_two_hundred_random_schemas_are_met_with_hardly_enough_tokens(compiler):
    assert_schemas_are_met(compiler, [*range(200), 755])


@pytest.mark.parametrize(
    "fields",
    [
        {"json_object": True},
        {"json": True},
        {"regex": r"(\d{3}-){2,5}[a-z ]{4,40}"},
        {"choice": ["a", "a long text of many words", "b"]},
        {"grammar": EXPRESSION},
        {"grammar": 'start: (WORD | call)*\ncall: "<" call ">" | /[0-9]{9}/\nWORD: /[a-z]+/'},
        {
            "structural_tag": {
                "structures": [{"begin": "<f>", "schema": {"required": ["a", "b"]}, "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
    ],
)
@pytest.mark.thinned(9)
def test_every_kind_is_complete_with_hardly_enough_tokens(compiler, fields):
    grammar = complete(compiler, **fields)
    for seed in range(4):
        for text in texts_of(grammar, seed):
            state = grammar.start()
            assert all(state.accept(token_id) for token_id in packaged_tokenizer().encode(text))
            assert state.is_complete


def test_a_brief_search_does_not_go_around_in_circles(compiler):
    integers = {"type": "array", "items": {"type": "integer"}, "minItems": 5}
    state = compile_now(compiler, StructuredOutputs(json=integers, disable_any_whitespace=True)).start()
    found = find_completion(state.vocabulary, state.matcher, 200, BRIEF) or ()
    assert json.loads(packaged_tokenizer().decode(found)) == [0] * 5
    assert len(found) <= 12  # a token for each bracket, digit and comma, and one of its own choice


def test_a_search_ends_after_the_states_that_it_may_try(compiler):
    integers = {"type": "array", "items": {"type": "integer"}, "minItems": 5}
    state = compile_now(compiler, StructuredOutputs(json=integers, disable_any_whitespace=True)).start()
    assert find_completion(state.vocabulary, state.matcher, 200, Effort(width=1, num_states=1)) is None


def test_a_choice_that_cannot_be_finished_in_time_is_not_offered(compiler):
    schema = {"anyOf": [{"const": 7}, {"type": "array", "items": {"type": "string"}, "minItems": 30}]}
    grammar = complete(compiler, json=schema, disable_any_whitespace=True)
    state, seven = grammar.start(), packaged_tokenizer().encode("7")
    assert len(allowed(state)) > 1
    state.closing(20)
    assert allowed(state) == seven
    state.closing(400)
    assert len(allowed(state)) > 1


def test_what_is_left_to_come_is_forced_where_no_token_is_to_spare(compiler):
    grammar = complete(compiler, json={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    state = grammar.start()
    shortest = list(grammar.endings.shortest)
    state.closing(len(shortest))
    assert state.forced(100) == shortest
    assert state.forced(2) == shortest[:2]
    assert state.num_accepted([*shortest, EOS]) == len(shortest) + 1
    assert state.num_accepted([shortest[0], *packaged_tokenizer().encode(" ")]) == 1


@pytest.mark.parametrize("extra", EXTRA_TOKENS)
def test_what_may_come_depends_on_the_tokens_alone(compiler, extra):
    for seed in range(8):
        rng = np.random.default_rng([seed, extra])
        grammar = complete(compiler, json=with_definitions(random_schema(seed)))
        asked, taken = grammar.start(), grammar.start()
        num_tokens = len(grammar.endings.shortest) + extra
        for state in (asked, taken):
            state.closing(num_tokens)
        for _ in range(num_tokens):
            choices = allowed(asked)
            if rng.random() < 0.3:
                assert allowed(taken.copy()) == choices
            if (token_id := int(rng.choice(choices))) == EOS:
                break
            assert asked.accept(token_id) and taken.accept(token_id)
        assert asked.is_complete and taken.is_complete


def test_copies_count_by_themselves(compiler):
    state = complete(compiler, regex="[a-z]*").start()
    state.closing(2)
    other = state.copy()
    token_id = packaged_tokenizer().encode("a")[0]
    assert state.accept(token_id) and state.accept(token_id)
    assert allowed(state) == [EOS]
    assert len(allowed(other)) > 100


def test_too_few_tokens_for_any_text_are_refused_with_the_number(compiler):
    grammar = complete(compiler, regex="[a-z]{3}-[0-9]{40}")
    needed = len(grammar.endings.shortest)
    grammar.check_max_tokens(needed)
    with pytest.raises(InvalidArgument, match=f"shortest complete text that was found has {needed} tokens") as caught:
        grammar.check_max_tokens(needed - 1)
    assert caught.value.field == "sampling.max_tokens"
    compile_now(compiler, StructuredOutputs(regex="[a-z]{3}-[0-9]{40}")).check_max_tokens(1)


@pytest.mark.long
def test_a_grammar_without_an_end_in_reach_is_refused(compiler):
    grammar = complete(compiler, regex="a{100000}")
    with pytest.raises(InvalidArgument, match="no complete text of at most 4096 tokens was found"):
        grammar.check_max_tokens(1_000_000)
