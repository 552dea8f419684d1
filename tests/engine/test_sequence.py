"""A sequence and its group: each verb on its own, and going back to fewer tokens in any memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.kv_cache.blocks import SequenceBlocks
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.sequence import Sequence, SequenceGroup, Status
from jpaged.errors import InternalError
from tests.engine.groups import group_of, paged_memory, reserved_memory


def decoding(num_prompt_tokens: int = 4) -> Sequence:
    """A sequence whose prompt is computed."""
    sequence = Sequence(0, list(range(num_prompt_tokens)), SequenceBlocks(8, None))
    sequence.set_num_computed_tokens(num_prompt_tokens)
    return sequence


def test_a_token_is_in_flight_from_its_dispatch_until_it_is_collected():
    sequence = Sequence(0, [1, 2, 3], SequenceBlocks(8, None))
    sequence.dispatched(2, 5, samples_token=False)
    assert (sequence.num_computed_tokens, sequence.num_tokens, sequence.num_uncomputed_tokens) == (2, 3, 1)
    sequence.dispatched(1, 6, samples_token=True)
    assert (sequence.num_computed_tokens, sequence.num_tokens, sequence.in_flight_row) == (3, 4, 6)
    sequence.moved_to_row(2)
    sequence.append(9, -0.5)
    assert (sequence.token_ids, sequence.num_in_flight_tokens, sequence.in_flight_row) == ([1, 2, 3, 9], 0, 2)
    assert (sequence.cumulative_logprob, sequence.num_output_tokens, sequence.num_uncomputed_tokens) == (-0.5, 1, 1)


def test_a_beam_takes_the_token_that_was_chosen_for_it():
    sequence = decoding()
    sequence.dispatched(0, 0, samples_token=True)
    sequence.discard_in_flight()
    sequence.replace_as_beam(3, 7, -1.25)
    assert (sequence.index, sequence.token_ids[-1], sequence.cumulative_logprob) == (3, 7, -1.25)
    twin = sequence.branch(4)
    assert (twin.token_ids, twin.index, twin.num_computed_tokens) == (sequence.token_ids, 4, 0)


def test_a_sequence_goes_back_no_further_than_its_prompt_and_never_past_what_is_in_flight():
    sequence = decoding()
    sequence.dispatched(0, 0, samples_token=True)
    with pytest.raises(
        InternalError,
        match="cannot go back to 4 tokens: the sequence has 4 prompt tokens, 4 tokens in total and 1 in flight",
    ):
        sequence.rewind(4)
    sequence.append(5, 0.0)
    with pytest.raises(
        InternalError,
        match="cannot go back to 3 tokens: the sequence has 4 prompt tokens, 5 tokens in total and 0 in flight",
    ):
        sequence.rewind(3)
    with pytest.raises(InternalError, match="cannot go back to 6"):
        sequence.rewind(6)
    sequence.rewind(4)
    assert (sequence.token_ids, sequence.num_computed_tokens) == ([0, 1, 2, 3], 4)


def test_a_group_knows_when_it_got_its_tokens_and_how_often_others_passed_it():
    group = group_of(4)
    assert group.admitted(2) and not group.admitted(4)
    group.scheduled(1.0)
    group.collected(2.0)
    assert (group.last_token_s, group.token_gap_s) == (2.0, None)
    group.collected(2.5)
    assert (group.last_token_s, group.token_gap_s) == (2.5, 0.5)
    group.count_overtaken()
    group.preempted()
    group.sampled(3)
    group.ended("stop")
    told = (group.num_cached_tokens, group.num_overtaken, group.num_preemptions, group.num_sampled_tokens)
    assert (*told, group.ended_by) == (2, 1, 1, 3, "stop")


def test_beams_that_live_on_share_their_prompt_again_when_they_had_to_leave():
    group = group_of(4, n=2)
    group.forked()
    group.continues_as(list(group.sequences))
    assert not group.is_forked  # it waits: its leader runs the prompt first
    group.continues_as(group.sequences[:1])
    assert group.is_forked


MEMORIES: dict[str, Callable[[], KVCacheManager]] = {
    "paged": lambda: paged_memory(24),
    "reserved": lambda: reserved_memory(24, max_model_len=64, policy="reserve-max"),
}


def run(memory: KVCacheManager, group: SequenceGroup, num_tokens: int) -> None:
    """Computes a group's next tokens and collects them; one more stays to be computed."""
    (sequence,) = group.sequences
    for _ in range(num_tokens):
        num_new = sequence.num_uncomputed_tokens
        memory.grow(sequence, num_new)
        sequence.dispatched(num_new, 0, samples_token=True)
        sequence.append(50 + len(sequence.token_ids), 0.0)
        if memory.prefixes is not None:
            memory.prefixes.register_full_blocks(sequence)


@pytest.mark.parametrize("kind", sorted(MEMORIES))
@given(num_prompt=st.integers(1, 9), num_outputs=st.integers(1, 12), kept=st.integers(0, 12), again=st.integers(0, 9))
@settings(max_examples=60)
def test_memory_holds_what_a_sequence_goes_back_to_and_no_more(kind, num_prompt, num_outputs, kept, again):
    memory = MEMORIES[kind]()
    group = group_of(num_prompt)
    memory.admit(group)
    group.move_to(Status.RUNNING)
    run(memory, group, num_outputs)
    (sequence,) = group.sequences
    length = num_prompt + min(kept, num_outputs)
    sequence.rewind(length)
    memory.rewind(sequence)
    assert sequence.kv.tables[0].num_blocks == -(-sequence.num_computed_tokens // 4)
    memory.check([group])
    run(memory, group, again)
    memory.check([group])
    memory.release(sequence)
    memory.check([group])
    assert memory.use().num_referenced == 0


def test_a_block_that_is_written_again_is_not_found_by_what_it_held():
    memory = MEMORIES["paged"]()
    group = group_of(4)
    memory.admit(group)
    group.move_to(Status.RUNNING)
    run(memory, group, 6)
    (sequence,) = group.sequences
    assert memory.prefixes is not None
    keys = list(sequence.kv.keys(sequence.token_ids, 2, 4))
    assert [memory.prefixes.has_prefix(key) for key in keys] == [True, True]
    sequence.rewind(6)
    memory.rewind(sequence)
    assert [memory.prefixes.has_prefix(key) for key in keys] == [True, False]
    sequence.dispatched(0, 0, samples_token=True)
    sequence.append(99, 0.0)
    run(memory, group, 3)
    assert sequence.kv.keys(sequence.token_ids, 2, 4)[1] != keys[1]
    assert memory.prefixes.has_prefix(sequence.kv.keys(sequence.token_ids, 2, 4)[1])


def test_a_block_that_another_holds_too_is_copied_when_it_is_written_again():
    memory = MEMORIES["paged"]()
    group = group_of(8)
    memory.admit(group)
    group.move_to(Status.RUNNING)
    run(memory, group, 5)
    (sequence,) = group.sequences
    twin = sequence.branch(1)
    memory.fork(sequence, twin)
    sequence.rewind(10)
    memory.rewind(sequence)
    held = sequence.kv.tables[0].block_id(2)
    sequence.dispatched(0, 0, samples_token=True)
    sequence.append(99, 0.0)
    run(memory, group, 1)
    assert sequence.kv.tables[0].block_id(2) != held == twin.kv.tables[0].block_id(2)
    assert [len(batch.sources) for batch in memory.take_ops().batches()] == [1]
