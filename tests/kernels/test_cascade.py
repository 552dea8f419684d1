"""Rows that share a prefix read it once, and get what each of them would get alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jpaged.config import Backend
from jpaged.kernels.paged_attention import paged_attention
from jpaged.kernels.paged_attention.api import IMPLEMENTATIONS
from jpaged.kernels.paged_attention.cascade import CascadeRows, cascade_attention_update
from jpaged.kernels.paged_attention.gpu import work
from jpaged.kernels.paged_attention.gpu.work import choose_tiling
from jpaged.kernels.paged_attention.spec import AttentionCall, NewKV, Updated, merge
from tests.device.compilation.hlo import pool_sized_operations
from tests.kernels import attention_oracle as oracle
from tests.kernels import gpu_interpreter
from tests.kernels.attention_conformance import (
    TOLERANCE,
    Shape,
    take_new,
)
from tests.kernels.shared_prefixes import CASES, RIG, call, shared_case


@functools.partial(jax.jit, static_argnames=("spec", "backend"))
def _cascade(q, pool, layer, cascade, spec, scales=None, *, backend):
    """Attention alone: the new keys have slots outside of the layer, which are dropped."""
    k_tkd = jnp.zeros((q.shape[0], spec.layout.num_kv_heads, spec.layout.head_dim), q.dtype)
    new_kv = k_tkd, k_tkd, jnp.full(q.shape[0], -1)
    return cascade_attention_update(q, new_kv, pool, layer, cascade, spec, scales, backend=backend)[:2]


_update = jax.jit(cascade_attention_update, static_argnames=("spec", "backend"))
_plain = jax.jit(paged_attention, static_argnames=("spec", "backend"))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("float32", "int8")])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(28)
def test_it_is_attention(name: str, dtype: str, kv_dtype: str | None) -> None:
    shape = Shape(dtype=dtype, kv_dtype=kv_dtype)
    case, cascade = shared_case(name, shape)
    q, pool, layer, spec, scales = call(case, shape)
    o_thd, lse_th = _cascade(q, pool, layer, cascade, spec, scales, backend="xla")
    want_o_thd, want_lse_th = oracle.attention(case)
    assert (o_thd.dtype, lse_th.dtype) == (q.dtype, jnp.float32)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(o_thd, np.float32), want_o_thd, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.long
def test_latents_are_shared_like_keys(backend: Backend) -> None:
    shape = Shape(num_kv_heads=1, head_dim=96, value_dim=64)
    case, cascade = shared_case("chunks_take_part", shape)
    q, pool, layer, spec, _ = call(case, shape)
    new_kv, before = take_new(case, shape)
    pool = RIG.pool(before, spec.layout, None)
    o_thd, lse_th, _ = _update(q, new_kv, pool, layer, cascade, spec, backend=backend)
    want_o_thd, want_lse_th = oracle.attention(case)
    np.testing.assert_allclose(o_thd, want_o_thd, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_shared_prefix_is_read_through_its_first_row_alone(name: str) -> None:
    """Every other row's table names blocks that read as zeros where the prefix lies."""
    case, cascade = shared_case(name, Shape())
    q, pool, layer, spec, _ = call(case, Shape())
    want = _cascade(q, pool, layer, cascade, spec, backend="xla")
    tables, first = case.block_tables_sm.copy(), 0
    for num_rows, shared in CASES[name][1]:
        tables[first : first + num_rows, : shared // 16] = 10_000
        first += num_rows
    rows = dataclasses.replace(cascade.rows, block_tables_sm=jnp.asarray(tables))
    got = _cascade(q, pool, layer, dataclasses.replace(cascade, rows=rows), spec, backend="xla")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_runs_it_is_the_plain_call_to_the_bit() -> None:
    case, cascade = shared_case("nothing_shared", Shape())
    q, pool, layer, spec, _ = call(case, Shape())
    plain = _plain(q, pool, layer, RIG.rows(case), spec, backend="xla")
    for got, want in zip(_cascade(q, pool, layer, cascade, spec, backend="xla"), plain, strict=True):
        np.testing.assert_array_equal(got, want)


# Smaller than what follows the prefixes, within them, and larger than all contexts.
WINDOWS = (3, 37, 1000, *(pytest.param(window, marks=pytest.mark.deep) for window in (20, 64)))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(28)
@pytest.mark.long
def test_a_sliding_window_is_each_querys_own(name: str, window: int) -> None:
    shape = Shape(sliding_window=window)
    case, cascade = shared_case(name, shape)
    q, pool, layer, spec, _ = call(case, shape)
    o_thd, lse_th = _cascade(q, pool, layer, cascade, spec, backend="xla")
    want_o_thd, want_lse_th = oracle.attention(case)
    np.testing.assert_allclose(o_thd, want_o_thd, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("window", "prefix", "edge"), [(1000, (0, 96), 0), (60, (96, 96), 96), (90, (64, 96), 64)])
def test_in_a_window_the_rows_read_together_what_all_of_them_see(
    window: int, prefix: tuple[int, int], edge: int
) -> None:
    """The last of the queries stands at 149: it sees what lies behind 149 - window."""
    _, cascade = shared_case("samples_decode", Shape(sliding_window=window))
    assert cascade.edges is not None
    assert (int(cascade.prefixes.begins[0]), int(cascade.prefixes.kv_lens_s[0])) == prefix
    assert cascade.edges.kv_lens_s[:4].tolist() == [edge] * 4
    assert cascade.edges.positions[:4].tolist() == [99, 100, 96, 149]


GPU = {
    "samples_decode": (None, 1),
    "chunks_take_part": (37, 1),
    "two_runs": (64, 3),
    "a_row_without_queries": (1000, 2),
    "nothing_shared": (None, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GPU)
def test_hopper_reads_all_parts_in_one_launch(name: str) -> None:
    window, max_parts = GPU[name]
    shape = Shape(sliding_window=window, num_tokens=64)
    case, cascade = shared_case(name, shape)
    q, pool, layer, spec, _ = call(case, shape)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    o_thd, lse_th = gpu_interpreter.attend(q, pool, layer, cascade.parts(spec), None, max_parts)
    want_o_thd, want_lse_th = oracle.attention(case)
    np.testing.assert_allclose(o_thd, want_o_thd, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)


@pytest.mark.long
def test_on_hopper_a_prefix_is_one_tile_for_all_its_rows() -> None:
    """And it is what the update runs there: one kernel, no condition, the keys stored first."""
    shape = Shape(dtype="bfloat16", num_tokens=64)
    case, cascade = shared_case("samples_decode", shape)
    q, _, layer, spec, _ = call(case, shape)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    tiling = choose_tiling(spec, shape.num_heads, shape.num_tokens, shape.num_rows, 12, 2)
    items, places = work.plan(cascade.parts(spec), tiling, shape.num_tokens)
    used = np.asarray(items)[np.asarray(items)[:, 2] > 0]
    fields = used[:, [0, 2, 4, 5]].tolist()
    assert sorted(fields) == sorted([[i, 1, 96, end] for i, end in enumerate((100, 101, 97, 150))] + [[0, 4, 0, 96]])
    assert places.parts_lt[:, :5].tolist() == [[1, 1, 1, 1, 0]] * 2
    new_kv, _ = take_new(case, shape)
    pool = jax.ShapeDtypeStruct(spec.layout.shape, spec.layout.storage_dtype)
    update = functools.partial(cascade_attention_update, spec=spec, backend="pallas-gpu")
    program = jax.make_jaxpr(update)(q, new_kv, pool, layer, cascade).jaxpr
    names = [name for name in _outside_of_kernels(program) if name in {"scatter", "cond", _KERNEL}]
    assert names == ["scatter", _KERNEL]


_KERNEL = "the kernel"


def _outside_of_kernels(jaxpr: Any) -> Iterator[str]:
    """The steps of a program in order, a kernel's as one."""
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        if "wgmma_ref" in str(equation) and equation.primitive.name not in {"pjit", "jit"}:
            yield _KERNEL
        elif inner and equation.primitive.name != "cond":
            for program in inner:
                yield from _outside_of_kernels(program)
        else:
            yield equation.primitive.name


@pytest.mark.long
def test_a_soft_cap_is_kept() -> None:
    shape = Shape(soft_cap=5.0)
    case, cascade = shared_case("two_runs", shape)
    q, pool, layer, spec, _ = call(case, shape)
    o_thd, _ = _cascade(q, pool, layer, cascade, spec, backend="xla")
    np.testing.assert_allclose(o_thd, oracle.attention(case)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ["samples_decode", "chunks_take_part", "nothing_shared"])
@pytest.mark.thinned(13)
def test_an_update_stores_the_new_keys(
    name: str, is_fused: bool, kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_fused:
        monkeypatch.setitem(IMPLEMENTATIONS, "xla", dataclasses.replace(IMPLEMENTATIONS["xla"], update=_fused))
    shape = Shape(kv_dtype=kv_dtype)
    case, cascade = shared_case(name, shape)
    new_kv, before = take_new(case, shape)
    q, pool, layer, spec, scales = call(before, shape)
    whole = call(case, shape)[1]
    update = functools.partial(cascade_attention_update, spec=spec, scales_lk2=scales, backend="xla")
    o_thd, _, pool = jax.jit(update, donate_argnums=2)(q, new_kv, pool, layer, cascade)
    np.testing.assert_allclose(o_thd, oracle.attention(case)[0], rtol=2e-5, atol=2e-5)
    ids = jnp.arange(1, spec.layout.blocks_per_layer)
    for x in range(spec.layout.num_layers):
        got, want = (np.asarray(spec.layout.gather(y, x, ids)) for y in (pool, whole))
        np.testing.assert_array_equal(got, want)


def _fused(call: AttentionCall, new_kv: NewKV) -> Updated:
    """A backend that writes the pool itself."""
    pool = call.spec.layout.write(call.pool, call.layer, *new_kv)
    return *IMPLEMENTATIONS["xla"].attend(dataclasses.replace(call, pool=pool)), pool


@pytest.mark.long
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_branch_copies_the_pool(dtype: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in one program, as a step has them, with the pool donated."""
    if is_fused:
        monkeypatch.setitem(IMPLEMENTATIONS, "xla", dataclasses.replace(IMPLEMENTATIONS["xla"], update=_fused))
    shape = Shape(dtype=dtype)
    case, cascade = shared_case("samples_decode", shape)
    new_kv, _ = take_new(case, shape)
    q, _, _, spec, _ = call(case, shape)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, num_blocks=4000))  # more than the rest
    pool = jax.ShapeDtypeStruct(spec.layout.shape, spec.layout.storage_dtype)

    def layers(pool: jax.Array, q: jax.Array, cascade: CascadeRows) -> tuple[jax.Array, jax.Array]:
        k_tkd, v_tkd, slots_t = new_kv
        for layer in range(2):
            new = k_tkd + q[:, :1], v_tkd, slots_t  # as in a model: of what the layer before gave
            q, _, pool = cascade_attention_update(q, new, pool, layer, cascade, spec, backend="xla")
        return pool, q

    executable = jax.jit(layers, donate_argnums=0).lower(pool, q, cascade).compile()
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == spec.layout.num_bytes
    assert memory.temp_size_in_bytes < spec.layout.num_bytes // 10
    assert "conditional" in (executable.as_text() or "")
    assert pool_sized_operations(executable, math.prod(spec.layout.shape)) == set()


@pytest.mark.long
def test_parts_without_keys_count_nothing() -> None:
    o, lse = jnp.full((1, 2, 4), 3.0), jnp.array([[1.0, -jnp.inf]])
    nothing = jnp.zeros((1, 2, 4)), jnp.full((1, 2), -jnp.inf)
    for merged in (merge((o, lse), nothing), merge(nothing, (o, lse))):
        np.testing.assert_array_equal(merged[0][0, 0], 3)
        np.testing.assert_array_equal(merged[0][0, 1], 0)
        np.testing.assert_array_equal(merged[1], lse)
    assert np.all(np.isfinite(merge(nothing, nothing)[0]))


def test_large_sums_do_not_overflow() -> None:
    a = jnp.full((1, 1, 2), 1.0), jnp.full((1, 1), 500.0)
    b = jnp.full((1, 1, 2), 3.0), jnp.full((1, 1), 500.0)
    o, lse = merge(a, b)
    np.testing.assert_allclose(o, 2.0)
    np.testing.assert_allclose(lse, 500 + np.log(2), rtol=1e-6)
