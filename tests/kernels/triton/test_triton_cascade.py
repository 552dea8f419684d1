"""The Triton kernels read a prefix once for all rows that share it, in the launch of the rows' own parts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.paged_attention.cascade import cascade_attention_update
from tests.kernels import attention_oracle as oracle
from tests.kernels.attention_conformance import TOLERANCE, Shape, scales_of, take_new
from tests.kernels.shared_prefixes import CASES, RIG, call, shared_case
from tests.kernels.triton import triton_interpreter

CALLS: dict[str, tuple[str, Shape, int | None]] = {
    "samples decode": ("samples_decode", Shape(num_tokens=8), 1),
    "a window, chunks among them": ("chunks_take_part", Shape(sliding_window=37), None),
    "a window, parts": ("two_runs", Shape(sliding_window=64, soft_cap=5.0), 2),
    "a row without queries": ("a_row_without_queries", Shape(dtype="bfloat16", sliding_window=1000), None),
    "int8": ("a_run_among_others", Shape(kv_dtype="int8"), None),
    "tiles of both kinds": ("every_row", Shape(num_heads=6, num_kv_heads=3, num_tokens=8, kv_dtype="int8"), None),
    "latents": ("samples_decode", Shape(num_kv_heads=1, head_dim=96, value_dim=64, num_tokens=8), 1),
    "nothing shared": ("nothing_shared", Shape(), None),
}
"""With the chunks of the shortest part, where contexts are too short for the rule's."""


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_all_parts_are_read_in_one_launch(name: str) -> None:
    """Each prefix through its first row: the others' tables name blocks that read as zeros there."""
    case_name, shape, part_chunks = CALLS[name]
    shape = dataclasses.replace(shape, num_tokens=min(shape.num_tokens, 64))
    case, cascade = shared_case(case_name, shape)
    want_o_thd, want_lse_th = oracle.attention(case)
    q, _, layer, spec, scales = call(case, shape)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    pool = RIG.pool(case, spec.layout, scales_of(shape))
    if shape.sliding_window is None:
        tables, first = case.block_tables_sm.copy(), 0
        for num_rows, shared in CASES[case_name][1]:
            tables[first + 1 : first + num_rows, : shared // 16] = 10_000
            first += num_rows
        rows = dataclasses.replace(cascade.rows, block_tables_sm=jnp.asarray(tables))
        cascade = dataclasses.replace(cascade, rows=rows)
    o_thd, lse_th = triton_interpreter.attend(q, pool, layer, cascade.parts(spec), scales, part_chunks)
    tolerance = TOLERANCE[shape.dtype]
    np.testing.assert_allclose(np.asarray(o_thd, np.float32), want_o_thd, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)


def test_an_update_is_one_write_and_two_launches() -> None:
    """No condition, of which the host would have to know."""
    shape = Shape(dtype="bfloat16", num_tokens=64)
    case, cascade = shared_case("samples_decode", shape)
    q, _, layer, spec, _ = call(case, shape)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    new_kv, _ = take_new(case, shape)
    pool = jax.ShapeDtypeStruct(spec.layout.shape, spec.layout.storage_dtype)
    update = functools.partial(cascade_attention_update, spec=spec, backend="pallas-triton")
    names = [equation.primitive.name for equation in jax.make_jaxpr(update)(q, new_kv, pool, layer, cascade).eqns]
    program = str(jax.make_jaxpr(update)(q, new_kv, pool, layer, cascade))
    assert (program.count(" scatter["), program.count("pallas_call[")) == (1, 2)
    assert (names.count("pallas_call"), names.count("cond")) == (2, 0)
