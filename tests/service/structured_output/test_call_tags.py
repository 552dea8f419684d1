"""The structural tags of tool calls: a compiled one lets calls through that their parser reads, and no others."""

import json
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from jpaged.chat import ChatAnswer, Tool, ToolChoice, ToolChoiceMode
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.service.chat.markup_parser import ArgumentTypes, argument_types
from jpaged.service.chat.output_config import SpecialTokens, naming_tools, structural_tag_for
from jpaged.service.structured_output.compiler import GrammarCompiler, compile_now
from jpaged.service.structured_output.sources import StructuralTagWriter
from jpaged.service.structured_output.vocabulary import Vocabulary, VocabularySpec
from jpaged.structured import StructuredOutputs
from tests.service.chat.call_samples import WRITERS, Calls
from tests.service.structured_output.texts import EOS, VOCAB_SIZE, accepts, generate, packaged_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", parameters=SCHEMA), Tool("now"))
AUTO, REQUIRED = ToolChoice(ToolChoiceMode.AUTO), ToolChoice(ToolChoiceMode.REQUIRED)
NOW = ToolChoice(ToolChoiceMode.NAMED, "now")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
STRICT = (Tool("weather", parameters=SCHEMA, is_strict=True), Tool("now"))


def compiled(compiler, tools, choice, answer_format, **options):
    tag = structural_tag_for(tools, choice, answer_format, **options)
    return compile_now(compiler, StructuredOutputs(structural_tag=tag))


@pytest.mark.parametrize(
    ("tools", "choice", "options", "texts"),
    [
        (TOOLS, REQUIRED, {}, {CALL: 1, OTHER: 1, f"{CALL}\n{OTHER}": 0, "": 0, f"x{CALL}": 0, WRONG: 0}),
        (
            TOOLS,
            REQUIRED,
            {},
            {f"{CALL}{OTHER}": 1, f"{CALL}\n": 0, f"{CALL}\nSo": 0, f"{CALL}\n\n": 0, f"{CALL} x": 0},
        ),
        (TOOLS, REQUIRED, {"is_parallel": False}, {CALL: 1, f"{CALL}{OTHER}": 0, "": 0}),
        (TOOLS, NOW, {}, {OTHER: 1, CALL: 0, f"{OTHER}{OTHER}": 0}),
        (TOOLS, AUTO, {"is_parallel": False}, {"Hi": 1, f"Hi{CALL}": 1, WRONG: 1, f"{CALL}{OTHER}": 0}),
        (STRICT, AUTO, {}, {"Hi": 1, CALL: 1, f"{CALL}{OTHER}": 1, WRONG: 0}),
    ],
)
def test_a_tag_of_text_accepts_what_was_asked_for(compiler, tools, choice, options, texts):
    grammar = compiled(compiler, tools, choice, AnswerFormat(TOOL_FORMATS["hermes"]), **options)
    assert {text: int(accepts(grammar, text)) for text in texts} == texts


def test_calls_that_must_come_are_written_as_each_family_does(compiler):
    call, wanted = '{"name": "now", "parameters": {}}', dict[str, dict[str, int]]()
    wanted["llama3_json"] = {
        call: 1,
        f"{call}; {call}": 1,
        f"{call};{call}": 1,
        f"{call}\n": 0,
        f"{call}  ": 0,
        f"{call}; x": 0,
    }
    now = '{"name": "now", "arguments": {}}'
    wanted["mistral"] = {f"[TOOL_CALLS] [{now}, {now}]": 1, f"[TOOL_CALLS] [{now}]" * 2: 0}
    wanted["mistral_args"] = {"[TOOL_CALLS]now[ARGS]{}" * 2: 1, "[TOOL_CALLS]now[ARGS]{}x": 0}
    wanted["mistral_args"] |= {"[TOOL_CALLS]now[CALL_ID]Ab3Ab3Ab3[ARGS]{}": 1, "[TOOL_CALLS]now[CALL_ID]Ab3[ARGS]{}": 0}
    for name, texts in wanted.items():
        grammar = compiled(compiler, TOOLS, REQUIRED, AnswerFormat(TOOL_FORMATS[name]))
        assert {text: int(accepts(grammar, text)) for text in texts} == texts


