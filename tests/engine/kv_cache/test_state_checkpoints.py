"""Recurrent state at block boundaries: what prompts find of it, and that each sequence continues from its own.

The fake executor keeps the digest of all tokens that a state has seen, and raises if a row reads another one.
"""

from __future__ import annotations

from collections import Counter

import pytest

from jpaged.engine.kv_cache.blocks import SequenceBlocks, StateSlots
from jpaged.engine.kv_cache.offload.transfer import ReplicaTransfer
from jpaged.engine.kv_cache.prefix_cache import PrefixCacheManager
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.testing import FakeExecutor, SeveralStepsExecutor, SpeculatingExecutor
from tests.engine.harness import Harness
from tests.engine.lives import Life


class Stateful(SeveralStepsExecutor):
    """A fake with recurrent state, and a checkpoint for each two blocks of the pool."""

    state_bytes = 64
    state_checkpoint_blocks = 2


class Scarce(Stateful):
    """A fake with hardly more slots than sequences."""

    state_checkpoint_blocks = 12


class Speculating(SpeculatingExecutor, Scarce):
    """A fake with a draft model as well, of whose tokens each has a slot."""


def make(kind: type[FakeExecutor] = Stateful, *, num_blocks: int = 64, **options) -> Harness:
    executor = kind(num_blocks=num_blocks, max_num_batched_tokens=32, max_model_len=128, num_host_blocks=0)
    return Harness(executor=executor, **options)


def prefixes_of(h: Harness) -> PrefixCacheManager:
    prefixes = h.engine._loop.memory.prefixes
    assert prefixes is not None
    return prefixes


def states_of(h: Harness) -> StateSlots:
    states = prefixes_of(h).states
    assert states is not None
    return states


def cached(h: Harness, name: str, prompt: list[int], **sampling) -> int:
    """Run a request to its end; return its cached tokens."""
    h.submit(name, prompt, **{"max_tokens": 4, **sampling})
    h.run()
    return h.last(name).usage.cached_tokens


