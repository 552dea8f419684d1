"""Rounds of a draft model: all rows go on by what each was given, and no token changes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.engine.executor import MAX_NUM_ROUNDS, BlockMoves, Move
from jpaged.engine.speculative.controller import LEAST_OFF_STEPS, AdaptationState
from jpaged.engine.speculative.draft_model import (
    FEW_ROUNDS,
    PROBE_DISPATCHES,
    DraftKVState,
    DraftModelSpeculation,
    SpecRoundPolicy,
)
from jpaged.errors import InternalError
from jpaged.testing import SeveralStepsExecutor, SpeculatingExecutor, expected_tokens
from jpaged.testing.fake_steps import accepted_behind
from tests.engine.harness import Harness

PROMPT = [3, 1, 4]
SIZE = 8


def harness(kind: type[SeveralStepsExecutor] = SpeculatingExecutor, **fields: Any) -> Harness:
    names = ("num_blocks", "block_size", "max_num_seqs", "num_host_blocks")
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 8} | {n: fields.pop(n) for n in names if n in fields}
    return Harness(kind(**sizes), num_scheduler_steps=8, **fields)


def num_running(h: Harness) -> int:
    return len(h.engine._loop.scheduler.queues.running)


def test_every_row_goes_on_by_what_was_drawn_as_proposed():
    h = harness()
    for name in "abc":
        h.submit(name, [*PROMPT, ord(name)], max_tokens=30)
    h.run()
    for name in "abc":
        assert h.tokens(name) == expected_tokens([*PROMPT, ord(name)], 30)
    load = h.engine.load()
    assert load.num_generation_tokens == 90
    assert 0 < load.speculation.num_accepted_tokens < load.speculation.num_draft_tokens
    assert load.speculation.num_accepted_tokens_per_pos == tuple(
        sorted(load.speculation.num_accepted_tokens_per_pos, reverse=True)
    )
    assert h.rule.num_dispatches < 5


def test_rounds_are_counted_a_draft_each():
    h = harness(nums_rounds=(1,))
    h.submit("a", PROMPT, max_tokens=9)
    h.run()
    num_left, position, accepted = 9, len(PROMPT) - 1, list[int]()
    while num_left > 1 or not accepted:  # the first tokens come of single steps
        if position < len(PROMPT) + 1:
            position, num_left = position + 1, num_left - 1
            continue
        accepted.append(min(accepted_behind(position, 3), num_left - 1))
        position, num_left = position + accepted[-1] + 1, num_left - accepted[-1] - 1
    assert h.engine.load().speculation.num_accepted_tokens == sum(accepted)


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 3},
        {"presence_penalty": 0.3},
        {"bad_words": ["a"]},
        {"beam_width": 2, "n": 2},
        {"logit_bias": {5: 3.0}},
        {"min_tokens": 9, "stop_token_ids": list(range(32))},
        {"temperature": 1.0, "seed": 5, "n": 3},
        {"temperature": 1.0, "seed": 5, "best_of": 3},
    ],
    ids=str,
)
def test_every_field_means_what_it_does_without(sampling):
    plain, h = harness(SeveralStepsExecutor), harness()
    for one in (plain, h):
        one.submit("a", PROMPT, max_tokens=12, **sampling)
        one.submit("b", [9], max_tokens=120)
        one.run()
    for name in "ab":
        for index in range(sampling.get("n", 1)):
            assert h.tokens(name, index) == plain.tokens(name, index)
        assert h.last(name).finish == plain.last(name).finish
        told = [[one.logprobs for one in some.events[name]] for some in (h, plain)]
        assert [one for one in told[0] if one] == [one for one in told[1] if one]
    assert h.rule.num_dispatches > 0  # of the other, when this one has ended


def test_the_end_of_a_text_in_the_middle_of_a_round_ends_it():
    answer = expected_tokens(PROMPT, 40)
    for place in range(3, 20):
        if answer[place] in answer[:place]:
            continue
        h = harness()
        h.submit("a", PROMPT, max_tokens=40, stop_token_ids=[answer[place]])
        h.submit("b", [8], max_tokens=40)
        h.run()
        assert h.tokens("a") == answer[: place + 1]
        assert h.tokens("b") == expected_tokens([8], 40)


def test_a_stop_string_which_the_device_does_not_know_ends_a_row_too():
    plain = harness(SeveralStepsExecutor)
    plain.submit("a", PROMPT, max_tokens=40)
    plain.run()
    stop = plain.text("a")[9:11]
    for one in (h := harness(), plain):
        one.submit("b", PROMPT, max_tokens=40, stop=[stop])
        one.run()
    assert h.tokens("b") == plain.tokens("b") and h.text("b") == plain.text("b")
    assert len(h.tokens("b")) < 40


def test_blocks_for_what_was_not_accepted_are_given_back():
    h = harness(block_size=1, num_blocks=100, nums_rounds=(2,))
    h.submit("a", PROMPT, max_tokens=40)
    while h.step():
        for group in h.engine._loop.scheduler.queues.running:
            for sequence in group.live:
                if not sequence.num_in_flight_tokens:
                    assert sequence.kv.num_blocks == sequence.num_computed_tokens
    assert h.rule.num_dispatches > 3


def test_nobody_leaves_for_rounds_and_few_blocks_make_them_few():
    h = harness(block_size=4, num_blocks=9, max_num_seqs=4)
    for name in "ab":
        h.submit(name, [*PROMPT, ord(name)], max_tokens=12)
    h.run()
    assert h.engine.load().num_preemptions == 0
    for name in "ab":
        assert h.tokens(name) == expected_tokens([*PROMPT, ord(name)], 12)
    assert h.rule.num_dispatches > 0


def test_who_waits_is_let_in_before_there_are_rounds():
    h = harness(max_num_seqs=3)
    h.submit("a", PROMPT, max_tokens=100)
    while h.rule.num_dispatches < 1:
        h.step()
    h.submit("b", [8], max_tokens=10)
    num_before = h.rule.num_dispatches
    h.step()
    assert h.rule.num_dispatches == num_before and num_running(h) == 2
    h.run()
    assert h.tokens("b") == expected_tokens([8], 10)


def test_what_plain_steps_ran_the_draft_sees_before_its_next_rounds():
    h = harness(nums_rounds=(0, 0, 1))
    h.submit("a", PROMPT, max_tokens=60)
    h.run()
    assert h.tokens("a") == expected_tokens(PROMPT, 60)
    assert 16 <= h.executor.draft.num_tokens <= 60
    always = harness()
    always.submit("a", PROMPT, max_tokens=60)
    always.run()
    assert always.executor.draft.num_tokens == len(PROMPT) + 1  # which comes of a single step


def test_what_came_back_from_the_host_the_draft_sees_from_the_beginning():
    h = harness(block_size=4, num_blocks=10, num_host_blocks=20, preemption_mode="swap", max_num_seqs=4)
    for name in "abc":
        h.submit(name, [*PROMPT, ord(name)], max_tokens=24)
    h.run()
    assert h.engine.load().num_blocks_swapped_in > 0
    assert h.executor.draft.num_tokens > 0
    for name in "abc":
        assert h.tokens(name) == expected_tokens([*PROMPT, ord(name)], 24)


def test_logits_that_are_not_finite_fail_at_that_token_and_no_other():
    answer = expected_tokens(PROMPT, 30)
    for place in range(2, 14):
        ends = []
        for kind in (SeveralStepsExecutor, SpeculatingExecutor):
            h = harness(kind)
            h.executor.faults.nan_token_ids = frozenset({answer[place]})
            h.submit("a", PROMPT, max_tokens=30)
            h.run()
            error = h.last("a").error
            assert isinstance(error, InternalError)
            ends.append((h.tokens("a"), str(error)))
        assert ends[0] == ends[1]


# --- the rule -------------------------------------------------------------------------------------------------------


def timed(plain_s: float = 1.0, disable_by_batch_size: int | None = None) -> SpecRoundPolicy:
    """A rule that knows what plain steps take."""
    rule = SpecRoundPolicy(disable_by_batch_size)
    while rule.num_rounds(1, SIZE, 20.0) == 0:
        rule.took_plain(SIZE, plain_s)
    return rule


class PlainSteps(SpecRoundPolicy):
    """A rule without rounds, which keeps the sizes of the plain steps that it is given."""

    def __init__(self):
        super().__init__(disable_by_batch_size=0)
        self.sizes = []

    def took_plain(self, size, seconds):
        self.sizes.append(size)


def test_a_step_with_a_prompt_is_not_timed_as_a_plain_step():
    h, kinds = harness(), []
    drafter, rule = h.engine._loop._drafter, PlainSteps()
    assert isinstance(drafter, DraftModelSpeculation)
    drafter._rule = rule
    h.engine._loop.observers.on_results.append(
        lambda schedule, *_: kinds.append((len(schedule.decodes), schedule.rows))
    )
    h.submit("a", PROMPT, max_tokens=40)
    for _ in range(3):
        h.step()
    h.submit("b", [5] * 20, max_tokens=1)
    h.run()
    assert any(num_decodes and rows for num_decodes, rows in kinds)
    assert len(rule.sizes) == sum(num_decodes > 0 and not rows for num_decodes, rows in kinds) > 0


def test_plain_steps_are_timed_before_there_are_rounds():
    rule = SpecRoundPolicy()
    assert rule.num_rounds(1, SIZE, 20.0) == 0
    rule.took_plain(SIZE, 1.0)
    rule.took_plain(SIZE, 1.0)
    assert rule.num_rounds(1, SIZE, 20.0) == FEW_ROUNDS


def test_rounds_fill_the_time_of_a_dispatch():
    rule = timed()
    rule.took(SIZE, 3.0, 2.0)
    assert rule.num_rounds(1, SIZE, 20.0) == 10
    assert rule.num_rounds(1, SIZE, 1.0) == 1
    assert rule.num_rounds(1, SIZE, 1000.0) == 16


def test_rounds_that_do_not_pay_end_and_are_tried_again_after_longer_and_longer():
    rule = timed()
    lens = []
    for _ in range(3):
        while rule.state(SIZE) is not AdaptationState.OFF:
            if rule.num_rounds(1, SIZE, 20.0):
                rule.took(SIZE, 1.5, 2.0)
            else:
                rule.took_plain(SIZE, 1.0)
        count = 0
        while not rule.num_rounds(1, SIZE, 20.0):
            rule.took_plain(SIZE, 1.0)
            count += 1
        lens.append(count)
        assert rule.state(SIZE) is AdaptationState.PROBING
    assert lens == [LEAST_OFF_STEPS, 2 * LEAST_OFF_STEPS, 4 * LEAST_OFF_STEPS]
    for _ in range(PROBE_DISPATCHES):
        rule.took(SIZE, 3.0, 2.0)
    assert rule.state(SIZE) is AdaptationState.ON


@pytest.mark.parametrize(("tokens", "state"), [(2.0, AdaptationState.OFF), (2.1, AdaptationState.ON)])
def test_a_probe_is_judged_by_its_gain(tokens: float, state: AdaptationState) -> None:
    rule = timed()
    while rule.state(SIZE) is not AdaptationState.OFF:
        if rule.num_rounds(1, SIZE, 20.0):
            rule.took(SIZE, 1.5, 2.0)
        else:
            rule.took_plain(SIZE, 1.0)
    while not rule.num_rounds(1, SIZE, 20.0):
        rule.took_plain(SIZE, 1.0)
    for _ in range(PROBE_DISPATCHES):
        assert rule.state(SIZE) is AdaptationState.PROBING
        rule.took(SIZE, tokens, 2.0)
    assert rule.state(SIZE) is state


def test_rounds_are_doubted_before_they_are_turned_off() -> None:
    rule, states = timed(), []
    while rule.num_rounds(1, SIZE, 20.0):
        rule.took(SIZE, 1.5, 2.0)
    assert rule.state(SIZE) is AdaptationState.ON
    while not rule.num_rounds(1, SIZE, 20.0):
        rule.took_plain(SIZE, 1.0)
        states.append(rule.state(SIZE))
    assert states == [AdaptationState.ON] * 2
    assert rule.num_rounds(1, SIZE, 20.0) == FEW_ROUNDS  # the older rounds are forgotten
    for _ in range(5):
        assert rule.state(SIZE) is AdaptationState.ON
        rule.took(SIZE, 1.5, 2.0)
    assert rule.state(SIZE) is AdaptationState.OFF
    assert rule.num_rounds(1, SIZE, 20.0) == 0


def test_blocks_that_the_draft_has_not_seen_are_computed_from_the_first_one() -> None:
    state = DraftKVState(harness(block_size=4, num_blocks=16).executor.geometry)

    def row(position: int, *block_ids: int) -> Any:
        tables_gsm, slot = np.array([[block_ids]]), block_ids[position // 4] * 4 + position % 4
        return SimpleNamespace(
            num_rows=1,
            num_tokens=1,
            positions_t=np.array([position]),
            slots_gt=np.array([[slot]]),
            block_tables_gsm=tables_gsm,
        )

    def first(position: int, *block_ids: int, num_left: int = 1) -> int:
        (found,) = state.see(row(position, *block_ids), np.array([num_left], np.int32)).tolist()
        return int(found)

    assert first(6, 3, 5, 7, num_left=4) == 0
    assert first(10, 3, 5, 7) == 10
    state.write(row(6, 3, 5, 7), 1)
    assert first(10, 3, 5, 7) == 4
    state.write(row(6, 3, 5, 7), 4)  # to the tenth token, in the third block
    assert first(7, 3, 7) == 4
    assert first(8, 3, 5, 7) == 4
    state.move(BlockMoves(Move.COPY, [5, 9], [10, 11]))
    assert (first(3, 10), first(3, 11)) == (3, 0)
    state.move(BlockMoves(Move.SWAP_IN, [1], [10]))
    assert (first(3, 10), first(3, 5)) == (0, 3)


def test_a_machine_that_becomes_slower_turns_nothing_off():
    rule, slower = timed(), 1.0
    for number in range(600):
        slower = 3.0 if number > 300 else 1.0
        if rule.num_rounds(1, SIZE, 20.0):
            rule.took(SIZE, 3.0, 2.0 * slower)
        else:
            rule.took_plain(SIZE, slower)
        assert rule.state(SIZE) is AdaptationState.ON


def test_rounds_that_pay_go_on_and_plain_steps_are_timed_now_and_then():
    rule, num_plain = timed(), 0
    for _ in range(2000):
        if rule.num_rounds(1, SIZE, 20.0):
            rule.took(SIZE, 3.0, 2.0)
        else:
            rule.took_plain(SIZE, 1.0)
            num_plain += 1
    assert rule.state(SIZE) is AdaptationState.ON
    assert 2 <= num_plain < 20


def test_where_no_clock_runs_nothing_is_turned_off():
    rule = timed(0.0)
    for _ in range(100):
        rule.took(SIZE, 1.0, 0.0)
    assert rule.state(SIZE) is AdaptationState.ON


def test_more_rows_than_were_asked_for_have_no_rounds():
    rule = timed(disable_by_batch_size=4)
    assert rule.num_rounds(4, SIZE, 20.0) > 0
    assert rule.num_rounds(5, SIZE, 20.0) == 0


# --- what does not go together --------------------------------------------------------------------------------------

METHODS = "draft_model", "eagle3", "mtp"


def drafting(method: str) -> dict[str, Any]:
    model = {} if method == "mtp" else {"model": "draft"}
    return {"speculative_config": {"method": method, "num_speculative_tokens": 2, **model}}


@pytest.mark.parametrize("method", METHODS)
def test_a_head_runs_after_each_step_and_is_shown_no_token_again(method):
    options = EngineConfig.load(drafting(method)).speculation
    assert options is not None
    rounds = DraftModelSpeculation.of(options, harness().engine._executor.geometry)
    assert rounds._follows == options.has_head == (method != "draft_model")


@pytest.mark.parametrize("method", METHODS)
def test_adapters_have_no_draft_model(method):
    with pytest.raises(ValueError, match=rf"speculative_config\.method: {method} does not support adapters"):
        EngineConfig.load({**drafting(method), "enable_lora": True})


@pytest.mark.parametrize("method", METHODS)
def test_several_processes_have_no_draft_model(method):
    options = EngineConfig.load(drafting(method))
    given = {"coordinator": "host:1", "num_processes": 2, "process_id": 0}
    multihost = EngineConfig.load(given).multihost()
    assert multihost is not None
    with pytest.raises(ValueError, match=rf"speculative_config\.method: {method} requires a single process"):
        options.for_multihost(multihost)


@pytest.mark.parametrize(("plain_s", "round_s"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_dispatches_that_were_not_measured_change_no_state(plain_s: float, round_s: float) -> None:
    rule = SpecRoundPolicy()
    for _ in range(2):
        rule.took_plain(SIZE, plain_s)
    for _ in range(50):
        rule.took(SIZE, 0.5, round_s)
    assert rule.state(SIZE) is AdaptationState.ON


@pytest.mark.parametrize(
    ("longest_s", "num_rounds"), [(0.0, 1), (0.99, 1), (1.0, 1), (1.99, 1), (2.0, 2), (3.0, 3), (1e9, MAX_NUM_ROUNDS)]
)
def test_as_many_rounds_run_as_fit_into_the_time(longest_s: float, num_rounds: int) -> None:
    rule = SpecRoundPolicy(4)
    for _ in range(2):
        rule.took_plain(SIZE, 1.0)
    rule.took(SIZE, 3.0, 1.0)
    assert rule.num_rounds(4, SIZE, longest_s) == num_rounds
    assert rule.num_rounds(5, SIZE, longest_s) == 0
