"""What every backend of paged attention must do, against the NumPy oracle. A backend subclasses and sets `backend`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Backend, RaggedRows, paged_attention
from tests.kernels import attention_oracle as oracle

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}

# (queries, context) of each row
RAGGED: dict[str, list[tuple[int, int]]] = {
    "one_token_of_context": [(1, 1)],
    "decodes": [(1, 5), (1, 64), (1, 17), (1, 130)],
    "full_blocks": [(1, 16), (16, 16), (1, 32), (32, 64)],
    "first_tokens": [(1, 1), (2, 2), (3, 3)],
    "whole_prompts": [(70, 70), (9, 9), (1, 1)],
    "chunk_continues": [(30, 100), (1, 40), (65, 130)],
    "mixed": [(1, 33), (7, 7), (1, 1), (20, 90), (1, 160)],
    "longest_table": [(1, 192), (3, 192)],
    "empty_rows": [(0, 0), (1, 9), (0, 0), (5, 5), (0, 0)],
    "query_tile_boundary": [(64, 64), (65, 65), (63, 100)],
}


@dataclasses.dataclass
class Shape:
    """Sizes of a case; the defaults suit most tests, and equal sizes share a compiled program."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    max_len: int = 192
    num_tokens: int = 208
    num_rows: int = 8
    dtype: str = "float32"
    sliding_window: int | None = None
    soft_cap: float | None = None


