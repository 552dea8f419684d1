"""Rows of several adapters in one step, in the slots that there are; what each computes is found by its own alone."""

import dataclasses
import gc
import weakref
from concurrent.futures import Future

import pytest

from jpaged.engine.lora import LoRASlots
from jpaged.errors import InternalError, NotFound
from jpaged.testing import FakeAdapter, FakeExecutor, SeveralStepsExecutor, expected_tokens, with_adapters
from jpaged.types import Adapter, FinishReason, LoadedAdapter
from tests.engine.data_parallel.fleet import PREFIX, Fleet
from tests.engine.groups import group_of
from tests.engine.harness import Harness
from tests.engine.kv_cache.oracle import expected_outputs

WEIGHTS = {"a": 3, "b": 70, "c": 5}
A, B, C = (LoadedAdapter(name, "", i, FakeAdapter(weight)) for i, (name, weight) in enumerate(WEIGHTS.items(), 1))
PROMPT = list(range(10, 24))


class Noting(SeveralStepsExecutor):
    """Notes which slots each step names, and what was loaded where."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.steps, self.loads = [], []

    def load_adapter(self, slot, adapter):
        self.loads.append((slot, adapter))
        super().load_adapter(slot, adapter)

    def forward(self, inputs):
        assert not inputs.adapters_t[inputs.num_tokens :].any()
        self.steps.append(set(inputs.adapters_t[: inputs.num_tokens].tolist()))
        return super().forward(inputs)


def harness(max_loras=2, *, sizes=None, **options):
    executor = with_adapters(max_loras, Noting)(**{"max_num_batched_tokens": 64, "num_blocks": 64, **(sizes or {})})
    return Harness(executor=executor, **options)


def tokens_of(adapter, prompt=PROMPT, num_tokens=8):
    return expected_tokens(prompt, num_tokens, weight=0 if adapter is None else WEIGHTS[adapter.name])


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_rows_of_adapters_and_of_none_run_in_one_step(num_scheduler_steps):
    h = harness(num_scheduler_steps=num_scheduler_steps)
    adapters = {"a": A, "plain": None, "b": B, "a too": A}
    for name, adapter in adapters.items():
        h.submit(name, PROMPT, adapter=adapter, max_tokens=8)
    h.run()
    assert {name: h.tokens(name) for name in adapters} == {name: tokens_of(one) for name, one in adapters.items()}
    assert {0, 1, 2} in h.executor.steps
    assert h.executor.loads == [(1, A.matrices), (2, B.matrices)]  # once each


@pytest.mark.parametrize(
    "sampling", [{"n": 3, "temperature": 1.0, "seed": 4}, {"beam_width": 2, "n": 2}], ids=["samples", "beams"]
)
def test_every_sequence_of_a_request_has_its_adapter(sampling):
    h = harness()
    request = h.submit("many", PROMPT, adapter=B, max_tokens=6, **sampling)
    h.submit("plain", PROMPT[:3], max_tokens=6)
    h.run()
    outputs = expected_outputs(PROMPT, request.sampling, weight=WEIGHTS["b"])
    assert [h.tokens("many", index) for index in range(request.sampling.n)] == outputs


def test_rows_that_take_the_place_of_others_keep_their_adapter():
    h = harness(3)
    requests = {"a": (A, 3), "b": (B, 9), "plain": (None, 6), "c": (C, 12)}
    for name, (adapter, num_tokens) in requests.items():
        h.submit(name, PROMPT, adapter=adapter, max_tokens=num_tokens)
    h.run()
    assert [h.tokens(name) for name in requests] == [tokens_of(one, num_tokens=n) for one, n in requests.values()]


def test_who_finds_no_slot_waits_and_all_behind_wait_their_turn():
    h = harness(1)
    for name, adapter in {"a": A, "b": B, "plain": None, "a again": A}.items():
        h.submit(name, PROMPT, adapter=adapter, max_tokens=3)
    h.step()
    running = h.engine._loop.scheduler.queues.running
    assert [group.request.request_id for group in running] == ["a"]
    h.run()
    assert [h.tokens(name) for name in ("a", "b", "plain", "a again")] == [
        tokens_of(one, num_tokens=3) for one in (A, B, None, A)
    ]
    assert [matrices for _, matrices in h.executor.loads] == [A.matrices, B.matrices, A.matrices]


def test_the_slot_that_was_held_longest_ago_is_overwritten():
    h = harness(2)
    for adapter in (A, B, A, C, A):
        h.submit(f"{len(h.events)}", PROMPT, adapter=adapter, max_tokens=2)
        h.run()
    assert h.executor.loads == [(1, A.matrices), (2, B.matrices), (2, C.matrices)]


@pytest.mark.parametrize("end", ["abort", "drop", "deadline", "stop"])
def test_a_slot_comes_back_however_a_request_ends(end):
    h = harness(1)
    h.submit("a", PROMPT, adapter=A, max_tokens=50, deadline_s=5.0 if end == "deadline" else None)
    h.submit("b", PROMPT, adapter=B, max_tokens=3)
    for _ in range(4):
        h.step()
    assert not h.events["b"]
    if end == "abort":
        h.engine.abort("a")
    elif end == "drop":
        h.engine.drop("a")
    elif end == "deadline":
        h.clock.advance(6.0)
    h.run()
    assert h.tokens("b") == tokens_of(B, num_tokens=3)
    assert end != "abort" or h.last("a").finish.reason is FinishReason.ABORT


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_group_goes_on_with_its_adapter_wherever_it_is(mode):
    sizes = {"num_blocks": 14, "num_host_blocks": 20 if mode == "swap" else 0, "max_num_seqs": 4}
    h = harness(2, sizes=sizes, preemption_mode=mode)
    prompts = {"a": PROMPT, "b": PROMPT[::-1], "c": PROMPT[3:]}
    for (name, prompt), adapter in zip(prompts.items(), (A, B, C), strict=True):
        h.submit(name, prompt, adapter=adapter, max_tokens=24)
    h.run()
    load = h.engine.load()
    assert load.num_preemptions > 0
    assert (load.num_blocks_swapped_in > 0) == (mode == "swap")
    for (name, prompt), adapter in zip(prompts.items(), (A, B, C), strict=True):
        assert h.tokens(name) == tokens_of(adapter, prompt, 24)


def test_static_batches_give_slots_back_too():
    h = harness(1, batching="static")
    for name, adapter, num_tokens in (("a", A, 2), ("a longer", A, 9), ("b", B, 3)):
        h.submit(name, PROMPT, adapter=adapter, max_tokens=num_tokens)
    h.run()
    assert h.tokens("b") == tokens_of(B, num_tokens=3)


def test_a_waiting_request_of_higher_priority_takes_the_slot():
    h = harness(1, policy="priority")
    h.submit("a", PROMPT, adapter=A, max_tokens=30, priority=1)
    for _ in range(3):
        h.step()
    h.submit("b", PROMPT, adapter=B, max_tokens=2, priority=0)
    h.run()
    assert h.tokens("a") == tokens_of(A, num_tokens=30)
    assert [matrices for _, matrices in h.executor.loads] == [A.matrices, B.matrices, A.matrices]


@pytest.mark.parametrize(("holder", "num_preempted"), [(0, 0), (4, 1)], ids=["held on to", "comes free"])
def test_only_who_gives_the_slot_is_preempted_for_it(holder, num_preempted):
    h = harness(1, sizes={"max_num_seqs": 16, "num_blocks": 200}, policy="priority")
    h.submit("a", PROMPT, adapter=A, max_tokens=12, priority=holder)
    for index in range(8):
        h.submit(f"plain {index}", PROMPT, max_tokens=12, priority=5)
    while not h.events["plain 7"]:
        h.step()
    h.submit("b", PROMPT, adapter=B, max_tokens=4, priority=1)
    h.run()
    assert h.engine.load().num_preemptions == num_preempted
    assert h.tokens("b") == tokens_of(B, num_tokens=4)
    assert h.tokens("plain 0") == tokens_of(None, num_tokens=12)


def test_prefixes_are_found_by_the_same_load_of_an_adapter_alone():
    h = harness(4)
    anew = dataclasses.replace(A, number=9, matrices=FakeAdapter(8))  # of the same name
    for name, adapter in {"none": None, "a": A, "b": B, "anew": anew}.items():
        h.submit(name, PROMPT, adapter=adapter, max_tokens=2)
        h.run()
        assert h.last(name).usage.cached_tokens == 0
        h.submit(f"{name} again", PROMPT, adapter=adapter, max_tokens=2)
        h.run()
        assert h.last(f"{name} again").usage.cached_tokens == 12


def test_a_prefix_is_pinned_for_an_adapter():
    h = harness()
    pinned = h.engine.pin_prefix("p", PROMPT, adapter=B)
    h.run()
    assert pinned.result() == 12
    for name, adapter in (("none", None), ("b", B)):
        h.submit(name, PROMPT, adapter=adapter, max_tokens=2)
        h.run()
        assert (h.last(name).usage.cached_tokens >= 12) == (adapter is B)
    assert h.engine.unpin_prefix("p")


def test_a_replica_is_chosen_by_the_prefix_of_the_same_adapter():
    fleet = Fleet(2, kind=with_adapters(2))
    assert fleet.ask("a", PREFIX, adapter=A) == 0
    assert fleet.place("busy", PREFIX[::-1]) == 0
    assert fleet.place("same", PREFIX, adapter=A) == 0
    assert fleet.place("other", PREFIX, adapter=B) == 1
    fleet.run()
    assert fleet.tokens("other") == tokens_of(B, PREFIX, 4)


def test_an_adapter_leaves_host_memory_with_its_last_request():
    class Watched(FakeAdapter):
        """An adapter that is seen to go."""

    h, adapter = Harness(executor=with_adapters(1)()), LoadedAdapter("a", "", 1, Watched(3))
    watch = weakref.ref(adapter.matrices)
    h.submit("a", PROMPT, adapter=adapter, max_tokens=3)
    del adapter
    assert watch() is not None
    h.run()
    gc.collect()
    assert watch() is None
    assert h.tokens("a") == tokens_of(A, num_tokens=3)


def evicted(name="b"):
    """An adapter that has left host memory, and the read that its engine waits for."""
    read: Future[Adapter] = Future()
    adapter = LoadedAdapter(name, "", 9, FakeAdapter(WEIGHTS[name]), lambda one: read)
    adapter.set_matrices(None)
    return adapter, read


def test_a_request_waits_until_its_adapter_is_read_again_while_others_run():
    h, (adapter, read) = harness(2), evicted()
    h.submit("a", PROMPT, adapter=A, max_tokens=8)
    h.step()
    h.submit("b", PROMPT, adapter=adapter, max_tokens=3)
    h.submit("behind", PROMPT, max_tokens=3)
    while not (h.events["a"] and h.events["a"][-1].is_last):
        h.step()
    assert h.tokens("a") == tokens_of(A)
    assert not h.events["b"] and not h.events["behind"]  # those that come later wait, too
    loop = h.engine._loop
    assert loop.only_awaits and loop.idle_budget_s == 0.001
    read.set_result(FakeAdapter(WEIGHTS["b"]))
    assert not loop.only_awaits and loop.idle_budget_s == 0.0
    h.run()
    assert (h.tokens("b"), h.tokens("behind")) == (tokens_of(B, num_tokens=3), tokens_of(None, num_tokens=3))
    assert adapter.matrices is None  # the device has them
    h.submit("again", PROMPT, adapter=adapter, max_tokens=3)
    h.run()
    assert h.tokens("again") == tokens_of(B, num_tokens=3)
    assert [matrices for _, matrices in h.executor.loads] == [A.matrices, FakeAdapter(WEIGHTS["b"])]


@pytest.mark.parametrize("error", [NotFound("adapter: gone"), ValueError("of the reader")])
def test_only_the_request_whose_adapter_cannot_be_read_fails(error):
    h, (adapter, read) = harness(1), evicted()
    read.set_exception(error)
    h.submit("b", PROMPT, adapter=adapter, max_tokens=3)
    h.submit("c", PROMPT, adapter=C, max_tokens=3)
    h.run()
    failure = h.last("b").error
    assert failure is error if isinstance(error, NotFound) else failure.__cause__ is error
    assert isinstance(failure, NotFound if isinstance(error, NotFound) else InternalError)
    assert h.tokens("c") == tokens_of(C, num_tokens=3)


def test_a_request_that_ends_while_its_adapter_is_read_leaves_nothing():
    h, (adapter, read) = harness(1), evicted()
    h.submit("b", PROMPT, adapter=adapter, max_tokens=3)
    h.step()
    h.engine.abort("b")
    h.submit("c", PROMPT, adapter=C, max_tokens=3)
    read.set_exception(NotFound("adapter: gone"))
    h.run()
    assert h.last("b").finish.reason is FinishReason.ABORT
    assert h.tokens("c") == tokens_of(C, num_tokens=3)


def test_nothing_is_preempted_for_a_request_whose_adapter_is_being_read():
    h, (adapter, read) = harness(1, policy="priority"), evicted()
    h.submit("a", PROMPT, adapter=A, max_tokens=20, priority=1)
    h.step()
    h.submit("b", PROMPT, adapter=adapter, max_tokens=3, priority=0)
    for _ in range(4):
        h.step()
    running = h.engine._loop.scheduler.queues.running
    assert [group.request.request_id for group in running] == ["a"]
    read.set_result(FakeAdapter(WEIGHTS["b"]))
    h.step()
    assert [group.request.request_id for group in running] == ["b"]
    h.run()
    assert (h.tokens("a"), h.tokens("b")) == (tokens_of(A, num_tokens=20), tokens_of(B, num_tokens=3))


def test_without_slots_no_token_has_one():
    h = Harness(executor=FakeExecutor())
    assert h.executor.geometry.max_loras == 0
    h.submit("plain", PROMPT, max_tokens=3)
    h.run()
    assert h.tokens("plain") == tokens_of(None, num_tokens=3)


def test_slots_that_are_miscounted_are_seen():
    slots, group = LoRASlots(2), group_of(4)
    group.request = dataclasses.replace(group.request, adapter=A)
    slots.take(group, A)
    slots.check([group])
    with pytest.raises(InternalError, match="are held by"):
        slots.check([])
    slots.give_back(group)
    slots.check([])
