"""The tables of fields cover the types of OpenAI's package, and say what the readers of bodies do."""

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import openai.types as plain
import openai.types.chat as chats
import pytest
from openai.types import responses
from typing_extensions import is_typeddict

from docs.site.vllm_fields import OPENAI, OPENAI_VERSION, openai_policy
from jpaged.errors import InvalidArgument
from jpaged.openai.request import LenientBody, chat_job
from jpaged.openai.responses import parse_responses_request


def leaves(kind: Any) -> Iterator[Any]:
    """Yield the classes of which a type consists."""
    if is_typeddict(kind):
        yield kind
    elif get_origin(kind) not in (Literal, dict):
        for one in get_args(kind):
            yield from leaves(one)


def names_in(kinds: Iterable[Any]) -> set[str]:
    """Return the fields of classes."""
    return {name for one in kinds for name in get_type_hints(one)}


def literals(kind: Any) -> set[str]:
    """Return the strings that a type allows."""
    if get_origin(kind) is Literal:
        return {one for one in get_args(kind) if isinstance(one, str)}
    return {text for one in get_args(kind) for text in literals(one)}


def values_in(kinds: Iterable[Any], field: str = "type") -> set[str]:
    """Return the strings that a field of classes allows."""
    return {text for one in kinds for text in literals(get_type_hints(one).get(field))}


def of_type(kinds: Iterable[Any], kind: str) -> list[Any]:
    """Return the classes of a type of objects."""
    return [one for one in kinds if kind in values_in([one])]


def package_names() -> dict[str, set[str]]:
    """Return the names of the package's types, by place."""
    of_chats: list[Any] = [chats.completion_create_params.CompletionCreateParamsStreaming]
    of_chats += [chats.completion_create_params.CompletionCreateParamsNonStreaming]
    of_texts: list[Any] = [plain.completion_create_params.CompletionCreateParamsStreaming]
    of_responses: list[Any] = [responses.response_create_params.ResponseCreateParamsStreaming]
    of_responses += [responses.response_create_params.ResponseCreateParamsNonStreaming]
    chat, response = get_type_hints(of_chats[0]), get_type_hints(of_responses[0])
    messages, tools = list(leaves(chat["messages"])), list(leaves(chat["tools"]))
    (function,) = (get_type_hints(one)["function"] for one in of_type(tools, "function"))
    (calls,) = (get_type_hints(one)["tool_calls"] for one in messages if "assistant" in values_in([one], "role"))
    parts = list(leaves(chats.ChatCompletionContentPartParam))
    items, response_tools = list(leaves(response["input"])), list(leaves(response["tools"]))
    contents = [get_type_hints(one)["content"] for one in of_type(items, "message")]
    input_parts = [part for one in contents for part in leaves(one)]
    found = {
        "/v1/completions": names_in(of_texts),
        "/v1/embeddings": names_in([plain.embedding_create_params.EmbeddingCreateParams]),
        "/v1/chat/completions": names_in(of_chats),
        "chat messages": names_in(messages),
        "chat roles": values_in(messages, "role"),
        "chat parts": values_in(parts),
        "chat parts of type text": names_in(of_type(parts, "text")),
        "chat parts of type image_url": names_in(of_type(parts, "image_url")),
        "chat tool_calls": names_in(leaves(calls)),
        "chat tools": values_in(tools),
        "chat tools of type function": names_in(leaves(function) if not is_typeddict(function) else [function]),
        "chat tool_choice": values_in(leaves(chat["tool_choice"])),
        "chat response_format": values_in(leaves(chat["response_format"])),
        "chat stream_options": names_in(leaves(chat["stream_options"])),
        "/v1/responses": names_in(of_responses),
        "items": values_in(items),
        "parts": values_in(input_parts),
        "tools": values_in(response_tools),
        "tool_choice": values_in(leaves(response["tool_choice"])),
        "include": literals(response["include"]),
        "reasoning": names_in(leaves(response["reasoning"])),
        "text": names_in(leaves(response["text"])),
        "stream_options": names_in(leaves(response["stream_options"])),
    }
    for kind in READ_ITEMS:
        found[f"items of type {kind}"] = names_in(of_type(items, kind))
    for kind in ("input_text", "output_text", "input_image"):
        found[f"parts of type {kind}"] = names_in(of_type(input_parts, kind))
    for kind in ("function", "custom", "namespace"):
        found[f"tools of type {kind}"] = names_in(of_type(response_tools, kind))
    return found


READ_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "additional_tools"),
)


def test_the_tables_have_the_names_of_the_package() -> None:
    assert importlib.metadata.version("openai") == OPENAI_VERSION
    assert {place: set(names.split()) for place, names in OPENAI.items()} == package_names()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
