"""A dispatch of several steps against the same steps one by one, on the device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.executor import JaxExecutor
from jpaged.engine.executor import BANNED_WIDTH, BEYOND_TOKENS, I32, Detail, StepOutputs
from jpaged.errors import InternalError
from jpaged.testing.fake_steps import step_at
from tests.device.driver import Driver, Row, Sequence

NUM_ROWS, NUM_STEPS = 8, 9
NO_IDS = np.full((NUM_ROWS, BANNED_WIDTH), BEYOND_TOKENS, np.int32)


def begin(driver: Driver) -> list[Sequence]:
    """Three rows whose first token is on the device: greedy, and two that are sampled."""
    how: tuple[dict[str, float], ...] = (
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2**40 + 1},
    )
    sequences = [driver.sequence([3 + i, 5, 8 - i], **how[i]) for i in range(3)]
    driver.run([Row(sequence, 3) for sequence in sequences])
    return sequences


def decode(driver: Driver, sequences: list[Sequence], ending_ids_rx: I32 = NO_IDS, num: int = NUM_STEPS) -> StepOutputs:
    """Several steps of these rows, whose inputs are the last tokens in their order."""
    rows = [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(sequences)]
    inputs, sampling = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    outputs = driver.executor.collect(driver.executor.decode(inputs, sampling, ending_ids_rx, num))
    for sequence in sequences:
        sequence.num_computed += num
    return outputs


def one_by_one(driver: Driver, sequences: list[Sequence]) -> I32:
    """The tokens [3, n] of the same steps, each of which is a forward and a sample."""
    executor, rows = driver.executor, [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(sequences)]
    first = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    columns = []
    for place in range(NUM_STEPS):
        inputs, sampling = step_at(place, *first, driver.geometry.block_size)
        columns.append(executor.collect(executor.sample(executor.forward(inputs), sampling)).token_ids_rn[:3, 0])
    for sequence in sequences:
        sequence.num_computed += NUM_STEPS
    return np.stack(columns, axis=1)


@pytest.mark.long
def test_several_steps_are_the_same_as_one_after_another(driver: Driver) -> None:
    """Over the ends of blocks of 8, and so are the steps that come behind them."""
    want = [one_by_one(driver, sequences := begin(driver)), one_by_one(driver, sequences)]
    outputs = [decode(driver, sequences := begin(driver)), decode(driver, sequences)]
    for found, tokens in zip(outputs, want, strict=True):
        np.testing.assert_array_equal(found.token_ids_rn[:3, :NUM_STEPS], tokens)
        assert found.is_finite_rn.all()
    assert len(set(want[0].ravel().tolist())) > 5


def test_a_row_that_has_ended_keeps_its_token_and_the_others_go_on(driver: Driver) -> None:
    want = one_by_one(driver, begin(driver))
    ending_ids_rx, end = NO_IDS.copy(), want[1].tolist().index(want[1, 4])
    ending_ids_rx[1, 3] = want[1, 4]
    found = decode(driver, begin(driver), ending_ids_rx)
    np.testing.assert_array_equal(found.token_ids_rn[[0, 2], :NUM_STEPS], want[[0, 2]])
    np.testing.assert_array_equal(found.token_ids_rn[1, : end + 1], want[1, : end + 1])
    assert set(found.token_ids_rn[1, end:NUM_STEPS].tolist()) == {want[1, 4]}
    assert found.is_finite_rn.all()


def test_no_step_is_run_when_all_rows_have_ended(driver: Driver, executor: JaxExecutor) -> None:
    """Neither in the dispatch in which they do, nor in the next: a slot behind the end holds what it held."""
    want = one_by_one(driver, begin(driver))
    ends = [want[row].tolist().index(want[row, 2]) for row in range(3)]
    ending_ids_rx = NO_IDS.copy()
    ending_ids_rx[:3, 0] = want[:, 2]
    sequences = begin(driver)
    last = max(ends)
    kept = [slot_of(executor, sequence, 3 + last + 1) for sequence in sequences]
    decode(driver, sequences, ending_ids_rx)
    decode(driver, sequences, ending_ids_rx, num=2)
    for sequence, before in zip(sequences, kept, strict=True):
        np.testing.assert_array_equal(slot_of(executor, sequence, 3 + last + 1), before)
    assert any((slot_of(executor, sequence, 3 + last) != 0).any() for sequence in sequences)


def slot_of(executor: JaxExecutor, sequence: Sequence, position: int) -> np.ndarray:
    """What the pool holds of a position, in the first layer."""
    block_size = executor.geometry.block_size
    pool = executor._pool.take()
    content = np.array(jnp.asarray(pool)[sequence.blocks[position // block_size], position % block_size])
    executor._pool.put(pool)
    return content


def test_rows_of_no_program_are_refused(driver: Driver) -> None:
    rows = [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(begin(driver))]
    inputs, sampling = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    cut = type(sampling)(sampling.rows_r[:3])
    with pytest.raises(InternalError, match=r"program decode\[3\] is not compiled"):
        driver.executor.decode(inputs, cut, NO_IDS[:3], 2)
