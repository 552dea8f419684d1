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
    selective_scan,
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


def mamba(x, b, c, steps, decays):
    """A whole sequence, token by token and head by head, in float64."""
    (num_tokens, num_heads, head_dim), group = x.shape, x.shape[1] // b.shape[1]
    states, outputs = np.zeros((num_heads, b.shape[2], head_dim)), np.zeros(x.shape)
    for t in range(num_tokens):
        for head in range(num_heads):
            written = np.outer(b[t, head // group], steps[t, head] * x[t, head])
            states[head] = decays[t, head] * states[head] + written
            outputs[t, head] = c[t, head // group] @ states[head]
    return outputs, states


# Sums over these axes have other bits if XLA makes them for several rows at once.
DELTA_SHAPES = {"q": (4, 16), "k": (4, 16), "v": (8, 16), "decays": (8,), "strengths": (8,)}
MAMBA_SHAPES = {"x": (8, 16), "b": (2, 16), "c": (2, 16), "steps": (8,), "decays": (8,)}


@pytest.mark.long
def test_the_delta_rule_has_the_same_bits_in_every_cut_and_company() -> None:
    check_bits(gated_delta_rule, delta_rule, DELTA_SHAPES, (8, 16, 16))


@pytest.mark.long
def test_mamba_has_the_same_bits_in_every_cut_and_company() -> None:
    check_bits(selective_scan, mamba, MAMBA_SHAPES, (8, 16, 16))


def test_mamba_equals_its_recurrence_for_rows_next_to_each_other() -> None:
    """Three rows, of which one is empty and one continues from a state."""
    rng = np.random.default_rng(1)
    made = [rng.normal(size=(6, *shape)).astype(np.float32) for shape in MAMBA_SHAPES.values()]
    made[4] = rng.uniform(0.1, 1, (6, 8)).astype(np.float32)
    none = jnp.zeros(3, jnp.int32)
    rows = RecurrentRows.of(jnp.asarray([0, 4, 4, 6]), none > 0, none, none, 6)
    first, second = (mamba(*(x[part] for x in made)) for part in (slice(4), slice(4, 6)))
    x, b, c, steps, decays = map(jnp.asarray, made)
    o, states = selective_scan(x, b, c, steps, decays, jnp.zeros((3, 8, 16, 16)), rows)
    np.testing.assert_allclose(o, np.concatenate((first[0], second[0])), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states, np.stack((first[1], np.zeros((8, 16, 16)), second[1])), rtol=1e-4, atol=1e-5)


def check_bits(kernel, reference, shapes, state_shape) -> None:
    """A sequence equals the reference, and has the same bits in other chunks and next to other rows."""
    rng = np.random.default_rng(5)
    names = list(shapes)

    def sequence(length: int) -> list[np.ndarray]:
        made = {name: rng.normal(size=(length, *shape)) for name, shape in shapes.items()}
        for name in names[-2:]:
            made[name] = rng.uniform(0.1, 1, (length, *shapes[name]))
        return [(made[name] / (4 if name in "qk" else 1)).astype(np.float32) for name in names]

    @jax.jit
    def step(parts: list[jax.Array], state: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, jax.Array]:
        return kernel(*parts, state, rows)

    def run(one: list[np.ndarray], cuts: list[int], others: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
        """Runs a sequence in chunks as the second row, next to rows of other lengths, padded to a size."""
        state, outputs = np.zeros((1 + len(others), *state_shape), np.float32), []
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
    expected_outputs, expected_state = reference(*one)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=1e-4, atol=1e-5)
    ways = ([4, 5], [0], 16), ([1, 2, 3, 9], [3, 2], 32), ([10], [1, 1, 1], 24)
    for cuts, others, size in ways:
        again, state_again = run(one, list(cuts), list(others), size)
        np.testing.assert_array_equal(again, outputs)
        np.testing.assert_array_equal(state_again, state)