@pytest.mark.parametrize(
    ("is_open", "texts"),
    [
        (True, {f"I must.\n</think>\n\n{CALL}": 1, f"</think>{CALL}": 1, CALL: 0, f"so</think>x{CALL}": 0}),
        (False, {f"<think>\nI must.\n</think>\n\n{CALL}": 1, CALL: 1, f"so</think>{CALL}": 0}),
    ],
)
def test_reasoning_comes_before_a_call_and_is_free(compiler, is_open, texts):
    answer_format = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    grammar = compiled(compiler, TOOLS, REQUIRED, answer_format, is_open=is_open)
    assert {text: int(accepts(grammar, text)) for text in texts} == texts


def with_special_tokens(names):
    """The packaged model's tokenizer with more special tokens, a compiler for it, and those of answers."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    ids: dict[str, int] = {name: tokenizer.encode(name).ids[0] for name in names}
    ending = frozenset({EOS, *(ids[name] for name in names if name == "<|call|>")})
    size = VOCAB_SIZE + len(names)
    vocabulary = Vocabulary(VocabularySpec(tokenizer.to_str(), size, tuple(sorted(ending))))
    return tokenizer, GrammarCompiler(vocabulary), SpecialTokens(ids, ending)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("tools", "choice", "options", "texts"),
    [
        (TOOLS, REQUIRED, {}, {"A": 1, "AB": 1, "": 0, "xA": 0, "W": 0, "Ax": 0, "ABx": 0}),
        (TOOLS, REQUIRED, {"is_parallel": False}, {"B": 1, "AB": 0}),
        (TOOLS, NOW, {}, {"B": 1, "A": 0, "BB": 0}),
        (STRICT, AUTO, {}, {"x": 1, "": 1, "xAB": 1, "A": 1, "W": 0}),
        (TOOLS, AUTO, {"is_parallel": False}, {"xA": 1, "W": 1, "AB": 0, "x": 1}),
    ],
)
@pytest.mark.parametrize("reasoning", [None, "mistral"])
def test_a_tag_of_special_tokens_accepts_what_was_asked_for(tools, choice, options, texts, reasoning):
    tokenizer, compiler, tokens = with_special_tokens(["[TOOL_CALLS]", "[THINK]", "[/THINK]"])
    answer_format = AnswerFormat(TOOL_FORMATS["mistral"], REASONING_FORMATS.get(reasoning or ""))
    parts = {
        "A": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]',
        "B": '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
        "W": '[TOOL_CALLS] [{"name": "weather", "arguments": {}}]',
        "x": "So: ",
    }
    try:
        grammar = compiled(compiler, tools, choice, answer_format, tokens=tokens, **options)
        for thought in ["", "[THINK]Hm.[/THINK]"] if reasoning else [""]:
            found = {}
            for text in texts:
                state = grammar.start()
                written = "".join(parts[one] for one in text).replace("][TOOL_CALLS] [", ", ")
                ids = tokenizer.encode(thought + written).ids
                found[text] = int(all(state.accept(token_id) for token_id in ids) and state.is_complete)
            assert found == texts, thought
    finally:
        compiler.close()


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
GPT_CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps({'city': 'Oslo'})}"
FINAL = "<|channel|>final<|message|>Hello"


@pytest.mark.parametrize(
    ("tools", "choice", "texts"),
    [
        (TOOLS, REQUIRED, {GPT_CALL: 1, ANALYSIS + GPT_CALL: 1, FINAL: 0, ANALYSIS: 0, "Hello": 0}),
        (STRICT, AUTO, {GPT_CALL: 1, ANALYSIS + FINAL: 1, FINAL: 1, GPT_CALL.replace("city", "town"): 0}),
    ],
)
def test_a_tag_of_channels_accepts_what_was_asked_for(tools, choice, texts):
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"]
    tokenizer, compiler, tokens = with_special_tokens(names)
    answer_format = AnswerFormat(TOOL_FORMATS["openai"], REASONING_FORMATS["openai_gptoss"])
    try:
        grammar = compiled(compiler, tools, choice, answer_format, tokens=tokens)
        found = {}
        for text in texts:
            state = grammar.start()
            found[text] = int(all(state.accept(one) for one in tokenizer.encode(text).ids) and state.is_complete)
        assert found == texts
    finally:
        compiler.close()


FULL = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "is_open": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "near": {"$ref": "#/$defs/Near"},
        "zip": {"type": "string", "pattern": "^[0-9]{4}$"},
        "seat": {"type": "string", "pattern": "[0-9]c"},
        "note": {"type": "string", "pattern": "^.+!$"},
        "code": {"type": "string", "maxLength": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Near": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
}
TYPED = (Tool("find", parameters=FULL), Tool("now"))
OSLO, ALL = {"city": "Oslo"}, {"city": "Bø, 東京", "days": 3, "unit": "F", "is_open": True}
ACCEPTED: list[Calls] = [
    [("find", OSLO)],
    [("now", {})],
    [("find", ALL)],
    [("find", {**OSLO, "near": [1.5, -2], "zip": "0150", "seat": "2c"})],
    [("find", {**OSLO, "note": "so!", "code": "abc"}), ("find", {**OSLO, "seat": "2c", "note": "no!"})],
    [("find", OSLO), ("now", {}), ("find", {**OSLO, "unit": "C"})],
]
REFUSED: list[Calls] = [
    [("find", {})],
    [("find", {"city": "Oslo", "days": 10})],
    [("find", {"city": "Oslo", "unit": "K"})],
    [("find", {"city": "Oslo", "zip": "15"})],
    [("find", {"city": "Oslo", "seat": "1d"})],
    [("find", {"city": "Oslo", "code": "abcd"})],
    [("find", {"city": "Oslo", "other": 1})],
    [("other", {})],
]
PYTHON = ("pythonic", "lfm2")
"""Formats whose lists are written with Python's quotes here, and with those of JSON by the grammar."""
ON_THE_WIRE = sorted(WRITERS.keys() - {"openai", "hermes", "llama3_json"})
"""Formats whose grammars are tested with the texts of `call_samples`; the others are tested above."""


