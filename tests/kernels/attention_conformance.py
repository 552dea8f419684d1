"""What every backend of paged attention must do, against the NumPy oracle.

A backend subclasses, and says which it is, the form of its pool, and what it supports: outside of that, the call has to
be refused with a reason, and inside of it the numbers have to be right. Backends that run here in an interpreter
override `attend` and `update`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import Backend
from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVForm, KVLayout
from jpaged.kernels.paged_attention import (
    AttentionSpec,
    RaggedRows,
    add_sinks,
    paged_attention,
    paged_attention_update,
)
from jpaged.kernels.paged_attention.measure import SHAPES
from tests.kernels import attention_oracle as oracle

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
KV_DTYPES = ("int8", "float8_e4m3fn")

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
    kv_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None

    @property
    def stored_dtype(self) -> str:
        return self.kv_dtype or self.dtype


_FEW: dict[str, Any] = {"num_tokens": 40}
"""All that "mixed" has, and some of padding: a kernel's time grows with them, above all in an interpreter."""


LATENTS: dict[str, Shape] = {
    "small": Shape(num_heads=5, num_kv_heads=1, head_dim=96, value_dim=64, sliding_window=40, soft_cap=30.0, **_FEW),
    "deepseek": Shape(num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512, dtype="bfloat16", **_FEW),
    "fp8": Shape(num_kv_heads=1, head_dim=160, value_dim=128, kv_dtype="float8_e4m3fn", **_FEW),
}
"""Heads as multi-head latent attention has them."""


