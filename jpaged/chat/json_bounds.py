"""Limits of JSON from callers: depth and size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from jpaged.errors import InvalidArgument

MAX_JSON_DEPTH = 64
_MAX_SHOWN = 80


def json_bytes(path: str, value: Any, *, max_bytes: int) -> int:
    """Return the approximate size of a value as JSON: texts, keys and numbers, and one byte for each comma or colon.

    Raises:
        InvalidArgument: it is too deep or too large, or has non-JSON values: unpaired surrogates, NaN, other objects.
    """
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
        value = json.loads(text, parse_constant=_refuse)
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
