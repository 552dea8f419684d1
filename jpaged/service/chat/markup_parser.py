r"""Incremental parsers of calls in markup, where the format of each family is data.

`MarkupParser` reads a name between two texts, then a JSON object or tags for each argument:

    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>

Such a value is text. Its type is that of the tool's JSON schema: `ArgumentTypes`.

`CallListParser` reads calls as Python or Gemma writes them, with literals as values:

    [NAME(KEY="VALUE", KEY=[1, True])]
    <|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>,KEY:[1,true]}<tool_call|>

Sources: the chat templates of the models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jpaged.json_text import encode_string
from jpaged.service.chat.tool_parser import (
    SPACE,
    JsonValue,
    PieceWriter,
    ToolParser,
    find_first,
    num_held,
)

_MAX_NAME_CHARS = 256
_MAX_REFERENCES = 32
_MAX_CHOICES = 256
_TYPE_KEYS = frozenset({"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"})
_NAME = re.compile(r"[^\s<>{}()\[\]\"'=,;|]+")
_KEY_IN_LIST = re.compile(r"[^\s<>{}()\[\]\"'=,;|:]+")
_BEYOND_SPACE = re.compile(f"[^{SPACE}]")
_NUMBERED = re.compile(r"(?:functions\.)?(.+):\d+", re.DOTALL)
INDEX, CALL_ID = "INDEX", "CALL_ID?"
"""Places in the text before a call's arguments: of the call's number, and of an id that Mistral's models may write."""


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """Tags around the key and the value of an argument, as the model's template writes them, with its whitespace.

    Attributes:
        begin: the text before the key.
        key_ends: texts of which one ends the key. If there are two, the first one precedes texts, the second one JSON.
        value_begin: the text between the end of the key and the value.
        end: the text after the value. If it begins with a line break, a value has one on each side.
    """

    begin: str
    key_ends: tuple[str, ...]
    end: str
    value_begin: str = ""


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """Text around calls, as the model's template writes it, with its whitespace, which parsers do not require.

    Attributes:
        begin: the text before a function's name.
        name_end: the text between the name and the arguments.
        end: the text after the arguments.
        parameters: the tags of the arguments; None for a JSON object.
        section: texts before and after the calls.
        is_section_of_one: each call is in a separate section.
        name: what the model writes as the name; NAME is the function's.
    """

    begin: str
    name_end: str
    end: str
    parameters: ParameterTags | None = None
    section: tuple[str, str] = ("", "")
    is_section_of_one: bool = False
    name: str = "NAME"

    @property
    def tags(self) -> tuple[str, ...]:
        """All of these texts, without the whitespace around them."""
        texts = [*self.section, self.begin, self.name_end, self.end]
        if self.parameters is not None:
            one = self.parameters
            texts += [one.begin, *one.key_ends, one.value_begin, one.end]
        return tuple(dict.fromkeys(text.strip() for text in texts if text.strip().startswith("<")))


@dataclass(frozen=True, slots=True)
class ListMarkup:
    """Text around and in calls that have literals as arguments.

    Attributes:
        tags: tags of which one precedes the calls. If there are none, calls may come only at the start of an answer.
        close_tag: the tag after the calls.
        before_name: the text before a function's name.
        brackets: the texts around the arguments.
        assign: the text between a key and its value.
        quote: the text around strings; empty for Python's quotes.
        is_list: brackets enclose the calls.
        is_untagged: the tags are optional.
    """

    tags: tuple[str, ...]
    close_tag: str
    before_name: str = ""
    brackets: tuple[str, str] = ("(", ")")
    assign: str = "="
    quote: str = ""
    is_list: bool = True
    is_untagged: bool = False


