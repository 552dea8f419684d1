"""One option: its default, its help, its limits, and how a value is held to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.types import require_whole_characters

JsonText = str
"""A JSON object as text; options that are given in Python may be the object."""
PathKind = Literal["", "file", "folder", "new file", "new folder"]
"""What a path leads to; what is new is made where it is not there. Shells complete it so."""


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

    A default of None means that the value is found when the configuration is resolved, or that the thing is left out;
    `by_platform` is what is found on CPUs, GPUs and TPUs (`jpaged.device.step_sizes` has the rule).
    """
    limits = {"low": low, "high": high, "choices": choices, "unit": unit, "by_platform": by_platform or {}}
    return field(default=default, metadata={"help": help, "path": path, **limits})


def section_of(kind: type, help: str) -> Any:
    """Declare a section of the configuration, with a sentence on what its options are about."""
    return field(default_factory=kind, metadata={"help": help})


def option_type(spec: dataclasses.Field[Any]) -> type:
    """Return the type of an option: `int | None` is an int that may be left out, a tuple is of words."""
    if spec.metadata["choices"]:
        return str
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "tuple[str, ...]": tuple, "JsonText": str}
    return kinds[str(spec.type).removesuffix(" | None")]


def is_json(spec: dataclasses.Field[Any]) -> bool:
    """Whether an option is a JSON object."""
    return str(spec.type).startswith("JsonText")


def checked(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of an option as its section holds it.

    Raises:
        InvalidArgument: it is of the wrong type or out of its limits.
    """
    meta, kind = spec.metadata, option_type(spec)
    if value is None and spec.default is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if is_json(spec) and isinstance(value, Mapping):
        value = _as_json(spec.name, value)
    if type(value) is not kind:
        name = "list of str" if kind is tuple else kind.__name__
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


def _as_json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json_text.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(name, f"{value!r} is no JSON object: {error}") from None


def _checked_word(name: str, word: Any) -> str:
    if not isinstance(word, str):
        raise InvalidArgument(name, f"{word!r} is not of type str")
    require_whole_characters(name, word)
    if not word:
        raise InvalidArgument(name, "is empty: give at least one character, or leave it out")
    return word
