"""Every format reads the answers of `call_samples`, however they are cut, and loses nothing of random ones."""

import codecs
import itertools
import json
import random
import re
from functools import partial

import pytest

from jpaged.chat import ChatAnswer, ToolCall, ToolCallPiece
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.service.chat.tool_parser import PieceWriter
from tests.service.chat.call_samples import SCHEMAS, TAGS, WRITERS, samples, thoughts

DSML = (
    '<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="find">\n'
    '<\uff5cDSML\uff5cparameter name="{}" string="{}">{}</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>\n'
)
SAMPLES = {name: list(samples(name)) for name in TOOL_FORMATS}


def answer(name, *texts):
    count = itertools.count()
    one = TOOL_FORMATS[name].make(PieceWriter(lambda: f"id{next(count)}", SCHEMAS))
    return ChatAnswer.of([piece for text in texts for piece in one.push(text)] + one.finish())


def test_every_format_has_a_writer_and_sixty_samples():
    assert WRITERS.keys() == TOOL_FORMATS.keys()
    assert {name: len(found) for name, found in SAMPLES.items() if len({one.text for one in found}) < 60} == {}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_samples_are_read_as_they_were_written(name):
    for sample in SAMPLES[name]:
        found = answer(name, sample.text)
        given = [
            call.arguments if isinstance(wanted, str) else json.loads(call.arguments)
            for call, wanted in zip(found.tool_calls, sample.arguments, strict=True)
        ]
        names = tuple(call.name for call in found.tool_calls)
        assert (found.content, names, given) == (sample.content, sample.names, [*sample.arguments]), sample.text


def split_at_every_byte(text):
    """Two parts of a text for each of its bytes, as a detokenizer gives them: characters that are complete."""
    data = text.encode()
    for at in range(1, len(data)):
        decoder = codecs.getincrementaldecoder("utf-8")()
        yield decoder.decode(data[:at]), decoder.decode(data[at:], final=True)


