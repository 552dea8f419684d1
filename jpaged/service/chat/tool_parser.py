"""Incremental parsers of tool calls, one for each model family, and their shared base.

`ToolParser` emits text up to a tag, and holds back text that may still become one. `CallObject` reads a call as a JSON
object, `{"name": ..., "arguments": {...}}`, incrementally; arguments may also be a string with the JSON of an object,
which is read whole. `PieceWriter` buffers an answer's pieces.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, a pair of tags for each call.
Source: https://github.com/NousResearch/Hermes-Function-Calling. Qwen 2.5 and 3 have the same format.

Llama 3: an answer that begins with `{"name": ..., "parameters": {...}}`; a semicolon separates more calls. A tag,
`<|python_tag|>`, may precede a call; with the tag, a call may start anywhere in the answer.
Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1.

Mistral: after `[TOOL_CALLS]`, a list of objects or, since tokenizer version 11, names and arguments.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}      with [CALL_ID]id before [ARGS] in some

Source: https://docs.mistral.ai/guides/tokenization.
"""

from __future__ import annotations

import abc
import enum
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jpaged.chat import ContentPiece, Piece, ReasoningPiece, ToolCallPiece, without_surrogates

NewId = Callable[[], str]
Schemas = Mapping[str, Mapping[str, Any]]
NO_SCHEMAS: Schemas = MappingProxyType({})
_ALPHANUMERICS = string.ascii_letters + string.digits


