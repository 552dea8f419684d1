"""Values of chats with tools: tools, calls, messages, options, and answers in pieces. Neither jax nor grpc.

Tools, the tool choice and messages are parsed from OpenAI's JSON, messages including fields of other servers' answers.
Depth and size of JSON from callers are limited. Streaming parsers emit an answer in pieces, which are assembled here.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.version import alias_names

MAX_JSON_DEPTH = 64
_MAX_SHOWN = 80


def json_bytes(path: str, value: Any, *, max_bytes: int) -> int:
    """Return the approximate size of a value as JSON: texts, keys and numbers, and one byte for each comma or colon.

    Raises:
        InvalidArgument: it is too deep or too large, or has non-JSON values: unpaired surrogates, NaN, other objects.
    """
    plain = _plain_bytes(value, max_bytes)
    return _checked_bytes(path, value, max_bytes=max_bytes) if plain is None else plain


def _plain_bytes(value: Any, max_bytes: int) -> int | None:
    """Return what `json_bytes` does, in a third of the time; None if it raises, or the types are other than JSON's."""
    size, level = 0, [value]
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for one in level:
            kind = type(one)
            if kind is str:
                size += 2 + (len(one) if one.isascii() else _num_bytes(one, max_bytes))
            elif kind is dict:
                size += 2 + 2 * len(one)
                for key in one:
                    if type(key) is not str:
                        return None
                    size += len(key) if key.isascii() else _num_bytes(key, max_bytes)
                below += one.values()
            elif kind is list or kind is tuple:
                size += 2 + 2 * len(one)
                below += one
            elif one is None or kind is bool:
                size += 4
            elif kind is int:
                size += 1 + one.bit_length() // 3
            elif kind is float and math.isfinite(one):
                size += 8
            else:
                return None
        if size > max_bytes:
            return None
        if not below:
            return size
        level = below
    return None


