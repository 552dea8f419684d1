"""JSON schemas: conversion for the library, and location of errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.structured import JSON_WHITESPACE, StructuredOutputs

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


def schema_of(field: str, value: Any, outputs: StructuredOutputs, whitespace: str = JSON_WHITESPACE) -> Schema:
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


def place_of(schema: Schema, error: str, error_of: Callable[[Schema], str | None]) -> str:
    """Return the JSON pointer of the smallest part of a schema that fails with the same error; "" is the whole.

    Args:
        error_of: returns the compiler's error for a schema.
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
