"""A constraint says what is wrong with it, by field, before any library sees it."""

import subprocess
import sys

import pytest

from jpaged.errors import InvalidArgument
from jpaged.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES, ConstraintKind, StructuredOutputs


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json": {"type": "integer"}}, ConstraintKind.JSON),
        ({"json": True}, ConstraintKind.JSON),
        ({"json": False}, ConstraintKind.JSON),
        ({"regex": "a"}, ConstraintKind.REGEX),
        ({"choice": ["a"], "json_object": False}, ConstraintKind.CHOICE),
        ({"grammar": "start: A"}, ConstraintKind.GRAMMAR),
        ({"json_object": True}, ConstraintKind.JSON_OBJECT),
        ({"structural_tag": "{}"}, ConstraintKind.STRUCTURAL_TAG),
    ],
)
def test_one_constraint_is_one_kind(fields, kind):
    assert StructuredOutputs(**fields).kind is kind


def test_values_become_text_that_keeps_their_order():
    outputs = StructuredOutputs(json={"properties": {"b": {"const": "é"}, "a": {}}})
    assert outputs.json == '{"properties":{"b":{"const":"é"},"a":{}}}'
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")
    assert hash(outputs) == hash(StructuredOutputs(json=outputs.json))


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({}, "sampling.structured_outputs", "has none: must have exactly one of json, regex"),
        ({"json_object": False}, "sampling.structured_outputs", "has none"),
        ({"json": "{}", "regex": "a"}, "sampling.structured_outputs", "has json and regex"),
        ({"json": {"a": {1, 2}}}, "sampling.structured_outputs.json", "is not JSON"),
        ({"regex": ""}, "sampling.structured_outputs.regex", "is empty"),
        ({"regex": 7}, "sampling.structured_outputs.regex", "must be a string, not int"),
        (
            {"grammar": "a" * (MAX_GRAMMAR_BYTES + 1)},
            "sampling.structured_outputs.grammar",
            f"limit of {MAX_GRAMMAR_BYTES}",
        ),
        ({"regex": "\ud800"}, "sampling.structured_outputs.regex", "is not UTF-8"),
        ({"choice": []}, "sampling.structured_outputs.choice", "list of 1 to"),
        ({"choice": "ab"}, "sampling.structured_outputs.choice", "str: must be a list"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "sampling.structured_outputs.choice", "4097 strings"),
        ({"choice": ["a", ""]}, "sampling.structured_outputs.choice[1]", "non-empty"),
        ({"choice": ["a" * (MAX_GRAMMAR_BYTES // 2 + 1)] * 2}, "sampling.structured_outputs.choice", "bytes in all"),
        ({"json_object": 1}, "sampling.structured_outputs.json_object", "true or false"),
        ({"regex": "a", "always_complete": "yes"}, "sampling.structured_outputs.always_complete", "true or false"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "sampling.structured_outputs.whitespace_pattern",
            "not to regex",
        ),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "sampling.structured_outputs.disable_any_whitespace",
            "not to regex",
        ),
        (
            {"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True},
            "sampling.structured_outputs.whitespace_pattern",
            "left out",
        ),
        (
            {"json": "{}", "whitespace_pattern": " " * 1025},
            "sampling.structured_outputs.whitespace_pattern",
            "limit of 1024",
        ),
    ],
)
def test_what_is_wrong_is_named(fields, field, problem):
    with pytest.raises(InvalidArgument) as caught:
        StructuredOutputs(**fields)
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_options_alone_are_those_of_another_constraint():
    options = StructuredOutputs(whitespace_pattern=" ?", disable_additional_properties=True)
    assert not options.has_constraint
    tag = StructuredOutputs(structural_tag="{}")
    assert tag.with_options(None) is tag
    held = tag.with_options(options)
    assert (held.kind, held.whitespace_pattern) == (ConstraintKind.STRUCTURAL_TAG, " ?")
    assert held.disable_additional_properties
    with pytest.raises(InvalidArgument, match="has regex: must have only options"):
        tag.with_options(StructuredOutputs(regex="a"))


def test_a_value_of_nothing_but_depth_is_refused():
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidArgument, match=r"sampling.structured_outputs.json: is nested too deep"):
        StructuredOutputs(json={"enum": value})


def test_constraints_need_no_library():
    program = (
        "import sys; sys.modules['llguidance'] = None; import jpaged.structured as s; s.StructuredOutputs(regex='a')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
