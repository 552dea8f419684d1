"""The kernel of CPUs samples what XLA samples, at every width of vectors, whatever is beside a row.

What both have in common is asked of both in tests/device/step/test_sampling.py; here are the sizes at which a kernel
goes wrong that is right for a few tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import Backend
from jpaged.device.model_runner import unpack_rows
from jpaged.engine.executor import BANNED_WIDTH, BEYOND_TOKENS, Detail, SamplingInputs
from jpaged.kernels.cpu import build, library
from jpaged.kernels.sampling import RowSampling, SampledTokens, choose_kernel
from jpaged.kernels.sampling.cpu import kernel
from tests.device.step.test_sampling import kernel_of_cpus, run_sampling

NUM_ROWS = 24
WIDTHS = (16, 8, 4)


def random_rows(seed: int, vocab_size: int) -> SamplingInputs:
    """Every way to sample, mixed; every fourth row bans tokens."""
    rng, inputs = np.random.default_rng(seed), SamplingInputs.neutral(NUM_ROWS)
    inputs.rows_r["temperature_r"] = rng.choice([0, 0.3, 1, 2.5], NUM_ROWS)
    inputs.rows_r["top_k_r"] = rng.choice([BEYOND_TOKENS, BEYOND_TOKENS, 1, 7, 50, vocab_size], NUM_ROWS)
    inputs.rows_r["top_p_r"] = rng.choice([1, 1, 0.99, 0.9, 0.01], NUM_ROWS)
    inputs.rows_r["min_p_r"] = rng.choice([0, 0, 0.05, 1], NUM_ROWS)
    inputs.rows_r["seeds_r2"] = rng.integers(0, 2**32, (NUM_ROWS, 2))
    inputs.rows_r["sequence_indices_r"] = rng.integers(0, 64, NUM_ROWS)
    inputs.rows_r["positions_r"] = rng.integers(0, 2**20, NUM_ROWS)
    for row in range(0, NUM_ROWS, 4):
        num_banned = int(rng.integers(1, min(BANNED_WIDTH, vocab_size)))
        inputs.rows_r["banned_token_ids_rx"][row, :num_banned] = rng.choice(vocab_size, num_banned, replace=False)
    return inputs


def random_logits(seed: int, vocab_size: int) -> np.ndarray:
    """Rows from nearly flat, where the noise decides, to steep; some with ties, some with minus infinity."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(NUM_ROWS, vocab_size)) * rng.choice([0.1, 1, 3, 8], (NUM_ROWS, 1))
    logits[::5] = np.round(logits[::5]) + 0.0  # no minus zero, which XLA puts below zero among the likeliest
    logits[1::5, :: vocab_size // 2] = -np.inf
    return logits.astype(np.float32)


def how_of(inputs: SamplingInputs) -> RowSampling:
    return RowSampling(**unpack_rows(jnp.asarray(inputs.words)))


def assert_same(got: SampledTokens, want: SampledTokens) -> None:
    assert len(jax.tree.leaves(got)) == len(jax.tree.leaves(want))
    np.testing.assert_array_equal(got.token_ids_r, want.token_ids_r)
    np.testing.assert_array_equal(got.is_sound_r, want.is_sound_r)
    if want.logprobs_r is not None:
        np.testing.assert_allclose(np.asarray(got.logprobs_r), np.asarray(want.logprobs_r), atol=2e-5)
        np.testing.assert_array_equal(np.asarray(got.ranks_r), np.asarray(want.ranks_r))
    if want.top_ids_rk is not None:
        np.testing.assert_array_equal(np.asarray(got.top_ids_rk), np.asarray(want.top_ids_rk))
        np.testing.assert_allclose(np.asarray(got.top_logprobs_rk), np.asarray(want.top_logprobs_rk), atol=2e-5)


@pytest.mark.parametrize("vocab_size", [2, 15, 61, 256, 257, 513, 4099])
@pytest.mark.thinned(5)
def test_every_width_samples_as_xla_does(vocab_size: int) -> None:
    for seed in range(3):
        logits, how = random_logits(seed, vocab_size), how_of(random_rows(seed, vocab_size))
        want = run_sampling(logits, how, Detail.TOP_LOGPROBS, None)
        for width in WIDTHS:
            of_width = dataclasses.replace(kernel_of_cpus(), max_width=width)
            assert_same(run_sampling(logits, how, Detail.TOP_LOGPROBS, of_width), want)


def test_the_tokens_of_a_large_vocabulary_are_those_of_xla() -> None:
    logits, how = random_logits(9, 32_003), how_of(random_rows(9, 32_003))
    assert_same(
        run_sampling(logits, how, Detail.TOP_LOGPROBS, kernel_of_cpus()),
        run_sampling(logits, how, Detail.TOP_LOGPROBS, None),
    )


def test_a_row_is_sampled_alone_as_among_others_by_one_thread_as_by_many() -> None:
    vocab_size = 16_001  # enough work for several threads
    logits, inputs = random_logits(4, vocab_size), random_rows(4, vocab_size)
    together = run_sampling(logits, how_of(inputs), Detail.TOP_LOGPROBS, kernel_of_cpus())
    single = dataclasses.replace(kernel_of_cpus(), max_threads=1)
    by_one = run_sampling(logits, how_of(inputs), Detail.TOP_LOGPROBS, single)
    for got, want in zip(jax.tree.leaves(by_one), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(got, want)
    for row in range(0, NUM_ROWS, 5):
        alone = dataclasses.replace(inputs, rows_r=inputs.rows_r[row : row + 1])
        its = run_sampling(logits[row : row + 1], how_of(alone), Detail.TOP_LOGPROBS, kernel_of_cpus())
        for got, want in zip(jax.tree.leaves(its), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(got[0], want[row])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("vocab_size", [300, 1024])
def test_one_number_anywhere_makes_a_row_unsound_and_no_other(vocab_size: int, width: int) -> None:
    places = (0, 1, 15, 16, 255, 256, vocab_size - 1)
    logits = np.zeros((2 * len(places), vocab_size), np.float32)
    for row, place in enumerate(places):
        logits[2 * row, place] = (np.nan, -np.nan, np.inf)[row % 3]
        logits[2 * row + 1, place] = -np.inf
    for temperature in (0.0, 1.0):
        inputs = SamplingInputs.neutral(len(logits))
        inputs.rows_r["temperature_r"] = temperature
        inputs.rows_r["banned_token_ids_rx"][::4, 0] = places[::2]  # which changes nothing
        sampled = run_sampling(
            logits, how_of(inputs), Detail.TOKENS, dataclasses.replace(kernel_of_cpus(), max_width=width)
        )
        assert np.asarray(sampled.is_sound_r).tolist() == [False, True] * len(places)


@pytest.mark.parametrize("detail", [Detail.TOKENS, Detail.TOP_LOGPROBS])
def test_the_logits_of_padding_rows_are_not_read(detail: Detail) -> None:
    vocab_size, num_in_use = 300, 5
    logits, inputs = random_logits(3, vocab_size), random_rows(3, vocab_size)
    want = run_sampling(logits, how_of(inputs), detail, kernel_of_cpus())
    inputs.rows_r["is_padding_r"][num_in_use:] = 1
    logits[num_in_use:] = np.nan
    got = run_sampling(logits, how_of(inputs), detail, kernel_of_cpus())
    for its, whole in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(its[:num_in_use], whole[:num_in_use])
    assert not np.asarray(got.token_ids_r[num_in_use:]).any()
    assert np.asarray(got.is_sound_r[num_in_use:]).all()


def test_rows_that_contradict_each_other_are_refused() -> None:
    how = how_of(SamplingInputs.neutral(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the rows' arrays differ in length"):
        jax.block_until_ready(kernel_of_cpus().sample(jnp.zeros((4, 8)), how, has_logprobs=False))
    with pytest.raises(jax.errors.JaxRuntimeError, match="there are no log-probabilities"):
        jax.block_until_ready(kernel_of_cpus().sample(jnp.zeros((3, 8)), how, has_logprobs=False, num_top=2))


@pytest.mark.parametrize(
    ("backend", "num_devices", "is_taken"), [("cpu", 1, True), ("cpu", 2, False), ("xla", 1, False)]
)
def test_the_kernel_samples_where_its_library_attends_and_a_device_has_all_logits(
    backend: Backend, num_devices: int, is_taken: bool
) -> None:
    assert (choose_kernel(backend, num_devices, 61) is not None) == is_taken


def test_without_the_library_xla_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", build.LIBRARY.with_name("missing.so"))
    library.library.cache_clear()
    kernel.cache_clear()
    assert choose_kernel("cpu", 1, 61) is None
    monkeypatch.undo()
    library.library.cache_clear()
    kernel.cache_clear()
    assert choose_kernel("cpu", 1, 61) is not None
