"""JSON as RFC 8259 has it, which knows neither NaN nor Infinity: null stands for a number that is not finite.

Such are the log-probability of a token that cannot be, and all sums with it. Python's own `json` writes names for them
that other readers refuse.
"""

from __future__ import annotations

import json
import math
from json.encoder import encode_basestring_ascii


def dumps(
    value: object,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps`, with null for every float that is not finite."""

    def written(value: object) -> str:
        return json.dumps(
            value,
            indent=indent,
            ensure_ascii=ensure_ascii,
            separators=separators,
            sort_keys=sort_keys,
            allow_nan=False,
        )

    try:
        return written(value)
    except ValueError:  # some are not; to look at each first would cost as much again
        return written(_finite(value))


def quoted(text: str) -> bytes:
    """Return a text as JSON has it, in ASCII. `dumps` takes longer, which shows where each token is written."""
    return encode_basestring_ascii(text).encode()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
