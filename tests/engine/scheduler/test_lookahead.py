"""Several decode steps in one dispatch: the same tokens, in fewer dispatches, where nobody waits."""

import dataclasses
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.engine.executor import MAX_NUM_STEPS, DeviceRates
from jpaged.engine.observers import StepTiming
from jpaged.engine.runners import ArrivalSignal
from jpaged.engine.scheduler.decode_batch import DecodeBatch, StepKind
from jpaged.engine.scheduler.multi_step import NO_NEWCOMERS, MultiStepPolicy
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.testing import Faults, FedExecutor, SeveralStepsExecutor, expected_tokens
from jpaged.types import FinishReason
from tests.engine.harness import Harness


class Counted(SeveralStepsExecutor):
    """Notes the steps of each dispatch."""

    def __init__(self, **options):
        super().__init__(**{"max_num_batched_tokens": 16, **options})
        self.dispatches = []

    def sample(self, hidden, inputs):
        if not self.is_inside:
            self.dispatches.append(1)
        return super().sample(hidden, inputs)

    def decode(self, inputs, sampling, ending_token_ids_rx, num_steps):
        self.dispatches.append(num_steps)
        self.is_inside = True
        try:
            return super().decode(inputs, sampling, ending_token_ids_rx, num_steps)
        finally:
            self.is_inside = False

    is_inside = False


def make(num_steps=8, *, executor=None, **options):
    return Harness(executor=executor or Counted(), num_scheduler_steps=num_steps, **options)


# --- how many ---------------------------------------------------------------------------------------------------------


def test_a_stream_decodes_in_dispatches_of_as_many_steps_as_it_has_left():
    h = make(overlap=False)
    h.submit("a", [1, 2, 3], max_tokens=21, ignore_eos=True)
    h.run()
    assert h.executor.dispatches == [1, 1, 8, 8, 3]  # its prompt, the step that gives it a row, and the rest
    assert h.tokens("a") == expected_tokens([1, 2, 3], 21)
    assert h.engine.load().num_steps == 21


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 8, 16])
def test_the_tokens_are_the_same_however_many_steps_a_dispatch_has(num_steps, overlap):
    h = make(num_steps, overlap=overlap)
    h.submit("greedy", [1, 2, 3], max_tokens=23)
    h.submit("seeded", [4], max_tokens=17, temperature=1.0, seed=5)
    h.submit("samples", [6, 7], max_tokens=9, temperature=1.0, seed=6, n=3)
    h.run()
    assert max(h.executor.dispatches) == min(num_steps, 8)  # one of them has never more than 8 left
    assert h.tokens("greedy") == expected_tokens([1, 2, 3], 23)
    assert h.tokens("seeded") == expected_tokens([4], 17, seed=5)
    for index in range(3):
        assert h.tokens("samples", index) == expected_tokens([6, 7], 9, seed=6, sequence_index=index)
    assert h.engine.load().num_blocks_used == 0


def test_who_arrives_is_admitted_with_the_next_dispatch_and_decodes_beside_the_others():
    h = make(overlap=False)
    h.submit("a", [1], max_tokens=40)
    for _ in range(4):
        h.step()
    assert h.executor.dispatches == [1, 1, 8, 8]
    h.submit("b", [2], max_tokens=30)
    h.step()
    assert h.executor.dispatches[4:] == [1]
    assert len(h.events["b"]) == 1
    h.run()
    assert 8 in h.executor.dispatches[5:]
    assert h.tokens("a") == expected_tokens([1], 40)
    assert h.tokens("b") == expected_tokens([2], 30)


def test_steps_go_one_by_one_while_somebody_waits_for_whom_there_is_a_row():
    h = make(overlap=False, executor=Counted(max_num_seqs=2, num_blocks=6, block_size=4))
    h.submit("a", [1], max_tokens=12)
    h.submit("b", [2] * 9, max_tokens=12)  # finds no blocks beside it
    while not h.ended("a"):
        h.step()
    assert set(h.executor.dispatches) == {1}
    h.run()
    assert max(h.executor.dispatches) > 1