@pytest.mark.parametrize("name", ON_THE_WIRE)
def test_forced_calls_are_those_that_the_template_writes(compiler, name):
    answer_format = AnswerFormat(TOOL_FORMATS[name])

    def write(calls):
        return re.sub("(</(?:seed:)?tool_call>)\n", r"\1", WRITERS[name](calls))  # no line breaks between forced calls

    grammar = compiled(compiler, TYPED, REQUIRED, answer_format)
    accepted = [*ACCEPTED, [("find", {**OSLO, "tags": ["a", "b c"]})]] if name not in PYTHON else ACCEPTED
    texts = {write(calls): 1 for calls in accepted} | {write(calls): 0 for calls in REFUSED}
    texts |= {"": 0, "So": 0, f"So {write(ACCEPTED[0])}": 0, f"{write(ACCEPTED[0])} So": 0}
    assert {text: int(accepts(grammar, text)) for text in texts} == texts
    for seed in range(1):
        state, tokenizer = grammar.start(), packaged_tokenizer()
        text = tokenizer.decode(generate(state, np.random.default_rng(seed), 2000))
        parser = answer_format.parser(is_open=False, schemas={"find": FULL, "now": {}})
        answer = ChatAnswer.of(parser.push(text) + parser.finish())
        for call in answer.tool_calls[:-1] if not state.is_complete else answer.tool_calls:
            arguments = json.loads(call.arguments)
            assert call.name in ("find", "now") and ("city" in arguments) == (call.name == "find"), text
            assert arguments.get("days", 1) in range(1, 10) and arguments.get("unit", "C") in ("C", "F"), text
        assert (answer.content, bool(answer.tool_calls)) == ("", True), text


