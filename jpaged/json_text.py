"""JSON as in RFC 8259, which has neither NaN nor Infinity: a number that is not finite becomes null.

The log-probability of an impossible token is such a number, and so are sums with it. Python's `json` would write names
for them that other readers refuse.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

import orjson

from jpaged.errors import InvalidArgument

PIECE_BYTES = 256 << 10
"""Size of a piece of a large text; encoding one holds the GIL for 2 ms."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_RUN_BYTES = 32 << 10
_FIRST_RUN = 16
_NUM_SEEN = 4
_MANY = 1024
"""Number of values from which an array or object is written in several runs."""


class Items:
    """A JSON array whose items are produced while it is written, so that few of them are in memory.

    Args:
        make: returns the items; called each time the array is read.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterable[object]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[object]:
        return iter(self._make())

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Items) else other)

    __hash__ = None  # type: ignore[assignment]


def dumps(
    value: object,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `json.dumps`, with null for every float that is not finite."""

    def written(value: object) -> str:
        return json.dumps(
            value,
            indent=indent,
            ensure_ascii=ensure_ascii,
            separators=separators,
            sort_keys=sort_keys,
            allow_nan=False,
            default=_listed,
        )

    try:
        return written(value)
    except ValueError:  # some floats are not finite; a check in advance would double the cost
        return written(_finite(value))


def dumps_finite(value: object) -> str:
    """Return `json.dumps`; raise ValueError if a float is not finite."""
    return json.dumps(value, allow_nan=False)


def encode(value: object) -> bytes:
    """Return a value as compact JSON in UTF-8, ten times as fast as `dumps`; a lone surrogate becomes `?`."""
    try:
        return orjson.dumps(value, _listed)
    except TypeError:  # lone surrogates, integers over 64 bits, or keys that are not strings
        return dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


_ONLY_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def encode_plain(value: object) -> bytes | None:
    """Return a value as compact JSON in UTF-8, which every reader reads as it is; None if only `dumps` can write it."""
    try:
        return orjson.dumps(value, _listed, _ONLY_PLAIN)
    except TypeError:
        return None


def loads_plain(text: str | bytes, max_depth: int) -> dict[str, Any] | None:
    """Return the object that a text holds, three times as fast as `json.loads`.

    None if Python's reader may read it differently: it is no object, is nested deeper, or has unpaired surrogates,
    numbers that are not finite, or integers that may have more than 64 bits.
    """
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    return value if type(value) is dict and _is_plain(value, max_depth) else None


_MAX_FLOAT = 2.0**63
"""Size above which a float may have been an integer of more than 64 bits."""


