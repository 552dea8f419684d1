"""Arrivals and lengths of requests: synthetic workloads with the paper's means, or a file.

lengths    lognormal, prompt and output independent, prompt + output <= max_model_len; the means after clipping are
           the workload's
arrivals   Poisson, given their number: n of them take n / rate seconds, so the trace has exactly the requested rate
sampling   stratified: of n requests one length falls into each n-th of the distribution, in random order, so that a
           short trace has the means of a long one
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InvalidArgument

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
class Lengths:
    """A lognormal distribution: the mean after clipping, and the standard deviation of the logarithm."""

    mean: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Workload:
    """A distribution of requests.

    The means of `sharegpt` and `alpaca` are the paper's (section 6.1, figure 11); their deviations are estimated from
    the shape of the paper's histograms. Those of `translation` (figure 16) are assumed, because
    the paper gives no numbers.
    """

    name: str
    prompt: Lengths
    output: Lengths
    prefix_tokens: int = 0


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("sharegpt", Lengths(161.31, 1.2), Lengths(337.99, 0.9)),
        Workload("alpaca", Lengths(19.31, 0.5), Lengths(58.45, 0.9)),
        Workload("translation", Lengths(40.0, 0.5), Lengths(40.0, 0.5)),
    )
}


def synthesize(
    workload: Workload, *, rate_per_s: float, num_requests: int, seed: int, max_model_len: int
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
    workload: Workload, count: int, room: int, generator: np.random.Generator
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
def _scales(prompt: Lengths, output: Lengths, room: int) -> tuple[float, float]:
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
