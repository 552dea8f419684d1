"""Operations of recurrent layers equal plain NumPy over whole sequences, however these are cut and packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.recurrence import RecurrentRows, StatefulPool, read_states, short_convolution, write_states

WIDTH, NUM_SLOTS = 6, 4


def convolved(u_te: np.ndarray, weights_ek: np.ndarray) -> np.ndarray:
    """The whole sequence at once, in float64."""
    before = weights_ek.shape[1] - 1
    padded = np.concatenate([np.zeros((before, u_te.shape[1])), u_te])
    return sum(padded[k : k + len(u_te)] * weights_ek[:, k] for k in range(before + 1))


def rows_of(lens: list[int], starts: list[int], slots: list[tuple[int, int]], num_tokens: int) -> RecurrentRows:
    starts_s1 = jnp.asarray(np.cumsum([0, *lens]), jnp.int32)
    sources_s, slots_s = (jnp.asarray(column, jnp.int32) for column in zip(*slots, strict=True))
    return RecurrentRows.of(starts_s1, jnp.asarray(starts) == 0, sources_s, slots_s, num_tokens)


@pytest.mark.parametrize("num_taps", [2, 3, 4])
def test_a_convolution_does_not_depend_on_where_a_sequence_is_cut(num_taps: int) -> None:
    """Three rows in four steps, of which one is empty at times, and another is forked; padding is not a number."""
    rng = np.random.default_rng(num_taps)
    weights = rng.normal(size=(WIDTH, num_taps)).astype(np.float32)
    sequences = [rng.normal(size=(12, WIDTH)).astype(np.float32) for _ in range(3)]
    sequences[2][:5] = sequences[0][:5]  # a fork after five tokens
    steps = [  # (lengths, (source, slot) of each row)
        ([5, 1, 0], [(1, 1), (2, 2), (0, 0)]),
        ([1, 2, 3], [(1, 3), (2, 2), (1, 1)]),
        ([4, 0, 1], [(3, 3), (0, 0), (1, 1)]),
        ([2, 9, 3], [(3, 1), (2, 2), (1, 3)]),  # two rows exchange their slots
    ]
    states = jnp.full((2, NUM_SLOTS, WIDTH * (num_taps - 1)), 7.0, jnp.float32)
    carry, done = StatefulPool((), (states,)), [0, 0, 5]
    got: list[list[np.ndarray]] = [[], [], []]

    @jax.jit
    def step(carry: StatefulPool, u_te: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, StatefulPool]:
        (state,) = read_states(carry, rows, jnp.int32(1), [((WIDTH * (num_taps - 1),), jnp.float32)])
        window = state.reshape(len(state), WIDTH, num_taps - 1)
        y, window = short_convolution(u_te, window, jnp.asarray(weights), rows)
        return y, write_states(carry, rows, jnp.int32(1), [window.reshape(state.shape)])

    for lens, slots in steps:
        used = [one[begin : begin + num] for one, begin, num in zip(sequences, done, lens, strict=True)]
        padded = np.full((16, WIDTH), np.nan, np.float32)
        padded[: sum(lens)] = np.concatenate(used)
        y, carry = step(carry, jnp.asarray(padded), rows_of(lens, done, slots, 16))
        ends = np.cumsum(lens)
        for each, part in zip(got, np.split(np.asarray(y)[: ends[-1]], ends[:-1]), strict=True):
            each.append(part)
        done = [begin + num for begin, num in zip(done, lens, strict=True)]
    for one, parts, begin in zip(sequences, got, [0, 0, 5], strict=True):
        np.testing.assert_allclose(np.concatenate(parts), convolved(one, weights)[begin:], rtol=1e-5, atol=1e-6)
    assert (np.asarray(carry.states[0])[0] == 7.0).all()  # another layer


def test_without_a_pool_a_pass_is_one_row_that_begins() -> None:
    rows = RecurrentRows.one(5)
    (state,) = read_states((), rows, jnp.int32(0), [((3, 2), jnp.float32)])
    assert state.shape == (1, 3, 2)
    assert not state.any()
    assert write_states((), rows, jnp.int32(0), [state]) == ()
    assert rows.rows_t.tolist() == [0] * 5
    assert rows.offsets_t.tolist() == [0, 1, 2, 3, 4]
