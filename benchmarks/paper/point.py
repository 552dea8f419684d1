"""One simulation of the evaluation: everything that decides its result, and what is kept of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from jpaged.engine.engine import EngineOptions
from jpaged.sim.cost import deploy
from jpaged.sim.hardware import HARDWARE
from jpaged.sim.model import MODELS
from jpaged.sim.simulation import simulate
from jpaged.sim.trace import WORKLOADS, TraceRequest, chat_rounds, synthesize, with_sampling

SEED = 0
"""Of every trace; the systems of a comparison serve the same requests."""

_PAPER = EngineOptions(
    max_num_seqs=256,
    max_num_batched_tokens=2560,
    max_num_queued_reqs=1_000_000,
    overlap=False,
    preemption_mode="recompute",
    enable_prefix_caching=False,
)
"""FCFS, no prefix cache, prompts whole: the paper's system; the others change the two options that they are."""

SYSTEMS: dict[str, EngineOptions] = {
    "paged": _PAPER,
    "oracle": replace(_PAPER, kv_policy="reserve-oracle"),
    "pow2": replace(_PAPER, kv_policy="reserve-pow2"),
    "max": replace(_PAPER, kv_policy="reserve-max"),
    "static": replace(_PAPER, kv_policy="reserve-max", batching="static"),
    "shared": replace(_PAPER, enable_prefix_caching=True),
    "jpaged": replace(_PAPER, enable_prefix_caching=True, max_num_batched_tokens=512),
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
        prefix_tokens: tokens that every prompt begins with, added to the workload's.
        preemption: "" leaves the system's own.
        host_blocks_share: host memory to swap to, as a share of the pool.
    """

    system: str
    workload: str
    rate_per_s: float
    num_requests: int
    model: str = "opt-13b"
    n: int = 1
    beam_width: int = 0
    prefix_tokens: int = 0
    block_size: int = 16
    preemption: str = ""
    num_kv_slots: int | None = None
    host_blocks_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What is kept of a simulation; see `jpaged.sim.simulation.Simulation`."""

    normalized_latency_s: float
    mean_batched_requests: float
    slot_share: float
    pool_share: float
    shared_share: float
    saturated_requests_per_s: float
    elapsed_s: float
    swap_s: float
    num_preemptions: int
    num_recomputed_tokens: int
    num_prefix_hit_tokens: int


def measure(point: Point) -> Measured:
    """Runs one point."""
    model = MODELS[point.model]
    deployment = deploy(
        model,
        HARDWARE[model.paper_hardware],
        num_kv_slots=point.num_kv_slots,
        block_size=point.block_size,
    )
    deployment = replace(deployment, num_host_blocks=int(point.host_blocks_share * deployment.num_blocks))
    options = SYSTEMS[point.system]
    if point.preemption:
        options = replace(options, preemption_mode=point.preemption)
    result = simulate(_trace(point), deployment, options)
    return Measured(
        normalized_latency_s=result.normalized_latency_s,
        mean_batched_requests=result.mean_batched_requests,
        slot_share=result.slot_share,
        pool_share=result.pool_share,
        shared_share=result.shared_share,
        saturated_requests_per_s=result.saturated_requests_per_s,
        elapsed_s=result.elapsed_s,
        swap_s=result.swap_s,
        num_preemptions=result.load.num_preemptions,
        num_recomputed_tokens=result.load.num_recomputed_tokens,
        num_prefix_hit_tokens=result.load.num_prefix_hit_tokens,
    )


class Runner:
    """Runs points, each once however many figures ask for it, in so many processes."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._known: dict[Point, Measured] = {}

    def run(self, points: Iterable[Point]) -> dict[Point, Measured]:
        wanted = list(points)
        new = [point for point in dict.fromkeys(wanted) if point not in self._known]
        if self._jobs == 1 or len(new) < 2:
            self._known.update((point, measure(point)) for point in new)
        else:
            # Spawned: a process that has started threads (jax does) must not be forked.
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(max_workers=self._jobs, mp_context=spawn) as pool:
                self._known.update(zip(new, pool.map(measure, new), strict=True))
        return {point: self._known[point] for point in wanted}


def _trace(point: Point) -> list[TraceRequest]:
    if point.workload == "chatbot":
        return chat_rounds(rate_per_s=point.rate_per_s, num_requests=point.num_requests, seed=SEED)
    workload = replace(WORKLOADS[point.workload], prefix_tokens=point.prefix_tokens)
    trace = synthesize(
        workload,
        rate_per_s=point.rate_per_s,
        num_requests=point.num_requests,
        seed=SEED,
        max_model_len=MODELS[point.model].max_model_len,
    )
    return with_sampling(trace, n=point.n, beam_width=point.beam_width)