def resolve_reference(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a local `$ref` names; the schema itself if it has none, or none that exists."""
    for _ in range(_MAX_REFERENCES):
        target = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(target, str) or not target.startswith("#/"):
            return schema
        found: Any = root
        for step in target[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        schema = found
    return {}


def json_type(value: Any) -> str:
    """Return the JSON schema type of a value; "integer" for a number without a fraction."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if value is None or isinstance(value, str):
        return "null" if value is None else "string"
    return "object" if isinstance(value, Mapping) else "array"


@dataclass(frozen=True, slots=True)
class ArgumentTypes:
    """The JSON types that a schema allows.

    Attributes:
        names: their names; empty if the schema allows any.
        texts: the strings of the schema's `enum` or `const`.
    """

    names: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """True if a value is always a string."""
        return self.names == {"string"}

    def has(self, kind: str) -> bool:
        """Return True if the schema allows values of a type."""
        return not self.names or kind in self.names or (kind == "integer" and "number" in self.names)

    def to_json(self, text: str) -> str:
        """Return a value that a model wrote as text, as JSON: a string as it is if it has none of the other types."""
        if self.is_text or text in self.texts:
            return encode_string(text)
        plain = text.strip(SPACE)
        if (not self.names or "boolean" in self.names) and plain.lower() in ("true", "false"):
            return plain.lower()
        for candidate in (plain, literal_to_json(plain)):
            kind = None if candidate is None else _read_type(candidate)
            if kind is not None and kind != "string" and self.has(kind):
                return str(candidate)
        return encode_string(text)


def _read_type(text: str) -> str | None:
    """Return the type of a JSON text; None if it is not JSON."""
    try:
        return json_type(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError, OverflowError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def argument_types(schema: Any, root: Mapping[str, Any]) -> ArgumentTypes:
    """Return the types that a schema allows; any if it has more than `_MAX_CHOICES` alternatives.

    Args:
        root: the schema that local references are relative to.
    """
    names: set[str] = set()
    texts: set[str] = set()
    waiting, num_read = [schema], 0
    while waiting:
        one, num_read = resolve_reference(waiting.pop(), root), num_read + 1
        if not isinstance(one, Mapping) or num_read > _MAX_CHOICES:
            return ArgumentTypes()
        values = [one["const"]] if "const" in one else one.get("enum")
        given = one.get("type")
        listed = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        choices = next((one[key] for key in ("anyOf", "oneOf") if isinstance(one.get(key), list)), None)
        if isinstance(values, list):
            texts.update(value for value in values if isinstance(value, str))
            names.update(map(json_type, values))
        elif listed:
            names.update(name for name in listed if isinstance(name, str))
            names.update(("null",) if one.get("nullable") is True else ())
        elif choices:
            waiting += choices
        else:
            listed = one["allOf"] if isinstance(one.get("allOf"), list) else []
            parts = (part for part in listed if isinstance(part, Mapping) and part.keys() & _TYPE_KEYS)
            waiting.append(next(parts, None))
    return ArgumentTypes(frozenset(names), frozenset(texts))


def parameter_types(schema: Mapping[str, Any] | None, key: str) -> ArgumentTypes:
    """Return the types of a tool's argument; any if the tool or the argument is unknown."""
    root = resolve_reference(schema or {}, schema or {})
    properties = root.get("properties") if isinstance(root, Mapping) else None
    if isinstance(properties, Mapping) and key in properties:
        return argument_types(properties[key], schema or {})
    return argument_types(root.get("additionalProperties") if isinstance(root, Mapping) else None, schema or {})


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "0": "\0"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\s\S]))")
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PYTHON_STRING = (
    r"(?P<string>'''(?:[^'\\]+|\\[\s\S]|'(?!''))*+'''|'(?:[^'\\]+|\\[\s\S])*+'|"
    r"\"\"\"(?:[^\"\\]+|\\[\s\S]|\"(?!\"\"))*+\"\"\"|\"(?:[^\"\\]+|\\[\s\S])*+\")"
)
_OTHER_TOKENS = r"|(?P<mark>[\[\](){},:])|(?P<word>[^\s\[\](){},:'\"]+)"
_PYTHON_TOKEN = re.compile(_PYTHON_STRING + _OTHER_TOKENS)


def _unescape(text: str) -> str:
    """Return the characters of a string literal without its quotes. Unknown escapes keep their backslash."""

    def replaced(found: re.Match[str]) -> str:
        digits = found[1] or found[2] or found[3]
        if digits is None:
            return _ESCAPES.get(found[4], found[4] if found[4] in "\\'\"/" else found[0])
        return chr(int(digits, 16)) if int(digits, 16) < 0x110000 else found[0]

    text = _ESCAPE.sub(replaced, text) if "\\" in text else text
    return _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)


