"""Sampling against the oracle, as a distribution, and as a function of its own row alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.device import sampling
from jpaged.device.model_runner import unpack_rows
from jpaged.device.sampling import SamplingVocabulary
from jpaged.engine.executor import BANNED_WIDTH, BEYOND_TOKENS, TOP_WIDTH, Detail, SamplingInputs
from jpaged.kernels.sampling import RowSampling, SampledTokens, SamplingKernel
from jpaged.kernels.sampling.cpu import CpuSampling, kernel
from jpaged.kernels.sampling.rows import exponentials, threefry_2x32
from jpaged.types import MAX_TOP_LOGPROBS
from tests.device.step import sampling_oracle as oracle
from tests.device.step.sampling_oracle import Params

V = 61


@pytest.fixture(scope="module", autouse=True, params=["xla", "cpu"])
def backend(request: pytest.FixtureRequest) -> None:
    """Everything is asked of XLA's sampling, and of the kernel of CPUs."""
    _kernel.append(kernel_of_cpus() if request.param == "cpu" else None)


_kernel: list[SamplingKernel | None] = []
"""What samples, the last of them."""


def kernel_of_cpus() -> CpuSampling:
    found = kernel()
    assert isinstance(found, CpuSampling), found
    return found


def _sample(logits: np.ndarray, how: RowSampling, detail: Detail) -> SampledTokens:
    return run_sampling(logits, how, detail, _kernel[-1])


@functools.partial(jax.jit, static_argnames=("detail", "kernel"))
def run_sampling(logits: jax.Array, how: RowSampling, detail: Detail, kernel: SamplingKernel | None) -> SampledTokens:
    return sampling.sample(jnp.asarray(logits, jnp.float32), how, SamplingVocabulary(logits.shape[1]), detail, kernel)


@jax.jit
def _floor(scaled: jax.Array, how: RowSampling) -> jax.Array:
    return sampling.truncation_floor(scaled, how, SamplingVocabulary(scaled.shape[1]))


def row_sampling(rows: list[Params]) -> RowSampling:
    """What the device finds of rows that the host has filled."""
    inputs = SamplingInputs.neutral(len(rows))
    columns: dict[str, list[Any]] = {
        "temperature_r": [row.temperature for row in rows],
        "top_k_r": [row.top_k or BEYOND_TOKENS for row in rows],
        "top_p_r": [row.top_p for row in rows],
        "min_p_r": [row.min_p for row in rows],
        "seeds_r2": [divmod(row.seed, 2**32) for row in rows],
        "sequence_indices_r": [row.index for row in rows],
        "positions_r": [row.position for row in rows],
    }
    inputs.fill_columns(range(len(rows)), columns)
    for i, row in enumerate(rows):
        inputs.fill_lists(i, {"banned_token_ids_rx": row.banned})
    return RowSampling(**unpack_rows(jnp.asarray(inputs.words)))


def sample(logits: np.ndarray, rows: list[Params]) -> list[int]:
    return np.asarray(_sample(logits, row_sampling(rows), Detail.TOKENS).token_ids_r).tolist()


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * 3).astype(np.float32)


PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, V - 1, V]),
    top_p=st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 63),
    position=st.integers(0, 2**20),
    banned=st.lists(st.integers(0, V - 1), max_size=BANNED_WIDTH, unique=True).map(tuple),
)


@settings(max_examples=100)
@given(rows=st.lists(PARAMS, min_size=8, max_size=8), seed=st.integers(0, 1000), has_ties=st.booleans())
def test_tokens_are_the_oracles(rows: list[Params], seed: int, has_ties: bool) -> None:
    logits = random_logits(8, seed)
    if has_ties:
        logits = np.round(logits)
    sampled = _sample(logits, row_sampling(rows), Detail.LOGPROBS)
    logprobs_r, ranks_r = np.asarray(sampled.logprobs_r), np.asarray(sampled.ranks_r)
    for i, params in enumerate(rows):
        token, x = int(sampled.token_ids_r[i]), oracle.allowed(logits[i], params)
        want_logprobs = oracle.logprobs(logits[i])
        assert float(logprobs_r[i]) == pytest.approx(want_logprobs[token], abs=1e-5)
        assert ranks_r[i] == 1 + (logits[i] > logits[i, token]).sum()
        if params.temperature == 0:
            assert token == x.argmax()
            continue
        sure, possible = oracle.kept(x / params.temperature, params)
        scores = oracle.scores(logits[i], params)
        assert possible[token]
        assert scores[token] >= scores[sure].max() - 1e-4


