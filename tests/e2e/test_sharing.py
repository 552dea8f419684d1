"""Memory is shared, copied, cached, swapped and computed again, and no token changes by it.

Every request's answer alone, in a large pool without a cache and reading all of its context by itself, is held against
its answers in company, in chunks, after preemption of both kinds, and behind a cached prefix; there, every prefix that
two rows share is read once. What is meant to happen is counted, so that no test passes because nothing happened.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jpaged.device.executor import JaxExecutor
from jpaged.server_load import EngineLoad
from jpaged.types import SamplingParams
from tests.e2e.sharing_rig import BLOCK_SIZE, VOCAB_SIZE, Answer, Rig, make_executor
from tests.models.tiny import tiny_case

KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=30),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=2**40 + 3, max_tokens=30, logprobs=0),
    "four": SamplingParams(temperature=1.0, seed=9, n=4, max_tokens=24, logprobs=2),
    "beams": SamplingParams(beam_width=4, n=4, max_tokens=24),
}


Executors = JaxExecutor | Sequence[JaxExecutor]
"""One, or replicas."""


@dataclass(frozen=True, slots=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams

    def __hash__(self) -> int:
        return hash((self.prompt, repr(self.params)))

    def submit(self, rig: Rig) -> Answer:
        return rig.submit(list(self.prompt), self.params)


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, VOCAB_SIZE, length).tolist()


def jobs(kinds: list[str], count: int) -> list[Job]:
    """Requests that share 19 tokens of prompt (two blocks and a part of the third) and differ after it."""
    common = tokens(19, 0)
    return [
        Job((*common, *tokens(3 + 2 * (i % 8), i)), replace(KINDS[kind], seed=None if kind == "beams" else 50 + i))
        for i, kind in enumerate(kinds[i % len(kinds)] for i in range(count))
    ]


def alone(executor: Executors, job: Job) -> Answer:
    rig = Rig(executor, cascade=None)
    answer = job.submit(rig)
    rig.run()
    return answer


@functools.lru_cache(maxsize=64)
def _expected(executor: JaxExecutor | tuple[JaxExecutor, ...], job: Job) -> Answer:
    """The same for every check, so it is computed once for an executor."""
    return alone(executor, job)


def together(rig: Rig, many: list[Job]) -> tuple[list[Answer], EngineLoad]:
    answers = [job.submit(rig) for job in many]
    return answers, rig.run()


def agree(executor: Executors, many: list[Job], answers: list[Answer]) -> None:
    for job, answer in zip(many, answers, strict=True):
        expected = _expected(executor if isinstance(executor, JaxExecutor) else tuple(executor), job)
        assert answer.sequences == expected.sequences
        assert len(answer.sequences) == job.params.n
        for index, value in expected.cumulative_logprobs.items():
            assert answer.cumulative_logprobs[index] == pytest.approx(value, abs=1e-3)


def check_batched(executor: Executors, many: list[Job], **options: Any) -> None:
    answers, load = together(Rig(executor, **options), many)
    assert load.num_preemptions == load.num_prefix_hit_tokens == 0
    assert load.num_cascade_steps > 0 or all(job.params.n == 1 for job in many)
    agree(executor, many, answers)


def check_chunked(executor: Executors, many: list[Job], **options: Any) -> None:
    answers, load = together(Rig(executor, max_num_batched_tokens=8, **options), many)
    assert load.num_steps > sum(len(job.prompt) for job in many) // 8
    agree(executor, many, answers)


def check_swapped(executor: Executors, many: list[Job], **options: Any) -> None:
    """A pool that holds about one request's end."""
    rig = Rig(executor, num_blocks=26, num_host_blocks=120, preemption_mode="swap", **options)
    answers, load = together(rig, many)
    assert load.num_preemptions > 0
    # A group whose last token was on its way when it was swapped out does not come back.
    assert load.num_blocks_swapped_out >= load.num_blocks_swapped_in > 0
    assert load.num_recomputed_tokens == 0
    agree(executor, many, answers)


def check_recomputed(executor: Executors, many: list[Job], **options: Any) -> None:
    rig = Rig(executor, num_blocks=26, num_host_blocks=120, preemption_mode="recompute", **options)
    answers, load = together(rig, many)
    assert load.num_preemptions > 0
    assert load.num_blocks_swapped_out == 0
    assert load.num_recomputed_tokens > 0
    agree(executor, many, answers)


