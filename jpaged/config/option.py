"""One option: default, help, limits, and validation."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, NoReturn

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.types import require_whole_characters

JsonText = str
"""A JSON object as text; in Python, the object itself may be given."""
_USER = re.compile(r"(?<=://)[^/?#\s\"]*@")
_SECRET_NAME = r"(?:password|passwd|secret|token|signature|credentials?|(?:api|access|account|secret|private)[_-]?key)"
_QUERY = re.compile(rf"([?&][^=&#\s]*{_SECRET_NAME}=)[^&#\s,\"]+", re.IGNORECASE)
_MEMBER = re.compile(rf'("[^"\\]*{_SECRET_NAME}"\s*:\s*)"(?:[^"\\]|\\.)+"', re.IGNORECASE)
"""User of a URL, and secrets as parameters of a query and as members of a JSON object."""
PathKind = Literal["", "file", "folder", "new file", "new folder"]
"""Kind of a path, for shell completion; new files and folders are created."""


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    unit: str = "",
    by_platform: Mapping[str, float] | None = None,
    path: PathKind = "",
) -> Any:
    """Declare a field of a section: its default, its help line and its limits (both inclusive).

    A default of None means that the value is resolved later, or that the feature is off. `by_platform` has the resolved
    values on CPUs, GPUs and TPUs (`jpaged.device.step_sizes` defines the rule).
    """
    limits = {"low": low, "high": high, "choices": choices, "unit": unit, "by_platform": by_platform or {}}
    return field(default=default, metadata={"help": help, "path": path, "attributes": (), **limits})


def with_attributes(spec: dataclasses.Field[Any], names: tuple[str, ...]) -> Any:
    """Return the option of a JSON object that may also be given, in Python, as an object with attributes.

    Args:
        names: keys, which are the names of the attributes. An object must have the first one.
    """
    return field(default=spec.default, metadata={**spec.metadata, "attributes": names})


def declare_section(kind: type, help: str) -> Any:
    """Declare a section of the configuration, with a sentence about its options."""
    return field(default_factory=kind, metadata={"help": help})


def option_type(spec: dataclasses.Field[Any]) -> type:
    """Return the type of an option: `int | None` is an optional int, a tuple holds words."""
    if spec.metadata["choices"]:
        return str
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "tuple[str, ...]": tuple, "JsonText": str}
    return kinds[str(spec.type).removesuffix(" | None")]


def is_json(spec: dataclasses.Field[Any]) -> bool:
    """Return True if an option is a JSON object."""
    return str(spec.type).startswith("JsonText")


def checked(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Return the validated value of an option.

    Raises:
        InvalidArgument: it has the wrong type or is out of range.
    """
    meta, kind = spec.metadata, option_type(spec)
    if value is None and spec.default is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if meta["attributes"] and getattr(value, meta["attributes"][0], None) is not None:
        values = {name: getattr(value, name, None) for name in meta["attributes"]}
        value = {name: one for name, one in values.items() if one is not None}
    if is_json(spec) and isinstance(value, Mapping):
        value = _as_json(spec.name, value)
    if type(value) is not kind:
        name = "list of str" if kind is tuple else "str or dict" if is_json(spec) else kind.__name__
        raise InvalidArgument(spec.name, f"{value!r} is not of type {name}")
    if isinstance(value, tuple):
        return tuple(_checked_word(spec.name, word) for word in value)
    if isinstance(value, str):
        _checked_word(spec.name, value)
    if meta["choices"] and value not in meta["choices"]:
        raise InvalidArgument(spec.name, f"{value!r} is not one of {', '.join(meta['choices'])}")
    if meta["low"] is not None and not value >= meta["low"]:
        raise InvalidArgument(spec.name, f"{value} is below the limit of {meta['low']}")
    if meta["high"] is not None and not value <= meta["high"]:
        raise InvalidArgument(spec.name, f"{value} is above the limit of {meta['high']}")
    return value


def parse_json(text: str, **hooks: Any) -> Any:
    """Return the value of a JSON text, as `json.loads`.

    Raises:
        ValueError: it is not JSON, or has a number that is not finite or above the largest float.
    """

    def refuse(number: str) -> NoReturn:
        raise ValueError(f"{number} is not a number of JSON")

    def finite(number: str) -> float:
        if math.isinf(value := float(number)):
            raise ValueError(f"{number} is not a finite number of 64 bits")
        return value

    return json.loads(text, parse_constant=refuse, parse_float=finite, **hooks)


def parse_json_object(name: str, text: str, example: str) -> dict[str, Any]:
    """Parse the JSON object of an option.

    Raises:
        InvalidArgument: it is not a JSON object, or has a name twice.
    """

    def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise InvalidArgument(f"{name}.{shorten(twice)}", "is given twice")
        return members

    try:
        values = parse_json(text, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(name, f"{shorten(text)} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidArgument(name, f"{shorten(text)} is not a JSON object, such as {example}")
    return values


def without_credentials(text: str, *, is_json: bool = False) -> str:
    """Return the text of an option, for messages, without the users and passwords of URLs.

    The values of parameters of a query, and of members of a JSON object, whose names end in password, secret, token,
    api_key and the like are replaced by `(set)`.
    """
    text = _QUERY.sub(r"\1(set)", _USER.sub("", text))
    return _MEMBER.sub(r'\1"(set)"', text) if is_json else text


def shorten(text: str) -> str:
    """Return a text of at most 60 characters, for messages."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json_text.dumps_finite(dict(value))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(name, f"{value!r} is not a JSON object: {error}") from None


def _checked_word(name: str, word: Any) -> str:
    if not isinstance(word, str):
        raise InvalidArgument(name, f"{word!r} is not of type str")
    require_whole_characters(name, word)
    if not word:
        raise InvalidArgument(name, "is empty: give at least one character, or leave it out")
    return word
