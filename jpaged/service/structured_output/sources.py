"""Converts a constraint to the grammar library's source, and the library's errors to errors about the constraint.

JSON schemas are converted for the library, and errors in them are located.

Structural tags, free text in which some parts follow a grammar, are written as Lark.

Supports both forms that vLLM takes: `structures` with `triggers`, and xgrammar's `format`
(https://xgrammar.mlc.ai/docs/xgrammar_features/structural_tag.html), as far as a grammar without priorities can:

    const_string json_schema regex grammar any_text sequence or optional plus star repeat token
    tag triggered_tags tags_with_separator

Formats without an end (any_text and triggered_tags) must stand last, or in a tag, whose first occurring end ends them.
Other formats are refused by name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llguidance import LLMatcher

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.service.structured_output.ebnf import EbnfError, is_ebnf, to_lark
from jpaged.service.structured_output.sandbox import GrammarLimits
from jpaged.structured import JSON_WHITESPACE, ConstraintKind, StructuredOutputs

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_SINGLE = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "additionalItems"),
    *("unevaluatedItems", "not", "if", "then", "else", "contentSchema", "items"),
)
_LISTED = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_MAX_TRIALS = 64
_OPTIONS = "x-guidance"

Schema = dict[str, Any]


def read_json(field: str, text: str, max_depth: int) -> Any:
    """Parse a JSON text.

    Raises:
        InvalidArgument: it is not JSON, or nested deeper than `max_depth`: names line and column.
    """
    position = _too_deep(text, max_depth)
    if position is not None:
        raise InvalidArgument(field, f"at {_line_column(text, position)}: is nested more than {max_depth} levels deep")
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidArgument(field, f"at {where}: is not JSON: {error.msg}") from error
    except ValueError as error:
        raise InvalidArgument(field, f"is not JSON: {error}") from error


def build_schema(field: str, value: Any, outputs: StructuredOutputs, whitespace: str = JSON_WHITESPACE) -> Schema:
    """Return the schema in the library's form, with the options of JSON formatting.

    Args:
        whitespace: a regular expression of the whitespace between parts of JSON, unless the request sets one.

    Raises:
        InvalidArgument: it is neither an object nor true.
    """
    if not isinstance(value, dict | bool):
        raise InvalidArgument(field, f"a schema must be an object, true or false, not {json_text.dumps(value)[:80]}")
    schema: Schema = {"not": {}} if value is False else {} if value is True else copy.deepcopy(value)
    if value is False:
        raise InvalidArgument(field, "is false, which no value satisfies")
    if outputs.disable_additional_properties:
        _close_objects(schema)
    options = dict(schema[_OPTIONS]) if isinstance(schema.get(_OPTIONS), dict) else {}
    if outputs.whitespace_pattern is not None:
        options["whitespace_pattern"] = outputs.whitespace_pattern
    elif outputs.disable_any_whitespace:
        options["whitespace_flexible"] = False
    elif not options.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        options["whitespace_pattern"] = whitespace
    schema[_OPTIONS] = options
    return schema


def find_failing_part(schema: Schema, error: str, error_of: Callable[[Schema], str | None]) -> str:
    """Return the JSON pointer of the smallest part of a schema that fails with the same error; "" is the whole.

    Args:
        build_error: returns the compiler's error for a schema.
    """
    root = {key: schema[key] for key in (*_DEFINITIONS, _OPTIONS) if key in schema}
    pointer, part, left = "", schema, _MAX_TRIALS
    while True:
        for step, child in _children(part):
            if left == 0:
                return pointer
            left -= 1
            if error_of({**root, **child}) == error:
                pointer, part = pointer + step, child
                break
        else:
            return pointer


def _children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the non-empty subschemas of a schema, each with its step of a JSON pointer."""
    for key in schema:
        value = schema[key]
        if key in _NAMED and isinstance(value, dict):
            found = [(f"/{key}/{_escaped(name)}", child) for name, child in value.items()]
        elif key in _LISTED and isinstance(value, list):
            found = [(f"/{key}/{index}", child) for index, child in enumerate(value)]
        elif key in _SINGLE:
            found = [(f"/{key}", value)]
        else:
            continue
        yield from ((step, child) for step, child in found if isinstance(child, dict) and child)


