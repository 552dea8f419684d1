"""Sampling over a vocabulary that is split over devices: what one device samples, to the token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged.device import sampling
from jpaged.device.mesh import LOGITS_SPEC, MODEL_AXIS, build_mesh, on_shards
from jpaged.device.sampling import SamplingVocabulary
from jpaged.engine.executor import Detail
from jpaged.kernels.sampling import RowSampling, SampledTokens
from jpaged.kernels.sampling.rows import exponentials, get_exponentials
from tests.device.step.sampling_oracle import Params
from tests.device.step.test_sampling import V, random_logits, row_sampling, unsound_rows

NUM_PARTS = (2, 4, 8)

ROWS = [
    Params(temperature=0.0),
    Params(temperature=1.0, seed=3),
    Params(temperature=0.7, top_k=5, seed=2**63, position=9),
    Params(temperature=1.3, top_p=0.8, seed=4, index=2),
    Params(temperature=1.0, min_p=0.1, seed=5),
    Params(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=6, banned=(0, 30, V - 1)),
    Params(temperature=2.5, top_p=0.01, seed=7),
    Params(temperature=0.0, banned=(1, 2, 3)),
]


def sample_split(logits: np.ndarray, how: RowSampling, num_parts: int, detail: Detail) -> SampledTokens:
    """The columns padded with what must never be sampled, and split."""
    mesh = build_mesh(jax.devices()[:num_parts])
    vocabulary = SamplingVocabulary(logits.shape[1], MODEL_AXIS)
    padded = np.pad(logits, ((0, 0), (0, -logits.shape[1] % num_parts)), constant_values=100.0)
    run = functools.partial(sampling.sample, vocabulary=vocabulary, detail=detail)
    return jax.jit(on_shards(run, mesh, (LOGITS_SPEC, PartitionSpec()), PartitionSpec()))(padded, how)


def sample_whole(logits: np.ndarray, how: RowSampling, detail: Detail) -> SampledTokens:
    run = functools.partial(sampling.sample, vocabulary=SamplingVocabulary(logits.shape[1]), detail=detail)
    return jax.jit(run)(logits, how)


def assert_same_sample(got: SampledTokens, want: SampledTokens) -> None:
    np.testing.assert_array_equal(got.token_ids_r, want.token_ids_r)
    np.testing.assert_array_equal(np.asarray(got.ranks_r), np.asarray(want.ranks_r))
    np.testing.assert_allclose(np.asarray(got.logprobs_r), np.asarray(want.logprobs_r), atol=1e-5)
    np.testing.assert_array_equal(got.top_ids_rk, want.top_ids_rk)
    np.testing.assert_allclose(np.asarray(got.top_logprobs_rk), np.asarray(want.top_logprobs_rk), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("num_parts", NUM_PARTS)
def test_a_split_vocabulary_samples_the_same_tokens(num_parts: int) -> None:
    sampled = set()
    for seed in range(4):
        logits, how = random_logits(len(ROWS), seed), row_sampling(ROWS)
        want = sample_whole(logits, how, Detail.TOP_LOGPROBS)
        assert_same_sample(sample_split(logits, how, num_parts, Detail.TOP_LOGPROBS), want)
        sampled |= set(np.asarray(want.token_ids_r).tolist())
    assert len({token * num_parts // V for token in sampled}) > 1  # of several devices


@pytest.mark.long
@pytest.mark.parametrize("num_parts", NUM_PARTS)
def test_ties_between_devices_go_to_the_lowest_token(num_parts: int) -> None:
    logits = np.zeros((3, V), np.float32)
    logits[1, [20, 40, 60]] = 2.0
    logits[2] = np.tile(np.asarray([0, 1], np.float32), V)[:V]
    how = row_sampling([Params(temperature=0.0)] * 3)
    got = sample_split(logits, how, num_parts, Detail.TOP_LOGPROBS)
    assert np.asarray(got.token_ids_r).tolist() == [0, 20, 1]
    assert_same_sample(got, sample_whole(logits, how, Detail.TOP_LOGPROBS))


@pytest.mark.long
@pytest.mark.parametrize("num_bits", [2, 4])
def test_passes_that_settle_more_bits_find_the_same_thresholds(num_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators settle several at once; here one at a time is the rule."""
    logits, how = random_logits(len(ROWS), 11), row_sampling(ROWS)
    logits[2, :40] *= 1e30
    logits[3] = np.round(logits[3])
    logits[5] = np.where(np.arange(V) < 3, 1.0, -3e38)
    assert sampling.BITS_OF_A_PASS["cpu"] == 1

    def floors(num_parts: int) -> np.ndarray:
        mesh, axis = build_mesh(jax.devices()[:num_parts]), MODEL_AXIS if num_parts > 1 else None
        padded = np.pad(logits, ((0, 0), (0, -V % num_parts)), constant_values=-np.inf)
        run = functools.partial(sampling.truncation_floor, vocabulary=SamplingVocabulary(V, axis))
        return np.asarray(jax.jit(on_shards(run, mesh, (LOGITS_SPEC, PartitionSpec()), PartitionSpec()))(padded, how))

    want = [floors(1), floors(2)]
    monkeypatch.setitem(sampling.BITS_OF_A_PASS, "cpu", num_bits)
    np.testing.assert_array_equal([floors(1), floors(2)], want)
    assert np.isfinite(want).sum() > len(ROWS)


@pytest.mark.long
@pytest.mark.parametrize("detail", list(Detail))
def test_every_number_of_devices_sees_which_rows_are_not_sound(detail: Detail) -> None:
    logits, rows, is_unsound = unsound_rows()
    how = row_sampling(rows)
    want = sample_whole(logits, how, detail)
    for num_parts in NUM_PARTS:
        got = sample_split(logits, how, num_parts, detail)
        np.testing.assert_array_equal(got.is_sound_r, ~is_unsound)
        np.testing.assert_array_equal(got.token_ids_r[~is_unsound], want.token_ids_r[~is_unsound])
        assert (np.asarray(got.token_ids_r) < V).all()


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 64])
def test_noise_of_some_tokens_is_that_of_all(vocab_size: int) -> None:
    how = row_sampling(ROWS)
    key = how.seeds_r2, how.sequence_indices_r, how.positions_r
    whole = np.asarray(exponentials(*key, vocab_size))
    for begin in range(0, vocab_size, 5):
        ids = jnp.arange(begin, min(begin + 5, vocab_size))
        np.testing.assert_array_equal(get_exponentials(*key, ids, vocab_size), whole[:, begin : begin + 5])
