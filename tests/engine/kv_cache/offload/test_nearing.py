"""Prefixes in host memory come to the device in parts where others run."""

import pytest

from jpaged.engine.executor import Move
from jpaged.engine.kv_cache import swapper
from jpaged.testing import FakeExecutor, expected_tokens, seeing
from tests.engine.harness import Harness
from tests.engine.lives import WINDOWS, Life

PROMPT = list(range(60, 101))  # ten blocks of four, and one token


class Counting(FakeExecutor):
    """Counts the blocks that come in each step."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.swapped_in: list[int] = []

    def move_blocks(self, moves):
        if moves.move is Move.SWAP_IN:
            self.swapped_in.append(len(moves.sources))
        super().move_blocks(moves)


def make(kind=Counting, num_blocks=26, **options):
    executor = kind(num_blocks=num_blocks, num_host_blocks=200, block_size=4, max_num_batched_tokens=64)
    return Harness(executor=executor, **options)


def put_into_host_memory(h, *prompts):
    """Computes prompts, and others until nothing of them is on the device."""
    for prompt in prompts or (PROMPT,):
        h.submit(f"first {prompt[0]}", prompt, max_tokens=1)
    h.run()
    for number in range(3):
        h.submit(f"fills {number}", [number] * 95, max_tokens=1)
        h.run()


def bound(monkeypatch, h, num_blocks):
    monkeypatch.setattr(swapper, "MAX_PREFETCH_BYTES", num_blocks * h.executor.geometry.bytes_per_block)
    h.executor.swapped_in = []


def bring_back_beside_another(monkeypatch, h):
    """A prompt that host memory has comes while another request runs, three blocks a step at most."""
    put_into_host_memory(h)
    bound(monkeypatch, h, 3)
    h.submit("running", [7] * 5, max_tokens=30, ignore_eos=True)
    h.step()
    h.submit("back", PROMPT, max_tokens=4, ignore_eos=True)
    h.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_others_a_step_brings_a_part_at_most(monkeypatch, overlap):
    h = make(overlap=overlap)
    bring_back_beside_another(monkeypatch, h)
    assert h.executor.swapped_in == [3, 3, 3, 1]
    assert h.last("back").usage.cached_tokens == 40
    assert h.tokens("back") == expected_tokens(PROMPT, 4)
    assert h.tokens("running") == expected_tokens([7] * 5, 30)


def test_where_nobody_runs_all_comes_at_once(monkeypatch):
    h = make()
    put_into_host_memory(h)
    bound(monkeypatch, h, 3)
    h.submit("back", PROMPT, max_tokens=4)
    h.run()
    assert h.executor.swapped_in == [10]


def test_those_who_are_admitted_together_share_a_step(monkeypatch):
    h = make(num_blocks=40)
    put_into_host_memory(h, PROMPT, [130, *PROMPT[1:]])
    bound(monkeypatch, h, 12)
    h.submit("running", [7] * 5, max_tokens=30, ignore_eos=True)
    h.step()
    h.submit("one", PROMPT, max_tokens=4, ignore_eos=True)
    h.submit("two", [130, *PROMPT[1:]], max_tokens=4, ignore_eos=True)
    h.run()
    assert h.executor.swapped_in == [12, 8]
    assert h.last("two").usage.cached_tokens == 40


def test_who_loses_what_comes_is_admitted_all_the_same(monkeypatch):
    h = make()
    put_into_host_memory(h)
    bound(monkeypatch, h, 2)
    prefetcher = h.engine._loop.memory.prefetcher
    monkeypatch.setattr(prefetcher, "_bring", lambda *of: None)  # nothing ever stays
    h.submit("running", [7] * 5, max_tokens=30, ignore_eos=True)
    h.step()
    h.submit("back", PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(9):
        h.step()
    assert h.executor.swapped_in == [10]
    h.run()
    assert h.tokens("back") == expected_tokens(PROMPT, 4)


def test_of_a_window_comes_what_is_seen(monkeypatch):
    h = make(seeing((None, 6), Counting), num_blocks=50)
    bring_back_beside_another(monkeypatch, h)
    assert sum(h.executor.swapped_in) >= 10
    assert max(h.executor.swapped_in) == 3
    assert h.last("back").usage.cached_tokens == 40


@pytest.mark.long
@pytest.mark.parametrize("windows", [(None,), *WINDOWS])
@pytest.mark.parametrize("first", range(0, 6, 2))
def test_lives_are_the_same_however_little_a_step_brings(monkeypatch, first, windows):
    monkeypatch.setattr(swapper, "MAX_PREFETCH_BYTES", 1)
    for seed in range(first, first + 2):
        Life(seed, windows).run()
