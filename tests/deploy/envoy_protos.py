"""Reads configurations as Envoy's published messages: a list on standard input, a list of complaints as the answer.

A process of its own, whose PYTHONPATH has the packages of the extra `envoy` in front, for they bring other copies of
messages that jpaged's own packages have. A configuration is parsed, and held to the rules that fields have as options
(`validate.rules`), by which Envoy refuses what it reads. "" stands for one to which nothing is objected.
"""

from __future__ import annotations

import importlib
import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, json_format, message_factory

from jpaged import json_text

_TYPE_URL = "type.googleapis.com/"


def types_named(value: Any) -> Iterator[str]:
    """The names of the messages that stand in `@type`, anywhere."""
    if isinstance(value, dict):
        if isinstance(value.get("@type"), str):
            yield value["@type"].removeprefix(_TYPE_URL)
        for part in value.values():
            yield from types_named(part)
    elif isinstance(value, list):
        for part in value:
            yield from types_named(part)


def load_package(name: str) -> None:
    """Imports the modules of a message's package, after which it can be read; none where there is no such package."""
    *words, _ = name.split(".")
    for root in map(Path, sys.path):
        for path in sorted(root.joinpath(*words).glob("*_pb2.py")):
            importlib.import_module(".".join([*words, path.stem]))


# --- rules ------------------------------------------------------------------------------------------------------------

_IS: Mapping[str, Callable[[Any, Any], bool]] = {
    "const": operator.eq,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "in": lambda value, allowed: value in allowed,
    "not_in": lambda value, refused: value not in refused,
    "min_len": lambda value, low: len(value) >= low,
    "max_len": lambda value, high: len(value) <= high,
    "min_bytes": lambda value, low: len(value.encode()) >= low,
    "max_bytes": lambda value, high: len(value.encode()) <= high,
    "prefix": str.startswith,
    "suffix": str.endswith,
    "pattern": lambda value, pattern: re.search(re.sub(r"\$$", r"\\Z", pattern), value) is not None,  # as RE2 has it
    "min_items": lambda value, low: len(value) >= low,
    "max_items": lambda value, high: len(value) <= high,
    "min_pairs": lambda value, low: len(value) >= low,
    "max_pairs": lambda value, high: len(value) <= high,
}
"""What a rule asks of a value; one that is neither here nor in the set below stops the process."""
_READ_ELSEWHERE = {"required", "defined_only", "ignore_empty", "items", "keys", "values", "skip", "unique", "strict"}
_OF_HEADERS = {
    "HTTP_HEADER_NAME": r"^:?[0-9a-zA-Z!#$%&'*+\-.^_|~`]+$",
    "HTTP_HEADER_VALUE": r"^[^\x00-\x08\x0a-\x1f\x7f]*$",
}
_TIMES = {"google.protobuf.Duration", "google.protobuf.Timestamp"}
_WRAPPER = re.compile(r"google\.protobuf\.\w+Value$")


def problems_of(message: Any, where: str) -> Iterator[str]:
    """The fields of a message, and of all within it, that are not as their rules say."""
    if message.DESCRIPTOR.full_name == "google.protobuf.Any":
        found = descriptor_pool.Default().FindMessageTypeByName(message.type_url.removeprefix(_TYPE_URL))
        message = message_factory.GetMessageClass(found).FromString(message.value)
    rules = importlib.import_module("validate.validate_pb2")
    for one in message.DESCRIPTOR.oneofs:
        if one.GetOptions().Extensions[rules.required] and message.WhichOneof(one.name) is None:
            yield f"{where}: needs one of {', '.join(field.name for field in one.fields)}"
    for field in message.DESCRIPTOR.fields:
        name, rule = f"{where}.{field.name}", field.GetOptions().Extensions[rules.rules]
        value = getattr(message, field.name)
        is_set = not field.has_presence or message.HasField(field.name)
        if not is_set:
            needs = rule.message.required or (rule.WhichOneof("type") in ("duration", "any") and _of(rule).required)
            if needs and field.containing_oneof is None:
                yield f"{name}: is required"
            continue
        if rule.WhichOneof("type") is not None:
            yield from _broken(value, _of(rule), name, field)
        if field.message_type is not None and not rule.message.skip:
            yield from _within(value, field, name)


def _of(rule: Any) -> Any:
    return getattr(rule, rule.WhichOneof("type"))


def _within(value: Any, field: Any, name: str) -> Iterator[str]:
    """The messages of a field: one, several, or those of a map."""
    if field.message_type.full_name in _TIMES or _WRAPPER.match(field.message_type.full_name):
        return
    if field.message_type.GetOptions().map_entry:
        parts = value.items() if field.message_type.fields_by_name["value"].message_type is not None else ()
        for key, part in parts:
            yield from problems_of(part, f"{name}[{key}]")
    elif field.is_repeated:
        for i, part in enumerate(value):
            yield from problems_of(part, f"{name}[{i}]")
    else:
        yield from problems_of(value, name)


def _broken(value: Any, rule: Any, name: str, field: Any) -> Iterator[str]:
    """The rules of one type that a value breaks."""
    if getattr(rule, "ignore_empty", False) and not value:
        return
    if hasattr(value, "DESCRIPTOR") and _WRAPPER.match(value.DESCRIPTOR.full_name):
        value = value.value
    for option, wanted in rule.ListFields():
        if option.name in _READ_ELSEWHERE:
            continue
        if option.name == "well_known_regex":
            known = option.enum_type.values_by_number[wanted].name
            holds = _IS["pattern"](value, _OF_HEADERS[known] if rule.strict else r"^[^\x00\x0a\x0d]*$")
        else:
            holds = _IS[option.name](_plain(value), _plain(wanted))
        if not holds:
            yield f"{name}: {_plain(value)!r} is not {option.name} {_plain(wanted)!r}"
    if getattr(rule, "defined_only", False) and value not in field.enum_type.values_by_number:
        yield f"{name}: {value} is no {field.enum_type.name}"
    if getattr(rule, "unique", False) and len(set(map(str, value))) != len(value):
        yield f"{name}: has one thing twice"
    if hasattr(rule, "items") and rule.items.WhichOneof("type") not in (None, "message"):
        for i, part in enumerate(value):
            yield from _broken(part, _of(rule.items), f"{name}[{i}]", field)
    if hasattr(rule, "keys") and rule.keys.WhichOneof("type") is not None:
        for key in value:
            yield from _broken(key, _of(rule.keys), f"{name}[{key}]", field)


def _plain(value: Any) -> Any:
    """A duration in seconds; a repeated rule as a list."""
    if hasattr(value, "ToNanoseconds"):
        return value.ToNanoseconds() / 1e9
    return value if isinstance(value, str | bytes) or not isinstance(value, Sequence) else [_plain(v) for v in value]


# --- the process ------------------------------------------------------------------------------------------------------


def complaint(written: Any) -> str:
    """What Envoy's messages object to in a configuration."""
    for name in types_named(written):
        load_package(name)
    bootstrap = importlib.import_module("envoy.config.bootstrap.v3.bootstrap_pb2").Bootstrap()
    try:
        json_format.ParseDict(written, bootstrap)
    except json_format.ParseError as error:
        return str(error)
    return "\n".join(problems_of(bootstrap, "Bootstrap"))


def main() -> None:
    """Answers what stands on standard input."""
    sys.stdout.write(json_text.dumps([complaint(written) for written in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