def _string_content(token: str) -> str:
    width = 3 if len(token) >= 6 and token.startswith(("'''", '"""')) else 1
    return _unescape(token[width:-width])


def literal_to_json(text: str, quote: str = "") -> str | None:
    """Return a literal of Python, or of Gemma, as JSON; None if it is not one.

    Args:
        quote: the text around strings, in which nothing is escaped, and next to which keys have no quotes; empty for
            Python's literals.
    """
    pattern = _PYTHON_TOKEN
    if quote:
        edge = re.escape(quote)
        pattern = re.compile(rf"(?P<raw>{edge}[\s\S]*?{edge})|{_PYTHON_STRING}{_OTHER_TOKENS}")
    parts: list[str] = []
    at = 0
    while at < len(text):
        if text[at] in SPACE:
            at += 1
            continue
        found = pattern.match(text, at)
        if found is None:
            return None
        at = found.end()
        parts.append(_token_to_json(found, parts, quote, is_key=text[at : at + 1] == ":"))
        if not parts[-1]:
            return None
    return "".join(parts) if _read_type(" ".join(parts)) is not None else None


def _token_to_json(found: re.Match[str], parts: list[str], quote: str, *, is_key: bool) -> str:
    """Return a token of a literal as JSON; empty if JSON has none. Removes a comma before a closing bracket."""
    token, kind = found[0], found.lastgroup
    if kind == "raw":
        return encode_string(token[len(quote) : -len(quote)])
    if kind == "string":
        return encode_string(_string_content(token))
    if kind == "word":
        return encode_string(token) if quote and is_key else _WORDS.get(token, token)
    if token in "])}" and len(parts) > 1 and parts[-1] == ",":
        parts.pop()
    return {"(": "[", ")": "]"}.get(token, token)


class _ArgumentWriter:
    """Writes the arguments of one call as a JSON object, one after the other."""

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer
        self._num = 0

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._num = 0
        self._writer.call(name, call_id)
        self._writer.arguments("{")

    def key(self, key: str) -> None:
        self._writer.arguments(f"{', ' if self._num else ''}{encode_string(key)}: ")
        self._num += 1

    def cut_key(self, key: str) -> None:
        """Write the beginning of a key at the end of the text."""
        if key:
            self._writer.arguments(f"{', ' if self._num else ''}{encode_string(key)[:-1]}")

    def value(self, written: str) -> None:
        self._writer.arguments(written)

    def cut_value(self, written: str) -> None:
        """Write a value at the end of the text: a string stays open."""
        self._writer.arguments(written[:-1] if written[0] == '"' else written)

    def end(self) -> None:
        self._writer.arguments("}")


_QUOTE = '"'


