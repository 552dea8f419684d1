"""Which groups fit, grow and come back, asked of the memory alone: every number worked out by hand."""

import pytest

from jpaged.engine.sequence import Status
from jpaged.errors import InternalError
from tests.engine.groups import computed, group_of, num_swapped_blocks, paged_memory


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_sampled", "num_samples", "num_outstanding_blocks"),
    [
        (6, 0, 1, 2),
        (6, 0, 3, 2 + 1 + 1),  # the second block is not full: each writes to one of its own
        (8, 0, 3, 2),
        (8, 3, 3, 2 + 3),
        (6, 3, 2, 1 + 2 * 2),
    ],
)
def test_a_waiting_group_is_promised_what_all_of_its_samples_need(
    num_prompt_tokens, num_sampled, num_samples, num_outstanding_blocks
):
    memory, group = paged_memory(24), group_of(num_prompt_tokens, n=num_samples)
    for sequence in group.sequences:
        sequence.token_ids += [200] * num_sampled
    assert memory.num_outstanding_blocks(group) == num_outstanding_blocks
    assert not paged_memory(num_outstanding_blocks - 1).can_admit(group, 0)
    assert paged_memory(num_outstanding_blocks).can_admit(group, 0)


def grows(memory, shares):
    """Whether every sequence finds blocks for so many tokens more, by trying it."""
    try:
        for sequence, num_tokens in shares:
            memory.grow(sequence, num_tokens)
    except InternalError:
        return False
    return True


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize(("num_samples", "num_writers"), [(1, 1), (2, 2), (3, 2), (3, 3)])
def test_whoever_can_grow_grows_and_who_cannot_does_not(num_samples, num_writers, num_tokens):
    # All tail lengths of a prompt and all numbers of free blocks; who does not write keeps the shared block as it is.
    answers = set()
    for num_prompt_tokens in range(4, 9):
        for num_free in range(9):
            memory = paged_memory(24)
            shares = [(s, num_tokens) for s in computed(memory, group_of(num_prompt_tokens, n=num_samples)).live]
            memory._pool.allocate(24 - memory.use().num_referenced - num_free)
            can_grow = memory.can_grow(shares[:num_writers])
            assert can_grow == grows(memory, shares[:num_writers]), (num_prompt_tokens, num_free)
            answers.add(can_grow)
    assert answers == {False, True}


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_needed"),
    [
        (6, 2 + 1),  # two blocks that both share; the first of them to write copies the second
        (8, 2 + 2),  # two full ones that both share, and one of its own for each
    ],
)
@pytest.mark.parametrize("num_spare", [0, 2])
def test_a_swapped_group_comes_back_when_its_blocks_and_its_next_ones_are_there(
    num_prompt_tokens, num_needed, num_spare
):
    memory = paged_memory(12, num_host_blocks=2)
    assert memory.swapping is not None
    group = computed(memory, group_of(num_prompt_tokens, n=2))
    assert memory.swapping.can_swap_out(group)
    memory.swapping.swap_out(group)
    group.move_to(Status.SWAPPED)
    assert (memory.use().num_referenced, num_swapped_blocks(memory)) == (0, 2)
    memory._pool.allocate(12 - num_needed - num_spare)
    assert memory.swapping.can_swap_in(group, num_spare)
    memory._pool.allocate(1)
    assert not memory.swapping.can_swap_in(group, num_spare)


def test_what_a_swapped_group_brings_back_is_found_by_its_prefix():
    memory = paged_memory(6, num_host_blocks=2)
    assert memory.swapping is not None
    assert memory.prefixes is not None
    group = computed(memory, group_of(8))
    memory.swapping.swap_out(group)
    key = group.live[0].kv.keys(group.live[0].token_ids, 2, 4)[1]
    assert memory.prefixes.has_prefix(key)  # it left its blocks behind, until they are reissued
    taken = computed(memory, group_of(24, first=100))  # host memory is full of the group itself
    assert not memory.prefixes.has_prefix(key)
    memory.release(taken.live[0])
    memory.swapping.swap_in(group)
    memory.prefixes.register_full_blocks(group.live[0])
    assert memory.prefixes.has_prefix(key)
    assert memory.admit(group_of(9)) == 8
