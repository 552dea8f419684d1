"""What events of the engine become: content, reasoning and calls, however they are cut."""

import pytest

from jpaged.chat import ChatAnswer, ChatOptions, ReasoningOptions, Tool, ToolCall, ToolChoice, ToolChoiceMode
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.outputs import Completions
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.service.chat.output_config import ChatOutputConfig
from jpaged.service.chat.output_parser import ChatOutputParser, WithoutTokens
from jpaged.service.input_processor import InputProcessor
from jpaged.structured import ConstraintKind, StructuredOutputs
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import FinishReason, OutputEvent, Prompt, SamplingParams, SequenceFinish

QWEN = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
ARGUMENTS = '{"city": "Z\u00fcrich \U0001f3d4", "tag": "</tool_call>"}'
TEXT = f'<think>\nLook.\n</think>\n\nSo: <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = ChatAnswer("So: ", "Look.", (ToolCall("id", "weather", ARGUMENTS),))
STOP = SequenceFinish(FinishReason.STOP)
TOOLS = (Tool("weather"), Tool("now"))


def answers(answer_format=QWEN, *, is_open=False, **options):
    return ChatOutputParser(lambda: answer_format.parser(is_open=is_open, new_id=lambda: "id"), **options)


def events(parts, index=0, finish=STOP):
    texts = list(parts)
    return [
        OutputEvent("r", index, text, finish=finish if at == len(texts) - 1 else None, is_last=at == len(texts) - 1)
        for at, text in enumerate(texts)
    ]


def outcome(split, given):
    completions = Completions(has_logprobs=False)
    for event in given:
        completions.add(split.split(event))
    return completions.output("r", None, ()).outputs


def answer_of(output):
    return ChatAnswer(output.text, output.reasoning_content, output.tool_calls)


@pytest.mark.parametrize("cut", range(len(TEXT) + 1))
def test_an_answer_is_told_apart_wherever_it_is_cut(cut):
    for parts in ((TEXT[:cut], TEXT[cut:]), (TEXT[:cut], TEXT[cut:], "")):
        (output,) = outcome(answers(), events(parts))
        assert (answer_of(output), output.finish_reason) == (ANSWER, "tool_calls")