class MarkupParser(ToolParser):
    """Parses the calls of a `CallMarkup`. Closing tags may be missing, and so may quotes around names."""

    def __init__(self, writer: PieceWriter, markup: CallMarkup) -> None:
        opener, self._closer = (text.strip() for text in markup.section)
        self._call_tag = markup.begin.strip().removesuffix(_QUOTE)
        super().__init__(writer, tuple(tag for tag in (opener, self._call_tag) if tag))
        self._markup = markup
        self._end, self._name_end = markup.end.strip(), markup.name_end.strip()
        self._is_quoted = self._name_end.startswith(_QUOTE)
        self._arguments = _ArgumentWriter(writer)
        self._value = JsonValue()
        self._head: tuple[str, str | None] = ("", None)
        parameters = markup.parameters
        self._parameter = "" if parameters is None else parameters.begin.strip().removesuffix(_QUOTE)
        self._key_ends = () if parameters is None else tuple(text.strip() for text in parameters.key_ends)
        if self._key_ends == (f"{_QUOTE}>",):
            self._key_ends += (">",)
        self._value_begin = "" if parameters is None else parameters.value_begin.strip()
        self._value_end = "" if parameters is None else parameters.end.strip()
        self._is_on_lines = parameters is not None and parameters.end.startswith("\n")
        next_tags = (self._parameter, self._end, self._closer, self._call_tag, opener)
        self._next_tags = tuple(dict.fromkeys(tag for tag in next_tags if tag))
        self._value_ends = (self._value_end, self._parameter, self._end)
        self._types = ArgumentTypes()
        self._is_explicit = False
        self._num_searched = 0

    def _begin(self, tag: str) -> None:
        self._state = self._in_head if tag == self._call_tag else self._in_section

    def _in_section(self) -> bool:
        """Find the first call after the section's tag."""
        self._skip_space()
        if self._waiting.startswith(self._call_tag):
            self._raw += self._call_tag
            self._waiting = self._waiting.removeprefix(self._call_tag)
            self._state = self._in_head
            return True
        return False if self._call_tag.startswith(self._waiting) else self._give_up()

    def _in_head(self) -> bool:
        """Read the name and the text after it."""
        self._skip_space()
        if self._is_quoted and self._waiting.startswith(_QUOTE) and _QUOTE not in self._raw:
            self._raw, self._waiting = self._raw + _QUOTE, self._waiting.removeprefix(_QUOTE)
        if not self._waiting:
            return False
        found = _NAME.match(self._waiting)
        if found is None or len(found[0]) > _MAX_NAME_CHARS:
            return self._give_up()
        rest = self._waiting[found.end() :].lstrip(SPACE)
        ends = [self._name_end] if self._name_end else [self._parameter, self._end]
        if self._is_quoted:
            ends.append(self._name_end.removeprefix(_QUOTE))
        tag = next((end for end in ends if rest.startswith(end)), None)
        if tag is None:
            return False if any(end.startswith(rest) for end in ends) else self._give_up()
        end = len(self._waiting) - len(rest) + (len(tag) if self._name_end else 0)
        self._raw, self._waiting = self._raw + self._waiting[:end], self._waiting[end:]
        numbered = _NUMBERED.fullmatch(found[0]) if INDEX in self._markup.name else None
        name, call_id = (found[0], None) if numbered is None else (numbered[1], found[0])
        if self._markup.parameters is None:
            self._head, self._state = (name, call_id), self._before_object
        else:
            self._start_call(name, call_id)
            self._state = self._between
        return True

    def _start_call(self, name: str, call_id: str | None) -> None:
        self._raw, self._head = "", (name, call_id)
        if self._markup.parameters is None:
            self._writer.call(name, call_id)
        else:
            self._arguments.begin(name, call_id)

    def _before_object(self) -> bool:
        """Read up to the JSON object."""
        self._skip_space()
        if not self._waiting:
            return False
        if self._waiting[0] == "{":
            self._start_call(*self._head)
            self._value, self._state = JsonValue(), self._in_json
            return True
        rest = self._waiting.removeprefix("null").lstrip(SPACE)
        if rest.startswith(self._end):
            self._start_call(*self._head)
            self._writer.arguments("{}")
            self._waiting, self._state = rest, self._after_arguments
            return True
        may_follow = self._end.startswith(rest) or "null".startswith(self._waiting)
        return False if may_follow else self._give_up()

    def _in_json(self) -> bool:
        end, is_whole = self._value.read(self._waiting, 0)
        self._writer.arguments(self._waiting[:end])
        self._waiting = self._waiting[end:]
        if is_whole:
            self._state = self._after_arguments
        return is_whole

    def _after_arguments(self) -> bool:
        rest = self._waiting.lstrip(SPACE)
        if rest.startswith(self._end):
            self._waiting = rest.removeprefix(self._end)
        elif self._end.startswith(rest):
            return False
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        return self._close(self._closer) if self._closer else self._end_call()

    def _between(self) -> bool:
        """Read the next tag after the head or a value."""
        rest = self._waiting.lstrip(SPACE)
        tag = next((tag for tag in self._next_tags if rest.startswith(tag)), None)
        if tag == self._parameter:
            self._raw, self._waiting = tag, rest.removeprefix(tag)
            self._state = self._in_key
            return True
        if tag is None and any(tag.startswith(rest) for tag in self._next_tags):
            return False
        self._arguments.end()
        if tag == self._end:
            self._waiting = rest.removeprefix(tag)
        self._state = self._after_call
        return True

    def _in_key(self) -> bool:
        found = find_first(self._waiting, self._key_ends, 0, _MAX_NAME_CHARS)
        end = len(self._waiting) - num_held(self._waiting, self._key_ends) if found is None else found[0]
        key = self._waiting[:end]
        if "\n" in key.strip(SPACE) or (found is None and len(self._waiting) >= _MAX_NAME_CHARS):
            self._arguments.end()
            return self._give_up()
        if found is None:
            return False
        self._raw, self._waiting = "", self._waiting[found[0] + len(found[1]) :]
        key = key.strip(SPACE).removeprefix(_QUOTE)
        self._arguments.key(key)
        self._types = parameter_types(self._writer.schemas.get(self._head[0]), key)
        if len(self._key_ends) > 1 and ">" not in self._key_ends:
            self._is_explicit = found[1] != self._key_ends[0]
            if not self._is_explicit and (not self._types.names or "string" in self._types.names):
                self._types = ArgumentTypes(frozenset({"string"}))
        self._state = self._before_value if self._value_begin else self._open_value
        return True

    def _before_value(self) -> bool:
        rest = self._waiting.lstrip(SPACE)
        if rest.startswith(self._value_begin):
            self._waiting = rest.removeprefix(self._value_begin)
        elif self._value_begin.startswith(rest):
            return False
        self._state = self._open_value
        return True

    def _open_value(self) -> bool:
        if self._is_on_lines:
            self._waiting = self._waiting.removeprefix("\n")
        self._num_searched = 0
        if self._types.is_text and not self._is_explicit:
            self._writer.arguments('"')
            self._state = self._in_text
        else:
            self._state = self._in_value
        return True

    def _in_text(self) -> bool:
        """Stream a value that is a string."""
        found = find_first(self._waiting, self._value_ends)
        end = len(self._waiting) - num_held(self._waiting, self._value_ends) if found is None else found[0]
        text = self._waiting[:end]
        if self._is_on_lines:
            text = text.removesuffix("\n")
        self._writer.arguments(encode_string(text)[1:-1])
        if found is None:
            self._waiting = self._waiting[len(text) :]
            return False
        self._writer.arguments('"')
        return self._end_value(end, found[1])

    def _in_value(self) -> bool:
        """Read a value whose type depends on its text."""
        found = find_first(self._waiting, self._value_ends, self._num_searched)
        if found is None:
            self._num_searched = max(0, len(self._waiting) - max(map(len, self._value_ends)) + 1)
            return False
        self._arguments.value(self._typed(self._waiting[: found[0]]))
        return self._end_value(*found)

    def _typed(self, text: str) -> str:
        if self._is_on_lines:
            text = text.removesuffix("\n")
        if self._is_explicit and _read_type(text) is not None:
            return text.strip(SPACE)
        return self._types.to_json(text)

    def _end_value(self, at: int, tag: str) -> bool:
        self._waiting = self._waiting[at + (len(tag) if tag == self._value_end else 0) :]
        self._state = self._between
        return True

    def _left(self) -> str:
        """Write the rest of an argument, or return the rest of the text as content."""
        if self._state == self._in_key:
            self._arguments.cut_key(self._waiting.removeprefix(_QUOTE))
        elif self._state == self._in_text:
            self._writer.arguments(encode_string(self._waiting)[1:-1])
        elif self._state in (self._in_value, self._open_value) and self._waiting:
            self._arguments.cut_value(self._typed(self._waiting))
        elif self._state not in (self._between, self._before_value, self._after_arguments, self._after_call):
            return super()._left()
        return ""


