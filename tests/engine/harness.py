"""An engine over the fake executor, stepped by hand, that remembers every event."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.executor import Geometry
from jpaged.engine.executor.io import RopeLengthLimits
from jpaged.engine.kv_cache.connector import EngineStore
from jpaged.engine.speculative.draft_model import DraftModelSpeculation
from jpaged.service.input_processor import InputProcessor, move_grammars
from jpaged.service.prompt_embeds import with_digests
from jpaged.structured import StructuredOutputs
from jpaged.testing import ByteTokenizer, FakeExecutor, VirtualClock
from jpaged.testing.fake_model import FakeMasks
from jpaged.types import EmbeddedSpan, OutputEvent, Prompt, Request, SamplingParams
from tests.engine.proposing import Always, Guesses, InTurn

NO_EOS: frozenset[int] = frozenset()

MAX_NUM_IDLE_STEPS = 10
"""Steps that may run nothing while there is work: nothing changes meanwhile, so it would stay so."""


def _speculative_config(num_tokens, num_drafted=0):
    if num_drafted:
        return json.dumps({"method": "draft_model", "model": "fake", "num_speculative_tokens": num_drafted})
    return json.dumps({"method": "ngram", "num_speculative_tokens": num_tokens}) if num_tokens else None


def with_embedded(request: Request, positions: range, geometry: Geometry) -> Request:
    """The request with some positions of its prompt as embeddings that stand for the same tokens."""
    token_ids = list(request.prompt_token_ids)
    values_te = np.zeros((len(positions), geometry.embed_width), np.float32)
    values_te[:, 0] = token_ids[positions.start : positions.stop]
    token_ids[positions.start : positions.stop] = [0] * len(positions)
    embeds = with_digests([EmbeddedSpan(positions.start, values_te)], len(token_ids), geometry.block_size)
    return dataclasses.replace(request, prompt_token_ids=tuple(token_ids), embeds=embeds)


@dataclass
class Harness:
    executor: FakeExecutor = field(default_factory=lambda: FakeExecutor(max_num_batched_tokens=16))
    overlap: bool = True
    max_num_queued_reqs: int = 64
    eos_token_ids: frozenset[int] = NO_EOS
    policy: str = "fcfs"
    batching: str = "continuous"
    preemption_mode: str = "recompute"
    kv_policy: str = "paged"
    eviction_policy: str = "lru"
    enable_prefix_caching: bool = True
    max_cached_tokens: int | None = None
    outgrown_len: int | None = None
    max_pinned_blocks: int | None = None
    max_inter_token_latency: float | None = 0.0
    num_scheduler_steps: int = 1
    long_prefill_token_threshold: int = 0
    refuse_late: bool = True
    queue_timeout: float | None = None
    make_stores: Callable[[FakeExecutor], tuple[EngineStore, ...]] | None = None
    num_speculative_tokens: int = 0  # of somebody who knows what comes, mostly
    nums_rounds: tuple[int, ...] = (16,)  # of each dispatch in turn, where the executor has a draft model
    max_num_steps: int = 20_000

    def __post_init__(self):
        self.clock = VirtualClock()
        self.tokenizer = ByteTokenizer()
        config = EngineConfig().replace(
            max_num_queued_reqs=self.max_num_queued_reqs,
            overlap=self.overlap,
            policy=self.policy,
            batching=self.batching,
            preemption_mode=self.preemption_mode,
            kv_policy=self.kv_policy,
            eviction_policy=self.eviction_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            max_pinned_blocks=self.max_pinned_blocks,
            max_inter_token_latency=self.max_inter_token_latency,
            num_scheduler_steps=self.num_scheduler_steps,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            refuse_late=self.refuse_late,
            queue_timeout=self.queue_timeout,
            enable_sleep_mode=True,
            speculative_config=_speculative_config(
                self.num_speculative_tokens, self.executor.geometry.num_speculative_tokens
            ),
        )
        self.engine = Engine(
            self.executor,
            self.tokenizer,
            config,
            lengths=RopeLengthLimits(self.max_cached_tokens, self.outgrown_len),
            stores=() if self.make_stores is None else self.make_stores(self.executor),
            eos_token_ids=self.eos_token_ids,
            clock=self.clock,
            make_masks=lambda: FakeMasks(self.executor.geometry.vocab_size),
        )
        self.guesses = Guesses(self.outputs, self.executor.geometry.vocab_size)
        self.adaptation = Always(self.num_speculative_tokens)
        drafter = self.engine._loop._drafter
        if isinstance(drafter, DraftModelSpeculation):
            self.rule = InTurn(*self.nums_rounds)
            drafter._rule = self.rule
        elif drafter is not None:
            drafter._proposer, drafter._adaptation = self.guesses, self.adaptation
        self.input_processor = InputProcessor(
            self.tokenizer, self.executor.geometry, eos_token_ids=self.eos_token_ids, max_logprobs=-1
        )
        self.events: dict[str, list[OutputEvent]] = defaultdict(list)
        self.known_outputs: list[list[int]] = []
        self.num_steps = self.num_idle_steps = 0

    def submit(
        self,
        request_id,
        prompt,
        *,
        deadline_s=None,
        tenant="",
        cache_tenant="",
        is_whole=False,
        adapter=None,
        grammar=None,
        generated=(),
        embedded=range(0),
        **sampling,
    ):
        sampling.setdefault("temperature", 0.0)
        if grammar is not None:
            sampling["structured_outputs"] = StructuredOutputs(regex="which the engine does not read")
        request = self.input_processor.make_request(
            request_id=request_id,
            sampling=SamplingParams(**sampling),
            prompt=Prompt(token_ids=prompt, generated=generated),
            deadline_s=deadline_s,
            tenant=tenant,
            cache_tenant=cache_tenant,
            is_whole=is_whole,
            adapter=adapter,
        )
        if embedded := embedded[: max(0, len(prompt) - embedded.start)]:
            request = with_embedded(request, embedded, self.executor.geometry)
        request = move_grammars(dataclasses.replace(request, grammar=grammar))
        self.engine.submit(request, self.receive)
        return request

    def receive(self, event):
        self.events[event.request_id].append(event)

    def outputs(self):
        """What is generated, as far as it is known."""
        return self.known_outputs

    def step(self):
        """One step, and the checks after it; a life that no longer moves, or does not end, is a failure."""
        self.num_steps += 1
        num_dispatched = self.executor.num_steps
        did_something = self.engine.step()
        self.engine.check()
        is_idle = did_something and self.executor.num_steps == num_dispatched and not self.engine._loop.awaits_tiers
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        if self.num_idle_steps > MAX_NUM_IDLE_STEPS:
            raise AssertionError(f"nothing has run for {self.num_idle_steps} steps, and there is work\n{self.state()}")
        if self.num_steps > self.max_num_steps:
            raise AssertionError(f"no end after {self.num_steps} steps\n{self.state()}")
        return did_something

    def run(self):
        """Steps until there is no work."""
        while self.step():
            """`step` bounds it."""

    def state(self):
        """What everybody holds and waits for."""
        lines = [f"{self.engine._loop.memory.use()}, {self.engine._loop.scheduler.queues.num_rows} rows taken"]
        for group in self.engine._loop.scheduler.queues.groups():
            lines.append(f"{group.request.request_id} {group.status.value}, {group.num_preemptions} preemptions:")
            lines += [
                f"    {sequence.status.value}: {sequence.num_computed_tokens} of {sequence.num_tokens} tokens computed,"
                f" blocks {sequence.kv.ids_gm.tolist()},"
                f" in host memory {[table.block_ids() for table in sequence.kv.host_tables]}"
                for sequence in group.sequences
            ]
        return "\n".join(lines)

    def tokens(self, request_id, index=0):
        return [token for event in self.events[request_id] if event.index == index for token in event.token_ids]

    def text(self, request_id, index=0):
        return "".join(event.text for event in self.events[request_id] if event.index == index)

    def ended(self, request_id):
        """Whether the request has had its last event."""
        events = self.events[request_id]
        return bool(events) and events[-1].is_last

    def last(self, request_id):
        """The request's last event; there is exactly one, and it is at the end."""
        events = self.events[request_id]
        assert [event.is_last for event in events].count(True) == 1, events
        assert events[-1].is_last
        return events[-1]


class CheckedHarness(Harness):
    """Compares every token with what it must be when it comes.

    Attributes:
        expected: the tokens of every sequence that a request returns, by the request's id.
    """

    expected: dict[str, list[list[int]]]

    def __post_init__(self):
        super().__post_init__()
        self.expected = {}

    def outputs(self):
        return [output for outputs in self.expected.values() for output in outputs]

    def receive(self, event):
        expected = self.expected[event.request_id][event.index]  # no event comes of a request that was dropped
        begin = len(self.tokens(event.request_id, event.index))
        assert list(event.token_ids) == expected[begin : begin + len(event.token_ids)]
        super().receive(event)