def _close_objects(schema: Schema) -> None:
    """Set `additionalProperties: false` on every object with named properties that does not set it."""
    for _, child in _children(schema):
        _close_objects(child)
    names = [key for key in ("properties", "patternProperties") if isinstance(schema.get(key), dict)]
    if names:
        schema.setdefault("additionalProperties", False)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _too_deep(text: str, max_depth: int) -> int | None:
    """Return the position where brackets outside strings exceed `max_depth`; found before a reader recurses."""
    depth, is_in_string, position = 0, False, 0
    while position < len(text):
        letter = text[position]
        if is_in_string:
            position += letter == "\\"
            is_in_string = letter != '"'
        elif letter == '"':
            is_in_string = True
        elif letter in "[{":
            depth += 1
            if depth > max_depth:
                return position
        elif letter in "]}":
            depth -= 1
        position += 1
    return None


def _line_column(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {position - text.rfind(chr(10), 0, position)}"


_TEXT = "TEXT: /(?s:.*)/"
_ENDLESS = ("any_text", "triggered_tags")
_MARKS = {"optional": "?", "plus": "+", "star": "*"}
_EMPTY = '""'
_IN_LARK = {"/": r"\/", "\n": r"\n", r"\d": "[0-9]", r"\D": "[^0-9]"}
"""Parts of a regular expression in Lark; digits are ASCII, as in ECMAScript and JSON schemas."""


@dataclass(slots=True)
class StructuralTagWriter:
    """Writes one structural tag.

    Args:
        name: the field, for errors.
        build_schema: converts a schema for the library, or raises an error that names the place.
    """

    name: str
    schema_of: Callable[[str, Any], Mapping[str, Any]]
    _lines: list[str] = field(default_factory=list)
    _is_older: bool = False

    def lark(self, value: Any) -> str:
        """Return the whole grammar.

        Raises:
            InvalidArgument: names the place as a JSON pointer.
        """
        self._is_older = isinstance(value, dict) and "structures" in value
        if self._is_older:
            body = self._write(_from_structures(self, value), "", ())
        else:
            wanted = _object(self, value, "", {"format"}, {"type"})
            body = self._write(wanted["format"], "/format", ())
        return "\n".join([f"start: {body}", _TEXT, *self._lines]) + "\n"

    def _write(self, value: Any, at: str, ends: Sequence[str]) -> str:
        """Return an expression for a format, including what ends it.

        Args:
            ends: alternatives for the text that follows; empty if the format has an end by itself.
        """
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise self.wrong(at, "a format must be an object with a type")
        kind = value["type"]
        if kind in (*_ENDLESS, "sequence"):
            return self._write_open(value, at, ends)
        if kind == "regex" and ends and all(ends):
            # One lexeme includes the end: without it, a lexeme would be as long as possible, and swallow the end.
            return self._rule(f"/{self._pattern(value, at)}/ {_alternatives(ends)}", options="[lazy]")
        writers: dict[str, Callable[[Any, str], str]] = {
            "const_string": self._write_const_string,
            "json_schema": self._write_json_schema,
            "regex": self._write_regex,
            "grammar": self._write_grammar,
            "token": self._write_token,
            "or": self._write_or,
            "tag": lambda value, at: self._tag(value, at, skip=0),
            "tags_with_separator": self._write_tags_with_separator,
            **dict.fromkeys(("repeat", *_MARKS), self._write_repeated),
        }
        if kind not in writers:
            raise self.wrong(at, f"a format of type {kind!r} is not supported")
        return _sequence([writers[kind](value, at), _alternatives(ends)])

    def _write_open(self, value: Any, at: str, ends: Sequence[str]) -> str:
        """Write a format that continues until one of `ends`, or whose last part does."""
        if value["type"] == "triggered_tags":
            return self._write_triggered_tags(value, at, ends)
        if value["type"] == "sequence":
            return self._write_sequence(value, at, ends)
        _object(self, value, at, {"type"}, set())
        return self._text_until(ends) if ends else "TEXT"

    def _write_const_string(self, value: Any, at: str) -> str:
        return _literal(_text(self, _object(self, value, at, {"type", "value"}, set())["value"], f"{at}/value"))

    def _write_json_schema(self, value: Any, at: str) -> str:
        wanted = _object(self, value, at, {"type", "json_schema"}, {"style"})
        if wanted.get("style", "json") != "json":
            raise self.wrong(f"{at}/style", f"{wanted['style']!r} is not supported: must be 'json'")
        schema = self.schema_of(self._place(f"{at}/json_schema"), wanted["json_schema"])
        return self._rule(f"%json {json_text.dumps(schema)}")

    def _write_regex(self, value: Any, at: str) -> str:
        return self._rule(f"/{self._pattern(value, at)}/")

    def _pattern(self, value: Any, at: str) -> str:
        pattern = _text(self, _object(self, value, at, {"type", "pattern"}, set())["pattern"], f"{at}/pattern")
        return slashes_escaped(pattern)

    def _write_grammar(self, value: Any, at: str) -> str:
        text = _text(self, _object(self, value, at, {"type", "grammar"}, set())["grammar"], f"{at}/grammar")
        prefix = f"g{len(self._lines)}_"
        try:
            self._lines.append(to_lark(text, prefix=prefix))
        except EbnfError as error:
            raise self.wrong(f"{at}/grammar", str(error)) from error
        return f"{prefix}start"

    def _write_token(self, value: Any, at: str) -> str:
        token = _object(self, value, at, {"type", "token"}, set())["token"]
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return f"<[{token}]>"
        if isinstance(token, str) and re.fullmatch(r"<[^<>\s]+>", token):
            return token
        raise self.wrong(f"{at}/token", f"{token!r} must be an id, or the name of a special token in <>")

    def _write_sequence(self, value: Any, at: str, ends: Sequence[str]) -> str:
        elements = _list(self, _object(self, value, at, {"type", "elements"}, set())["elements"], f"{at}/elements")
        parts = []
        for index, one in enumerate(elements):
            place, is_last = f"{at}/elements/{index}", index == len(elements) - 1
            if not is_last and _is_endless(one):
                raise self.wrong(place, f"{one['type']} has no end, and must be the last of a sequence or in a tag")
            parts.append(self._write(one, place, ends if is_last else ()))
        return _sequence(parts)

    def _write_or(self, value: Any, at: str) -> str:
        elements = _list(self, _object(self, value, at, {"type", "elements"}, set())["elements"], f"{at}/elements")
        parts = [self._ended(one, f"{at}/elements/{index}") for index, one in enumerate(elements)]
        return f"({' | '.join(parts)})"

    def _write_repeated(self, value: Any, at: str) -> str:
        mark = _MARKS.get(value["type"])
        wanted = _object(self, value, at, {"type", "content"} | ({"min", "max"} if mark is None else set()), set())
        content = self._ended(wanted["content"], f"{at}/content")
        if mark is not None:
            return f"({content}){mark}"
        low, high = wanted["min"], wanted["max"]
        is_ok = all(isinstance(one, int) and not isinstance(one, bool) for one in (low, high))
        if not is_ok or low < 0 or (high != -1 and high < low):
            raise self.wrong(at, f"min {low!r} and max {high!r} must be 0 <= min <= max, or max -1 for no bound")
        return f"({content}){{{low},{'' if high == -1 else high}}}"

    def _write_triggered_tags(self, value: Any, at: str, ends: Sequence[str]) -> str:
        wanted = _build_tags(self, value, at, {"triggers"})
        triggers = [_text(self, one, f"{at}/triggers") for one in _list(self, wanted["triggers"], f"{at}/triggers")]
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for index, tag in enumerate(wanted["tags"]):
            place = f"{at}/tags/{index}"
            begin = tag.get("begin") if isinstance(tag, dict) else None
            found = [one for one in triggers if isinstance(begin, str) and begin.startswith(one)]
            if len(found) != 1:
                raise self.wrong(f"{place}/begin", f"{begin!r} must begin with exactly one of the triggers")
            by_trigger[found[0]].append(self._rule(self._tag(tag, place, skip=len(found[0]))))
            whole.append(_sequence([_literal(found[0]), by_trigger[found[0]][-1]]))
        called = [
            _sequence([self._text_until([trigger]), f"({' | '.join(bodies)})"])
            for trigger, bodies in by_trigger.items()
            if bodies
        ]
        first, again = f"({' | '.join(whole)})", f"({' | '.join(called)})"
        after = self._text_until(ends) if ends else "TEXT"
        if wanted.get("stop_after_first"):
            last = _alternatives(ends)
            return _sequence([first, last]) if wanted.get("at_least_one") else f"({_sequence([again, last])} | {after})"
        return _sequence([first if wanted.get("at_least_one") else "", f"{again}*", after])

    def _write_tags_with_separator(self, value: Any, at: str) -> str:
        wanted = _build_tags(self, value, at, {"separator"})
        separator = _text(self, wanted["separator"], f"{at}/separator", may_be_empty=True)
        each = [self._tag(tag, f"{at}/tags/{index}", skip=0) for index, tag in enumerate(wanted["tags"])]
        tags = self._rule(" | ".join(each))  # a rule, because its name is written twice
        more = "" if wanted.get("stop_after_first") else f"({_sequence([_literal(separator), tags])})*"
        written = _sequence([tags, more])
        return f"({written})" if wanted.get("at_least_one") else f"({written})?"

    def _tag(self, value: Any, at: str, *, skip: int) -> str:
        """Write a tag, skipping the first `skip` characters of the begin text."""
        wanted = _object(self, value, at, {"begin", "content", "end"}, {"type"})
        begin, end = wanted["begin"], wanted["end"]
        first = self._write_token(begin, f"{at}/begin") if isinstance(begin, dict) else None
        if first is None:
            first = _literal(_text(self, begin, f"{at}/begin", may_be_empty=True)[skip:])
        if isinstance(end, dict):
            return _sequence(
                [first, self._ended(wanted["content"], f"{at}/content"), self._write(end, f"{at}/end", ())]
            )
        ends = [_text(self, one, f"{at}/end", may_be_empty=True) for one in (end if isinstance(end, list) else [end])]
        if _is_endless(wanted["content"]) and not all(ends):
            raise self.wrong(f"{at}/end", "must not be empty if the content has no end")
        return _sequence([first, self._write(wanted["content"], f"{at}/content", ends)])

    def _ended(self, value: Any, at: str) -> str:
        if _is_endless(value):
            raise self.wrong(at, "has no end: must be the last of a sequence, or in a tag that ends with text")
        return self._write(value, at, ())

    def _text_until(self, ends: Sequence[str]) -> str:
        return self._rule(f"TEXT {_alternatives(ends)}", options="[lazy]")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"p{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def wrong(self, at: str, problem: str) -> InvalidArgument:
        """Return the error that names a place."""
        return InvalidArgument(self.name, f"at {self._place(at) or '/'}: {problem}")

    def _place(self, at: str) -> str:
        """Return a place in the caller's terms; the older form has other names."""
        if not self._is_older:
            return at
        return re.sub(r"^/tags/(\d+)", r"/structures/\1", at).replace("/content/json_schema", "/schema")


def _from_structures(writer: StructuralTagWriter, value: Any) -> dict[str, Any]:
    """Convert the older form to the newer one."""
    wanted = _object(writer, value, "", {"structures", "triggers"}, set())
    tags = []
    for index, one in enumerate(_list(writer, wanted["structures"], "/structures")):
        tag = _object(writer, one, f"/structures/{index}", {"begin", "schema", "end"}, set())
        content = {"type": "json_schema", "json_schema": tag["schema"]}
        tags.append({"type": "tag", "begin": tag["begin"], "content": content, "end": tag["end"]})
    return {"type": "triggered_tags", "triggers": wanted["triggers"], "tags": tags}


def _build_tags(writer: StructuralTagWriter, value: Any, at: str, needed: set[str]) -> dict[str, Any]:
    wanted = _object(writer, value, at, {"type", "tags", *needed}, {"at_least_one", "stop_after_first", "excludes"})
    if wanted.get("excludes"):
        raise writer.wrong(f"{at}/excludes", "is not supported")
    for name in ("at_least_one", "stop_after_first"):
        if not isinstance(wanted.get(name, False), bool):
            raise writer.wrong(f"{at}/{name}", f"{wanted[name]!r} must be true or false")
    _list(writer, wanted["tags"], f"{at}/tags")
    return wanted


def slashes_escaped(pattern: str) -> str:
    """Return a regular expression escaped for use between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), pattern, flags=re.DOTALL)


def _is_endless(value: Any) -> bool:
    """Return True if a format's last part has no end, so that it continues until other text comes."""
    while isinstance(value, dict) and value.get("type") == "sequence" and isinstance(value.get("elements"), list):
        value = value["elements"][-1] if value["elements"] else None
    return isinstance(value, dict) and value.get("type") in _ENDLESS


def _object(writer: StructuralTagWriter, value: Any, at: str, needed: set[str], others: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise writer.wrong(at, "must be an object")
    for key in sorted(needed - value.keys()):
        raise writer.wrong(at, f"has no {key}")
    for key in value:
        if key not in needed and key not in others and value[key] not in (None, False, [], ""):
            raise writer.wrong(f"{at}/{key}", "is not supported")
    return value


def _list(writer: StructuralTagWriter, value: Any, at: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise writer.wrong(at, "must be a non-empty list")
    return value


def _text(writer: StructuralTagWriter, value: Any, at: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise writer.wrong(at, f"{value!r} must be a {'' if may_be_empty else 'non-empty '}string")
    return value


def _literal(text: str) -> str:
    return json_text.dumps(text, ensure_ascii=False) if text else ""


def _alternatives(texts: Sequence[str]) -> str:
    if len(texts) < 2:
        return "".join(map(_literal, texts))
    return f"({' | '.join(_literal(text) or _EMPTY for text in texts)})"


def _sequence(parts: Sequence[str]) -> str:
    return " ".join(part for part in parts if part) or _EMPTY


_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_REGEX_PLACE = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^+\nerror: ([^\n]*)")
_UNKNOWN_KEYS = re.compile(r"^Unimplemented keys: \[(.*)\]$")
_MAX_SHOWN = 300
"""Maximum characters of an error: some of the library's errors list every valid alternative."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """Source that the library compiles.

    Attributes:
        grammar: Lark, or the library's own form.
        schemas: the schemas in it, each with its JSON pointer in the caller's constraint.
    """

    grammar: str
    schemas: tuple[tuple[str, Schema], ...] = ()


def build_source(outputs: StructuredOutputs, limits: GrammarLimits, whitespace: str = JSON_WHITESPACE) -> GrammarSource:
    """Convert a constraint to the library's source.

    Args:
        whitespace: as `build_schema` takes it.

    Raises:
        InvalidArgument: it is invalid: names the field, and the place in it.
    """
    field = outputs.field
    match outputs.kind:
        case ConstraintKind.JSON:
            schema = build_schema(field, read_json(field, str(outputs.json), limits.max_depth), outputs, whitespace)
            return GrammarSource(_of_schema(schema), (("", schema),))
        case ConstraintKind.JSON_OBJECT:
            return GrammarSource(_of_schema(build_schema(field, {"type": "object"}, outputs, whitespace)))
        case ConstraintKind.REGEX:
            return GrammarSource(f"start: /{slashes_escaped(_without_anchors(str(outputs.regex)))}/\n")
        case ConstraintKind.CHOICE:
            texts = " | ".join(json_text.dumps(text, ensure_ascii=False) for text in outputs.choice or ())
            return GrammarSource(f"start: CHOICE\nCHOICE: {texts}\n")
        case ConstraintKind.GRAMMAR:
            return GrammarSource(_lark(field, str(outputs.grammar)))
        case ConstraintKind.STRUCTURAL_TAG:
            value = read_json(field, str(outputs.structural_tag), limits.max_depth)
            found: list[tuple[str, Schema]] = []
            part_of_tag = partial(_part_of_tag, outputs, whitespace, found)
            return GrammarSource(StructuralTagWriter(field, part_of_tag).lark(value), tuple(found))


def refusal(
    outputs: StructuredOutputs, source: GrammarSource, error: str, try_: Callable[[str], str | None]
) -> InvalidArgument:
    """Return the error that explains what is wrong with a constraint, and where.

    Args:
        error: the library's error for its grammar.
        try_: returns the library's error for another grammar.
    """
    place, problem = "", error
    for pointer, schema in source.schemas:
        found = error if len(source.schemas) == 1 and not pointer else try_(_of_schema(schema))
        if found is not None:
            problem = found
            place = pointer + find_failing_part(schema, found, lambda schema: try_(_of_schema(schema))) or "/"
            break
    if regex := _REGEX_PLACE.search(problem):
        problem = f"the regular expression {regex[1]!r}: {regex[3]}"
        if outputs.kind is ConstraintKind.REGEX:
            place, problem = f"character {_position(str(outputs.regex), len(regex[2]))}", regex[3]
    elif not place and (lark := _LARK_PLACE.match(problem)):
        problem = lark[3].partition("\n")[0]
        is_own = outputs.kind is ConstraintKind.GRAMMAR and not is_ebnf(str(outputs.grammar))
        place = f"line {lark[1]}, column {lark[2]}" if is_own else ""
    if keys := _UNKNOWN_KEYS.match(problem):
        problem = f"not supported: {keys[1]}"
    problem = problem.partition("; following special tokens")[0][:_MAX_SHOWN]
    return InvalidArgument(outputs.field, f"at {place}: {problem}" if place else problem)


def _part_of_tag(
    outputs: StructuredOutputs, whitespace: str, found: list[tuple[str, Schema]], at: str, value: Any
) -> Schema:
    """Convert a schema of a structural tag, and record its place in `found`."""
    schema = build_schema(f"{outputs.field} at {at}", value, outputs, whitespace)
    found.append((at, schema))
    return schema


def _of_schema(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(json_text.dumps(schema))


def _lark(field: str, text: str) -> str:
    if not is_ebnf(text):
        return text
    try:
        return to_lark(text)
    except EbnfError as error:
        raise InvalidArgument(field, f"at {error}") from error


def _without_anchors(pattern: str) -> str:
    """Remove anchors at the ends: a pattern always matches the whole text, and the library has no anchors."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern = pattern[:-1]
    return pattern


def _position(pattern: str, column: int) -> int:
    """Return the caller's position in a pattern, from 1, for a column of the converted pattern."""
    skipped = int(pattern.startswith("^"))
    left, position = column, skipped
    for found in re.finditer(r"\\.|.", pattern[skipped:], re.DOTALL):
        width = len(slashes_escaped(found[0]))
        if left < width:
            return position + min(left, len(found[0]) - 1) + 1
        left -= width
        position += len(found[0])
    return position + 1


def source_key(outputs: StructuredOutputs) -> tuple[Any, ...]:
    """Return the key that identifies a constraint in the cache, without `always_complete`."""
    options = (outputs.whitespace_pattern, outputs.disable_any_whitespace, outputs.disable_additional_properties)
    return (outputs.kind.value, getattr(outputs, outputs.kind.value), *options)