def test_an_answer_is_told_apart_character_by_character():
    split = answers()
    told = [split.split(event) for event in events(TEXT)]
    pieces = [piece for event in told for piece in event.tool_calls]
    assert [(piece.id, piece.name) for piece in pieces if piece.name is not None] == [("id", "weather")]
    assert "".join(piece.arguments for piece in pieces) == ARGUMENTS
    assert len([piece for piece in pieces if piece.arguments]) > len(ARGUMENTS) // 2  # told as it came
    assert "".join(event.reasoning_content for event in told) == "Look."
    assert told[-1].finish == SequenceFinish(FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("hidden", [(), ("<tool_call>", "So", "ok.\n<")])
@pytest.mark.parametrize("has_reasoning", [True, False])
def test_an_answer_goes_on_behind_what_was_told_elsewhere(hidden, has_reasoning):
    options = {"hidden_tokens": hidden, "has_reasoning": has_reasoning}
    whole = [outcome(answers(**options), events(TEXT))]
    for cut in range(1, len(TEXT)):
        first, second, given = answers(**options), answers(**options), events(TEXT)
        second.go_on(0, TEXT[:cut])
        told = [first.split(event) for event in given[:cut]] + [second.split(event) for event in given[cut:]]
        completions = Completions(has_logprobs=False)
        for event in told:
            completions.add(event)
        assert [completions.output("r", None, ()).outputs] == whole


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_an_answer_that_is_cut_off_says_why(reason):
    for end in range(1, len(TEXT) + 1):
        (output,) = outcome(answers(), events([TEXT[:end]], finish=SequenceFinish(reason)))
        assert output.finish_reason == reason.value
        parser = QWEN.parser(is_open=False, new_id=lambda: "id")
        assert answer_of(output) == ChatAnswer.of(parser.push(TEXT[:end]) + parser.finish())


@pytest.mark.parametrize("matched", ["Par", 7])
def test_a_call_that_a_stop_cuts_is_no_call_to_run(matched):
    finish, end = SequenceFinish(FinishReason.STOP, matched), TEXT.index("}") + 1
    for cut in range(TEXT.index("{", TEXT.index("arguments")) + 1, end):
        (output,) = outcome(answers(), events([TEXT[:cut]], finish=finish))
        assert (output.finish_reason, len(output.tool_calls)) == ("stop", 1)
    deep = TEXT[: TEXT.index("arguments")] + 'arguments": {"city": ' + "[" * 5000
    assert outcome(answers(), events([deep], finish=finish))[0].finish_reason == "stop"
    (output,) = outcome(answers(), events([TEXT[:end]], finish=finish))
    assert output.finish_reason == "tool_calls"


def test_an_answer_of_calls_alone_has_no_text_where_it_is_cut():
    for cut in range(len(TEXT) + 1):
        (output,) = outcome(
            answers(has_content=False), events([TEXT[:cut]], finish=SequenceFinish(FinishReason.LENGTH))
        )
        assert output.text == ""
    assert output.tool_calls == ANSWER.tool_calls


def test_sequences_are_told_apart_each_by_itself():
    split = answers()
    given = [
        OutputEvent("r", 0, TEXT[:70]),
        OutputEvent("r", 1, "<think>"),
        OutputEvent("r", 0, TEXT[70:], finish=STOP),
    ]
    given += [OutputEvent("r", 1, "a</think>b"), OutputEvent("r", 1, "c", finish=STOP, is_last=True)]
    first, second = outcome(split, given)
    assert (answer_of(first), first.finish_reason) == (ANSWER, "tool_calls")
    assert (answer_of(second), second.finish_reason) == (ChatAnswer("bc", "a"), "stop")


def test_tokens_and_times_pass_and_errors_too():
    event = OutputEvent("r", 0, "<think>a", token_ids=(1, 2))
    told = answers().split(event)
    assert (told.token_ids, told.text, told.reasoning_content) == ((1, 2), "", "a")
    failed = OutputEvent("r", 0, is_last=True, error=ValueError())
    assert answers().split(failed) is failed


def test_reasoning_can_be_left_out():
    (output,) = outcome(answers(has_reasoning=False), events([TEXT]))
    assert answer_of(output) == ChatAnswer("So: ", "", ANSWER.tool_calls)


TOKENS = ["<|a|>", "<|ab|>", "[X]"]


@pytest.mark.parametrize(
    "text", ["x<|a|>y[X]<|ab|>", "<|a", "<|a<|a|>|>", "[[X]X]", "", "a<|b|>", "<|a|><|a|>[X", "[X]"]
)
def test_special_tokens_are_left_out_however_a_text_is_cut(text):
    whole = WithoutTokens(TOKENS)
    expected = whole.push(text) + whole.finish()
    assert not any(token in expected for token in TOKENS) or "<|a<" in text or "[[" in text
    for cut in range(len(text) + 1):
        parts = WithoutTokens(TOKENS)
        assert parts.push(text[:cut]) + parts.push(text[cut:]) + parts.finish() == expected


def test_what_is_no_token_is_not_held_back():
    parts = WithoutTokens(TOKENS)
    assert parts.push("a < b [") == "a < b "
    assert parts.push(" c") == "[ c"


class Special(ByteTokenizer):
    """A tokenizer with special tokens, which are bytes of their own."""

    special_tokens = frozenset({"[TOOL_CALLS]", "</s>"})

    def tag_ids(self, tag):
        return [{"[TOOL_CALLS]": 1, "</s>": 2}[tag]]


def mistral(text, sampling, tools=TOOLS):
    answering = ChatOutputConfig(Special(), AnswerFormat(TOOL_FORMATS["mistral"]))
    options = ChatOptions(tools=tools)
    held = answering.held(options, sampling, [])
    split = answering.answers(options, sampling, [])
    return held, split and outcome(split, events(text))[0]


def test_tags_that_are_special_tokens_are_kept_and_others_left_out():
    text = 'a</s>[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    held, output = mistral(text, SamplingParams())
    assert not held.skip_special_tokens
    assert (output.text, [call.name for call in output.tool_calls]) == ("a", ["now"])
    held, output = mistral(text, SamplingParams(skip_special_tokens=False))
    assert (output.text, [call.name for call in output.tool_calls]) == ("a</s>", ["now"])
    assert mistral(text, SamplingParams(), tools=()) == (SamplingParams(), None)


def answering(answer_format=QWEN):
    return ChatOutputConfig(ByteTokenizer(), answer_format)


@pytest.mark.parametrize("choice", [ToolChoice(ToolChoiceMode.REQUIRED), ToolChoice(ToolChoiceMode.NAMED, "now")])
def test_a_call_that_must_come_is_a_structural_tag(choice):
    options = ChatOptions(tools=TOOLS, tool_choice=choice)
    held = answering().held(options, SamplingParams(), list(b"assistant: <think>\n"))
    assert held.structured_outputs is not None
    tag = str(held.structured_outputs.structural_tag)
    assert tag.startswith('{"type":"structural_tag","format":{"type":"sequence","elements":[{"type":"tag","begin":"",')
    assert ("weather" in tag) == (choice.name is None)
    closed = answering().held(options, SamplingParams(), list(b"assistant: "))
    assert '"optional"' in str(closed.structured_outputs)


def test_a_free_choice_is_held_to_nothing():
    for options in (ChatOptions(), ChatOptions(tools=TOOLS), ChatOptions(tools=TOOLS, tool_choice=NONE)):
        assert answering().held(options, SamplingParams(), [1]) == SamplingParams()
    held = answering().held(ChatOptions(tools=TOOLS, parallel_tool_calls=False), SamplingParams(), [1])
    assert '"stop_after_first":true' in str(held.structured_outputs)


@pytest.mark.parametrize(("kind", "wanted"), [("string", '{"city": "7"}'), ("integer", '{"city": 7}')])
def test_arguments_have_the_types_of_the_tools_of_the_request(kind, wanted):
    schema = {"type": "object", "properties": {"city": {"type": kind}}}
    given = answering(AnswerFormat(TOOL_FORMATS["glm47"]))
    split = given.answers(ChatOptions(tools=(Tool("weather", parameters=schema),)), SamplingParams(), [1])
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>"
    (output,) = outcome(split, events(text))
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("weather", wanted)]


