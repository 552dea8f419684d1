"""A request that cannot end in time is not begun, and none is refused that could."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.executor import DeviceRates
from jpaged.engine.scheduler.multi_step import StepTimeFloor
from jpaged.errors import DeadlineExceeded
from tests.engine.timed import TimedExecutor

RATES = DeviceRates(swap_out_bytes_per_s=1e9, swap_in_bytes_per_s=1e9, forward_s=((1, 1e-6),))


def cost(base_s: float, token_s: float):
    return lambda num_padded, _: base_s + token_s * num_padded


def harness(base_s: float = 0.0, token_s: float = 0.01, *, refuse_late: bool = True, **options):
    executor = TimedExecutor(
        cost(base_s, token_s),
        RATES,
        num_blocks=options.pop("num_blocks", 256),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=512,
    )
    return executor.harness(refuse_late=refuse_late, **options)


def prompt(number: int, length: int) -> list[int]:
    """A prompt that shares no block with that of another number."""
    return [number % 250, *[(number * 7 + i) % 250 for i in range(length - 1)]]


def warm(h) -> None:
    """Runs enough for steps to be measured: prompts, then rows that decode."""
    h.submit("warm", prompt(200, 320), max_tokens=20, ignore_eos=True)
    h.run()


def is_refused(h, name: str) -> bool:
    event = h.last(name)
    return isinstance(event.error, DeadlineExceeded) and "was not started" in str(event.error)


def test_nothing_is_refused_before_steps_were_measured():
    h = harness()
    h.submit("a", prompt(1, 400), max_tokens=1, deadline_s=h.clock() + 0.01)
    h.step()
    assert not any(event.error for event in h.events["a"])
    h.run()
    assert not is_refused(h, "a")


def test_a_prompt_that_takes_too_long_is_refused_without_a_step():
    h = harness()
    warm(h)
    num_steps = h.executor.num_steps
    h.submit("late", prompt(1, 400), max_tokens=1, deadline_s=h.clock() + 1.0)  # it takes 4 s
    h.run()
    assert is_refused(h, "late")
    assert "400 prompt tokens and then 0 steps" not in str(h.last("late").error)  # one block may be known in part
    assert h.executor.num_steps == num_steps
    assert h.engine.num_ended_by_reason()["deadline"] == 1
    h.submit("in time", prompt(1, 400), max_tokens=1, deadline_s=h.clock() + 5.0)
    h.run()
    assert h.last("in time").error is None


def test_it_is_begun_where_late_ones_are_not_refused():
    h = harness(refuse_late=False)
    warm(h)
    num_steps = h.executor.num_steps
    h.submit("late", prompt(1, 400), max_tokens=1, deadline_s=h.clock() + 1.0)
    h.run()
    assert h.executor.num_steps > num_steps
    assert "the deadline passed" in str(h.last("late").error)


def test_what_waits_in_front_counts():
    h = harness()
    warm(h)
    for i in range(8):
        h.submit(f"first {i}", prompt(i + 1, 400), max_tokens=1)
    h.submit("late", prompt(30, 8), max_tokens=1, deadline_s=h.clock() + 10.0)  # behind 32 s
    h.submit("in time", prompt(31, 8), max_tokens=1, deadline_s=h.clock() + 40.0)
    h.run()
    assert is_refused(h, "late")
    assert h.last("in time").error is None


@pytest.mark.parametrize("why", ["they may expire first", "they have the same beginning", "they come later"])
def test_what_may_not_come_first_does_not_count(why):
    h = harness(policy="priority" if why == "they come later" else "fcfs")
    warm(h)
    deadline_s = h.clock() + 7.4
    for i in range(8):
        shared = [*prompt(1, 392), *prompt(i + 2, 8)]
        h.submit(
            f"first {i}",
            shared if why == "they have the same beginning" else prompt(i + 1, 400),
            max_tokens=1,
            deadline_s=deadline_s - 1.0 + 0.1 * i if why == "they may expire first" else None,
            priority=9 if why == "they come later" else 0,
        )
    h.submit("ours", prompt(30, 400), max_tokens=1, deadline_s=deadline_s)
    h.step()
    assert not any(event.error for event in h.events["ours"])
    h.run()
    assert not is_refused(h, "ours")


def test_blocks_that_are_known_need_no_time():
    h = harness()
    warm(h)
    h.submit("first", prompt(1, 400), max_tokens=1)
    h.run()
    h.submit("again", prompt(1, 400), max_tokens=1, deadline_s=h.clock() + 1.0)
    h.run()
    assert h.last("again").error is None


@pytest.mark.parametrize(
    ("sampling", "refused"),
    [
        ({"ignore_eos": True}, True),
        ({"min_tokens": 90}, True),
        ({}, False),
        ({"ignore_eos": True, "stop_token_ids": [3]}, False),
        ({"ignore_eos": True, "stop": ["never"]}, False),
    ],
)
def test_steps_count_where_nothing_can_end_the_request_before(sampling, refused):
    h = harness(base_s=1.0, token_s=0.0)
    warm(h)
    h.submit("a", [1, 2, 3], max_tokens=100, deadline_s=h.clock() + 20.0, **sampling)
    h.step()
    ended = any(event.is_last for event in h.events["a"])
    assert ended is refused
    h.run()
    assert is_refused(h, "a") is refused


def test_the_least_times_are_those_of_eight_dispatches_together():
    times = StepTimeFloor(64)
    for seconds in (0.0, *[1.0] * 6):
        times.observe(64, 1, seconds)
    assert times.seconds(640, 1) == 0.0
    times.observe(64, 1, 1.0)
    assert times.seconds(640, 0) == pytest.approx(10 * 7 / 8)
    for _ in range(8):
        times.observe(8, 2, 1.0)  # two steps each
    assert times.seconds(0, 1) == pytest.approx(0.5)
    assert times.seconds(640, 0) == pytest.approx(10 * 7 / 8)


def test_least_times_of_other_sizes_follow_from_those_that_ran():
    times = StepTimeFloor(1024)

    def observe(num_tokens: int, seconds: float, count: int = 8) -> None:
        for _ in range(count):
            times.observe(num_tokens, 1, seconds)

    observe(40, 0.25)  # padded to 64
    assert times.seconds(1024, 0) == pytest.approx(0.25)  # a larger step takes as long at least
    assert times.seconds(0, 1) == pytest.approx(0.25 / 8)  # and a smaller one its part
    observe(40, 0.5)
    assert times.seconds(1024, 0) == pytest.approx(0.25)
    observe(1, 0.125)
    assert times.seconds(0, 4) == pytest.approx(0.5)
    observe(1024, 2.048, 7)
    observe(8, 0.5, 1)  # another size between
    observe(1024, 2.048, 7)
    assert times.seconds(1024, 0) == pytest.approx(0.25)
    observe(1024, 2.048, 1)
    assert times.seconds(1024, 1) == pytest.approx(2.048 + 0.125)
    observe(1024, 1.024)
    assert times.seconds(512, 0) == pytest.approx(0.512)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 5),  # whose prompt it is: some begin alike
        st.integers(1, 300),  # its tokens
        st.integers(1, 30),  # that it generates
        st.booleans(),  # whether that many for certain
        st.one_of(st.none(), st.floats(0.01, 30.0)),  # its time
        st.integers(0, 12),  # steps before the next arrives
    ),
    min_size=4,
    max_size=24,
)


def life(arrivals, base_s, token_s, overlap, *, refuse_late):
    """The requests that were refused, in order, and those that ended well, once all have arrived and ended."""
    h = harness(base_s, token_s, refuse_late=refuse_late, num_blocks=200, overlap=overlap)
    warm(h)
    for number, (whose, length, max_tokens, is_certain, time_s, num_steps) in enumerate(arrivals):
        h.submit(
            f"{number}",
            [whose, *[(whose + i) % 250 for i in range(length - 1)]],
            max_tokens=max_tokens,
            ignore_eos=is_certain,
            deadline_s=None if time_s is None else h.clock() + time_s,
        )
        for _ in range(num_steps):
            h.step()
    h.run()
    names = [f"{number}" for number in range(len(arrivals))]
    refused = [name for name in names if is_refused(h, name)]
    return refused, {name for name in names if h.last(name).error is None}


@pytest.mark.long
@settings(max_examples=40)
@given(ARRIVALS, st.floats(0.0, 0.5), st.floats(0.0, 0.02), st.booleans())
def test_none_is_refused_that_would_have_ended_in_time(arrivals, base_s, token_s, overlap):
    """Both lives are the same up to the first that is refused."""
    refused, _ = life(arrivals, base_s, token_s, overlap, refuse_late=True)
    if refused:
        _, well = life(arrivals, base_s, token_s, overlap, refuse_late=False)
        assert refused[0] not in well
