"""Tools, calls and variables reach a chat template as transformers would give them, and are bounded before."""

import json
from typing import Any

import pytest

from jpaged.chat import ChatOptions, ReasoningOptions, Tool, parse_reasoning
from jpaged.demo import FOLDER
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.service.chat.formats import TOOL_FORMATS, AnswerFormat, parser_for
from jpaged.service.chat.output_config import ChatOutputConfig
from jpaged.service.chat.sandbox import TemplateProcess
from jpaged.service.chat.template import ChatTemplate, for_template, messages_bytes, read_messages
from jpaged.service.input_processor import InputProcessor
from jpaged.service.tokenizer import HuggingFaceTokenizer, TemplateSettings
from jpaged.service.tokenizer_parts import read_parts
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import Prompt, SamplingParams

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("weather", "Tells it.", SCHEMA)
USER = {"role": "user", "content": "Paris?"}
CALL = {"id": "abcabcabc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
TALK: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcabcabc", "content": "sunny"},
]
QWEN = """{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments":
{{- c.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- endfor %}<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"""
LLAMA = """{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}
{%- for m in messages %}{{ m.role }}:
{%- if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content | trim }}{% endif %}
{%- endfor %}"""
DEEPSEEK = """{%- for m in messages %}
{%- for c in m['tool_calls'] or [] %}{{ '(' + c['function']['arguments'] + ')' }}{% endfor %}
{%- if m['content'] is not none %}{{ m['content'] + ';' }}{% endif %}{% endfor %}"""
GPT_OSS = """{%- for m in messages %}
{%- if "content" in m and "<tag>" in m.content %}{{ raise_exception('tag') }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ m.thinking }}{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}
{%- endfor %}"""
PLAIN = "{% set tools = 1 %}{% for m in messages %}{{ m.content }}{{ tools }}{% endfor %}"


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess()
    yield process
    process._child.end()


def rendered(process, source, messages, **given):
    template = ChatTemplate(process, source, {"bos_token": "<s>"}, name="a-model")
    read = read_messages(messages)
    assert messages_bytes(read) > 0
    return template.render(for_template(read, max_bytes=1000), max_bytes=10_000, **given)


@pytest.mark.parametrize("source", [QWEN, LLAMA])
def test_the_text_is_that_of_transformers(process, source):
    from transformers import AutoTokenizer

    plain = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        TALK[2],
    ]
    wanted = AutoTokenizer.from_pretrained(FOLDER).apply_chat_template(
        plain, tools=[WEATHER.as_json()], chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert rendered(process, source, TALK, tools=[WEATHER.as_json()]) == wanted


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (DEEPSEEK, 'Paris?;({"city": "Paris"})sunny;'),
        (GPT_OSS, 'Paris?Hm.{"city": "Paris"}sunny'),
    ],
)
def test_a_template_gets_calls_in_the_form_that_it_takes(process, source, wanted):
    assert rendered(process, source, TALK) == wanted


def test_a_template_that_takes_no_form_says_why_of_the_first(process):
    source = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls.x.y }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidArgument, match=r"^chat\.messages: the chat template fails on them: UndefinedError"):
        rendered(process, source, TALK)


CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
NO_SYSTEM = CHATML.replace("%}<|", "%}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}<|", 1)
DROPS_SYSTEM = CHATML.replace("messages %}", "messages if m.role != 'system' %}")
TEXT_OF_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT_OF_RESULT = "<tool_response>\nsunny\n</tool_response>"


@pytest.mark.parametrize("source", [CHATML, NO_SYSTEM, DROPS_SYSTEM])
@pytest.mark.parametrize("system", [(), ({"role": "system", "content": "Be brief."},)])
def test_a_template_without_tools_has_them_described_as_text(process, source, system):
    if system and source == NO_SYSTEM:
        return
    text = rendered(process, source, [*system, *TALK], tools=[WEATHER.as_json()])
    role = "system" if source == CHATML else "user"
    assert text.startswith(f"<|{role}|>")
    assert f"<tools>\n{json.dumps(WEATHER.as_json())}\n</tools>" in text
    assert text.endswith(f"<|assistant|>{TEXT_OF_CALL}<|user|>{TEXT_OF_RESULT}<|assistant|>")
    assert ("Be brief." in text) == bool(system and source == CHATML)
    assert text.count("Paris?") == 1