class LiteralScanner:
    """Finds the end of a literal incrementally: a comma or a closing bracket outside strings and brackets.

    Models write quotes in strings without a backslash. One of Python's quotes closes a string only if the literal may
    end or continue after it.

    Args:
        quote: as in `ListMarkup`.
    """

    def __init__(self, quote: str = "") -> None:
        self._quote = quote
        edges = f'{re.escape(quote)}|"' if quote else "'''|\"\"\"|['\"]"
        self._outside = re.compile(rf"{edges}|[\[\](){{}},]")
        self._at = 0
        self._depth = 0
        self._string = ""

    def find_end(self, text: str) -> int | None:
        """Return the position of the end in a text that grew since the last call; None if it has not come."""
        while self._at < len(text):
            end = self._skip_string(text) if self._string else self._skip_other(text)
            if end is not None:
                return end if end >= 0 else None
        return None

    def _skip_string(self, text: str) -> int | None:
        """Advance in a string. Return -1 to wait for more text."""
        if self._string == self._quote:
            end = text.find(self._quote, self._at)
            if end < 0:
                self._at = max(self._at, len(text) - len(self._quote) + 1)
                return -1
            self._at, self._string = end + len(self._quote), ""
            return None
        pattern = re.compile(rf"\\|{self._string}")
        while found := pattern.search(text, self._at):
            self._at = found.start()
            if found[0] != "\\":
                after = _BEYOND_SPACE.search(text, found.end())
                if after is None:
                    return -1
                self._at = found.end()
                if after[0] in ",:)]}":
                    self._string = ""
                    return None
            elif self._at + 1 == len(text):
                return -1
            else:
                self._at += 2
        self._at = max(self._at, len(text) - len(self._string) + 1)
        return -1

    def _skip_other(self, text: str) -> int | None:
        """Advance outside strings. Return the position of the end, or -1 to wait for more text."""
        found = self._outside.search(text, self._at)
        held = num_held(text, (self._quote,)) if self._quote else 0
        if found is None or found.start() >= len(text) - held:
            self._at = max(self._at, len(text) - held)
            return -1
        mark = found[0]
        if mark in ("'", '"') and not self._quote and text[found.start() :] in (mark, mark * 2):
            self._at = found.start()
            return -1  # the first of one quote or three
        if self._depth == 0 and mark in "])},":
            self._at = found.start()
            return self._at
        self._at = found.end()
        if mark in ("[", "(", "{"):
            self._depth += 1
        elif mark in ("]", ")", "}"):
            self._depth -= 1
        elif mark != ",":
            self._string = mark
        return None


