"""Whatever happens in a short memory with a second tier, every token is right and nobody finds what is not theirs."""

import pytest

from tests.engine.lives import Life


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_lives_in_a_short_memory_draw_every_token_as_if_alone(first):
    for seed in range(first, first + 10):
        Life(seed).run()


def test_lives_that_are_swapped_with_tokens_in_flight():
    for seed in range(30):
        Life(seed, overlap=True, preemption_mode="swap").run()


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1800, 100))
def test_many_lives_in_a_short_memory(first):
    for seed in range(first, first + 100):
        Life(seed).run()