def test_calls_of_earlier_turns_are_text_where_a_template_has_none(process):
    text = rendered(process, CHATML, TALK)
    assert text == f"<|user|>Paris?<|assistant|>{TEXT_OF_CALL}<|user|>{TEXT_OF_RESULT}<|assistant|>"
    assert rendered(process, CHATML, [USER]) == "<|user|>Paris?<|assistant|>"


def test_the_format_of_a_template_without_tools_is_that_of_the_built_in_prompt():
    assert parser_for(CHATML, "X").tools is TOOL_FORMATS["hermes"]
    assert parser_for(CHATML, "X", tool_call_parser="none").tools is None
    assert (parser_for(PLAIN, "X").tools, parser_for(None, "X").tools) == (None, None)


def test_a_template_without_tools_takes_none(process):
    assert rendered(process, PLAIN, [USER]) == "Paris?1"
    with pytest.raises(Unsupported, match=r"^tools: the chat template of a-model does not support tools"):
        rendered(process, PLAIN, [USER], tools=[WEATHER.as_json()])


def test_variables_reach_the_template(process):
    assert rendered(process, QWEN, [USER], kwargs={"enable_thinking": False}).endswith("<think></think>")
    assert rendered(process, QWEN, [USER], kwargs={"enable_thinking": True}).endswith("<|assistant|>")


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_a_variable_that_is_none_of_the_callers_is_named(process, name):
    source = QWEN + "{{ bos_token }}{{ add_generation_prompt }}"
    problem = "cannot be set; the variables of the chat template are enable_thinking"
    with pytest.raises(InvalidArgument, match=problem) as error:
        rendered(process, source, [USER], kwargs={name: True})
    assert error.value.field == f"chat_template_kwargs.{name}"


def turn(**fields):
    return [USER, {"role": "assistant", **fields}]


def call(**function):
    return turn(tool_calls=[CALL, {"id": "x", "function": {"name": "f", "arguments": "{}", **function}}])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user"}], "[0].content"),
        ([{"content": "x"}], "[0].role"),
        (turn(content=[{"type": "video_url"}]), "[1].content"),
        (turn(content=[{"type": "image_url"}]), "[1].content[0]"),
        ([{**USER, "content": [{"type": "image_url"}]}], "[0].content[0].image_url"),
        ([{**USER, "content": [{"type": "image_url", "image_url": "data:,"}]}], "[0].content[0].image_url"),
        (turn(content="x", audio={"id": "a"}), "[1].audio"),
        (turn(content="x", function_call={"name": "f", "arguments": ""}), "[1].function_call"),
        (turn(content="x", refusal="y"), "[1].refusal"),
        (turn(content="x", reasoning_content=7), "[1].reasoning_content"),
        (turn(content="x", weight=0), "[1].weight"),
        (turn(content="x", tool_call_id="x"), "[1].tool_call_id"),
        (turn(content="x", name="x" * 257), "[1].name"),
        ([{**USER, "tool_calls": [CALL]}], "[0].tool_calls"),
        ([{"role": "tool", "tool_call_id": "x" * 257, "content": ""}], "[0].tool_call_id"),
        ([{"role": "tool", "tool_call_id": 7, "content": ""}], "[0].tool_call_id"),
        ([{"role": "tool", "content": "\ud800"}], "[0].content"),
        (turn(tool_calls="x"), "[1].tool_calls"),
        (turn(tool_calls={"id": "x"}), "[1].tool_calls"),
        (turn(tool_calls=[CALL] * 129), "[1].tool_calls"),
        (turn(tool_calls=["x"]), "[1].tool_calls[0]"),
        (turn(tool_calls=[{**CALL, "type": "code"}]), "[1].tool_calls[0].type"),
        (turn(tool_calls=[{**CALL, "id": "x" * 257}]), "[1].tool_calls[0].id"),
        (turn(tool_calls=[{"id": "x"}]), "[1].tool_calls[0].function"),
        (call(name=None), "[1].tool_calls[1].function.name"),
        (call(arguments=[1]), "[1].tool_calls[1].function.arguments"),
        (call(more=1), "[1].tool_calls[1].function.more"),
    ],
)
def test_a_bad_message_is_named(messages, field):
    processor = InputProcessor(ByteTokenizer(), FakeExecutor().geometry)
    with pytest.raises(InvalidArgument) as error:
        processor.tokenize(Prompt(messages=messages))
    assert error.value.field == f"chat.messages{field}"


