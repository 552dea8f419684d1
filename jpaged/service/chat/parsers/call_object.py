"""A call as a JSON object, `{"name": ..., "arguments": {...}}`, read incrementally."""

from __future__ import annotations

import enum
import json
import re

from jpaged.service.chat.parsers.writer import PieceWriter

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


class _Place(enum.Enum):
    """Position in the object: what comes next, or (the last five) which value is being read."""

    OPENING = enum.auto()
    FIRST_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()
    NEXT_KEY = enum.auto()
    IN_KEY = enum.auto()
    IN_NAME = enum.auto()
    IN_ARGUMENTS = enum.auto()
    IN_NULL = enum.auto()
    PASSED_OVER = enum.auto()


_STEPS = {
    (_Place.OPENING, "{"): _Place.FIRST_KEY,
    (_Place.COLON, ":"): _Place.VALUE,
    (_Place.COMMA, ","): _Place.NEXT_KEY,
}
_VALUES = (_Place.IN_KEY, _Place.IN_NAME, _Place.IN_ARGUMENTS, _Place.IN_NULL, _Place.PASSED_OVER)
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
    """One call. Writing starts once its name is known and its arguments, an object or null, begin.

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
        self._place = _Place.OPENING
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
                elif text[at] == "}" and self._place in (_Place.COMMA, _Place.NEXT_KEY) and self._may_end():
                    return Reading.DONE, at + 1
                elif self._place in (_Place.FIRST_KEY, _Place.NEXT_KEY, _Place.VALUE):
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
        is_call = self._name is not None and (self._is_tagged or self._name in self._writer.tool_names)
        if is_call and not self.has_begun:
            self._early = [_NO_ARGUMENTS]
            self._begin()
        return self.has_begun

    def _open_value(self, text: str, at: int) -> None:
        """Choose the state for the value or key that begins here."""
        if self._place is not _Place.VALUE:
            place, opener = _Place.IN_KEY, '"'
        elif self.has_begun or self._string in _SAYS_NOTHING:
            place, opener = _Place.PASSED_OVER, text[at]
        elif self._string == "name" and self._name is None:
            place, opener = _Place.IN_NAME, '"'
        elif self._string in _ARGUMENTS and not self._early:
            is_null = text[at] == "n"
            place, opener = (_Place.IN_NULL, "n") if is_null else (_Place.IN_ARGUMENTS, "{")
        else:
            raise _MalformedError(at)
        if text[at] != opener or opener in ",:]}":
            raise _MalformedError(at)
        self._place, self._value, self._string = place, JsonValue(), ""
        if place is _Place.IN_ARGUMENTS:
            self._begin()

    def _begin(self) -> None:
        """Write the call and the arguments read so far, once its name is known."""
        if self._name is not None:
            self.has_begun = True
            self._writer.call(self._name)
            self._writer.arguments("".join(self._early))

    def _read_value(self, text: str, at: int) -> int:
        if self._place in (_Place.IN_KEY, _Place.IN_NAME, _Place.IN_NULL):
            text = text[: at + _MAX_NAME_CHARS - len(self._string)]
            if at == len(text):
                raise _MalformedError(at)
        end, is_whole = self._value.read(text, at)
        if self._place is _Place.IN_ARGUMENTS:
            if self.has_begun:
                self._writer.arguments(text[at:end])
            else:
                self._early.append(text[at:end])
        elif self._place is not _Place.PASSED_OVER:
            self._string += text[at:end]
        if is_whole:
            self._end_value(end)
        return end

    def _end_value(self, at: int) -> None:
        place, self._place = self._place, _Place.COMMA
        if place is _Place.IN_KEY:
            self._place, self._string = _Place.COLON, _unquoted(self._string, at)
            if not self.has_begun and self._string not in ("name", *_ARGUMENTS, *_SAYS_NOTHING):
                raise _MalformedError(at)
        elif place is _Place.IN_NULL:
            if self._string != "null":
                raise _MalformedError(at)
            self._early = [_NO_ARGUMENTS]
            self._begin()
        elif place is _Place.IN_NAME:
            self._name = _unquoted(self._string, at)
            if not self._name:
                raise _MalformedError(at)
            if self._early:
                self._begin()


def _unquoted(string: str, at: int) -> str:
    try:
        return str(json.loads(string))
    except ValueError:
        raise _MalformedError(at) from None
