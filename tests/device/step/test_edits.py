"""Logits that are changed before sampling, against the oracle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.device.logits_processors import (
    _OF_A_PASS,
    IN_PROMPT,
    RowEdits,
    TokenCounts,
    _added_in_passes,
    _added_singly,
    edited,
)
from jpaged.device.model_runner import unpack_edits
from jpaged.device.sampling import SamplingVocabulary
from jpaged.engine.executor.io import NUM_SINGLES, LogitsProcessorInputs, no_singles, num_mask_words, words_of_singles
from tests.device.step import edits_oracle as oracle
from tests.device.step.edits_oracle import Edits

V, R, P = 61, 4, 6
VOCABULARY = SamplingVocabulary(V)
PART = 8


def no_counts() -> TokenCounts:
    return TokenCounts(jnp.zeros((P, V), jnp.int16), jnp.zeros(P, jnp.int32))


@jax.jit
def _begun(counts: TokenCounts, slot: Any, ids: jax.Array, num_prompt: Any, num: Any, first: Any) -> TokenCounts:
    return counts.begun(slot, ids, num_prompt, num, first, VOCABULARY)


def counted(counts: TokenCounts, slot: int, prompt: tuple[int, ...], output: tuple[int, ...]) -> TokenCounts:
    """A sequence counted in parts, as the executor does it."""
    tokens = [*prompt, *output]
    for begin in range(0, max(1, len(tokens)), PART):
        part = tokens[begin : begin + PART]
        ids = np.array(part + [0] * (PART - len(part)), np.int32)
        num_prompt = min(max(len(prompt) - begin, 0), len(part))
        counts = _begun(counts, slot, ids, num_prompt, len(part), begin == 0)
    return counts


def rows_of(rows: list[Edits]) -> RowEdits:
    inputs, masks = LogitsProcessorInputs.neutral(len(rows)), np.full((len(rows), num_mask_words(V)), -1, np.int32)
    singles = no_singles(len(rows))
    for i, row in enumerate(rows):
        inputs.rows_r[i] = (i + 1, row.repetition, row.frequency, row.presence, row.top_n_sigma, row.typical_p)
        singles[i, : len(row.singles)] = [*row.singles]
        if row.allowed is not None:
            bits = np.zeros(num_mask_words(V) * 32, np.uint8)
            bits[list(row.allowed)] = 1
            masks[i] = np.packbits(bits, bitorder="little").view(np.int32)
    words = jnp.asarray(words_of_singles(singles))
    return RowEdits(**unpack_edits(jnp.asarray(inputs.words)), singles_rx3=words, mask_rw=jnp.asarray(masks))


@jax.jit
def _edited(logits: jax.Array, edits: RowEdits, counts: TokenCounts, temperature: jax.Array) -> jax.Array:
    return edited(logits, edits, counts, temperature, VOCABULARY)


TOKENS = st.integers(0, V - 1)
EDITS = st.builds(
    Edits,
    history=st.tuples(st.lists(TOKENS, min_size=1, max_size=20).map(tuple), st.lists(TOKENS, max_size=20).map(tuple)),
    repetition=st.sampled_from([1.0, 1.0, 1.3, 0.5, 2.0]),
    frequency=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    presence=st.sampled_from([0.0, 0.0, 1.5, -0.3]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 1.0, 2.5]),
    singles=st.lists(
        st.tuples(TOKENS, st.sampled_from([-1, -1, 3, 5]), st.sampled_from([-100.0, 5.0, -np.inf, 0.25])),
        max_size=12,
        unique_by=lambda single: single[:2],
    ).map(tuple),
    allowed=st.none() | st.lists(TOKENS, min_size=20, max_size=40, unique=True).map(tuple),
)


@pytest.mark.long
@settings(max_examples=60)
@given(rows=st.lists(EDITS, min_size=R, max_size=R), seed=st.integers(0, 1000))
def test_logits_are_changed_as_the_oracle_changes_them(rows: list[Edits], seed: int) -> None:
    logits = (np.random.default_rng(seed).normal(size=(R, V)) * 3).astype(np.float32)
    counts = no_counts()
    for i, row in enumerate(rows):
        counts = counted(counts, i + 1, *row.history)
    got = np.asarray(_edited(logits, rows_of(rows), counts, jnp.ones(R)))
    for i, row in enumerate(rows):
        want = oracle.edited(logits[i], row)
        if not np.isfinite(want).any():
            continue
        near = np.abs(want - (want[np.isfinite(want)].max() - 0)) < np.inf
        floor_is_near = row.top_n_sigma > 0
        agree = np.isclose(got[i], want, rtol=1e-5, atol=1e-4) | (np.isneginf(got[i]) & np.isneginf(want))
        assert near.any() and (agree.all() or (floor_is_near and (~agree).sum() <= 1)), (row, got[i], want)


@pytest.mark.long
@settings(max_examples=60)
@given(
    edits=EDITS,
    typical_p=st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_tokens_of_typical_information_are_kept(edits: Edits, typical_p: float, temperature: float, seed: int) -> None:
    row = Edits(singles=edits.singles, allowed=edits.allowed, history=edits.history, typical_p=typical_p)
    logits = (np.random.default_rng(seed).normal(size=(R, V)) * 3).astype(np.float32)
    counts = counted(no_counts(), 1, *row.history)
    got = np.asarray(_edited(logits, rows_of([row, Edits(), Edits(), Edits()]), counts, jnp.full(R, temperature)))
    x = oracle.edited(logits[0], row)
    sure, possible = oracle.typical(x, row, temperature)
    is_kept = np.isfinite(got[0])
    assert not (sure & ~is_kept).any()
    assert not (is_kept & ~possible).any()
    assert (got[1:] == logits[1:]).all()


@pytest.mark.parametrize("temperature", [1e-44, 1e-38, 1e-30, 100.0])
@pytest.mark.parametrize("repetition", [1e-44, 1e-38, 100.0])
def test_no_value_that_a_caller_may_give_makes_logits_infinite(temperature: float, repetition: float) -> None:
    row = Edits(history=((3,), (5, 9)), repetition=repetition, top_n_sigma=100.0, typical_p=0.5)
    logits = (np.random.default_rng(0).normal(size=(R, V)) * 30).astype(np.float32)
    counts = counted(no_counts(), 1, *row.history)
    got = np.asarray(_edited(logits, rows_of([row, Edits(), Edits(), Edits()]), counts, jnp.full(R, temperature)))
    assert (got[0] < np.inf).all()
    assert np.isfinite(got[0]).any()


@pytest.mark.parametrize("num_used", [0, 1, 9, 576])
def test_passes_over_all_logits_add_what_is_added_one_by_one(num_used: int) -> None:
    """Those of TPUs, where no row uses the last tokens of all rows; some are named twice, some are not here."""
    rng = np.random.default_rng(num_used)
    logits = rng.normal(size=(R, V)).astype(np.float32)
    columns = np.full((R, NUM_SINGLES), V, np.int32)
    columns[:, :num_used] = rng.integers(0, V + 3, (R, num_used))
    values = rng.choice([0.25, -8.0, 1.5, -np.inf], (R, NUM_SINGLES)).astype(np.float32)
    assert NUM_SINGLES % _OF_A_PASS == 0
    arguments = logits, np.minimum(columns, V), values, jnp.int32(num_used)
    want = np.asarray(jax.jit(_added_singly)(*arguments))
    np.testing.assert_allclose(np.asarray(jax.jit(_added_in_passes)(*arguments)), want, atol=1e-4)
    assert (want != logits).any() == (num_used > 0)


@pytest.mark.long
def test_a_sampled_token_is_counted_and_is_the_last() -> None:
    counts = counted(no_counts(), 1, (7, 7, 8), (9,))
    for token in (8, 8, 9):
        counts = counts.counted(jnp.array([1, 0]), jnp.array([token, 5]), VOCABULARY)
    row = np.asarray(counts.counts_pv[1])
    assert {token: int(row[token]) for token in np.flatnonzero(row)} == {7: IN_PROMPT, 8: IN_PROMPT + 2, 9: 2}
    assert int(counts.last_tokens_p[1]) == 9
    assert not np.asarray(counts.counts_pv[0]).any()
    again = counted(counts, 1, (1,), ())
    assert np.flatnonzero(np.asarray(again.counts_pv[1])).tolist() == [1]


@pytest.mark.parametrize("num", [(1 << 15) - 2, (1 << 15) - 1])
def test_a_count_stays_at_its_largest(num: int) -> None:
    counts = TokenCounts(jnp.zeros((2, V), jnp.int16).at[1, 3].set(num), jnp.zeros(2, jnp.int32))
    for _ in range(3):
        counts = counts.counted(jnp.array([1]), jnp.array([3]), VOCABULARY)
    assert int(counts.counts_pv[1, 3]) == (1 << 15) - 1