def test_who_waits_for_a_row_leaves_the_others_their_several_steps():
    h = make(overlap=False, executor=Counted(max_num_seqs=2))
    for name, num_tokens in (("a", 12), ("b", 30), ("c", 9)):
        h.submit(name, [ord(name)], max_tokens=num_tokens)
    while not h.ended("a"):
        h.step()
    assert h.executor.dispatches == [1, 1, 8, 2]
    h.step()
    assert len(h.events["c"]) == 1, "it gets the row with the next dispatch"
    h.run()
    for name, num_tokens in (("a", 12), ("b", 30), ("c", 9)):
        assert h.tokens(name) == expected_tokens([ord(name)], num_tokens)


def test_nobody_joins_several_steps_because_these_change_who_is_next():
    """Who is next wants more rows than are free; with the tokens of the steps it is another tenant's turn."""
    h = make(2, overlap=True, policy="fair", executor=Counted(max_num_seqs=4))
    requests = (("a", "y", 4, 7), ("b", "x", 3, 2), ("c", "x", 2, 12), ("d", "z", 2, 12), ("e", "z", 4, 10))
    for name, tenant, n, num_tokens in requests:
        h.submit(name, [ord(name)], max_tokens=num_tokens, temperature=1.0, seed=5, n=n, tenant=tenant)
    h.run()
    assert 2 in h.executor.dispatches
    for name, _, n, num_tokens in requests:
        for index in range(n):
            want = expected_tokens([ord(name)], num_tokens, seed=5, sequence_index=index)
            assert h.tokens(name, index) == want


def test_who_waits_gets_a_row_no_later_than_step_by_step():
    """With a step under way a row is free when that is collected: the one dispatch until then has one step."""
    steps = {}
    for num_steps in (1, 8):
        h = make(num_steps, overlap=True, executor=Counted(max_num_seqs=2))
        for name, num_tokens in (("a", 11), ("b", 40), ("c", 3)):
            h.submit(name, [ord(name)], max_tokens=num_tokens, ignore_eos=True)
        while not h.ended("a"):
            h.step()
        steps[num_steps] = sum(h.executor.dispatches)
        assert max(h.executor.dispatches) == num_steps
        h.run()
        assert h.tokens("c") == expected_tokens([ord("c")], 3)
    assert steps[8] == steps[1]


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 0}, {"beam_width": 2, "n": 1}, {"min_tokens": 12, "stop_token_ids": (250,)}],
    ids=["logprobs", "beams", "min_tokens"],
)
def test_steps_go_one_by_one_for_what_needs_the_host_at_each(sampling):
    h = make()
    h.submit("a", [1], max_tokens=12, **sampling)
    h.run()
    assert set(h.executor.dispatches) == {1}


def test_a_static_batch_goes_step_by_step():
    h = make(batching="static")
    h.submit("a", [1], max_tokens=12)
    h.run()
    assert set(h.executor.dispatches) == {1}


def test_a_pool_without_room_for_several_steps_goes_one_by_one():
    h = make(overlap=False, executor=Counted(num_blocks=4, block_size=4))
    h.submit("a", [1, 2, 3, 4, 5], max_tokens=11)
    h.run()
    assert h.executor.dispatches == [1, 1, 8, 1]
    h = make(overlap=False, executor=Counted(num_blocks=4, block_size=4))
    h.submit("a", [1], max_tokens=7)
    h.submit("b", [2], max_tokens=7)
    h.run()
    assert h.tokens("a") == expected_tokens([1], 7)
    assert h.tokens("b") == expected_tokens([2], 7)


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", range(1, 14))
def test_what_comes_behind_a_stop_token_is_dropped(end, overlap):
    tokens = expected_tokens([1, 2], 20)
    end = tokens.index(tokens[end])  # its first place
    h = make(overlap=overlap)
    h.submit("a", [1, 2], max_tokens=20, stop_token_ids=(tokens[end],))
    h.submit("b", [3, 2], max_tokens=20)
    h.run()
    assert h.tokens("a") == tokens[: end + 1]
    assert h.last("a").finish.reason is FinishReason.STOP
    assert h.tokens("b") == expected_tokens([3, 2], 20)
    assert h.engine.load().num_blocks_used == 0


