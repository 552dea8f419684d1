"""Random lives of an engine whose memory is short, from a number alone, against a model that computes everything again.

A life has a pool that holds a few requests and a host tier that holds a few blocks, families of prompts that begin
alike and come back, samples, beams, priorities, salts, adapters, pins, aborts and drops. Three things are known of each
request: every token (`CheckedHarness`), that it ends, and how much of its prompt others of its salt, tenant and adapter
have computed, which is the most that it may find in the cache.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

from jpaged.errors import InvalidArgument, RequestTooLong
from jpaged.testing import FakeAdapter, SeveralStepsExecutor, seeing, with_adapters, with_embeds
from jpaged.types import FinishReason, LoadedAdapter
from tests.engine.groups import num_swapped_blocks
from tests.engine.harness import CheckedHarness
from tests.engine.kv_cache.oracle import expected_outputs

VOCAB_SIZE = 61
MAX_LEN = 32
SALTS = ("", "", "a", "b")
TENANTS = ("", "", "t")
WINDOWS = ((None, 5), (6,), (None, 3, 3), (None, 12, 2), (9, 4), (None, None, 1))
"""Windows of KV groups: beside what sees everything, one of a token, and models of windows alone."""
STREAMING = (((6, 1),), ((4, 5),), ((3, 2), (1, 2)), ((1, 9),))
"""Windows with first tokens that are seen besides: what is lossy."""
WEIGHTS = (5, 17, 40)
ADAPTERS = tuple(LoadedAdapter("same name", "", i, FakeAdapter(weight)) for i, weight in enumerate(WEIGHTS, 1))
EMBEDDED = 1000
"""What an embedding is above the token that it stands for: equal tokens are other prefixes."""
ANY = -1
"""Ends a text that may go on with any token."""


class Life:
    """One life: `run` lives it to its end.

    Attributes:
        ended: requests that came to their end, by number of samples, width of beams, and whether there was a salt.
        ended_of: requests that came to their end, by adapter.
        texts: what was or will be computed with the prefix cache, by salt, tenant and adapter.
    """

    def __init__(self, seed, windows=(None,), *, max_loras=0, kind=SeveralStepsExecutor, has_embeds=False, **options):
        self.seed, self.random, self.windows = seed, random.Random(seed), windows
        sample, choice = self.random.randint, self.random.choice
        block_size = sample(1, 4)
        self.embedding = random.Random(5 * ~seed) if has_embeds else None
        self.own_texts: dict[str, list[int]] = {}
        kind = with_embeds(kind) if has_embeds else kind
        self.adapters = random.Random(seed).choices([None, *ADAPTERS] if max_loras else [None], k=1000)
        executor = with_adapters(max_loras, seeing(windows, kind))(
            num_blocks=len(windows) * (sample(24, 60) // block_size),
            block_size=block_size,
            max_num_seqs=sample(4, 8),
            max_num_batched_tokens=sample(8, 24),
            max_model_len=MAX_LEN,
            vocab_size=VOCAB_SIZE,
            num_host_blocks=sample(2, 12),
        )
        sampled: dict[str, Any] = {
            "overlap": choice([False, True]),
            "policy": choice(["fcfs", "priority", "priority", "fair"]),
            "preemption_mode": choice(["recompute", "swap", "auto"]),
            "batching": choice(["continuous"] * 5 + ["static"]),
            "enable_prefix_caching": sample(1, 8) > 1,
        }
        sampled["num_scheduler_steps"] = random.Random(2 * ~seed).choice([1, 2, 3, 8])
        sampled["num_speculative_tokens"] = random.Random(3 * ~seed).choice([0, 0, 1, 3, 7])
        # A step of the fake is said to take a microsecond a token: some of these leave prompts less than there is room.
        sampled["max_inter_token_latency"] = random.Random(~seed).choice([0.0, 0.0, 1e-6, 2e-5])
        self.h = CheckedHarness(executor=executor, max_num_steps=6000, **sampled | options)
        # In one of them tokens repeat, so that a block's are those of another place too.
        self.families = [[sample(0, last) for _ in range(MAX_LEN)] for last in (1, VOCAB_SIZE - 1, VOCAB_SIZE - 1)]
        self.requests = {}
        self.texts = defaultdict(list)
        self.pins = {}
        self.ended: Counter[tuple[int, int, bool]] = Counter()
        self.ended_of: Counter[LoadedAdapter | None] = Counter()

    def run(self, num_acts=50):
        acts = [self.arrive] * 10 + [self.step] * 6 + [self.abort, self.drop, self.pin, self.unpin]
        try:
            for _ in range(num_acts):
                self.random.choice(acts)()
            self.end()
        except Exception as error:
            error.add_note(f"of life {self.seed}: {self.h.executor.geometry}\n{self.h.state()}")
            raise

    def prompt(self):
        """The beginning of a family's text, or of what an earlier request has said, and tokens of its own."""
        head = self.random.choice(self.families)
        if self.h.expected and self.random.random() < 0.3:
            name = self.random.choice([*self.h.expected])
            head = [*(token % EMBEDDED for token in self.own_texts[name]), *self.random.choice(self.h.expected[name])]
        head = head[: self.random.randint(0, MAX_LEN // 2)]
        return head + [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(not head, 2))]

    def sampling(self):
        sample = self.random.randint
        shape: dict[str, Any] = self.random.choice(
            [
                {"temperature": 0.0},
                {"temperature": 0.0},
                {"temperature": 1.0, "seed": sample(0, 99)},
                {"temperature": 1.0, "seed": sample(0, 99), "n": sample(2, 4)},
                {"temperature": 1.0, "seed": sample(0, 99), "n": sample(1, 2), "best_of": sample(2, 4)},
                {"temperature": 0.0, "beam_width": (width := sample(1, 4)), "n": sample(1, width)},
            ]
        )
        return shape | {
            "max_tokens": sample(1, 14),
            "priority": sample(-1, 1),
            "cache_salt": self.random.choice(SALTS),
            "use_prefix_cache": sample(1, 10) > 1,
            "stop_token_ids": self.random.choice([(), tuple(range(3))]),
        }

    def arrive(self):
        name, prompt, sampling = f"r{len(self.requests)}", self.prompt(), self.sampling()
        try:
            tenants = {"tenant": self.random.choice("xyz"), "cache_tenant": self.random.choice(TENANTS)}
            adapter = self.adapters[len(self.requests)]
            is_whole, embedded = len(self.requests) % 4 == 3, self.embedded()
            request = self.h.submit(
                name, prompt, is_whole=is_whole, adapter=adapter, embedded=embedded, **tenants, **sampling
            )
        except RequestTooLong:
            return
        except InvalidArgument as error:
            if "max_num_seqs" not in str(error):
                raise
            return
        self.requests[name] = request
        outputs = self.h.expected[name] = expected_outputs(
            prompt,
            request.sampling,
            vocab_size=VOCAB_SIZE,
            windows=self.windows,
            weight=0 if adapter is None else WEIGHTS[adapter.number - 1],
        )
        prompt = self.own_texts[name] = [
            token + EMBEDDED * (position in embedded) for position, token in enumerate(prompt)
        ]
        if self.h.enable_prefix_caching and sampling["use_prefix_cache"]:
            is_known = not (request.sampling.beam_width or request.sampling.best_of)  # else more is sampled than told
            texts = [prompt + output for output in outputs] if is_known else [[*prompt, ANY]]
            self.texts[_owner(request)].append((name, texts))

    def embedded(self):
        """Positions that a request gives as embeddings: often the same ones."""
        if self.embedding is None or self.embedding.random() < 0.3:
            return range(0)
        start = self.embedding.choice([0, 0, 3])
        return range(start, start + self.embedding.choice([4, MAX_LEN]))

    def step(self):
        for _ in range(self.random.randint(1, 6)):
            self.h.step()

    def any_request(self):
        return self.random.choice([*self.h.expected])

    def abort(self):
        if self.h.expected:
            self.h.engine.abort(self.any_request())

    def drop(self):
        if self.h.expected:
            name = self.any_request()
            self.h.engine.drop(name)
            self.h.step()  # an abort that was asked for before may still be told
            del self.h.expected[name]

    def pin(self):
        name, prompt, salt = self.random.choice("pq"), self.prompt(), self.random.choice(SALTS)
        adapter = self.adapters[-len(self.requests)]
        future = self.h.engine.pin_prefix(name, prompt, salt, adapter=adapter)
        if not future.done():
            self.pins[name] = future
            self.texts[salt, "", adapter].append((None, [prompt]))

    def unpin(self):
        for name, future in [*self.pins.items()]:
            if future.done():
                assert self.h.engine.unpin_prefix(name) == (future.exception() is None)
                del self.pins[name]

    def end(self):
        self.h.run()
        self.unpin()
        self.h.step()
        use = self.h.engine._loop.memory.use()
        assert (use.num_referenced, num_swapped_blocks(self.h.engine._loop.memory)) == (0, 0)
        assert not self.pins
        output = self.h.engine._loop._output
        assert not (output._states or output._searches or output._last_events)
        for name in self.h.expected:
            self.check_end(name)

    def check_end(self, name):
        last = self.h.last(name)
        if last.error is not None:
            assert isinstance(last.error, RequestTooLong), last.error  # beside pins
            return
        # Of a request that is told whole, the sequence that is told last may have ended before the others were aborted.
        reasons = {event.finish.reason for event in self.h.events[name] if event.finish is not None}
        if FinishReason.ABORT not in reasons:
            sampling = self.requests[name].sampling
            self.ended_of[self.requests[name].adapter] += 1
            self.ended[(sampling.num_samples, sampling.beam_width or 0, bool(sampling.cache_salt))] += 1
            tokens = [self.h.tokens(name, index) for index in range(len(self.h.expected[name]))]
            assert tokens == self.h.expected[name]
        assert last.usage.cached_tokens <= self.most_to_find(name), f"{name} was told of others' tokens"

    def most_to_find(self, name):
        """Tokens of a prompt that another request of its salt and tenant has in common with it, if it may use any."""
        request = self.requests[name]
        if not request.sampling.use_prefix_cache:
            return 0
        others = [text for other, texts in self.texts[_owner(request)] if other != name for text in texts]
        num_common = max((_num_common(self.own_texts[name], text) for text in others), default=0)
        geometry = self.h.engine.geometry
        sees_first_alone = set(geometry.windows) == {1} and num_common >= geometry.num_sink_tokens > 0
        return len(request.prompt_token_ids) if sees_first_alone else num_common


def _owner(request):
    return request.sampling.cache_salt, request.cache_tenant, request.adapter


def _num_common(left, right):
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if b == ANY:
            return len(left)
        if a != b:
            return i
    return min(len(left), len(right))