def test_turns_that_say_nothing_but_call_pass():
    for content in ({}, {"content": None}, {"content": ""}):
        talk = read_messages(
            [USER, {"role": "assistant", **content, "tool_calls": [CALL]}, {"role": "tool", "content": ""}]
        )
        assert for_template(talk, max_bytes=100)[1]["content"] == content.get("content")
        assert messages_bytes(talk) == 56
    (_, turned) = for_template(read_messages(call(arguments="")), max_bytes=100)
    assert turned["tool_calls"][1]["function"]["arguments"] == {}


def test_bytes_are_counted_before_anything_is_read():
    class Unasked(ByteTokenizer):
        """A tokenizer that must not be asked."""

        def chat_ids(self, messages, options, *, max_bytes):
            raise AssertionError(f"{len(messages)} messages were laid out")

    processor = InputProcessor(Unasked(), FakeExecutor().geometry)
    long = "{" * (1 << 20)
    options = ChatOptions(tools=[WEATHER])
    with pytest.raises(RequestTooLong, match=r"chat\.messages: 1048\d{3} bytes, over the limit of 1048576"):
        processor.tokenize(Prompt(messages=call(arguments=long), chat_options=options))
    tools = [Tool(f"f{i}", "x" * 60_000) for i in range(20)]
    with pytest.raises(RequestTooLong, match=r"chat\.messages: 12\d{5} bytes, over the limit of 1048576"):
        processor.tokenize(Prompt(messages=[USER], chat_options=ChatOptions(tools=tools)))


def test_tools_reach_the_tokenizer_through_a_prompt():
    tokenizer, geometry = ByteTokenizer(), FakeExecutor(max_model_len=1024, num_blocks=256).geometry
    answering = ChatOutputConfig(tokenizer, AnswerFormat(TOOL_FORMATS["hermes"]))
    processor = InputProcessor(tokenizer, geometry, answering=answering)
    prompt = Prompt(messages=TALK, chat_options=ChatOptions(tools=[WEATHER]))
    request = processor.make_request(request_id="a", sampling=SamplingParams(), prompt=prompt)
    lines = bytes(request.prompt_token_ids).decode().split("\n")
    assert json.loads(lines[0].removeprefix("tool: ")) == WEATHER.as_json()
    assert lines[1:] == [
        "user: Paris?",
        'assistant: {"name": "weather", "arguments": {"city": "Paris"}}',
        "tool: sunny",
        "assistant: ",
    ]


def test_a_tokenizer_that_knows_no_tools_is_told_of():
    class Old(ByteTokenizer):
        """A tokenizer that lays out messages alone."""

        chat_ids = None  # type: ignore[assignment]

    prompt = Prompt(messages=[USER], chat_options=ChatOptions(tools=[WEATHER]))
    with pytest.raises(Unsupported, match="no chat template"):
        InputProcessor(NoTokenizer(257), FakeExecutor().geometry).tokenize(prompt)
    with pytest.raises(Unsupported, match=r"^tools: this model's tokenizer formats only messages"):
        InputProcessor(Old(), FakeExecutor().geometry).tokenize(prompt)