def test_a_dispatch_ends_with_its_last_row():
    tokens = expected_tokens([1, 2], 20)
    h = make(overlap=True, eos_token_ids=frozenset({tokens[3]}))
    assert tokens.index(tokens[3]) == 3
    h.submit("a", [1, 2], max_tokens=60)
    h.run()
    assert h.tokens("a") == tokens[:4]
    assert h.executor.dispatches == [1, 1, 8, 8]
    assert h.executor.num_steps == 4  # two of the third dispatch, and none of the fourth


def test_a_stop_string_ends_a_request_within_a_dispatch():
    alone, h = make(1), make(8)
    for one in (alone, h):
        one.submit("a", [70, 71], max_tokens=40)
        one.run()
    stop = alone.text("a")[5:7]
    assert stop
    for one in (alone, h):
        one.submit("b", [70, 71], max_tokens=40, stop=(stop,))
        one.run()
        assert one.last("b").finish.reason is FinishReason.STOP
    assert h.text("b") == alone.text("b")
    assert h.tokens("b") == alone.tokens("b")


@pytest.mark.parametrize("num_steps", [1, 2, 8])
def test_a_row_that_is_not_sound_fails_after_the_tokens_in_front_of_it(num_steps):
    tokens = expected_tokens([1, 2], 20)
    executor = Counted(faults=Faults(nan_token_ids=frozenset({tokens[6]})))
    h = make(num_steps, executor=executor)
    h.submit("a", [1, 2], max_tokens=20)
    h.submit("b", [5, 2], max_tokens=20)
    h.run()
    assert h.tokens("a") == tokens[:7]
    assert "no token 8 " in str(h.last("a").error)
    assert h.tokens("b") == expected_tokens([5, 2], 20)


def test_nobody_finds_what_a_dispatch_that_ended_early_did_not_compute():
    """Blocks of 1: the last token is a whole block, whose keys no step has written."""
    tokens = expected_tokens([1, 2], 20)
    h = make(executor=Counted(block_size=1), eos_token_ids=frozenset({tokens[4]}))
    h.submit("a", [1, 2], max_tokens=60)
    h.run()
    prompt = [1, 2, *tokens[:5], 9]
    h.submit("b", prompt, max_tokens=5, ignore_eos=True)
    h.run()
    assert h.tokens("b") == expected_tokens(prompt, 5)
    assert h.events["b"][-1].usage.cached_tokens == 6


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_preemption_in_the_middle_of_dispatches_changes_nothing(preemption_mode):
    executor = Counted(num_blocks=14, block_size=2, num_host_blocks=14)
    h = make(3, executor=executor, preemption_mode=preemption_mode, policy="priority")
    h.submit("a", [1], max_tokens=20, priority=1)
    for _ in range(4):
        h.step()
    h.submit("b", [2] * 5, max_tokens=18, priority=0)
    h.run()
    assert h.engine.load().num_preemptions >= 1
    assert max(executor.dispatches) == 3
    assert h.tokens("a") == expected_tokens([1], 20)
    assert h.tokens("b") == expected_tokens([2] * 5, 18)


# --- by time ----------------------------------------------------------------------------------------------------------


def lookahead(num_steps, seconds, bound_s=0.0):
    """The choice for a device that was timed at so many seconds a step."""
    most = num_steps if num_steps > 0 else MAX_NUM_STEPS
    geometry = dataclasses.replace(SeveralStepsExecutor().geometry, max_num_steps=most)
    return MultiStepPolicy(num_steps, bound_s, DeviceRates(1.0, 1.0, ((8, seconds), (16, seconds))), geometry)


