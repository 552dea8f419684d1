"""The oracle of the first run against that of the conformance suite, and what its comparison rejects."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.first_contact.attention import compare
from benchmarks.first_contact.cells import WrongNumbers
from benchmarks.first_contact.problem import LAYER, Heads, Numbers, Problem, draw, expected
from tests.kernels import attention_oracle as oracle

ROWS = ((1, 20), (5, 12), (3, 33))
PROBLEMS = {
    "bfloat16": Problem(Heads(4, 2, 16), ROWS),
    "window and cap": Problem(Heads(4, 2, 16, window=9, soft_cap=5.0, block_size=8), ROWS),
    "int8": Problem(Heads(4, 2, 16, kv_dtype="int8"), ROWS),
    "latents": Problem(Heads(4, 1, 32, value_dim=16), ROWS),
    "shared": Problem(Heads(4, 2, 16, block_size=8), ((1, 20), (2, 19), (1, 30)), shared=16),
}


def case_of(problem: Problem, numbers: Numbers) -> oracle.Case:
    """Return the case of the conformance suite: contexts in blocks, where the tables name them."""
    heads, layout = problem.heads, numbers.layout
    shape = layout.num_layers, layout.blocks_per_layer, layout.block_size
    k, v = (np.full((*shape, *x.shape[1:]), np.nan) for x in numbers.contexts[0])
    for (_, context), table, (keys, values) in zip(problem.rows, numbers.tables_sm, numbers.contexts, strict=True):
        places = np.arange(context)
        slots = LAYER, table[places // layout.block_size], places % layout.block_size
        k[slots], v[slots] = keys, values
    starts = np.cumsum([0, *(queries for queries, _ in problem.rows)])
    return oracle.Case(
        numbers.q_thd,
        k,
        v,
        LAYER,
        starts,
        np.array([context for _, context in problem.rows]),
        numbers.tables_sm,
        len(problem.rows),
        heads.head_dim**-0.5,
        heads.window,
        heads.soft_cap,
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_oracle_is_that_of_the_conformance_suite(name: str) -> None:
    problem = PROBLEMS[name]
    numbers = draw(problem, "gpu")
    for got, want in zip(expected(problem, numbers), oracle.attention(case_of(problem, numbers)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_written_is_what_the_contexts_hold(name: str) -> None:
    """Every slot once, also of a prefix that rows share."""
    problem = PROBLEMS[name]
    numbers = draw(problem, "gpu")
    assert len(set(numbers.slots_n.tolist())) == len(numbers.slots_n)
    assert len(numbers.slots_n) == sum(context for _, context in problem.rows) - 2 * problem.shared
    place = len(numbers.slots_n) - 1
    stored = numbers.k_nkd[place] * (1 if numbers.scales_lk2 is None else numbers.scales_lk2[LAYER, :, :1])
    np.testing.assert_allclose(stored, numbers.contexts[-1][0][-1], rtol=1e-6)
    assert np.isnan(numbers.q_thd[sum(queries for queries, _ in problem.rows) :]).all()


def test_wrong_unwritten_and_unmasked_numbers_are_found() -> None:
    problem = PROBLEMS["bfloat16"]
    want = expected(problem, draw(problem, "gpu"))
    o, lse = (x.astype(np.float32) for x in want)
    assert compare((o, lse), want, "bfloat16")["max_error"] < 1e-6
    places: list[tuple[int, tuple[int, ...], float]] = [
        *((0, (0, 0, 0), o[0, 0, 0] + 0.05), (0, (3, 1, 2), np.nan)),
        *((1, (0, 1), lse[0, 1] + 0.01), (1, (-1, 0), np.inf)),
    ]
    for array, index, value in places:
        faulty = [o.copy(), lse.copy()]
        faulty[array][index] = value
        with pytest.raises(WrongNumbers):
            compare(faulty, want, "bfloat16")
    with pytest.raises(WrongNumbers, match="1 log-sum-exps"):
        compare((o, np.where(np.arange(lse.size).reshape(lse.shape) == lse.size - 1, 0.0, lse)), want, "bfloat16")


def test_a_cascade_needs_a_prefix_of_whole_blocks() -> None:
    problem = PROBLEMS["shared"]
    assert problem.shared % problem.heads.block_size == 0
    numbers = draw(problem, "gpu")
    first = numbers.tables_sm[0, :2]
    assert (numbers.tables_sm[:, :2] == first).all()
    other = draw(dataclasses.replace(problem, shared=0), "gpu")
    assert not (other.tables_sm[:, :2] == other.tables_sm[0, :2]).all()
