"""One simulation of the evaluation: everything that decides its result, and what is kept of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.paper.batches import Pool, batch_size, region_tokens
from jpaged.config import EngineConfig
from jpaged.hardware import HARDWARE
from jpaged.plan.simulator.deployment import MODELS, SimulatedDeployment, deploy
from jpaged.plan.simulator.simulation import FILLING_SHARE, SimulatedTimes, Simulation, mean, requests_per_s, simulate
from jpaged.plan.simulator.trace import WORKLOADS, TraceRequest, arrivals, draw_lengths, synthesize

SEEDS = (0, 1, 2)
"""The seeds of the traces; the systems of a comparison serve traces of the same seeds."""

NUM_BATCHES = 27.0
"""A trace's length: more than 20 batches are left between filling and draining."""
LEAST_BATCHES = 20.0
_DRAINING_SHARE = 0.1
_NUM_DRAWN_FOR_SIZE = 2000
_CHAT_TOKENS = 1024

_PAPER = EngineConfig().replace(
    max_num_seqs=256,
    max_num_batched_tokens=2560,
    max_num_queued_reqs=1_000_000,
    overlap=False,
    max_inter_token_latency=0.0,
    preemption_mode="recompute",
    enable_prefix_caching=False,
)
"""FCFS, no prefix cache, prompts whole: the paper's system; the others change the two options that they are."""

SYSTEMS: dict[str, EngineConfig] = {
    "paged": _PAPER,
    "oracle": _PAPER.replace(kv_policy="reserve-oracle"),
    "pow2": _PAPER.replace(kv_policy="reserve-pow2"),
    "max": _PAPER.replace(kv_policy="reserve-max"),
    "static": _PAPER.replace(kv_policy="reserve-max", batching="static"),
    "shared": _PAPER.replace(enable_prefix_caching=True),
    "jpaged": _PAPER.replace(enable_prefix_caching=True, max_num_batched_tokens=512),
}
LABELS = {
    "paged": "paged (the paper's vLLM)",
    "oracle": "reserve-oracle (Orca Oracle)",
    "pow2": "reserve-pow2 (Orca Pow2)",
    "max": "reserve-max (Orca Max)",
    "static": "reserve-max, static batch (FasterTransformer)",
    "jpaged": "jpaged: paged + prefix cache + prompts in chunks of 512",
}


AT_ONCE = 1e6
"""A rate at which every request is there from the beginning."""


@dataclass(frozen=True, slots=True)
class Point:
    """What to simulate.

    Attributes:
        workload: a name in WORKLOADS, or "chatbot".
        rate_per_s: AT_ONCE saturates the system: what it completes is then what it sustains.
        num_batches: length of the trace, in batches that fill the pool.
        prefix_tokens: tokens that every prompt begins with, added to the workload's.
        preemption: "" leaves the system's own.
        host_blocks_share: host memory to swap to, as a share of the pool.
    """

    system: str
    workload: str
    rate_per_s: float = AT_ONCE
    model: str = "opt-13b"
    num_batches: float = NUM_BATCHES
    n: int = 1
    beam_width: int = 0
    prefix_tokens: int = 0
    block_size: int = 16
    preemption: str = ""
    num_kv_slots: int | None = None
    host_blocks_share: float = 0.0
    seed: int = SEEDS[0]


@dataclass(frozen=True, slots=True)
class PoolShares:
    """What the pool's slots are at a time, as shares that add up to 1.

    Attributes:
        tokens: hold one.
        reserved: will be written by the request that has them. Of paged memory: the ends of last blocks, all of them.
        internal: are a request's and will never be written.
        external: the rest, what the buddy allocator rounds up among it. Of paged memory: free.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a simulation: within the window of `plan/simulator/simulation.py`, except the counts at its end.

    Attributes:
        sustained_per_s: requests a second; what the system sustains, when the point is AT_ONCE.
        num_batches: that went through the window: requests / mean requests in a batch.
        normalized_latency_s: of the requests from FILLING_SHARE of the trace to nine tenths.
        queue_grows: more arrives than is served; the latency is then a matter of the trace's length.
        pool_shares: of the pool's slots, where nothing is shared.
        flops_bound_share: of the time, in steps that took as long as their FLOPs.
    """

    num_requests: int
    num_batches: float
    sustained_per_s: float
    mean_batched_requests: float
    normalized_latency_s: float
    queue_grows: bool
    pool_shares: PoolShares | None
    shared_share: float
    flops_bound_share: float
    swap_s: float
    num_preemptions: int
    num_recomputed_tokens: int
    num_prefix_hit_tokens: int


def measure(point: Point) -> Measured:
    """Runs one point."""
    options, deployment = _options(point), _deployment(point)
    result = simulate(trace(point), deployment, options)
    steps, batched = result.steady_steps, result.mean_batched_requests
    shares_nothing = not any(step.seen.num_used_blocks for step in steps)
    sustained_per_s = sustained_requests_per_s(result)
    return Measured(
        num_requests=len(result.served),
        num_batches=sustained_per_s * result.window.seconds / batched,
        sustained_per_s=sustained_per_s,
        mean_batched_requests=batched,
        normalized_latency_s=steady_latency_s(result.served),
        queue_grows=result.queue_grows,
        pool_shares=_pool_shares(result, deployment, options.cache.kv_policy) if shares_nothing else None,
        shared_share=result.shared_share,
        flops_bound_share=mean(steps, lambda step: step.seen.is_flops_bound),
        swap_s=result.swap_s,
        num_preemptions=result.load.num_preemptions,
        num_recomputed_tokens=result.load.num_recomputed_tokens,
        num_prefix_hit_tokens=result.load.num_prefix_hit_tokens,
    )


