"""Items and tools in a body of /v1/responses as messages and functions of a chat. No I/O.

Output items of earlier responses are accepted unchanged:

{"role", "content"}                         a message; content is a text or text parts
{"type": "reasoning", "content"}            reasoning before the assistant's next turn, or the same text as
                                            `encrypted_content`; a summary is ignored
{"type": "function_call", "call_id", ...}   a call, in the preceding turn of the assistant
{"type": "function_call_output", ...}       the call's result
{"type": "custom_tool_call", "input"}       a call of a tool whose argument is one text; and its output
{"type": "item_reference", "id"}            an item of a stored response

Tools and items of tools that OpenAI's servers run are ignored with a warning.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from jpaged import json_text
from jpaged.chat import MAX_TOOLS, join_contents, read_parts, without_surrogates
from jpaged.errors import InvalidArgument, NotFound
from jpaged.openai.chat_tools import CUSTOM_INPUT, build_custom_function
from jpaged.openai.request import LenientBody

_MAX_SHOWN = 80
_MAX_WARNINGS = 16
UNREAD_ITEM_FIELDS = frozenset({"id", "status", "phase", "end_turn", "caller", "async"})
"""Fields of items that identify them, give their status, or name the caller of a tool; ignored."""
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PART_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
UNREAD_PART_FIELDS = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
PART_FIELDS = frozenset({"type", "text", "refusal"}) | UNREAD_PART_FIELDS
ITEM_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"type", "role", "content", "name"}),
    "reasoning": frozenset({"type", "summary", "content", "encrypted_content"}),
    "function_call": frozenset({"type", "call_id", "name", "namespace", "arguments", "parsed_arguments"}),
    "function_call_output": frozenset({"type", "call_id", "name", "namespace", "output"}),
    "custom_tool_call": frozenset({"type", "call_id", "name", "namespace", "input"}),
    "custom_tool_call_output": frozenset({"type", "call_id", "name", "output"}),
    "additional_tools": frozenset({"type", "role", "tools"}),
    "agent_message": frozenset({"type", "author", "recipient", "content"}),
}
"""Fields of each type of item that is read, in addition to `UNREAD_ITEM_FIELDS`."""
HOSTED_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "tool_search_output"),
    }
)
"""Types of items of tools that OpenAI's servers run or define, which are ignored."""
_SEALED = "jpaged.1."
"""Beginning of the encrypted content of this server: a version, a digest of eight bytes and the text."""
_DIGEST_BYTES = 8


def seal_reasoning(text: str) -> str:
    """Return a reasoning text as opaque content, which `open_reasoning` reads on any server.

    It is encoded, not encrypted. A digest protects it from accidental changes.
    """
    data = text.encode("utf-8", "replace")
    return _SEALED + base64.b64encode(hashlib.sha256(data).digest()[:_DIGEST_BYTES] + data).decode()


