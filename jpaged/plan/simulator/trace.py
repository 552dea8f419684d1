"""Arrivals and lengths of requests: synthetic workloads with the paper's means, or a file.

lengths    lognormal, prompt and output independent, prompt + output <= max_model_len; the means after clipping are
           the workload's
arrivals   Poisson, given their number: n of them take n / rate seconds, so the trace has exactly the requested rate
sampling   stratified: of n requests one length falls into each n-th of the distribution, in random order, so that a
           short trace has the means of a long one

A trace file has one JSON object per line, in any order of arrival:

    {"arrival_s": 0.25, "prompt_tokens": 161, "output_tokens": 338}
    {"arrival_s": 0.31, "prompt_tokens": 400, "output_tokens": 20, "prefix_id": "system", "prefix_tokens": 341}

`arrival_s`, `prompt_tokens` and `output_tokens` are required; the other fields of `TraceRequest` are optional. Other
fields are errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InvalidArgument
from jpaged.types import MAX_BEAM_WIDTH, MAX_NUM_SAMPLES

_GRID = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        output_tokens: exact number of tokens that it generates.
        n: sequences to sample.
        beam_width: beams to search with; 0 samples.
        prefix_id: requests of one prefix_id begin with the same tokens; "" shares nothing.
        prefix_tokens: number of the prompt's tokens that are shared.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    n: int = 1
    beam_width: int = 0
    prefix_id: str = ""
    prefix_tokens: int = 0
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A lognormal distribution: the mean after clipping, and the standard deviation of the logarithm."""

    mean: float
    sigma: float


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A distribution of requests.

    The means of `sharegpt` and `alpaca` are the paper's (section 6.1, figure 11); their deviations are estimated from
    the shape of the paper's histograms. Those of `translation` (figure 16) are assumed, because
    the paper gives no numbers.
    """

    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    prefix_tokens: int = 0


WORKLOADS = {
    workload.name: workload
    for workload in (
        TraceWorkload("sharegpt", LengthDistribution(161.31, 1.2), LengthDistribution(337.99, 0.9)),
        TraceWorkload("alpaca", LengthDistribution(19.31, 0.5), LengthDistribution(58.45, 0.9)),
        TraceWorkload("translation", LengthDistribution(40.0, 0.5), LengthDistribution(40.0, 0.5)),
    )
}


def synthesize(
    workload: TraceWorkload, *, rate_per_s: float, num_requests: int, seed: int, max_model_len: int
) -> list[TraceRequest]:
    """Generate a trace.

    Args:
        workload: with a prefix, every request starts with the same prefix_tokens, followed by a separate prompt.
        rate_per_s: rate of the arrivals.
        num_requests: number of requests.
        seed: the same seed gives the same lengths for every rate.
        max_model_len: maximum of prompt and output together.
    """
    generator = np.random.default_rng(seed)
    room = max_model_len - workload.prefix_tokens
    prompts, outputs = draw_lengths(workload, num_requests, room, generator)
    arrivals_s = arrivals(rate_per_s, num_requests, generator)
    prefix_id = "shared" if workload.prefix_tokens else ""
    return [
        TraceRequest(
            arrival_s=float(arrival_s),
            prompt_tokens=workload.prefix_tokens + int(prompt),
            output_tokens=int(output),
            prefix_id=prefix_id,
            prefix_tokens=workload.prefix_tokens,
        )
        for arrival_s, prompt, output in zip(arrivals_s, prompts, outputs, strict=True)
    ]


def arrivals(rate_per_s: float, count: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return Poisson arrivals in seconds, the last at count / rate."""
    times: NDArray[np.float64] = np.cumsum(generator.exponential(1.0, count))
    return times * (count / rate_per_s / times[-1])


def draw_lengths(
    workload: TraceWorkload, count: int, room: int, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tokens of prompts and outputs; each pair is at most `room` together."""
    scales = _scales(workload.prompt, workload.output, room)
    normals = [NormalDist().inv_cdf(float(u)) for _ in range(2) for u in _stratified(count, generator)]
    prompt, output = np.array(normals[:count]), np.array(normals[count:])
    return _clip(
        scales[0] * np.exp(workload.prompt.sigma * prompt), scales[1] * np.exp(workload.output.sigma * output), room
    )


def _stratified(count: int, generator: np.random.Generator) -> NDArray[np.float64]:
    places: NDArray[np.float64] = (generator.permutation(count) + generator.uniform(1e-9, 1.0, count)) / count
    return np.minimum(places, 1 - 1e-12)


def _clip(
    prompts: NDArray[np.float64], outputs: NDArray[np.float64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Round and bound lengths: both are at least 1, and the prompt leaves room for an output token."""
    whole = np.clip(np.rint(prompts), 1, room - 1).astype(np.int64)
    return whole, np.clip(np.rint(outputs), 1, room - whole).astype(np.int64)


@cache
def _scales(prompt: LengthDistribution, output: LengthDistribution, room: int) -> tuple[float, float]:
    """Return the medians of both distributions whose clipped means are the given ones; fixed point on a grid.

    Raises:
        InvalidArgument: the room is too small for these means.
    """
    normals = np.array([NormalDist().inv_cdf((i + 0.5) / _GRID) for i in range(_GRID)])
    scales = [prompt.mean * math.exp(-(prompt.sigma**2) / 2), output.mean * math.exp(-(output.sigma**2) / 2)]
    for _ in range(40):
        prompts = np.repeat(scales[0] * np.exp(prompt.sigma * normals), _GRID)
        outputs = np.tile(scales[1] * np.exp(output.sigma * normals), _GRID)
        means = [float(lengths.mean()) for lengths in _clip(prompts, outputs, room)]
        scales = [
            scale * wanted.mean / mean for scale, wanted, mean in zip(scales, (prompt, output), means, strict=True)
        ]
    if abs(means[0] / prompt.mean - 1) > 0.005 or abs(means[1] / output.mean - 1) > 0.005:
        raise InvalidArgument(
            "max_model_len",
            f"{room} tokens are too few for a mean prompt of {prompt.mean} and a mean output of {output.mean}",
        )
    return scales[0], scales[1]


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
