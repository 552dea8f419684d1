"""Operations of recurrent layers equal plain NumPy over whole sequences, however these are cut and packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config.speculative import MAX_NUM_SPECULATIVE_TOKENS
from jpaged.kernels.recurrence import (
    BLOCK_LEN,
    SHORT_LEN,
    Recurrence,
    RecurrenceKernel,
    RecurrentRows,
    StatefulPool,
    gated_delta_rule,
    read_states,
    recur,
    selective_scan,
    short_convolution,
    unsupported_cpu_reason,
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


def delta_rule(q, k, v, decays, strengths, state=0.0):
    """A whole sequence, token by token and head by head, in float64."""
    (num_tokens, num_heads, value_dim), group = v.shape, v.shape[1] // q.shape[1]
    states, outputs = np.zeros((num_heads, q.shape[2], value_dim)) + state, np.zeros(v.shape)
    for t in range(num_tokens):
        for head in range(num_heads):
            query, key = q[t, head // group], k[t, head // group]
            state = decays[t, head][..., None] * states[head]
            state = state + np.outer(key, strengths[t, head] * (v[t, head] - key @ state))
            states[head], outputs[t, head] = state, query @ state
    return outputs, states


def mamba(x, b, c, steps, decays, state=0.0):
    """A whole sequence, token by token and head by head, in float64."""
    (num_tokens, num_heads, head_dim), group = x.shape, x.shape[1] // b.shape[1]
    states, outputs = np.zeros((num_heads, b.shape[2], head_dim)) + state, np.zeros(x.shape)
    for t in range(num_tokens):
        for head in range(num_heads):
            written = np.outer(b[t, head // group], steps[t, head] * x[t, head])
            states[head] = decays[t, head] * states[head] + written
            outputs[t, head] = c[t, head // group] @ states[head]
    return outputs, states


# Sums over these axes have other bits if XLA makes them for several rows at once.
DELTA_SHAPES = {"q": (4, 16), "k": (4, 16), "v": (8, 16), "decays": (8,), "strengths": (8,)}
CHANNELS_SHAPES = {**DELTA_SHAPES, "decays": (8, 16)}
MAMBA_SHAPES = {"x": (8, 16), "b": (2, 16), "c": (2, 16), "steps": (8,), "decays": (8,)}


RULES: dict[str, tuple[Callable[..., Recurrence], Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "delta": (gated_delta_rule, delta_rule, DELTA_SHAPES),
    "channels": (gated_delta_rule, delta_rule, CHANNELS_SHAPES),
    "mamba": (selective_scan, mamba, MAMBA_SHAPES),
}
STATE = (8, 16, 16)
KERNELS = {
    "tokens": RecurrenceKernel("tokens"),
    "cpu": RecurrenceKernel("cpu"),
    "cpu-avx2": RecurrenceKernel("cpu", max_width=8, max_threads=1),
    "cpu-baseline": RecurrenceKernel("cpu", max_width=4),
    "blocks": RecurrenceKernel("blocks"),
    "static-blocks": RecurrenceKernel("blocks", has_static_loops=True),
}


def sequence_of(shapes: dict[str, tuple[int, ...]], length: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Numbers of tokens in the order of a rule's arguments; those of each head are between 0.1 and 1."""
    made = {name: rng.normal(size=(length, *shape)) for name, shape in shapes.items()}
    for name in list(shapes)[-2:]:
        made[name] = rng.uniform(0.1, 1, (length, *shapes[name]))
    return [(x / (4 if name in "qk" else 1)).astype(np.float32) for name, x in made.items()]


