"""What servers answer is accepted back in every form, and reaches the chat template."""

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from jpaged.chat import ChatOptions, Tool, build_chat_options, read_message
from jpaged.client import AsyncClient
from jpaged.client.batch import BatchOptions, run_batch
from jpaged.client.convert import chat_message
from jpaged.config import EngineConfig
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.json_text import check_values
from jpaged.llm import LLM
from jpaged.openai.request import chat_job
from jpaged.openai.response_input import build_messages
from jpaged.openai.responses import parse_responses_request
from jpaged.server.servicer import chat_options_from, messages_from
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.service.chat.sandbox import template_process
from jpaged.service.chat.template import ChatTemplate, for_template, messages_bytes, read_messages
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.testing.fake_model import Script
from jpaged.types import Prompt, SamplingParams
from tests.server.harness import make_serving, running

USER = {"role": "user", "content": "Paris?"}
ODD = [
    "",
    "{x: 1}",
    '{"a": "cut off',
    '{"a": NaN}',
    '{"a": 1e400}',
    '{"a": "\\ud800"}',
    "\ud800",
    '{"a": ' * 70 + "1" + "}" * 70,
    '{"a": ' * 30_000,
    "[1]",
    "null",
    "9" * 5000,
]
PRINTS = """{% for m in messages %}{{ m.role }}:{% if m.content is not none %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};
{%- endfor %}"""
ADDS = """{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}
{{- '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}"""
ITEMS = """{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}
{%- for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}{% endfor %}"""
NONE = """{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{# tools, tool_calls #}"""
DROPS = """{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}{% endfor %}"""


def calling(arguments: str, name: str = "f", **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}], **fields}


def rendered(source: str, messages: list[dict[str, Any]], options: ChatOptions | None = None, **given: Any) -> str:
    read = read_messages(messages)
    messages_bytes(read)
    template = ChatTemplate(template_process(), source, {}, name="a-model")
    plain = for_template(read, max_bytes=1 << 20)
    return template.render(plain, max_bytes=1 << 20, options=options, **given)


@pytest.mark.parametrize("arguments", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("source", [PRINTS, ADDS, ITEMS])
def test_any_text_is_taken_as_arguments(source: str, arguments: str) -> None:
    assert rendered(source, [USER, calling(arguments, "any name: \ud800")]).startswith("user:")


def test_a_template_gets_the_text_where_it_holds_no_object() -> None:
    assert rendered(PRINTS, [USER, calling("{x: 1}")]).endswith('<f "{x: 1}">;')
    assert rendered(PRINTS, [USER, calling('{"x": 1}')]).endswith('<f {"x": 1}>;')
    assert rendered(ADDS, [USER, calling("{x: 1}")]).endswith("({x: 1})")
    assert rendered(ITEMS, [USER, calling("{x: 1}")]).endswith("<arguments={x: 1}>")


def test_odd_arguments_pass_every_door() -> None:
    for arguments in ODD:
        talk = [USER, calling(arguments, "a b"), USER]
        body = json.loads(json.dumps({"messages": talk}))
        check_values("body", body)
        (prompt,) = chat_job(body).prompts
        assert messages_from(chat_message(Prompt(messages=talk))) == prompt.messages
        call = {"type": "function_call", "call_id": "x", "name": "a b", "arguments": arguments}
        given = json.loads(json.dumps({"input": [USER, call, USER]}))
        check_values("body", given)
        (response,) = parse_responses_request(given).job.prompts
        assert response.messages == prompt.messages


EMPTY = [
    {"role": "user", "content": ""},
    {"role": "system", "content": ""},
    {"role": "tool", "content": "", "tool_call_id": "x"},
    {"role": "tool", "content": None},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "assistant", "content": [], "tool_calls": []},
    {"role": "assistant", "content": "", "reasoning_content": "Hm."},
    {"role": "assistant", "content": None, "reasoning_content": "Hm."},
]


@pytest.mark.parametrize("message", EMPTY)
def test_empty_text_is_text(message: dict[str, Any]) -> None:
    assert rendered(NONE, [USER, message]) == f"user:Paris?;{message['role']}:;"
    (_, sent) = messages_from(chat_message(Prompt(messages=[USER, message])))
    assert sent == read_message("m", message)