@pytest.mark.parametrize(("seconds", "want"), [(0.001, 16), (0.004, 5), (0.009, 2), (0.011, 1), (3.0, 1)])
def test_unless_a_number_is_asked_for_a_dispatch_is_short(seconds, want):
    assert lookahead(0, seconds).num_steps(3, 99) == want
    assert lookahead(8, seconds).num_steps(3, 99) == 8


def test_a_dispatch_is_as_short_as_streams_are_promised():
    assert [lookahead(0, 0.001, bound_s).num_steps(3, 99) for bound_s in (0.2, 0.005, 0.0005)] == [16, 5, 1]


@pytest.mark.parametrize(("seconds", "want"), [(0.001, 16), (0.009, 2), (3.0, 1)])
def test_where_nobody_arrives_a_dispatch_is_short_only_if_a_row_may_end_in_it(seconds, want):
    one = lookahead(NO_NEWCOMERS, seconds)
    assert one.num_steps(3, 99, may_end=True) == want
    assert one.num_steps(3, 99, may_end=False) == MAX_NUM_STEPS
    assert one.num_steps(3, 5, may_end=False) == 5


def test_with_all_rows_taken_a_dispatch_is_longer_unless_a_row_may_end_in_it():
    one = lookahead(0, 0.009)
    assert one.num_steps(3, 99, may_end=False, has_room=True) == 2
    assert one.num_steps(3, 99, may_end=False, has_room=False) == 11
    assert one.num_steps(3, 99, may_end=True, has_room=False) == 5
    assert lookahead(0, 0.009, 0.03).num_steps(3, 99, may_end=False, has_room=False) == 3


def arrive(one, *times_s):
    for time_s in times_s:
        one.arrivals.add(time_s)
        one.begin_step(time_s, SeveralStepsExecutor().geometry)


def test_while_requests_arrive_next_to_others_a_dispatch_is_short_if_they_find_a_row():
    one = lookahead(0, 0.002)
    arrive(one, 1.0, 1.3)
    assert one.num_steps(2, 99) == 10, "two arrivals are no sequence yet"
    arrive(one, 1.6)
    assert one.num_steps(2, 99) == 1
    assert one.num_steps(2, 99, may_end=False, has_room=False) == 16
    assert one.num_steps(3, 99) == 10, "more than a quarter of the rows"
    one.begin_step(3.9, SeveralStepsExecutor().geometry)
    assert one.num_steps(2, 99) == 1
    one.begin_step(4.1, SeveralStepsExecutor().geometry)
    assert one.num_steps(2, 99) == 10, "eight mean gaps have passed without one"


@pytest.mark.parametrize(
    "times_s",
    [(1.0, 1.001, 1.002, 1.003), (1.0, 4.0, 7.0, 10.0), (1.0, 1.3, 1.6, 9.0)],
    ids=["a burst", "rare ones", "after a pause"],
)
def test_a_burst_or_rare_arrivals_announce_no_further_one(times_s):
    one = lookahead(0, 0.002)
    arrive(one, *times_s)
    assert one.num_steps(2, 99) == 10


def test_offline_no_arrival_is_expected():
    one = lookahead(NO_NEWCOMERS, 0.002)
    arrive(one, 1.0, 1.3, 1.6)
    assert one.num_steps(2, 99) == 10


def test_only_requests_that_find_others_running_count_as_arrivals():
    h = make(0)
    for number in range(4):
        h.submit(str(number), [number + 1], max_tokens=4)
        h.run()
        h.clock.advance(0.5)
    arrivals = h.engine._loop.scheduler.multi_step_policy.arrivals
    assert not arrivals.is_next_expected(h.clock())
    h.submit("long", [9], max_tokens=40)
    h.step()
    for number in range(4, 7):
        h.clock.advance(0.5)
        h.submit(str(number), [number + 1], max_tokens=4)
        h.step()
    assert arrivals.is_next_expected(h.clock())
    h.run()