FUNCTION: dict[str, Any] = {"name": "f"}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
FLAT: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "x"}
IMAGE = {"url": "data:image/png;base64,AA=="}
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"role": "user", "content": "x"},
    "reasoning": {"content": [{"type": "reasoning_text", "text": "x"}]},
    "function_call": {"call_id": "c", "name": "f", "arguments": "{}"},
    "function_call_output": {"call_id": "c", "output": "x"},
    "custom_tool_call": {"call_id": "c", "name": "f", "input": "x"},
    "custom_tool_call_output": {"call_id": "c", "output": "x"},
    "additional_tools": {"role": "developer", "tools": [FLAT]},
}
TOOLS: dict[str, dict[str, Any]] = {
    "function": FLAT,
    "custom": {"type": "custom", "name": "f"},
    "namespace": {"type": "namespace", "name": "n", "tools": [FLAT]},
}
VALUES: dict[str, Any] = {
    "async": False,
    "allowed_callers": ["direct"],
    "caller": {"type": "direct"},
    "context": "auto",
    "defer_loading": True,
    "effort": "low",
    "format": {"type": "text"},
    "parameters": {"type": "object"},
    "prompt_cache_breakpoint": {"mode": "explicit"},
    "strict": False,
    "include_usage": True,
    "include_obfuscation": False,
    "summary": "auto",
    "generate_summary": "auto",
    "mode": "standard",
    "verbosity": "low",
    "output_schema": {},
    "annotations": [],
    "logprobs": [],
    "detail": "low",
    "audio": {"id": "a"},
    "function_call": {"name": "f", "arguments": "{}"},
    "custom": {"name": "f", "input": "x"},
    "tools": [FLAT],
    "function": {"name": "f", "arguments": "{}"},
}
CHOICES: dict[str, dict[str, Any]] = {
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "function": {"name": "f"},
    "custom": {"name": "f"},
    "mcp": {"server_label": "s"},
}
CHAT_CHOICES: dict[str, dict[str, Any]] = {
    "allowed_tools": {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": FUNCTION}]}},
    "function": {"function": FUNCTION},
    "custom": {"custom": FUNCTION},
}


def chat_body(place: str, name: str) -> dict[str, Any]:
    """Return a body of a chat with a name of the package in a place."""
    value = VALUES.get(name, "f")
    parts: dict[str, Any] = {"text": {"text": "x"}, "image_url": {"image_url": IMAGE}}
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    if place == "chat messages":
        of_call = {"tool_call_id": {"role": "tool", "content": "x"}, "refusal": {"role": "assistant"}}
        given = {"content": "x", "role": "assistant", "tool_calls": [CALL]}
        message = {**of_call.get(name, ASSISTANT), name: given.get(name, value)}
    elif place == "chat roles":
        message = {"role": name, "content": "x"}
    elif place == "chat parts":
        message["content"] = [{"type": name, **parts.get(name, {name: {}})}]
    elif place.startswith("chat parts of type"):
        kind = place.rpartition(" ")[2]
        part = {"type": kind, **parts[kind]}
        message["content"] = [{name: value, **part}]
    elif place == "chat tool_calls":
        call = {"type": "custom", "id": "a"} if name == "custom" else CALL
        message = {**ASSISTANT, "tool_calls": [{name: value, **call}]}
    bodies: Mapping[str, dict[str, Any]] = {
        "chat tools": {"tools": [{"type": name, name: FUNCTION}]},
        "chat tools of type function": {"tools": [{**TOOL, "function": {name: value, **FUNCTION}}]},
        "chat tool_choice": {"tools": [TOOL], "tool_choice": {"type": name, **CHAT_CHOICES[name]}}
        if name in CHAT_CHOICES
        else {},
        "chat response_format": {
            "response_format": {"type": name, **({name: {"name": "x", "schema": {}}} if name == "json_schema" else {})}
        },
        "chat stream_options": {"stream": True, "stream_options": {name: value}},
    }
    return {**CHAT, "messages": [*CHAT["messages"], message], **bodies.get(place, {})}


def response_body(place: str, name: str) -> dict[str, Any]:
    """Return a body of a response with a name of the package in a place."""
    value, kind = VALUES.get(name, "f"), place.rpartition(" ")[2]
    user: dict[str, Any] = {"role": "user", "content": "x"}
    parts = {kind: {"text": "x"} for kind in ("input_text", "output_text")}
    parts |= {"refusal": {"refusal": "x"}, "input_image": {"image_url": IMAGE["url"]}}
    if place == "items":
        return {"input": [user, {"type": name, "id": "i", **ITEMS.get(name, {})}]}
    if place.startswith("items of type"):
        return {"input": [user, {name: value, "type": kind, **ITEMS[kind]}]}
    if place == "parts":
        return {"input": [{**user, "content": [{"type": name, **parts.get(name, {})}]}]}
    if place.startswith("parts of type"):
        return {"input": [{**user, "content": [{name: value, "type": kind, **parts[kind]}]}]}
    if place == "tools":
        return {"input": "x", "tools": [TOOLS.get(name, {"type": name})]}
    if place.startswith("tools of type"):
        return {"input": "x", "tools": [{name: value, **TOOLS[kind]}]}
    if place == "tool_choice":
        tools = [TOOLS["custom"] if name == "custom" else FLAT]
        return {"input": "x", "tools": tools, "tool_choice": {"type": name, **CHOICES.get(name, {})}}
    if place == "include":
        return {"input": "x", "include": [name]}
    return {"input": "x", "stream": True, place: {name: value}}


@pytest.mark.parametrize("place", [place for place in OPENAI if not place.startswith("/")])
def test_the_tables_say_what_the_readers_do(place: str) -> None:
    """A name is refused if and only if the table says so, and no other one counts as unknown."""
    for name in OPENAI[place].split():
        is_chat = place.startswith("chat")
        if name == "item_reference":
            continue  # needs a stored item
        body = LenientBody(chat_body(place, name) if is_chat else response_body(place, name))
        read: Any = chat_job if is_chat else parse_responses_request
        if openai_policy(place, name) == "refused":
            with pytest.raises(InvalidArgument):
                read(body)
        else:
            read(body)
            read(dict(body))
            assert body.ignored == {}, (place, name)