NONE = ToolChoice(ToolChoiceMode.NONE)
REQUIRED = ChatOptions(tools=TOOLS, tool_choice=ToolChoice(ToolChoiceMode.REQUIRED))


def test_two_grammars_of_one_answer_are_refused():
    given = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    strict = ChatOptions(tools=(Tool("f", is_strict=True),))
    single = ChatOptions(tools=TOOLS, parallel_tool_calls=False)
    for options, why in ((REQUIRED, "'required'"), (strict, "a strict tool"), (single, "parallel_tool_calls of false")):
        with pytest.raises(InvalidArgument, match=rf"^sampling.structured_outputs: conflicts with .*{why}"):
            answering().held(options, given, [1])
    assert answering().held(ChatOptions(tools=TOOLS), given, [1]) == given


def test_options_of_structured_outputs_are_those_of_the_calls():
    options = StructuredOutputs(whitespace_pattern=" ?")
    held = answering().held(REQUIRED, SamplingParams(structured_outputs=options), [1]).structured_outputs
    assert held is not None
    assert (held.kind, held.whitespace_pattern) == (ConstraintKind.STRUCTURAL_TAG, " ?")


def test_tools_that_are_too_large_for_a_grammar_are_named():
    enum = {"enum": ["x" * 60_000]}
    tools = tuple(Tool(f"f{i}", parameters={"type": "object", "properties": {"a": enum}}) for i in range(9))
    options = ChatOptions(tools=tools, tool_choice=ToolChoice(ToolChoiceMode.REQUIRED))
    with pytest.raises(
        InvalidArgument, match=r"^tools: their grammar is invalid: 54\d{4} bytes, over the limit of 524288"
    ):
        answering().held(options, SamplingParams(), [1])


@pytest.mark.parametrize(
    ("answer_format", "options", "sampling", "error", "message"),
    [
        (AnswerFormat(), ChatOptions(tools=TOOLS), {}, Unsupported, "tools: .* set --tool-call-parser"),
        (QWEN, ChatOptions(tools=TOOLS), {"detokenize": False}, InvalidArgument, "sampling.detokenize: must be true"),
        (
            AnswerFormat(),
            ChatOptions(reasoning=ReasoningOptions(include=False)),
            {},
            Unsupported,
            "reasoning.include: .* --reasoning-parser",
        ),
        (
            AnswerFormat(),
            ChatOptions(reasoning=ReasoningOptions(thinking_token_budget=0)),
            {},
            Unsupported,
            "reasoning.thinking_token_budget: .* --reasoning-parser",
        ),
        (
            QWEN,
            ChatOptions(reasoning=ReasoningOptions(thinking_token_budget=0)),
            {"beam_width": 2},
            InvalidArgument,
            "reasoning.thinking_token_budget: must be left out with sampling.beam_width",
        ),
    ],
)
def test_what_cannot_be_answered_is_named(answer_format, options, sampling, error, message):
    with pytest.raises(error, match=f"^{message}"):
        answering(answer_format).check(options, SamplingParams(**sampling))


