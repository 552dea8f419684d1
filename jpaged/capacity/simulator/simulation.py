"""Simulation of a trace: runs it through the real engine in simulated time and collects the results.

    trace ──arrivals──> Engine (scheduler, KV memory, output) ──steps──> SimulatedExecutor ──> VirtualClock
                                                                                               events, gauges <─┘

The policy is real: the results show what the engine does if steps take the time of the cost model.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.capacity.simulator.deployment import Deployment
from jpaged.capacity.simulator.executor import SimulatedExecutor
from jpaged.capacity.simulator.steady import Step, Window, mean, queue_grows, steady_window, window
from jpaged.capacity.simulator.trace import TraceRequest
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InternalError
from jpaged.load import EngineLoad
from jpaged.testing.virtual_clock import VirtualClock
from jpaged.types import OutputEvent, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Served:
    """Times of one request, on the simulated clock."""

    request: TraceRequest
    first_token_s: float
    end_s: float

    @property
    def latency_s(self) -> float:
        return self.end_s - self.request.arrival_s

    @property
    def normalized_latency_s(self) -> float:
        """Seconds from arrival to end per output token, as in the paper's figures."""
        return self.latency_s / self.request.output_tokens

    @property
    def time_to_first_token_s(self) -> float:
        return self.first_token_s - self.request.arrival_s


