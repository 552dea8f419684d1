"""Converts a constraint to the grammar library's source, and the library's errors to errors about the constraint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llguidance import LLMatcher

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.service.grammars.ebnf import EbnfError, is_ebnf, to_lark
from jpaged.service.grammars.limits import GrammarLimits
from jpaged.service.grammars.schemas import Schema, place_of, read_json, schema_of
from jpaged.service.grammars.structural_tags import StructuralTagWriter, slashes_escaped
from jpaged.structured import JSON_WHITESPACE, Kind, StructuredOutputs

_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_REGEX_PLACE = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^+\nerror: ([^\n]*)")
_UNKNOWN_KEYS = re.compile(r"^Unimplemented keys: \[(.*)\]$")
_MAX_SHOWN = 300
"""Maximum characters of an error: some of the library's errors list every valid alternative."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source that the library compiles.

    Attributes:
        grammar: Lark, or the library's own form.
        schemas: the schemas in it, each with its JSON pointer in the caller's constraint.
    """

    grammar: str
    schemas: tuple[tuple[str, Schema], ...] = ()


def source_of(outputs: StructuredOutputs, limits: GrammarLimits, whitespace: str = JSON_WHITESPACE) -> Source:
    """Convert a constraint to the library's source.

    Args:
        whitespace: as `schema_of` takes it.

    Raises:
        InvalidArgument: it is invalid: names the field, and the place in it.
    """
    field = outputs.field
    match outputs.kind:
        case Kind.JSON:
            schema = schema_of(field, read_json(field, str(outputs.json), limits.max_depth), outputs, whitespace)
            return Source(_of_schema(schema), (("", schema),))
        case Kind.JSON_OBJECT:
            return Source(_of_schema(schema_of(field, {"type": "object"}, outputs, whitespace)))
        case Kind.REGEX:
            return Source(f"start: /{slashes_escaped(_without_anchors(str(outputs.regex)))}/\n")
        case Kind.CHOICE:
            texts = " | ".join(json_text.dumps(text, ensure_ascii=False) for text in outputs.choice or ())
            return Source(f"start: CHOICE\nCHOICE: {texts}\n")
        case Kind.GRAMMAR:
            return Source(_lark(field, str(outputs.grammar)))
        case Kind.STRUCTURAL_TAG:
            value = read_json(field, str(outputs.structural_tag), limits.max_depth)
            found: list[tuple[str, Schema]] = []
            part_of_tag = partial(_part_of_tag, outputs, whitespace, found)
            return Source(StructuralTagWriter(field, part_of_tag).lark(value), tuple(found))


def refusal(
    outputs: StructuredOutputs, source: Source, error: str, try_: Callable[[str], str | None]
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
            place = pointer + place_of(schema, found, lambda schema: try_(_of_schema(schema))) or "/"
            break
    if regex := _REGEX_PLACE.search(problem):
        problem = f"the regular expression {regex[1]!r}: {regex[3]}"
        if outputs.kind is Kind.REGEX:
            place, problem = f"character {_position(str(outputs.regex), len(regex[2]))}", regex[3]
    elif not place and (lark := _LARK_PLACE.match(problem)):
        problem = lark[3].partition("\n")[0]
        is_own = outputs.kind is Kind.GRAMMAR and not is_ebnf(str(outputs.grammar))
        place = f"line {lark[1]}, column {lark[2]}" if is_own else ""
    if keys := _UNKNOWN_KEYS.match(problem):
        problem = f"not supported: {keys[1]}"
    problem = problem.partition("; following special tokens")[0][:_MAX_SHOWN]
    return InvalidArgument(outputs.field, f"at {place}: {problem}" if place else problem)


def _part_of_tag(
    outputs: StructuredOutputs, whitespace: str, found: list[tuple[str, Schema]], at: str, value: Any
) -> Schema:
    """Convert a schema of a structural tag, and record its place in `found`."""
    schema = schema_of(f"{outputs.field} at {at}", value, outputs, whitespace)
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