def test_rows_with_grammars_go_as_if_none_ended_and_singly_where_they_have_little_choice():
    one = lookahead(NO_NEWCOMERS, 0.009)
    assert one.num_steps(3, 99, are_bound=True) == MAX_NUM_STEPS
    for _ in range(100):
        one.observe_forced_share(8, 1)
    assert one.num_steps(3, 99, are_bound=True) == MAX_NUM_STEPS
    for _ in range(100):
        one.observe_forced_share(8, 2)
    assert one.num_steps(3, 99, are_bound=True) == 1
    assert one.num_steps(3, 99, may_end=False) == MAX_NUM_STEPS


def dispatch(num_steps, kind=StepKind.MULTI_STEP):
    """Three rows that decode."""
    return SchedulerOutput(DecodeBatch([None] * 3, num_steps=num_steps, kind=kind))  # type: ignore[list-item]


def end(one, schedule, seconds):
    timing = StepTiming(None, 3, 4, schedule.num_steps, 0.0, seconds, seconds)  # type: ignore[arg-type]
    one.on_results(schedule, None, timing)


def test_a_dispatch_that_was_cut_short_says_how_long_its_steps_took():
    one = lookahead(0, 0.001)
    for _ in range(6):
        masked = dispatch(16, StepKind.MASKED_MULTI_STEP)
        assert one.spare_s(masked, 0.0, 0.001) == 0
        masked.decodes.cut_short(15)
        end(one, masked, 0.15)
    assert one.num_steps(3, 99) == 2


def test_a_row_may_end_by_a_stop_token_or_a_stop_string_or_not_at_all():
    h = make(NO_NEWCOMERS)
    rows, seen = h.engine._loop.scheduler.rows, []
    ways: list[dict[str, Any]] = [{}, {"stop_token_ids": (250,)}, {"stop": ("never",)}, {}]
    for number, sampling in enumerate(ways):
        h.submit(str(number), [number + 1], max_tokens=6, **sampling)
        h.step()
        h.step()
        seen.append(rows.multi_step_limits.may_end)
        h.run()
    assert seen == [False, True, True, False]
    assert not rows.multi_step_limits.may_end


def test_a_dispatch_has_no_more_steps_than_any_row_may_make():
    one = lookahead(0, 0.001)
    assert [one.num_steps(3, least) for least in (0, 1, 2, 7)] == [1, 1, 2, 7]


def test_dispatches_that_ran_say_better_how_long_a_step_takes():
    one = lookahead(0, 0.001)
    for _ in range(6):
        end(one, dispatch(16), 0.15)
    assert one.num_steps(3, 99) == 2


def test_what_follows_a_dispatch_of_several_steps_is_decided_when_it_nears_its_end():
    """It is known by then how long one takes; after a single step there is nothing to wait for."""
    one = lookahead(8, 0.001)
    assert one.spare_s(dispatch(8), 0.0, 0.0) == 0
    end(one, dispatch(8), 0.016)
    assert one.spare_s(dispatch(8), 0.016, 0.018) == pytest.approx(0.016 + 0.65 * 0.016 - 0.018)
    assert one.spare_s(dispatch(8), 0.016, 0.031) < 0
    assert one.spare_s(dispatch(1), 0.016, 0.018) == 0


def test_an_engine_waits_no_longer_for_arrivals_than_it_has_to_spare():
    """Its clock stands, so that there would be time for ever; what arrives ends the wait."""
    h = make(8)
    h.submit("a", [1], max_tokens=40)
    for _ in range(6):
        h.step()
    loop, thread = h.engine._loop, h.engine._thread
    assert loop.idle_budget_s == 0
    loop.scheduler.multi_step_policy._seen_s[8] = deque([1000.0])
    assert loop.idle_budget_s == pytest.approx(0.65 * 8000)
    h.submit("b", [2], max_tokens=9)
    thread._await_arrivals()
    assert loop.scheduler.queues.num_waiting == 1
    h.run()
    assert h.tokens("b") == expected_tokens([2], 9)
    assert loop.idle_budget_s == 0