def check_cached(executor: Executors, many: list[Job], **options: Any) -> None:
    """The second time, everything of a prompt but its last token is known; the part of a block is copied.

    With replicas, where it went the first time: one that is too busy by then is passed over, so it is most of them.
    """
    rig = Rig(executor, enable_prefix_caching=True, **options)
    first, _ = together(rig, many)
    second, load = together(rig, many)
    known = [
        answer.num_cached_tokens >= (len(job.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        and answer.num_cached_tokens % BLOCK_SIZE != 0
        for job, answer in zip(many, second, strict=True)
    ]
    assert known.count(True) >= (len(many) if isinstance(executor, JaxExecutor) else 0.6 * len(many)), known
    assert load.num_prefix_hit_tokens >= sum(answer.num_cached_tokens for answer in second)
    assert load.num_cascade_steps > 0
    agree(executor, many, first)
    agree(executor, many, second)


def check_cached_on_the_host(executor: Executors, many: list[Job], **options: Any) -> None:
    """Between the two times others take every block; what was cached comes back from host memory."""
    options = {"enable_prefix_caching": True, "num_blocks": 60, "num_host_blocks": 400, **options}
    rig = Rig(executor, preemption_mode="recompute", **options)
    together(rig, many)
    together(rig, [Job(tuple(tokens(100, i)), replace(KINDS["greedy"], max_tokens=8)) for i in range(8)])
    num_before = rig.engine.load().num_blocks_swapped_in
    second, load = together(rig, many)
    assert load.num_blocks_swapped_out > 0
    assert load.num_blocks_swapped_in > num_before
    agree(executor, many, second)


CHECKS = {
    "batched": check_batched,
    "chunked": check_chunked,
    "swapped": check_swapped,
    "recomputed": check_recomputed,
    "cached": check_cached,
    "cached_on_the_host": check_cached_on_the_host,
}


@pytest.mark.parametrize("check", CHECKS)
def test_answers_do_not_depend_on_where_the_memory_was(executor: JaxExecutor, check: str) -> None:
    """Greedy, sampled, four at once and searched for, all in one engine."""
    CHECKS[check](executor, jobs([*KINDS], 4))


COMPANY = {
    "greedy": jobs(["greedy"], 8),
    "seeded": jobs(["seeded"], 8),
    "four": jobs(["four"], 3),
    "beams": jobs(["greedy", "greedy", "greedy", "beams"], 4),  # beams alone share too much to fill a pool
}
"""So many jobs of each kind that the small pool is too small; one of the kind arrives last and is preempted first."""


@pytest.mark.parametrize("check", [check_swapped, check_recomputed])
def test_beams_go_on_after_preemption(executor: JaxExecutor, check: Callable[[Executors, list[Job]], None]) -> None:
    check(executor, COMPANY["beams"])


@dataclass(frozen=True, slots=True)
class Place:
    """An executor, and what an engine over it must be told."""

    executor: JaxExecutor
    max_cached_tokens: int | None = None


PLACES = ("sharing", "llama3_tied", "qwen3_yarn", "llama_dynamic_long")


def everywhere() -> Iterator[Any]:
    """Every check of every kind in every place, with steps that overlap or not.

    In half of a half of it, which is long, every three but those with a place meet, and every two; the rest is deep.
    """
    for (p, place), (c, check), (k, kind), overlap in itertools.product(
        enumerate(PLACES), enumerate(CHECKS), enumerate(KINDS), (True, False)
    ):
        is_long = (c + k + overlap) % len(PLACES) == p
        yield pytest.param(place, check, kind, overlap, marks=pytest.mark.long if is_long else pytest.mark.deep)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, executor: JaxExecutor) -> Iterator[Callable[[str], Place]]:
    """Makes a place the first time that it is asked for."""
    made = {"sharing": Place(executor)}

    def place(name: str) -> Place:
        if name not in made:
            other = make_executor(tiny_case(name), tmp_path_factory.mktemp(name))
            made[name] = Place(other, 64 if "dynamic" in name else None)
        return made[name]

    yield place
    for other in made.values():
        if other.executor is not executor:
            other.executor.shutdown()


@pytest.mark.parametrize(("name", "check", "kind", "overlap"), [*everywhere()])
def test_every_kind_of_request_in_every_place(
    places: Callable[[str], Place], name: str, check: str, kind: str, overlap: bool
) -> None:
    place = places(name)
    CHECKS[check](place.executor, COMPANY[kind], overlap=overlap, max_cached_tokens=place.max_cached_tokens)


def test_preemption_picks_the_cheaper_way_by_what_was_measured(executor: JaxExecutor) -> None:
    many = jobs([*KINDS], 4)
    answers, load = together(Rig(executor, num_blocks=26, num_host_blocks=120, preemption_mode="auto"), many)
    assert load.num_preemptions > 0
    agree(executor, many, answers)


# --- what sharing saves ---------------------------------------------------------------------------------------------


def test_eight_samples_hold_a_long_prompt_once(executor: JaxExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    """1 003 tokens: 125 full blocks are shared, the 126th is copied by all but one, and each adds two of its own."""
    rig = Rig(executor)
    params = SamplingParams(temperature=1.0, seed=1, n=8, max_tokens=20)
    answer = rig.submit(tokens(1003, 1), params)
    load = rig.run()
    num_full, num_own = 1003 // BLOCK_SIZE, -(-1023 // BLOCK_SIZE) - 1003 // BLOCK_SIZE
    unshared = 8 * -(-1023 // BLOCK_SIZE)
    with capsys.disabled():
        print(f"\n8 samples of a 1003-token prompt: {load.peak_blocks_used} blocks at the peak, {unshared} unshared")
    assert load.peak_blocks_used == num_full + 8 * num_own
    assert load.num_copies_on_write == 7
    assert load.num_prompt_tokens == 1003
    assert len({tuple(sequence) for sequence in answer.sequences}) == 8


def test_beams_share_what_they_have_in_common(executor: JaxExecutor) -> None:
    rig = Rig(executor)
    rig.submit(tokens(203, 2), SamplingParams(beam_width=4, max_tokens=40))
    load = rig.run()
    assert load.num_copies_on_write > 0
    assert load.peak_blocks_used < 203 // BLOCK_SIZE + 4 * (-(-243 // BLOCK_SIZE) - 203 // BLOCK_SIZE)


LONG = tokens(600, 5)
LONG_JOBS = {
    "eight_samples": [Job(tuple(LONG), SamplingParams(temperature=1.0, seed=3, n=8, max_tokens=20))],
    "four_beams": [Job(tuple(LONG), SamplingParams(beam_width=4, n=4, max_tokens=20))],
    "sixteen_requests": [
        Job((*LONG, *tokens(3 + i, i)), SamplingParams(temperature=0.0, max_tokens=20)) for i in range(16)
    ],
}


@pytest.mark.parametrize("name", LONG_JOBS)
def test_a_long_prefix_is_read_once_where_that_pays(executor: JaxExecutor, name: str) -> None:
    """By what the device says that it costs; steps that do not know how are the truth."""
    many = LONG_JOBS[name]
    assert executor.geometry.cascade is not None
    rig = Rig(executor, cascade=executor.geometry.cascade, enable_prefix_caching=True)
    answers, load = together(rig, many)
    num_rows = 4 if name == "four_beams" else 8
    assert load.num_cascade_steps >= 19
    assert load.num_cascade_tokens >= 19 * (num_rows - 1) * 512
    agree(executor, many, answers)


def test_sixty_four_requests_compute_their_common_prefix_once(executor: JaxExecutor) -> None:
    """341 tokens: 42 blocks are shared, and 5 tokens of the 43rd are had by copying it."""
    common, params = tokens(341, 3), SamplingParams(temperature=0.0, max_tokens=2)
    many = [Job((*common, 3 + i, *tokens(10, i)), params) for i in range(64)]
    rig = Rig(executor, enable_prefix_caching=True)
    answers, load = together(rig, many)
    assert load.num_prefix_query_tokens == 64 * 352
    assert answers[0].num_cached_tokens == 0
    assert [answer.num_cached_tokens for answer in answers[1:]] == [341] * 63
    assert load.num_prefix_hit_tokens == 63 * 341
    agree(executor, many[::16], answers[::16])


def test_a_request_of_another_salt_never_hits(executor: JaxExecutor) -> None:
    prompt = tokens(181, 4)
    rig = Rig(executor, enable_prefix_caching=True)

    def ask(salt: str, *, use: bool = True) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=2, cache_salt=salt, use_prefix_cache=use)
        return rig.answer(prompt, params).num_cached_tokens

    assert [ask("a"), ask("a")] == [0, 176]
    assert [ask(f"b{i}") for i in range(4)] == [0] * 4
    assert [ask("a", use=False), ask("")] == [0, 0]
    assert ask("a") == 176
