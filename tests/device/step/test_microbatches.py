"""How a step's rows are cut into microbatches, held against one token at a time in plain Python."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.mesh import Microbatches

NUMS = [1, 7, 0, 1, 4, 2]
"""Queries of each row; a row in use may have none."""
POSITIONS = [9, 0, 5, 0, 30, 3]
NUM_TOKENS, NUM_ROWS = 24, 8


def step_inputs() -> dict[str, jax.Array]:
    starts = np.cumsum([0, *NUMS, 0, 0])
    positions = np.zeros(NUM_TOKENS, np.int32)
    for start, num, first in zip(starts, NUMS, POSITIONS, strict=False):
        positions[start : start + num] = first + np.arange(num)
    lens = [num + first for num, first in zip(NUMS, POSITIONS, strict=True)]
    return {
        "query_starts_s1": jnp.asarray(starts, jnp.int32),
        "kv_lens_s": jnp.asarray([*lens, 0, 0], jnp.int32),
        "block_tables_gsm": jnp.arange(NUM_ROWS * 3, dtype=jnp.int32).reshape(1, NUM_ROWS, 3),
        "num_rows": jnp.int32(len(NUMS)),
        "positions_t": jnp.asarray(positions),
        "rope_lens_t": jnp.arange(100, 100 + NUM_TOKENS),
        "slots_gt": jnp.arange(200, 200 + NUM_TOKENS)[None],
    }


def seen(inputs: dict[str, Any], ids_t: Any) -> list[tuple[int, ...]]:
    """Return each query's token, position, slot, length for RoPE, table of its row, and number of keys, in order."""
    inputs, ids_t = jax.tree.map(np.asarray, (inputs, ids_t))
    starts, lens = inputs["query_starts_s1"], inputs["kv_lens_s"]
    found = []
    for row in range(int(inputs["num_rows"])):
        for t in range(starts[row], starts[row + 1]):
            per_token = (inputs["positions_t"][t], inputs["slots_gt"][0, t], inputs["rope_lens_t"][t])
            table, num_keys = inputs["block_tables_gsm"][0, row, 0], lens[row] - (starts[row + 1] - 1 - t)
            found.append(tuple(map(int, (ids_t[t], *per_token, table, num_keys))))
    assert (starts[int(inputs["num_rows"]) :] == starts[-1]).all(), "unused rows begin at the end of the last one"
    return found


@pytest.mark.parametrize("num", [1, 2, 3, 4, 8])
def test_every_query_is_in_one_microbatch_and_sees_the_keys_up_to_itself(num: int) -> None:
    inputs, ids_t = step_inputs(), jnp.arange(50, 50 + NUM_TOKENS)
    take, found = jax.jit(Microbatches(num, NUM_TOKENS // num).take), []
    for index in range(num):
        own, own_ids, number = take(inputs, ids_t, jnp.int32(index))
        assert int(number) == index
        found += seen(own, own_ids)
    assert found == seen(inputs, ids_t)
    assert [one[-1] for one in found] == [one[1] + 1 for one in found]


@pytest.mark.parametrize("index", [-1, 4])
def test_a_turn_without_a_microbatch_has_no_rows_and_stores_nothing(index: int) -> None:
    own, _, number = jax.jit(Microbatches(4, 6).take)(step_inputs(), jnp.zeros(NUM_TOKENS, jnp.int32), jnp.int32(index))
    assert (int(number), int(own["num_rows"])) == (4, 0)
    assert (np.asarray(own["slots_gt"]) == -1).all()
    assert not np.asarray(own["query_starts_s1"]).any()
    assert not np.asarray(own["kv_lens_s"]).any()


def test_small_steps_are_one_microbatch_and_large_ones_up_to_four_for_each_stage() -> None:
    assert [Microbatches.of(size, 2, "tpu").num for size in (1, 256, 512, 768, 2048, 8192)] == [1, 1, 2, 3, 8, 8]
    assert Microbatches.of(8192, 4, "gpu") == Microbatches(16, 512)
    assert [Microbatches.of(size, 2, "cpu").num for size in (8, 16, 24, 64)] == [1, 2, 3, 8]
