"""Texts of the demo model that follow a grammar: they parse and validate, whatever the model would rather say."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest

from jpaged import LLM, SamplingParams
from jpaged.errors import InvalidArgument
from jpaged.structured import StructuredOutputs
from jpaged.types import RequestOutput
from tests.service.structured_output.schemas import random_schema, with_definitions

HOT = SamplingParams(max_tokens=96, temperature=1.5)
PROMPT = "Once upon a time"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "color": {"enum": ["red", "green", "blue"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "color", "age"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, StructuredOutputs] = {
    "json": StructuredOutputs(json=PERSON),
    "regex": StructuredOutputs(regex=r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){1,2}"),
    "choice": StructuredOutputs(choice=["once upon a time", "never"]),
    "grammar": StructuredOutputs(grammar='root ::= "begin " x " end"\nx ::= "(" x ")" | "middle"'),
    "json_object": StructuredOutputs(json_object=True),
    "structural_tag": StructuredOutputs(
        structural_tag={"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}
    ),
}


PATTERN = re.compile(str(CONSTRAINTS["regex"].regex))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_num_seqs=16, max_num_batched_tokens=64, max_model_len=384) as llm:
        yield llm


def bound(outputs: StructuredOutputs, seed: int, **changes: Any) -> SamplingParams:
    return dataclasses.replace(HOT, structured_outputs=outputs, seed=seed, **changes)


def texts_of(outputs: Sequence[RequestOutput]) -> list[tuple[str, str | None]]:
    return [(one.outputs[0].text, one.outputs[0].finish_reason) for one in outputs]


def check_schemas(llm: LLM, seeds: range) -> None:
    """What ends by itself is JSON that its schema allows, at a temperature at which the model would say anything."""
    schemas = [with_definitions(random_schema(seed)) for seed in seeds]
    outputs = [StructuredOutputs(json=schema, disable_any_whitespace=True) for schema in schemas]
    params = [bound(one, seed, max_tokens=256) for seed, one in zip(seeds, outputs, strict=True)]
    num_whole = 0
    for schema, (text, reason) in zip(schemas, texts_of(llm.generate([PROMPT] * len(params), params)), strict=True):
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
            num_whole += 1
    assert num_whole > len(schemas) // 2


@pytest.mark.long
def test_whitespace_is_the_servers_where_a_request_names_none() -> None:
    with LLM("demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=384, whitespace_pattern="[ ]{2}") as llm:
        own = dataclasses.replace(CONSTRAINTS["json"], whitespace_pattern="[ ]{3}")
        params = [bound(CONSTRAINTS["json"], 1), bound(own, 1)]
        (text, _), (other, _) = texts_of(llm.generate([PROMPT] * 2, params))
    assert text.startswith('{  "name"')
    assert other.startswith('{   "name"')


@pytest.mark.long
def test_random_schemas_are_kept(llm: LLM) -> None:
    check_schemas(llm, range(24))


@pytest.mark.long
def test_two_hundred_schemas_are_kept(llm: LLM) -> None:
    check_schemas(llm, range(1000, 1200))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_every_kind_of_constraint_is_kept(llm: LLM, kind: str) -> None:
    outputs = dataclasses.replace(CONSTRAINTS[kind], always_complete=kind != "structural_tag")
    for text, finish_reason in texts_of(llm.generate([PROMPT] * 6, [bound(outputs, seed) for seed in range(6)])):
        if kind == "regex":
            assert PATTERN.fullmatch(text)
        elif kind == "choice":
            assert text in ("once upon a time", "never")
        elif kind == "grammar":
            assert re.fullmatch(r"begin \(*middle\)* end", text)
            assert text.count("(") == text.count(")")
        elif kind == "structural_tag":
            for inner in re.findall("<f>(.*?)</f>", text, re.DOTALL):
                jsonschema.validate(json.loads(inner), PERSON)
            assert finish_reason in ("stop", "length")
        else:
            assert isinstance(json.loads(text), dict)


@pytest.mark.long
def test_texts_are_the_same_alone_and_in_any_batch(llm: LLM) -> None:
    params = [bound(CONSTRAINTS[kind], seed) for seed in range(2) for kind in CONSTRAINTS]
    plain = [dataclasses.replace(HOT, seed=seed) for seed in range(4)]
    together = llm.generate([PROMPT] * (len(params) + len(plain)), [*params, *plain])
    for one, batched in zip([*params, *plain], together, strict=True):
        alone = llm.generate(PROMPT, one)[0]
        assert alone.outputs[0].token_ids == batched.outputs[0].token_ids


@pytest.mark.long
def test_forced_tokens_are_those_that_would_have_been_sampled(llm: LLM) -> None:
    params = [bound(CONSTRAINTS[kind], seed, max_tokens=40) for seed in range(3) for kind in CONSTRAINTS]
    before = llm.load().num_forced_tokens
    jumped = llm.generate([PROMPT] * len(params), params)
    num_forced = llm.load().num_forced_tokens - before
    each = [dataclasses.replace(one, logprobs=0) for one in params]  # whose every token is sampled
    sampled = llm.generate([PROMPT] * len(params), each)
    assert [one.outputs[0].token_ids for one in jumped] == [one.outputs[0].token_ids for one in sampled]
    assert num_forced > 0
    assert llm.load().num_forced_tokens - before == num_forced


def test_what_is_cut_says_length(llm: LLM) -> None:
    outputs = StructuredOutputs(json=PERSON)
    cut = llm.generate(PROMPT, bound(outputs, 1, max_tokens=5))[0].outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (StructuredOutputs(json={"type": "objekt"}), r"structured_outputs\.json"),
        (StructuredOutputs(regex="("), r"structured_outputs\.regex"),
        (StructuredOutputs(grammar="root ::= missing"), r"structured_outputs\.grammar"),
        (StructuredOutputs(json=PERSON, always_complete=True), r"max_tokens: 3 is out of range"),
    ],
)
def test_what_is_no_grammar_is_refused_by_field(llm: LLM, outputs: StructuredOutputs, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        llm.generate(PROMPT, bound(outputs, 1, max_tokens=3))


def test_a_request_that_its_masks_leave_nothing_fails_alone(llm: LLM) -> None:
    encode = llm._serving.input_processor.tokenizer.encode
    forms = ((letter, encode(f"x{letter}", add_special_tokens=False)[-1]) for letter in "qzjwvk")
    letter, token_id = next(
        form for form in forms if encode(f"{form[0]}{form[0]}", add_special_tokens=False) == [form[1], form[1]]
    )
    choice = StructuredOutputs(choice=["once upon a time", "never"])
    first_ids = encode("once upon a time", add_special_tokens=False)[:1]
    base = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    params = [
        base,
        dataclasses.replace(base, allowed_token_ids=[token_id], bad_words=[letter * 2]),
        dataclasses.replace(base, allowed_token_ids=first_ids, structured_outputs=choice),
        base,
    ]
    before = llm.load().num_nonfinite_requests
    outputs = llm.generate([PROMPT] * 4, params)
    alone = llm.generate(PROMPT, base)[0].outputs[0].token_ids
    assert [one.outputs[0].token_ids for one in (outputs[0], outputs[3])] == [alone, alone]
    for output, field in zip(outputs[1:3], ("bad_words", "allowed_token_ids"), strict=True):
        assert output.outputs == ()
        assert isinstance(output.error, InvalidArgument)
        assert output.error.field == field
        assert "output token 2" in output.error.problem
    with pytest.raises(InvalidArgument, match=r"^bad_words: forbid every token"):
        llm.generate(PROMPT, params[1])
    never = dataclasses.replace(base, allowed_token_ids=[token_id], structured_outputs=choice)
    with pytest.raises(InvalidArgument, match=r"^allowed_token_ids: leaves no token .* as output token 1"):
        llm.generate([PROMPT, PROMPT], [base, never])
    assert llm.load().num_nonfinite_requests == before
