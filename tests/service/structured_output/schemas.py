"""Schemas at random: what people write, nested a few levels deep."""

import random
from typing import Any

WORDS = ("name", "age", "tags", "city", "street", "id", "x", "size", "kind", "notes")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(foo|ba[rz])+$", "^[A-F0-9]{8}$")
FORMATS = ("date", "date-time", "uuid", "ipv4", "email")


def random_schema(seed: int) -> dict[str, Any]:
    """One schema; the same for the same seed."""
    return _value(random.Random(seed), 3)


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _number, _enum, _constant]
    if depth > 0:
        makers = [*makers, _object, _object, _object, _array, _array, _any_of, _recursive, _map]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randrange(12)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(20)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    return {"type": "string", "format": rng.choice(FORMATS)} if kind == 2 else {"type": "string"}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randrange(5000)} if rng.random() < 0.5 else {}
    return {"type": rng.choice(("integer", "number")), **bounds}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [rng.choice((True, None, 7, "a", "red and blue", "x" * 40, 1.5, "grün")) for _ in range(4)]
    return {"enum": list(dict.fromkeys(values))}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(("once upon a time", 12345, None, {"a": [1, 2]}))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 6))
    found: dict[str, Any] = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    found["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.7:
        found["additionalProperties"] = False
    return found


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(4)
    bounds = {"minItems": low, "maxItems": low + rng.randrange(1, 6)} if rng.random() < 0.6 else {}
    return {"type": "array", "items": _value(rng, depth - 1), **bounds}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


def _recursive(rng: random.Random, depth: int) -> dict[str, Any]:
    tree = {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}
    node = {"type": "object", "properties": tree, "required": ["value"], "additionalProperties": False}
    return node if rng.random() < 0.5 else {**node, "required": ["value", "children"]}


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _value(rng, depth - 1)}


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["value", "children"],
    "additionalProperties": False,
}


def with_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what its references name."""
    return {**schema, "$defs": {"tree": TREE}}