def _num_bytes(text: str, max_bytes: int) -> int:
    """Return the size of a text; more than `max_bytes` if it has an unpaired surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return max_bytes + 1


def _checked_bytes(path: str, value: Any, *, max_bytes: int) -> int:
    """Return and raise what `json_bytes` does."""
    size, waiting = 0, [(path, value, 0)]
    while waiting:
        where, one, depth = waiting.pop()
        if isinstance(one, Mapping | list | tuple):
            if depth == MAX_JSON_DEPTH:
                raise InvalidArgument(path, f"is nested deeper than the limit of {MAX_JSON_DEPTH}")
            size += 2 + 2 * len(one)
            if isinstance(one, Mapping):
                size += sum(_text_bytes(where, key) for key in one)
                waiting += [(f"{where}.{key}", inner, depth + 1) for key, inner in one.items()]
            else:
                waiting += [(f"{where}[{i}]", inner, depth + 1) for i, inner in enumerate(one)]
        elif isinstance(one, str):
            size += 2 + _text_bytes(where, one)
        elif one is None or isinstance(one, bool | int):
            size += 4 if one is None or isinstance(one, bool) else 1 + one.bit_length() // 3
        elif not isinstance(one, float) or not math.isfinite(one):
            raise InvalidArgument(where, f"{str(one)[:_MAX_SHOWN]} is no JSON value")
        else:
            size += 8
        if size > max_bytes:
            raise InvalidArgument(path, f"is larger than the limit of {max_bytes} bytes")
    return size


def _text_bytes(where: str, text: Any) -> int:
    if not isinstance(text, str):
        raise InvalidArgument(where, f"{str(text)[:_MAX_SHOWN]} is no name of a field")
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidArgument(where, f"{text[at]!a} at {at} is half of a surrogate pair: no character") from error


def json_object(path: str, text: str, *, max_bytes: int) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidArgument: it is not an object, or as in `json_bytes`.
    """
    try:
        value = _ARGUMENTS.decode(text)
    except RecursionError as error:
        raise InvalidArgument(path, f"is nested deeper than the limit of {MAX_JSON_DEPTH}") from error
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise InvalidArgument(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(path, f"{text[:_MAX_SHOWN]!r} is no JSON object")
    json_bytes(path, value, max_bytes=max_bytes)
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_ARGUMENTS = json.JSONDecoder(parse_constant=_refuse)
"""Python's own reader, because integers may have more than 64 bits."""


MAX_TOOLS = 512
MAX_TOOL_NAME_CHARS = 128
MAX_TOOL_BYTES = 64 << 10
"""Maximum size of a tool's description, and of its parameters, each as JSON."""
MAX_TOOL_CALLS = 128
"""Maximum calls of one message."""
MAX_CALL_ID_CHARS = 256
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def is_tool_name(name: Any) -> bool:
    """Return True if a function may have this name: 1 to 128 of A-Z, a-z, 0-9, underscore and hyphen."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of the arguments, which are an object.
        is_strict: enforce the schema even if the model is free to call or not.

    Raises:
        InvalidArgument: a value is out of range; the field is named as in `function.name`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    is_strict: bool = False

    def __post_init__(self) -> None:
        if not is_tool_name(self.name):
            shown = repr(self.name)[:_MAX_SHOWN]
            limit = f"1 to {MAX_TOOL_NAME_CHARS} letters, digits, underscores and hyphens"
            raise InvalidArgument("function.name", f"{shown} is not {limit}")
        if not isinstance(self.description, str):
            raise InvalidArgument("function.description", f"{str(self.description)[:_MAX_SHOWN]} is not a string")
        if not isinstance(self.parameters, Mapping):
            raise InvalidArgument("function.parameters", "must be a JSON schema, an object")
        if not isinstance(self.is_strict, bool):
            raise InvalidArgument("function.strict", f"{self.is_strict!r} is not true or false")
        json_bytes("function.description", self.description, max_bytes=MAX_TOOL_BYTES)
        json_bytes("function.parameters", self.parameters, max_bytes=MAX_TOOL_BYTES)

    def as_json(self) -> dict[str, Any]:
        """Return the tool in the format of OpenAI and chat templates; some templates require a description."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def parse_tools(value: Any, *, path: str = "tools") -> tuple[Tool, ...]:
    """Parse the `tools` of a request, each as JSON or a `Tool`; None gives none.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidArgument(path, "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidArgument(path, f"{len(value)} tools; at most {MAX_TOOLS}")
    tools = tuple(_get_tool(f"{path}[{i}]", one) for i, one in enumerate(value))
    check_unique(tools, path)
    return tools


def check_unique(tools: Sequence[Tool], path: str) -> None:
    """Raise InvalidArgument if two tools have the same name."""
    first: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if first.setdefault(tool.name, i) != i:
            raise InvalidArgument(
                f"{path}[{i}].function.name", f"{tool.name!r} is that of {path}[{first[tool.name]}] too"
            )


def _get_tool(path: str, value: Any) -> Tool:
    if isinstance(value, Tool):
        return value
    function = _fields(path, value, {"type", "function"}).get("function")
    if value.get("type", "function") != "function":
        raise InvalidArgument(f"{path}.type", f"{value['type']!r} is not supported: only 'function' is")
    given = _fields(f"{path}.function", function, {"name", "description", "parameters", "strict"})
    names = {"name": "name", "description": "description", "parameters": "parameters", "strict": "is_strict"}
    values = {names[key]: one for key, one in given.items() if one is not None}
    try:
        return Tool(**{"name": None, **values})
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}.{error.field}", error.problem) from error


def _fields(path: str, value: Any, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(path, "is missing" if value is None else "must be a JSON object")
    for name in value:
        if name not in known:
            raise InvalidArgument(
                f"{path}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {', '.join(sorted(known))} are"
            )
    return value


class ToolChoiceMode(enum.Enum):
    """Tool choice mode."""

    NONE = "none"
    """The model calls no tool."""
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The model calls at least one tool."""
    NAMED = "named"
    """The model calls the named tool."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tool choice. `name` is set only with `NAMED`."""

    mode: ToolChoiceMode
    name: str | None = None


def parse_tool_choice(value: Any, tools: Sequence[Tool], *, path: str = "tool_choice") -> ToolChoice:
    """Parse the `tool_choice` of a request; None is "auto" with tools, and "none" without.

    Raises:
        InvalidArgument: it is invalid, or requires a call of a missing tool.
    """
    if value is None:
        return ToolChoice(ToolChoiceMode.AUTO if tools else ToolChoiceMode.NONE)
    if value in ("none", "auto", "required"):
        if value == "required" and not tools:
            raise InvalidArgument(path, "'required' needs tools")
        return ToolChoice(ToolChoiceMode(value) if tools else ToolChoiceMode.NONE)
    if isinstance(value, str):
        raise InvalidArgument(path, f"{value[:_MAX_SHOWN]!r} is not 'none', 'auto', 'required' or a function")
    given = _fields(path, value, {"type", "function"})
    if given.get("type") != "function":
        raise InvalidArgument(f"{path}.type", f"{str(given.get('type'))[:_MAX_SHOWN]!r} is not 'function'")
    name = _fields(f"{path}.function", given.get("function"), {"name"}).get("name")
    if not any(tool.name == name for tool in tools):
        raise InvalidArgument(f"{path}.function.name", f"{str(name)[:_MAX_SHOWN]!r} is the name of none of the tools")
    return ToolChoice(ToolChoiceMode.NAMED, name)


MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id", "reasoning_content")
"""Text fields of a message."""
_SPEECHLESS = ("assistant", "tool")
"""Roles whose content may be null or absent."""
MESSAGE_NOTES = frozenset(
    {
        *("annotations", "parsed", "cache_control", "provider_specific_fields", "reasoning_details", "thinking_blocks"),
        *("refusal", "reasoning", "extra_content"),
    }
)
"""Fields of other servers' messages and calls; `refusal` and `reasoning` are used if the field they replace is null."""
_NAMED = {
    "audio": "messages are text: send the transcript as content",
    "function_call": "send tool_calls",
    "prefix": "set continue_final_message of the request",
}
"""Fields of other servers' messages that must be null, and what to send instead."""
IMAGE_PARTS = {
    "image_url": ("image_url",),
    "image_pil": ("image_pil",),
    "input_image": ("image_url",),
    "image": ("image", "url", "path", "base64"),
}
"""Types of parts that are images, and the fields that may have it: those of OpenAI, vLLM and transformers."""
IMAGE_NOTES = frozenset({"type", "detail", "uuid", "cache_control", "prompt_cache_breakpoint"})
"""Further fields of an image, which have no effect."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_OBJECT, _ARRAY = (dict, Mapping), (list, tuple, Sequence)
"""The usual types first: Python looks up other ones in ten times as long."""


class GivenImage(NamedTuple):
    """An image as a caller sends it.

    Attributes:
        field: name for errors, as in `messages[1].content[0].image_url`.
        source: URL, path or base64 text; bytes of a file; image of Pillow; or array of pixels.
    """

    field: str
    source: Any


class ChatMessages(tuple[dict[str, Any], ...]):
    """Messages as `read_message` returns them, which need not be read again."""

    __slots__ = ()


def read_message(where: str, message: Any, ignore: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Return a message with only the fields of `MESSAGE_TEXTS` and `tool_calls`, and its content as one text.

    Null or empty fields, and other servers' notes, are dropped; `content` of an assistant may be None. A content with
    images is a list of parts of the types text and image; `image` of the latter is a `GivenImage`.

    Args:
        ignore: called with each unknown field, such as `messages.nickname`; None: they are errors.

    Raises:
        InvalidArgument: names the field, as in `messages[1].tool_calls[0].id`.
    """
    if not isinstance(message, _OBJECT):
        raise InvalidArgument(where, "must be an object of role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        is_absent = role is None or role == ""
        raise InvalidArgument(f"{where}.role", "is missing or empty" if is_absent else "is not a string")
    read: dict[str, Any] = {"role": role, "content": _content(where, role, message)}
    for name, value in message.items():
        if value is None or name in read or name in MESSAGE_NOTES or name == "tool_calls":
            continue
        if name not in MESSAGE_TEXTS:
            if ignore is not None and name not in _NAMED:
                ignore(f"{where.partition('[')[0]}.{name}")
                continue
            known = ", ".join((*MESSAGE_TEXTS, "tool_calls"))
            hint = _NAMED.get(name, f"{known} are")
            raise InvalidArgument(f"{where}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {hint}")
        if not isinstance(value, str):
            raise InvalidArgument(f"{where}.{name}", f"{str(value)[:_MAX_SHOWN]} is not a string")
        if value:
            read[name] = value
    thought = message.get("reasoning")
    if role == "assistant" and "reasoning_content" not in read and thought:
        read["reasoning_content"] = _text(f"{where}.reasoning", thought)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, _ARRAY) or isinstance(calls, str):
        raise InvalidArgument(f"{where}.tool_calls", "must be a list of calls")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidArgument(f"{where}.tool_calls", f"{len(calls)} calls; at most {MAX_TOOL_CALLS}")
    if calls:
        read["tool_calls"] = [_call(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(calls)]
    return read


def _content(where: str, role: str, message: Mapping[str, Any]) -> str | list[dict[str, Any]] | None:
    content, refusal = message.get("content"), message.get("refusal")
    if type(content) is str and not refusal:
        return content
    if refusal and (content or role != "assistant"):
        raise InvalidArgument(f"{where}.refusal", "does not go with content, nor with another role than assistant")
    if content is None:
        if refusal:
            return _text(f"{where}.refusal", refusal)
        if role not in _SPEECHLESS:
            raise InvalidArgument(f"{where}.content", "is missing")
        return None if message.get("tool_calls") else ""
    if type(content) is not str and isinstance(content, list | tuple):
        return read_parts(f"{where}.content", role, content)
    return text_of_parts(f"{where}.content", content)


def read_parts(where: str, role: str, content: Sequence[Any], *, start: int = 0) -> str | list[dict[str, Any]]:
    """Return a list of parts as one text, or as parts of text and images if it has images.

    Args:
        start: index of the first part, for errors.

    Raises:
        InvalidArgument: a part is neither, or an assistant's message has an image.
    """
    kinds = [part.get("type") if isinstance(part, _OBJECT) else None for part in content]
    if not any(isinstance(kind, str) and kind in IMAGE_PARTS for kind in kinds):
        return text_of_parts(where, content)
    parts = list[dict[str, Any]]()
    for i, (kind, part) in enumerate(zip(kinds, content, strict=True), start):
        if kind not in IMAGE_PARTS:
            parts.append({"type": "text", "text": _text_part(f"{where}[{i}]", part)})
        elif role == "assistant":
            raise InvalidArgument(f"{where}[{i}]", "is an image in a message of the assistant, which has only text")
        else:
            parts.append({"type": "image", "image": _read_image(f"{where}[{i}]", kind, part)})
    return parts


def _read_image(where: str, kind: str, part: Mapping[str, Any]) -> GivenImage:
    names = IMAGE_PARTS[kind]
    given = {name: value for name, value in part.items() if value is not None and name not in IMAGE_NOTES}
    for name in given:
        if name not in names:
            raise InvalidArgument(f"{where}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {' or '.join(names)} is")
    if len(given) != 1:
        problem = "is missing" if not given else f"is given together with {', '.join(sorted(given)[1:])}"
        raise InvalidArgument(f"{where}.{min(given, default=names[0])}", problem)
    ((name, source),) = given.items()
    if isinstance(source, GivenImage):
        return source
    field = f"{where}.{name}"
    if isinstance(source, _OBJECT):
        others = source.keys() - IMAGE_NOTES - {"url"}
        if others:
            raise InvalidArgument(f"{field}.{str(min(others, key=str))[:_MAX_SHOWN]}", "is not supported; url is")
        source = source.get("url")
        if not isinstance(source, str):
            raise InvalidArgument(f"{field}.url", "is missing" if source is None else "is not a string")
    elif name == "image_url" and not isinstance(source, str):
        raise InvalidArgument(field, "must be a string or an object with a url")
    elif isinstance(source, bool | int | float | list | tuple):
        raise InvalidArgument(field, f"is {type(source).__name__}, not an image")
    if isinstance(source, str) and not source.strip():
        raise InvalidArgument(field, "is empty")
    return GivenImage(field, source)


def read_source_image(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an image block of Anthropic's API, whose source is base64 or a URL.

    Raises:
        InvalidArgument: the source is another one; names the field.
    """
    source = block.get("source")
    kind = source.get("type") if isinstance(source, _OBJECT) else None
    if not isinstance(source, _OBJECT) or kind not in ("base64", "url"):
        problem = f"{str(kind)[:_MAX_SHOWN]!r} is not supported: only base64 and url are"
        raise InvalidArgument(f"{where}.source.type", problem)
    name = "url" if kind == "url" else "data"
    given = _text(f"{where}.source.{name}", source.get(name))
    return {
        "type": "image",
        "image": GivenImage(f"{where}.source.{name}", given if kind == "url" else f"data:;base64,{given}"),
    }


def parse_images(given: Any) -> tuple[GivenImage, ...]:
    """Return the images of `multi_modal_data`: one, or a list; raise InvalidArgument for other kinds of data."""
    name, given = "multi_modal_data", {} if given is None else given
    if not isinstance(given, Mapping):
        raise InvalidArgument(name, f"is {type(given).__name__}, not a dictionary with the key image")
    for key, value in given.items():
        if key != "image" and value is not None and not (isinstance(value, list | tuple) and not value):
            raise InvalidArgument(f"{name}.{str(key)[:80]}", "is not supported: only image is")
    images = given.get("image", ())
    if isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4:
        return tuple(GivenImage(f"{name}.image[{i}]", one) for i, one in enumerate(images))
    return () if images is None else (GivenImage(f"{name}.image", images),)


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[GivenImage]:
    """Return the images of messages as `read_message` returns them, in order."""
    contents = (message["content"] for message in messages if type(message["content"]) is list)
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def text_in(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a message's content as `read_message` returns it, without its images."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def join_contents(contents: Sequence[str | Sequence[Mapping[str, Any]]], separator: str = "") -> Any:
    """Return contents of messages as one: a text, or a list of parts if one of them is a list."""
    if all(isinstance(one, str) for one in contents):
        return separator.join(one for one in contents if isinstance(one, str))
    parts = list[Mapping[str, Any]]()
    for i, one in enumerate(contents):
        text = (separator if i else "") + (one if isinstance(one, str) else "")
        parts += [{"type": "text", "text": text}] if text else []
        parts += () if isinstance(one, str) else one
    return parts


def text_of_parts(where: str, content: Any) -> str:
    """Return the text of a content, which is a string or a list of text parts.

    Raises:
        InvalidArgument: it is neither; names the field.
    """
    if isinstance(content, list | tuple):
        return "".join(_text_part(where, part) for part in content)
    return _text(where, content)


def _text_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidArgument(where, f"{str(part)[:_MAX_SHOWN]} is not a text part; only text is supported")
    return text


def _call(where: str, call: Any) -> dict[str, Any]:
    """Return a call without client additions: the index and `parsed_arguments`. Its arguments become text."""
    _check_names(where, call, {"id", "type", "function", "index"})
    if (call.get("type") or "function") != "function":
        raise InvalidArgument(f"{where}.type", f"{str(call['type'])[:_MAX_SHOWN]!r} is not 'function'")
    function = call.get("function")
    _check_names(f"{where}.function", function, {"name", "arguments", "parsed_arguments"})
    if function.get("name") is None:
        raise InvalidArgument(f"{where}.function.name", "is missing")
    name = _text(f"{where}.function.name", function["name"])
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    read: dict[str, Any] = {
        "type": "function",
        "function": {"name": without_surrogates(name), "arguments": without_surrogates(arguments)},
    }
    return {"id": _text(f"{where}.id", call["id"]), **read} if call.get("id") else read


def _arguments(where: str, arguments: Any) -> str:
    """Return the arguments of a call as text, which they are, or as the JSON of the object that they are."""
    if isinstance(arguments, str):
        return arguments
    if not isinstance(arguments, Mapping):
        return _text(where, "" if arguments is None else arguments)
    try:
        return json_text.dumps(dict(arguments), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(where, f"is no JSON object: {error}") from error


def without_surrogates(text: str) -> str:
    """Return a text with unpaired surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _check_names(where: str, value: Any, known: set[str]) -> None:
    if not isinstance(value, _OBJECT):
        raise InvalidArgument(where, "is missing" if value is None else "must be an object")
    for name, one in value.items():
        if name not in known and name not in MESSAGE_NOTES and one is not None:
            raise InvalidArgument(
                f"{where}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {', '.join(sorted(known))} are"
            )


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(where, f"{str(value)[:_MAX_SHOWN]} is not a string")
    return value


MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARGS_BYTES = 16 << 10
MAX_CHAT_TEMPLATE_BYTES = 256 << 10
MAX_DOCUMENTS = 128
MAX_DOCUMENTS_BYTES = 1 << 20
MAX_EFFORT_CHARS = 64
MAX_THINKING_TOKEN_BUDGET = 1 << 20
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Options for the reasoning of a model, and its output.

    Attributes:
        effort: the chat template's variable `reasoning_effort`, such as "low"; None leaves it to the template. It also
            sets `enable_thinking`, False for "none".
        enabled: switch thinking on or off, by the chat template's variable `enable_thinking` or `thinking`; None leaves
            it to the template.
        thinking_token_budget: maximum tokens of thinking; None for no limit.
        include: return the reasoning; False drops it.

    Raises:
        InvalidArgument: a value is out of range; the field is named as in `reasoning.effort`.
    """

    effort: str | None = None
    enabled: bool | None = None
    thinking_token_budget: int | None = None
    include: bool = True

    def __post_init__(self) -> None:
        effort, budget = self.effort, self.thinking_token_budget
        if effort is not None and not (isinstance(effort, str) and 1 <= len(effort) <= MAX_EFFORT_CHARS):
            limit = f"a string of 1 to {MAX_EFFORT_CHARS} characters"
            raise InvalidArgument("reasoning.effort", f"{str(effort)[:_MAX_SHOWN]!r} is not {limit}")
        json_bytes("reasoning.effort", effort, max_bytes=8 * MAX_EFFORT_CHARS)
        if self.enabled is not None and not isinstance(self.enabled, bool):
            raise InvalidArgument("reasoning.enabled", f"{str(self.enabled)[:_MAX_SHOWN]!r} is not true or false")
        if budget is not None and not (type(budget) is int and 0 <= budget <= MAX_THINKING_TOKEN_BUDGET):
            limit = f"an integer from 0 to {MAX_THINKING_TOKEN_BUDGET}"
            raise InvalidArgument("reasoning.thinking_token_budget", f"{str(budget)[:_MAX_SHOWN]} is not {limit}")
        if not isinstance(self.include, bool):
            raise InvalidArgument("reasoning.include", f"{str(self.include)[:_MAX_SHOWN]!r} is not true or false")

    @property
    def sets_variables(self) -> bool:
        """True if the chat template must support it."""
        return self.effort is not None or self.enabled is not None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat: everything except the messages.

    Attributes:
        template_kwargs: variables of the template, such as `enable_thinking`; JSON values. Names that the template does
            not use have no effect.
        tool_choice: None is "auto" with tools, and "none" without.
        parallel_tool_calls: an answer may have several calls.
        add_generation_prompt: open the assistant's turn after the messages.
        continue_final_message: continue the last message, which stays open, instead of a new turn.
        documents: JSON objects for a template that uses them.
        chat_template: replaces the model's, on servers that trust those of requests; None for the model's.
        add_special_tokens: add the tokenizer's special tokens to those that the template writes.

    Raises:
        InvalidArgument: values too many or too large, an invalid name, two tools of one name, or a choice of a missing
            tool.
    """

    tools: Sequence[Tool] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] = ()
    chat_template: str | None = None
    add_special_tokens: bool = False

    def __post_init__(self) -> None:
        for flag in ("add_generation_prompt", "continue_final_message", "add_special_tokens"):
            if not isinstance(value := getattr(self, flag), bool):
                raise InvalidArgument(flag, f"{str(value)[:_MAX_SHOWN]!r} is not true or false")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgument("continue_final_message", "does not go with add_generation_prompt of true")
        self._check_documents()
        if self.chat_template is not None and (not isinstance(self.chat_template, str) or not self.chat_template):
            raise InvalidArgument("chat_template", "must be the text of a template")
        json_bytes("chat_template", self.chat_template, max_bytes=MAX_CHAT_TEMPLATE_BYTES)
        if len(self.tools) > MAX_TOOLS:
            raise InvalidArgument("tools", f"{len(self.tools)} tools; at most {MAX_TOOLS}")
        check_unique(self.tools, "tools")
        self._check_choice()
        path, kwargs = "chat_template_kwargs", self.template_kwargs
        if not isinstance(kwargs, Mapping):
            raise InvalidArgument(path, "must be a JSON object")
        if len(kwargs) > MAX_TEMPLATE_KWARGS:
            raise InvalidArgument(path, f"{len(kwargs)} variables; at most {MAX_TEMPLATE_KWARGS}")
        for name in kwargs:
            if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
                raise InvalidArgument(path, f"{str(name)[:_MAX_SHOWN]!a} is no name of a variable")
        json_bytes(path, kwargs, max_bytes=MAX_TEMPLATE_KWARGS_BYTES)

    def _check_documents(self) -> None:
        documents = self.documents
        if not isinstance(documents, Sequence) or isinstance(documents, str):
            raise InvalidArgument("documents", "must be a list of JSON objects")
        if len(documents) > MAX_DOCUMENTS:
            raise InvalidArgument("documents", f"{len(documents)} documents; at most {MAX_DOCUMENTS}")
        for i, one in enumerate(documents):
            if not isinstance(one, Mapping):
                raise InvalidArgument(f"documents[{i}]", "must be a JSON object")
        json_bytes("documents", documents, max_bytes=MAX_DOCUMENTS_BYTES)

    def _check_choice(self) -> None:
        if not isinstance(self.parallel_tool_calls, bool):
            shown = str(self.parallel_tool_calls)[:_MAX_SHOWN]
            raise InvalidArgument("parallel_tool_calls", f"{shown!r} is not true or false")
        choice = self.tool_choice
        if choice is None:
            return
        if choice.mode is ToolChoiceMode.REQUIRED and not self.tools:
            raise InvalidArgument("tool_choice", "'required' needs tools")
        is_named = choice.mode is ToolChoiceMode.NAMED
        if is_named and not any(tool.name == choice.name for tool in self.tools):
            raise InvalidArgument("tool_choice", f"{str(choice.name)[:_MAX_SHOWN]!r} is the name of none of the tools")
        if not is_named and choice.name is not None:
            raise InvalidArgument("tool_choice", f"{choice.mode.value!r} has no name of a function")

    @property
    def choice(self) -> ToolChoice:
        """The tool choice; "none" without tools."""
        if not self.tools:
            return ToolChoice(ToolChoiceMode.NONE)
        return self.tool_choice or ToolChoice(ToolChoiceMode.AUTO)

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools in the prompt: none if the model may call none."""
        return () if self.choice.mode is ToolChoiceMode.NONE else self.tools

    @property
    def is_laid_out(self) -> bool:
        """True if the chat template must support it."""
        is_usual = self.add_generation_prompt and not (self.documents or self.chat_template or self.add_special_tokens)
        return not is_usual or bool(self.shown_tools or self.template_kwargs) or self.reasoning.sets_variables

    @property
    def num_bytes(self) -> int:
        """Approximate size as JSON."""
        tools = [tool.as_json() for tool in self.tools]
        whole = {"tools": tools, "kwargs": self.template_kwargs, "documents": self.documents}
        return json_bytes("tools", whole, max_bytes=2 * MAX_TOOLS * MAX_TOOL_BYTES + MAX_DOCUMENTS_BYTES + (1 << 20))


class ChatKwargs(TypedDict, total=False):
    """Options of a chat as keywords, in OpenAI's format; None selects the default of each.

    Attributes:
        tools: tools that the model may call, each as JSON or a `Tool`.
        tool_choice: "none", "auto", "required", a function (`{"type": "function", "function": {"name": ...}}`), or a
            `ToolChoice`; "auto" by default if there are tools.
        parallel_tool_calls: False limits an answer to one call.
        chat_template_kwargs: variables of the chat template.
        reasoning: reasoning options: an object with the fields of `ReasoningOptions`, or a `ReasoningOptions`.
        add_generation_prompt: open the assistant's turn after the messages; False by default with
            `continue_final_message`.
        continue_final_message: continue the last message instead of a new turn.
        documents: JSON objects for a template that uses them.
        chat_template: replaces the model's, on servers with `--trust-request-chat-template`.
    """

    tools: Sequence[Tool | Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | ToolChoice | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning: ReasoningOptions | Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template: str | None


def build_chat_options(**words: Unpack[ChatKwargs]) -> ChatOptions:
    """Build ChatOptions from keywords.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`; or a keyword is not in `ChatKwargs`.
    """
    for name in words.keys() - ChatKwargs.__annotations__.keys():
        raise InvalidArgument(name, f"is not known; {', '.join(ChatKwargs.__annotations__)} are")
    tools, choice = parse_tools(words.get("tools")), words.get("tool_choice")
    kwargs, is_parallel = words.get("chat_template_kwargs"), words.get("parallel_tool_calls")
    if choice is not None and not isinstance(choice, ToolChoice):
        choice = parse_tool_choice(choice, tools)
    continues, opens = words.get("continue_final_message") or False, words.get("add_generation_prompt")
    documents = words.get("documents")
    return ChatOptions(
        tools=tools,
        template_kwargs={} if kwargs is None else kwargs,
        tool_choice=choice,
        parallel_tool_calls=True if is_parallel is None else is_parallel,
        reasoning=parse_reasoning(words.get("reasoning")),
        add_generation_prompt=continues is not True if opens is None else opens,
        continue_final_message=continues,
        documents=tuple(documents) if isinstance(documents, list) else documents or (),
        chat_template=words.get("chat_template") or None,
    )


def parse_reasoning(value: Any) -> ReasoningOptions:
    """Parse `ReasoningOptions` from an object; None gives the defaults.

    Raises:
        InvalidArgument: names the field, as in `reasoning.effort`.
    """
    if value is None or isinstance(value, ReasoningOptions):
        return value or ReasoningOptions()
    if not isinstance(value, Mapping):
        raise InvalidArgument("reasoning", "must be a JSON object")
    known = {one.name for one in fields(ReasoningOptions)}
    for name in value:
        if name not in known:
            shown = str(name)[:_MAX_SHOWN]
            raise InvalidArgument(f"reasoning.{shown}", f"is not supported; {', '.join(sorted(known))} are")
    return ReasoningOptions(**{name: one for name, one in value.items() if one is not None})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. `arguments` is JSON text as the model wrote it; it may be invalid."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """The next characters of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The next characters of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """The next characters of a call's arguments. `id` and `name` are set only in the first piece of a call.

    Attributes:
        index: index of the call in the answer, from 0.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = ContentPiece | ReasoningPiece | ToolCallPiece


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An assistant's turn, assembled from pieces."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> ChatAnswer:
        """Assemble pieces, in order."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[tuple[str, str, list[str]]] = []
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                content.append(piece.text)
            elif isinstance(piece, ReasoningPiece):
                reasoning.append(piece.text)
            else:
                if piece.index == len(calls):
                    calls.append((piece.id or "", piece.name or "", []))
                calls[piece.index][2].append(piece.arguments)
        return cls(
            "".join(content), "".join(reasoning), tuple(ToolCall(i, name, "".join(parts)) for i, name, parts in calls)
        )


_FORMER_NAMES = {
    "ChatWords": "ChatKwargs",
}
"""Public names of the previous release. They go with the next one."""

if not TYPE_CHECKING:
    __getattr__ = alias_names(__name__, _FORMER_NAMES)