class CallListParser(ToolParser):
    """Parses the calls of a `ListMarkup`. Closing brackets and tags may be missing.

    Without a tag, a name must be that of a tool.
    """

    def __init__(self, writer: PieceWriter, markup: ListMarkup) -> None:
        super().__init__(writer, markup.tags)
        self._markup = markup
        self._arguments = _ArgumentWriter(writer)
        self._scanner = LiteralScanner()
        self._is_tagged = False
        self._is_list = False
        self._name = ""
        self._types = ArgumentTypes()
        if markup.is_untagged:
            self._state = self._start

    def _begin(self, tag: str) -> None:
        self._is_tagged, self._is_list = True, False
        self._state = self._before_list if self._markup.is_list else self._in_head

    def _start(self) -> bool:
        """Read calls without a tag, or content."""
        rest = self._waiting.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] != "[":
            self._state = self._content
            return True
        at = len(self._waiting) - len(rest)
        self._raw, self._waiting = self._waiting[:at], rest
        self._is_tagged, self._state = False, self._before_list
        return True

    def _before_list(self) -> bool:
        self._skip_space()
        if not self._waiting:
            return False
        self._is_list = self._waiting[0] == "["
        if self._is_list:
            self._raw, self._waiting = self._raw + "[", self._waiting[1:]
        self._state = self._in_head
        return True

    def _in_head(self) -> bool:
        """Read from a function's name to the opening bracket, or an object that is a call."""
        self._skip_space()
        if self._is_tagged and self._is_list and self._waiting.startswith("{"):
            self._open_object()
            return True
        before = self._markup.before_name
        if not self._waiting.startswith(before) or not self._waiting:
            return False if before.startswith(self._waiting) else self._give_up()
        found = _NAME.match(self._waiting, len(before))
        if found is None:
            return self._give_up() if len(self._waiting) > len(before) else False
        if len(found[0]) > _MAX_NAME_CHARS:
            return self._give_up()
        rest = self._waiting[found.end() :].lstrip(SPACE)
        if not rest:
            return False
        if rest[0] != self._markup.brackets[0] or not (self._is_tagged or found[0] in self._writer.schemas):
            return self._give_up()
        end = len(self._waiting) - len(rest) + 1
        self._raw, self._waiting = self._raw + self._waiting[:end], self._waiting[end:]
        self._name, self._state = found[0], self._first_key
        return True

    def _first_key(self) -> bool:
        """Read the first key, or the end: what comes decides if there is a call."""
        rest = self._waiting.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] == self._markup.brackets[1]:
            self._raw = ""
            self._arguments.begin(self._name)
            self._waiting, self._state = rest, self._next_key
            return True
        key = self._read_key(rest)
        if not isinstance(key, str):
            return False if key else self._give_up()
        self._raw = ""
        self._arguments.begin(self._name)
        self._open_value(key)
        return True

    def _read_key(self, rest: str) -> str | bool:
        """Read a key and the text after it. Return True to wait for more text, False if there is none."""
        quote = next((one for one in (self._markup.quote, '"', "'") if one and rest.startswith(one)), "")
        if not quote and self._markup.quote.startswith(rest):
            return True
        if quote:
            end = rest.find(quote, len(quote), _MAX_NAME_CHARS)
            if end < 0:
                return len(rest) < _MAX_NAME_CHARS
            key, after = rest[len(quote) : end], rest[end + len(quote) :]
        else:
            found = _KEY_IN_LIST.match(rest)
            if found is None or len(found[0]) > _MAX_NAME_CHARS:
                return False
            key, after = found[0], rest[found.end() :]
        after = after.lstrip(SPACE)
        assign = self._markup.assign
        if not after or (after == assign == "="):
            return True
        if not after.startswith(assign) or after.startswith("=="):
            return False
        self._waiting = after[1:]
        return key

    def _next_key(self) -> bool:
        """Read another key or the end, after an argument."""
        rest = self._waiting.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] == self._markup.brackets[1]:
            self._arguments.end()
            self._waiting, self._state = rest[1:], self._after_call
            return True
        key = self._read_key(rest)
        if not isinstance(key, str):
            if key:
                return False
            self._arguments.end()
            return self._end_call()
        self._open_value(key)
        return True

    def _open_value(self, key: str) -> None:
        self._arguments.key(key)
        self._types = parameter_types(self._writer.schemas.get(self._name), key)
        self._scanner, self._state = LiteralScanner(self._markup.quote), self._in_value

    def _in_value(self) -> bool:
        end = self._scanner.find_end(self._waiting)
        if end is None:
            return False
        self._arguments.value(self._to_json(self._waiting[:end]))
        self._waiting = self._waiting[end + (self._waiting[end] == ",") :]
        self._state = self._next_key
        return True

    def _to_json(self, text: str) -> str:
        """Return a literal as JSON: by the schema if a string stands for another type, a string if it is not one."""
        text = text.strip(SPACE)
        written = literal_to_json(text, self._markup.quote)
        kind = None if written is None else _read_type(written)
        if written is None or kind is None:
            is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            return encode_string(_unescape(text[1:-1])) if is_quoted else self._types.to_json(text)
        if self._types.has(kind):
            return written
        return self._types.to_json(json.loads(written) if kind == "string" else text)

    def _behind_object(self) -> bool:
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        if not self._is_list:
            return self._end_list()
        rest = self._waiting.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] == ",":
            at = len(self._waiting) - len(rest) + 1
            self._raw, self._waiting = self._waiting[:at], self._waiting[at:]
            self._state = self._in_head
            return True
        if rest[0] == "]":
            self._waiting = rest[1:]
        return self._end_list()

    def _end_list(self) -> bool:
        if self._is_tagged and self._markup.close_tag:
            self._state = self._closing
            return True
        self._end_call()
        self._state = self._start if self._markup.is_untagged else self._content
        return True

    def _closing(self) -> bool:
        return self._close(self._markup.close_tag)

    def _left(self) -> str:
        """Write the rest of an argument, or return the rest of the text as content."""
        if self._state == self._in_value:
            text = self._waiting.strip(SPACE)
            if text:
                self._arguments.cut_value(self._cut_literal(text))
        elif self._state == self._next_key:
            self._arguments.cut_key(self._waiting.strip(SPACE))
        elif self._state not in (self._after_call, self._closing, self._start) or not self._writer.num_calls:
            return super()._left()
        return ""

    def _cut_literal(self, text: str) -> str:
        """Return the beginning of a literal as JSON."""
        quote = next((one for one in (self._markup.quote, "'''", '"""', "'", '"') if one and text.startswith(one)), "")
        is_whole = quote and len(text) >= 2 * len(quote) and text.endswith(quote)
        if not quote or is_whole or len(text) == len(quote):
            return self._to_json(text)
        inside = text[len(quote) :]
        return encode_string(inside if quote == self._markup.quote else _unescape(inside))