@pytest.mark.long
@settings(max_examples=100)
@given(rows=st.lists(PARAMS, min_size=8, max_size=8), seed=st.integers(0, 1000), has_ties=st.booleans())
def test_what_is_kept_is_the_oracles(rows: list[Params], seed: int, has_ties: bool) -> None:
    scaled = random_logits(8, seed)
    if has_ties:
        scaled = np.round(scaled)
    is_kept = scaled >= np.asarray(_floor(scaled, row_sampling(rows)))
    for i, params in enumerate(rows):
        sure, possible = oracle.kept(scaled[i].astype(np.float64), params)
        assert not (sure & ~is_kept[i]).any()
        assert not (is_kept[i] & ~possible).any()


LADDER = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05]], np.float32))


@pytest.mark.parametrize(
    ("params", "want"),
    [
        (Params(), {0, 1, 2, 3, 4}),
        (Params(top_k=1), {0}),
        (Params(top_k=3), {0, 1, 2}),
        (Params(top_k=5), {0, 1, 2, 3, 4}),
        (Params(top_p=0.39), {0}),
        (Params(top_p=0.41), {0, 1}),
        (Params(top_p=0.69), {0, 1}),
        (Params(top_p=0.9999), {0, 1, 2, 3, 4}),
        (Params(top_p=1e-45), {0}),
        (Params(min_p=0.3), {0, 1, 2}),
        (Params(min_p=1.0), {0}),
        (Params(top_k=2, top_p=0.5), {0}),  # 0.4 / 0.7 of what top_k leaves
        (Params(top_k=2, top_p=0.6), {0, 1}),
        (Params(min_p=0.3, top_p=0.8), {0, 1}),  # 0.7 / 0.85 of what min_p leaves
        (Params(temperature=1e-45), {0}),
        (Params(temperature=1e-6), {0}),
        (Params(banned=(0, 2)), {1, 3, 4}),
        (Params(banned=(0,), top_k=1), {1}),
        (Params(temperature=0.0), {0}),
        (Params(temperature=0.0, banned=(0, 1)), {2}),
    ],
)
def test_the_tokens_that_can_be_sampled(params: Params, want: set[int]) -> None:
    rows = [dataclasses.replace(params, position=i) for i in range(400)]
    assert set(sample(np.repeat(LADDER, 400, axis=0), rows)) == want


def test_ties_at_a_threshold_are_kept() -> None:
    logits = np.array([[1.0, 2.0, 2.0, 2.0, 0.0]] * 400, np.float32)
    rows = [Params(top_k=2, position=i) for i in range(200)] + [Params(top_p=0.3, position=i) for i in range(200)]
    tokens = sample(logits, rows)
    assert set(tokens[:200]) == set(tokens[200:]) == {1, 2, 3}


def test_zero_and_minus_zero_tie() -> None:
    logits = np.array([[-1.0, 0.0, -0.0, -2.0, -3.0]] * 400, np.float32)
    assert set(sample(logits, [Params(top_k=1, position=i) for i in range(400)])) == {1, 2}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = np.array([[0.0, 3.0, 3.0, 1.0, 2.0]] * 400, np.float32)
    assert set(sample(logits, [Params(temperature=0.0)] * 400)) == {1}


NAN, INF = np.nan, np.inf
UNSOUND: dict[str, tuple[dict[int, float], tuple[int, ...]]] = {
    "a NaN": ({7: NAN}, ()),
    "a NaN of the other sign": ({7: -NAN}, ()),
    "all NaN": (dict.fromkeys(range(V), NAN), ()),
    "plus infinity": ({7: INF}, ()),
    "two of it": ({7: INF, 60: INF}, ()),
    "a banned NaN": ({7: NAN}, (7,)),
    "a banned infinity": ({7: INF}, (3, 7)),
    "all minus infinity": (dict.fromkeys(range(V), -INF), ()),
    "nothing left": (dict.fromkeys(range(4, V), -INF), (0, 1, 2, 3)),
}
"""Logits that a row has here and there, and what it may not sample."""
WAYS = (Params(temperature=0.0), Params(), Params(top_k=5, top_p=0.8, min_p=0.01))


