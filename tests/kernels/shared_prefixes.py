"""Rows that share prefixes, for tests of the backends that read these once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import Backend
from jpaged.kernels.paged_attention import AttentionSpec
from jpaged.kernels.paged_attention.cascade import CascadeRows
from tests.kernels import attention_oracle as oracle
from tests.kernels.attention_conformance import PagedAttentionConformance, Shape, make_case, scales_of

Run = tuple[int, int]
"""Rows, and the tokens that they share."""

CASES: dict[str, tuple[list[tuple[int, int]], list[Run]]] = {
    "samples_decode": ([(1, 100), (1, 101), (1, 97), (1, 150)], [(4, 96)]),
    "a_run_among_others": ([(1, 33), (1, 70), (1, 80), (1, 65), (9, 9)], [(1, 0), (3, 64), (1, 0)]),
    "two_runs": ([(1, 70), (1, 80), (1, 40), (1, 33), (1, 48)], [(2, 64), (3, 32)]),
    "chunks_take_part": ([(1, 70), (40, 110), (1, 65), (5, 5)], [(3, 64), (1, 0)]),
    "a_row_without_queries": ([(1, 70), (0, 70), (1, 90)], [(3, 64)]),
    "every_row": ([(1, 40)] * 8, [(8, 32)]),
    "nothing_shared": ([(1, 40), (7, 7)], []),
    "more_queries_than_a_tile": ([(50, 80), (50, 90), (50, 82)], [(3, 16)]),
}


class Rig(PagedAttentionConformance):
    """The conformance suite's tools; its own tests run elsewhere."""

    __test__ = False
    backend: Backend = "xla"


RIG = Rig()


def shared_case(name: str, shape: Shape) -> tuple[oracle.Case, CascadeRows]:
    """Rows whose tables begin alike, as the runs say."""
    lengths, runs = CASES[name]
    case = make_case(lengths, shape)
    begins = np.zeros(shape.num_rows, np.int32)
    first = 0
    for num_rows, shared in runs:
        num_blocks = shared // shape.block_size
        case.block_tables_sm[first : first + num_rows, :num_blocks] = case.block_tables_sm[first, :num_blocks]
        begins[first : first + num_rows] = shared
        first += num_rows
    starts = np.full(shape.num_rows + 1, len(lengths), np.int32)
    starts[: len(runs) + 1] = np.cumsum([0, *(num_rows for num_rows, _ in runs)])
    rows = dataclasses.replace(RIG.rows(case), kv_begins_s=jnp.asarray(begins))
    return case, CascadeRows.of(rows, jnp.asarray(starts), jnp.int32(len(runs)), RIG.spec(case, shape))


def call(case: oracle.Case, shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array, AttentionSpec, jax.Array | None]:
    spec, scales = RIG.spec(case, shape), scales_of(shape)
    q = jnp.asarray(case.q_thd, jnp.dtype(shape.dtype))
    return (
        q,
        RIG.pool(case, spec.layout, scales),
        jnp.int32(case.layer),
        spec,
        None if scales is None else jnp.asarray(scales),
    )
