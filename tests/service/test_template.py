"""A chat template gives what transformers gives, says what it refuses, and holds nobody up."""

import os
import signal
import subprocess

import pytest
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument, RequestTooLong, Unavailable
from jpaged.service.chat.__main__ import read_members_fast, remember_safe_attributes
from jpaged.service.chat.sandbox import TemplateProcess, _TemplateChild
from jpaged.service.chat.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
TALK = [{"role": "system", "content": ' Be "brief".\n'}, *USER, {"role": "assistant", "content": "ł 🐢 <b>"}, *USER]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ON_DEMAND = "{% if messages[0].content == 'now' %}{{ BODY }}{% endif %}" + PLAIN
NOW = [{"role": "user", "content": "now"}]
LOOPS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess()
    yield process
    process._child.end()


def made(process, source, messages=USER, max_bytes=1 << 20):
    return ChatTemplate(process, source, VARIABLES).render(messages, max_bytes=max_bytes)


@pytest.mark.parametrize(
    "source",
    [
        PLAIN,
        "{{ bos_token }}{% for m in messages %}\n    {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{%- if add_generation_prompt %}{{ messages[-1].role }}{% endif %}{{ tools is none }}{{ strftime_now('%Y') }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    ],
)
def test_the_text_is_that_of_transformers(process, source):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    template = ChatTemplate(process, source, tokenizer.special_tokens_map | VARIABLES)
    for messages in (USER, TALK):
        whole = tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True, **VARIABLES
        )
        assert template.render(messages, max_bytes=1 << 20) == whole


def test_a_text_travels_as_it_is(process):
    text = "\x00 \U0010ffff \r\n"
    assert made(process, "{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% if", "TemplateSyntaxError"),
        ("{{ messages[1].content }}", "UndefinedError: list object has no element 1"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (r"{{ '\ud800' }}", "UnicodeEncodeError"),
        ("{{ 'a' * 10**10 }}", "256 MiB of memory"),
        ("{{ 'a' * 2**21 }}", "2097152"),
        pytest.param(LOOPS, "2.0 s of processor time", marks=pytest.mark.long),
    ],
)
def test_a_broken_template_is_refused_at_once(process, source, problem):
    with pytest.raises(InvalidArgument, match=f"^model: its chat template .* one plain user message: {problem}"):
        ChatTemplate(process, source, {})


def test_a_template_that_refuses_a_lone_message_is_none_that_is_broken(process):
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + PLAIN
    template = ChatTemplate(process, source, {})
    assert template.render(TALK[:1], max_bytes=100) == 'system:  Be "brief".\n\n'
    with pytest.raises(InvalidArgument, match=r"^chat\.messages: system first$"):
        template.render(USER, max_bytes=100)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise_exception('roles must alternate')", "roles must alternate"),
        (r"raise_exception('no \ud83d here')", r"no \\ud83d here"),
        (r"'\ud83d'", "fails on them: UnicodeEncodeError"),
        (r"{}['\ud83d'].x", r"fails on them: UndefinedError: .*\\ud83d"),
        ("messages[7].content", "fails on them: UndefinedError"),
        ("'a' * 10**10", "needs more than 256 MiB of memory"),
        ("'%0999999999d' % 1", "needs more than 256 MiB of memory"),
    ],
)
def test_what_a_template_cannot_lay_out_is_the_callers_to_change(process, body, problem):
    template = ChatTemplate(process, ON_DEMAND.replace("BODY", body), {})
    with pytest.raises(InvalidArgument, match=rf"^chat\.messages: .*{problem}|^chat\.messages: {problem}"):
        template.render(NOW, max_bytes=1000)
    assert template.render(USER, max_bytes=1000) == "user: hi\n"


@pytest.mark.long
def test_a_template_that_never_yields_is_ended_and_the_next_one_runs(process):
    template = ChatTemplate(process, ON_DEMAND.replace("{{ BODY }}", LOOPS), {})
    with pytest.raises(InvalidArgument, match=r"^chat\.messages: the chat template needs more than 2\.0 s"):
        template.render(NOW, max_bytes=1000)
    assert template.render(USER, max_bytes=1000) == "user: hi\n"


def test_what_comes_out_too_long_is_not_even_sent(process):
    template = ChatTemplate(process, ON_DEMAND.replace("BODY", "'a' * 2**22"), {})
    with pytest.raises(RequestTooLong, match=r"^chat\.messages: .* 4194314 bytes, over the limit of 1000"):
        template.render(NOW, max_bytes=1000)
    assert template.render(USER, max_bytes=9) == "user: hi\n"


def test_messages_that_are_no_text_are_refused(process):
    with pytest.raises(InvalidArgument, match=r"^chat\.messages: contain something other than text"):
        made(process, PLAIN, [{"role": "user", "content": object()}])


@pytest.mark.long
def test_a_process_that_was_killed_is_started_again(process):
    template = ChatTemplate(process, PLAIN, {})
    os.kill(process._child.process.pid, signal.SIGKILL)
    process._child.process.wait()
    assert template.render(USER, max_bytes=100) == "user: hi\n"


