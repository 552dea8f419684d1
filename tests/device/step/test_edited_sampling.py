"""Samples of edited rows through an executor: whatever is told, and where programs are for more rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jpaged.config import SchedulerOptions
from jpaged.device.executor import JaxExecutor
from jpaged.engine.executor import Detail, SamplingInputs, StepOutputs
from jpaged.engine.executor.io import ANY_TOKEN, LogitsProcessorInputs, TokenCountReset, no_masks, no_singles
from tests.device import tiny_model
from tests.device.driver import Driver, Row

PROMPTS = [[5, 6, 7, 8], [3, 4], [9, 1, 1]]


@pytest.fixture(scope="module")
def executor() -> Iterator[JaxExecutor]:
    scheduler = SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=16)
    cache = dataclasses.replace(tiny_model.OPTIONS.cache, num_blocks=160)
    executor = tiny_model.warm_executor(dataclasses.replace(tiny_model.OPTIONS, scheduler=scheduler, cache=cache))
    yield executor
    executor.shutdown()


def sampled(
    executor: JaxExecutor, edits: LogitsProcessorInputs | None, detail: Detail
) -> tuple[SamplingInputs, StepOutputs]:
    driver = Driver(executor)
    rows = [Row(driver.sequence(prompt, temperature=i / 2, seed=i), len(prompt)) for i, prompt in enumerate(PROMPTS)]
    inputs = dataclasses.replace(driver.sampling(rows, detail=detail), edits=edits)
    return inputs, executor.collect(executor.sample(executor.forward(driver.inputs(rows)), inputs))


@pytest.mark.parametrize("detail", list(Detail))
def test_rows_of_which_nothing_is_changed_are_sampled_and_told_of_as_others(
    executor: JaxExecutor, detail: Detail
) -> None:
    inputs, want = sampled(executor, None, detail)
    assert (len(inputs.rows_r), executor._programs.sizes("edited")) == (8, (16,)), "they run on more"
    _, got = sampled(executor, LogitsProcessorInputs.neutral(8), detail)
    np.testing.assert_array_equal(got.token_ids_rn[:3], want.token_ids_rn[:3])
    assert got.is_finite_rn[:3].all()
    for name in ("logprobs_rn", "ranks_rn", "top_ids_rnk", "top_logprobs_rnk"):
        wanted, found = getattr(want, name), getattr(got, name)
        if wanted is not None:
            np.testing.assert_allclose(found[:3], wanted[:3], atol=1e-5)
    assert executor.num_compiles_after_warm_up == 0


@pytest.mark.long
def test_single_tokens_masks_and_counts_of_few_rows_run_on_more(executor: JaxExecutor) -> None:
    _, plain = sampled(executor, None, Detail.TOKENS)
    greedy = plain.token_ids_rn.item(0, 0)
    edits = LogitsProcessorInputs.neutral(8)
    singles, masks = no_singles(8), no_masks(8, tiny_model.CONFIG.vocab_size)
    singles[0, 0] = (greedy, ANY_TOKEN, -np.inf)
    masks[1], masks[1, 1] = 0, 1 << 5
    edits.rows_r["slots_r"][2], edits.rows_r["presence_r"][2] = 3, -1e6
    due = (TokenCountReset(3, [9, 1, 1, 42], 3),)
    inputs, outputs = sampled(executor, LogitsProcessorInputs(edits.rows_r, singles, masks, due), Detail.LOGPROBS)
    tokens = outputs.token_ids_rn[:3, 0].tolist()
    assert tokens[0] != greedy
    assert tokens[1:] == [32 + 5, 42]
    counts = np.asarray(executor._runner._counts.counts_pv)[3]
    assert counts[42] == 2, "what was generated before, and what was sampled now"
    assert inputs.edits is not None
    assert len(inputs.edits.rows_r) == 8, "what was given is as it was"


def test_what_is_padded_is_neutral() -> None:
    edits = LogitsProcessorInputs(
        LogitsProcessorInputs.neutral(2).rows_r, no_singles(2), no_masks(2, 40), (TokenCountReset(1, [2], 1),)
    )
    padded = edits.padded(5)
    assert (padded.rows_r == LogitsProcessorInputs.neutral(5).rows_r).all()
    assert padded.singles_rx is not None
    assert (padded.singles_rx == no_singles(5)).all()
    assert padded.mask_rw is not None
    assert (padded.mask_rw == no_masks(5, 40)).all()
    assert padded.due == edits.due
    assert edits.padded(2) is edits
    rows = SamplingInputs.neutral(2).padded(5)
    assert rows.rows_r["is_padding_r"].tolist() == [0, 0, 1, 1, 1]
