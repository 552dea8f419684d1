"""An engine over the fake executor, stepped by hand, that remembers every event."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from jpaged.engine.engine import Engine, EngineOptions
from jpaged.engine.intake import Intake
from jpaged.testing import ByteTokenizer, FakeExecutor, VirtualClock
from jpaged.types import OutputEvent, SamplingParams

NO_EOS: frozenset[int] = frozenset()


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
    enable_prefix_caching: bool = True
    max_cached_tokens: int | None = None

    def __post_init__(self):
        self.clock = VirtualClock()
        self.tokenizer = ByteTokenizer()
        options = EngineOptions(
            max_num_seqs=self.executor.geometry.max_num_seqs,
            max_num_batched_tokens=self.executor.geometry.buckets.tokens[-1],
            max_num_queued_reqs=self.max_num_queued_reqs,
            overlap=self.overlap,
            policy=self.policy,
            batching=self.batching,
            preemption_mode=self.preemption_mode,
            kv_policy=self.kv_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            max_cached_tokens=self.max_cached_tokens,
        )
        self.engine = Engine(self.executor, self.tokenizer, options, eos_token_ids=self.eos_token_ids, clock=self.clock)
        self.intake = Intake(self.tokenizer, self.executor.geometry, eos_token_ids=self.eos_token_ids)
        self.events: dict[str, list[OutputEvent]] = defaultdict(list)
        self.num_steps = 0

    def submit(self, request_id, prompt, *, deadline_s=None, tenant="", **sampling):
        sampling.setdefault("temperature", 0.0)
        request = self.intake.make_request(
            request_id=request_id,
            sampling=SamplingParams(**sampling),
            prompt_token_ids=prompt,
            deadline_s=deadline_s,
            tenant=tenant,
        )
        self.engine.submit(request, self.receive)
        return request

    def receive(self, event):
        self.events[event.request_id].append(event)

    def step(self):
        self.num_steps += 1
        did_something = self.engine.step()
        self.engine.check()
        return did_something

    def run(self, limit=5000):
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"still busy after {limit} steps: {self.engine.load()}")

    def tokens(self, request_id, index=0):
        return [token for event in self.events[request_id] if event.index == index for token in event.token_ids]

    def text(self, request_id, index=0):
        return "".join(event.text for event in self.events[request_id] if event.index == index)

    def last(self, request_id):
        """The request's last event; there is exactly one, and it is at the end."""
        events = self.events[request_id]
        assert [event.is_last for event in events].count(True) == 1, events
        assert events[-1].is_last
        return events[-1]