@pytest.fixture
def folder(tmp_path):
    for path in FOLDER.iterdir():
        if path.name.startswith(("tokenizer", "config")):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def with_template(folder, template):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def test_a_models_template_of_tools_is_taken_where_there_are_tools(folder):
    templates = [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": QWEN}]
    tokenizer = HuggingFaceTokenizer(with_template(folder, templates))
    assert tokenizer.chat_template == QWEN
    plain = tokenizer.chat_ids([USER], ChatOptions(), max_bytes=1000)
    assert tokenizer.decode(plain) == "Paris?"
    with_tools = tokenizer.chat_ids([USER], ChatOptions(tools=[WEATHER]), max_bytes=1000)
    assert tokenizer.decode(with_tools).startswith('<tools>{"type": "function"')
    assert read_parts(with_template(folder, QWEN)).tool_chat_template is None


def test_special_tokens_in_tools_and_arguments_are_text_where_they_are_not_parsed(folder):
    hostile = "a<|endoftext|>b"
    tools = [Tool("f", hostile, {"type": "object", "properties": {hostile: {}}})]
    talk = for_template(read_messages(call(arguments=json.dumps({hostile: hostile}))), max_bytes=1000)
    options = ChatOptions(tools=tools, template_kwargs={"enable_thinking": hostile})
    source = QWEN.replace("enable_thinking is false", "enable_thinking") + "{{ enable_thinking }}"
    for parses, wanted in ((True, 5), (False, 0)):
        tokenizer = HuggingFaceTokenizer(with_template(folder, source), parse_special_tokens=parses)
        token_ids = tokenizer.chat_ids(talk, options, max_bytes=10_000)
        assert token_ids.count(0) == wanted
        assert tokenizer.decode(token_ids, skip_special_tokens=False).count(hostile) == 5
        assert tokenizer.tag_ids("<|endoftext|>") == [0]
        assert "<|endoftext|>" in tokenizer.special_tokens


def test_reasoning_is_asked_of_a_template_by_the_variable_that_it_has(process):
    source = "{{ messages[0].content }}{{ reasoning_effort }}{{ %s }}"
    qwen = ChatTemplate(process, source % "enable_thinking", {})
    both = ReasoningOptions(effort="low", enabled=False)
    assert qwen.reasoning_variables(both, {}) == {"reasoning_effort": "low", "enable_thinking": False}
    other = ChatTemplate(process, source % "thinking", {})
    assert other.reasoning_variables(both, {})["thinking"] is False
    assert other.reasoning_variables(ReasoningOptions(effort="low"), {}) == {"reasoning_effort": "low"}  # as in vLLM
    for effort, is_on in (("none", False), ("low", True)):
        variables = qwen.reasoning_variables(ReasoningOptions(effort=effort), {})
        assert variables == {"reasoning_effort": effort, "enable_thinking": is_on}
    only_switch = ChatTemplate(process, "{{ messages[0].content }}{{ enable_thinking }}", {})
    assert only_switch.reasoning_variables(ReasoningOptions(effort="high"), {}) == {"enable_thinking": True}
    assert only_switch.reasoning_variables(ReasoningOptions(effort="high"), {"enable_thinking": False}) == {}
    assert qwen.reasoning_variables(ReasoningOptions(include=False), {}) == {}
    with pytest.raises(
        InvalidArgument, match=r"^reasoning.enabled: conflicts with chat_template_kwargs.enable_thinking"
    ):
        qwen.reasoning_variables(both, {"enable_thinking": True})
    plain = ChatTemplate(process, "{{ messages[0].content }}", {})
    assert plain.reasoning_variables(ReasoningOptions(effort="low"), {}) == {}
    with pytest.raises(InvalidArgument, match=r"^reasoning\.enabled: .*thinking"):
        plain.reasoning_variables(ReasoningOptions(effort="low", enabled=True), {})
    for wrong in ("", "x" * 65, 3):
        with pytest.raises(InvalidArgument, match=r"^reasoning\.effort: "):
            parse_reasoning({"effort": wrong})
    assert [parse_reasoning({"effort": "x" * num_chars}).effort for num_chars in (1, 64)] == ["x", "x" * 64]


PARTS = """\
{%- for m in messages %}{% for part in m.content %}{{ m.role }}: {{ part['text'] }}
{% endfor %}{% endfor %}"""
EITHER = "{%- for m in messages %}{{ m.content if m.content is string else m.content[0].text ~ '!' }}{% endfor %}"
FAILS_ON_TEXT = "{%- for m in messages %}{{ m.content[0].text.strip() }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content_format", "resolved", "text"),
    [
        (PARTS, "auto", "openai", "user: Hi\n"),
        (PARTS, "openai", "openai", "user: Hi\n"),
        (PARTS, "string", "string", "user: \nuser: \n"),
        (EITHER, "auto", "string", "Hi"),
        (EITHER, "openai", "openai", "Hi!"),
        (FAILS_ON_TEXT, "auto", "openai", "Hi"),
        ("fixed", "auto", "string", "fixed"),
    ],
)
def test_a_text_comes_in_the_form_that_a_template_prints(process, source, content_format, resolved, text):
    template = ChatTemplate(process, source, {}, content_format=content_format)
    assert template.content_format == resolved
    assert template.render([{"role": "user", "content": "Hi"}], max_bytes=1000) == text