def real_shape(name: str, dtype: str = "float32") -> Shape:
    """The heads of a published model."""
    return Shape(**dataclasses.asdict(SHAPES[name]), dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Support:
    """What a backend claims; None is everything."""

    dtypes: frozenset[str] | None = None
    kv_dtypes: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    latents: bool = True
    block_sizes: frozenset[int] | None = None
    max_group: int | None = None

    def __contains__(self, shape: Shape) -> bool:
        return (
            (self.dtypes is None or shape.dtype in self.dtypes)
            and (self.kv_dtypes is None or shape.stored_dtype in self.kv_dtypes)
            and (self.head_dims is None or shape.head_dim in self.head_dims)
            and (self.latents or shape.value_dim is None)
            and (self.block_sizes is None or shape.block_size in self.block_sizes)
            and (self.max_group is None or shape.num_heads // shape.num_kv_heads <= self.max_group)
        )


def scales_of(shape: Shape, num_layers: int = 3) -> np.ndarray | None:
    """Scales [L, K, 2] that differ everywhere; None for a pool that needs none."""
    if jnp.dtype(shape.stored_dtype).itemsize > 1:
        return None
    spread = np.random.default_rng(5).uniform(0.5, 1.5, (num_layers, shape.num_kv_heads, 2)).astype(np.float32)
    if shape.value_dim is not None:
        spread[..., 1] = spread[..., 0]
    return spread * (4.0 / 127 if shape.kv_dtype == "int8" else 0.01)


def make_case(rows: list[tuple[int, int]], shape: Shape, seed: int = 0, *, num_slots: int = 640) -> oracle.Case:
    """Random numbers in the slots that the rows own, NaN in every other slot of the pool."""
    rng = np.random.default_rng(seed)
    needs = [-(-kv_len // shape.block_size) for _, kv_len in rows]
    num_blocks, num_layers, layer = num_slots // shape.block_size + 8, 3, 1
    pool_shape = (num_layers, num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    scales = scales_of(shape)
    scales_k2 = None if scales is None else scales[layer]
    k, v = np.full(pool_shape, np.nan, np.float32), np.full(pool_shape, np.nan, np.float32)
    ids = rng.permutation(num_blocks) + 1
    tables = np.zeros((shape.num_rows, -(-shape.max_len // shape.block_size)), np.int32)
    starts, kv_lens = np.zeros(shape.num_rows + 1, np.int32), np.zeros(shape.num_rows, np.int32)
    for i, (num_queries, kv_len) in enumerate(rows):
        tables[i, : needs[i]], ids = ids[: needs[i]], ids[needs[i] :]
        starts[i + 1 :], kv_lens[i] = starts[i] + num_queries, kv_len
        for position in range(kv_len):
            place = layer, tables[i, position // shape.block_size], position % shape.block_size
            k[place], v[place] = as_stored(rng.normal(size=(2, *pool_shape[3:])), shape.stored_dtype, scales_k2)
    if shape.value_dim is not None:
        v = k[..., : shape.value_dim]
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
        sinks_h=np.linspace(-3, 6, shape.num_heads, dtype=np.float32) if shape.has_sinks else None,
    )


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(jnp.dtype(dtype)).astype(np.float32)


def as_stored(kv_2kd: np.ndarray, dtype: str, scales_k2: np.ndarray | None) -> np.ndarray:
    """Keys and values [2, K, D] after a round trip through the pool's type."""
    if scales_k2 is None:
        return _round(kv_2kd, dtype)
    scales_2k1 = scales_k2.T[..., None]
    quotients = kv_2kd / scales_2k1
    quotients = np.clip(np.round(quotients), -127, 127) if dtype == "int8" else np.clip(quotients, -448, 448)
    return _round(quotients, dtype) * scales_2k1


_attention = jax.jit(paged_attention, static_argnames=("spec", "backend"))
_update = jax.jit(paged_attention_update, static_argnames=("spec", "backend"), donate_argnames="pool")
_write = jax.jit(KVLayout.write, static_argnames="self")


class BackendUnderTest:
    """Runs cases through a backend, and holds what comes out to the oracle."""

    backend: Backend
    form: KVForm = "cpu"
    supports = Support()

    def attend(self, q, pool, layer, rows, spec, scales):
        return _attention(q, pool, layer, rows, spec, scales, backend=self.backend)

    def update(self, q, new_kv, pool, layer, rows, spec, scales):
        return _update(q, new_kv, pool, layer, rows, spec, scales, backend=self.backend)

    def layout(self, case: oracle.Case, dtype: str) -> KVLayout:
        num_layers, blocks, block_size, num_kv_heads, head_dim = case.k_lnbkd.shape
        value_dim = case.v_lnbkd.shape[-1]
        return KVLayout(
            *(num_layers, blocks - 1, block_size, num_kv_heads, head_dim, jnp.dtype(dtype), self.form),
            value_dim=None if value_dim == head_dim else value_dim,
        )

    def spec(self, case: oracle.Case, shape: Shape) -> AttentionSpec:
        kind = AttentionKind(case.scale, case.sliding_window, case.soft_cap)
        return AttentionSpec(self.layout(case, shape.stored_dtype), kind)

    def pool(self, case: oracle.Case, layout: KVLayout, scales: np.ndarray | None) -> jax.Array:
        """The case's keys and values, stored through the layout's own `write`."""
        # All bits set: a NaN in every floating type.
        bits = np.full(layout.shape, -1, f"int{8 * layout.dtype.itemsize}")
        pool = jnp.asarray(bits.view(layout.storage_dtype))
        k_lnbkd, v_lnbkd = case.k_lnbkd, case.v_lnbkd
        if scales is not None:
            k_lnbkd, v_lnbkd = (x / scales[:, None, None, :, i, None] for i, x in enumerate((k_lnbkd, v_lnbkd)))
        slots = np.arange((layout.num_blocks + 1) * layout.block_size, dtype=np.int32)
        for layer in range(layout.num_layers):
            k, v = (jnp.asarray(x[layer].reshape(-1, *x.shape[3:])) for x in (k_lnbkd, v_lnbkd))
            pool = _write(layout, pool, jnp.int32(layer), k, v if layout.value_dim is None else None, slots)
        return pool

    def rows(self, case: oracle.Case) -> RaggedRows:
        return RaggedRows(
            jnp.asarray(case.query_starts_s1),
            jnp.asarray(case.kv_lens_s),
            jnp.asarray(case.block_tables_sm),
            jnp.int32(case.num_rows),
            None if case.first_positions_s is None else jnp.asarray(case.first_positions_s),
            None if case.kv_begins_s is None else jnp.asarray(case.kv_begins_s),
        )

    def run(self, case: oracle.Case, shape: Shape | None = None) -> tuple[np.ndarray, np.ndarray]:
        shape = shape or Shape()
        spec, scales = self.spec(case, shape), scales_of(shape)
        q, layer = jnp.asarray(case.q_thd, jnp.dtype(shape.dtype)), jnp.int32(case.layer)
        pool = self.pool(case, spec.layout, scales)
        o_thd, lse_th = self.attend(
            q, pool, layer, self.rows(case), spec, None if scales is None else jnp.asarray(scales)
        )
        assert o_thd.dtype == jnp.dtype(shape.dtype)
        assert lse_th.dtype == jnp.float32
        if case.sinks_h is not None:
            o_thd, lse_th = add_sinks((o_thd, lse_th), jnp.asarray(case.sinks_h))
            assert (o_thd.dtype, lse_th.dtype) == (jnp.dtype(shape.dtype), jnp.float32)
        return np.asarray(o_thd, np.float32), np.asarray(lse_th)

    def check(self, rows: list[tuple[int, int]], shape: Shape) -> None:
        self.check_case(make_case(rows, shape), shape)

    def check_case(self, case: oracle.Case, shape: Shape) -> None:
        """The right numbers where the shape is supported, and a reason where it is not."""
        if shape not in self.supports:
            with pytest.raises(Unsupported, match=f"attention backend {self.backend}: "):
                self.run(case, shape)
            return
        o_thd, lse_th = self.run(case, shape)
        want_o_thd, want_lse_th = oracle.attention(case)
        tolerance = TOLERANCE[shape.dtype]
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)


class PagedAttentionPromises(BackendUnderTest):
    """One method a promise, whatever the heads and types are."""

    # How rows are cut into tiles is the same for every type: bfloat16 is in those with the most kinds of tiles.
    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            *((name, "float32") for name in RAGGED),
            *((name, "bfloat16") for name in ("decodes", "mixed", "chunk_continues", "query_tile_boundary")),
        ],
    )
    def test_ragged_rows(self, name: str, dtype: str) -> None:
        self.check(RAGGED[name], Shape(dtype=dtype))

    @pytest.mark.parametrize(
        ("name", "sliding_window"),
        [
            *(("mixed", window) for window in (1, 33)),
            *(("chunk_continues", window) for window in (16, 10_000)),
            *(("query_tile_boundary", window) for window in (16, 33)),
        ],
    )
    def test_sliding_window(self, name: str, sliding_window: int) -> None:
        self.check(RAGGED[name], Shape(sliding_window=sliding_window))

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

    @pytest.mark.parametrize("num_queries", [1, 30])
    def test_block_ids_outside_of_the_layer_read_as_zeros(self, num_queries: int) -> None:
        bad_ids = (-1, 10_000, 2**31 - 1, -(2**31))
        case = make_case([*[(num_queries, 50)] * len(bad_ids), (1, 20)], Shape())
        case.block_tables_sm[: len(bad_ids), 1] = bad_ids
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

    def test_blocks_that_a_window_has_left_behind_do_not_matter(self) -> None:
        """Their places in the tables hold the null block, which is NaN here."""
        rows, window, shape = [(1, 100), (7, 90), (1, 34), (1, 20)], 33, Shape(sliding_window=33)
        case = make_case(rows, shape)
        want = self.run(case)
        for table_m, (num_queries, kv_len) in zip(case.block_tables_sm, rows, strict=False):
            first_seen = max(0, kv_len - num_queries + 1 - window)
            table_m[: first_seen // shape.block_size] = 0
        assert np.isnan(case.k_lnbkd[case.layer, 0]).all()
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

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_part_of_each_context(self, dtype: str) -> None:
        """Queries that stand behind the keys they see, and keys that are skipped: both halves of a cascade."""
        shape = Shape(dtype=dtype)
        case = make_case([(1, 64), (5, 48), (1, 100), (20, 90), (1, 33)], shape)
        behind = dataclasses.replace(case, first_positions_s=case.kv_lens_s + 7)
        self.check_case(behind, shape)
        begins = np.zeros(shape.num_rows, np.int32)
        begins[:5] = [16, 0, 96, 48, 32]
        self.check_case(dataclasses.replace(case, kv_begins_s=begins), shape)
        begins[0] = 64  # sees nothing at all
        self.check_case(dataclasses.replace(case, kv_begins_s=begins), shape)

    def test_some_queries_of_a_row_stand_ahead_of_all_that_it_sees(self) -> None:
        """Parts of contexts on other devices begin a key behind a first query; of first tokens far behind it."""
        case = make_case([(1, 32), (7, 38), (20, 51), (2, 17), (1, 16)], Shape())
        begins = np.array([32, 32, 32, 16, 16, 0, 0, 0], np.int32)
        self.check_case(dataclasses.replace(case, kv_begins_s=begins), Shape())
        for shape in (Shape(), Shape(sliding_window=6, dtype="bfloat16")):
            self.check_case(make_case([(2, 1), (20, 19), (1, 0), (7, 6), (1, 33), (9, 40)], shape), shape)
        case = make_case([(1, 64), (5, 48), (1, 100), (20, 90), (1, 33), (70, 70)], Shape(dtype="bfloat16"))
        positions = np.array([-1000, -2, -1, -5, 3, -64, 0, 0], np.int32)
        self.check_case(dataclasses.replace(case, first_positions_s=positions), Shape(dtype="bfloat16"))

    def test_a_part_of_each_context_in_a_window(self) -> None:
        """Windows that end within the keys, where they begin, and behind all of them."""
        shape = Shape(sliding_window=30)
        case = make_case([(1, 64), (5, 48), (1, 100), (20, 90), (1, 33)], shape)
        distances = np.array([12, 40, 29, 25, 0, 0, 0, 0], np.int32)
        begins = np.array([48, 0, 80, 64, 32, 0, 0, 0], np.int32)
        self.check_case(dataclasses.replace(case, first_positions_s=case.kv_lens_s + distances), shape)
        self.check_case(dataclasses.replace(case, kv_begins_s=begins), shape)


class PagedAttentionSizes(BackendUnderTest):
    """Every size and type by itself, of few tokens; and what attention stores on its way."""

    @pytest.mark.parametrize(
        ("name", "dtype", "kv_dtype"),
        [
            *((name, "float32", None) for name in ("mixed", "full_blocks", "whole_prompts")),
            ("mixed", "bfloat16", None),
            *((name, "float32", "int8") for name in ("mixed", "full_blocks")),
        ],
    )
    def test_an_update_stores_the_new_keys_and_nothing_else(self, name: str, dtype: str, kv_dtype: str | None) -> None:
        self.check_update(name, Shape(dtype=dtype, kv_dtype=kv_dtype))

    def check_update(self, name: str, shape: Shape) -> None:
        """What lies in the pool after an update is what was there, and the new keys."""
        case = make_case(RAGGED[name], shape)
        if shape not in self.supports:
            self.check_case(case, shape)
            return
        spec, scales = self.spec(case, shape), scales_of(shape)
        whole = self.pool(case, spec.layout, scales)
        new_kv, before = take_new(case, shape)
        args = self.pool(before, spec.layout, scales), jnp.int32(case.layer), self.rows(case), spec
        q = jnp.asarray(case.q_thd, jnp.dtype(shape.dtype))
        o_thd, lse_th, pool = self.update(q, new_kv, *args, None if scales is None else jnp.asarray(scales))
        want_o_thd, want_lse_th = oracle.attention(case)
        tolerance = TOLERANCE[shape.dtype]
        np.testing.assert_allclose(np.asarray(o_thd, np.float32), want_o_thd, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)
        for layer in range(spec.layout.num_layers):
            ids = jnp.arange(1, spec.layout.blocks_per_layer)  # the null block may hold anything
            got, want = (np.asarray(spec.layout.gather(x, layer, ids), np.float32) for x in (pool, whole))
            np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("block_size", [1, 8, 32, 48, 128, 256])
    def test_block_sizes(self, block_size: int) -> None:
        self.check(RAGGED["mixed"], Shape(block_size=block_size, **_FEW))

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 3), (7, 1), (16, 2), (71, 1)])
    def test_head_groups(self, num_heads: int, num_kv_heads: int) -> None:
        self.check(RAGGED["mixed"], Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, **_FEW))

    @pytest.mark.parametrize("head_dim", [16, 80, 128])
    def test_head_dims(self, head_dim: int) -> None:
        self.check(RAGGED["mixed"], Shape(head_dim=head_dim, **_FEW))

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    def test_soft_cap(self, soft_cap: float) -> None:
        self.check(RAGGED["mixed"], Shape(soft_cap=soft_cap, **_FEW))

    @pytest.mark.parametrize(
        "shape",
        [Shape(has_sinks=True), Shape(has_sinks=True, sliding_window=20, soft_cap=5.0, dtype="bfloat16", **_FEW)],
    )
    def test_sinks(self, shape: Shape) -> None:
        self.check(RAGGED["empty_rows"], shape)
        self.check(RAGGED["mixed"], shape)

    @pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS)
    def test_latents(self, shape: Shape) -> None:
        """Keys that begin with their values; all query heads read the one of a device."""
        self.check(RAGGED["mixed"], shape)

    @pytest.mark.parametrize("kv_dtype", [None, "int8"])
    def test_an_update_stores_new_latents_and_nothing_else(self, kv_dtype: str | None) -> None:
        self.check_update("mixed", dataclasses.replace(LATENTS["small"], dtype="bfloat16", kv_dtype=kv_dtype))

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["mixed", "decodes"])
    def test_keys_and_values_of_8_bits(self, name: str, dtype: str, kv_dtype: str) -> None:
        self.check(RAGGED[name], Shape(dtype=dtype, kv_dtype=kv_dtype, **_FEW))