@dataclass(frozen=True, slots=True)
class Simulation:
    """Results of a trace. Means over time cover only the time in which steps ran, weighted by seconds.

    Attributes:
        served: every request, in order of arrival.
        elapsed_s: from time 0 to the last end.
        steps: every step, in order.
        slot_share: tokens / slots reserved for sequences.
        pool_share: tokens / slots of the whole pool; a token shared by several sequences counts for each.
        load: the engine's counters at the end.
    """

    served: tuple[Served, ...]
    elapsed_s: float
    steps: tuple[Step, ...]
    slot_share: float
    pool_share: float
    copy_s: float
    swap_s: float
    load: EngineLoad

    @property
    def normalized_latency_s(self) -> float:
        return float(np.mean([served.normalized_latency_s for served in self.served]))

    def percentile(self, measure: Callable[[Served], float], percent: float) -> float:
        """Return a percentile of one of the times of `Served`, over all requests."""
        return float(np.percentile([measure(served) for served in self.served], percent))

    @property
    def requests_per_s(self) -> float:
        return len(self.served) / self.elapsed_s

    @property
    def window(self) -> Window:
        """The steady-state window; the whole run if the trace is too short to have one."""
        steady = steady_window(self.steps)
        return steady if steady.steps(self.steps) else Window(0.0, self.elapsed_s)

    @property
    def steady_steps(self) -> list[Step]:
        return self.window.steps(self.steps)

    @property
    def mean_batched_requests(self) -> float:
        """Mean number of requests in a step, within the window."""
        return mean(self.steady_steps, lambda step: step.num_batched)

    @property
    def shared_share(self) -> float:
        """Blocks saved by sharing / blocks without sharing, within the window; 0 if no request can share."""
        counted = [step for step in self.steady_steps if step.seen.num_used_blocks]
        num_table_blocks = mean(counted, lambda step: step.seen.num_table_blocks)
        return 1 - mean(counted, lambda step: step.seen.num_used_blocks) / num_table_blocks if counted else 0.0

    @property
    def queue_grows(self) -> bool:
        """True if more arrived than the system can serve: measured while requests arrived."""
        return queue_grows(self.steps, window([served.request.arrival_s for served in self.served]))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, of all sequences and beams."""
        return self.load.num_generation_tokens / self.elapsed_s


def simulate(trace: Sequence[TraceRequest], deployment: Deployment, options: EngineConfig) -> Simulation:
    """Serve a trace to its end.

    Args:
        trace: at least one request, by arrival.
        deployment: model and devices.
        options: engine options, with both sizes of a step; `overlap` must be off, because the executor's steps end when
            they are dispatched.

    Raises:
        RequestTooLong: a request can never fit into the pool.
    """
    run = _Run(trace, deployment, options)
    while run.is_unfinished:
        run.step()
    return run.result()


class _Run:
    """The loop around the engine: submits arrivals, records times and gauges."""

    def __init__(self, trace: Sequence[TraceRequest], deployment: Deployment, options: EngineConfig) -> None:
        # Regions are read contiguously; blocks are gathered.
        deployment = deployment if options.cache.kv_policy == "paged" else deployment.contiguous()
        scheduler = options.scheduler
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        self._clock = VirtualClock()
        self._executor = SimulatedExecutor(
            deployment,
            self._clock,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            counts_sharing=any(request.n > 1 or request.beam_width or request.prefix_id for request in trace),
        )
        tokenizer = NoTokenizer(deployment.model.config.vocab_size)
        self._engine = Engine(self._executor, tokenizer, options, clock=self._clock)
        self._trace = trace
        self._deployment = deployment
        self._coming = deque(enumerate(trace))
        self._first_token_s: dict[int, float] = {}
        self._end_s: dict[int, float] = {}
        self._num_ended_in_step = 0
        self._num_sampled = 0
        self._num_first_tokens = 0
        self._steps: list[Step] = []

    @property
    def is_unfinished(self) -> bool:
        return len(self._end_s) < len(self._trace)

    def step(self) -> None:
        """Submit requests that have arrived and run one step, or advance to the next arrival."""
        while self._coming and self._coming[0][1].arrival_s <= self._clock():
            self._submit(*self._coming.popleft())
        before_s, self._num_ended_in_step = self._clock(), 0
        if self._engine.step():
            self._observe(before_s)
        elif self._coming:
            self._clock.advance(max(0.0, self._coming[0][1].arrival_s - self._clock()))
        elif self.is_unfinished:
            raise InternalError(f"{len(self._trace) - len(self._end_s)} requests are in flight but the engine is idle")

    def result(self) -> Simulation:
        load, executor = self._engine.load(), self._executor
        served = [Served(r, self._first_token_s[i], self._end_s[i]) for i, r in enumerate(self._trace)]
        num_slots = self._deployment.num_blocks * self._deployment.block_size
        return Simulation(
            served=tuple(served),
            elapsed_s=self._clock(),
            steps=tuple(self._steps),
            slot_share=load.slot_use,
            pool_share=mean(self._steps, lambda step: step.seen.kv_tokens) / num_slots,
            copy_s=executor.copy_s,
            swap_s=executor.swap_s,
            load=load,
        )

    def _observe(self, begin_s: float) -> None:
        load = self._engine.load()
        self._steps.append(
            Step(
                begin_s=begin_s,
                seconds=self._clock() - begin_s,
                num_batched=load.num_running + self._num_ended_in_step,
                num_waiting=load.num_waiting,
                num_first_tokens=load.num_first_tokens - self._num_first_tokens,
                num_sampled=load.num_generation_tokens - self._num_sampled,
                seen=self._executor.seen,
            )
        )
        self._num_sampled, self._num_first_tokens = load.num_generation_tokens, load.num_first_tokens

    def _submit(self, index: int, coming: TraceRequest) -> None:
        def take(event: OutputEvent) -> None:
            if event.error is not None:
                raise event.error
            self._first_token_s.setdefault(index, self._clock())
            if event.is_last:
                self._end_s[index] = self._clock()
                self._num_ended_in_step += 1

        request = Request(
            request_id=str(index),
            prompt_token_ids=_prompt_token_ids(index, coming, self._deployment.model.config.vocab_size),
            sampling=_sampling_params(coming),
            tenant=coming.tenant,
        )
        self._engine.submit(request, take)


def _sampling_params(coming: TraceRequest) -> SamplingParams:
    return SamplingParams(
        max_tokens=coming.output_tokens,
        n=coming.n,
        beam_width=coming.beam_width or None,
        ignore_eos=True,
        temperature=1.0,
        priority=coming.priority,
    )


def _prompt_token_ids(index: int, coming: TraceRequest, vocab_size: int) -> tuple[int, ...]:
    """Return tokens that differ between requests, except for the shared prefix."""
    ids: list[int] = []
    if coming.prefix_tokens:
        ids = _token_ids(f"prefix {coming.prefix_id}", coming.prefix_tokens, vocab_size)
    return (*ids, *_token_ids(f"request {index}", coming.prompt_tokens - coming.prefix_tokens, vocab_size))


def _token_ids(name: str, count: int, vocab_size: int) -> list[int]:
    """Return the first `count` tokens of a deterministic text of that name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    ids: list[int] = np.random.default_rng(seed).integers(1, vocab_size, count).tolist()
    return ids
