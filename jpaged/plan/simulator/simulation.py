"""Simulation of a trace: runs it through the real engine in simulated time and collects the results.

    trace ──arrivals──> Engine (scheduler, KV memory, output) ──steps──> SimulatedExecutor ──> VirtualClock
                                                                                               events, gauges <─┘

The policy is real: the results show what the engine does if steps take the time of the cost model.

The executor computes no tokens: it advances a clock by the duration of each step. Sampled tokens are all 0. If top
log-probabilities are needed (beam search), each row's are a geometric distribution, log p_k = log p + k log(1 - p) for
the k-th likeliest from k = 0, with p from 0.05 to 0.95 by a hash of step, row and context length: some positions are
nearly certain and others wide open, so that beams die and fork all the time, as they do on text.

In the steady state of a trace the system neither fills nor drains:

    requests  | filling |            window            | draining |
                        first token of a fifth of them  first token of the last

A request's first token marks its admission, in order of arrival. Between the two marks a saturated system always has a
queue, so it admits as fast as it finishes requests: the rate that it sustains. Below that rate the same marks bound the
arrivals. Static batches are admitted whole, so both marks are the beginnings of batches.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.executor import (
    I32,
    TOP_WIDTH,
    BlockMoves,
    BucketTable,
    DecodeInterrupt,
    Detail,
    DeviceRates,
    Geometry,
    HostBlocks,
    MaskChannel,
    Move,
    Progress,
    SamplingInputs,
    Sleeper,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.aux_io import AuxInputs, AuxOutputs
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InternalError
from jpaged.plan.cost import StepLoad
from jpaged.plan.simulator.deployment import SimulatedDeployment
from jpaged.plan.simulator.trace import TraceRequest
from jpaged.server_load import EngineLoad
from jpaged.testing.fake_steps import VirtualClock, step_at
from jpaged.types import Adapter, OutputEvent, Request, SamplingParams

FILLING_SHARE = 0.2
"""Share of the requests that come before the window: of a trace of 25 batches the first five."""


@dataclass(frozen=True, slots=True)
class ExecutorObservation:
    """Observations of a step in the executor.

    Attributes:
        kv_tokens: sum of the rows' context lengths.
        num_table_blocks: blocks in its rows' tables; a shared block counts once per table.
        num_used_blocks: distinct blocks among them; 0 unless the trace can share.
        is_flops_bound: its FLOPs took longer than its bytes.
    """

    kv_tokens: int
    num_table_blocks: int
    num_used_blocks: int
    is_flops_bound: bool


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One observed step.

    Attributes:
        num_batched: requests that ran in it.
        num_waiting: requests that waited for rows or blocks when it had ended.
        num_first_tokens: requests that got their first token from it.
        num_sampled: tokens that it sampled.
    """

    begin_s: float
    seconds: float
    num_batched: int
    num_waiting: int
    num_first_tokens: int
    num_sampled: int
    seen: ExecutorObservation


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """An interval of simulated time, without its end."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def steps(self, steps: Sequence[SimulatedStep]) -> list[SimulatedStep]:
        """Return the steps that begin in the window."""
        return [step for step in steps if self.begin_s <= step.begin_s < self.end_s]


def steady_window(steps: Sequence[SimulatedStep]) -> TimeWindow:
    """Return the time from when a fifth of the requests have their first token until the last one has it."""
    return window([step.begin_s + step.seconds for step in steps for _ in range(step.num_first_tokens)])


def window(times_s: Sequence[float], filling_share: float = FILLING_SHARE) -> TimeWindow:
    """Return the time from when this share of the events has passed to the last of them."""
    ordered = sorted(times_s)
    return TimeWindow(ordered[int(filling_share * len(ordered))], ordered[-1])


def mean(steps: Sequence[SimulatedStep], value: Callable[[SimulatedStep], float]) -> float:
    """Return a mean over the time in which steps ran; 0 without steps."""
    seconds = sum(step.seconds for step in steps)
    return sum(value(step) * step.seconds for step in steps) / seconds if seconds else 0.0


def requests_per_s(steps: Sequence[SimulatedStep], within: TimeWindow, num_requests: int) -> float:
    """Return the window's share of all sampled tokens, as requests per second.

    Counting tokens instead of ends removes noise: whether long requests happened to end in the window.
    """
    sampled = sum(step.num_sampled for step in within.steps(steps)) / sum(step.num_sampled for step in steps)
    return sampled * num_requests / within.seconds


def queue_growth_per_s(steps: Sequence[SimulatedStep]) -> float:
    """Return the slope of the least-squares line of the number of waiting requests, with steps weighted by seconds."""
    times_s = np.array([step.begin_s for step in steps])
    weights, waiting = np.array([step.seconds for step in steps]), np.array([step.num_waiting for step in steps], float)
    times_s -= np.average(times_s, weights=weights)
    spread = float(np.sum(weights * times_s**2))
    return float(np.sum(weights * times_s * waiting)) / spread if spread else 0.0


def queue_grows(steps: Sequence[SimulatedStep], within: TimeWindow) -> bool:
    """Return True if the queue grows by more than a batch in the window and is never empty in the last quarter."""
    some = within.steps(steps)
    late = TimeWindow(within.end_s - within.seconds / 4, within.end_s).steps(steps)
    if not late or any(step.num_waiting == 0 for step in late):
        return False
    return queue_growth_per_s(some) * within.seconds > mean(some, lambda step: step.num_batched)


_HASH = np.uint64(0x9E3779B97F4A7C15)


class SimulatedExecutor:
    """Implements `jpaged.engine.executor.Executor`.

    Attributes:
        copy_s, swap_s: seconds of all copies within the pool, and of all swaps, so far.
        seen: the last step.
    """

    num_compiles_after_warm_up = 0
    expert_stats = None

    def __init__(
        self,
        deployment: SimulatedDeployment,
        clock: VirtualClock,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        counts_sharing: bool = False,
    ) -> None:
        config = deployment.model.config
        self.seen = ExecutorObservation(0, 0, 0, False)
        self._counts_sharing = counts_sharing
        self.copy_s = 0.0
        self.swap_s = 0.0
        self._deployment = deployment
        self._clock = clock
        self._num_steps = 0
        self.geometry = Geometry(
            num_blocks=deployment.num_blocks,
            block_size=deployment.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            bytes_per_block=deployment.bytes_per_block,
            buckets=BucketTable.build(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
            num_host_blocks=deployment.num_host_blocks,
        )
        self._plain = StepOutputs(
            token_ids_rn=np.zeros((max_num_seqs, 1), np.int32),
            is_finite_rn=np.ones((max_num_seqs, 1), np.bool_),
            logprobs_rn=np.zeros((max_num_seqs, 1), np.float32),
            ranks_rn=np.ones((max_num_seqs, 1), np.int32),
        )

    @property
    def rates(self) -> DeviceRates:
        swap = self._deployment.bytes_per_block / self._deployment.swap_s(1)

        def step_s(num_tokens: int, num_pairs: int) -> float:
            return self._deployment.step_s(StepLoad(0, num_tokens, 0, num_pairs))

        forward_s = tuple((size, step_s(size, 0)) for size in self.geometry.buckets.tokens)
        num_tokens, seconds = forward_s[-1]
        num_pairs = num_tokens * self.geometry.max_model_len  # upper bound for one step
        return DeviceRates(swap, swap, forward_s, (step_s(num_tokens, num_pairs) - seconds) / num_pairs)

    @property
    def host_blocks(self) -> HostBlocks | None:
        """None: simulated blocks have no bytes."""
        return None

    @property
    def routed_experts(self) -> None:
        """None: experts of tokens are not kept."""
        return None

    @property
    def sleeper(self) -> Sleeper | None:
        """None: a simulated device has no memory."""
        return None

    def warm_up(self, progress: Progress) -> None:
        progress("programs", 1, 1)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Advance the clock at once: later steps wait for the moves."""
        num_blocks = len(moves.sources)
        if moves.move is Move.COPY:
            seconds = self._deployment.copy_s(num_blocks)
            self.copy_s += seconds
        else:
            seconds = self._deployment.swap_s(num_blocks)
            self.swap_s += seconds
        self._clock.advance(seconds)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Do nothing: simulated servers have no slots."""

    def forward(self, inputs: StepInputs) -> NDArray[np.int32]:
        """Advance the clock by the whole step. Return the lengths of the rows' contexts."""
        num_rows = inputs.num_rows
        query_lens = np.diff(inputs.query_starts_s1[: num_rows + 1]).astype(np.int64)
        kv_lens = np.where(query_lens > 0, inputs.kv_lens_s[:num_rows], 0).astype(np.int64)
        num_kv_tokens = int(kv_lens.sum())
        is_decoding = query_lens == 1
        load = StepLoad(
            num_rows=num_rows,
            num_tokens=inputs.num_tokens,
            num_kv_tokens=num_kv_tokens,
            num_pairs=inputs.num_pairs,
            num_decoding=int(is_decoding.sum()),
            num_decoding_kv_tokens=int(kv_lens[is_decoding].sum()),
        )
        seconds = self._deployment.step_s(load)
        self._clock.advance(seconds)
        self._num_steps += 1
        roofline = self._deployment.roofline
        is_flops_bound = roofline.flops_s(load) > roofline.bytes_s(num_kv_tokens, num_rows=num_rows)
        self.seen = ExecutorObservation(num_kv_tokens, *self._count_blocks(inputs), is_flops_bound)
        return inputs.kv_lens_s[:num_rows]

    def sample(self, hidden: NDArray[np.int32], inputs: SamplingInputs) -> StepOutputs:
        return self._top_logprobs(hidden) if inputs.detail == Detail.TOP_LOGPROBS else self._plain

    def compute_aux(self, hidden: NDArray[np.int32], inputs: AuxInputs) -> Callable[[], AuxOutputs]:
        """Return empty outputs in no time: simulated requests need no prompt log-probabilities."""
        return AuxOutputs

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> StepOutputs:
        """Advance the clock by all steps: the tokens end no row."""
        for place in range(num_steps):
            self.forward(step_at(place, inputs, sampling, self.geometry.block_size)[0])
        shape = len(ending_token_ids_rx), num_steps
        return StepOutputs(np.zeros(shape, np.int32), np.ones(shape, np.bool_))

    def decode_interruptibly(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[StepOutputs, DecodeInterrupt]:
        """Raise an error, because no request arrives while a simulated step runs.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"a simulated server cannot interrupt a dispatch of {num_steps} steps")

    def decode_with_masks(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[StepOutputs, MaskChannel]:
        """Raise an error, because simulated servers have no grammars.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"a simulated server cannot run steps that wait for masks ({num_steps} steps)")

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> StepOutputs:
        """Raise an error, because simulated servers have no draft model.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"a simulated server has no draft model for {num_rounds} speculative rounds")

    def is_done(self, handle: StepOutputs) -> bool:
        return True

    def collect(self, handle: StepOutputs) -> StepOutputs:
        return handle

    def shutdown(self) -> None:
        """Do nothing: the executor has no resources."""

    def _count_blocks(self, inputs: StepInputs) -> tuple[int, int]:
        """Return the number of blocks in the rows' tables, and the number of distinct ones."""
        num_blocks_s = -(-inputs.kv_lens_s[: inputs.num_rows] // self.geometry.block_size)
        num_table_blocks = int(num_blocks_s.sum())
        if not self._counts_sharing:
            return num_table_blocks, 0
        block_tables_sm = inputs.block_tables_gsm[0, : inputs.num_rows, : int(num_blocks_s.max())]
        is_named_sm = np.arange(block_tables_sm.shape[1]) < num_blocks_s[:, None]
        return num_table_blocks, int(np.unique(block_tables_sm[is_named_sm]).size)

    def _top_logprobs(self, kv_lens: NDArray[np.int32]) -> StepOutputs:
        num_rows = len(kv_lens)
        place = np.uint64(self._num_steps) << np.uint64(32)
        hashed = (kv_lens.astype(np.uint64) + np.arange(num_rows, dtype=np.uint64) * np.uint64(65537) + place) * _HASH
        hashed = (hashed ^ (hashed >> np.uint64(29))) * _HASH
        p_r = 0.05 + 0.9 * ((hashed >> np.uint64(11)) / float(1 << 53))
        logprobs_rk = np.log(p_r)[:, None] + np.arange(TOP_WIDTH) * np.log1p(-p_r)[:, None]
        ids_rk = np.broadcast_to(np.arange(TOP_WIDTH, dtype=np.int32), (num_rows, TOP_WIDTH))
        return StepOutputs(
            token_ids_rn=self._plain.token_ids_rn,
            is_finite_rn=self._plain.is_finite_rn,
            logprobs_rn=self._plain.logprobs_rn,
            ranks_rn=self._plain.ranks_rn,
            top_ids_rnk=ids_rk[:, None],
            top_logprobs_rnk=logprobs_rk[:, None].astype(np.float32),
        )


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
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

    served: tuple[SimulatedTimes, ...]
    elapsed_s: float
    steps: tuple[SimulatedStep, ...]
    slot_share: float
    pool_share: float
    copy_s: float
    swap_s: float
    load: EngineLoad

    @property
    def normalized_latency_s(self) -> float:
        return float(np.mean([served.normalized_latency_s for served in self.served]))

    def percentile(self, measure: Callable[[SimulatedTimes], float], percent: float) -> float:
        """Return a percentile of one of the times of `SimulatedTimes`, over all requests."""
        return float(np.percentile([measure(served) for served in self.served], percent))

    @property
    def requests_per_s(self) -> float:
        return len(self.served) / self.elapsed_s

    @property
    def window(self) -> TimeWindow:
        """The steady-state window; the whole run if the trace is too short to have one."""
        steady = steady_window(self.steps)
        return steady if steady.steps(self.steps) else TimeWindow(0.0, self.elapsed_s)

    @property
    def steady_steps(self) -> list[SimulatedStep]:
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


def simulate(trace: Sequence[TraceRequest], deployment: SimulatedDeployment, options: EngineConfig) -> Simulation:
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

    def __init__(self, trace: Sequence[TraceRequest], deployment: SimulatedDeployment, options: EngineConfig) -> None:
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
        self._steps: list[SimulatedStep] = []

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
        served = [SimulatedTimes(r, self._first_token_s[i], self._end_s[i]) for i, r in enumerate(self._trace)]
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
            SimulatedStep(
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