def unsound_rows() -> tuple[np.ndarray, list[Params], np.ndarray]:
    """Logits, how to sample, and which rows are not sound: each case next to a row that is, sampled in each way."""
    cases = [(way, *case) for way in WAYS for case in UNSOUND.values()]
    logits, rows = random_logits(2 * len(cases)), [Params()] * (2 * len(cases))
    for i, (way, values, banned) in enumerate(cases):
        logits[2 * i + 1, list(values)] = list(values.values())
        rows[2 * i], rows[2 * i + 1] = way, dataclasses.replace(way, banned=banned)
    return logits, rows, np.arange(2 * len(cases)) % 2 == 1


@pytest.mark.thinned(5)
@pytest.mark.parametrize("detail", list(Detail))
def test_a_row_that_is_not_sound_says_so_and_names_a_token(detail: Detail) -> None:
    logits, rows, is_unsound = unsound_rows()
    sampled = _sample(logits, row_sampling(rows), detail)
    np.testing.assert_array_equal(sampled.is_sound_r, ~is_unsound)
    assert ((np.asarray(sampled.token_ids_r) >= 0) & (np.asarray(sampled.token_ids_r) < V)).all()
    clean = np.where(is_unsound[:, None], random_logits(len(rows)), logits)
    undisturbed = _sample(clean, row_sampling(rows), detail)
    for got, want in zip(jax.tree.leaves(sampled), jax.tree.leaves(undisturbed), strict=True):
        np.testing.assert_array_equal(got[~is_unsound], want[~is_unsound])


@pytest.mark.thinned(5)
@pytest.mark.parametrize("detail", list(Detail))
def test_minus_infinity_is_a_token_that_cannot_be(detail: Detail) -> None:
    logits = np.full((9, V), -INF, np.float32)
    logits[:3, 5], logits[3:6, [2, 9]], logits[6:, [0, 1, 60]] = 3.0, 1.0, 2.0
    banned = ((), (2, 30), (0, 1))
    rows = [dataclasses.replace(way, banned=ids) for ids in banned for way in WAYS]
    logits, rows = np.tile(logits, (6, 1)), rows * 6  # as many as the unsound rows, whose program is compiled
    sampled = _sample(logits, row_sampling(rows), detail)
    assert np.asarray(sampled.token_ids_r).tolist() == ([5] * 3 + [9] * 3 + [60] * 3) * 6
    assert np.asarray(sampled.is_sound_r).all()
    if detail > Detail.TOKENS:
        np.testing.assert_allclose(
            np.asarray(sampled.logprobs_r), -np.log(np.tile(np.repeat([1, 2, 3], 3), 6)), atol=1e-6
        )
        assert np.asarray(sampled.ranks_r).tolist() == [1] * 54


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "params",
    [Params(), Params(temperature=0.5), Params(top_k=6), Params(top_p=0.7), Params(min_p=0.1), Params(banned=(0,))],
    ids=["plain", "cold", "top_k", "top_p", "min_p", "banned"],
)
def test_samples_follow_the_distribution(params: Params) -> None:
    """Chi-square over 8192 positions of one request; the limit is the 99.99 % quantile, the seeds are fixed."""
    num_samples, vocab_size = 8192, 10
    logits = random_logits(1, 3, vocab_size) / 3
    rows = [dataclasses.replace(params, seed=99, position=i) for i in range(num_samples)]
    counts = np.bincount(sample(np.repeat(logits, num_samples, axis=0), rows), minlength=vocab_size)
    scaled = oracle.allowed(logits[0], params) / params.temperature
    weights = np.where(oracle.kept(scaled, params)[0], np.exp(scaled), 0)
    expected = weights / weights.sum() * num_samples
    is_possible = expected > 0
    assert counts[~is_possible].sum() == 0
    chi_square = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    assert chi_square < [0, 15.1, 18.4, 21.1, 23.5, 25.7, 27.9, 29.9, 31.8, 33.7][is_possible.sum() - 1]


@pytest.mark.parametrize(
    "rows",
    [
        [Params(seed=i) for i in range(513)],
        [Params(seed=5, index=i) for i in range(513)],
        [Params(seed=5, position=i) for i in range(513)],
    ],
    ids=["seed", "index", "position"],
)
def test_noise_is_uncorrelated_between_neighbours(rows: list[Params]) -> None:
    """512 x 64 pairs; the correlation of independent pairs has a standard deviation of 0.0055."""
    how = row_sampling(rows)
    waits = np.asarray(exponentials(how.seeds_r2, how.sequence_indices_r, how.positions_r, 64))
    assert waits.mean() == pytest.approx(1, abs=0.03)
    assert abs(np.corrcoef(waits[1:].ravel(), waits[:-1].ravel())[0, 1]) < 0.025
    assert abs(np.corrcoef(waits[:, :32].ravel(), waits[:, 32:].ravel())[0, 1]) < 0.035