def check_splits(name, number_of_samples):
    """Every sample comes a character at a time, and some in two parts, split at every byte."""
    for number, sample in enumerate(SAMPLES[name]):
        whole = answer(name, sample.text)
        assert answer(name, *sample.text) == whole, sample.text
        if number % (len(SAMPLES[name]) // number_of_samples or 1) == 0:
            for parts in split_at_every_byte(sample.text):
                assert answer(name, *parts) == whole, parts


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_samples_are_the_same_a_character_at_a_time(name):
    check_splits(name, 3)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_samples_are_the_same_split_at_every_byte(name):
    check_splits(name, len(SAMPLES[name]))


def thought(name, *texts, is_open):
    parser = AnswerFormat(reasoning=REASONING_FORMATS[name]).parser(is_open=is_open)
    return ChatAnswer.of([piece for text in texts for piece in parser.push(text)] + parser.finish())


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_is_split_off_wherever_an_answer_is_cut(name):
    assert TAGS.keys() == REASONING_FORMATS.keys()
    found = list(dict.fromkeys(thoughts(name)))
    assert len(found) >= 60
    for number, one in enumerate(found):
        wanted = ChatAnswer(one.content, one.reasoning)
        assert thought(name, one.text, is_open=one.is_open) == wanted, one
        assert thought(name, *one.text, is_open=one.is_open) == wanted, one
        for parts in split_at_every_byte(one.text) if number % 4 == 0 else ():
            assert thought(name, *parts, is_open=one.is_open) == wanted, one


def test_kimi_calls_without_closing_its_reasoning():
    one = AnswerFormat(TOOL_FORMATS["kimi_k2"], REASONING_FORMATS["kimi_k2"])
    for texts in (text := f"<think>Hm.\n{WRITERS['kimi_k2']([('now', {})])}", [text]):
        parser = one.parser(is_open=False)
        found = ChatAnswer.of([piece for part in texts for piece in parser.push(part)] + parser.finish())
        assert found == ChatAnswer("", "Hm.", (ToolCall("functions.now:0", "now", "{}"),))


def test_a_tag_that_ends_reasoning_is_content_without_tools():
    tag = "<|tool_calls_section_begin|>"
    assert thought("kimi_k2", *f"<think>Hm.\n{tag}x", is_open=False) == ChatAnswer(f"{tag}x", "Hm.")


def test_granite_may_say_here_is_in_short():
    text = "Here's my thought process: Hm. Here's my response: Hi"
    assert thought("granite", *text, is_open=False) == ChatAnswer(" Hi", " Hm. ")


WORDS = re.compile(r"w\d+w")


def fuzzed(rng, name, thoughts):
    """A text of markup, calls and words in any order; each word occurs once."""
    markup = [
        *TOOL_FORMATS[name].texts,
        *thoughts,
        *"{}[]()<>=:,;\"'",
        "\\",
        "\n",
        " ",
        "find",
        "city",
        "null",
        "1",
        "\U0001f600",
    ]
    parts = []
    for number in range(rng.randrange(1, 24)):
        kind = rng.random()
        if kind < 0.35:
            parts.append(f"w{number}w")
        elif kind < 0.45:
            text = rng.choice(SAMPLES[name]).text
            parts.append(text[: rng.randrange(len(text) + 1)])
        else:
            parts.append(rng.choice(markup).replace("NAME", "find").replace("INDEX", "0"))
    return "".join(parts)


def check_fuzzed(seed, name, num_texts):
    """Texts give the same in random parts, before and at their end; none raises.

    No word is lost, except in heads of gpt-oss's messages.
    """
    rng = random.Random(f"{seed} {name}")
    for _ in range(num_texts):
        reasoning = rng.choice([None, *REASONING_FORMATS.values()])
        thoughts = () if reasoning is None else (reasoning.open_tag, reasoning.close_tag)
        one = AnswerFormat(TOOL_FORMATS[name], reasoning)
        text, is_open = fuzzed(rng, name, thoughts), rng.random() < 0.3
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(12))))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        found = []
        for pieces in ([text], parts):
            ids = map("id{}".format, itertools.count())
            parser = one.parser(is_open=is_open, new_id=partial(next, ids), schemas=SCHEMAS)
            pushed = [one for piece in pieces for one in parser.push(piece)]
            found.append((ChatAnswer.of(pushed), ChatAnswer.of(pushed + parser.finish())))
        assert found[0] == found[1], (text, parts)
        lost = set(WORDS.findall(text)) - set(WORDS.findall(str(found[0][1])))
        has_heads = name == "openai" or (reasoning is not None and reasoning.is_whole_answer)
        assert not lost or has_heads, (name, text, lost, found[0])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_random_texts_never_raise_and_lose_nothing(name):
    check_fuzzed(0, name, 5000 // len(TOOL_FORMATS) + 1)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_many_random_texts_never_raise_and_lose_nothing(name):
    check_fuzzed(1, name, 5000)


def one_call(name, text):
    """The content of an answer, and the name and arguments of its only call, if it has one."""
    found = answer(name, text)
    assert answer(name, *text) == found
    return (found.content, *[(call.name, call.arguments) for call in found.tool_calls])


def coder(*lines):
    return "\n".join(["<tool_call>", "<function=find>", *lines, "</function>", "</tool_call>"])


def parameter(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>"


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("days", "3", "3"),
        ("days", " 3 ", "3"),
        ("days", "3.5", '"3.5"'),
        ("days", "three", '"three"'),
        ("days", "null", '"null"'),
        ("days", "NaN", '"NaN"'),
        ("days", "9" * 5000, f'"{"9" * 5000}"'),
        ("limit", "3", "3"),
        ("limit", "-1e3", "-1e3"),
        ("is_open", "true", "true"),
        ("is_open", "False", "false"),
        ("is_open", "TRUE", "true"),
        ("level", "1", '"1"'),
        ("level", "2", "2"),
        ("level", "3", "3"),
        ("is_open", "yes", '"yes"'),
        ("tags", '["a"]', '["a"]'),
        ("tags", "['a', 'it\\'s']", '["a", "it\'s"]'),
        ("tags", "a, b", '"a, b"'),
        ("tags", "[" * 5000, f'"{"[" * 5000}"'),
        ("place", "{'x': True, 'y': None,}", '{"x":true,"y":null}'),
        ("place", "{1, 2}", '"{1, 2}"'),
        ("note", "null", "null"),
        ("note", "7", '"7"'),
        ("unit", "C", '"C"'),
        ("near", "[1, 2.5]", "[1, 2.5]"),
        ("city", "7", '"7"'),
        ("city", '"Oslo"', '"\\"Oslo\\""'),
        ("city", "", '""'),
        ("city", "\na\n\n", '"\\na\\n\\n"'),
        ("other", "7", "7"),
        ("other", "seven", '"seven"'),
        ("other", '{"a": [1]}', '{"a": [1]}'),
    ],
)
def test_a_value_has_the_type_of_the_schema_or_is_a_string(key, value, wanted):
    content, call = one_call("qwen3_coder", coder(parameter(key, value)))
    assert (content, call[0]) == ("", "find")
    assert call[1].replace(" ", "") == f'{{"{key}": {wanted}}}'.replace(" ", "")


