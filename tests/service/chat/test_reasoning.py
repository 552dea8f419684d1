"""Reasoning comes apart from content, whoever opens it, and the newlines beside its tags belong to neither."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.chat import ChatAnswer, ContentPiece, ReasoningPiece, ToolCall
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
QWEN = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
GPT_OSS = AnswerFormat(TOOL_FORMATS["openai"], REASONING_FORMATS["openai_gptoss"])


def answer(answer_format, *texts, is_open=False, has_tools=True):
    parser = answer_format.parser(is_open=is_open, has_tools=has_tools, new_id=lambda: "id")
    return ChatAnswer.of([piece for text in texts for piece in parser.push(text)] + parser.finish())


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nHello.", False, "Hm.\n\nSo.", "Hello."),
        ("\n<think>Hm.</think>Hello.", False, "Hm.", "Hello."),
        ("<think>\n\n</think>\n\nHello.", False, "", "Hello."),
        ("Hm.\n</think>\n\nHello.", True, "Hm.", "Hello."),
        ("<think>\nHm.\n</think>\nHello.", True, "Hm.", "Hello."),
        ("Hm. </thin", True, "Hm. </thin", ""),
        ("<think>Hm.\n", False, "Hm.", ""),
        ("Hello, <think> is a tag.", False, "", "Hello, <think> is a tag."),
        ("<thin", False, "", "<thin"),
        ("</think>\n\n", True, "", ""),
        ("Hm.</think>A </think> b", True, "Hm.", "A </think> b"),
        ("", True, "", ""),
        ("  indented", True, "  indented", ""),
    ],
)
def test_reasoning_is_told_apart(text, is_open, reasoning, content):
    wanted = ChatAnswer(content=content, reasoning=reasoning)
    assert answer(QWEN, text, is_open=is_open) == wanted
    assert answer(QWEN, *text, is_open=is_open) == wanted


def test_calls_in_thought_are_none_and_those_behind_are():
    text = f"<think>\n{CALL}\n</think>\n\nNow: {CALL}"
    wanted = ChatAnswer("Now: ", CALL, (ToolCall("id", "f", "{}"),))
    assert answer(QWEN, text) == answer(QWEN, *text) == wanted


def test_without_tools_what_looks_like_a_call_is_content():
    assert answer(QWEN, f"<think>a</think>{CALL}", has_tools=False) == ChatAnswer(CALL, "a")
    assert answer(AnswerFormat(), CALL) == ChatAnswer(CALL)


def test_reasoning_streams_and_holds_back_what_may_be_the_tag():
    parser = QWEN.parser(is_open=True)
    assert parser.push("Hm") == [ReasoningPiece("Hm")]
    assert parser.push(".\n</th") == [ReasoningPiece(".")]
    assert parser.push("e") == [ReasoningPiece("\n</the")]
    assert parser.push("</think>\n\nHel") == [ContentPiece("Hel")]
    assert parser.push("lo") == [ContentPiece("lo")]


def test_gpt_oss_thinks_answers_and_calls_in_channels():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    wanted = ChatAnswer("I look.", "Hm.\nSo.", (ToolCall("id", "f", '{"a": 1}'),))
    assert answer(GPT_OSS, text) == answer(GPT_OSS, *text) == wanted
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"
    assert answer(GPT_OSS, *final) == ChatAnswer("Hi", "Hm.")
    assert answer(GPT_OSS, "<|channel|>final<|message|>Hi<|end|><|start|>assi") == ChatAnswer("Hi")
    assert answer(GPT_OSS, "<|channel|>" + "x" * 600) == ChatAnswer("<|channel|>" + "x" * 600)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel|>final Hello there<|message|>Hi", ChatAnswer("Hello thereHi")),
        ("<|start|>assistant Hello<|channel|>analysis<|message|>Hm", ChatAnswer("Hello", "Hm")),
        ("<|channel|>final Hello", ChatAnswer("Hello")),
        ("<|channel|>finalHello<|end|>", ChatAnswer("Hello")),
        (" to=be or not", ChatAnswer(" to=be or not")),
        ("<|channel|>final<|end|><|start|>assistant<|channel|>analysis<|message|>Hm", ChatAnswer("", "Hm")),
        (
            "<|channel|>commentary to=functions.f<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            ChatAnswer("Hi"),
        ),
        ("<|channel|>commentary to=functions.f<|call|>", ChatAnswer("", "", (ToolCall("id", "f", "{}"),))),
        *((cut, ChatAnswer()) for cut in ("<|channel|>fin", "<|channel|>commentary t", "<|channel|>final<|mess")),
        ("<|message|>Hi", ChatAnswer("Hi")),
    ],
)
def test_gpt_oss_keeps_the_text_in_a_head_and_ends_one_without_a_message(text, wanted):
    assert answer(GPT_OSS, text) == answer(GPT_OSS, *text) == wanted


@pytest.mark.parametrize("name", REASONING_FORMATS)
@given(
    fragments=st.lists(
        st.sampled_from(
            [
                *("<think>", "</think>", "[THINK]", "[/THINK]", "<", "</thi", "\n", " ", "text", CALL, "<tool_call>"),
                *("<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>", "assistant", "\r\n"),
            ]
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    is_open=st.booleans(),
)
def test_the_cuts_of_a_text_make_no_difference(name, fragments, cuts, is_open):
    text = "".join(fragments)
    one = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS[name])
    places = sorted(cut for cut in cuts if cut < len(text))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    whole = answer(one, text, is_open=is_open)
    assert answer(one, *parts, is_open=is_open) == whole
    assert answer(one, *text, is_open=is_open) == whole
