"""What the TPU kernels are asked when something in them was made wrong, each as short as notices it."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.kernels.paged_attention.tpu import lists
from tests.kernels.attention_conformance import RAGGED, Shape, make_case
from tests.kernels.tpu_interpreter import Interpreted


def decodes(suite: Interpreted) -> None:
    suite.check(RAGGED["decodes"], Shape())


def several_of_a_row(suite: Interpreted) -> None:
    suite.check([(1, 130), (1, 5), (1, 192)], Shape(num_tokens=8, dtype="bfloat16"))


def decodes_of_8_bits(suite: Interpreted) -> None:
    suite.check(RAGGED["decodes"], Shape(kv_dtype="int8"))


def chunks_of_8_bits(suite: Interpreted) -> None:
    suite.check(RAGGED["chunk_continues"], Shape(kv_dtype="int8"))


def chunk_ids_outside(suite: Interpreted) -> None:
    suite.test_block_ids_outside_of_the_layer_read_as_zeros(num_queries=30)


def chunks(suite: Interpreted) -> None:
    suite.check(RAGGED["chunk_continues"], Shape())


def chunks_on_two_cores(suite: Interpreted) -> None:
    """Each has a row of tiles of the pool, or half of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "num_cores", lambda: 2)
        for num_kv_heads, kv_dtype in ((4, None), (2, "int8")):
            shape = Shape(num_heads=8, num_kv_heads=num_kv_heads, kv_dtype=kv_dtype, dtype="bfloat16")
            suite.check([(7, 7), (1, 33), (20, 90)], shape)


def two_chunks(suite: Interpreted) -> None:
    suite.check(RAGGED["longest_table"], Shape())


def decodes_in_a_window(suite: Interpreted) -> None:
    suite.check(RAGGED["decodes"], Shape(sliding_window=33))


def poisoned(suite: Interpreted) -> None:
    """A long row of NaN, and short ones into whose buffers it came before."""
    shape = Shape(num_tokens=8)
    case = make_case([(1, 120)] * 7 + [(1, 20)], shape, num_slots=1024)
    for row in range(7):
        case.v_lnbkd[case.layer, case.block_tables_sm[row, :8]] = float("nan")
    o_thd, _ = suite.run(case, shape)
    assert np.isfinite(o_thd[7]).all()


def mixed(suite: Interpreted) -> None:
    suite.check(RAGGED["mixed"], Shape())


def pairs(suite: Interpreted) -> None:
    """Two heads that share lanes, and one that has nobody to share them with."""
    suite.check(RAGGED["decodes"], Shape(head_dim=64, num_heads=6, num_kv_heads=3, num_tokens=8, dtype="bfloat16"))


def latents(suite: Interpreted) -> None:
    """Two pieces each, the first of which is the value."""
    shape = Shape(num_kv_heads=1, head_dim=192, value_dim=128, num_rows=4, num_tokens=24, dtype="bfloat16")
    suite.check([(1, 40), (20, 20)], shape)


def padding(suite: Interpreted) -> None:
    suite.test_padding_tokens_are_zero_whatever_their_queries()


def window(suite: Interpreted) -> None:
    suite.check(RAGGED["chunk_continues"], Shape(sliding_window=16))


def ids_outside(suite: Interpreted) -> None:
    suite.test_block_ids_outside_of_the_layer_read_as_zeros(num_queries=1)


def update(suite: Interpreted) -> None:
    suite.test_an_update_stores_the_new_keys_and_nothing_else("full_blocks", "float32", None)