def _is_plain(value: dict[str, Any], max_depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(max_depth):
        below: list[Any] = []
        for one in level:
            for item in one.values() if type(one) is dict else one:
                kind = type(item)
                if kind is dict or kind is list:
                    below.append(item)
                elif kind is float and not -_MAX_FLOAT < item < _MAX_FLOAT:
                    return False
        if not below:
            return True
        level = below
    return False


def pieces(value: object) -> Iterator[bytes]:
    """Yield the text of `encode` in pieces of about `PIECE_BYTES`; no step takes longer for a larger value."""
    piece = bytearray()
    for part in _parts(value):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def quoted(text: str) -> bytes:
    """Return a text as a JSON string in ASCII. Faster than `dumps`, which matters for every token written."""
    return encode_basestring_ascii(text).encode()


def encode_string(text: str) -> str:
    """Return a text as a JSON string, with characters beyond ASCII as they are; unpaired surrogates are escaped."""
    written = encode_basestring(text)
    return written if _SURROGATE.search(written) is None else encode_basestring_ascii(text)


def _parts(value: object) -> Iterator[bytes]:
    if not _is_large(value):
        yield encode(value)
    elif isinstance(value, dict) and len(value) <= _MANY:
        mark = b"{"
        for key, part in value.items():
            yield mark + encode({key: None})[1:-5]
            yield from _parts(part)
            mark = b","
        yield b"}"
    elif isinstance(value, dict):
        yield from _runs(value.items(), b"{}", dict)
    else:
        assert isinstance(value, list | tuple | Items)
        yield from _runs(value, b"[]", list)


def _runs(values: Iterable[object], brackets: bytes, made: Callable[[list[Any]], object]) -> Iterator[bytes]:
    """Write the values of an array or an object in runs of about `_RUN_BYTES`."""
    left, num, mark = iter(values), _FIRST_RUN, brackets[:1]
    while run := list(islice(left, num)):
        if any(map(_is_large, run)):
            for value in run:
                yield mark
                if isinstance(value, tuple) and made is dict:
                    yield encode({value[0]: None})[1:-5]
                    yield from _parts(value[1])
                else:
                    yield from _parts(value)
                mark = b","
            num = _FIRST_RUN
            continue
        text = encode(made(run))[1:-1]
        yield mark
        yield text
        mark = b","
        num = max(1, min(2 * num, num * _RUN_BYTES // (len(text) + 1)))
    yield brackets if mark == brackets[:1] else brackets[1:]


def _is_large(value: object) -> bool:
    """Return True if a value must be written in several steps; checks objects, and the first values of arrays."""
    if isinstance(value, list | tuple):
        return len(value) > _MANY or any(_is_large(part) for part in value[:_NUM_SEEN] if isinstance(part, dict))
    if isinstance(value, dict):
        return len(value) > _MANY or any(map(_is_large, value.values()))
    return isinstance(value, Items)


def _listed(value: object) -> list[object]:
    if isinstance(value, Items):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple | Items):
        return [_finite(part) for part in value]
    return value


MAX_DEPTH = 64
"""Maximum depth of a body."""
_REPLACED = (
    "messages.tool_calls.function.arguments",
    "messages.tool_calls.function.name",
    "input.arguments",
    "input.input",
    "input.name",
)
"""Texts that a model wrote in an earlier answer: unpaired surrogates in them are replaced, not rejected."""
_INPUTS = "messages.content.input."
"""Beginning of the paths of texts that a model wrote as the input of a tool, which are treated in the same way."""
_MAX_PATH = 200
"""Maximum characters of a value's path in errors; names in it are the caller's."""


class PlainBody(dict[str, Any]):
    """A JSON object without anything that `check_values` refuses, as its reader has found."""


def load_object(where: str, text: str | bytes) -> dict[str, Any]:
    """Read the JSON object that a text holds.

    Raises:
        InvalidArgument: it holds none; names `where`.
    """
    if (plain := loads_plain(text, MAX_DEPTH)) is not None:
        return PlainBody(plain)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise InvalidArgument(where, f"is nested deeper than the limit of {MAX_DEPTH}") from error
    except ValueError as error:  # JSONDecodeError, bytes that are no UTF-8, and integers of thousands of digits
        raise InvalidArgument(where, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(where, "is not a JSON object")
    return value


def check_values(where: str, value: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what JSON can write and a message cannot carry: deep nesting, huge numbers, halves of characters.

    Args:
        where: what errors call the whole.
        prefix: prefix of field names in errors.
    """
    if isinstance(value, PlainBody):
        return
    for name in value:
        _check_text(where, name)
    waiting: list[tuple[str, Any, int]] = [(f"{prefix}{name}"[:_MAX_PATH], item, 1) for name, item in value.items()]
    while waiting:
        path, item, depth = waiting.pop()
        if isinstance(item, dict | list):
            if depth == MAX_DEPTH:
                raise InvalidArgument(where, f"is nested deeper than the limit of {MAX_DEPTH}")
            inside = item.items() if isinstance(item, dict) else ((path, one) for one in item)
            for name, one in inside:
                if isinstance(item, dict):
                    _check_text(path, name)
                inner = f"{path}.{name}"[:_MAX_PATH] if isinstance(item, dict) else path
                waiting.append((inner, one, depth + 1))
        elif isinstance(item, str):
            if not path.endswith(_REPLACED) and not path.startswith(_INPUTS):
                _check_text(path, item)
        elif isinstance(item, int | float) and not abs(item) < 2**64:
            raise InvalidArgument(path, f"{str(item)[:40]} is not a finite number of 64 bits at most")


def _check_text(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(path, f"has {text[error.start]!a}, half of a surrogate pair, at {error.start}") from error