def test_a_sample_depends_on_its_own_row_alone() -> None:
    params = Params(temperature=0.9, top_p=0.95, seed=2**63 + 11, index=2, position=77)
    logits = random_logits(1, 8)
    want = sample(logits, [params])[0]
    others = [Params(), Params(temperature=0.0), Params(top_k=3), Params(min_p=0.2), Params(banned=(1,))]
    for num_rows in (3, 8):
        for place in range(0, num_rows, 2):
            rows = [others[i % len(others)] for i in range(num_rows)]
            batch = random_logits(num_rows, num_rows)
            rows[place], batch[place] = params, logits[0]
            assert sample(batch, rows)[place] == want


def test_each_part_of_the_noises_name_matters() -> None:
    logits = np.repeat(random_logits(1, 4) / 9, 8, axis=0)
    rows = [Params(seed=1), Params(seed=1 << 32), Params(index=1), Params(position=1), Params()]
    rows += [Params(seed=2), Params(index=2), Params(position=2)]
    assert len(set(sample(logits, rows))) > 1
    how = row_sampling(rows)
    waits = np.asarray(exponentials(how.seeds_r2, how.sequence_indices_r, how.positions_r, V))
    assert len(np.unique(waits, axis=0)) == 8


@pytest.mark.parametrize(
    ("key", "counter", "want"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_its_authors_known_answers(
    key: tuple[int, int], counter: tuple[int, int], want: tuple[int, int]
) -> None:
    def words(pair: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        return jnp.uint32(pair[0]), jnp.uint32(pair[1])

    got = threefry_2x32(words(key), words(counter))
    assert (int(got[0]), int(got[1])) == want == oracle.threefry(key, counter)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 64])
def test_noise_is_the_oracles(vocab_size: int) -> None:
    params = Params(seed=2**64 - 3, index=3, position=1000)
    how = row_sampling([params])
    got = exponentials(how.seeds_r2, how.sequence_indices_r, how.positions_r, vocab_size)
    np.testing.assert_allclose(np.asarray(got)[0], oracle.exponentials(params, vocab_size), rtol=3e-6)


@settings(max_examples=20)
@given(rows=st.lists(PARAMS, min_size=8, max_size=8), seed=st.integers(0, 1000))
def test_tokens_do_not_depend_on_what_is_told_of_them(rows: list[Params], seed: int) -> None:
    logits, how = random_logits(8, seed), row_sampling(rows)
    alone, with_logprobs, with_top = (_sample(logits, how, detail) for detail in Detail)
    assert (alone.logprobs_r, alone.ranks_r, alone.top_ids_rk, with_logprobs.top_ids_rk) == (None,) * 4
    for other in (with_logprobs, with_top):
        np.testing.assert_array_equal(alone.token_ids_r, other.token_ids_r)
        np.testing.assert_array_equal(alone.is_sound_r, other.is_sound_r)
    np.testing.assert_array_equal(np.asarray(with_logprobs.ranks_r), np.asarray(with_top.ranks_r))
    np.testing.assert_allclose(np.asarray(with_logprobs.logprobs_r), np.asarray(with_top.logprobs_r), atol=1e-6)


def test_alternatives_are_the_likeliest_in_order() -> None:
    logits = random_logits(3)
    logits[1, 5] = logits[1, 9] = 20.0
    sampled = _sample(logits, row_sampling([Params(banned=(2,))] * 3), Detail.TOP_LOGPROBS)
    assert sampled.top_ids_rk is not None
    assert sampled.top_logprobs_rk is not None
    assert sampled.top_ids_rk.shape == (3, TOP_WIDTH)
    for i in range(3):
        want = np.argsort(-logits[i], kind="stable")[:TOP_WIDTH]
        np.testing.assert_array_equal(sampled.top_ids_rk[i], want)
        np.testing.assert_allclose(sampled.top_logprobs_rk[i], oracle.logprobs(logits[i])[want], atol=1e-5)


def test_alternatives_of_a_small_vocabulary_are_all_of_it() -> None:
    sampled = _sample(random_logits(2, 0, 5), row_sampling([Params()] * 2), Detail.TOP_LOGPROBS)
    assert sampled.top_ids_rk is not None
    assert sampled.top_ids_rk.shape == (2, 5)


def test_there_are_as_many_alternatives_as_a_request_may_ask_for() -> None:
    assert TOP_WIDTH >= MAX_TOP_LOGPROBS