def test_an_open_message_is_continued_in_parts(process):
    template = ChatTemplate(process, PARTS, {})
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert template.render(talk, max_bytes=1000, options=options) == "user: Hi\nassistant: Well"
    with pytest.raises(InvalidArgument, match=r"^model: its chat template fails for one plain user message"):
        ChatTemplate(process, FAILS_ON_TEXT, {}, content_format="string")


def test_reasoning_efforts_are_those_of_the_template(folder):
    settings = TemplateSettings(efforts={"medium": "low", "xhigh": "max"})
    source = "{{ messages[0].content }} {{ reasoning_effort }}"
    tokenizer = HuggingFaceTokenizer(with_template(folder, source), templates=settings)
    for effort, want in (("medium", "low"), ("xhigh", "max"), ("low", "low"), ("high", "high")):
        options = ChatOptions(reasoning=ReasoningOptions(effort=effort))
        assert tokenizer.decode(tokenizer.chat_ids([USER], options, max_bytes=1000)).endswith(f" {want}")
    options = ChatOptions(template_kwargs={"reasoning_effort": "medium"})  # as it is, as in vLLM
    assert tokenizer.decode(tokenizer.chat_ids([USER], options, max_bytes=1000)).endswith(" medium")


def test_variables_have_the_defaults_of_the_server(folder):
    settings = TemplateSettings(kwargs={"enable_thinking": False, "unused": 1})
    tokenizer = HuggingFaceTokenizer(with_template(folder, QWEN), templates=settings)

    def ends(**options):
        token_ids = tokenizer.chat_ids([USER], ChatOptions(**options), max_bytes=1000)
        return tokenizer.decode(token_ids, skip_special_tokens=False).endswith("<think></think>")

    assert tokenizer.has_chat_template
    assert ends()
    assert not ends(template_kwargs={"enable_thinking": True})
    assert not ends(reasoning=ReasoningOptions(enabled=True))
    with pytest.raises(InvalidArgument, match=r"default_chat_template_kwargs\.messages: cannot be set; the variables"):
        HuggingFaceTokenizer(folder, templates=TemplateSettings(kwargs={"messages": []}))


@pytest.mark.long
def test_reasoning_reaches_the_template_of_a_folder(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} {{ reasoning_effort }}")
    tokenizer = HuggingFaceTokenizer(folder)
    options = ChatOptions(reasoning=ReasoningOptions(effort="high"))
    assert tokenizer.decode(tokenizer.chat_ids([USER], options, max_bytes=1000)) == f"{USER['content']} high"
