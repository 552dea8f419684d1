"""Masks that the host gives to the kernel of CPUs while its program runs."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.executor import Detail, StepDirective
from jpaged.engine.executor.io import MASK_BITS, num_mask_words
from jpaged.kernels.sampling import RowSampling, SampledTokens
from jpaged.kernels.sampling.cpu import CpuSampling, Feed
from tests.device.step.test_sampling import kernel_of_cpus, run_sampling
from tests.kernels.sampling.test_sampling_cpu import (
    NUM_ROWS,
    WIDTHS,
    assert_same,
    how_of,
    random_logits,
    random_rows,
)


@pytest.fixture
def feed(request: pytest.FixtureRequest):
    vocab_size = getattr(request, "param", 64)
    found = Feed.open(NUM_ROWS, num_mask_words(vocab_size))
    yield found
    found.close()


def sample(
    feed: Feed, logits: np.ndarray, how: RowSampling, step: int = 0, kernel: CpuSampling | None = None
) -> tuple[SampledTokens, jax.Array]:
    run = jax.jit((kernel or kernel_of_cpus()).sample_fed)
    return run(logits, how, jnp.int32(feed.number), jnp.int32(step))


def random_masks(seed: int, vocab_size: int) -> np.ndarray:
    """From nearly all tokens to a single one; bits of no token are set."""
    rng = np.random.default_rng(seed)
    bits_rv = rng.random((NUM_ROWS, num_mask_words(vocab_size) * MASK_BITS)) < rng.choice(
        [0.01, 0.3, 0.99], (NUM_ROWS, 1)
    )
    bits_rv[np.arange(NUM_ROWS), rng.integers(0, vocab_size, NUM_ROWS)] = True
    bits_rv[::6] = True
    return np.packbits(bits_rv, axis=1, bitorder="little").view(np.int32)


def masked(logits: np.ndarray, masks: np.ndarray) -> np.ndarray:
    bits_rv = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return np.where(bits_rv == 1, logits, -np.inf).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [2, 15, 61, 256, 257, 513, 4099])
@pytest.mark.thinned(3)
@pytest.mark.long
def test_a_masked_row_is_sampled_as_one_whose_other_tokens_cannot_be(vocab_size: int) -> None:
    for seed in range(3):
        logits, how = random_logits(seed, vocab_size), how_of(random_rows(seed, vocab_size))
        masks = random_masks(seed, vocab_size)
        for width in WIDTHS:
            kernel = dataclasses.replace(kernel_of_cpus(), max_width=width)
            feed = Feed.open(NUM_ROWS, masks.shape[1])
            feed.give(masks, StepDirective.LAST)
            sampled, verdict = sample(feed, logits, how, kernel=kernel)
            drawn = feed.wait()
            feed.close()
            want = run_sampling(masked(logits, masks), how, Detail.TOKENS, kernel)
            assert_same(sampled, want)
            assert verdict == StepDirective.LAST
            assert drawn is not None
            np.testing.assert_array_equal(drawn[0], want.token_ids_r)
            np.testing.assert_array_equal(drawn[1], want.is_sound_r)


def test_without_a_feed_rows_have_all_tokens() -> None:
    logits, how = random_logits(5, 300), how_of(random_rows(5, 300))
    sampled, verdict = sample(Feed(0, NUM_ROWS, 1), logits, how)
    assert_same(sampled, run_sampling(logits, how, Detail.TOKENS, kernel_of_cpus()))
    assert verdict == StepDirective.CONTINUE


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_is_masked_makes_a_row_unsound_too(width: int, number: float) -> None:
    logits, kernel = np.zeros((NUM_ROWS, 64), np.float32), dataclasses.replace(kernel_of_cpus(), max_width=width)
    logits[::2, 40] = number
    feed = Feed.open(NUM_ROWS, 2)
    feed.give(np.full((NUM_ROWS, 2), 5, np.int32), StepDirective.CONTINUE)
    sampled, _ = sample(feed, logits, how_of(random_rows(1, 64)), kernel=kernel)
    feed.close()
    assert np.asarray(sampled.is_sound_r).tolist() == [False, True] * (NUM_ROWS // 2)


def test_a_row_that_may_have_nothing_is_not_sound(feed: Feed) -> None:
    masks = np.full((NUM_ROWS, 2), -1, np.int32)
    masks[3] = 0
    feed.give(masks, StepDirective.CONTINUE)
    how = dataclasses.replace(how_of(random_rows(1, 64)), banned_token_ids_rx=jnp.full((NUM_ROWS, 1), 64))
    sampled, _ = sample(feed, np.zeros((NUM_ROWS, 64), np.float32), how)
    assert np.flatnonzero(~np.asarray(sampled.is_sound_r)).tolist() == [3]


def test_a_step_waits_for_its_masks_and_the_host_for_its_tokens(feed: Feed) -> None:
    """Three steps of one program, each of which may have the token after the last one alone."""
    how = dataclasses.replace(how_of(random_rows(2, 64)), banned_token_ids_rx=jnp.full((NUM_ROWS, 1), 64))

    def program(number: jax.Array, large_ii: jax.Array) -> jax.Array:
        def step(place: jax.Array, tokens_nr: jax.Array) -> jax.Array:
            logits = jnp.zeros((NUM_ROWS, 64)) + (large_ii @ large_ii)[0, 0]  # or XLA would run it on this thread
            sampled, _ = kernel_of_cpus().sample_fed(logits, how, number, place)
            return tokens_nr.at[place].set(sampled.token_ids_r)

        return jax.lax.fori_loop(0, 3, step, jnp.zeros((3, NUM_ROWS), jnp.int32))

    tokens_nr = jax.jit(program)(jnp.int32(feed.number), jnp.zeros((64, 64)))
    assert feed.wait() is not None  # nothing was given, and so nothing is waited for
    for step in range(3):
        masks = np.zeros((NUM_ROWS, 2), np.int32)
        masks[:, 0] = 1 << (7 + step)
        feed.give(masks, StepDirective.CONTINUE)
        while (drawn := feed.wait()) is None:
            pass
        assert drawn[0].tolist() == [7 + step] * NUM_ROWS
    np.testing.assert_array_equal(tokens_nr, np.repeat([[7], [8], [9]], NUM_ROWS, axis=1))


def test_a_step_is_void_when_its_feed_is_closed_before_or_while_it_waits(feed: Feed) -> None:
    logits, how = np.zeros((NUM_ROWS, 64), np.float32), how_of(random_rows(1, 64))
    found = list[jax.Array]()
    waiting = threading.Thread(target=lambda: found.append(sample(feed, logits, how)[1]))
    waiting.start()
    waiting.join(0.05)
    feed.close()
    waiting.join()
    assert found == [StepDirective.VOID]
    _, verdict = sample(feed, logits, how, step=1)
    assert verdict == StepDirective.VOID
    feed.close()
    assert feed.wait() is None


def test_a_program_that_runs_on_the_thread_that_feeds_it_fails_and_does_not_wait_for_itself(feed: Feed) -> None:
    logits, how = np.zeros((NUM_ROWS, 64), np.float32), how_of(random_rows(1, 64))
    giving_up = threading.Timer(20, feed.close)
    giving_up.start()
    with pytest.raises(jax.errors.JaxRuntimeError, match="would wait for itself"):
        jax.block_until_ready(sample(feed, logits, how))
    giving_up.cancel()


def test_masks_of_other_rows_or_tokens_are_refused(feed: Feed) -> None:
    with pytest.raises(ValueError, match=r"masks are int32\(3, 2\), not int32\(24, 2\)"):
        feed.give(np.zeros((3, 2), np.int32), StepDirective.CONTINUE)
    with pytest.raises(ValueError, match="masks are int64"):
        feed.give(np.zeros((NUM_ROWS, 2), np.int64), StepDirective.CONTINUE)
    how = how_of(random_rows(1, 65))
    with pytest.raises(jax.errors.JaxRuntimeError, match="masks of the feed have other rows or tokens"):
        jax.block_until_ready(sample(feed, np.zeros((NUM_ROWS, 65), np.float32), how))


def test_a_feed_without_masks_counts_steps_until_it_is_interrupted() -> None:
    logits, how = random_logits(0, 61), how_of(random_rows(0, 61))
    want = run_sampling(logits, how, Detail.TOKENS, kernel_of_cpus())
    feed = Feed.open(NUM_ROWS, 0)
    assert feed.num_steps() == 0
    for step in range(2):
        sampled, directive = sample(feed, logits, how, step)
        assert_same(sampled, want)
        assert directive == StepDirective.CONTINUE
    feed.interrupt()
    sampled, directive = sample(feed, logits, how, 2)
    assert_same(sampled, want)
    assert directive == StepDirective.LAST
    assert feed.num_steps() == 3
    feed.close()
    feed.interrupt()
    assert feed.num_steps() == 0