CUT = ("", ("find", '{"city": "a > b", "da'))


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("qwen3_coder", "<function=now>\n</function>", ("", ("now", "{}"))),
        ("qwen3_coder", "<tool_call><function=find><parameter=city>Oslo</function></tool_call>", '{"city": "Oslo"}'),
        ("qwen3_coder", coder("<parameter=city>", "Oslo", parameter("days", 3)), '{"city": "Oslo", "days": 3}'),
        ("qwen3_coder", f"{coder(parameter('days', 3))} So", (" So", ("find", '{"days": 3}'))),
        ("qwen3_coder", "<tool_call>\n<function=find>\nwell", ("\nwell", ("find", "{}"))),
        ("qwen3_coder", "<function=find>\n<parameter=a\nb>1", ("<parameter=a\nb>1", ("find", "{}"))),
        ("qwen3_coder", "<function=find>\n<parameter=ci", ("", ("find", '{"ci'))),
        ("qwen3_coder", "<function=find>\n<parameter=days>\n3", ("", ("find", '{"days": 3'))),
        ("qwen3_coder", "<function=find>\n<parameter=days>\nth", ("", ("find", '{"days": "th'))),
        ("qwen3_coder", "<tool_call>\n{}", ("<tool_call>\n{}",)),
        ("qwen3_coder", "<function=a b>", ("<function=a b>",)),
        ("glm45", "<tool_call>\nnow\n</tool_call>", ("", ("now", "{}"))),
        ("glm45", "<tool_call>find<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", '{"city": "Oslo"}'),
        ("glm47", "<tool_call>hello world</tool_call>", ("<tool_call>hello world</tool_call>",)),
        ("deepseek_v32", DSML.format("days", "true", "3"), '{"days": 3}'),
        ("deepseek_v4", DSML.replace("function_calls", "tool_calls").format("days", "false", "3"), '{"days": 3}'),
        ("deepseek_v32", DSML.format("city", "true", "3"), '{"city": "3"}'),
        ("deepseek_v32", DSML.format("other", "false", '"a"'), '{"other": "a"}'),
        ("deepseek_v32", DSML.format("other", "false", "a"), '{"other": "a"}'),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>null<|tool_call_end|>", ("", ("now", "{}"))),
        (
            "minimax_m2",
            "<minimax:tool_call><invoke name=find><parameter name=city>Oslo</parameter></invoke></minimax:tool_call>",
            '{"city": "Oslo"}',
        ),
        ("minimax_m2", '<invoke name=find ><parameter name="city">a > b</parameter><parameter name=da', CUT),
        ("minimax_m2", '<invoke name=""find">', ('<invoke name=""find">',)),
        ("minimax_m2", '<invoke name=" "find">', ('<invoke name=" "find">',)),
        ("minimax_m2", '<invoke name="fi nd">', ('<invoke name="fi nd">',)),
        (
            "kimi_k2",
            "<|tool_call_begin|>now<|tool_call_argument_begin|>[]",
            ("<|tool_call_begin|>now<|tool_call_argument_begin|>[]",),
        ),
        ("pythonic", "[other(a=1)]", ("[other(a=1)]",)),
        ("pythonic", "[find('Oslo')]", ("[find('Oslo')]",)),
        ("pythonic", "<|python_start|>[find(city='O\\'x', days='3')]<|python_end|>", '{"city": "O\'x", "days": 3}'),
        ("pythonic", "[find(city=12, tags=('a',), limit=1_0)]", '{"city": "12", "tags": ["a"], "limit": "1_0"}'),
        (
            "pythonic",
            "[find(code='sed -n '1,9p' f.py', days=2)] So",
            (" So", ("find", '{"code": "sed -n \'1,9p\' f.py", "days": 2}')),
        ),
        ("pythonic", '[find(code="""a\n\'b\'""")]', '{"code": "a\\n\'b\'"}'),
        (
            "pythonic",
            "[find(city='\\ud83d\\ude00 \\x41', note='\\ud800')]",
            '{"city": "\U0001f600 A", "note": "\\ud800"}',
        ),
        ("pythonic", "[find(code='''a', b''')]", '{"code": "a\', b"}'),
        ("pythonic", "[find(days=1 2, limit=- 5)]", '{"days": "1 2", "limit": "- 5"}'),
        ("pythonic", "[find(days=2 oops", ("", ("find", '{"days": "2 oops'))),
        ("lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', ("", ("now", "{}"))),
        ("lfm2", "<|tool_call_start|>now()<|tool_call_end|>ok", ("ok", ("now", "{}"))),
        ("functiongemma", "<start_function_call>call:find{unit:C,days:3}", '{"unit": "C", "days": 3}'),
        ("gemma4", '<|tool_call>call:find{place:{<|"|>a b<|"|>:[<|"|>x,}<|"|>]}}', '{"place": {"a b":["x,}"]}}'),
        ("granite", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', ("", ("now", "{}"))),
    ],
)
def test_what_models_write_beside_their_template_is_read(name, text, wanted):
    expected = ("", ("find", wanted)) if isinstance(wanted, str) else wanted
    assert one_call(name, text) == expected


def test_a_key_that_ends_in_a_line_break_is_the_same_however_it_comes():
    text = DSML.format("days\n", "true", "3")
    assert answer("deepseek_v32", *text) == answer("deepseek_v32", text)


def test_ids_that_the_model_writes_are_unique():
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert [one.id for one in answer("kimi_k2", call + call).tool_calls] == ["functions.now:0", "id0"]
    short = call.replace("functions.", "")
    assert (
        answer("kimi_k2", short).tool_calls == answer("kimi_k2", *short).tool_calls == (ToolCall("now:0", "now", "{}"),)
    )


def test_a_string_streams_as_it_comes():
    parser = TOOL_FORMATS["qwen3_coder"].make(PieceWriter(lambda: "id", SCHEMAS))
    assert parser.push("<tool_call>\n<function=find>\n") == [ToolCallPiece(0, "{", id="id", name="find")]
    assert parser.push("<parameter=code>\nab") == [ToolCallPiece(0, '"code": "ab')]
    assert parser.push("\n") == []
    assert parser.push('"c</par') == [ToolCallPiece(0, '\\n\\"c')]
    assert parser.push("ameter>") == [ToolCallPiece(0, '"')]
    assert parser.push("</function>") == [ToolCallPiece(0, "}")]
