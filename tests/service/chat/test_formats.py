"""A family's format is seen in its chat template, or named."""

import json
from typing import get_args

import pytest

from jpaged.chat import ChatAnswer, Tool, ToolCall, ToolChoice, ToolChoiceMode
from jpaged.config.engine_options import ReasoningParser, ToolCallParser
from jpaged.errors import InvalidArgument
from jpaged.service.chat.formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    AnswerFormat,
    parser_for,
)
from jpaged.service.chat.output_config import structural_tag_for
from jpaged.service.chat.output_parser import PlainParser

HERMES = '{% for t in tools %}{% endfor %}<tool_call>\n{{ \'{"name": "\' }}'
QWEN3 = HERMES + "{{ '</think>' }}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
LLAMA = "<|start_header_id|>{{ message.tool_calls[0] }}{{ '\"parameters\": ' }}"
R1 = "{{ '<\uff5cAssistant\uff5c>' }}{{ content.split('</think>')[-1] }}"
GPT_OSS = "<|channel|>analysis<|message|> to=functions.{{ name }}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("weather", parameters=SCHEMA), Tool("now"))
AUTO, REQUIRED = ToolChoice(ToolChoiceMode.AUTO), ToolChoice(ToolChoiceMode.REQUIRED)


@pytest.mark.parametrize(
    ("template", "architecture", "tools", "reasoning"),
    [
        (None, "LlamaForCausalLM", None, None),
        ("{{ messages }}", "Qwen2ForCausalLM", "hermes", None),
        (HERMES, "Qwen2ForCausalLM", "hermes", None),
        (QWEN3, "Qwen3ForCausalLM", "hermes", "qwen3"),
        (HERMES + "<function=", "Qwen3MoeForCausalLM", None, None),
        (LLAMA, "LlamaForCausalLM", "llama3_json", None),
        ("[TOOL_CALLS] [", "MistralForCausalLM", "mistral", None),
        ("[TOOL_CALLS]{{ name }}[ARGS][THINK]", "MistralForCausalLM", "mistral_args", "mistral"),
        (R1, "Qwen2ForCausalLM", "hermes", "deepseek_r1"),
        ("</think>", "DeepseekV3ForCausalLM", "hermes", "deepseek_r1"),
        ("{{ tools }}", "Qwen2ForCausalLM", None, None),
        (GPT_OSS, "GptOssForCausalLM", "openai", "openai_gptoss"),
        (HERMES + "<function={{ name }}><parameter={{ key }}>", "Qwen3MoeForCausalLM", "qwen3_coder", None),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value></think>", "X", "glm45", "qwen3"),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value></think>", "X", "glm47", "qwen3"),
        ("{{ '<minimax:tool_call>' }}<invoke name=...></think>", "X", "minimax_m2", "deepseek_r1"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a><seed:think></seed:think>", "X", "seed_oss", "seed_oss"),
        (R1 + "{{ tools }}<\uff5ctool\u2581call\u2581begin\uff5c>", "X", "deepseek_v31", "deepseek_r1"),
        (R1 + "{{ tools }}<\uff5ctool\u2581call\u2581begin\uff5c>```json", "X", "deepseek_v3", "deepseek_r1"),
        (R1 + "<\uff5ctool\u2581call\u2581begin\uff5c>```json", "Qwen2ForCausalLM", "hermes", "deepseek_r1"),
        (R1 + "{% set dsml = '\uff5cDSML\uff5c' %}<{{ dsml }}function_calls>", "X", "deepseek_v32", "deepseek_r1"),
        (R1 + "{% set dsml = '\uff5cDSML\uff5c' %}<{{ dsml + 'tool_calls>' }}", "X", "deepseek_v4", "deepseek_r1"),
        ("{{ tools }}<tool_call>, or a list: <tool_calls>[", "X", None, None),
        ("{{ tools }}{{ ']<]minimax[>[' + '<tool_call>' }}", "X", None, None),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "X", "kimi_k2", None),
        ("<think></think><|tool_calls_section_begin|><|tool_call_begin|>", "X", "kimi_k2", "kimi_k2"),
        ("<|start_of_role|>{{ tools }} only with <|tool_call|> and a list", "X", "granite", None),
        ("Here is my thought process: <|start_of_role|>{{ tools }}", "X", None, "granite"),
        ("<|start_of_role|>{{ tools }}<tool_call>", "GraniteMoeHybridForCausalLM", "hermes", None),
        ("<|header_start|>{{ tools }} [func_name1(param=1)] {{ m.tool_calls }}", "X", "pythonic", None),
        ("{{ tools }}<|tool_list_start|>", "Lfm2ForCausalLM", "lfm2", None),
        ("{{ tools }}<|tool_call_start|>[", "Lfm2ForCausalLM", "lfm2", None),
        ("{{ '<start_function_call>call:' + name }}", "Gemma3ForCausalLM", "functiongemma", None),
        ("{{ '<|tool_call>call:' + name }}{{ '<|channel>thought\n' }}", "X", "gemma4", "gemma4"),
    ],
)
def test_a_template_says_the_format(template, architecture, tools, reasoning):
    found = parser_for(template, architecture)
    assert (found.tools and found.tools.name, found.reasoning and found.reasoning.name) == (tools, reasoning)