def test_a_size_without_a_program_goes_step_by_step():
    one, geometry = lookahead(8, 0.001), SeveralStepsExecutor().geometry
    one.set_programs(dataclasses.replace(geometry, buckets=dataclasses.replace(geometry.buckets, decodes=(2,))))
    assert one.num_steps(2, 99) == 8
    assert one.num_steps(3, 99) == 1


def test_an_executor_may_have_fewer_steps_for_a_while():
    one, geometry = lookahead(8, 0.001), SeveralStepsExecutor().geometry
    for most in (3, 1, 16):
        one.set_programs(dataclasses.replace(geometry, max_num_steps=most))
        assert one.num_steps(2, 99) == min(8, most)


# --- ended by an arrival ----------------------------------------------------------------------------------------------


class Interrupted(FedExecutor):
    """Calls `during` in a step of an interruptible dispatch, and notes the steps that each of these executed."""

    def __init__(self, step=None, during=None, **options):
        super().__init__(**{"max_num_batched_tokens": 16, **options})
        self.step, self.during = step, during
        self.executed = []

    def decode_interruptibly(self, inputs, sampling, ending_token_ids_rx, num_steps):
        feed, interrupt = super().decode_interruptibly(inputs, sampling, ending_token_ids_rx, num_steps)
        self.executed.append(feed)
        return feed, interrupt

    def sample(self, hidden, inputs):
        outputs = super().sample(hidden, inputs)
        is_inside = bool(self.executed) and not self.executed[-1].is_over
        if is_inside and self.during is not None and self.executed[-1].num_steps == self.step:
            during, self.during = self.during, None
            during()
        return outputs

    @property
    def nums_executed(self):
        return [feed.num_steps for feed in self.executed]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("step", range(8))
def test_an_arrival_ends_a_dispatch_after_the_current_step(step, policy):
    h = make(overlap=False, executor=Interrupted(step), policy=policy)
    h.submit("a", [1, 2], max_tokens=40, temperature=1.0, seed=3)
    h.submit("c", [7], max_tokens=30)
    for _ in range(2):
        h.step()
    h.executor.during = lambda: h.submit("b", [5] * 9, max_tokens=20)
    h.step()
    assert h.executor.nums_executed == [step + 1]
    num_tokens = len(h.tokens("a"))
    h.step()
    assert len(h.events["b"]) == 1, "its prompt runs next"
    assert len(h.tokens("a")) == num_tokens + 1
    h.engine.check()
    h.run()
    assert h.tokens("a") == expected_tokens([1, 2], 40, seed=3)
    assert h.tokens("b") == expected_tokens([5] * 9, 20)
    assert h.tokens("c") == expected_tokens([7], 30)
    load = h.engine.load()
    assert load.num_blocks_used == 0
    assert load.num_steps == h.executor.num_steps, "steps that were not executed do not count"


def test_a_dispatch_without_arrivals_runs_all_its_steps():
    h = make(overlap=False, executor=Interrupted())
    h.submit("a", [1, 2, 3], max_tokens=21, ignore_eos=True)
    h.run()
    assert h.executor.nums_executed == [8, 8, 3]
    assert h.tokens("a") == expected_tokens([1, 2, 3], 21)
    assert h.engine.load().num_steps == 21


def test_rows_that_end_leave_an_interruptible_dispatch_no_further_step():
    tokens = expected_tokens([1, 2], 20)
    h = make(overlap=False, executor=Interrupted(), eos_token_ids=frozenset({tokens[4]}))
    h.submit("a", [1, 2], max_tokens=60)
    h.run()
    assert h.tokens("a") == tokens[:5]
    assert h.executor.nums_executed == [3]
    assert h.engine.load().num_blocks_used == 0


