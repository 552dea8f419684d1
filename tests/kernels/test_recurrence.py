"""Operations of recurrent layers equal plain NumPy over whole sequences, however these are cut and packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.recurrence import (
    RecurrentRows,
    StatefulPool,
    gated_delta_rule,
    read_states,
    short_convolution,
    write_states,
)

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


@pytest.mark.parametrize("num_taps", [2, 4])
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


def delta_rule(q, k, v, decays, strengths):
    """A whole sequence, token by token and head by head, in float64."""
    (num_tokens, num_heads, value_dim), group = v.shape, v.shape[1] // q.shape[1]
    states, outputs = np.zeros((num_heads, q.shape[2], value_dim)), np.zeros(v.shape)
    for t in range(num_tokens):
        for head in range(num_heads):
            query, key = q[t, head // group], k[t, head // group]
            state = decays[t, head] * states[head]
            state = state + np.outer(key, strengths[t, head] * (v[t, head] - key @ state))
            states[head], outputs[t, head] = state, query @ state
    return outputs, states


@pytest.mark.long
def test_the_delta_rule_has_the_same_bits_in_every_cut_and_company() -> None:
    rng = np.random.default_rng(5)
    shapes = {"q": (2, 8), "k": (2, 8), "v": (4, 6), "decays": (4,), "strengths": (4,)}
    names = list(shapes)

    def sequence(length: int) -> list[np.ndarray]:
        made = {name: rng.normal(size=(length, *shape)) for name, shape in shapes.items()}
        made["decays"], made["strengths"] = (rng.uniform(0.1, 1, (length, 4)) for _ in range(2))
        return [(made[name] / (3 if name in "qk" else 1)).astype(np.float32) for name in names]

    @jax.jit
    def step(parts: list[jax.Array], state: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, jax.Array]:
        q, k, v, decays, strengths = parts
        return gated_delta_rule(q, k, v, decays, strengths, state, rows)

    def run(one: list[np.ndarray], cuts: list[int], others: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
        """Runs a sequence in chunks as the second row, next to rows of other lengths, padded to a size."""
        state, outputs = np.zeros((1 + len(others), 4, 8, 6), np.float32), []
        for begin, end in zip([0, *cuts], [*cuts, len(one[0])], strict=True):
            lens = [others[0], end - begin, *others[1:]]
            starts_s1 = jnp.asarray(np.cumsum([0, *lens]), jnp.int32)
            none = jnp.zeros(len(lens), jnp.int32)
            rows = RecurrentRows.of(starts_s1, none > 0, none, none, size)
            parts = [np.full((size, *x.shape[1:]), np.nan, np.float32) for x in one]
            for part, x, other in zip(parts, one, sequence(sum(lens)), strict=True):
                part[: sum(lens)] = other
                part[others[0] : others[0] + end - begin] = x[begin:end]
            o, after = step([jnp.asarray(part) for part in parts], jnp.asarray(state), rows)
            outputs.append(np.asarray(o)[others[0] : others[0] + end - begin])
            state[1] = np.asarray(after)[1]
        return np.concatenate(outputs), state[1]

    one = sequence(11)
    outputs, state = run(one, [], [0], 16)
    expected_outputs, expected_state = delta_rule(*one)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=1e-4, atol=1e-5)
    ways = ([4, 5], [0], 16), ([1, 2, 3, 9], [3, 2], 32), ([10], [1, 1, 1], 24)
    for cuts, others, size in ways:
        again, state_again = run(one, list(cuts), list(others), size)
        np.testing.assert_array_equal(again, outputs)
        np.testing.assert_array_equal(state_again, state)