@pytest.mark.parametrize("name", ON_THE_WIRE)
def test_one_call_and_strict_tools_are_constrained_in_each_format(compiler, name):
    answer_format, write = AnswerFormat(TOOL_FORMATS[name]), WRITERS[name]
    now, two = write([("now", {})]), write([("now", {}), ("now", {})])
    grammar = compiled(compiler, TYPED, NOW, answer_format)
    assert [accepts(grammar, text) for text in (now, two, write([("find", OSLO)]), "")] == [True, False, False, False]
    strict = (Tool("find", parameters=FULL, is_strict=True), Tool("now"))
    grammar = compiled(compiler, strict, AUTO, answer_format)
    texts = {"So": 1, "": 1, now: 1, two: 1, write(REFUSED[0]): 0, write(REFUSED[2]): 0, write(ACCEPTED[2]): 1}
    texts[f"So: {now}"] = 1  # of calls without a tag this is text
    assert {text: int(accepts(grammar, text)) for text in texts} == texts
    free = compiled(compiler, (Tool("any", parameters={"type": "object"}),), REQUIRED, answer_format)
    calls: list[Calls] = [[("any", {})], [("any", {"city": "Oslo"})], [("any", {"a": "x y", "b-2": "z"})]]
    assert [accepts(free, write(one)) for one in calls] == [True] * 3


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["kimi_k2", "gemma4", "glm47", "lfm2"])
def test_tags_that_are_special_tokens_are_written_as_tokens(name):
    answer_format, write = AnswerFormat(TOOL_FORMATS[name]), WRITERS[name]
    tokenizer, compiler, tokens = with_special_tokens(list(TOOL_FORMATS[name].tags))
    try:
        for choice, is_strict in ((REQUIRED, False), (AUTO, True)):
            tools = (Tool("find", parameters=FULL, is_strict=is_strict), Tool("now"))
            grammar = compiled(compiler, tools, choice, answer_format, tokens=tokens)
            texts = {write(calls): 1 for calls in ACCEPTED} | {write(calls): 0 for calls in REFUSED[:4]}
            texts |= {f"So: {write(ACCEPTED[0])}": int(is_strict), "So": int(is_strict)}
            found = {}
            for text in texts:
                state = grammar.start()
                found[text] = int(all(state.accept(one) for one in tokenizer.encode(text).ids) and state.is_complete)
            assert found == texts
    finally:
        compiler.close()


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
def test_an_error_names_the_tool_and_its_argument(compiler, name):
    bad = {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": "(?<=a)b"}}
    tools = (*TYPED, Tool("bad", parameters={"type": "object", "properties": {"x": bad}}))
    tag = structural_tag_for(tools, REQUIRED, AnswerFormat(TOOL_FORMATS[name]))
    with pytest.raises(InvalidArgument) as raised, naming_tools(json.dumps(tag), tools):
        compile_now(compiler, StructuredOutputs(structural_tag=tag))
    assert raised.value.field == "tools[2].function.parameters"
    assert raised.value.problem.startswith("at /properties/x/items: the regular expression '(?<=a)b'")


TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/Tree"}, "right": {"$ref": "#/$defs/Tree"}, "name": {"type": "string"}},
}


@pytest.mark.parametrize("name", ["glm45", "pythonic", "gemma4"])
def test_schemas_that_refer_to_themselves_have_a_grammar(compiler, name):
    either = {"anyOf": [{"$ref": "#/$defs/Either"}] * 2}
    tool = Tool("grow", parameters={**TREE, "$defs": {"Tree": TREE, "Either": either}})
    grammar = compiled(compiler, (tool,), REQUIRED, AnswerFormat(TOOL_FORMATS[name]))
    assert accepts(grammar, WRITERS[name]([("grow", {"name": "oak"})]))
    written = WRITERS[name]([("grow", {"left": {"left": {}}})]).replace("'", '"')
    assert accepts(grammar, written)
    parser = AnswerFormat(TOOL_FORMATS[name]).parser(is_open=False, schemas={"grow": tool.parameters})
    (call,) = ChatAnswer.of(parser.push(written) + parser.finish()).tool_calls
    assert json.loads(call.arguments) == {"left": {"left": {}}}
    assert argument_types({"$ref": "#/$defs/Either"}, tool.parameters) == ArgumentTypes()