def test_a_dispatch_is_not_interrupted_if_all_rows_are_taken_or_nobody_arrives_later():
    for num_steps, max_num_seqs in ((8, 2), (NO_NEWCOMERS, 8)):
        h = make(num_steps, overlap=False, executor=Interrupted(max_num_seqs=max_num_seqs))
        for name in "ab":
            h.submit(name, [ord(name)], max_tokens=12)
        h.run()
        assert h.executor.nums_executed == []


def test_with_overlap_a_dispatch_is_interruptible_only_while_arrivals_are_expected():
    h = make(overlap=True, executor=Interrupted())
    h.submit("a", [1], max_tokens=110)
    for _ in range(4):
        h.step()
    assert h.executor.nums_executed == []
    policy = h.engine._loop.scheduler.multi_step_policy
    for _ in range(3):
        policy.arrivals.add(h.clock())
        h.clock.advance(0.5)
    for _ in range(3):
        h.step()
    assert h.executor.nums_executed[:2] == [8, 8]
    h.executor.step, h.executor.during = 2, lambda: h.submit("b", [5], max_tokens=20)
    h.step()
    assert h.executor.nums_executed[-1] == 3
    for _ in range(2):
        h.step()
    assert len(h.events["b"]) == 1
    h.run()
    assert h.tokens("a") == expected_tokens([1], 110)
    assert h.tokens("b") == expected_tokens([5], 20)


def test_a_dispatch_that_has_ended_is_not_interrupted():
    h, calls = make(overlap=False, executor=Interrupted()), []

    def decode_interruptibly(*inputs):
        feed, interrupt = Interrupted.decode_interruptibly(h.executor, *inputs)
        counted = SimpleNamespace(interrupt=lambda: calls.append("late"), close=interrupt.close)
        return feed, counted

    h.executor.decode_interruptibly = decode_interruptibly
    h.submit("a", [1], max_tokens=40)
    while not h.executor.executed:
        h.step()
    assert h.executor.nums_executed == [8]
    h.submit("b", [5], max_tokens=2)
    assert calls == []
    h.run()


def test_an_arrival_before_a_dispatch_is_armed_interrupts_it():
    interrupted = []
    signal = ArrivalSignal()
    signal.notify()
    signal.arm(lambda: interrupted.append("before"))
    signal.disarm()
    signal.reset()
    signal.arm(lambda: interrupted.append("after"))
    assert interrupted == ["before"]
    signal.notify()
    signal.disarm()
    signal.notify()
    assert interrupted == ["before", "after"]


def prefilled(one, seconds):
    """One prompt that took so long until its first token."""
    group = SimpleNamespace(first_scheduled_s=1.0)
    row = SimpleNamespace(group=group, num_tokens=64, samples_token=True, output_index=0)
    schedule = SimpleNamespace(rows=[row], decodes=DecodeBatch())
    one.on_results(schedule, None, StepTiming(None, 64, 64, 1, 1.0, 1.0 + seconds, seconds))  # type: ignore[arg-type]


def test_the_longer_prompts_take_the_longer_is_a_dispatch_before_an_arrival():
    one = lookahead(0, 0.001)
    arrive(one, 1.0, 1.3, 1.6)
    steps = [one.num_steps(2, 99)]
    for seconds in (0.01, 0.08, 0.12, 5.0):
        for _ in range(5):
            prefilled(one, seconds)
        steps.append(one.num_steps(2, 99))
    assert steps == [3, 3, 8, 12, 16]


def test_arrivals_that_interrupt_a_dispatch_shorten_it_less():
    geometry = dataclasses.replace(FedExecutor().geometry, max_num_steps=MAX_NUM_STEPS)
    one = MultiStepPolicy(0, 0.0, DeviceRates(1.0, 1.0, ((8, 0.002), (16, 0.002))), geometry, has_overlap=False)
    for time_s in (1.0, 1.3, 1.6):
        one.arrivals.add(time_s)
        one.begin_step(time_s, geometry)
    assert one.is_interruptible
    assert one.num_steps(2, 99) == 3
    prefilled(one, 0.08)
    assert one.num_steps(2, 99) == 8