def think(prompt, budget, answer_format=QWEN, **fields):
    """Return the state of a completion's budget, as the request with this prompt has it."""
    processor = InputProcessor(ByteTokenizer(), FakeExecutor().geometry, answering=answering(answer_format))
    sampling = SamplingParams(thinking_token_budget=budget, **fields)
    return processor.make_request(request_id="r", sampling=sampling, prompt=Prompt(text=prompt)).thinking


@pytest.mark.parametrize(
    ("prompt", "is_open", "num_left"),
    [
        ("Tell me", False, 5),
        ("<think>", True, 5),
        ("a<think>\n12", True, 2),
        ("a<think>1234567", True, 0),
        ("<think>a</think>b", False, 5),
        ("<think>a</think>b<think>cd", True, 3),
        ("</think><thin", False, 5),
    ],
)
def test_thinking_of_a_completion_begins_with_the_tag_in_its_prompt(prompt, is_open, num_left):
    thinking = think(prompt, 5)
    assert thinking.is_open == is_open
    for _ in range(num_left):
        assert thinking.forced() is None
        thinking.push(ord("x"))
    assert thinking.forced() == (ord("<") if is_open else None)


def test_a_completion_that_opens_thinking_is_closed_after_its_budget():
    thinking = think("Q:", 2)
    for token_id in b"<think>ab":
        assert thinking.forced() is None
        thinking.push(token_id)
    closing = []
    while (token_id := thinking.forced()) is not None:
        closing.append(token_id)
        thinking.push(token_id)
    assert bytes(closing) == b"</think>"


def test_a_budget_of_minus_one_is_none():
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()
    assert think("<think>", -1) is None


def test_a_budget_of_a_completion_that_cannot_be_kept_is_named():
    with pytest.raises(Unsupported, match=r"^thinking_token_budget: .* --reasoning-parser"):
        think("<think>", 5, AnswerFormat())
    for unset in ({"beam_width": 2}, {"sampling_logprobs": True}):
        with pytest.raises(InvalidArgument, match=r"^thinking_token_budget: 5 is out of range: must be None with"):
            think("<think>", 5, **unset)


def test_a_chat_takes_its_budget_from_either_place_and_not_from_both():
    budgets = ChatOptions(reasoning=ReasoningOptions(thinking_token_budget=3)), SamplingParams(thinking_token_budget=3)
    prompt = list(b"assistant: <think>\n")
    for options, sampling in ((budgets[0], SamplingParams()), (ChatOptions(), budgets[1])):
        answering().check(options, sampling)
        thinking = answering().thinking(options, sampling, prompt)
        for _ in range(3):
            assert thinking.forced() is None
            thinking.push(ord("x"))
        assert thinking.forced() == ord("<")
    with pytest.raises(InvalidArgument, match=r"^sampling.thinking_token_budget: conflicts with reasoning\."):
        answering().check(*budgets)
    with pytest.raises(Unsupported, match=r"^thinking_token_budget: .* --reasoning-parser"):
        answering(AnswerFormat()).check(ChatOptions(), budgets[1])


def test_tools_that_nobody_may_call_need_no_format():
    answering(AnswerFormat()).check(ChatOptions(tools=TOOLS, tool_choice=NONE), SamplingParams(detokenize=False))
    assert answering(AnswerFormat()).answers(ChatOptions(), SamplingParams(), [1]) is None


def test_what_looks_like_a_call_is_content_where_nobody_may_call():
    split = answering().answers(ChatOptions(tools=TOOLS, tool_choice=NONE), SamplingParams(), [1])
    (output,) = outcome(split, events([TEXT]))
    assert (output.tool_calls, output.finish_reason) == ((), "stop")
    assert output.text == TEXT.partition("</think>\n\n")[2]