@pytest.mark.long
def test_a_process_that_cannot_be_started_is_said(process, monkeypatch):
    template = ChatTemplate(process, PLAIN, {})

    def refuse(*words, **options):
        raise OSError(11, "Resource temporarily unavailable")

    process._child.end()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(Unavailable, match=r"cannot be started: .*temporarily unavailable"):
            template.render(USER, max_bytes=100)
    assert template.render(USER, max_bytes=100) == "user: hi\n"


def test_a_process_ends_with_its_owner():
    owner = TemplateProcess()
    child = owner._child.process
    assert child.poll() is None
    del owner
    assert child.wait(60) == -signal.SIGKILL


def test_a_developers_message_is_the_systems_where_a_template_knows_no_developers(process):
    messages = [{"role": "developer", "content": "Be kind."}, *USER]
    source = "{% for m in messages %}{{ m.role }},{% endfor %}"
    assert made(process, source, messages) == "system,user,"
    told_apart = f"{source}{{% if messages[0].role == 'developer' %}}!{{% endif %}}"
    assert made(process, told_apart, messages) == "developer,user,!"


def test_a_process_that_does_not_answer_is_not_waited_for_again():
    error = _TemplateChild.reason(None, TimeoutError())  # type: ignore[arg-type]
    assert isinstance(error, Unavailable)
    assert "did not answer within" in str(error)


def test_a_remembered_check_answers_as_jinjas_own():
    class Remembering(ImmutableSandboxedEnvironment):
        pass

    class Nested(Namespace):
        pass

    remember_safe_attributes(Remembering)
    plain, remembering = ImmutableSandboxedEnvironment(), Remembering()
    values = [{}, [], "", 0, 0.0, True, None, (), set(), Namespace(), Nested(), len, lambda: 0, str, iter("")]
    names = {name for value in values for name in dir(value)} | {"_x", "__x", "x", "mro", "gi_frame", "f_globals"}
    for _ in range(2):
        for value in values:
            for name in names:
                ours = remembering.is_safe_attribute(value, name, None)
                assert ours == plain.is_safe_attribute(value, name, None), (value, name)
    source = (
        "{% set ns = namespace(n=1) %}{% for k in [{'a': 1}] %}{{ loop.index }}{{ k.get('a') }}{{ ns.n }}{% endfor %}"
    )
    assert remembering.from_string(source).render() == "111"
    for unsafe in ("[].append(1)", "{}.update({})", "''.__class__"):
        for _ in range(2):
            with pytest.raises(SecurityError):
                remembering.from_string("{{ " + unsafe + ".x }}").render()


MEMBERS = (
    "{{ m.content }}{{ m.missing }}{{ m.missing is defined }}{{ m.content is string }}{{ m['content'] }}",
    "{{ m.items is callable }}",
    "{% for k, v in m.items() %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ k }}{% endfor %}",
    "{{ m.get('content') }}{{ m.keys() | list }}{{ m.nested.deep.er }}{{ m.nested.gone.further }}",
    "{{ m.missing.further }}",
    "{{ m.__class__ }}{{ m.__class__.__mro__ }}",
    "{{ m.update({}) }}",
    "{{ m.pop('content') }}",
    "{{ m.values is callable }}{{ m.copy().content }}",
    "{% for c in m.content recursive %}{{ loop.depth }}{{ loop.nextitem }}{{ loop.previtem }}{% endfor %}",
    "{% for c in 'ab' %}{{ loop.__class__ }}{{ loop._iterator }}{{ loop.changed }}{{ loop.cycle(1, 2) }}{% endfor %}",
    "{{ '{0.__class__}'.format(m) }}{{ m['for' ~ 'mat'] }}{{ m.format }}",
    "{% set ns = namespace(a=1) %}{% set ns.a = m.nested %}{{ ns.a.deep.er }}{{ ns.b }}",
    "{{ (m | attr('content')) }}{{ m.0 }}{{ m.nested | map(attribute='deep') | list }}",
)


def outcome(environment, source):
    message = {"content": "hi", "nested": {"deep": {"er": "x"}}, "items": "own", "format": "f", "update": 1}
    try:
        return environment.from_string(source).render(m=message)
    except (TemplateError, TypeError, AttributeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("source", MEMBERS)
def test_members_that_are_read_fast_are_those_that_jinja_reads(source):
    class Fast(ImmutableSandboxedEnvironment):
        pass

    remember_safe_attributes(Fast)
    read_members_fast(Fast)
    assert outcome(Fast(), source) == outcome(ImmutableSandboxedEnvironment(), source)


def test_a_conversation_may_have_values_that_are_rare_in_json(process):
    source = (
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.n if m.tool_calls }};{% endfor %}"
    )
    arguments = {"n": 2**70, "x": 1.5}
    function = {"name": "f", "arguments": arguments}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    assert made(process, source, messages) == f"hi;{2**70};"
    arguments["n"] = -(2**63)
    assert made(process, source, messages) == f"hi;{-(2**63)};"