def call_id() -> str:
    """Return a new call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a new call id of nine letters and digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


class PieceWriter:
    """Collects pieces and merges neighbors of one kind.

    Args:
        new_id: makes the id of a call that has none, or the id of an earlier call.
        schemas: the tools that may be called: name -> JSON schema of the arguments.
    """

    def __init__(self, new_id: NewId = call_id, schemas: Schemas = NO_SCHEMAS) -> None:
        self._new_id = new_id
        self.schemas = schemas
        self._ids: set[str] = set()
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def content(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ContentPiece):
            self._pieces[-1] = ContentPiece(last.text + text)
        else:
            self._pieces.append(ContentPiece(text))

    def reasoning(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ReasoningPiece):
            self._pieces[-1] = ReasoningPiece(last.text + text)
        else:
            self._pieces.append(ReasoningPiece(text))

    def call(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call."""
        written = call_id if call_id and call_id not in self._ids else self._new_id()
        self._ids.add(written)
        self._pieces.append(ToolCallPiece(self.num_calls, "", id=written, name=name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append to the arguments of the current call."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        index = self.num_calls - 1
        if isinstance(last, ToolCallPiece) and last.index == index:
            self._pieces[-1] = ToolCallPiece(index, last.arguments + text, last.id, last.name)
        else:
            self._pieces.append(ToolCallPiece(index, text))

    def take(self) -> list[Piece]:
        """Return the pieces since the last call, and clear them."""
        pieces, self._pieces = self._pieces, []
        return pieces


SPACE = " \t\r\n"
_MAX_NAME_CHARS = 256
_ARGUMENTS, _SAYS_NOTHING = ("arguments", "parameters"), ("type", "id", "index")
_OF_STRING = re.compile(r'["\\]')
_OF_VALUE = re.compile(r'["{}\[\]]')
_AFTER_PLAIN = re.compile(r"[,\]}\s]")


class Reading(enum.Enum):
    """Progress of reading a call."""

    MORE = "more"
    """All given text is read; the call is incomplete."""
    DONE = "done"
    """The call has ended, either properly or by a syntax error after its arguments."""
    MALFORMED = "malformed"
    """The text is not a call, and nothing of it was written."""


class _ParsePosition(enum.Enum):
    """Position in the object: what comes next, or (the last six) which value is being read."""

    OPENING = enum.auto()
    FIRST_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()
    NEXT_KEY = enum.auto()
    IN_KEY = enum.auto()
    IN_NAME = enum.auto()
    IN_ARGUMENTS = enum.auto()
    IN_QUOTED_ARGUMENTS = enum.auto()
    IN_NULL = enum.auto()
    PASSED_OVER = enum.auto()


_STEPS = {
    (_ParsePosition.OPENING, "{"): _ParsePosition.FIRST_KEY,
    (_ParsePosition.COLON, ":"): _ParsePosition.VALUE,
    (_ParsePosition.COMMA, ","): _ParsePosition.NEXT_KEY,
}
_VALUES = (
    _ParsePosition.IN_KEY,
    _ParsePosition.IN_NAME,
    _ParsePosition.IN_ARGUMENTS,
    _ParsePosition.IN_QUOTED_ARGUMENTS,
    _ParsePosition.IN_NULL,
    _ParsePosition.PASSED_OVER,
)
_OF_ARGUMENTS = {
    "{": _ParsePosition.IN_ARGUMENTS,
    '"': _ParsePosition.IN_QUOTED_ARGUMENTS,
    "n": _ParsePosition.IN_NULL,
}
"""What begins with each character in place of arguments."""
_NO_ARGUMENTS = "{}"


class _MalformedError(Exception):
    """The next character, or the string before it, cannot occur in a call."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class JsonValue:
    """Finds the end of a JSON value incrementally. Looks only at strings and brackets, and validates nothing else."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_plain = False
        self._is_escaped = False

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Return the position where reading stopped, and True if the value ends there. `text[at]` must exist."""
        if not (self._depth or self._is_string or self._is_plain) and text[at] not in '"{[':
            self._is_plain = True  # a number or a word ends before a character that it cannot contain
        if self._is_plain:
            found = _AFTER_PLAIN.search(text, at)
            return (len(text), False) if found is None else (found.start(), True)
        if self._is_escaped:
            self._is_escaped = False
            at += 1
        while found := (_OF_STRING if self._is_string else _OF_VALUE).search(text, at):
            at = found.end()
            if found[0] == "\\":
                self._is_escaped = at == len(text)
                at += not self._is_escaped
            elif found[0] == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
            if self._depth <= 0 and not self._is_string:
                return at, True
        return len(text), False


class CallObject:
    """One call. Writing starts once its name is known and its arguments begin, an object or null.

    Before that, only `name`, the arguments under either key, and ignored keys (`type`, `id`, `index`) may occur. Any
    other key makes it malformed, so that a JSON answer that is not a call is recognized early. Keys after the arguments
    are skipped. An object with a name and no arguments is a call without arguments, and so is one whose arguments are
    null.

    Args:
        writer: receives the call.
        is_tagged: a tag precedes the object. Otherwise an object with only a name is a call only if a tool has that
            name.
    """

    def __init__(self, writer: PieceWriter, *, is_tagged: bool = True) -> None:
        self._writer = writer
        self._is_tagged = is_tagged
        self._place = _ParsePosition.OPENING
        self._value = JsonValue()
        self._string = ""
        self._name: str | None = None
        self._early: list[str] = []
        self.has_begun = False

    def read(self, text: str, at: int) -> tuple[Reading, int]:
        """Continue reading at `at`; return the state and the position after the last character read."""
        try:
            while at < len(text):
                if self._place in _VALUES:
                    at = self._read_value(text, at)
                elif text[at] in SPACE:
                    at += 1
                elif (
                    text[at] == "}"
                    and self._place in (_ParsePosition.COMMA, _ParsePosition.NEXT_KEY)
                    and self._may_end()
                ):
                    return Reading.DONE, at + 1
                elif self._place in (_ParsePosition.FIRST_KEY, _ParsePosition.NEXT_KEY, _ParsePosition.VALUE):
                    self._open_value(text, at)
                elif (self._place, text[at]) in _STEPS:
                    self._place = _STEPS[self._place, text[at]]
                    at += 1
                else:
                    raise _MalformedError(at)
        except _MalformedError as error:
            return (Reading.DONE if self.has_begun else Reading.MALFORMED), error.at
        return Reading.MORE, at

    def _may_end(self) -> bool:
        """Return True if a call has begun; begin one without arguments here."""
        is_call = self._name is not None and (self._is_tagged or self._name in self._writer.schemas)
        if is_call and not self.has_begun:
            self._early = [_NO_ARGUMENTS]
            self._begin()
        return self.has_begun

    def _open_value(self, text: str, at: int) -> None:
        """Choose the state for the value or key that begins here."""
        if self._place is not _ParsePosition.VALUE:
            place, opener = _ParsePosition.IN_KEY, '"'
        elif self.has_begun or self._string in _SAYS_NOTHING:
            place, opener = _ParsePosition.PASSED_OVER, text[at]
        elif self._string == "name" and self._name is None:
            place, opener = _ParsePosition.IN_NAME, '"'
        elif self._string in _ARGUMENTS and not self._early:
            place, opener = _OF_ARGUMENTS.get(text[at], _ParsePosition.IN_ARGUMENTS), text[at]
            if opener not in _OF_ARGUMENTS:
                raise _MalformedError(at)
        else:
            raise _MalformedError(at)
        if text[at] != opener or opener in ",:]}":
            raise _MalformedError(at)
        self._place, self._value, self._string = place, JsonValue(), ""
        if place is _ParsePosition.IN_ARGUMENTS:
            self._begin()

    def _begin(self) -> None:
        """Write the call and the arguments read so far, once its name is known."""
        if self._name is not None:
            self.has_begun = True
            self._writer.call(self._name)
            self._writer.arguments("".join(self._early))

    def _read_value(self, text: str, at: int) -> int:
        if self._place in (_ParsePosition.IN_KEY, _ParsePosition.IN_NAME, _ParsePosition.IN_NULL):
            text = text[: at + _MAX_NAME_CHARS - len(self._string)]
            if at == len(text):
                raise _MalformedError(at)
        end, is_whole = self._value.read(text, at)
        if self._place is _ParsePosition.IN_ARGUMENTS:
            if self.has_begun:
                self._writer.arguments(text[at:end])
            else:
                self._early.append(text[at:end])
        elif self._place is not _ParsePosition.PASSED_OVER:
            self._string += text[at:end]
        if is_whole:
            self._end_value(end)
        return end

    def _end_value(self, at: int) -> None:
        place, self._place = self._place, _ParsePosition.COMMA
        if place is _ParsePosition.IN_KEY:
            self._place, self._string = _ParsePosition.COLON, _unquoted(self._string, at)
            if not self.has_begun and self._string not in ("name", *_ARGUMENTS, *_SAYS_NOTHING):
                raise _MalformedError(at)
        elif place in (_ParsePosition.IN_NULL, _ParsePosition.IN_QUOTED_ARGUMENTS):
            text = "" if self._string == "null" else _unquoted(self._string, at).strip(SPACE)
            self._early = [text or _NO_ARGUMENTS]
            if not _is_object(self._early[0]):
                raise _MalformedError(at)
            self._begin()
        elif place is _ParsePosition.IN_NAME:
            self._name = _unquoted(self._string, at)
            if not self._name:
                raise _MalformedError(at)
            if self._early:
                self._begin()


def _unquoted(string: str, at: int) -> str:
    try:
        return without_surrogates(str(json.loads(string)))
    except ValueError:
        raise _MalformedError(at) from None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def num_held(text: str, tags: tuple[str, ...]) -> int:
    """Return the number of characters at a text's end that may become one of the tags; 0 if none."""
    longest = min(len(text), max(map(len, tags), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)


def find_first(text: str, tags: tuple[str, ...], start: int = 0, end: int | None = None) -> tuple[int, str] | None:
    """Return the position of the first tag in a text, and the tag; None if there is none."""
    return min(((at, tag) for tag in tags if (at := text.find(tag, start, end)) >= 0), default=None)


class ToolParser(abc.ABC):
    """State machine: each state consumes what it recognizes of the waiting text and sets the next state.

    Text that begins like a call and is none is content in full, including its tags. The decision is made when the
    arguments begin: from there on it is a call, whose arguments are passed through as the model writes them, valid or
    not. Malformed text after the arguments is content again. Whitespace next to calls is not content.

    Args:
        tags: tags that begin a call.
    """

    def __init__(self, writer: PieceWriter, tags: tuple[str, ...]) -> None:
        self._writer = writer
        self._tags = tags
        self._waiting = ""
        self._raw = ""
        self._object: CallObject | None = None
        self._is_beside_call = True
        self._state: Callable[[], bool] = self._content

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        self._waiting += text
        while self._waiting and self._state():
            pass
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        self._writer.content(self._left())
        self._raw = self._waiting = ""
        return self._writer.take()

    def _left(self) -> str:
        """Return the part of the waiting text that is content at the end."""
        if self._state == self._content:
            is_space = self._is_beside_call and self._writer.num_calls and not self._waiting.strip(SPACE)
            return "" if is_space else self._waiting
        return self._raw + self._waiting

    @abc.abstractmethod
    def _begin(self, tag: str) -> None:
        """Enter the state after a tag; `_raw` holds the tag."""

    def _content(self) -> bool:
        found = find_first(self._waiting, self._tags)
        end = len(self._waiting) - num_held(self._waiting, self._tags) if found is None else found[0]
        is_space = self._is_beside_call and not self._waiting[:end].strip(SPACE)
        if found is None and is_space:
            return False
        start = 0 if is_space else end
        self._writer.content(self._waiting[:start])
        self._is_beside_call = is_space
        if found is None:
            self._waiting = self._waiting[end:]
            return False
        end += len(found[1])
        self._raw, self._waiting = self._waiting[start:end], self._waiting[end:]
        self._begin(found[1])
        return True

    def _give_up(self) -> bool:
        """Emit a supposed call as content."""
        self._writer.content(self._raw)
        self._raw, self._is_beside_call, self._state = "", False, self._content
        return True

    def _end_call(self) -> bool:
        """Return to content after a call."""
        self._raw, self._is_beside_call, self._state = "", True, self._content
        return True

    def _open_object(self, *, is_tagged: bool = True) -> None:
        self._object, self._state = CallObject(self._writer, is_tagged=is_tagged), self._in_object

    def _in_object(self) -> bool:
        assert self._object is not None
        reading, at = self._object.read(self._waiting, 0)
        self._raw = "" if self._object.has_begun else self._raw + self._waiting[:at]
        self._waiting = self._waiting[at:]
        if reading is Reading.MALFORMED:
            return self._give_up()
        if reading is Reading.DONE:
            return self._behind_object()
        return False

    def _behind_object(self) -> bool:
        """Handle the text after a call's object."""
        return self._end_call()

    def _close(self, tag: str) -> bool:
        """Skip a closing tag, if it comes next, and return to content."""
        rest = self._waiting.lstrip(SPACE)
        if rest.startswith(tag):
            self._waiting = rest.removeprefix(tag)
        elif tag.startswith(rest):
            return False
        return self._end_call()

    def _skip_space(self) -> None:
        """Move whitespace into `_raw`."""
        rest = self._waiting.lstrip(SPACE)
        self._raw += self._waiting[: len(self._waiting) - len(rest)]
        self._waiting = rest


HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Parses calls in tags. The closing tag may be missing.

    Text between the tags that is not a call is content, including its tags (see `ToolParser`).
    """

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer, (HERMES_OPEN,))

    def _begin(self, tag: str) -> None:
        self._open_object()

    def _behind_object(self) -> bool:
        self._state = self._closing
        return True

    def _closing(self) -> bool:
        return self._close(HERMES_CLOSE)

    def _left(self) -> str:
        return "" if self._state == self._closing else super()._left()


LLAMA3_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """Parses calls without tags, and calls after the one tag.

    An object that is not a call is content (see `ToolParser`), decided at its first key that no call has. Code after
    the tag, which Llama writes for its built-in tools, is content too, including the tag.
    """

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer, (LLAMA3_TAG,))
        self._state = self._start

    def _begin(self, tag: str) -> None:
        self._state = self._behind_tag

    def _start(self) -> bool:
        """Read another call or content, at the start of the answer or after a call."""
        rest = self._waiting.lstrip(SPACE)
        if self._writer.num_calls:
            rest = rest.removeprefix(";").lstrip(SPACE)
        if not rest:
            return False
        if rest[0] != "{":
            self._state = self._content
            return True
        self._raw, self._waiting = self._waiting[: len(self._waiting) - len(rest)], rest
        self._open_object(is_tagged=False)
        return True

    def _behind_tag(self) -> bool:
        self._skip_space()
        if not self._waiting:
            return False
        if self._waiting[0] != "{":
            return self._give_up()
        self._open_object()
        return True

    def _behind_object(self) -> bool:
        self._end_call()
        self._state = self._start
        return True

    def _left(self) -> str:
        return "" if self._state == self._start and self._writer.num_calls else super()._left()


MISTRAL_TAG, MISTRAL_ID_TAG, MISTRAL_ARGUMENTS_TAG = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_MAX_HEAD_CHARS = 512
_NAME_START = re.compile(r"[A-Za-z0-9_]")
_NULL_CALL = re.compile(r"([A-Za-z0-9_.:-]{1,256})(?:\[CALL_ID\]([A-Za-z0-9_-]{1,128}))?\[ARGS\]\s*(?:null\s*)?")
"""A call that ends, or is followed by another, before its arguments."""
_CALL_HEAD = re.compile(r"([A-Za-z0-9_.:-]{1,256})(?:\[CALL_ID\]([A-Za-z0-9_-]{1,128}))?(?:\[ARGS\])?[ \t\r\n]*(?=\{)")


class JsonListParser(ToolParser):
    """Parses a list of objects after a tag, or one object. Anything else is content, including the tag.

    Args:
        tags: tags that precede a list.
        close_tag: a tag that may follow the list; empty for none.
    """

    def __init__(self, writer: PieceWriter, tags: tuple[str, ...], close_tag: str = "") -> None:
        super().__init__(writer, tags)
        self._is_list = False
        self._close_tag = close_tag

    def _begin(self, tag: str) -> None:
        self._is_list, self._state = False, self._behind_tag

    def _behind_tag(self) -> bool:
        self._skip_space()
        if not self._waiting:
            return False
        if self._waiting[0] == "[" and not self._is_list:
            self._is_list, self._raw, self._waiting = True, self._raw + "[", self._waiting[1:]
            return True
        if self._waiting[0] != "{":
            return self._begin_other()
        self._open_object()
        return True

    def _begin_other(self) -> bool:
        """Handle text after the tag that is neither a list nor an object."""
        return self._give_up()

    def _behind_object(self) -> bool:
        if not self._is_list:
            return self._end_list()
        self._state = self._in_list
        return True

    def _in_list(self) -> bool:
        """Read another object or the end, after an object of a list."""
        rest = self._waiting.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] == ",":
            rest = rest[1:].lstrip(SPACE)
            if not rest:
                return False
            if rest[0] == "{":
                self._raw, self._waiting = self._waiting[: len(self._waiting) - len(rest)], rest
                self._open_object()
                return True
        elif rest[0] == "]":
            self._waiting = rest[1:]
            return self._end_list()
        return self._end_call()

    def _end_list(self) -> bool:
        if not self._close_tag:
            return self._end_call()
        self._state = self._closing
        return True

    def _closing(self) -> bool:
        return self._close(self._close_tag)

    def _left(self) -> str:
        is_end = self._state == self._in_list and self._waiting.strip(SPACE) in ("", ",")
        return "" if is_end or self._state == self._closing else super()._left()


class MistralParser(JsonListParser):
    """Parses both forms. Anything else is content, including the tag (see `ToolParser`)."""

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer, (MISTRAL_TAG,))
        self._value = JsonValue()

    def _begin_other(self) -> bool:
        if not _NAME_START.match(self._waiting) or self._is_list:
            return self._give_up()
        self._state = self._in_head
        return True

    def _in_head(self) -> bool:
        """Read from a name up to its arguments."""
        next_call = self._waiting.find(MISTRAL_TAG, 0, _MISTRAL_MAX_HEAD_CHARS)
        if next_call > 0 and self._call_nothing(self._waiting[:next_call]):
            self._waiting = self._waiting[next_call:]
            return self._end_call()
        end = self._waiting.find("{", 0, _MISTRAL_MAX_HEAD_CHARS)
        if end < 0:
            return self._give_up() if len(self._waiting) >= _MISTRAL_MAX_HEAD_CHARS else False
        found = _CALL_HEAD.match(self._waiting)
        if found is None:
            return self._give_up()
        self._writer.call(found[1], found[2])
        self._raw, self._waiting = "", self._waiting[found.end() :]
        self._value, self._state = JsonValue(), self._in_arguments
        return True

    def _call_nothing(self, head: str) -> bool:
        """Write a call without arguments; return False if the text is not one."""
        found = _NULL_CALL.fullmatch(head)
        if found is not None:
            self._writer.call(found[1], found[2])
            self._writer.arguments("{}")
        return found is not None

    def _in_arguments(self) -> bool:
        end, is_whole = self._value.read(self._waiting, 0)
        self._writer.arguments(self._waiting[:end])
        self._waiting = self._waiting[end:]
        return is_whole and self._end_call()

    def _left(self) -> str:
        # without "null" the call may be cut before its arguments
        is_null = self._waiting.rstrip(SPACE).endswith("null")
        if self._state == self._in_head and is_null and self._call_nothing(self._waiting):
            return ""
        return super()._left()
