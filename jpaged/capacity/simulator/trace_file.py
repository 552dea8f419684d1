"""Trace files: one JSON object per line, in any order of arrival.

    {"arrival_s": 0.25, "prompt_tokens": 161, "output_tokens": 338}
    {"arrival_s": 0.31, "prompt_tokens": 400, "output_tokens": 20, "prefix_id": "system", "prefix_tokens": 341}

`arrival_s`, `prompt_tokens` and `output_tokens` are required; the other fields of `TraceRequest` are optional. Other
fields are errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from jpaged.capacity.simulator.trace import TraceRequest
from jpaged.errors import InvalidArgument
from jpaged.types import MAX_BEAM_WIDTH, MAX_NUM_SAMPLES

_KINDS: dict[str, type] = {"float": float, "int": int, "str": str}
_LIMITS: dict[str, tuple[float, float]] = {
    "arrival_s": (0.0, math.inf),
    "prompt_tokens": (1, math.inf),
    "output_tokens": (1, math.inf),
    "n": (1, MAX_NUM_SAMPLES),
    "beam_width": (0, MAX_BEAM_WIDTH),
    "prefix_tokens": (0, math.inf),
    "priority": (-(2**31), 2**31 - 1),
}


def read_trace(path: Path, *, max_model_len: int) -> list[TraceRequest]:
    """Return the requests of a file, by arrival.

    Raises:
        InvalidArgument: the file cannot be read or is empty, or a line is wrong; names the line and the field.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("trace", f"{path} cannot be read: {error}") from error
    requests = [_request(line, number, max_model_len) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise InvalidArgument("trace", f"{path} has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(line: str, number: int, max_model_len: int) -> TraceRequest:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # also for integers of thousands of digits
        raise InvalidArgument(f"trace line {number}", f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"trace line {number}", f"is not an object: {line.strip()[:60]}")
    known = {spec.name: spec for spec in fields(TraceRequest)}
    for name in values:
        if name not in known:
            raise InvalidArgument(f"trace line {number}: {name}", f"is unknown; known fields: {', '.join(known)}")
    for name, spec in known.items():
        if name in values:
            values[name] = _checked(values[name], name, _KINDS[str(spec.type)], number)
        elif spec.default is MISSING:
            raise InvalidArgument(f"trace line {number}: {name}", "is missing")
    request = TraceRequest(**values)
    _check_together(request, number, values, max_model_len)
    return request


def _checked(value: Any, name: str, kind: type, number: int) -> Any:
    where = f"trace line {number}: {name}"
    is_right = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not is_right or isinstance(value, bool):
        raise InvalidArgument(where, f"{value!r} is not {'a number' if kind is float else f'of type {kind.__name__}'}")
    low, high = _LIMITS.get(name, (-math.inf, math.inf))
    if kind is not str and not (low <= value <= high and -math.inf < value < math.inf):
        limit = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise InvalidArgument(where, f"{value} is out of range: must be {limit}")
    return value


def _check_together(request: TraceRequest, number: int, given: Mapping[str, Any], max_model_len: int) -> None:
    where = f"trace line {number}"
    total = request.prompt_tokens + request.output_tokens
    if total > max_model_len:
        raise InvalidArgument(f"{where}: output_tokens", f"prompt and output are {total}, over {max_model_len}")
    if request.prefix_tokens > request.prompt_tokens:
        text = f"{request.prefix_tokens} is over prompt_tokens ({request.prompt_tokens})"
        raise InvalidArgument(f"{where}: prefix_tokens", text)
    if ("prefix_id" in given) != ("prefix_tokens" in given):
        raise InvalidArgument(f"{where}: prefix_id", "prefix_id and prefix_tokens must be given together")
    if request.beam_width and request.n > request.beam_width:
        raise InvalidArgument(f"{where}: n", f"{request.n} is over beam_width ({request.beam_width})")
