"""Stored responses with the real openai client, responses in the background, and sessions of Codex CLI."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import openai
import pytest

from jpaged import json_text
from jpaged.errors import AlreadyExists, Cancelled, InvalidArgument, LimitExceeded, NotFound, QueueFull, RequestTooLong
from jpaged.http import responses
from jpaged.http.response_store import BackgroundRun, ReferredItems, ResponseStore, StoredResponse, StoredTurn
from jpaged.openai.chat_tools import custom_input
from jpaged.openai.request import LenientBody
from jpaged.openai.response_input import open_reasoning, seal_reasoning
from jpaged.openai.responses import StoredTurns, continued_items, listed_items, parse_responses_request
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.testing import ByteTokenizer, FakeExecutor, scripted
from jpaged.testing.fake_model import Script
from tests.access.test_keys import FILE, TOKEN
from tests.http.test_messages import variants
from tests.server.harness import Harness, eventually, running

QWEN = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
SHORT: dict[str, Any] = {"model": "fake", "max_output_tokens": 4, "temperature": 0}
ENDLESS: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 60, "extra_body": {"ignore_eos": True}}
USER = {"role": "user", "content": "hi"}
TURN = 100
"""Bytes of the items of a turn in the tests of the store."""


def client_of(harness: Harness, **headers: str) -> openai.AsyncOpenAI:
    url = f"{harness.http_url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, default_headers=headers)


async def until(client: openai.AsyncOpenAI, response_id: str, status: str) -> Any:
    """The response once it has a status; a later status than this one is an error."""
    while (found := await client.responses.retrieve(response_id)).status != status:
        assert found.status in ("queued", "in_progress"), found
        await asyncio.sleep(0.01)
    return found


def entry(name: str, earlier: tuple[StoredTurn, ...] = (), owner: str = "", size: int = 0) -> StoredResponse:
    """A response whose input and answer have `TURN` bytes each."""
    given, output = StoredTurn(), StoredTurn()
    given.items = output.items = b"[" + b" " * (TURN - 2) + b"]"
    found = StoredResponse(owner, name, b"{}" + b" " * size, earlier, given)
    found.output = output
    return found


ONE = entry("size").num_bytes


def test_the_oldest_responses_of_a_tenant_are_evicted_by_number_and_by_size() -> None:
    store = ResponseStore(10 * ONE, 3, 0.5, 60.0)
    for i in range(4):
        assert store.add(entry(f"r{i}"))
    with pytest.raises(NotFound, match=r"Response with id 'r0' not found\..*evicted"):
        store.find("", "r0")
    assert [store.find("", f"r{i}").response_id for i in (1, 2, 3)] == ["r1", "r2", "r3"]
    assert store.add(entry("large", size=3 * ONE)) and len(store) == 2  # 5 * ONE is what one tenant may use
    assert not store.add(entry("too large", size=5 * ONE)) and len(store) == 2
    assert store.num_bytes == sum(store.find("", name).num_bytes for name in ("r3", "large"))


def test_a_tenant_with_few_responses_keeps_them_when_another_fills_the_store() -> None:
    store = ResponseStore(4 * ONE, 99, 1.0, 60.0)
    assert store.add(entry("mine", owner="few"))
    for i in range(9):
        assert store.add(entry(f"r{i}", owner="many"))
    assert store.find("few", "mine").owner == "few" and len(store) == 4
    for owner in ("many", ""):
        with pytest.raises(NotFound):
            store.find(owner, "mine")
        with pytest.raises(NotFound):
            ReferredItems(store, owner, 1 << 20).find("msg_mine_0")


def test_shared_turns_count_once_and_outlive_the_response_that_began_them() -> None:
    store = ResponseStore(99 * ONE, 99, 1.0, 60.0)
    first = entry("a")
    assert store.add(first)
    second = entry("b", first.turns)
    assert store.add(second) and store.add(entry("c", second.turns))
    alone = ONE - 2 * TURN
    assert store.num_bytes == 3 * alone + 6 * TURN
    store.remove(first)
    store.remove(first)
    assert store.num_bytes == 2 * alone + 6 * TURN
    store.remove(store.find("", "c"))
    assert store.num_bytes == alone + 4 * TURN
    assert store.add(entry("b")) and store.num_bytes == ONE  # in place of the former one
    store.remove(store.find("", "b"))
    assert (store.num_bytes, len(store)) == (0, 0)


def test_the_size_of_the_store_is_that_of_its_responses_after_any_calls() -> None:
    random, store = Random(7), ResponseStore(30 * ONE, 12, 0.5, 1e9)
    held: list[StoredResponse] = []
    for i in range(600):
        held = [one for one in held if store.holds(one)]
        if held and random.random() < 0.3:
            one = random.choice(held)
            store.update(one, b"x" * random.randrange(4 * ONE), StoredTurn([USER] * random.randrange(20)))
        elif held and random.random() < 0.2:
            store.remove(random.choice(held))
        else:
            earlier = random.choice(held).turns if held and random.random() < 0.7 else ()
            one = entry(f"r{i % 50}", earlier, owner=random.choice("abc"), size=random.randrange(3 * ONE))
            if store.add(one):
                held.append(one)
        held = [one for one in held if store.holds(one)]
        turns = {turn for one in held for turn in one.turns}
        assert store.num_bytes == sum(one.num_own_bytes for one in held) + sum(len(turn.items) for turn in turns)
        assert store.num_bytes <= 30 * ONE and len(store) == len(held)
        assert all(sum(one.owner == owner for one in held) <= 12 for owner in "abc")


def test_a_response_expires() -> None:
    now = [0.0]
    store = ResponseStore(9 * ONE, 9, 1.0, 60.0, lambda: now[0])
    assert store.add(entry("a"))
    now[0] = 59.0
    assert store.find("", "a").response_id == "a" and store.add(entry("b"))
    now[0] = 60.0
    with pytest.raises(NotFound, match="expired"):
        store.find("", "a")
    assert store.add(entry("c")) and len(store) == 2


def test_a_response_that_is_updated_expires_later() -> None:
    now = [0.0]
    store = ResponseStore(9 * ONE, 9, 1.0, 60.0, lambda: now[0])
    ran, other = entry("ran"), entry("other")
    assert store.add(ran) and store.add(other)
    now[0] = 59.0
    store.update(ran, b"{}", StoredTurn())
    now[0] = 61.0
    assert store.find("", "ran") is ran and store.add(entry("c")) and not store.holds(other)


def test_items_that_are_referred_to_count_each_time_and_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(99 * ONE, 99, 1.0, 60.0)
    items: list[dict[str, Any]] = [{"id": one, **USER} for one in ("msg_a_in0", 3, "msg_a_in1")]
    assert store.add(StoredResponse("me", "resp_a", b"{}", (), StoredTurn(items)))
    reads: list[StoredTurn] = []
    read = StoredTurn.read

    def counted(turn: StoredTurn) -> list[dict[str, Any]]:
        reads.append(turn)
        return read(turn)

    monkeypatch.setattr(StoredTurn, "read", counted)
    referred = ReferredItems(store, "me", 4 * len(json_text.dumps(items[0])))
    for name in ("msg_a_in0", "msg_a_in1") * 2:
        assert referred.find(name)["id"] == name
    assert len(reads) == 2
    for name in ("msg_a_in2", "msg_b_in0", "", "_"):
        with pytest.raises(NotFound):
            referred.find(name)
    with pytest.raises(RequestTooLong, match="max_request_size"):
        referred.find("msg_a_in0")


def test_more_tools_than_a_chat_may_have_are_refused_at_once() -> None:
    tools = [{"type": "function", "name": f"f{i % 600}"} for i in range(4000)]
    for body in ({"input": "a", "tools": tools}, {"input": [USER, {"type": "additional_tools", "tools": tools}]}):
        with pytest.raises(InvalidArgument, match=r"^tools: more than 512 tools"):
            parse_responses_request(body)


def test_reasoning_between_a_message_and_a_call_stays_between_them() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    said = {"role": "assistant", "content": "I look."}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    parsed = parse_responses_request({"input": [USER, thought("A"), said, thought("B"), call, call]})
    found = parsed.job.prompts[0].messages or ()
    assert [(one.get("reasoning_content"), one["content"]) for one in found[1:]] == [("A", "I look."), ("B", None)]
    assert [len(one.get("tool_calls", ())) for one in found[1:]] == [0, 2]


def test_a_store_of_no_bytes_stores_nothing() -> None:
    store = ResponseStore(0, 9, 1.0, 60.0)
    assert not store.add(entry("a"))
    with pytest.raises(NotFound, match="nothing is stored"):
        store.find("", "a")


async def test_a_response_that_ends_before_it_was_admitted_says_so_to_whoever_waits() -> None:
    waiting, admitted = BackgroundRun(keeps_events=False), BackgroundRun(keeps_events=False)
    waiting.end()
    with pytest.raises(Cancelled, match="the response was cancelled"):
        await waiting.admitted
    admitted.set_admitted()
    admitted.end()
    await admitted.admitted


async def test_running_responses_are_not_evicted_and_lose_their_oldest_events() -> None:
    store = ResponseStore(3 * ONE, 2, 1.0, 60.0)
    runs = [BackgroundRun(keeps_events=True) for _ in range(3)]
    entries = [entry(f"r{i}") for i in range(3)]
    for one, run in zip(entries, runs, strict=True):
        one.run = run
    assert store.add(entries[0]) and store.add(entry("done")) and store.add(entries[1])
    with pytest.raises(NotFound):
        store.find("", "done")
    with pytest.raises(QueueFull, match="2 responses are running"):
        store.add(entries[2])
    with pytest.raises(AlreadyExists):
        store.add(entry("r0"))
    event = b"event: x\ndata: {}" + b" " * 400 + b"\n\n"
    for _ in range(40):
        store.add_events(entries[0], event * 2)
    assert store.num_bytes <= 3 * ONE and store.find("", "r1") is entries[1]
    with pytest.raises(InvalidArgument, match=r"starting_after: 3 is too small: the first event .* number 7[0-9]"):
        runs[0].follow(3)
    runs[0].end()
    assert [b"".join([part async for part in runs[0].follow(77)])] == [event * 2]
    assert [part async for part in runs[0].follow(78)] == [event]
    assert [part async for part in runs[0].follow(79)] == []
    with pytest.raises(InvalidArgument, match="created with stream"):
        BackgroundRun(keeps_events=False).follow(-1)


def test_sealed_reasoning_is_read_back_and_changes_of_it_are_found() -> None:
    sealed = seal_reasoning("Zürich 🏔")
    assert open_reasoning("x", sealed) == "Zürich 🏔" and "rich" not in sealed
    assert open_reasoning("x", "gAAAAABo_of_another_server") == ""
    for changed in (sealed[:-4], sealed[:-6] + "AAAA==", f"{sealed}?", "jpaged.1.", "jpaged.1.?"):
        with pytest.raises(InvalidArgument, match="was changed or cut"):
            open_reasoning("input[0].encrypted_content", changed)


def test_unknown_fields_of_items_and_tools_follow_the_policy_of_the_body() -> None:
    new = {"nickname": 1}
    part = {"type": "input_text", "text": "a", **new}
    function = {"type": "function", "name": "f", "defer_loading": True}
    tools = [function, {"type": "namespace", "name": "n", "tools": [function], **new}]
    items = [
        {"role": "user", "content": [part], **new},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "c", **new}]},
    ]
    given = {"input": items, "tools": tools, "reasoning": {"depth": "auto"}, "text": {"length": 3}}
    body = LenientBody(given)
    parsed = parse_responses_request(body)
    names = [tool.name for tool in parsed.job.prompts[0].chat_options.tools]
    assert names == ["f", "n__f", "c"]
    assert body.ignored.keys() == {
        *("input.nickname", "input.content.nickname", "input.tools.nickname", "tools.nickname"),
        *("reasoning.depth", "text.length"),
    }
    for name, value in given.items():
        with pytest.raises(InvalidArgument, match=rf"^{name}.*(nickname|depth|length): is not supported"):
            parse_responses_request({"input": "a", name: value})


def test_items_of_tools_that_openai_runs_are_ignored_with_a_warning() -> None:
    items = [USER, {"type": "web_search_call", "status": "completed", "action": {"type": "search"}}, USER]
    tools = [{"type": "web_search"}, {"type": "function", "name": "f b"}]
    parsed = parse_responses_request({"input": items, "tools": tools[:1]})
    assert len(parsed.job.prompts[0].messages or ()) == 2
    assert [one.partition(":")[0] for one in parsed.warnings] == ["tools[0]", "input[1]"]
    with pytest.raises(InvalidArgument, match=r"^tools\[1\]\.name: 'f b'"):
        parse_responses_request({"input": items, "tools": tools})


def test_items_of_a_response_are_the_input_of_the_next_one() -> None:
    output: list[dict[str, Any]] = [
        {"id": "rs_a_0", "type": "reasoning", "summary": [], "content": [], "encrypted_content": seal_reasoning("Hm.")},
        {
            "id": "msg_a_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "So", "annotations": [], "logprobs": [{"token": "So"}]}],
        },
    ]
    first = listed_items("a", [{"role": "user", "content": "Why?"}])
    assert first == [
        {
            "id": "msg_a_in0",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "Why?"}],
        }
    ]
    items = [*first, *continued_items(output)]
    assert items[2]["content"][0]["logprobs"] == []

    def find(item_id: str) -> Any:
        return next(item for item in items if item["id"] == item_id)

    given = [{"type": "item_reference", "id": "msg_a_1"}, USER]
    parsed = parse_responses_request({"input": given, "instructions": "Now."}, stored=StoredTurns(lambda: items, find))
    messages = [(one["role"], one["content"]) for one in parsed.job.prompts[0].messages or ()]
    assert messages == [("system", "Now."), ("user", "Why?"), ("assistant", "So"), ("assistant", "So"), ("user", "hi")]
    assert (parsed.job.prompts[0].messages or ())[2]["reasoning_content"] == "Hm."
    assert parsed.items == [items[2], USER]
    with pytest.raises(NotFound, match="Item with id 'msg_a_1' not found"):
        parse_responses_request({"input": given})


def test_later_system_messages_become_reminders_for_templates_that_reject_them() -> None:
    items = [
        {"role": "developer", "content": "b"},
        USER,
        {"role": "developer", "content": "c"},
        {**USER, "content": "d"},
    ]
    parsed = parse_responses_request({"instructions": "a", "input": items})
    assert parsed.has_late_system
    (prompt,) = parsed.with_one_system().prompts
    assert prompt.messages == (
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "hi\n\n<system-reminder>\nc\n</system-reminder>\n\nd"},
    )
    assert not parse_responses_request({"instructions": "a", "input": "b"}).has_late_system


def test_arguments_of_a_custom_tool_are_one_text() -> None:
    assert custom_input('{"input": "a\\n\\ud83d\\ude00"}') == "a\n😀"
    for text in ("*** Begin", '{"other": 1}', "[1]"):
        assert custom_input(text) == text


RICH: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "reasoning", "encrypted_content": seal_reasoning("c")},
        {"type": "function_call", "call_id": "a", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "c", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "y"},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]},
        {"type": "agent_message", "author": "/lead", "recipient": "/lead/a", "content": "Go on."},
        {"type": "item_reference", "id": "msg_a_0"},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "start: 1"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    ],
    "tool_choice": {"type": "custom", "name": "c"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"verbosity": "low", "format": {"type": "json_object"}},
    "include": ["reasoning.encrypted_content"],
    "store": True,
    "background": False,
    "client_metadata": {"a": "b"},
    "metadata": {"a": "b"},
}
"""A body with every kind of item and tool."""


def test_messages_between_agents_are_messages_of_the_user() -> None:
    passthrough = {"internal_chat_message_metadata_passthrough": {"turn_id": "t1"}}
    item = {"type": "agent_message", "id": "amsg_1", "author": "/lead", "recipient": "/lead/tests", **passthrough}
    given = LenientBody({"input": [{**item, "content": [{"type": "input_text", "text": "Run them."}]}]})
    parsed = parse_responses_request(given)
    text = "Message from /lead to /lead/tests:\nRun them."
    assert parsed.job.prompts[0].messages == ({"role": "user", "content": text},)
    assert [*given.ignored] == ["input.internal_chat_message_metadata_passthrough"]
    for wrong, field in (
        ({**item, "content": [{"type": "encrypted_content", "encrypted_content": "x"}]}, "input[0].content[0]"),
        ({**item, "author": None, "content": "a"}, "input[0].author"),
    ):
        with pytest.raises(InvalidArgument) as error:
            parse_responses_request(LenientBody({"input": [wrong]}))
        assert error.value.field == field


@pytest.mark.parametrize("kind", [dict, LenientBody])
def test_a_body_of_any_shape_is_read_or_refused_by_name(kind: Any) -> None:
    stored = StoredTurns(find_item=lambda item_id: {"id": item_id, **USER})
    num_read, fields = 0, set()
    for name, value in RICH.items():
        for odd in [value, *variants(value)]:
            try:
                parse_responses_request(kind({**RICH, name: odd}), stored=stored)
                num_read += 1
            except InvalidArgument as error:
                fields.add(error.field.partition(".")[0].partition("[")[0])
    assert num_read > 100 and fields == RICH.keys()


def test_additional_tools_take_the_place_of_tools_of_the_same_name() -> None:
    def tool(name: str, text: str, kind: str = "function") -> dict[str, str]:
        return {"type": kind, "name": name, "description": text}

    added = {"type": "additional_tools", "role": "developer", "tools": [tool("a", "new"), tool("c", "new", "custom")]}
    parsed = parse_responses_request({"input": [USER, added], "tools": [tool("a", "old"), tool("b", "old")]})
    tools = [(one.name, one.description) for one in parsed.job.prompts[0].chat_options.tools]
    assert tools == [("a", "new"), ("b", "old"), ("c", "new")] and list(parsed.renamed) == ["c"]
    with pytest.raises(InvalidArgument, match=r"^tools\[1\]\.name"):
        parse_responses_request({"input": "a", "tools": [tool("a", "old"), tool("a", "new")]})


async def test_a_stored_response_is_read_continued_listed_and_deleted() -> None:
    async with running(http_port=0) as harness, client_of(harness) as client:
        first = await client.responses.create(**SHORT, input="one", instructions="Be brief.")
        assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
        second = await client.responses.create(**SHORT, input="two", previous_response_id=first.id)
        assert second.previous_response_id == first.id and second.instructions is None
        whole: Any = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
        same = await client.responses.create(**SHORT, input=whole, store=False)
        assert second.usage is not None and same.usage is not None
        assert second.usage.input_tokens == same.usage.input_tokens
        assert (second.output_text, same.to_dict()["store"]) == (same.output_text, False)
        page = await client.responses.input_items.list(second.id, limit=2, order="asc")
        assert page.has_next_page()
        items = [item async for item in page]
        assert [item.to_dict()["content"][0]["text"] for item in items] == ["one", first.output_text, "two"]  # type: ignore[index]
        for limit in (1, 100):
            newest = [item async for item in client.responses.input_items.list(second.id, limit=limit)]
            assert [item.id for item in newest] == [item.id for item in reversed(items)]
        await client.responses.delete(first.id)
        for call in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
            with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
                await call
        with pytest.raises(openai.NotFoundError, match="restarts"):
            await client.responses.create(**SHORT, input="two", previous_response_id=first.id)
        third = await client.responses.create(**SHORT, input="three", previous_response_id=second.id)
        assert third.usage is not None and third.usage.input_tokens > second.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
            await client.responses.cancel(second.id)
        for wrong in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"after": "msg_x"}, {"limit": "x"}):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.get(f"/responses/{second.id}/input_items", cast_to=object, options={"params": wrong})
            assert refused.value.param == next(iter(wrong))


async def test_a_streamed_response_is_stored_as_it_was_sent() -> None:
    async with running(http_port=0) as harness, client_of(harness) as client:
        events = [event async for event in await client.responses.create(**SHORT, input="one", stream=True)]
        last: Any = events[-1]
        assert (await client.responses.retrieve(last.response.id)).to_dict() == last.response.to_dict()
        item = last.response.output[0]
        reference: Any = [USER, {"type": "item_reference", "id": item.id}, USER]
        assert (await client.responses.create(**SHORT, input=reference)).status == "incomplete"
        with pytest.raises(openai.BadRequestError, match="created with stream and background"):
            await client.responses.retrieve(last.response.id, stream=True)
        unknown: Any = [{"type": "item_reference", "id": "msg_none_0"}]
        with pytest.raises(openai.NotFoundError, match="Item with id 'msg_none_0' not found"):
            await client.responses.create(**SHORT, input=unknown)


async def test_items_that_are_referred_to_count_beside_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses._Responses, "_max_conversation_bytes", 700)
    async with running(http_port=0) as harness, client_of(harness) as client:
        first = await client.responses.create(**SHORT, input="x" * 90)
        item: Any = {"type": "item_reference", "id": (await client.responses.input_items.list(first.id)).data[0].id}
        given: Any = [item, USER]
        assert (await client.responses.create(**SHORT, input=given)).status == "incomplete"
        with pytest.raises(openai.BadRequestError, match="the items that it refers to exceed max_request_size"):
            await client.responses.create(**SHORT, input=given, previous_response_id=first.id)


async def test_a_response_of_another_tenant_does_not_exist() -> None:
    async with running(http_port=0) as harness:
        mine, theirs = (client_of(harness, **{"x-jpaged-tenant": name}) for name in ("a", "b"))
        first = await mine.responses.create(**SHORT, input="one")
        reference: Any = [{"type": "item_reference", "id": first.output[0].id}]
        for call in (
            theirs.responses.retrieve(first.id),
            theirs.responses.delete(first.id),
            theirs.responses.cancel(first.id),
            theirs.responses.create(**SHORT, input="two", previous_response_id=first.id),
            theirs.responses.create(**SHORT, input=reference),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await mine.responses.retrieve(first.id)).id == first.id
        await mine.close()
        await theirs.close()


async def test_a_store_that_is_off_says_so() -> None:
    async with running(http_port=0, max_response_storage=0.0) as harness, client_of(harness) as client:
        first = await client.responses.create(**SHORT, input="one")
        assert first.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError, match="nothing is stored"):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="max_response_storage"):
            await client.responses.create(**SHORT, input="one", background=True)


async def test_the_size_of_the_store_is_in_mib() -> None:
    large = {f"key {number}": "x" * 512 for number in range(16)}
    async with running(http_port=0, max_response_storage=16 / 1024) as harness, client_of(harness) as client:
        small = await client.responses.create(**SHORT, input="one")
        assert (await client.responses.retrieve(small.id)).id == small.id
        with pytest.raises(openai.APIStatusError, match="max_response_storage"):
            await client.responses.create(**SHORT, input="one", background=True, metadata=large)


async def test_a_conversation_of_stored_turns_has_the_limit_of_a_body() -> None:
    executor = FakeExecutor(num_blocks=4096, max_model_len=1024)
    async with (
        running(executor=executor, http_port=0, max_request_size=0.0625) as harness,
        client_of(harness) as client,
    ):
        items: Any = [{**USER, "id": "m" * 2000}] * 25  # many bytes for few tokens
        first = await client.responses.create(**SHORT, input=items)
        with pytest.raises(openai.BadRequestError, match="the conversation has") as refused:
            await client.responses.create(**SHORT, input=items[:8], previous_response_id=first.id)
        assert refused.value.code == "context_length_exceeded"


async def test_a_response_in_the_background_outlives_its_connection() -> None:
    executor = FakeExecutor(num_blocks=4096, max_model_len=1024)
    async with running(executor=executor, http_port=0) as harness, client_of(harness) as client:
        harness.faults.hold_after(3)
        queued = await client.responses.create(**ENDLESS, background=True)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])

        await until(client, queued.id, "in_progress")
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await client.responses.create(**SHORT, input="two", previous_response_id=queued.id)
        harness.faults.release()
        done = await until(client, queued.id, "incomplete")
        assert done.created_at == queued.created_at
        assert done.usage is not None and done.usage.output_tokens == 60
        assert (await client.responses.cancel(queued.id)).status == "incomplete"
        second = await client.responses.create(**SHORT, input="two", previous_response_id=queued.id)
        assert second.status == "incomplete"
        with pytest.raises(openai.BadRequestError, match="created with stream"):
            await client.responses.retrieve(queued.id, stream=True)


async def test_a_response_in_the_background_is_cancelled_in_the_engine() -> None:
    async with running(http_port=0) as harness, client_of(harness) as client:
        harness.faults.hold_after(3)
        queued = await client.responses.create(**ENDLESS, background=True)
        other = await client.responses.create(**ENDLESS, background=True)
        assert harness.num_open_calls == 2
        cancelled = await client.responses.cancel(queued.id)
        assert cancelled.status == "cancelled"
        assert (await client.responses.retrieve(queued.id)).to_dict() == cancelled.to_dict()
        assert (await client.responses.cancel(queued.id)).status == "cancelled"
        await client.responses.delete(other.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(other.id)
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_reader_that_is_slower_than_the_events_are_dropped_gets_an_error() -> None:
    store, run, one = ResponseStore(2 * ONE, 9, 1.0, 60.0), BackgroundRun(keeps_events=True), entry("a")
    one.run = run
    assert store.add(one)
    event = b"event: x\ndata: {}" + b" " * 900 + b"\n\n"
    store.add_events(one, event)
    reader = run.follow(-1)
    assert await anext(reader) == event
    for _ in range(4):
        store.add_events(one, event)
    with pytest.raises(LimitExceeded, match="max_response_storage"):
        await anext(reader)


async def test_a_request_that_is_refused_is_not_in_the_background() -> None:
    async with running(http_port=0) as harness, client_of(harness) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="fake", input="a" * 5000, background=True)
        assert refused.value.code == "context_length_exceeded"


async def test_a_failed_response_in_the_background_has_its_error() -> None:
    executor = FakeExecutor()
    async with running(executor=executor, http_port=0) as harness, client_of(harness) as client:
        executor.faults.hold_after(2)
        queued = await client.responses.create(**ENDLESS, background=True)
        harness.serving.engine.fail(RuntimeError("the device is gone"))
        executor.faults.release()
        found = await until(client, queued.id, "failed")
        assert found.error is not None and found.error.code == "server_error"


async def test_a_stream_in_the_background_can_be_left_and_taken_up_again() -> None:
    async with running(http_port=0, max_messages_per_second=1_000_000) as harness, client_of(harness) as client:
        harness.faults.hold_after(5)
        stream = await client.responses.create(**ENDLESS, background=True, stream=True)
        seen = [await anext(stream) for _ in range(5)]
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        await stream.close()
        harness.faults.release()
        first: Any = seen[0]
        rest = [e async for e in await client.responses.retrieve(first.response.id, stream=True, starting_after=4)]
        assert [event.sequence_number for event in rest] == list(range(5, 5 + len(rest)))
        last: Any = rest[-1]
        assert last.type == "response.incomplete" and last.response.usage.output_tokens == 60
        again = [event async for event in await client.responses.retrieve(first.response.id, stream=True)]
        assert [event.to_dict() for event in again] == [event.to_dict() for event in (*seen, *rest)]
        end: Any = rest[-1].sequence_number
        after = await client.responses.retrieve(first.response.id, stream=True, starting_after=end)
        assert [event async for event in after] == []
        text = "".join(event.delta for event in again if event.type == "response.output_text.delta")
        assert text == (await client.responses.retrieve(first.response.id)).output_text


async def test_the_key_of_a_background_response_is_that_of_its_request(tmp_path: Path) -> None:
    keys, audit = tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    keys.write_text(FILE)
    options: Any = {"api_keys": str(keys), "audit_log": str(audit)}
    async with running(http_port=0, **options) as harness, client_of(harness) as client:
        mine = client.with_options(api_key=TOKEN)
        queued = await mine.responses.create(**SHORT, input="hi", background=True)
        assert (await until(mine, queued.id, "incomplete")).output_text
        with pytest.raises(openai.AuthenticationError):
            await client.responses.retrieve(queued.id)
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    run = [line for line in lines if line["completion_tokens"]]
    assert [(line["tenant"], line["request_id"]) for line in run] == [("acme", queued.id.removeprefix("resp_"))]


# Codex CLI, as its public source builds requests and keeps the items of answers.

EXEC = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>\n'
PATCH = "*** Begin Patch\n*** Add File: a.txt\n+é\n*** End Patch\n"
APPLY = f'<tool_call>\n{{"name": "apply_patch", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>\n'
LIST = '<tool_call>\n{"name": "mcp__files__list", "arguments": {}}\n</tool_call>\n'
ANSWERS = [f"<think>\nLook at it.\n</think>\n\nFirst. {EXEC}", APPLY, LIST, "<think>\nDone.\n</think>\n\nAll done."]
CODEX_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command and returns its output.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files by a patch in plain text, not in JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF hunk+'},
    },
    {"type": "web_search", "external_web_access": False},
    {
        "type": "namespace",
        "name": "mcp__files",
        "description": "Tools of a server of files.",
        "tools": [{"type": "function", "name": "list", "description": "Lists.", "parameters": {"type": "object"}}],
    },
]


def codex_body(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "fake",
        "instructions": "You are a coding agent on the user's computer. " * 4,
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "i"},
    }


def codex_message(role: str, text: str) -> dict[str, Any]:
    passthrough = {"turn_id": "t1"}
    content = [{"type": "input_text", "text": text}]
    return {
        "type": "message",
        "role": role,
        "content": content,
        "internal_chat_message_metadata_passthrough": passthrough,
    }


def kept_by_codex(item: dict[str, Any]) -> dict[str, Any]:
    """An item as Codex sends it back: of its own fields only, and without the text of reasoning."""
    fields = {
        "message": ("role", "content", "phase"),
        "reasoning": ("summary", "encrypted_content"),
        "function_call": ("name", "namespace", "arguments", "call_id"),
        "custom_tool_call": ("status", "call_id", "name", "namespace", "input"),
    }[item["type"]]
    kept = {name: item[name] for name in fields if item.get(name) is not None}
    if item["type"] == "message":
        kept["content"] = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return {"type": item["type"], "id": item["id"], **kept}


async def codex_turn(client: httpx2.AsyncClient, items: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any, Any]:
    """The items of an answer as events bring them, its usage, and the headers."""
    headers = {"originator": "codex_exec", "session_id": "0199-session", "openai-beta": "responses=experimental"}
    answer = await client.post("/v1/responses", json=codex_body(items), headers=headers)
    assert answer.status_code == 200, answer.text
    events = [json.loads(block.split("\ndata: ")[1]) for block in answer.text.strip().split("\n\n")]
    assert events[-1]["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return done, events[-1]["response"]["usage"], answer.headers


async def test_four_turns_of_codex_are_answered_and_find_their_prefix_in_the_cache() -> None:
    answer: list[list[int]] = []
    kind: Any = type("Scripted", (FakeExecutor,), {})
    kind.sampled = staticmethod(Script(answer, list(b"assistant: "), ByteTokenizer.EOS))
    executor = kind(num_blocks=4096, max_model_len=16384)
    async with (
        running(executor=executor, answer_format=QWEN, http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url, timeout=None) as client,
    ):
        block_size = executor.geometry.block_size
        items = [
            codex_message("developer", "<permissions>Files may be read. Ask for all else.</permissions>"),
            codex_message("user", "<environment_context><cwd>/src</cwd></environment_context>"),
            codex_message("user", "Add a file."),
        ]
        outputs, sizes = list[list[dict[str, Any]]](), list[int]()
        for text in ANSWERS:
            answer[:] = [list(text.encode())]
            output, usage, headers = await codex_turn(client, items)
            assert "web_search" in headers["x-jpaged-warning"] and "grammar" in headers["x-jpaged-warning"]
            ignored = headers["x-jpaged-ignored-fields"]
            assert ignored == "input.internal_chat_message_metadata_passthrough"
            if sizes:
                assert usage["input_tokens_details"]["cached_tokens"] >= sizes[-1] - 2 * block_size
            sizes.append(usage["input_tokens"])
            outputs.append(output)
            items += map(kept_by_codex, output)
            for item in output:
                if item["type"].endswith("_call"):
                    items.append({"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"})
        assert block_size > 0 and sizes == sorted(sizes)
        kinds = [[item["type"] for item in output] for output in outputs]
        calls = [["reasoning", "message", "function_call"], ["custom_tool_call"], ["function_call"]]
        assert kinds == [*calls, ["reasoning", "message"]]
        assert (outputs[1][0]["name"], outputs[1][0]["input"]) == ("apply_patch", PATCH)
        assert (outputs[2][0]["name"], outputs[2][0]["namespace"]) == ("list", "mcp__files")
        messages = parse_responses_request(LenientBody(codex_body(items))).job.prompts[0].messages or ()
        assistant = [one for one in messages if one["role"] == "assistant"]
        assert assistant[0]["reasoning_content"] == "Look at it." and assistant[-1]["reasoning_content"] == "Done."
        names = [call["function"]["name"] for one in assistant for call in one.get("tool_calls", ())]
        assert names == ["exec_command", "apply_patch", "mcp__files__list"]


async def test_custom_calls_are_streamed_by_the_events_of_openai() -> None:
    async with (
        running(
            executor=scripted(APPLY)(num_blocks=4096, max_model_len=16384), answer_format=QWEN, http_port=0
        ) as harness,
        client_of(harness) as client,
    ):
        body: Any = {
            name: value for name, value in codex_body([USER]).items() if name not in ("stream", "client_metadata")
        }
        events = [event async for event in await client.responses.create(**body, stream=True)]
        assert [event.type.removeprefix("response.") for event in events] == [
            *("created", "in_progress", "output_item.added"),
            *("custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done", "completed"),
        ]
        assert events[3].delta == events[4].input == events[5].item.input == PATCH
        whole = await client.responses.create(**body)
        assert (whole.output[0].type, whole.output[0].input) == ("custom_tool_call", PATCH)