def trace(point: Point) -> list[TraceRequest]:
    """The requests of a point: as many as make its batches."""
    pool, kv_policy = _pool(point), _options(point).cache.kv_policy
    whole = replace(point, rate_per_s=AT_ONCE, seed=0)
    num_requests = math.ceil(point.num_batches * batch_size(_draw(whole, _NUM_DRAWN_FOR_SIZE), kv_policy, pool))
    return _draw(point, num_requests)


def sustained_requests_per_s(result: Simulation) -> float:
    """The rate within the window: what the system sustains, if it always had a queue."""
    return requests_per_s(result.steps, result.window, len(result.served))


def steady_latency_s(served: Sequence[SimulatedTimes]) -> float:
    """Mean normalized latency of the requests that arrived neither among the first nor among the last."""
    first, end = int(FILLING_SHARE * len(served)), math.ceil((1 - _DRAINING_SHARE) * len(served))
    return float(np.mean([one.normalized_latency_s for one in served[first:end]]))


def in_batch(result: Simulation, tokens: Callable[[SimulatedTimes], int]) -> float:
    """Some number of tokens of every request in a batch, added up: its mean over the window."""
    begins_s = [step.begin_s for step in result.steps]
    window, total = result.window, 0.0
    for one in result.served:
        # The step that ended with its first token is the first that it was in.
        admitted_s = begins_s[max(0, bisect_left(begins_s, one.first_token_s) - 1)]
        seconds = min(one.end_s, window.end_s) - max(admitted_s, window.begin_s)
        total += max(0.0, seconds) * tokens(one)
    return total / window.seconds


def _pool_shares(result: Simulation, deployment: SimulatedDeployment, kv_policy: str) -> PoolShares:
    num_slots = deployment.num_blocks * deployment.block_size
    tokens = mean(result.steady_steps, lambda step: step.seen.kv_tokens)
    if kv_policy == "paged":
        final = asked = mean(result.steady_steps, lambda step: step.seen.num_table_blocks) * deployment.block_size
    else:
        longest = deployment.model.config.max_model_len
        final = in_batch(result, lambda one: one.request.prompt_tokens + one.request.output_tokens)
        asked = in_batch(result, lambda one: region_tokens(kv_policy, one.request, longest))
    return PoolShares(*((part / num_slots) for part in (tokens, final - tokens, asked - final, num_slots - asked)))


def _options(point: Point) -> EngineConfig:
    options = SYSTEMS[point.system]
    return options.replace(preemption_mode=point.preemption) if point.preemption else options


@cache
def _deployment(point: Point) -> SimulatedDeployment:
    model = MODELS[point.model]
    hardware = HARDWARE[model.paper_hardware]
    deployment = deploy(model, hardware, num_kv_slots=point.num_kv_slots, block_size=point.block_size)
    return replace(deployment, num_host_blocks=int(point.host_blocks_share * deployment.num_blocks))


def _pool(point: Point) -> Pool:
    deployment, max_num_seqs = _deployment(point), SYSTEMS[point.system].scheduler.max_num_seqs
    assert max_num_seqs is not None
    return Pool(deployment.num_kv_slots, point.block_size, max_num_seqs, deployment.model.config.max_model_len)


def _draw(point: Point, num_requests: int) -> list[TraceRequest]:
    if point.workload == "chatbot":
        return chat_rounds(rate_per_s=point.rate_per_s, num_requests=num_requests, seed=point.seed)
    workload = replace(WORKLOADS[point.workload], prefix_tokens=point.prefix_tokens)
    drawn = synthesize(
        workload,
        rate_per_s=point.rate_per_s,
        num_requests=num_requests,
        seed=point.seed,
        max_model_len=MODELS[point.model].config.max_model_len,
    )
    return with_sampling(drawn, n=point.n, beam_width=point.beam_width)


def chat_rounds(*, rate_per_s: float, num_requests: int, seed: int, max_model_len: int = 2048) -> list[TraceRequest]:
    """ShareGPT's conversations as a chatbot sees them: the prompt is the last 1024 tokens, the output at most 1024.

    A request is one round of a conversation that began 0 to 5 rounds before (the number is assumed); what was said in
    the earlier rounds is drawn from ShareGPT's lengths. The rounds of one conversation come one after another, and
    share a prefix while the prompt is not cut.
    """
    generator = np.random.default_rng(seed)
    prompts, outputs = draw_lengths(WORKLOADS["sharegpt"], num_requests, max_model_len, generator)
    arrivals_s = arrivals(rate_per_s, num_requests, generator)
    history = [0] * max(1, num_requests // 6)
    requests = []
    for i in range(num_requests):
        conversation = i % len(history)
        said = history[conversation] + int(prompts[i])
        prompt, output = min(_CHAT_TOKENS, said), min(_CHAT_TOKENS, int(outputs[i]))
        is_whole = said <= _CHAT_TOKENS
        requests.append(
            TraceRequest(
                arrival_s=float(arrivals_s[i]),
                prompt_tokens=prompt,
                output_tokens=output,
                prefix_id=f"conversation {conversation}" if is_whole else "",
                prefix_tokens=prompt if is_whole else 0,
            )
        )
        history[conversation] = said + output
    return requests


def with_sampling(trace: Iterable[TraceRequest], *, n: int = 1, beam_width: int = 0) -> list[TraceRequest]:
    """The same requests, each for n samples or for a beam search."""
    return [replace(request, n=n, beam_width=beam_width) for request in trace]