def test_no_template_prints_none_for_a_turn_that_only_calls() -> None:
    for content in (None, ""):
        assert rendered(NONE, [USER, calling("{}", content=content)]) == "user:Paris?;assistant:;"
    source = "{{ messages[-1].content is none }}{# tools, tool_calls #}"
    assert rendered(source, [USER, calling("{}", content="")]) == "False"
    source = "{{ 'null' if messages[-1].content is none }}{# tools, tool_calls #}"
    assert rendered(source, [USER, calling("{}")]) == "null"


def counted(source: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ChatTemplate, list[Any]]:
    """Return a template, and the list to which each of its later renderings adds its messages."""
    process, seen = template_process(), list[Any]()
    template, render = ChatTemplate(process, source, {}), process.render

    def recorded(source: str, variables: Any, messages: Any, *given: Any, **options: Any) -> Any:
        seen.append(messages)
        return render(source, variables, messages, *given, **options)

    monkeypatch.setattr(process, "render", recorded)
    return template, seen


NULLS = [
    (PRINTS, 1),
    (NONE, 2),
    ("{% for m in messages %}{{ m.content or '' }}{{ m.tool_calls }};{% endfor %}{# tools #}", 1),
    ("{% for m in messages %}{{ m.content ~ '.' }};{% endfor %}{# tools, tool_calls #}", 2),
    ("{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %};{% endfor %}{# tools, tool_calls #}", 2),
    ("{% for m in messages %}{{ m.reasoning_content and m.content }};{% endfor %}{# tools, tool_calls #}", 2),
]


@pytest.mark.parametrize(("source", "num_renderings"), NULLS)
def test_a_missing_content_is_compared_only_where_a_template_prints_it(
    source: str, num_renderings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, seen = counted(source, monkeypatch)
    messages = [{"role": "user", "content": "return None"}, calling("{}", reasoning_content="Hm.")]
    talk = for_template(read_messages(messages), max_bytes=1 << 20)
    first = template.render(talk, max_bytes=1 << 20)
    seen.clear()
    assert template.render(talk, max_bytes=1 << 20) == first
    assert len(seen) == num_renderings
    assert first.count("None") <= 1
    kind, with_text = template_process().render(
        source, {}, [{**one, "content": one["content"] or ""} for one in talk], 1 << 20
    )
    assert (kind.name, with_text) == ("RENDERED", first)


def test_a_role_that_was_printed_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}{{ tools or '' }}{# tool_calls #}"
    template, seen = counted(source, monkeypatch)
    for num_renderings in (2, 1):
        seen.clear()
        assert template.render([{"role": "tool", "content": 'a "b"'}, USER], max_bytes=1 << 20) == '"a \\"b\\"""Paris?"'
        assert len(seen) == num_renderings
    seen.clear()
    template.render([{"role": "critic", "content": 'a "b"'}, USER], max_bytes=1 << 20)
    assert len(seen) == 2


def test_fields_of_other_servers_change_nothing() -> None:
    notes: dict[str, Any] = {"annotations": [], "refusal": None, "audio": None, "function_call": None, "name": None}
    plain = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    theirs = {**plain, **notes, "tool_calls": None, "reasoning": "Hm.", "provider_specific_fields": {"a": 1}}
    assert read_message("m", theirs) == plain
    assert read_message("m", {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}) == plain
    call = calling("{}")["tool_calls"][0]
    numbered = {**plain, "tool_calls": [{**call, "index": 3}, {**call, "index": "a"}]}
    assert read_message("m", numbered) == read_message("m", {**plain, "tool_calls": [call, call]})
    parts = [{"type": "text", "text": "Y"}, {"type": "output_text", "text": "es.", "annotations": []}]
    assert read_message("m", {**plain, "content": parts}) == plain
    assert read_message("m", {"role": "assistant", "content": None, "refusal": "No."})["content"] == "No."


def test_a_role_that_the_template_leaves_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgument, match="'critic' is not a role of the chat template") as error:
        rendered(DROPS, [USER, {"role": "critic", "content": "Bad."}])
    assert error.value.field == "chat.messages[1].role"
    with pytest.raises(InvalidArgument, match="'critic' is not a role of the chat template"):
        rendered(DROPS, [USER, {"role": "critic", "content": "Paris"}])  # which is in the text by chance
    with pytest.raises(InvalidArgument, match="'critic' is not a role of the chat template"):
        rendered(
            DROPS, [USER, {"role": "critic", "content": "Bad."}], build_chat_options(tools=[Tool("now", "").as_json()])
        )
    assert rendered(DROPS, [{"role": "critic", "content": ""}, USER]) == "Paris?;"
    with caplog.at_level(logging.WARNING):
        assert rendered(DROPS, [{"role": "system", "content": "Be brief."}, USER]) == "Paris?;"
    assert "omits messages of the role 'system'" in caplog.text


