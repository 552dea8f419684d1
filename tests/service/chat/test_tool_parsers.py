"""Calls are read as each family writes them, the same however the text is cut; what is no call is content."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.chat import ChatAnswer, ContentPiece, ToolCall, ToolCallPiece
from jpaged.service.chat.formats import TOOL_FORMATS
from jpaged.service.chat.tool_parser import PieceWriter, call_id, short_call_id

PARIS = '{"city": "Paris", "days": [1, 2], "unit": null}'
TRICKY = '{"text": "a \\"quoted\\" } ] { \\\\", "deep": {"a": [{}, [], "<tool_call>"]}}'


SCHEMAS: dict[str, dict[str, str]] = {"f": {}, "g": {}, "now": {}}


def parser(name):
    count = itertools.count()
    return TOOL_FORMATS[name].make(PieceWriter(lambda: f"id{next(count)}", schemas=SCHEMAS))


def pieces_of(name, *texts):
    one = parser(name)
    return [piece for text in texts for piece in one.push(text)] + one.finish()


def answer(name, *texts):
    return ChatAnswer.of(pieces_of(name, *texts))


def calls(*pairs):
    return tuple(ToolCall(f"id{i}", name, arguments) for i, (name, arguments) in enumerate(pairs))


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {arguments}}}'


CALLS = {
    "hermes": [
        (hermes("f", PARIS), "", [("f", PARIS)]),
        ("Let me look.\n" + hermes("f", "{}"), "Let me look.\n", [("f", "{}")]),
        ("\n\n" + hermes("f", PARIS) + "\n" + hermes("g", TRICKY) + "\n", "", [("f", PARIS), ("g", TRICKY)]),
        (hermes("f", "{}") + "\nDone.", "\nDone.", [("f", "{}")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"type":"function","id":7,"name":"f","arguments":{}, "more":[1]}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut o', "", [("f", '{"a": "cut o')]),
        ('<tool_call>{"name": "f", "arguments": {}}\nwell', "\nwell", [("f", "{}")]),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", "{}")]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>ok', "ok", [("now", "{}")]),
        ('<tool_call>{"arguments":null,"name":"now","id":1}</tool_call>', "", [("now", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>ok', "ok", [("f", '{"a": 1}')]),
        ('<tool_call>{"arguments": " {\\"a\\": {}} ", "name": "f"}', "", [("f", '{"a": {}}')]),
        ('<tool_call>{"name": "f", "arguments": "", "id": 1}', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', "", [("f", '{"a": "\ufffd"}')]),
        ('<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>', "", [("café", "{}")]),
    ],
    "llama3_json": [
        (llama("f", PARIS), "", [("f", PARIS)]),
        ("<|python_tag|>" + llama("f", TRICKY), "", [("f", TRICKY)]),
        (llama("f", "{}") + "; " + llama("g", PARIS), "", [("f", "{}"), ("g", PARIS)]),
        (llama("f", "{}") + "\n" + llama("g", "{}") + ";", "", [("f", "{}"), ("g", "{}")]),
        ('{"type": "function", "name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("Here: <|python_tag|> " + llama("f", "{}"), "Here: ", [("f", "{}")]),
        (llama("f", "{}") + " and so on", " and so on", [("f", "{}")]),
        ('{"name": "now"}', "", [("now", "{}")]),
        ('{"name": "now", "parameters": null}; {"type": "function", "name": "f"}', "", [("now", "{}"), ("f", "{}")]),
        ('<|python_tag|>{"name": "other"}', "", [("other", "{}")]),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "f", "arguments": {PARIS}}}]', "", [("f", PARIS)]),
        (
            f'[TOOL_CALLS][{{"name":"f","arguments":{TRICKY}}}, {{"arguments": {{}}, "name": "g"}}]',
            "",
            [("f", TRICKY), ("g", "{}")],
        ),
        (f"[TOOL_CALLS]f[ARGS]{PARIS}[TOOL_CALLS]g[ARGS]{TRICKY}", "", [("f", PARIS), ("g", TRICKY)]),
        (f"I see.[TOOL_CALLS]f{PARIS}", "I see.", [("f", PARIS)]),
        ('[TOOL_CALLS] {"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}},', "", [("f", "{}")]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}] so', " so", [("f", "{}")]),
        ('[TOOL_CALLS] [{"name": "now"}, {"name": "f", "arguments": null}]', "", [("now", "{}"), ("f", "{}")]),
        ("[TOOL_CALLS]now[ARGS]null", "", [("now", "{}")]),
        ("[TOOL_CALLS]now[ARGS][TOOL_CALLS]f[ARGS]{}", "", [("now", "{}"), ("f", "{}")]),
    ],
    "openai": [
        (f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{PARIS}<|call|>", "", [("f", PARIS)]),
        (f" to=functions.f<|channel|>commentary json<|message|>{TRICKY}", "", [("f", TRICKY)]),
        (
            "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            "<|message|><|call|><|start|>assistant to=functions.g<|channel|>commentary<|message|>{}",
            "First.",
            [("f", "{}"), ("g", "{}")],
        ),
    ],
}
NO_CALLS = {
    "hermes": [
        "Plain text, a < b, </tool_call>.",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "f", "arguments": nil}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f\\q", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "other": 2}</tool_call>',
        '<tool_call>{"name": "' + "x" * 300 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", ',
        "  \n",
        "so <tool_",
        '<tool_call>{"x<tool_call>{"name": "f", "arguments": {}}',
    ],
    "llama3_json": [
        "Plain; text {with} brackets.",
        '{"answer": {"name": "f", "parameters": {}}}',
        '  {"name": "Bob", "age": 3}',
        '{"name": "Bob"}',
        '<|python_tag|>brave_search.call(query="x")',
        "{",
        "[1, 2]",
        '{"parameters": {"a": 1}}',
    ],
    "mistral": [
        "Plain [text] [TOOL",
        "[TOOL_CALLS] [] none",
        "[TOOL_CALLS]no arguments here",
        "[TOOL_CALLS]two words{}",
        "[TOOL_CALLS] [[{}]]",
        "[TOOL_CALLS]" + "x" * 600 + "{}",
        "[TOOL_CALLS]f[ARGS]",
        '[TOOL_CALLS] [{"nam": "f"}]',
        '[TOOL_CALLS] [f{"a": 1}]',
    ],
    "openai": ["Plain text.", "< and | and <|pipe", " to be", " t"],
}
ALL = [(name, text) for name, cases in CALLS.items() for text, *_ in cases]
ALL += [(name, text) for name, texts in NO_CALLS.items() for text in texts]


@pytest.mark.parametrize(
    ("name", "text", "content", "wanted"), [(name, *case) for name, cases in CALLS.items() for case in cases]
)
def test_calls_are_read_as_the_family_writes_them(name, text, content, wanted):
    assert answer(name, text) == ChatAnswer(content=content, tool_calls=calls(*wanted))


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_is_content_to_the_last_character(name, text):
    assert answer(name, text) == ChatAnswer(content=text)


def test_behind_a_malformed_call_the_next_one_is_read():
    text = "<tool_call>oops" + hermes("f", "{}")
    assert answer("hermes", text) == ChatAnswer(content="<tool_call>oops", tool_calls=calls(("f", "{}")))


@pytest.mark.parametrize(("name", "text"), ALL)
def test_a_character_at_a_time_gives_the_same(name, text):
    assert answer(name, *text) == answer(name, text)


_FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", ";"),
    *('"', "\\", ",", ":", " ", "\n", '"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": ', "f", "1"),
    *('{"a": "}"}', "<|channel|>", "<|message|>", "commentary to=functions.f", "<|start|>assistant", "<|end|>", "text"),
    *("<", "<|", "[TOOL", "<tool", " to=", "analysis", "<|call|>"),
]


def told(name, *texts):
    one = parser(name)
    return ChatAnswer.of(piece for text in texts for piece in one.push(text))


@pytest.mark.parametrize(("name", "text"), ALL)
def test_what_has_been_told_at_a_place_is_the_same_whatever_the_cuts_before_it(name, text):
    """So that a server goes on behind a text that another has told, whose messages it does not know."""
    for end in range(len(text) + 1):
        assert told(name, *text[:end]) == told(name, text[:end])


@pytest.mark.parametrize("name", [*CALLS, "mistral_args"])
@given(fragments=st.lists(st.sampled_from(_FRAGMENTS), max_size=14), place=st.integers(0, 200))
def test_what_has_been_told_of_nonsense_is_the_same_whatever_the_cuts_before_it(name, fragments, place):
    text = "".join(fragments)[:place]
    assert told(name, *text) == told(name, text)


@given(data=st.data())
def test_the_cuts_of_a_text_make_no_difference(data):
    name, text = data.draw(st.sampled_from(ALL))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert answer(name, *parts) == answer(name, text)


@pytest.mark.parametrize("name", [*CALLS, "mistral_args"])
@given(fragments=st.lists(st.sampled_from(_FRAGMENTS), max_size=14), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_the_cuts_of_nonsense_make_no_difference(name, fragments, cuts):
    text = "".join(fragments)
    places = sorted(cut for cut in cuts if cut < len(text))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert answer(name, *parts) == answer(name, text)
    assert answer(name, *text) == answer(name, text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hermes", hermes("%s", "%s")),
        ("llama3_json", llama("%s", "%s")),
        ("mistral", '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]'),
        ("mistral_args", "[TOOL_CALLS]%s[ARGS]%s"),
    ],
)
@given(arguments=st.dictionaries(st.text(), _JSON, max_size=4), is_ascii=st.booleans())
def test_any_arguments_come_out_as_they_went_in(name, form, arguments, is_ascii):
    text = json.dumps(arguments, ensure_ascii=is_ascii)
    assert answer(name, *(form % ("tool-1", text))).tool_calls == calls(("tool-1", text))


def test_arguments_stream_as_they_come():
    one = parser("hermes")
    assert one.push('Look: <tool_call>{"name": "f", "argu') == [ContentPiece("Look: ")]
    assert one.push('ments": {"a"') == [ToolCallPiece(0, '{"a"', id="id0", name="f")]
    assert one.push(': "b') == [ToolCallPiece(0, ': "b')]
    assert one.push('"}}</tool_call') == [ToolCallPiece(0, '"}')]
    assert one.push("> a <") == [ContentPiece(" a ")]
    assert one.push(" b") == [ContentPiece("< b")]
    assert one.finish() == []


def test_another_json_answer_is_not_held_back():
    one = parser("llama3_json")
    assert one.push('{"answer": ') == [ContentPiece('{"answer": ')]
    assert one.push("[1, ") == [ContentPiece("[1, ")]
    assert parser("mistral").push("[TOOL_CALLS](none") == [ContentPiece("[TOOL_CALLS](none")]
    for size, is_held in ((511, True), (512, False)):
        assert (parser("mistral").push("[TOOL_CALLS]" + "f" * size) == []) is is_held


def test_mistral_gives_the_id_that_the_model_wrote():
    text = "[TOOL_CALLS]f[CALL_ID]Ab3Ab3Ab3[ARGS]{}"
    assert answer("mistral", *text).tool_calls == (ToolCall("Ab3Ab3Ab3", "f", "{}"),)


def test_ids_are_new_and_as_the_family_takes_them():
    assert len({call_id() for _ in range(100)} | {short_call_id() for _ in range(100)}) == 200
    assert all(len(one) == 9 and one.isalnum() for one in (short_call_id() for _ in range(100)))
    assert TOOL_FORMATS["mistral"].new_id is short_call_id


def test_what_has_streamed_is_not_kept():
    one = parser("hermes")
    most = 0
    for character in "text " * 100 + hermes("f", json.dumps({"text": "x" * 20_000})):
        one.push(character)
        most = max(most, len(one._waiting) + len(one._raw))
    assert most < 100
