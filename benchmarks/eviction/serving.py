"""Serves a trace by one policy: the engine, its scheduler and its memory, in simulated time.

    trace ──arrivals──> Engine ──steps──> SimulatedExecutor ──> VirtualClock

The device is one H100 with Llama 3.1 8B as `jpaged.plan` takes it to be; the pool is as small as asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

from benchmarks.eviction.hindsight import Foreknowledge
from benchmarks.eviction.traces import BLOCK_SIZE, MAX_LEN, Coming
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.kv_cache.eviction.cost_aware import BlockCosts
from jpaged.engine.kv_cache.eviction.policies import EVICTION_POLICIES
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.hardware import HARDWARE
from jpaged.plan.simulator.deployment import MODELS, deploy
from jpaged.plan.simulator.simulation import SimulatedExecutor
from jpaged.testing.fake_steps import VirtualClock
from jpaged.types import OutputEvent, Request, SamplingParams

MODEL, DEVICE = "llama-3.1-8b", "h100"
HINDSIGHT = "hindsight"
_MAX_ROWS, _MAX_TOKENS = 64, 2048


@dataclass(frozen=True, slots=True)
class Served:
    """How a trace went.

    Attributes:
        num_prompt_tokens, num_hit_tokens: of all prompts, and those of them that had not to run.
        prefill_s, saved_s: seconds that all prompts would take, and what hits saved of them.
        num_hit_blocks, sum_of_places: blocks of hits, and how many were in front of each: what hits would save on
            another device follows from them.
        ttft_s: the mean from arrival to the first token.
        num_preemptions: requests that gave their blocks back while they ran.
    """

    num_prompt_tokens: int
    num_hit_tokens: int
    prefill_s: float
    saved_s: float
    num_hit_blocks: int
    sum_of_places: int
    ttft_s: float
    num_preemptions: int


class _Run:
    """The loop around one engine."""

    def __init__(self, trace: Sequence[Coming], policy: str, num_blocks: int, num_host_blocks: int) -> None:
        self._trace = trace
        self._coming = deque(enumerate(trace))
        self._clock = VirtualClock()
        deployment = deploy(
            MODELS[MODEL],
            HARDWARE[DEVICE],
            num_kv_slots=num_blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_host_blocks=num_host_blocks,
        )
        executor = SimulatedExecutor(
            deployment, self._clock, max_num_seqs=_MAX_ROWS, max_num_batched_tokens=_MAX_TOKENS
        )
        config = EngineConfig().replace(
            overlap=False, max_num_seqs=_MAX_ROWS, max_num_batched_tokens=_MAX_TOKENS, max_num_queued_reqs=1 << 20
        )

        def num_admitted() -> int:
            return self._num_submitted - self._num_waiting()

        self._num_submitted = 0
        self._first_token_s: dict[int, float] = {}
        self._cached_tokens: dict[int, int] = {}
        with patch.dict(EVICTION_POLICIES, {HINDSIGHT: lambda *of_memory: Foreknowledge(trace, num_admitted).policy()}):
            self._engine = Engine(
                executor,
                NoTokenizer(MODELS[MODEL].config.vocab_size),
                config.replace(eviction_policy=policy),
                clock=self._clock,
            )
        self.costs = BlockCosts.of(executor.rates, BLOCK_SIZE, deployment.bytes_per_block)

    def run(self) -> Served:
        while len(self._cached_tokens) < len(self._trace):
            while self._coming and self._coming[0][1].arrival_s <= self._clock():
                self._submit(*self._coming.popleft())
            if not self._engine.step():
                self._clock.advance(max(0.0, self._coming[0][1].arrival_s - self._clock()))
        hits = [num_tokens // BLOCK_SIZE for num_tokens in self._cached_tokens.values()]
        waits = [self._first_token_s[index] - request.arrival_s for index, request in enumerate(self._trace)]
        return Served(
            num_prompt_tokens=sum(len(request.prompt_token_ids) for request in self._trace),
            num_hit_tokens=sum(self._cached_tokens.values()),
            prefill_s=sum(chain_s(self.costs, request.num_matchable_blocks) for request in self._trace),
            saved_s=sum(chain_s(self.costs, num_blocks) for num_blocks in hits),
            num_hit_blocks=sum(hits),
            sum_of_places=sum(num_blocks * (num_blocks - 1) // 2 for num_blocks in hits),
            ttft_s=sum(waits) / len(waits),
            num_preemptions=self._engine.load().num_preemptions,
        )

    def _num_waiting(self) -> int:
        return self._engine.load().num_waiting

    def _submit(self, index: int, coming: Coming) -> None:
        def take(event: OutputEvent) -> None:
            if event.error is not None:
                raise event.error
            self._first_token_s.setdefault(index, self._clock())
            if event.is_last:
                assert event.usage is not None
                self._cached_tokens[index] = event.usage.cached_tokens

        sampling = SamplingParams(max_tokens=coming.output_tokens, ignore_eos=True, temperature=0.0)
        self._num_submitted += 1
        self._engine.submit(
            Request(str(index), coming.prompt_token_ids, sampling, tenant=coming.tenant, cache_tenant=coming.tenant),
            take,
        )


def serve(trace: Sequence[Coming], policy: str, num_blocks: int, num_host_blocks: int = 0) -> Served:
    """Serves a trace to its end by a policy, or by hindsight."""
    return _Run(trace, policy, num_blocks, num_host_blocks).run()


def costs_of_device() -> BlockCosts:
    """What blocks cost on the simulated device."""
    return _Run([], "lru", MAX_LEN // BLOCK_SIZE, 0).costs


def chain_s(costs: BlockCosts, num_blocks: int) -> float:
    """Seconds to compute the first blocks of a prompt."""
    return num_blocks * costs.first_s + costs.further_s * num_blocks * (num_blocks - 1) / 2
