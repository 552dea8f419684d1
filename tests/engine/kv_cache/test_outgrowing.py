"""Sequences that outgrow their keys begin again: no row reads keys of two kinds, and nothing else shows."""

import numpy as np
import pytest

from jpaged.engine.executor import BlockMoves, Move, StepInputs
from jpaged.testing import FakeExecutor, SeveralStepsExecutor, expected_tokens, seeing
from jpaged.testing.fake_executor import slots_of_blocks
from tests.engine.harness import Harness

LENGTH = 20


def turning(kind: type[FakeExecutor]) -> type[FakeExecutor]:
    """A fake that remembers for which length each key was turned, and holds what a row reads to be of one kind."""

    class Turning(kind):  # type: ignore[misc, valid-type]
        def __init__(self, **sizes):
            super().__init__(**sizes)
            self.are_long = np.zeros(len(self._pool), np.bool_)
            self.are_long_on_host = np.zeros(len(self._host), np.bool_)
            self.num_outgrown = 0

        def move_blocks(self, moves: BlockMoves) -> None:
            super().move_blocks(moves)
            source = self.are_long_on_host if moves.move is Move.SWAP_IN else self.are_long
            destination = self.are_long_on_host if moves.move is Move.SWAP_OUT else self.are_long
            size = self.geometry.block_size
            destination[slots_of_blocks(moves.destinations, size)] = source[slots_of_blocks(moves.sources, size)]

        def forward(self, inputs: StepInputs):
            used = slice(0, inputs.num_tokens)
            are_long_t = inputs.rope_lens_t[used] > LENGTH
            self.are_long[inputs.slots_gt[:, used]] = are_long_t
            last_t = inputs.query_starts_s1[1 : inputs.num_rows + 1] - 1
            has_ended = inputs.is_prev_sampled_t[last_t] & self.have_ended[inputs.prev_sampled_rows_t[last_t]]
            for row in np.flatnonzero(~has_ended):
                is_long = are_long_t[last_t[row]]
                begins = inputs.query_starts_s1[row] == last_t[row] - LENGTH
                self.num_outgrown += int(begins and inputs.kv_lens_s[row] == LENGTH + 1)
                for group, window in enumerate(self.geometry.windows):
                    begin = max(0, inputs.kv_lens_s[row] - window) if window else 0
                    assert (self.are_long[self._get_slots(inputs, row, group, begin)] == is_long).all(), "of one kind"
                assert is_long >= (inputs.kv_lens_s[row] > LENGTH)
            return super().forward(inputs)

    return Turning


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request):
    return request.param


def make(overlap, kind=FakeExecutor, **options):
    sizes = {"num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 32}
    executor = turning(kind)(
        **{name: options.pop(name, size) for name, size in (sizes | {"num_host_blocks": 0}).items()}
    )
    return Harness(executor=executor, overlap=overlap, outgrown_len=LENGTH, max_cached_tokens=LENGTH, **options)


@pytest.mark.parametrize("num_prompt_tokens", [1, 13, LENGTH - 1, LENGTH, LENGTH + 1, 33])
def test_who_grows_beyond_the_length_computes_every_key_again_once(overlap, num_prompt_tokens):
    h, prompt = make(overlap), [i * 7 % 50 for i in range(num_prompt_tokens)]
    h.submit("a", prompt, max_tokens=30)
    h.run()
    assert h.tokens("a") == expected_tokens(prompt, 30)
    is_outgrown = num_prompt_tokens <= LENGTH
    assert h.engine.load().num_recomputed_tokens == (LENGTH + 1 if is_outgrown else 0)
    assert h.executor.num_outgrown == (1 if num_prompt_tokens <= LENGTH + 1 else 0)


def test_who_ends_at_the_length_does_not_begin_again(overlap):
    h = make(overlap)
    h.submit("a", [1, 2, 3], max_tokens=LENGTH + 1 - 3)
    h.run()
    assert h.engine.load().num_recomputed_tokens == 0


@pytest.mark.parametrize("num_steps", [1, 8, -1])
def test_company_steps_of_several_tokens_and_samples_do_not_show(overlap, num_steps):
    h = make(overlap, SeveralStepsExecutor, num_scheduler_steps=num_steps)
    prompts = {f"r{i}": [(i * 37 + j * 11) % 256 for j in range(1 + 4 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        h.submit(name, prompt, max_tokens=30)
    h.submit("samples", [7] * 9, max_tokens=20, n=3, temperature=1.0, seed=5)
    h.run()
    for name, prompt in prompts.items():
        assert h.tokens(name) == expected_tokens(prompt, 30), name
    assert [h.tokens("samples", i) for i in range(3)] == [
        expected_tokens([7] * 9, 20, seed=5, sequence_index=i) for i in range(3)
    ]


def test_beams_begin_again_together(overlap):
    found = []
    for length in (LENGTH, None):
        h = make(overlap) if length else Harness(overlap=overlap)
        h.submit("a", [5, 6, 7], max_tokens=25, beam_width=3, n=3)
        h.run()
        found.append([h.tokens("a", i) for i in range(3)])
    assert found[0] == found[1]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (7,)], ids=str)
def test_where_memory_is_short_nothing_else_happens(overlap, mode, windows):
    num_blocks = 30 if None in windows else 12
    h = make(overlap, seeing(windows), num_blocks=num_blocks, num_host_blocks=60, preemption_mode=mode)
    alone = {}
    for i in range(5):
        one = make(overlap, seeing(windows))
        for harness, name in ((h, f"r{i}"), (one, "alone")):
            harness.submit(name, [i + 1, 5, 9] * 3, max_tokens=24)
        one.run()
        alone[f"r{i}"] = one.tokens("alone")
    h.run()
    assert h.engine.load().num_preemptions > 0
    assert {name: h.tokens(name) for name in alone} == alone


def test_prefixes_are_shared_by_those_whose_keys_are_short(overlap):
    h, prompt = make(overlap), list(range(17))
    for name in ("first", "second"):
        h.submit(name, prompt, max_tokens=20)
        h.run()
        assert h.tokens(name) == expected_tokens(prompt, 20)
    assert h.last("second").usage.cached_tokens == 16
