"""Beams of requests that arrive apart: how many steps they take together, counted on the fake executor."""

import pytest

from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.harness import Harness
from tests.engine.kv_cache.oracle import expected_beams

BEAMS = {"beam_width": 2, "n": 2}


def make(**executor):
    shape = {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 32} | executor
    return Harness(executor=FakeExecutor(**shape), enable_prefix_caching=False)


def beams(h, name, prompt, max_tokens):
    """Submits a search, and says what it must find."""
    request = h.submit(name, prompt, max_tokens=max_tokens, **BEAMS)
    return expected_beams(prompt, request.sampling)


def rows_by_step(h):
    """Rows of each step that the executor has run, from now on."""
    rows, forward = [], h.executor.forward

    def counted(inputs):
        rows.append(inputs.num_rows)
        return forward(inputs)

    h.executor.forward = counted
    return rows


@pytest.mark.parametrize("apart", range(6))
def test_beams_of_two_requests_draw_in_the_same_steps_however_far_apart_they_arrive(apart):
    h = make()
    rows = rows_by_step(h)
    found = {"a": beams(h, "a", [1, 3, 5], 20)}
    for _ in range(apart):
        h.step()
    found["b"] = beams(h, "b", [2, 3, 5], 20)
    h.run()
    assert rows.count(4) >= 19 - apart  # of the first tokens one beam draws; then two of each request
    assert len(rows) <= 20 + apart  # alternating they would be 40
    for name, expected in found.items():
        assert [h.tokens(name, i) for i in range(2)] == expected


def test_beams_of_many_requests_that_arrive_in_every_step_end_up_in_the_same_ones():
    h = make()
    rows = rows_by_step(h)
    found = {}
    for i in range(6):
        found[f"r{i}"] = beams(h, f"r{i}", [i, 3, 5], 30)
        h.step()
    h.run()
    # They wait only where nothing else runs; while prompts come something does.
    assert rows.count(12) >= 25
    assert len(rows) <= 40
    for name, expected in found.items():
        assert [h.tokens(name, i) for i in range(2)] == expected


def test_nobody_waits_for_beams_that_are_about_to_end():
    h = make()
    rows = rows_by_step(h)
    h.submit("plain", [7, 8], max_tokens=3)
    beams(h, "a", [1, 3, 5], 2)
    h.step()
    beams(h, "b", [2, 3, 5], 8)
    for _ in range(3):
        h.step()
    assert rows == [2, 2, 3, 2]  # "b" draws while the last tokens of "a" are in flight
    h.run()


@pytest.mark.parametrize("min_tokens", [0, 25])
def test_a_row_without_beams_is_in_every_step_that_it_would_be_in_without_them(min_tokens):
    h = make()
    rows = rows_by_step(h)
    h.submit("plain", [7, 8], max_tokens=25, min_tokens=min_tokens)
    beams(h, "a", [1, 3, 5], 9)
    h.step()
    beams(h, "b", [2, 3, 5], 9)
    num_before = h.num_steps
    while not h.events["plain"] or not h.events["plain"][-1].is_last:
        h.step()
    assert h.num_steps - num_before == 25  # one is there, and the last is collected a step later
    assert all(rows)
    assert h.tokens("plain") == expected_tokens([7, 8], 25)
    h.run()


def test_a_request_that_can_run_is_not_kept_waiting_for_beams():
    h = make()
    rows = rows_by_step(h)
    beams(h, "a", [1, 3, 5], 9)
    h.step()
    beams(h, "b", [2, 3, 5], 9)
    h.step()
    h.submit("new", [7, 8], max_tokens=1)  # in the step in which "a" would have waited for "b"
    h.step()
    assert rows == [1, 1, 3]
    h.run()


def test_a_request_without_a_row_for_it_does_not_keep_beams_apart():
    h = make(max_num_seqs=4)
    rows = rows_by_step(h)
    beams(h, "a", [1, 3, 5], 20)
    h.step()
    beams(h, "b", [2, 3, 5], 20)
    h.submit("no row", [7, 8], max_tokens=1)
    h.run()
    assert rows.count(4) >= 18
    assert h.tokens("no row") == expected_tokens([7, 8], 1)