CHATML = """{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}
{%- for d in documents or [] %}[{{ d.title }}]{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_the_end_of_a_text_is_as_asked_for() -> None:
    talk = [USER, {"role": "assistant", "content": "It is "}]
    assert rendered(CHATML, talk).endswith("It is <end><assistant>")
    closed = build_chat_options(add_generation_prompt=False)
    assert rendered(CHATML, talk, closed).endswith("It is <end>")
    for opens in (None, False):
        options = build_chat_options(continue_final_message=True, add_generation_prompt=opens)
        assert rendered(CHATML, talk, options).endswith("<assistant>It is ")
    with pytest.raises(InvalidArgument, match="add_generation_prompt of true"):
        build_chat_options(continue_final_message=True, add_generation_prompt=True)
    assert build_chat_options(continue_final_message=False, add_generation_prompt=True) == ChatOptions()


def test_documents_reach_a_template_that_uses_them() -> None:
    assert "[One]" in rendered(CHATML, [USER], documents=[{"title": "One"}])
    with pytest.raises(Unsupported, match=r"^documents: the chat template of a-model does not support documents"):
        rendered(NONE, [USER], documents=[{"title": "One"}])


def test_options_of_a_chat_travel() -> None:
    options = build_chat_options(continue_final_message=True, documents=[{"title": "é"}], chat_template="{{ 1 }}")
    assert chat_options_from(chat_message(Prompt(messages=[USER], chat_options=options))) == options


@pytest.fixture
def folder(tmp_path: Any) -> Any:
    for path in FOLDER.iterdir():
        if path.name.startswith(("tokenizer", "config")):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def with_templates(folder: Any, template: Any) -> Any:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


LIST = [{"name": "default", "template": NONE}, {"name": "tool_use", "template": "{{ tools[0].function.name }}" + NONE}]


@pytest.mark.long
def test_a_template_of_tools_is_tried_with_a_tool(folder: Any) -> None:
    tokenizer = HuggingFaceTokenizer(with_templates(folder, LIST))
    ids = tokenizer.chat_ids([USER], ChatOptions(tools=[Tool("f")]), max_bytes=1000)
    assert tokenizer.decode(ids) == "fuser:Paris?;"


def test_a_broken_template_disables_chats_and_not_the_model(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    broken = HuggingFaceTokenizer(with_templates(folder, "{% if"))
    assert not broken.has_chat_template and broken.encode("Once")
    with pytest.raises(Unsupported, match=r"its chat template fails .* TemplateSyntaxError.*chats are disabled"):
        broken.apply_chat_template([USER], max_bytes=100)
    assert len([one for one in caplog.records if "disabled" in one.message]) == 1
    no_default = HuggingFaceTokenizer(with_templates(folder, [{"name": "rag", "template": NONE}]))
    with pytest.raises(Unsupported, match="cannot be chosen"):
        no_default.apply_chat_template([USER], max_bytes=100)
    tools = [LIST[0], {"name": "tool_use", "template": "{{ 1 / 0 }}"}]
    half = HuggingFaceTokenizer(with_templates(folder, tools))
    assert half.decode(half.apply_chat_template([USER], max_bytes=100)) == "user:Paris?;"
    with pytest.raises(Unsupported, match=r"ZeroDivisionError.*chats with tools are disabled"):
        half.chat_ids([USER], ChatOptions(tools=[Tool("f")]), max_bytes=100)


def test_a_template_can_be_given(folder: Any) -> None:
    plain = HuggingFaceTokenizer(folder, chat_template=NONE)
    assert plain.decode(plain.apply_chat_template([USER], max_bytes=100)) == "user:Paris?;"
    with pytest.raises(InvalidArgument, match=r"^chat_template: the template fails"):
        HuggingFaceTokenizer(folder, chat_template="{% if")
    own = ChatOptions(chat_template="{{ messages[0].content }}!")
    with pytest.raises(InvalidArgument, match=r"^chat_template: .*--trust-request-chat-template"):
        plain.chat_ids([USER], own, max_bytes=100)
    trusting = HuggingFaceTokenizer(folder, trusts_request_templates=True)
    assert trusting.decode(trusting.chat_ids([USER], own, max_bytes=100)) == "Paris?!"
    with pytest.raises(InvalidArgument, match=r"^chat_template: the template fails"):
        trusting.chat_ids([USER], ChatOptions(chat_template="{{ 1 / 0 }}"), max_bytes=100)


ANSWERS = [
    "",
    "Yes.",
    "<think>Hm.</think>",
    "<think>Hm.",
    "<think>Hm.</think>Yes.",
    '<tool_call>{"name": "f", "arguments": {x: 1}}</tool_call>',
    '<tool_call>{"name": "a b", "arguments": {"x": NaN}}</tool_call>',
    '<think>Hm.</think>So<tool_call>{"name": "f", "arguments": {"x": [1, {"y": "cut',
]


TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
FLAT: Any = [{"type": "function", "name": "f", "parameters": {}, "strict": False}]
ONE = SamplingParams(max_tokens=1, temperature=1.0)
ALL = SamplingParams(max_tokens=200, temperature=1.0, n=len(ANSWERS))


def body(messages: list[Any], *, is_whole: bool = False) -> dict[str, Any]:
    limits = {"max_tokens": 200, "n": len(ANSWERS)} if is_whole else {"max_tokens": 1}
    return {"model": "fake", "messages": messages, "tools": TOOLS, "temperature": 1, **limits}


def talk_of(turns: Iterable[Any]) -> list[Any]:
    return [USER, *(message for turn in turns for message in (turn, USER))]


def turns_of(outputs: Iterable[Any]) -> list[dict[str, Any]]:
    """Our own client's answers as messages."""
    return [
        {
            "role": "assistant",
            "content": one.text,
            "reasoning_content": one.reasoning_content,
            "tool_calls": [call.as_json() for call in one.tool_calls],
        }
        for one in outputs
    ]