def test_a_name_is_taken_instead():
    found = parser_for(QWEN3, "", tool_call_parser="llama3_json", reasoning_parser="none")
    assert found == AnswerFormat(TOOL_FORMATS["llama3_json"], None)
    assert parser_for("[ARGS]", "", tool_call_parser="mistral").tools == TOOL_FORMATS["mistral_args"]
    with pytest.raises(InvalidArgument, match=r"^tool_call_parser: 'x' is not one of auto, none, hermes, llama3_json"):
        parser_for(None, "", tool_call_parser="x")
    with pytest.raises(InvalidArgument, match=r"^reasoning_parser: 'hermes' is not one of auto, none, qwen3"):
        parser_for(None, "", reasoning_parser="hermes")


@pytest.mark.parametrize(
    ("name", "tail", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<\uff5cAssistant\uff5c>", True),
        ("deepseek_r1", "<\uff5cAssistant\uff5c><think>\n", True),
        ("deepseek_r1", "<\uff5cAssistant\uff5c></think>", False),
        ("openai_gptoss", "<|start|>assistant", False),
        ("gemma4", "<|turn>model\n", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("kimi_k2", "<|im_assistant|>assistant<|im_middle|><think>", True),
        ("seed_oss", "<seed:bos>assistant\n", False),
        ("granite", "<|start_of_role|>assistant<|end_of_role|>", False),
    ],
)
def test_a_prompt_says_whether_the_answer_begins_in_its_reasoning(name, tail, is_open):
    assert AnswerFormat(reasoning=REASONING_FORMATS[name]).is_open(tail) == is_open
    assert not AnswerFormat().is_open(tail)


def test_tags_that_are_special_tokens_must_be_kept():
    qwen = parser_for(QWEN3, "")
    assert not qwen.needs_special_tokens(["<|im_end|>"])
    assert qwen.needs_special_tokens(["<tool_call>"])
    assert not qwen.needs_special_tokens(["<tool_call>"], has_tools=False)
    assert qwen.needs_special_tokens(["<think>"], has_tools=False)
    assert parser_for("[TOOL_CALLS]", "").needs_special_tokens([])
    assert not AnswerFormat().needs_special_tokens(["<think>"])
    needing = {name for name, one in TOOL_FORMATS.items() if one.needs_special_tokens}
    texts = {"hermes", "qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss", "pythonic"}
    assert needing == TOOL_FORMATS.keys() - texts


def test_a_model_of_no_format_answers_in_content_alone():
    assert isinstance(AnswerFormat().parser(is_open=False), PlainParser)


def tag_of(tools, choice, name, **options):
    return structural_tag_for(tools, choice, AnswerFormat(TOOL_FORMATS[name]), **options)


def test_a_free_choice_holds_an_answer_to_nothing():
    for name in TOOL_FORMATS:
        assert tag_of(TOOLS, AUTO, name) is None
        assert tag_of(TOOLS, ToolChoice(ToolChoiceMode.NONE), name) is None
    assert structural_tag_for(TOOLS, REQUIRED, AnswerFormat()) is None


def written(form):
    """A text of a structural tag: its first alternative, with every optional part."""
    match form["type"]:
        case "const_string":
            return form["value"]
        case "json_schema":
            schema = form["json_schema"]
            return json.dumps("Oslo" if schema["type"] == "string" else dict.fromkeys(schema["properties"], "Oslo"))
        case "any_text":
            return "Oslo"
        case "regex":
            return {"()": "", "[0-9]{1,4}": "0", "(; ?)?": "", "[A-Za-z0-9]{9}": "Ab3Ab3Ab3"}[form["pattern"]]
        case "tag":
            return form["begin"] + written(form["content"]) + form["end"]
        case "sequence":
            return "".join(map(written, form["elements"]))
        case "or":
            return written(form["elements"][0])
        case "tags_with_separator":
            return written(form["tags"][0])
    return written(form["content"])


def test_a_required_call_is_of_any_tool_and_no_text_comes():
    calls = {
        "type": "or",
        "elements": [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
                "content": {"type": "json_schema", "json_schema": schema},
                "end": "}\n</tool_call>",
            }
            for name, schema in (("weather", SCHEMA), ("now", {"type": "object", "properties": {}}))
        ],
    }
    assert tag_of(TOOLS, REQUIRED, "hermes") == {
        "type": "structural_tag",
        "format": {
            "type": "plus",
            "content": calls,
        },
    }