def make_case(rows: list[tuple[int, int]], shape: Shape, seed: int = 0) -> oracle.Case:
    """Random numbers in the slots that the rows own, NaN in every other slot of the pool."""
    rng = np.random.default_rng(seed)
    needs = [-(-kv_len // shape.block_size) for _, kv_len in rows]
    num_blocks, num_layers, layer = 640 // shape.block_size + 8, 3, 1
    pool_shape = (num_layers, num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    k, v = np.full(pool_shape, np.nan, np.float32), np.full(pool_shape, np.nan, np.float32)
    ids = rng.permutation(num_blocks) + 1
    tables = np.zeros((shape.num_rows, -(-shape.max_len // shape.block_size)), np.int32)
    starts, kv_lens = np.zeros(shape.num_rows + 1, np.int32), np.zeros(shape.num_rows, np.int32)
    for i, (num_queries, kv_len) in enumerate(rows):
        tables[i, : needs[i]], ids = ids[: needs[i]], ids[needs[i] :]
        starts[i + 1 :], kv_lens[i] = starts[i] + num_queries, kv_len
        for position in range(kv_len):
            place = layer, tables[i, position // shape.block_size], position % shape.block_size
            k[place] = _round(rng.normal(size=pool_shape[3:]), shape.dtype)
            v[place] = _round(rng.normal(size=pool_shape[3:]), shape.dtype)
    q = rng.normal(size=(shape.num_tokens, shape.num_heads, shape.head_dim)) * 2
    return oracle.Case(
        q_thd=_round(q, shape.dtype),
        k_lnbkd=k,
        v_lnbkd=v,
        layer=layer,
        query_starts_s1=starts,
        kv_lens_s=kv_lens,
        block_tables_sm=tables,
        num_rows=len(rows),
        scale=shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        soft_cap=shape.soft_cap,
    )


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(jnp.dtype(dtype)).astype(np.float32)


_attention = jax.jit(paged_attention, static_argnames=("spec", "backend"))
_write = jax.jit(KVLayout.write, static_argnames=("self", "layer"))


class PagedAttentionConformance:
    """One method a promise; `layout` may be overridden where a backend keeps the pool in another shape."""

    backend: Backend

    def layout(self, case: oracle.Case, dtype: str) -> KVLayout:
        num_layers, blocks, block_size, num_kv_heads, head_dim = case.k_lnbkd.shape
        return KVLayout(num_layers, blocks - 1, block_size, num_kv_heads, head_dim, jnp.dtype(dtype))

    def pool(self, case: oracle.Case, layout: KVLayout) -> jax.Array:
        """The case's keys and values, stored through the layout's own `write`."""
        pool = layout.encode(jnp.full(layout.shape, jnp.nan))
        slots = jnp.arange((layout.num_blocks + 1) * layout.block_size)
        for layer in range(layout.num_layers):
            k = case.k_lnbkd[layer].reshape(-1, layout.num_kv_heads, layout.head_dim)
            v = case.v_lnbkd[layer].reshape(-1, layout.num_kv_heads, layout.head_dim)
            pool = _write(layout, pool, layer, jnp.asarray(k), jnp.asarray(v), slots)
        return pool

    def run(self, case: oracle.Case, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
        layout = self.layout(case, dtype)
        spec = AttentionSpec(layout, case.scale, case.sliding_window, case.soft_cap)
        rows = RaggedRows(
            jnp.asarray(case.query_starts_s1),
            jnp.asarray(case.kv_lens_s),
            jnp.asarray(case.block_tables_sm),
            jnp.int32(case.num_rows),
        )
        q, layer = jnp.asarray(case.q_thd, jnp.dtype(dtype)), jnp.int32(case.layer)
        o_thd, lse_th = _attention(q, self.pool(case, layout), layer, rows, spec, backend=self.backend)
        assert o_thd.dtype == jnp.dtype(dtype)
        assert lse_th.dtype == jnp.float32
        return np.asarray(o_thd, np.float32), np.asarray(lse_th)

    def check(self, rows: list[tuple[int, int]], shape: Shape) -> None:
        case = make_case(rows, shape)
        o_thd, lse_th = self.run(case, shape.dtype)
        want_o_thd, want_lse_th = oracle.attention(case)
        tolerance = TOLERANCE[shape.dtype]
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", RAGGED)
    def test_ragged_rows(self, name: str, dtype: str) -> None:
        self.check(RAGGED[name], Shape(dtype=dtype))

    @pytest.mark.parametrize("block_size", [1, 8, 32, 48, 256])
    def test_block_sizes(self, block_size: int) -> None:
        self.check(RAGGED["mixed"], Shape(block_size=block_size))

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 3), (7, 1), (16, 2)])
    def test_head_groups(self, num_heads: int, num_kv_heads: int) -> None:
        self.check(RAGGED["mixed"], Shape(num_heads=num_heads, num_kv_heads=num_kv_heads))

    @pytest.mark.parametrize("head_dim", [16, 80, 128])
    def test_head_dims(self, head_dim: int) -> None:
        self.check(RAGGED["mixed"], Shape(head_dim=head_dim))

    @pytest.mark.parametrize("sliding_window", [1, 16, 33, 10_000])
    @pytest.mark.parametrize("name", ["mixed", "chunk_continues", "query_tile_boundary"])
    def test_sliding_window(self, name: str, sliding_window: int) -> None:
        self.check(RAGGED[name], Shape(sliding_window=sliding_window))

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    def test_soft_cap(self, soft_cap: float) -> None:
        self.check(RAGGED["mixed"], Shape(soft_cap=soft_cap))

    def test_window_and_cap_together(self) -> None:
        self.check(RAGGED["chunk_continues"], Shape(sliding_window=20, soft_cap=5.0, dtype="bfloat16"))

    def test_padding_tokens_are_zero_whatever_their_queries(self) -> None:
        case = make_case(RAGGED["mixed"], Shape())
        case.q_thd[case.query_starts_s1[-1] :] = np.nan
        o_thd, lse_th = self.run(case)
        np.testing.assert_array_equal(o_thd[case.query_starts_s1[-1] :], 0)
        np.testing.assert_array_equal(lse_th[case.query_starts_s1[-1] :], -np.inf)

    def test_no_rows_at_all(self) -> None:
        case = dataclasses.replace(make_case([(1, 4)], Shape()), num_rows=0)
        o_thd, lse_th = self.run(case)
        np.testing.assert_array_equal(o_thd, 0)
        np.testing.assert_array_equal(lse_th, -np.inf)

    @pytest.mark.parametrize("bad_id", [-1, 10_000, 2**31 - 1, -(2**31)])
    @pytest.mark.parametrize("num_queries", [1, 30])
    def test_block_ids_outside_of_the_layer_read_as_zeros(self, bad_id: int, num_queries: int) -> None:
        case = make_case([(num_queries, 50), (1, 20)], Shape())
        case.block_tables_sm[0, 1] = bad_id
        o_thd, lse_th = self.run(case)
        want_o_thd, want_lse_th = oracle.attention(case)
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)

    def test_block_ids_beyond_the_context_do_not_matter(self) -> None:
        case = make_case([(1, 20), (4, 30)], Shape())
        want = self.run(case)
        case.block_tables_sm[:, 2:] = 10_000
        for got, expected in zip(self.run(case), want, strict=True):
            np.testing.assert_array_equal(got, expected)

    def test_rows_that_share_blocks(self) -> None:
        case = make_case([(1, 40), (1, 33), (6, 38)], Shape())
        case.block_tables_sm[1:3] = case.block_tables_sm[0]
        o_thd, _ = self.run(case)
        np.testing.assert_allclose(o_thd, oracle.attention(case)[0], rtol=2e-5, atol=2e-5)

    def test_large_scores_do_not_overflow(self) -> None:
        case = make_case(RAGGED["mixed"], Shape())
        case = dataclasses.replace(case, q_thd=case.q_thd * 1e3)
        o_thd, lse_th = self.run(case)
        want_o_thd, want_lse_th = oracle.attention(case)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=1e-5)
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=1e-2, atol=1e-2)

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        rows = RAGGED["mixed"]
        case = make_case(rows, Shape())
        together, _ = self.run(case)
        for i, (num_queries, _) in enumerate(rows):
            start = case.query_starts_s1[i]
            alone = dataclasses.replace(
                case,
                query_starts_s1=np.where(np.arange(len(case.query_starts_s1)) == 0, 0, num_queries).astype(np.int32),
                kv_lens_s=np.where(np.arange(len(case.kv_lens_s)) == 0, case.kv_lens_s[i], 0).astype(np.int32),
                block_tables_sm=np.roll(case.block_tables_sm, -i, axis=0),
                q_thd=np.roll(case.q_thd, -start, axis=0),
                num_rows=1,
            )
            o_thd, _ = self.run(alone)
            np.testing.assert_array_equal(o_thd[:num_queries], together[start : start + num_queries])

    def test_a_split_context_merges_by_its_log_sum_exp(self) -> None:
        """Attention over two halves of a context, weighted by their lse, is attention over the whole."""
        case = make_case([(1, 64)], Shape())
        whole, whole_lse = self.run(case)
        halves = [dataclasses.replace(case, kv_lens_s=case.kv_lens_s // 2) for _ in range(2)]
        halves[1] = dataclasses.replace(halves[1], block_tables_sm=np.roll(case.block_tables_sm, -2, axis=1))
        (o_a, lse_a), (o_b, lse_b) = (self.run(half) for half in halves)
        lse = np.logaddexp(lse_a[:1], lse_b[:1])
        merged = o_a[:1] * np.exp(lse_a[:1] - lse)[..., None] + o_b[:1] * np.exp(lse_b[:1] - lse)[..., None]
        np.testing.assert_allclose(merged, whole[:1], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse, whole_lse[:1], rtol=2e-5)