def items_of(messages: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages as the items of OpenAI's other API."""
    for message in messages:
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            summary = [{"type": "summary_text", "text": "Thought."}]
            yield {"type": "reasoning", "summary": summary, "content": content, "encrypted_content": "eA=="}
        calls = message.get("tool_calls") or ()
        if message.get("content") or not calls:
            yield {"role": message["role"], "content": message.get("content")}
        for call in calls:
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def lines_of(bodies: Sequence[dict[str, Any]]) -> bytes:
    common = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [{"custom_id": str(i), **common, "body": one} for i, one in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def results_of(lines: str, count: int) -> list[list[Any]]:
    """The messages of each line of a batch's results."""
    found = [json.loads(line) for line in lines.splitlines()]
    assert len(found) == count and all(one["error"] is None for one in found), found
    assert all(one["response"]["status_code"] == 200 for one in found), found
    return [[choice["message"] for choice in one["response"]["body"]["choices"]] for one in found]


async def by_file(target: str, folder: Path, bodies: Sequence[dict[str, Any]]) -> list[list[Any]]:
    (folder / "in.jsonl").write_bytes(lines_of(bodies))
    (folder / "out.jsonl").unlink(missing_ok=True)
    await run_batch(BatchOptions(folder / "in.jsonl", folder / "out.jsonl", target), lambda summary: None)
    return results_of((folder / "out.jsonl").read_text(), len(bodies))


async def by_upload(theirs: openai.AsyncOpenAI, bodies: Sequence[dict[str, Any]]) -> list[list[Any]]:
    file = await theirs.files.create(file=("in.jsonl", lines_of(bodies)), purpose="batch")
    options: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = await theirs.batches.create(input_file_id=file.id, **options)
    async with asyncio.timeout(300):
        while batch.status in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.02)
            batch = await theirs.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id is not None and batch.error_file_id is None, batch
    return results_of((await theirs.files.content(batch.output_file_id)).text, len(bodies))


async def test_any_answer_is_accepted_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append the answers of each API to its messages, each with a user turn: every API accepts the result."""
    answers = [list(one.encode()) for one in ANSWERS]
    kind: Any = type("Scripted", (FakeExecutor,), {})
    kind.sampled = staticmethod(Script(answers, list(b"assistant: "), ByteTokenizer.EOS))
    answer_format = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    sizes = {"num_blocks": 4096, "max_model_len": 4096}

    def build(config: EngineConfig, *_: object, **__: object) -> LoadedModel:
        return make_serving(kind(**sizes), config, answer_format=answer_format)

    monkeypatch.setattr("jpaged.local_model.build", build)
    options: Any = {"http_port": 0, "batch_dir": str(tmp_path / "batches")}
    async with running(executor=kind(**sizes), answer_format=answer_format, **options) as harness:
        client = AsyncClient(harness.target)
        theirs = openai.AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=0)
        llm = LLM("fake")
        chat = (await theirs.chat.completions.create(**body([USER], is_whole=True))).choices
        plain: Any = {"model": "fake", "prompt": "user: Paris?\nassistant: ", "max_tokens": 200, "n": len(ANSWERS)}
        written = (await theirs.completions.create(**plain)).choices
        alone: Any = {"model": "fake", "tools": FLAT}
        asked: Any = [USER]
        items: list[Any] = [USER]
        for answer in list(answers):
            answers[:] = [answer]
            response = await theirs.responses.create(input=asked, max_output_tokens=200, **alone)
            items += [*(item.to_dict() for item in response.output), USER]
        answers[:] = [list(one.encode()) for one in ANSWERS]
        heard = (await asyncio.to_thread(llm.chat, [USER], ALL, use_tqdm=False, tools=TOOLS))[0].outputs
        talks = {
            "http": talk_of(one.message.model_dump() for one in chat),
            "http, null left out": talk_of(one.message.to_dict() for one in chat),
            "completions": talk_of({"role": "assistant", "content": one.text} for one in written),
            "responses": build_messages(items, None),
            "grpc": talk_of(turns_of((await client.chat([USER], ALL, tools=TOOLS)).outputs)),
            "file": talk_of((await by_file(harness.target, tmp_path, [body([USER], is_whole=True)]))[0]),
            "upload": talk_of((await by_upload(theirs, [body([USER], is_whole=True)]))[0]),
            "llm": talk_of(turns_of(heard)),
        }
        assert all(len(talk) == 2 * len(ANSWERS) + 1 for talk in talks.values()), talks
        assert sum(len(one.tool_calls) for one in heard) > 1 and any(one.reasoning_content for one in heard)
        await theirs.responses.create(input=items, max_output_tokens=1, **alone)
        for talk in talks.values():
            await theirs.chat.completions.create(**body(talk))
            again: Any = list(items_of(talk))
            await theirs.responses.create(input=again, max_output_tokens=1, **alone)
            await client.chat(talk, ONE, tools=TOOLS)
        told = await asyncio.to_thread(llm.chat, list(talks.values()), ONE, use_tqdm=False, tools=TOOLS)
        assert [one.error for one in told] == [None] * len(talks)
        bodies = [body(talk) for talk in talks.values()]
        await by_file(harness.target, tmp_path, bodies)
        await by_upload(theirs, bodies)
        llm.close()
        await client.close()
        await theirs.close()


def test_arguments_that_are_an_object_are_those_of_their_text() -> None:
    given = {"city": "Zürich", "days": [1, 2.5], "deep": {"a": None}, "half": "\ud800"}

    def called(arguments: Any) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    as_text = called(json.dumps(given, ensure_ascii=False))
    assert read_message("messages[0]", called(given)) == read_message("messages[0]", as_text)
    assert chat_message(Prompt(messages=[USER, called(given)])) == chat_message(Prompt(messages=[USER, as_text]))
    body = {"messages": [USER, called({**given, "half": ""})]}
    check_values("body", body)
    assert chat_job(body).prompts[0].messages == (USER, read_message("", called({**given, "half": ""})))
    template = ChatTemplate(template_process(), PRINTS, {})
    plain = for_template([read_message("", called({"a": {"b": 1}}))], max_bytes=1000)
    assert '<f {"a": {"b": 1}}>' in template.render(plain, max_bytes=1000)
    looped: dict[str, Any] = {}
    looped["a"] = looped
    for wrong, problem in (
        ([1], "is not a string"),
        (3, "is not a string"),
        (looped, "is no JSON"),
        ({"a": {1}}, "is no JSON"),
    ):
        with pytest.raises(InvalidArgument, match=rf"^m\.tool_calls\[0\]\.function\.arguments: .*{problem}"):
            read_message("m", called(wrong))