class PagedAttentionConformance(PagedAttentionPromises, PagedAttentionSizes):
    """The whole suite."""


def take_new(case: oracle.Case, shape: Shape) -> tuple[tuple[jax.Array, jax.Array | None, jax.Array], oracle.Case]:
    """The keys and values of each row's queries with their slots, and the case without them."""
    k, v = case.k_lnbkd.copy(), case.v_lnbkd.copy()
    new = [np.full((shape.num_tokens, *x.shape[3:]), np.nan, np.float32) for x in (k, v)]
    slots = np.full(shape.num_tokens, -1, np.int32)
    for row in range(case.num_rows):
        start, end = case.query_starts_s1[row : row + 2]
        for t in range(start, end):
            block, offset = divmod(int(case.kv_lens_s[row]) - end + t, shape.block_size)
            place = case.layer, case.block_tables_sm[row, block], offset
            new[0][t], new[1][t], slots[t] = k[place], v[place], place[1] * shape.block_size + offset
            k[place] = v[place] = np.nan
    k_tkd, v_tkd = (jnp.asarray(x, jnp.dtype(shape.dtype)) for x in new)
    return (k_tkd, v_tkd if shape.value_dim is None else None, jnp.asarray(slots)), dataclasses.replace(
        case, k_lnbkd=k, v_lnbkd=v
    )
