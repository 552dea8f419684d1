"""One option: default, help, limits, and validation."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, Literal, NoReturn

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.types import require_whole_characters

JsonText = str
"""A JSON object as text; in Python, the object itself may be given."""
_SECRET_NAME = re.compile(
    r"password|passwd|passphrase|pwd|secret|credential"
    r"|(?:token|jwt|signature|authorization|(?:(?:api|access|auth|refresh)[_-]?token|(?:api|access|account)[_-]?key)s"
    r"|(?:api|access|account|private)[_-]?key|access[_-]?key[_-]?id"
    r"|(?<![a-z])(?:keys?|pass|sig|auth|headers))[_-]?\d*$",
    re.IGNORECASE,
)
"""Names whose values are secrets: words that occur anywhere in them, and words at their end."""
_USER = re.compile(
    r'(?<=://)[^/?#\s"]*@'
    r'|(?<=://)[^/?#\s":@\[]*:(?!\d*(?:[/?#,\s"]|$))[^\s",]*@'
    r'|(?<![^\s",;=])[^\s"/:@,;=]+:(?![^\s",]*//)[^\s",]*@(?=[\w\[])'
)
"""User and password of a URL, those with a slash (if no port is there), and those of an address without a scheme."""
_PAIR = re.compile(
    r"""(?<![^\s?&#;,"'=])([^\s?&#;,"'=]+)=(?=("[^"]*"?|(?:(?:bearer|basic)\s+)?[^\s&#;,"]+))""", re.IGNORECASE
)
_MEMBER = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:\s*)("(?:[^"\\]|\\.)*"?|[^\s,}\]]+)')
"""A name with its value, in a URL or in a list of pairs, and a member of a JSON object."""
_HIDDEN = "(set)"
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


def checked_keys(kind: type, name: str, values: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return the validated keys and values of an option that is a JSON object; None counts as absent.

    Args:
        kind: a dataclass whose fields are the keys' options.
        name: of the option.
        ignored: further keys, which are dropped.

    Raises:
        InvalidArgument: a key is unknown, or a value has the wrong type or is out of range.
    """
    specs, found = {spec.name: spec for spec in dataclasses.fields(kind)}, {}
    for key, value in values.items():
        if key not in specs and key not in ignored:
            known = ", ".join((*specs, *ignored))
            raise InvalidArgument(f"{name}.{shorten(str(key))}", f"is unknown: must be one of {known}")
        if key in specs and value is not None:
            try:
                found[key] = checked(specs[key], value)
            except InvalidArgument as error:
                raise InvalidArgument(f"{name}.{key}", error.problem) from None
    return found


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


def is_secret_name(name: str) -> bool:
    """Return True if the name of a value looks as if the value is a secret: password, api_key, X-Amz-Signature."""
    return _SECRET_NAME.search(name) is not None


def without_credentials(text: str) -> str:
    """Return the text of an option or variable, for messages, without the users and passwords of URLs.

    The values of secret names (`is_secret_name`) are replaced by `(set)`: of parameters and fragments of URLs, of
    `name=value` in lists, and of members of JSON objects at any depth, of any type except null.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            values = json.loads(text)
            shown = _without_secrets(values)
        except (ValueError, RecursionError):
            pass  # a text that only looks like JSON
        else:
            separators = (", ", ": ") if '": ' in text else (",", ":")
            return text if shown == values else json_text.dumps(shown, ensure_ascii=False, separators=separators)
    return _without_pairs(_MEMBER.sub(_shown_member, _USER.sub("", text)))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            without_credentials(name): _HIDDEN if is_secret_name(name) and one is not None else _without_secrets(one)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(one) for one in value]
    return without_credentials(value) if isinstance(value, str) else value


def _without_pairs(text: str) -> str:
    shown, end = "", 0
    for pair in _PAIR.finditer(text):
        if pair.start() >= end and is_secret_name(pair[1]):
            shown += text[end : pair.end()] + _HIDDEN
            end = pair.end(2)
    return shown + text[end:]


def _shown_member(member: re.Match[str]) -> str:
    return f'"{member[1]}"{member[2]}"{_HIDDEN}"' if is_secret_name(member[1]) else member[0]


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
