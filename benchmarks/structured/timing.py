"""Compiles and masks of what people ask for, token by token over texts that fit."""

from __future__ import annotations

import gc
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.structured.libraries import Library
from benchmarks.structured.vocabularies import Tokens

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "zip": {"pattern": "^\\d{5}$"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}
PERSON["properties"]["address"]["properties"]["zip"]["type"] = "string"
_PERSON_TEXT = (
    '{"name":"Tim Lowell","age":42,"email":"tim@example.org","address":{"street":"Long Lane 3","city":"Little Town",'
    '"zip":"12345"},"tags":["red","blue"]}'
)
_WIDE = {
    "type": "object",
    "properties": {f"field_{index}": {"type": "string" if index % 2 else "number"} for index in range(100)},
    "required": [f"field_{index}" for index in range(100)],
    "additionalProperties": False,
}
_WIDE_TEXT = json.dumps(
    {f"field_{index}": "a word" if index % 2 else index / 2 for index in range(100)}, separators=(",", ":")
)
_ANY_TEXT = '{"story":{"title":"The little dog","words":[1,2.5,true,null],"text":"Once upon a time there was a dog."}}'
_EBNF = """root ::= "SELECT " column " FROM " table (" WHERE " condition)?
column ::= name (", " name)*
table ::= name
condition ::= name " = " number
name ::= [a-z_]+
number ::= [0-9]+
"""

WORKLOADS: dict[str, tuple[str, str, str]] = {
    "person": ("json", json.dumps(PERSON), _PERSON_TEXT),
    "100 properties": ("json", json.dumps(_WIDE), _WIDE_TEXT),
    "any object": ("json", '{"type":"object"}', _ANY_TEXT),
    "regex": (
        "regex",
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z [a-zA-Z ]{1,60}",
        "2026-01-31T12:00:00Z the little dog ran",
    ),
    "choice of 100": ("choice", json.dumps([f"category number {i}" for i in range(100)]), "category number 42"),
    "EBNF": ("ebnf", _EBNF, "SELECT name, age FROM people WHERE id = 12"),
}
"""kind, grammar, and a text that fits."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of compiles, microseconds of masks, a token at a time.

    Attributes:
        first_us: median over the tokens of one text, with nothing kept from texts before.
        again_us, again_p99_us: the same grammar's later texts.
        accept_us: moving over a token.
    """

    compile_ms: float
    first_us: float
    first_p99_us: float
    again_us: float
    again_p99_us: float
    accept_us: float
    num_tokens: int


def measure(library: Library, tokens: Tokens, workload: str, num_rounds: int) -> Times:
    """Time one workload.

    Raises:
        ValueError: the library refuses the grammar, or a token of the text.
    """
    kind, grammar, text = WORKLOADS[workload]
    token_ids = tokens.encode(text)
    compiles: list[float] = []
    first: list[float] = []
    again: list[float] = []
    accepts: list[float] = []
    gc.disable()
    try:
        for _ in range(num_rounds):
            begin = time.perf_counter()
            compiled = library.compile(kind, grammar)
            compiles.append(time.perf_counter() - begin)
            _walk(library, compiled, token_ids, first, accepts)
        for _ in range(num_rounds):
            _walk(library, compiled, token_ids, again, accepts)
    finally:
        gc.enable()
    return Times(
        compile_ms=round(statistics.median(compiles) * 1e3, 3),
        first_us=_us(first, 50),
        first_p99_us=_us(first, 99),
        again_us=_us(again, 50),
        again_p99_us=_us(again, 99),
        accept_us=_us(accepts, 50),
        num_tokens=len(token_ids),
    )


def _walk(library: Library, compiled: Any, token_ids: list[int], masks: list[float], accepts: list[float]) -> None:
    matcher = library.start(compiled)
    for token_id in token_ids:
        begin = time.perf_counter()
        matcher.fill()
        filled = time.perf_counter()
        is_accepted = matcher.accept(token_id)
        accepts.append(time.perf_counter() - filled)
        masks.append(filled - begin)
        if not is_accepted:
            raise ValueError(f"token {token_id} is refused")


def _us(values: list[float], percentile: float) -> float:
    return round(float(np.percentile(values, percentile)) * 1e6, 2)
