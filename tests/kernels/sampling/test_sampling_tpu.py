"""The kernel of TPUs, interpreted, samples what XLA samples and what the oracle may.

Turns are made short, so that a small vocabulary has several of them, in its passes and in its halves.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device import sampling
from jpaged.device.sampling import SamplingVocabulary
from jpaged.engine.executor import Detail
from jpaged.kernels.sampling import RowSampling, SampledTokens, choose_kernel
from jpaged.kernels.sampling.tpu import kernel
from jpaged.kernels.sampling.tpu.sampling import TpuSampling, choose_plan
from tests.device.step import sampling_oracle as oracle
from tests.device.step.sampling_oracle import Params
from tests.device.step.test_sampling import row_sampling, run_sampling, unsound_rows
from tests.kernels.sampling.test_sampling_cpu import assert_same, how_of, random_logits, random_rows
from tests.kernels.tpu_interpreter import COMPILER_OPTIONS, EARLY, LATE, interpreted


@pytest.fixture(scope="module", autouse=True)
def _short_turns() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "PASS", 8 * kernel.LANES)
        patch.setattr(kernel, "DRAW", 2 * kernel.LANES)
        yield


def _jitted() -> Callable[[jax.Array, RowSampling, Detail], SampledTokens]:
    def run(logits: jax.Array, how: RowSampling, detail: Detail) -> SampledTokens:
        return sampling.sample(logits, how, SamplingVocabulary(logits.shape[1]), detail, TpuSampling())

    return jax.jit(run, static_argnums=2, compiler_options=COMPILER_OPTIONS)


_sample = _jitted()


def sample(logits: np.ndarray, how: RowSampling, detail: Detail = Detail.TOKENS) -> SampledTokens:
    with interpreted(LATE):
        return jax.block_until_ready(_sample(jnp.asarray(logits, jnp.float32), how, detail))


def sample_anew(patch: pytest.MonkeyPatch) -> None:
    """Takes nothing that was compiled before."""
    patch.setattr(sys.modules[__name__], "_sample", _jitted())


@pytest.mark.parametrize("vocab_size", [1024, 1537])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.thinned(2)
def test_it_samples_as_xla_does(vocab_size: int, seed: int) -> None:
    """Halves of whole vectors in several turns, and a second half that begins within a vector."""
    logits, how = random_logits(seed, vocab_size), how_of(random_rows(seed, vocab_size))
    want = run_sampling(logits, how, Detail.TOP_LOGPROBS, None)
    assert_same(sample(logits, how, Detail.TOP_LOGPROBS), want)


TRUNCATIONS = (
    Params(top_k=1),
    Params(top_k=7),
    Params(top_k=7, top_p=0.5),
    Params(top_k=1030),
    Params(top_p=1e-45),
    Params(top_p=0.3),
    Params(top_p=0.9),
    Params(top_p=0.99999),
    Params(min_p=0.3),
    Params(min_p=0.01, top_p=0.7, top_k=50),
    Params(temperature=0.2, top_k=3),
    Params(temperature=3.0, top_p=0.8, banned=(0, 5, 1099)),
)


def adversarial_rows() -> dict[str, np.ndarray]:
    """Rows of 1100 logits at which a search between bounds may go wrong."""
    rng = np.random.default_rng(1)
    normal = rng.normal(size=1100)
    steps = np.arange(1100, dtype=np.float32)
    return {
        "random": normal * 4,
        "ties": np.round(normal),
        "all equal": np.full(1100, 2.5),
        "all zero": np.zeros(1100),
        "zeros of both signs": np.where(normal > 0, 0.0, -0.0),
        "two values": np.where(normal > 1, 1.0, -1.0),
        "neighbours": np.nextafter(np.float32(1), np.float32(2)) - steps * np.float32(2**-24),
        "around zero": normal * 1e-20,
        "the smallest": normal * 1e-37,
        "huge": normal * 1e30,
        "far apart": steps * -1e4,
        "one": np.where(steps == 700, 5.0, -np.inf),
        "few": np.where(steps % 300 == 0, normal, -np.inf),
        "negative": normal - 50,
    }


@pytest.mark.long
def test_adversarial_rows_are_truncated_as_xla_does_and_as_the_oracle_may() -> None:
    cases = [(name, row, how) for name, row in adversarial_rows().items() for how in TRUNCATIONS]
    logits = np.stack([row for _, row, _ in cases]).astype(np.float32)
    for seed in range(2):
        rows = [dataclasses.replace(params, seed=seed, position=i) for i, (_, _, params) in enumerate(cases)]
        how = row_sampling(rows)
        got, want = sample(logits, how), run_sampling(logits, how, Detail.TOKENS, None)
        np.testing.assert_array_equal(got.is_sound_r, want.is_sound_r)
        for i, (name, _, _) in enumerate(cases):
            token, x = int(got.token_ids_r[i]), oracle.allowed(logits[i], rows[i])
            with np.errstate(over="ignore"):  # what is far below the largest weighs nothing
                sure, possible = oracle.kept(x / rows[i].temperature, rows[i])
            assert possible[token], (name, rows[i])
            # Where rounding decides what is kept the two may differ, and nowhere else.
            assert token == int(want.token_ids_r[i]) or (sure != possible).any(), (name, rows[i])


@pytest.mark.long
def test_what_is_kept_is_kept_in_every_draw() -> None:
    """One nearly flat row in 32 positions a way: a token too many or too few is drawn there, or missed."""
    logits = np.random.default_rng(8).normal(size=300) * 0.7
    likely = np.argsort(-logits)
    second_half = tuple(likely[likely >= 150][:3].tolist())
    ways = (
        Params(top_k=7),
        Params(top_k=7, banned=(int(likely[0]), *second_half)),
        Params(top_p=0.08),
        Params(top_k=20, top_p=0.3),
        Params(min_p=0.5, top_p=0.6),
        Params(temperature=2.0, top_p=0.05),
        Params(temperature=0.0, banned=(int(likely[0]), *second_half)),
        Params(temperature=0.0),
    )
    rows = [dataclasses.replace(way, position=i) for way in ways for i in range(32)]
    every = np.repeat(logits[None], len(rows), axis=0).astype(np.float32)
    every[-32:] = 1.0  # all tie, within a lane and beside it
    got, want = sample(every, row_sampling(rows)), run_sampling(every, row_sampling(rows), Detail.TOKENS, None)
    np.testing.assert_array_equal(got.token_ids_r, want.token_ids_r)
    drawn = [set(np.asarray(got.token_ids_r)[32 * i : 32 * i + 32].tolist()) for i in range(len(ways))]
    assert [len(one) > 3 for one in drawn] == [True] * 6 + [False] * 2


@pytest.mark.long
@pytest.mark.parametrize("detail", [Detail.TOKENS, Detail.TOP_LOGPROBS])
def test_a_row_that_is_not_sound_says_so_and_disturbs_no_other(detail: Detail) -> None:
    logits, rows, is_unsound = unsound_rows()
    how = row_sampling(rows)
    got, want = sample(logits, how, detail), run_sampling(logits, how, detail, None)
    np.testing.assert_array_equal(got.is_sound_r, ~is_unsound)
    assert ((np.asarray(got.token_ids_r) >= 0) & (np.asarray(got.token_ids_r) < logits.shape[1])).all()
    np.testing.assert_array_equal(got.token_ids_r[~is_unsound], want.token_ids_r[~is_unsound])


@pytest.mark.long
def test_few_rows_are_a_group_of_their_own_and_sample_what_they_do_among_many() -> None:
    num_rows = 3
    logits, how = random_logits(7, 300), how_of(random_rows(7, 300))
    among = sample(logits, how, Detail.LOGPROBS)
    first = jax.tree.map(lambda x: x[8 : 8 + num_rows], how)
    alone = sample(logits[8 : 8 + num_rows], first, Detail.LOGPROBS)
    for got, want in zip(jax.tree.leaves(alone), jax.tree.leaves(among), strict=True):
        np.testing.assert_array_equal(got, want[8 : 8 + num_rows])


@pytest.mark.long
def test_no_access_races_with_another() -> None:
    logits, how = random_logits(3, 61), how_of(random_rows(3, 61))
    with interpreted(EARLY):
        jax.block_until_ready(jax.jit(sampling_alone, compiler_options=COMPILER_OPTIONS)(logits, how))


def sampling_alone(logits: jax.Array, how: RowSampling) -> jax.Array:
    return TpuSampling().sample(logits, how, has_logprobs=False).token_ids_r


@pytest.mark.long
def test_what_no_row_of_a_group_asks_for_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first eight rows ask for nothing, the others for a top_k: a search that raises the floor shows in those."""

    def nothing_left(group: kernel._Group, *_: jax.Array) -> jax.Array:
        return group.full(jnp.inf)

    monkeypatch.setattr(kernel, "_floor_of_count", nothing_left)
    monkeypatch.setattr(kernel, "_floor_of_share", nothing_left)
    rows = [Params(seed=i) for i in range(8)] + [Params(seed=i, top_k=3) for i in range(8)]
    logits, how = random_logits(1, 257)[:16], row_sampling(rows)
    want = run_sampling(logits, how, Detail.TOKENS, None)
    with interpreted(LATE):
        tokens = np.asarray(jax.jit(sampling_alone, compiler_options=COMPILER_OPTIONS)(logits, how))
    np.testing.assert_array_equal(tokens[:8], want.token_ids_r[:8])
    assert (tokens[8:] == 0).all()


def test_the_largest_alone_is_kept_beside_one_that_is_next_to_it() -> None:
    logits = np.full((4, 1024), -50.0, np.float32)
    logits[:, 300], logits[:, 700] = np.nextafter(np.float32(5), np.float32(9)), 5.0
    rows = [Params(seed=i, top_k=1) for i in range(4)]
    assert sample(logits, row_sampling(rows)).token_ids_r.tolist() == [300] * 4


def test_it_goes_with_the_attention_of_tpus_where_a_group_fits() -> None:
    assert choose_kernel("pallas-tpu", 1, 262_144) == TpuSampling()
    assert choose_kernel("pallas-tpu", 2, 262_144) is None
    assert choose_kernel("pallas-tpu", 1, 400_000) is None
    assert "the limit is 44 MiB" in str(choose_plan(400_000, has_logprobs=False))
    with pytest.raises(ValueError, match=r"8 rows of a vocabulary of 400000 require .* MiB of vector memory"):
        jax.eval_shape(
            lambda logits: sampling_alone(logits, row_sampling([Params()])),
            jax.ShapeDtypeStruct((1, 400_000), jnp.float32),
        )
