"""Structural tags accept what xgrammar accepts of them, as tried with its version 0.2.8, and name what they refuse."""

import pytest

from jpaged.errors import InvalidArgument
from jpaged.service.structured_output.compiler import compile_now
from jpaged.structured import StructuredOutputs
from tests.service.structured_output.texts import accepts

DIGITS = {"type": "regex", "pattern": "[0-9]+"}
HI = {"type": "const_string", "value": "hi"}
CALL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = [tag("<f=a>", DIGITS, "</f>"), tag("<f=b>", HI, "</f>")]
A, B = "<f=a>1</f>", "<f=b>hi</f>"


def triggered(**options):
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, **options}


def separated(**options):
    return {"type": "tags_with_separator", "tags": TAGS, "separator": ",", **options}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def compiled(compiler, form, **options):
    value = {"type": "structural_tag", "format": form} if "structures" not in form else form
    return compile_now(compiler, StructuredOutputs(structural_tag=value, **options))


ALL = {"at_least_one": True, "stop_after_first": True}
TEXTS = ["", "text", A, f"t{A}", f"t{A}u", f"{A}u{B}", f"{A}{B}"]
LISTS = ["", A, f"{A},{B}", f"x{A}"]


@pytest.mark.parametrize(
    ("form", "texts", "expected"),
    [
        (triggered(), TEXTS, "1111111"),
        (triggered(stop_after_first=True), TEXTS, "1111000"),
        (triggered(at_least_one=True), TEXTS, "0010011"),
        (triggered(**ALL), TEXTS, "0010000"),
        (triggered(), ["<f=", "<f=c>", "<f=a>x</f>", "<f"], "0001"),
        (separated(), LISTS, "1110"),
        (separated(stop_after_first=True), LISTS, "1100"),
        (separated(at_least_one=True), LISTS, "0110"),
        (separated(**ALL), LISTS, "0100"),
        (tag("<t>", {"type": "any_text"}, "</t>"), ["<t></t>", "<t>x</t>", "<t>x</t></t>", "<t>x</t>y"], "1100"),
        (tag("<t>", {"type": "any_text"}, ["</t>", "</u>"]), ["<t></u>", "<t>x</t>", "<t>x</u></t>"], "110"),
        (tag("<t>", triggered(), "</t>"), ["<t></t>", f"<t>x{A}y</t>", "<t>x</t>y", "<t><f=c></t>"], "1100"),
        (tag("<t>", DIGITS, ["!", ""]), ["<t>1", "<t>1!", "<t>"], "110"),
        ({"type": "any_text"}, ["a\nb", ""], "11"),
        (HI, ["hi", "h", "hi "], "100"),
        (sequence(HI, DIGITS, {"type": "any_text"}), ["hi1", "hi2 and more", "hi"], "110"),
        ({"type": "or", "elements": [HI, DIGITS]}, ["hi", "12", "hi12"], "110"),
        ({"type": "optional", "content": HI}, ["", "hi", "hihi"], "110"),
        ({"type": "plus", "content": HI}, ["", "hi", "hihi"], "011"),
        ({"type": "star", "content": HI}, ["", "hi", "hihi"], "111"),
        ({"type": "repeat", "content": HI, "min": 1, "max": 2}, ["", "hi", "hihi", "hihihi"], "0110"),
        ({"type": "repeat", "content": HI, "min": 1, "max": -1}, ["", "hi", "hihihi"], "011"),
        ({"type": "json_schema", "json_schema": CALL}, ['{"a":1}', '{"a": 1}', "{}"], "110"),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))", "(x"], "10"),
        (sequence({"type": "regex", "pattern": "a/b"}, HI), ["a/bhi"], "1"),
        (
            {
                "structures": [
                    {"begin": "<f>", "schema": CALL, "end": "</f>"},
                    {"begin": "<g", "schema": {}, "end": ""},
                ],
                "triggers": ["<f", "<g"],
            },
            ["text", 'a<f>{"a":1}</f>b<g[1]', "<f>{}</f>", "<fo"],
            "1100",
        ),
    ],
)
def test_texts_are_those_of_the_tag(compiler, form, texts, expected):
    grammar = compiled(compiler, form)
    assert [accepts(grammar, text) for text in texts] == [letter == "1" for letter in expected]


def test_options_of_json_hold_in_tags(compiler):
    grammar = compiled(
        compiler, tag("<t>", {"type": "json_schema", "json_schema": CALL}, ""), disable_any_whitespace=True
    )
    assert accepts(grammar, '<t>{"a":1}')
    assert not accepts(grammar, '<t>{"a": 1}')


def test_a_special_token_is_named_by_its_text_or_id(compiler):
    for token in ("<|user|>", 3):
        grammar = compiled(compiler, sequence({"type": "token", "token": token}, HI))
        state = grammar.start()
        assert state.accept(3)
        assert state.forced(9)


@pytest.mark.parametrize(
    ("form", "place", "problem"),
    [
        ({"type": "dispatch", "rules": []}, "/format", "'dispatch' is not supported"),
        ({"value": "x"}, "/format", "must be an object with a type"),
        ({"type": "const_string"}, "/format", "has no value"),
        ({"type": "const_string", "value": ""}, "/format/value", "non-empty"),
        ({"type": "any_text", "max_tokens": 5}, "/format/max_tokens", "is not supported"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "/format/style", "must be 'json'"),
        (
            {"type": "json_schema", "json_schema": {"items": {"not": {}}}},
            "/format/json_schema/items",
            'supported: "not"',
        ),
        ({"type": "grammar", "grammar": "root ::= x"}, "/format/grammar", "line 1, column 10: there is no rule"),
        (sequence({"type": "any_text"}, HI), "/format/elements/0", "any_text has no end"),
        ({"type": "or", "elements": [{"type": "any_text"}]}, "/format/elements/0", "has no end"),
        ({"type": "or", "elements": []}, "/format/elements", "a non-empty list"),
        ({"type": "repeat", "content": HI, "min": 3, "max": 2}, "/format", "0 <= min <= max"),
        (tag("<t>", {"type": "any_text"}, ""), "/format/end", "must not be empty"),
        (triggered(triggers=["<g"]), "/format/tags/0/begin", "exactly one of the triggers"),
        (triggered(triggers=["<", "<f"]), "/format/tags/0/begin", "exactly one of the triggers"),
        (triggered(excludes=["x"]), "/format/excludes", "is not supported"),
        (triggered(at_least_one=1), "/format/at_least_one", "true or false"),
        ({"type": "token", "token": "user"}, "/format/token", "special token in <>"),
        ({"structures": [{"begin": "<f>", "end": ""}], "triggers": ["<f"]}, "/structures/0", "has no schema"),
        (
            {"structures": [{"begin": "<f>", "schema": {"type": "x"}, "end": ""}], "triggers": ["<f"]},
            "/structures/0/schema",
            "Invalid type: x",
        ),
    ],
)
def test_what_is_refused_is_named_with_its_place(compiler, form, place, problem):
    with pytest.raises(InvalidArgument) as caught:
        compiled(compiler, form)
    assert caught.value.field == "sampling.structured_outputs.structural_tag"
    assert caught.value.problem.startswith(f"at {place}: ")
    assert problem in caught.value.problem