def open_reasoning(where: str, content: str) -> str:
    """Return the text of opaque content; "" for content of other servers, which only they can read.

    Raises:
        InvalidArgument: it is of this server, and was changed.
    """
    if not content.startswith(_SEALED):
        return ""
    with contextlib.suppress(ValueError):  # neither base64 nor UTF-8
        data = base64.b64decode(content.removeprefix(_SEALED), validate=True)
        digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest()[:_DIGEST_BYTES] == digest:
            return data.decode()
    raise InvalidArgument(where, "was changed or cut: send it back as it was received, or leave it out")


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """Policy for unknown fields of the objects in a body.

    Attributes:
        ignore: notes the name of an ignored field, such as `input.nickname`; None refuses such fields.
    """

    ignore: Callable[[str], None] | None = None

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> FieldPolicy:
        """Return the policy of a body."""
        return cls(body.ignore if isinstance(body, LenientBody) else None)

    def check(self, where: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
        """Note or refuse the unknown fields of an object; null counts as absent.

        Raises:
            InvalidArgument: a field is unknown and not ignored.
        """
        for name, value in given.items():
            if value is None or name in known:
                continue
            if self.ignore is None:
                problem = f"is not supported: must be one of {', '.join(sorted(known))}"
                raise InvalidArgument(f"{where}.{name[:_MAX_SHOWN]}", problem)
            self.ignore(f"{_INDEX.sub('', where)}.{name}")


_INDEX = re.compile(r"\[\d+\]")
_STRICT = FieldPolicy()
_SILENT = FieldPolicy(lambda name: None)
"""Policy for stored items, whose unknown fields were noted when they were received."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that the client runs, which the chat has as a function of another name or kind.

    Attributes:
        is_custom: the tool takes one text instead of an object of arguments.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


_TOOL_FIELDS = ("name", "description", "parameters", "strict")
UNREAD_TOOL_FIELDS = frozenset({"async", "defer_loading", "output_schema"})
"""Fields of tools without an effect: the prompt lists every tool, and the client runs it."""
TOOL_FIELDS: Mapping[str, frozenset[str]] = {
    "function": frozenset({"type", "allowed_callers", *_TOOL_FIELDS}) | UNREAD_TOOL_FIELDS,
    "custom": frozenset({"type", "name", "description", "format", "allowed_callers"}) | UNREAD_TOOL_FIELDS,
    "namespace": frozenset({"type", "name", "description", "tools"}),
}
"""Fields of each type of tool that the client runs."""
_SEPARATOR = "__"
"""Separates the names of a namespace and of its tool in the name of a function."""


class ResponseTools:
    """Tools of a body as functions of a chat.

    Attributes:
        functions: the tools of the chat.
        renamed: by name of the function, tools that have another name or kind in the response.
        warnings: a line for each ignored tool, and for each grammar that is not enforced.
    """

    def __init__(self, policy: FieldPolicy) -> None:
        self.functions: list[dict[str, Any]] = []
        self.renamed: dict[str, ClientTool] = {}
        self.warnings: list[str] = []
        self._policy = policy
        self._places: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, where: str, given: Any, namespace: str | None = None, *, replaces: bool = False) -> None:
        """Add a tool, or those of a namespace.

        Args:
            replaces: it takes the place of a tool of the same name, which otherwise is an error.

        Raises:
            InvalidArgument: it is malformed, or there are more than `MAX_TOOLS`.
        """
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str):
            raise InvalidArgument(where, "must be an object with a type")
        callers = given.get("allowed_callers")
        if kind in TOOL_FIELDS:
            self._policy.check(where, given, TOOL_FIELDS[kind])
        if isinstance(callers, list) and callers and "direct" not in callers:
            self.warn(f"{where}: a tool is ignored whose allowed_callers have no 'direct': the server runs no programs")
        elif kind == "function":
            function = {name: given[name] for name in _TOOL_FIELDS if name in given}
            self._add_function(where, function, ClientTool(given.get("name", ""), namespace), replaces=replaces)
        elif kind == "custom":
            tool = ClientTool(given.get("name", ""), namespace, is_custom=True)
            self._add_function(where, self._function_of_custom(where, given), tool, replaces=replaces)
        elif kind == "namespace" and namespace is None:
            name = _string(where, given, "name")
            for i, one in enumerate(_list(where, given, "tools")):
                self.add(f"{where}.tools[{i}]", one, name, replaces=replaces)
        else:
            self.warn(
                f"{where}: a tool of type {kind[:_MAX_SHOWN]!a} is ignored: only tools that the client runs are used"
            )

    def warn(self, text: str) -> None:
        """Add a warning."""
        if len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append(text)

    def get_place(self, number: int) -> str | None:
        """Return the field of a function's tool in the body."""
        return self._places[number] if number < len(self._places) else None

    def _add_function(self, where: str, function: dict[str, Any], tool: ClientTool, *, replaces: bool) -> None:
        number = len(self.functions)
        if isinstance(tool.name, str):
            function["name"] = name = flat_name(tool.name, tool.namespace)
            if replaces:
                self.renamed.pop(name, None)
                number = self._numbers.get(name, number)
            self._numbers[name] = number
            if tool.namespace is not None or tool.is_custom:
                self.renamed[name] = tool
        if number >= MAX_TOOLS:
            raise InvalidArgument("tools", f"more than {MAX_TOOLS} tools; at most {MAX_TOOLS}")
        self.functions[number : number + 1] = [{"type": "function", "function": function}]
        self._places[number : number + 1] = [where]

    def keep(self, names: Collection[str]) -> None:
        """Remove all functions except those of these names."""
        kept = [i for i, one in enumerate(self.functions) if one["function"].get("name") in names]
        self.functions = [self.functions[i] for i in kept]
        self._places = [self._places[i] for i in kept]
        names_kept = (one["function"].get("name") for one in self.functions)
        self._numbers = {name: number for number, name in enumerate(names_kept) if isinstance(name, str)}

    def _function_of_custom(self, where: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a custom tool as a function with one argument; a grammar becomes a part of the description."""
        syntax = given.get("format") or {}
        if not isinstance(syntax, dict):
            raise InvalidArgument(f"{where}.format", "must be an object")
        if syntax.get("type") != "grammar":
            return build_custom_function(given)
        self.warn(f"{where}.format: the grammar is shown to the model and not enforced")
        kind = syntax.get("syntax", "lark")
        return build_custom_function(given, f" It follows this {kind} grammar:\n{syntax.get('definition', '')}")


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of the function for a tool of a namespace."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


FindItem = Callable[[str], Mapping[str, Any]]
"""Returns the stored item of an id; raises NotFound."""


def find_nothing(item_id: str) -> Mapping[str, Any]:
    """Raise NotFound, as a store without items."""
    raise NotFound(f"Item with id {item_id[:_MAX_SHOWN]!r} not found.")


class ItemConverter:
    """Converts items to the messages of a chat.

    Attributes:
        messages: the messages so far.
        items: the items of the input, with stored ones in place of references.
    """

    def __init__(self, policy: FieldPolicy, tools: ResponseTools, find_item: FindItem = find_nothing) -> None:
        self.messages: list[dict[str, Any]] = []
        self.items: list[Mapping[str, Any]] = []
        self._policy = policy
        self._tools = tools
        self._find_item = find_item
        self._thought: list[str] = []

    def add_stored(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Add the items of a stored response."""
        policy, self._policy = self._policy, _SILENT
        for item in items:
            self.add("previous_response_id", item)
        self._policy = policy

    def add_instructions(self, text: str) -> None:
        """Add a message of the role system."""
        self.messages.append({"role": "system", "content": text})

    def add_input(self, given: Any) -> None:
        """Add the items of an input, which is a text or a list; raise as `add`."""
        for i, item in enumerate(_input_items(given)):
            if not isinstance(item, dict):
                raise InvalidArgument(f"input[{i}]", "must be an object")
            if item.get("type") != "item_reference":
                self.items.append(item)
            self.add(f"input[{i}]", item)

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        """Add an item.

        Raises:
            InvalidArgument: names the field, as in `input[2].call_id`.
            NotFound: it refers to an item that is not stored.
        """
        kind = item.get("type") or "message"
        if kind == "item_reference":
            found = self._find_item(_string(where, item, "id"))
            self.items.append(found)
            self.add_stored([found])
            return
        if isinstance(kind, str) and kind in HOSTED_ITEMS:
            self._tools.warn(f"{where}: an item of type {kind!a} is ignored: it is of a tool that the server lacks")
            return
        if not isinstance(kind, str) or kind not in ITEM_FIELDS:
            shown = f"{str(kind)[:_MAX_SHOWN]!r} is not supported"
            raise InvalidArgument(f"{where}.type", f"{shown}: must be one of {', '.join(ITEM_FIELDS)}")
        self._policy.check(where, item, ITEM_FIELDS[kind] | UNREAD_ITEM_FIELDS)
        if kind == "reasoning":
            self._thought.append(self._reasoning_text(where, item))
            return
        if kind == "additional_tools":
            for i, tool in enumerate(_list(where, item, "tools")):
                self._tools.add(f"{where}.tools[{i}]", tool, replaces=True)
            return
        if kind == "message":
            self.messages.append(self._message(where, item))
        elif kind == "agent_message":
            names = " to ".join(_string(where, item, name) for name in ("author", "recipient"))
            content = join_contents([f"Message from {names}:\n", self._text(f"{where}.content", item.get("content"))])
            self.messages.append({"role": "user", "content": content})
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(self.messages, _call(where, item), has_thought=any(self._thought))
        else:
            call_id = _string(where, item, "call_id")
            text = self._text(f"{where}.output", item.get("output"))
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        self._end_thought(before=1)

    def end(self) -> list[dict[str, Any]]:
        """Return the messages; reasoning without a turn after it becomes a separate turn."""
        self._end_thought(before=0)
        return self.messages

    def _end_thought(self, *, before: int) -> None:
        if any(self._thought):
            _add_thought(self.messages, "".join(self._thought), before=before)
        self._thought = []

    def _message(self, where: str, item: Mapping[str, Any]) -> dict[str, Any]:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidArgument(f"{where}.role", f"{str(role)[:_MAX_SHOWN]!r} is not one of {', '.join(_ROLES)}")
        return {"role": _ROLES[role], "content": self._text(f"{where}.content", item.get("content"), role)}

    def _reasoning_text(self, where: str, item: Mapping[str, Any]) -> str:
        """Return the text of a reasoning item, from its encrypted content if it has no other; a summary is ignored."""
        texts, content = [], item.get("content") or []
        if not isinstance(content, list):
            raise InvalidArgument(f"{where}.content", "must be a list of parts of type reasoning_text")
        for j, part in enumerate(content):
            is_text = isinstance(part, dict) and part.get("type") in ("reasoning_text", "text")
            if not is_text or not isinstance(part.get("text"), str):
                raise InvalidArgument(f"{where}.content[{j}]", "must be a part of type reasoning_text")
            texts.append(part["text"])
        sealed = item.get("encrypted_content")
        if texts or not isinstance(sealed, str):
            return "".join(texts)
        return open_reasoning(f"{where}.encrypted_content", sealed)

    def _text(self, where: str, given: Any, role: str = "") -> Any:
        """Return a content as text, or as a list of parts if it has images."""
        if isinstance(given, str):
            return given
        if given is None and role == "assistant":
            return ""
        if not isinstance(given, list):
            raise InvalidArgument(where, "must be a string, or a list of text parts")
        texts = list[Any]()
        for j, part in enumerate(given):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "input_image":
                texts.append(read_parts(where, role, [part], start=j))
                continue
            text = part.get(PART_TEXTS[kind]) if isinstance(kind, str) and kind in PART_TEXTS else None
            if not isinstance(text, str):
                shown = f"{str(kind)[:_MAX_SHOWN]!r}" if isinstance(part, dict) else "a part that is not an object"
                problem = f"{shown} is not a text part: only text and input_image are supported"
                raise InvalidArgument(f"{where}[{j}]", problem)
            self._policy.check(f"{where}[{j}]", part, PART_FIELDS)
            texts.append(text)
        return join_contents(texts)


def build_messages(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Convert an input without stored items to the messages of a chat.

    Raises:
        InvalidArgument: names the item, as in `input[2].call_id`.
    """
    conversation = ItemConverter(_STRICT, ResponseTools(_STRICT))
    if instructions is not None:
        conversation.add_instructions(instructions)
    conversation.add_input(given)
    return conversation.end()


def join_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages, with consecutive ones of a role joined; results of tools stay apart."""
    joined: list[Mapping[str, Any]] = []
    for role, group in groupby(messages, key=itemgetter("role")):
        turns = list(group)
        joined += turns if role == "tool" or len(turns) == 1 else [_join(role, turns)]
    return joined


def _join(role: str, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    contents = [one["content"] for one in turns if one["content"]]
    turn: dict[str, Any] = {"role": role, "content": join_contents(contents, "\n")}
    if thoughts := "".join(one.get("reasoning_content", "") for one in turns):
        turn["reasoning_content"] = thoughts
    if calls := [call for one in turns for call in one.get("tool_calls", ())]:
        turn["tool_calls"] = calls
    return turn


def _input_items(given: Any) -> list[Any]:
    """Return an input as a list of items.

    Raises:
        InvalidArgument: it is neither a string nor a list with an item.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidArgument("input", "must be a string, or a list of at least one item")
    return given


def _add_thought(messages: list[dict[str, Any]], thought: str, *, before: int) -> None:
    """Add reasoning to the assistant's turn after it; without one (truncated reasoning) it becomes a separate turn.

    Args:
        before: number of messages at the end that came after the reasoning.
    """
    if before and messages[-1]["role"] == "assistant" and "reasoning_content" not in messages[-1]:
        messages[-1]["reasoning_content"] = thought
        return
    turn = {"role": "assistant", "content": "", "reasoning_content": thought}
    messages.insert(len(messages) - before, turn)


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, namespace = _string(where, item, "call_id"), _string(where, item, "name"), item.get("namespace")
    if not isinstance(namespace, str | None):
        raise InvalidArgument(f"{where}.namespace", f"{str(namespace)[:_MAX_SHOWN]!r} is not a string")
    if item["type"] == "custom_tool_call":
        text = without_surrogates(_string(where, item, "input"))
        arguments = json_text.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)
    else:
        arguments = _string(where, item, "arguments")
    function = {"name": without_surrogates(flat_name(name, namespace)), "arguments": without_surrogates(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any], *, has_thought: bool) -> None:
    """Add a call to the preceding turn of the assistant, or to a new one if both have reasoning before them."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (has_thought and "reasoning_content" in last):
        messages.append({"role": "assistant", "content": None, "tool_calls": []})
    messages[-1].setdefault("tool_calls", []).append(call)


def _list(where: str, item: Mapping[str, Any], field: str) -> list[Any]:
    value = item.get(field)
    if not isinstance(value, list):
        raise InvalidArgument(f"{where}.{field}", "must be a list")
    return value


def _string(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}.{field}", f"{str(value)[:_MAX_SHOWN]!r} is not a string")
    return value