Apply = Callable[..., tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def step() -> Apply:
    """Runs a rule on packed tokens and the states of rows, which are in slots 1, 2, ..."""
    assert unsupported_cpu_reason() is None

    @jax.jit
    def run(one: Recurrence, states: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, StatefulPool]:
        carry = StatefulPool((), (jnp.zeros(()), states))
        o_thv, carry = recur(one, carry, rows, jnp.int32(1), (states.shape[2:], jnp.float32), 1)
        return o_thv, carry.states[1]

    def apply(
        rule: str, parts: list[np.ndarray], state: np.ndarray, starts: list[int], size: int, kernel: RecurrenceKernel
    ) -> tuple[np.ndarray, np.ndarray]:
        make, _, shapes = RULES[rule]
        padded = [np.full((size, *x.shape[1:]), np.nan, np.float32) for x in parts]
        for place, x in zip(padded, parts, strict=True):
            place[: len(x)] = x
        padded = [np.log(x) if name == "decays" else x for name, x in zip(shapes, padded, strict=True)]
        slots_s = jnp.arange(1, len(starts), dtype=jnp.int32)
        rows = RecurrentRows.of(jnp.asarray(starts), slots_s < 0, slots_s, slots_s, size, kernel)
        states = np.full((2, len(starts) + 1, *state.shape[1:]), 7.0, np.float32)
        states[1, 1:-1] = state
        o_thv, states = run(make(*map(jnp.asarray, padded)), jnp.asarray(states), rows)
        assert (np.asarray(states)[0] == 7.0).all(), "another layer"
        assert (np.asarray(states)[1, [0, -1]] == 7.0).all(), "slots of no row"
        return np.asarray(o_thv)[: starts[-1]], np.asarray(states)[1, 1:-1]

    return apply


@pytest.mark.long
def test_the_delta_rule_has_the_same_bits_in_every_cut_and_company(step: Apply) -> None:
    for kernel in ("tokens", "cpu", "cpu-avx2", "cpu-baseline"):
        check_bits(step, "delta", KERNELS[kernel])


@pytest.mark.long
def test_mamba_has_the_same_bits_in_every_cut_and_company(step: Apply) -> None:
    for kernel in ("tokens", "cpu", "cpu-avx2", "cpu-baseline"):
        check_bits(step, "mamba", KERNELS[kernel])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.thinned(2)
def test_the_kernel_of_cpus_has_the_same_bits_in_every_cut_and_company(step: Apply, rule: str) -> None:
    check_bits(step, rule, KERNELS["cpu"])


def test_mamba_equals_its_recurrence_for_rows_next_to_each_other(step: Apply) -> None:
    check_rows(step, "mamba", KERNELS["tokens"], [4, 0, 2], 6)


LENS = [1, BLOCK_LEN, 0, SHORT_LEN, BLOCK_LEN + SHORT_LEN + 1, SHORT_LEN + 1, 2 * BLOCK_LEN + 1, 3]


@pytest.mark.parametrize(
    "kernel", ["cpu", *(pytest.param(name, marks=pytest.mark.long) for name in ("blocks", "static-blocks"))]
)
@pytest.mark.parametrize("rule", RULES)
def test_rows_of_every_length_equal_the_recurrence_in_float64(step: Apply, rule: str, kernel: str) -> None:
    check_rows(step, rule, KERNELS[kernel], LENS, 512)


@pytest.mark.parametrize("decays", [(6,), (6, 7)], ids=["heads", "channels"])
@pytest.mark.parametrize("name", ["cpu", "cpu-avx2", "cpu-baseline"])
@pytest.mark.thinned(5)
def test_states_of_odd_sizes_equal_the_recurrence_in_float64(name: str, decays: tuple[int, ...]) -> None:
    """The depth is no multiple of the sums at once, and columns fill neither a vector nor a strip."""
    rng = np.random.default_rng(3)
    shapes = {"q": (3, 7), "k": (3, 7), "v": (6, 37), "decays": decays, "strengths": (6,)}
    parts, state = sequence_of(shapes, 9, rng), rng.normal(size=(6, 7, 37)).astype(np.float32)
    q, k, v, factors, strengths = map(jnp.asarray, parts)
    one = gated_delta_rule(q, k, v, jnp.log(factors), strengths)
    slots_s = jnp.ones(1, jnp.int32)
    rows = RecurrentRows.of(jnp.asarray([0, 9]), slots_s < 0, slots_s, slots_s, 9, KERNELS[name])
    carry = StatefulPool((), (jnp.asarray(np.stack((state, state))[None]),))
    o, carry = recur(one, carry, rows, jnp.int32(0), (state.shape, jnp.float32), 0)
    expected, expected_state = delta_rule(q, k, v, factors, strengths, state)
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(carry.states[0][0, 1], expected_state, rtol=0, atol=1e-5 * np.abs(expected_state).max())
    np.testing.assert_array_equal(carry.states[0][0, 0], state)


@pytest.mark.parametrize("rule", ["delta", "mamba", pytest.param("channels", marks=pytest.mark.long)])
@pytest.mark.thinned(2)
def test_blocks_equal_the_recurrence_if_tokens_repeat_or_decay_fast(step: Apply, rule: str) -> None:
    """The equations of equal keys have an inverse with small numbers; powers of their matrix are as large as 1e17."""
    rng = np.random.default_rng(2)
    _, reference, shapes = RULES[rule]
    num_tokens = 2 * BLOCK_LEN + 9
    parts = [np.repeat(x, num_tokens, axis=0) for x in sequence_of(shapes, 1, rng)]
    for name, x in zip(shapes, parts, strict=True):
        if name == "k":
            x[:] = x / np.linalg.norm(x, axis=-1, keepdims=True)
        if name in ("decays", "strengths"):
            x[:] = 1
        if name == "decays":
            x[5] = 1e-30  # later decays must keep their digits
            x[6:, 1] = 0.999
    state = rng.normal(size=(1, *STATE)).astype(np.float32)
    o, after = step(rule, parts, state, [0, num_tokens], num_tokens, KERNELS["blocks"])
    expected, expected_state = reference(*parts, state[0])
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(after[0], expected_state, rtol=0, atol=1e-5 * np.abs(expected_state).max())


@pytest.mark.long
def test_blocks_equal_the_recurrence_if_channels_decay_between_nothing_and_all(step: Apply) -> None:
    """Logarithms from 0 to -80 in turn: products of whole blocks leave the range of float32 in both directions."""
    rng = np.random.default_rng(8)
    _, reference, shapes = RULES["channels"]
    parts = sequence_of(shapes, 2 * BLOCK_LEN + 9, rng)
    parts[3] = np.exp(-np.minimum(np.exp(rng.normal(0, 4, parts[3].shape)), 80)).astype(np.float32)
    state = rng.normal(size=(1, *STATE)).astype(np.float32)
    o, after = step("channels", parts, state, [0, len(parts[0])], 160, KERNELS["blocks"])
    expected, expected_state = reference(*parts, state[0])
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(after[0], expected_state, rtol=0, atol=1e-5 * np.abs(expected_state).max())


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_of_blocks_do_not_depend_on_other_rows(step: Apply, rule: str) -> None:
    rng = np.random.default_rng(4)
    _, _, shapes = RULES[rule]
    for length in (3, BLOCK_LEN + 9):
        own, state = sequence_of(shapes, length, rng), rng.normal(size=(3, *STATE)).astype(np.float32)
        found = []
        for first, last, size in ((0, 0, 128), (7, SHORT_LEN + 3, 128), (BLOCK_LEN + 1, 1, 256)):
            others = sequence_of(shapes, first + last, rng)
            parts = [np.concatenate((x[:first], y, x[first:])) for x, y in zip(others, own, strict=True)]
            starts = [0, first, first + length, first + length + last]
            o, after = step(rule, parts, state, starts, size, KERNELS["static-blocks"])
            found.append((o[first : first + length], after[1]))
        for o, after_own in found[1:]:
            np.testing.assert_array_equal(o, found[0][0])
            np.testing.assert_array_equal(after_own, found[0][1])


@pytest.mark.parametrize(
    "name", ["cpu", *(pytest.param(name, marks=pytest.mark.long) for name in ("tokens", "blocks"))]
)
def test_all_states_are_read_before_one_is_written(name: str) -> None:
    """Two rows exchange their slots, one is forked into a new slot, and one begins in a slot that another reads."""
    rng = np.random.default_rng(6)
    parts = sequence_of(DELTA_SHAPES, 5, rng)
    parts[3] = np.log(parts[3])
    states = rng.normal(size=(1, 6, *STATE)).astype(np.float32)
    sources, slots, is_first = [1, 2, 3, 3, 4], [2, 1, 3, 5, 4], [False, False, False, False, True]
    one = gated_delta_rule(*map(jnp.asarray, parts))

    def run(kernel: RecurrenceKernel) -> tuple[np.ndarray, np.ndarray]:
        starts_s1, is_first_s = jnp.arange(6), jnp.asarray(is_first)
        rows = RecurrentRows.of(starts_s1, is_first_s, jnp.asarray(sources), jnp.asarray(slots), 5, kernel)
        o, carry = recur(one, StatefulPool((), (jnp.asarray(states),)), rows, jnp.int32(0), (STATE, jnp.float32), 0)
        return np.asarray(o), np.asarray(carry.states[0])

    o, after = run(KERNELS[name])
    for row, (source, slot) in enumerate(zip(sources, slots, strict=True)):
        state = np.zeros(STATE) if is_first[row] else states[0, source]
        q, k, v, decays, strengths = (x[row : row + 1] for x in parts)
        expected, expected_state = delta_rule(q, k, v, np.exp(decays), strengths, state)
        np.testing.assert_allclose(o[row : row + 1], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(after[0, slot], expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_more_drafts_than_a_short_row_has_leave_the_state_after_each(rule: str) -> None:
    """As many as a step may have, next to a prompt that is computed in blocks."""
    rng, num_drafts = np.random.default_rng(9), MAX_NUM_SPECULATIVE_TOKENS
    make, _, shapes = RULES[rule]
    lens, size = [1] * (num_drafts + 1) + [BLOCK_LEN + 3], 128
    parts = sequence_of(shapes, size, rng)
    parts = [np.log(x) if name == "decays" else x for name, x in zip(shapes, parts, strict=True)]
    states = rng.normal(size=(1, num_drafts + 3, *STATE)).astype(np.float32)
    starts_s1 = jnp.asarray(np.cumsum([0, *lens]), jnp.int32)
    is_draft_s = (jnp.arange(num_drafts + 2) > 0) & (jnp.arange(num_drafts + 2) <= num_drafts)
    sources_s = jnp.where(is_draft_s, 1, 1 + jnp.arange(num_drafts + 2))

    def run(kernel: RecurrenceKernel) -> tuple[np.ndarray, np.ndarray]:
        slots_s, is_first_s = 1 + jnp.arange(num_drafts + 2), jnp.zeros(num_drafts + 2, bool)
        rows = RecurrentRows.of(starts_s1, is_first_s, sources_s, slots_s, size, kernel, is_draft_s)
        carry = StatefulPool((), (jnp.asarray(states),))
        o, carry = recur(make(*map(jnp.asarray, parts)), carry, rows, jnp.int32(0), (STATE, jnp.float32), 0)
        return np.asarray(o)[: sum(lens)], np.asarray(carry.states[0])

    expected = run(KERNELS["tokens"])
    for name in ("blocks", "static-blocks"):
        found = run(dataclasses.replace(KERNELS[name], short_len=3 * SHORT_LEN))
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


DRAFT_LENS = [1, 1, 1, 2, 0, 1, 1, 1, 1]
IS_DRAFT = [False, True, True, False, False, False, True, True, True]
DRAFT_SOURCES, DRAFT_SLOTS = [1, 1, 1, 2, 0, 3, 3, 3, 3], [1, 4, 5, 2, 0, 6, 7, 3, 8]
"""Two sequences with drafts. One is in place, the other is a fork, with a draft in the slot that it reads."""


def draft_rows(kernel: RecurrenceKernel) -> RecurrentRows:
    starts_s1, is_draft_s = jnp.asarray(np.cumsum([0, *DRAFT_LENS]), jnp.int32), jnp.asarray(IS_DRAFT)
    sources_s, slots_s = jnp.asarray(DRAFT_SOURCES), jnp.asarray(DRAFT_SLOTS)
    return RecurrentRows.of(starts_s1, jnp.zeros(len(IS_DRAFT), bool), sources_s, slots_s, 12, kernel, is_draft_s)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name", ["cpu", *(pytest.param(name, marks=pytest.mark.long) for name in ("tokens", "blocks", "static-blocks"))]
)
def test_drafts_leave_the_state_after_each_token_in_a_slot(rule: str, name: str) -> None:
    """On a CPU with the bits of tokens that run one after another."""
    rng = np.random.default_rng(8)
    make, _, shapes = RULES[rule]
    parts = sequence_of(shapes, 12, rng)
    parts = [np.log(x) if name == "decays" else x for name, x in zip(shapes, parts, strict=True)]
    states = rng.normal(size=(1, 9, *STATE)).astype(np.float32)
    kernel, blank = KERNELS[name], (STATE, jnp.float32)

    def run(parts: list[np.ndarray], rows: RecurrentRows, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        carry = StatefulPool((), (jnp.asarray(states),))
        o, carry = recur(make(*map(jnp.asarray, parts)), carry, rows, jnp.int32(0), blank, 0)
        return np.asarray(o), np.asarray(carry.states[0])

    o, after = run(parts, draft_rows(kernel), states)
    begin, before, one_slot = 0, states[:, :2], jnp.ones(1, jnp.int32)
    for length, is_draft, source, slot in zip(DRAFT_LENS, IS_DRAFT, DRAFT_SOURCES, DRAFT_SLOTS, strict=True):
        before = before if is_draft else states[:, [source] * 2]
        one = RecurrentRows.of(jnp.asarray([0, length]), one_slot < 0, one_slot, one_slot, length, kernel)
        if length:
            expected, state = run([x[begin : begin + length] for x in parts], one, before)
            atol = 0 if kernel.backend != "blocks" else 1e-5
            np.testing.assert_allclose(o[begin : begin + length], expected, rtol=0, atol=atol * np.abs(expected).max())
            np.testing.assert_allclose(after[:, slot], state[:, 1], rtol=0, atol=atol * np.abs(state).max())
            before = state
        begin += length


@pytest.mark.parametrize("num_taps", [2, 4])
def test_drafts_leave_the_window_after_each_token(num_taps: int) -> None:
    rng = np.random.default_rng(num_taps)
    weights = rng.normal(size=(WIDTH, num_taps)).astype(np.float32)
    u_te = rng.normal(size=(12, WIDTH)).astype(np.float32)
    kept = rng.normal(size=(9, num_taps - 1, WIDTH)).astype(np.float32)  # of each slot
    rows = draft_rows(KERNELS["tokens"])
    window_sek = jnp.asarray(kept[np.array(DRAFT_SOURCES)].transpose(0, 2, 1))
    y, after = map(np.asarray, short_convolution(jnp.asarray(u_te), window_sek, jnp.asarray(weights), rows))
    begin, seen = 0, np.zeros(0)
    for row, (length, is_draft, source) in enumerate(zip(DRAFT_LENS, IS_DRAFT, DRAFT_SOURCES, strict=True)):
        seen = np.concatenate([seen if is_draft else kept[source], u_te[begin : begin + length]])
        expected = convolved(seen, weights)[len(seen) - length :]
        np.testing.assert_allclose(y[begin : begin + length], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(after[row].T, seen[len(seen) - num_taps + 1 :])
        begin += length


def test_operands_that_contradict_each_other_are_refused_by_the_kernel(step: Apply) -> None:
    parts, state = sequence_of(DELTA_SHAPES, 2, np.random.default_rng(0)), np.zeros((1, *STATE), np.float32)
    for index, shape, problem in ((1, (2, 4, 8), "queries, keys and values differ"), (3, (2, 7), "decays are not of")):
        wrong = [np.ones(shape, np.float32) if place == index else x for place, x in enumerate(parts)]
        with pytest.raises(jax.errors.JaxRuntimeError, match=problem):
            step("delta", wrong, state, [0, 2], 2, KERNELS["cpu"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="values and states differ"):
        step("delta", parts, state[:, :, :8], [0, 2], 2, KERNELS["cpu"])


def check_rows(step: Apply, rule: str, kernel: RecurrenceKernel, lens: list[int], size: int) -> None:
    """Rows next to each other, each of which continues from a state, equal the recurrence in float64."""
    rng = np.random.default_rng(1)
    _, reference, shapes = RULES[rule]
    starts, parts = np.cumsum([0, *lens]), sequence_of(shapes, sum(lens), rng)
    state = rng.normal(size=(len(lens), *STATE)).astype(np.float32)
    o, after = step(rule, parts, state, starts.tolist(), size, kernel)
    for row, (begin, end) in enumerate(pairwise(starts)):
        expected, expected_state = reference(*(x[begin:end] for x in parts), state[row])
        largest = max(1, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(o[begin:end], expected, rtol=0, atol=1e-5 * largest)
        np.testing.assert_allclose(after[row], expected_state, rtol=0, atol=1e-5 * np.abs(expected_state).max())


def check_bits(step: Apply, rule: str, kernel: RecurrenceKernel) -> None:
    """A sequence equals the reference, and has the same bits in other chunks and next to other rows."""
    rng = np.random.default_rng(5)
    _, reference, shapes = RULES[rule]

    def run(one: list[np.ndarray], cuts: list[int], others: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
        """Runs a sequence in chunks as the second row, next to rows of other lengths, padded to a size."""
        state, outputs = np.zeros((1 + len(others), *STATE), np.float32), []
        for begin, end in zip([0, *cuts], [*cuts, len(one[0])], strict=True):
            lens, (first, length) = [others[0], end - begin, *others[1:]], (others[0], end - begin)
            parts = sequence_of(shapes, sum(lens), rng)
            for part, x in zip(parts, one, strict=True):
                part[first : first + length] = x[begin:end]
            o, after = step(rule, parts, state, np.cumsum([0, *lens]).tolist(), size, kernel)
            outputs.append(o[first : first + length])
            state[1] = after[1]
        return np.concatenate(outputs), state[1]

    one = sequence_of(shapes, 11, rng)
    outputs, state = run(one, [], [0], 16)
    expected_outputs, expected_state = reference(*one)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=1e-4, atol=1e-5)
    ways = ([4, 5], [0], 16), ([1, 2, 3, 9], [3, 2], 32), ([10], [1, 1, 1], 24)
    for cuts, others, size in ways:
        again, state_again = run(one, list(cuts), list(others), size)
        np.testing.assert_array_equal(again, outputs)
        np.testing.assert_array_equal(state_again, state)
