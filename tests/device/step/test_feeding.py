"""A dispatch whose steps wait for masks against the same steps one by one, on the device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jpaged.config import Backend
from jpaged.device.compilation.lowering import sized_step
from jpaged.device.mesh import serving_mesh
from jpaged.engine.executor import I32, Bool, Detail, MaskChannel, StepDirective
from jpaged.engine.executor.io import MASK_BITS, LogitsProcessorInputs, num_mask_words
from jpaged.errors import InternalError
from jpaged.testing.fake_steps import step_at
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence
from tests.device.step.test_decode import NO_IDS, NUM_ROWS, begin, decode

NUM_STEPS = 6


def masks_of(driver: Driver, step: int) -> I32:
    """A third of all tokens, others in each row and step; the last row has all."""
    rng = np.random.default_rng(step)
    bits_rv = rng.random((NUM_ROWS, num_mask_words(driver.geometry.vocab_size) * MASK_BITS)) < 0.3
    bits_rv[2:] = True
    return np.packbits(bits_rv, axis=1, bitorder="little").view(np.int32)


def one_by_one(driver: Driver, sequences: list[Sequence], num_steps: int = NUM_STEPS) -> I32:
    """The tokens [3, n] of single steps with these masks."""
    executor, rows = driver.executor, [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(sequences)]
    first = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    columns = []
    for place in range(num_steps):
        inputs, sampling = step_at(place, *first, driver.geometry.block_size)
        edits = dataclasses.replace(LogitsProcessorInputs.neutral(NUM_ROWS), mask_rw=masks_of(driver, place))
        sampling = dataclasses.replace(sampling, edits=edits)
        columns.append(executor.collect(executor.sample(executor.forward(inputs), sampling)).token_ids_rn[:3, 0])
    for sequence in sequences:
        sequence.num_computed += num_steps
    return np.stack(columns, axis=1)


def start(driver: Driver, sequences: list[Sequence], ending_ids_rx: I32 = NO_IDS) -> tuple[object, MaskChannel]:
    rows = [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(sequences)]
    inputs, sampling = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    return driver.executor.decode_with_masks(inputs, sampling, ending_ids_rx, NUM_STEPS)


def drawn_of(feed: MaskChannel) -> tuple[I32, Bool]:
    drawn = feed.wait()
    assert drawn is not None
    return drawn


@pytest.mark.parametrize("last", [0, 3, NUM_STEPS - 1])
@pytest.mark.long
def test_steps_that_are_fed_are_the_same_as_one_after_another(driver: Driver, last: int) -> None:
    """And so are those behind them, of which the first finds the last tokens on the device."""
    sequences = begin(driver)
    want = one_by_one(driver, sequences, last + 1)
    behind = decode(driver, sequences, num=2).token_ids_rn[:3, :2]
    handle, feed = start(driver, sequences := begin(driver))
    for step in range(last + 1):
        feed.give(
            masks_of(driver, step), StepDirective.LAST if step == last < NUM_STEPS - 1 else StepDirective.CONTINUE
        )
        token_ids_r, is_sound_r = drawn_of(feed)
        np.testing.assert_array_equal(token_ids_r[:3], want[:, step])
        assert is_sound_r.all()
    found = driver.executor.collect(handle)
    feed.close()
    np.testing.assert_array_equal(found.token_ids_rn[:3, : last + 1], want)
    for sequence in sequences:
        sequence.num_computed += last + 1
    np.testing.assert_array_equal(decode(driver, sequences, num=2).token_ids_rn[:3, :2], behind)


@pytest.mark.long
def test_what_comes_behind_a_closed_feed_finds_the_last_token_that_was_made(driver: Driver) -> None:
    sequences = begin(driver)
    want = one_by_one(driver, sequences, 2)
    behind = decode(driver, sequences, num=2).token_ids_rn[:3, :2]
    handle, feed = start(driver, sequences := begin(driver))
    for step in range(2):
        feed.give(masks_of(driver, step), StepDirective.CONTINUE)
        drawn_of(feed)
    feed.close()
    np.testing.assert_array_equal(driver.executor.collect(handle).token_ids_rn[:3, :2], want)
    for sequence in sequences:
        sequence.num_computed += 2
    np.testing.assert_array_equal(decode(driver, sequences, num=2).token_ids_rn[:3, :2], behind)


def test_the_device_stops_by_itself_where_all_rows_have_ended(driver: Driver) -> None:
    want = one_by_one(driver, begin(driver))
    ending_ids_rx = NO_IDS.copy()
    ending_ids_rx[:3, 0] = want[:, 1]
    last = max(want[row].tolist().index(want[row, 1]) for row in range(3))
    handle, feed = start(driver, begin(driver), ending_ids_rx)
    for step in range(last + 1):
        feed.give(masks_of(driver, step), StepDirective.CONTINUE)
        drawn_of(feed)
    feed.give(masks_of(driver, last + 1), StepDirective.CONTINUE)
    assert feed.wait() is None
    found = driver.executor.collect(handle)
    feed.close()
    for row in range(3):
        end = want[row].tolist().index(want[row, 1])
        np.testing.assert_array_equal(found.token_ids_rn[row, : end + 1], want[row, : end + 1])


def test_steps_of_no_program_leave_no_feed_open(driver: Driver) -> None:
    rows = [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(begin(driver))]
    inputs, sampling = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    cut = type(sampling)(sampling.rows_r[:3])
    with pytest.raises(InternalError, match=r"program decode\[3\] is not compiled"):
        driver.executor.decode_with_masks(inputs, cut, NO_IDS[:3], 2)


@pytest.mark.parametrize(("backend", "is_async"), [("cpu", True), ("cpu", False), ("xla", True)])
def test_steps_can_be_fed_where_the_kernel_waits_on_another_thread(backend: Backend, is_async: bool) -> None:
    model = dataclasses.replace(tiny_model.OPTIONS.model, attention_backend=backend)
    options = dataclasses.replace(tiny_model.OPTIONS, model=model)
    before = jax.config.values["jax_cpu_enable_async_dispatch"]
    jax.config.update("jax_cpu_enable_async_dispatch", is_async)
    try:
        _, geometry = sized_step(tiny_model.model(), options, "loop", 5, serving_mesh(1))
    finally:
        jax.config.update("jax_cpu_enable_async_dispatch", before)
    assert geometry.has_fed_steps == (backend == "cpu" and is_async)