def test_a_named_call_is_of_that_tool_and_one_alone():
    form = tag_of(TOOLS, ToolChoice(ToolChoiceMode.NAMED, "now"), "llama3_json")["format"]
    assert (form["type"], form["begin"]) == ("tag", '{"name": "now", "parameters": ')
    single = tag_of(TOOLS, REQUIRED, "hermes", is_parallel=False)["format"]
    assert (single["type"], len(single["elements"])) == ("or", 2)


def test_strict_tools_are_held_to_their_schemas_where_the_choice_is_free():
    tools = (Tool("weather", parameters=SCHEMA, is_strict=True), Tool("now"))
    form = tag_of(tools, AUTO, "hermes")["format"]
    assert [one["content"]["json_schema"] for one in form["tags"]] == [SCHEMA, {"type": "object"}]
    assert (form["at_least_one"], form["stop_after_first"]) == (False, False)


def test_a_free_choice_of_one_call_ends_behind_it():
    form = tag_of(TOOLS, AUTO, "hermes", is_parallel=False)["format"]
    assert (form["at_least_one"], form["stop_after_first"]) == (False, True)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_tag_lets_through_is_a_call_to_the_parser(name):
    for tool in TOOLS:
        form = tag_of(TOOLS, ToolChoice(ToolChoiceMode.NAMED, tool.name), name)["format"]
        text = written(form)
        assert not TOOL_FORMATS[name].triggers or text.startswith(TOOL_FORMATS[name].triggers)
        schemas = {one.name: one.parameters for one in TOOLS}
        parser = AnswerFormat(TOOL_FORMATS[name]).parser(is_open=False, new_id=lambda: "id", schemas=schemas)
        answer = ChatAnswer.of(parser.push(text) + parser.finish())
        arguments = '{"city": "Oslo"}' if tool is TOOLS[0] else "{}"
        call_id = {"kimi_k2": f"functions.{tool.name}:0", "mistral_args": "Ab3Ab3Ab3"}.get(name, "id")
        assert answer == ChatAnswer(tool_calls=(ToolCall(call_id, tool.name, arguments),))


def test_the_options_name_every_format():
    assert get_args(ToolCallParser) == ("auto", "none", *TOOL_FORMATS, *TOOL_ALIASES)
    assert get_args(ReasoningParser) == ("auto", "none", *REASONING_FORMATS, *REASONING_ALIASES)
    for name, known in TOOL_ALIASES.items():
        assert parser_for(None, "", tool_call_parser=name).tools is TOOL_FORMATS[known]
    for name, known in REASONING_ALIASES.items():
        assert parser_for(None, "", reasoning_parser=name).reasoning is REASONING_FORMATS[known]