def test_a_prompt_hits_the_last_full_block_of_the_one_before():
    h = make()
    prompt = list(range(1, 19))
    assert cached(h, "a", prompt) == 0
    assert cached(h, "b", prompt) == 16
    assert cached(h, "c", [*prompt, 50, 51, 52]) == 16
    load = h.engine.load()
    assert (load.num_state_slots, load.num_state_checkpoints) == (8 + 64 // 2, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_turn_hits_the_generated_tokens_of_the_turn_before(overlap):
    h = make(overlap=overlap)
    first = list(range(1, 11))
    cached(h, "a", first, max_tokens=16)
    said = [*first, *h.tokens("a", 0)]
    assert cached(h, "b", [*said, 60, 61]) == 24  # 26 tokens, of which the last one was not computed
    said += [60, 61, *h.tokens("b", 0)]
    assert cached(h, "c", [*said, 62]) == 28


@pytest.mark.parametrize("overlap", [False, True])
def test_dispatches_of_several_steps_end_at_multiples_of_the_interval(overlap):
    h = make(overlap=overlap, num_scheduler_steps=8)
    first = list(range(1, 11))
    cached(h, "a", first, max_tokens=16)
    assert cached(h, "b", [*first, *h.tokens("a", 0), 60, 61]) == 24


def test_a_checkpoint_in_generated_tokens_replaces_the_one_before():
    h = make()
    cached(h, "a", list(range(1, 11)), max_tokens=40)
    states = states_of(h)
    assert states.num_checkpoints == 6  # after the prompt's last full block and each second one; none is between these


def test_the_third_prompt_hits_what_the_first_two_share():
    """The second one finds the blocks without a state, and leaves one there."""
    h, shared = make(), list(range(1, 14))
    assert cached(h, "a", [*shared, *range(20, 40)]) == 0
    assert cached(h, "b", [*shared, *range(40, 60)]) == 0
    assert cached(h, "c", [*shared, *range(60, 80)]) == 12


def test_prompts_that_arrive_together_share_a_state():
    h, shared = make(), list(range(1, 24))
    for name, own in (("a", [30, 31]), ("b", [40, 41]), ("c", [50])):
        h.submit(name, [*shared, *own], max_tokens=3)
    h.run()
    assert [h.last(name).usage.cached_tokens for name in "abc"] == [0, 20, 20]


def test_a_chunk_ends_at_a_multiple_of_the_interval():
    h = make(num_scheduler_steps=1)
    h.submit("a", list(range(1, 75)), max_tokens=2)
    h.run()
    assert states_of(h).num_checkpoints == 3  # after 32, 64 and 72 tokens


def test_evicted_blocks_take_their_states_with_them():
    h = make(num_blocks=16)
    prompt = list(range(1, 35))
    cached(h, "a", prompt)
    states = states_of(h)
    cached(h, "b", list(range(100, 150)), max_tokens=8)
    index = prefixes_of(h).cache
    assert all(index.find(key) is not None for key in states._checkpoints)
    assert cached(h, "c", prompt) < 32


def test_a_sequence_takes_the_slot_of_a_checkpoint():
    h = make(Scarce, num_blocks=12, max_num_steps=2000)
    assert h.engine.geometry.num_state_slots == 9
    for number in range(3):
        for index in range(8):
            h.submit(f"{number}.{index}", [index + 1, *range(20, 24)], max_tokens=3, temperature=1.0, seed=index)
        h.run()
    states = states_of(h)
    assert states.num_free + states.num_checkpoints == 9


def test_a_reset_removes_every_state():
    h = make()
    prompt = list(range(1, 19))
    cached(h, "a", prompt)
    h.engine.reset_prefix_cache()
    h.engine.step()
    assert states_of(h).num_checkpoints == 0
    assert cached(h, "b", prompt) == 0


def test_a_pinned_prefix_keeps_its_state():
    h = make(Scarce, num_blocks=48, max_pinned_blocks=8)
    for length in (16, 18):
        prompt = [length, *range(2, length + 1)]
        pin = h.engine.pin_prefix(f"p{length}", prompt, "")
        h.run()
        assert pin.result() == 16
        for index in range(12):
            cached(h, f"{length}.{index}", [index + 30, *range(60, 70)])
        assert cached(h, f"{length}.hit", [*prompt, 50]) == 16
    for name in ("p16", "p18"):
        assert h.engine.unpin_prefix(name)
    h.engine.step()
    assert states_of(h).num_pinned == 0


def test_more_pins_than_slots_are_refused():
    class One(Stateful):
        state_checkpoint_blocks = 48

    h = make(One, num_blocks=48, max_pinned_blocks=8)
    pins = []
    for first in (1, 2):
        pins.append(h.engine.pin_prefix(str(first), [first, *range(5, 10)], ""))
        h.run()
    assert pins[0].result() == 4
    with pytest.raises(InvalidArgument, match="no slot for recurrent state can be pinned; 1 are pinned"):
        pins[1].result()


def test_prefixes_with_state_are_not_transferred():
    h = make()
    transfer = ReplicaTransfer(h.engine._loop.memory, h.engine.geometry, None, lambda then: None, [])
    with pytest.raises(Unsupported, match="prefixes cannot be transferred: the model has recurrent state"):
        _ = transfer.tiers


def test_swapped_sequences_keep_their_slots():
    slots, running, away = StateSlots(3, 1), SequenceBlocks(4, None), SequenceBlocks(4, None)
    slots.prepare(away)
    assert slots.can_swap_out(1) and not slots.can_swap_out(2)
    slots.swap_out(away)
    assert not slots.can_swap_out(1)
    slots.prepare(running)
    slots.check([running, away])
    slots.swap_in(away)
    assert slots.can_swap_out(1)
    assert (away.state_source, away.state_slot) == (1, 1)
    slots.swap_out(away)
    slots.release(away)
    assert slots.can_swap_out(1)
    slots.check([running])


def test_a_sequence_that_came_back_is_swapped_again():
    executor = Scarce(num_blocks=12, num_host_blocks=64, max_model_len=44, max_num_batched_tokens=32)
    h = Harness(executor=executor, preemption_mode="swap")
    assert states_of(h).can_swap_out(1) and not states_of(h).can_swap_out(2)
    lens = {"a": 14, "b": 32, "c": 30}
    for first, (name, max_tokens) in enumerate(lens.items(), start=1):
        h.submit(name, [first] * 4, max_tokens=max_tokens)
    h.run()
    load = h.engine.load()
    assert (load.num_preemptions, load.num_recomputed_tokens) == (2, 0)
    assert [len(h.tokens(name)) for name in lens] == list(lens.values())


@pytest.mark.parametrize("kind", [Stateful, Scarce])
@pytest.mark.thinned(4)
def test_lives_continue_from_their_own_state(kind):
    counts: Counter[str] = Counter({"num_accepted_tokens": 0})
    for seed in range(7000, 7008):
        life = Life(seed, kind=kind)
        life.run()
        load = life.h.engine.load()
        if load.speculation is not None:
            counts["num_accepted_tokens"] += load.speculation.num_accepted_tokens
        for name in ("num_preemptions", "num_prefix_hit_tokens", "num_recomputed_tokens", "num_blocks_swapped_in"):
            counts[name] += getattr(load, name)
    assert min(counts.values()) > 0, counts


@pytest.mark.thinned(4)
def test_lives_with_a_draft_model_continue_from_their_own_state():
    num_dispatches = 0
    for seed in range(7100, 7108):
        life = Life(seed, kind=Speculating, nums_rounds=[(16,), (2, 0), (1, 0, 0, 5)][seed % 3])
        life.run()
        num_dispatches += life.h.rule.num_dispatches
    assert num_dispatches > 10
