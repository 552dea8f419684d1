"""Slots of recurrent state: shared by forks, exclusive to a writer, and never more than there are sequences."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import CacheOptions
from jpaged.engine.kv_cache.blocks import SequenceBlocks, StateSlots
from jpaged.engine.kv_cache.paged import make_memory
from jpaged.errors import InternalError, Unsupported
from jpaged.testing import FakeExecutor
from tests.engine.groups import computed, group_of


def handle() -> SequenceBlocks:
    return SequenceBlocks(4, None)


def test_a_fork_shares_a_slot_and_the_first_writer_reads_it_for_another() -> None:
    slots, parent, child = StateSlots(3), handle(), handle()
    slots.prepare(parent)
    assert (parent.state_source, parent.state_slot) == (1, 1)
    slots.fork(parent, child)
    slots.prepare(parent)
    assert (parent.state_source, parent.state_slot) == (1, 2)
    slots.prepare(child)
    assert (child.state_source, child.state_slot) == (1, 1)
    slots.prepare(parent)
    assert (parent.state_source, parent.state_slot) == (2, 2)
    slots.check([parent, child])
    for each in (parent, child):
        slots.release(each)
        slots.release(each)
    assert slots.num_free == 3


def test_more_sequences_than_slots_are_an_error() -> None:
    slots = StateSlots(1)
    slots.prepare(handle())
    with pytest.raises(InternalError, match="all 1 slots"):
        slots.prepare(handle())
    with pytest.raises(InternalError, match="state slot 1 has 1 references, but 0"):
        slots.check([])


ACTS = ["begin", "run", "fork", "release", "draft", "abort"]


@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 5)), max_size=60))
def test_every_sequence_reads_its_own_state(acts: list[tuple[str, int]]) -> None:
    """The contents of slots are modeled: a run appends to what its sequence has read.

    Drafts are run after it, each in its own slot, and some of the first ones are accepted.
    """
    slots, contents, live, count = StateSlots(6), dict[int, str](), list[tuple[SequenceBlocks, list[str]]](), 0
    for act, which in acts:
        if act == "begin" and len(live) < 6:
            live.append((handle(), []))
        elif live:
            kv, history = live[which % len(live)]
            if act in ("run", "draft", "abort"):
                count += 1
                slots.prepare(kv)
                before = contents[kv.state_source] if history else ""
                assert before == "".join(history)
                history.append(f"{count};")
                contents[kv.state_slot] = before + history[-1]
                num_drafts = 0 if act == "run" else slots.num_drafts(3)
                slots.add_drafts(kv, num_drafts)
                assert len({kv.state_slot, *kv.draft_slots}) == 1 + num_drafts
                for place, slot in enumerate(kv.draft_slots):
                    contents[slot] = contents[kv.state_slot] + "".join(f"{count}.{n};" for n in range(place + 1))
                slots.check(kv for kv, _ in live)
            if act == "draft":
                num_accepted = min(which, num_drafts)
                history += [f"{count}.{n};" for n in range(num_accepted)]
                slots.accept(kv, [kv.state_slot, *kv.draft_slots][num_accepted])
                assert kv.draft_slots == ()
            elif act in ("abort", "release"):  # drafts may be in flight
                slots.release(kv)
                live.pop(which % len(live))
            elif act == "fork" and len(live) < 6:
                live.append((handle(), list(history)))
                slots.fork(kv, live[-1][0])
        slots.check(kv for kv, _ in live)
    for kv, _ in live:
        slots.release(kv)
    assert slots.num_free == 6


def test_a_memory_with_state_caches_and_swaps_nothing_and_must_be_paged() -> None:
    fake = FakeExecutor(num_blocks=8, num_host_blocks=8)
    geometry = dataclasses.replace(fake.geometry, state_bytes=64)
    executor: Any = SimpleNamespace(geometry=geometry, rates=fake.rates, host_blocks=None)
    memory = make_memory(executor, CacheOptions(), None, ())
    assert (memory.prefixes, memory.swapping, memory.host, memory.prefetcher) == (None, None, None, None)
    with pytest.raises(Unsupported, match="kv_policy reserve-max has no slots"):
        make_memory(executor, CacheOptions(kv_policy="reserve-max"), None, ())


def test_a_fork_of_a_sequence_shares_its_state() -> None:
    fake = FakeExecutor(num_blocks=8)
    geometry = dataclasses.replace(fake.geometry, state_bytes=64)
    executor: Any = SimpleNamespace(geometry=geometry, rates=fake.rates, host_blocks=None)
    memory, group = make_memory(executor, CacheOptions(), None, ()), group_of(3, n=2)
    computed(memory, group)
    parent, child = (sequence.kv for sequence in group.live)
    assert child.state_slot == parent.state_slot == 1
    memory.check([group])


def test_drafts_take_free_slots_and_those_of_checkpoints_but_no_pinned_ones() -> None:
    slots, kv = StateSlots(5, 3), SequenceBlocks(8, b"root")
    keys = [bytes([place]) * 32 for place in range(3)]
    for place, key in enumerate(keys):
        slots.prepare(kv)
        slots.checkpoint(kv, place + 1, keys[: place + 1], is_lasting=True)
        assert key in slots
    slots.prepare(kv)
    assert slots.pin(keys[1])
    assert (slots.num_free, slots.num_drafts(9)) == (1, 3)
    slots.add_drafts(kv, 3)
    assert [key in slots for key in keys] == [False, True, False]
    assert slots.num_drafts(1) == 0
    slots.accept(kv, kv.draft_slots[1])
    assert slots.num_drafts(9) == 3
    slots.check([kv])