@pytest.mark.parametrize("name", ["glm47", "gemma4", "deepseek_v32"])
def test_listed_texts_are_required_behind_a_reference_and_beside_null(name):
    unit = {"type": "string", "enum": ["low", "high"]}
    either = {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}
    properties = {"a": {"$ref": "#/$defs/Unit"}, "b": either, "c": {"anyOf": [unit, {"type": "string"}]}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b", "c"], "$defs": {"Unit": unit}}
    tag = structural_tag_for((Tool("f", parameters=schema),), REQUIRED, AnswerFormat(TOOL_FORMATS[name]))
    written = [str(one) for one in re.findall(r"'value': '(low|high|null|\"low\"|\"high\")", str(tag))]
    nulls = [] if name == "deepseek_v32" else ["null"]  # its tag says that the text is a string
    assert [one.strip('"') for one in written] == ["low", "high", "low", "high", *nulls]


def test_definitions_that_many_arguments_repeat_are_limited():
    properties = {f"a{number}": {"$ref": "#/$defs/A"} for number in range(600)}
    schema = {"type": "object", "properties": properties, "$defs": {"A": {"enum": ["x" * 1000]}}}
    with pytest.raises(InvalidArgument, match=r"^tools: their grammar is invalid: 6\d{5} bytes with the definitions"):
        structural_tag_for((Tool("f", parameters=schema),), REQUIRED, AnswerFormat(TOOL_FORMATS["glm47"]))


def test_many_arguments_that_are_optional_may_come_in_any_order(compiler):
    properties = {f"a{number}": {"type": "integer"} for number in range(40)}
    tool = Tool("f", parameters={"type": "object", "properties": properties})
    grammar = compiled(compiler, (tool,), REQUIRED, AnswerFormat(TOOL_FORMATS["pythonic"]))
    two = Tool("f", parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
    few = compiled(compiler, (two,), REQUIRED, AnswerFormat(TOOL_FORMATS["pythonic"]))
    assert [accepts(few, f"[f({one})]") for one in ("", "a=1", "b=1", "a=1, b=2", "b=1, a=2")] == [True] * 4 + [False]
    texts = {"[f()]": 1, "[f(a7=1)]": 1, "[f(a9=1, a0=2)]": 1, "[f(a40=1)]": 0, "[f(a1=1,)]": 0}
    assert {text: int(accepts(grammar, text)) for text in texts} == texts


@pytest.mark.long
def test_the_grammar_of_nested_tags_grows_with_their_number():
    form: dict[str, Any] = {"type": "const_string", "value": "x"}
    for number in range(20):
        tag: dict[str, Any] = {"type": "tag", "begin": "(", "content": form, "end": ")"}
        kind = ("tags_with_separator", "separator", ",") if number % 2 else ("triggered_tags", "triggers", ["("])
        form = {"type": kind[0], "tags": [tag], kind[1]: kind[2]}
    lark = StructuralTagWriter("tag", lambda name, schema: schema).lark({"type": "structural_tag", "format": form})
    assert len(lark) < 4000


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma4"])
def test_a_pattern_is_searched_for_and_each_alternative_has_its_own_anchors(compiler, name):
    matched = {"^a|b$": {"ax", "xb", "a"}, "(^ab$|^cd$)": {"ab", "cd"}, r"[|]|x\|y": {"a|b", "x|y"}, "1+c": {"211cd"}}
    others = {"xa", "bx", "abcd", "", "ab ", "xay"}
    for pattern, texts in matched.items():
        schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}
        tool = Tool("find", parameters=schema)
        grammar = compiled(compiler, (tool,), REQUIRED, AnswerFormat(TOOL_FORMATS[name]))
        for text in texts | others:
            written = WRITERS[name]([("find", {"x": text})])
            assert accepts(grammar, written) == bool(re.search(pattern, text)), (pattern, text)


@pytest.mark.long
def test_text_around_a_pattern_may_have_angle_brackets_but_no_end_tag(compiler):
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "[0-9]c"}}, "required": ["x"]}
    for name in ("qwen3_coder", "glm45", "minimax_m2"):
        grammar = compiled(compiler, (Tool("find", parameters=schema),), REQUIRED, AnswerFormat(TOOL_FORMATS[name]))
        texts = {"a < b: 2c": 1, "<b>2c": 1, "2c <<- x": 1, "</b>2c": 0, "a < b": 0}
        found = {text: int(accepts(grammar, WRITERS[name]([("find", {"x": text})]))) for text in texts}
        assert found == texts, name
