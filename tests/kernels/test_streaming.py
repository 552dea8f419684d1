"""Rows that see the first tokens of their contexts and a window get what a mask over all of it gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import Backend
from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.paged_attention import AttentionSpec, paged_attention
from jpaged.kernels.paged_attention.cascade import StreamingRows, cascade_attention_update
from tests.kernels import attention_oracle as oracle
from tests.kernels import gpu_interpreter
from tests.kernels.attention_conformance import RAGGED, TOLERANCE, Shape, make_case, scales_of, take_new
from tests.kernels.shared_prefixes import RIG
from tests.kernels.triton import triton_interpreter

_update = jax.jit(cascade_attention_update, static_argnames=("spec", "backend"))

FIRST = {"a few": 4, "more than a block": 19, "more than the window": 90}


def streaming_case(name: str, shape: Shape, num_sinks: int) -> tuple[oracle.Case, AttentionSpec]:
    """Rows of the conformance suite that see so many first tokens as well."""
    case = dataclasses.replace(make_case(RAGGED[name], shape), num_sink_tokens=num_sinks)
    spec = RIG.spec(case, shape)
    return case, dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, num_sink_tokens=num_sinks))


def with_gaps(case: oracle.Case) -> oracle.Case:
    """Blocks that no query of a row sees have the null block in their places, which holds NaN."""
    tables, block_size = case.block_tables_sm.copy(), case.k_lnbkd.shape[2]
    for row in range(case.num_rows):
        first = max(0, case.first_position(row) - (case.sliding_window or 0) + 1) // block_size
        tables[row, -(-case.num_sink_tokens // block_size) : first] = 0
    return dataclasses.replace(case, block_tables_sm=tables)


def check(o_thd: Any, lse_th: Any, case: oracle.Case, shape: Shape) -> None:
    want_o_thd, want_lse_th = oracle.attention(case)
    tolerance = TOLERANCE[shape.dtype]
    np.testing.assert_allclose(np.asarray(o_thd, np.float32), want_o_thd, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", ["decodes", "chunk_continues", "mixed", "empty_rows", "longest_table"])
@pytest.mark.thinned(33)
def test_it_is_attention_under_the_mask(name: str, first: str, backend: Backend) -> None:
    shape = Shape(sliding_window=37)
    case, spec = streaming_case(name, shape, FIRST[first])
    new_kv, before = take_new(with_gaps(case), shape)
    pool, rows = RIG.pool(before, spec.layout, None), StreamingRows.of(RIG.rows(with_gaps(case)), spec)
    q, layer = jnp.asarray(case.q_thd), jnp.int32(case.layer)
    o_thd, lse_th, _ = _update(q, new_kv, pool, layer, rows, spec, backend=backend)
    check(o_thd, lse_th, case, shape)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_pool_of_8_bits_has_scales_in_both_passes(kv_dtype: str) -> None:
    shape = Shape(sliding_window=20, kv_dtype=kv_dtype)
    case, spec = streaming_case("mixed", shape, 5)
    new_kv, before = take_new(case, shape)
    scales = scales_of(shape)
    pool, rows = RIG.pool(before, spec.layout, scales), StreamingRows.of(RIG.rows(case), spec)
    q, layer = jnp.asarray(case.q_thd), jnp.int32(case.layer)
    o_thd, lse_th, _ = _update(q, new_kv, pool, layer, rows, spec, jnp.asarray(scales), backend="cpu")
    check(o_thd, lse_th, case, shape)


def test_where_no_query_is_far_enough_no_second_pass_is_run() -> None:
    shape = Shape(sliding_window=130)
    case, spec = streaming_case("decodes", shape, 4)
    assert not bool(StreamingRows.of(RIG.rows(case), spec).has_others)
    spec = dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, sliding_window=129))
    streaming = StreamingRows.of(RIG.rows(case), spec)
    assert bool(streaming.has_others)
    assert streaming.sinks.kv_lens_s[:4].tolist() == [0, 0, 0, 1]


@pytest.mark.long
@pytest.mark.parametrize("first", FIRST)
def test_hopper_reads_both_in_one_launch(first: str) -> None:
    shape = Shape(sliding_window=37, num_tokens=64)
    case, spec = streaming_case("mixed", shape, FIRST[first])
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    parts = StreamingRows.of(RIG.rows(case), spec).parts(spec)
    pool = RIG.pool(case, spec.layout, None)
    check(*gpu_interpreter.attend(jnp.asarray(case.q_thd), pool, jnp.int32(case.layer), parts, None, 2), case, shape)


@pytest.mark.long
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("part_chunks", [None, 1])
def test_triton_reads_both_in_one_launch(first: str, part_chunks: int | None) -> None:
    shape = Shape(sliding_window=37, num_tokens=64)
    case, spec = streaming_case("mixed", shape, FIRST[first])
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    parts = StreamingRows.of(RIG.rows(case), spec).parts(spec)
    q, pool, layer = jnp.asarray(case.q_thd), RIG.pool(case, spec.layout, None), jnp.int32(case.layer)
    check(*triton_interpreter.attend(q, pool, layer, parts, None, part_chunks), case, shape)


def test_no_kernel_is_asked_for_sink_tokens() -> None:
    case, spec = streaming_case("decodes", Shape(sliding_window=37), 4)
    pool = RIG.pool(case, spec.layout, None)
    with pytest.raises(InternalError, match="kernels do not support them"):
        paged_attention(jnp.asarray(case.q_thd), pool, 0, RIG.rows(case), spec, backend="xla")


@pytest.mark.parametrize(("window", "num_sinks"), [(None, 4), (8, -1)])
def test_sink_tokens_are_seen_beside_a_window(window: int | None, num_sinks: int) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"num_sink_tokens: {num_sinks} .* without a sliding_window \({window}\)"
    ):
        AttentionKind(1.0, window, num_sink_tokens=num_sinks)
