"""The CPU backend of paged attention: every promise at every width of vectors, and what only it can get wrong."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.cpu import build
from jpaged.kernels.cpu.library import MAX_WIDTH
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, RaggedRows, cpu, paged_attention_update
from jpaged.kernels.paged_attention.cpu import CpuKernel
from jpaged.kernels.paged_attention.measure import SHAPES
from jpaged.kernels.paged_attention.spec import AttentionCall
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels import attention_oracle as oracle
from tests.kernels.attention_conformance import (
    RAGGED,
    PagedAttentionConformance,
    Shape,
    make_case,
    real_shape,
    scales_of,
    take_new,
)

ROOT = Path(__file__).parents[2]
EXTREMES = np.array([-(2**31), -1000, -1, 0, 1, 2, 15, 16, 17, 100, 1000, 2**31 - 1], np.int32)


@pytest.mark.thinned(3)
class TestCpu(PagedAttentionConformance):
    backend = "cpu"
    max_width = MAX_WIDTH

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("name", SHAPES)
    def test_real_head_shapes(self, name: str) -> None:
        self.check(RAGGED["mixed"], real_shape(name))

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("head_dim", [1, 8, 20, 96, 256])
    @pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
    def test_head_dims_that_are_no_whole_vectors(self, head_dim: int, kv_dtype: str) -> None:
        self.check(RAGGED["mixed"], Shape(head_dim=head_dim, kv_dtype=kv_dtype))

    @pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
    def test_queries_of_float32_read_every_pool(self, kv_dtype: str) -> None:
        self.check(RAGGED["mixed"], Shape(kv_dtype=kv_dtype, head_dim=24))

    @pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
    def test_every_number_that_a_pool_can_hold_is_read(self, kv_dtype: str) -> None:
        """A context of one key gives its value as it is: 256 numbers of a row, subnormals and infinities included."""
        dtype = jnp.dtype(kv_dtype)
        numbers = np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}").view(dtype).reshape(-1, 256)
        layout = KVLayout(1, len(numbers), 1, 1, 256, dtype)
        values = layout.encode(jnp.asarray(numbers)) if dtype.itemsize > 1 else jnp.asarray(numbers)
        values = jax.lax.bitcast_convert_type(values, layout.storage_dtype)
        pool = jnp.zeros(layout.shape, layout.storage_dtype).at[1:, 0, 1].set(values)
        counts = jnp.arange(len(numbers) + 1, dtype=jnp.int32)
        rows = RaggedRows(counts, jnp.ones_like(counts[1:]), counts[1:, None], counts[-1])
        scales = jnp.ones((1, 1, 2)) if layout.is_scaled else None
        q_thd = jnp.zeros((len(numbers), 1, 256))
        o_thd, _ = self.attend(q_thd, pool, jnp.int32(0), rows, AttentionSpec(layout, AttentionKind(1.0)), scales)
        np.testing.assert_allclose(np.asarray(o_thd)[:, 0], numbers.astype(np.float32), rtol=0, atol=2e-38)

    def test_queries_of_float16(self) -> None:
        shape = Shape(dtype="float16", kv_dtype="float16")
        case = make_case(RAGGED["mixed"], shape)
        o_thd, lse_th = self.run(case, shape)
        want_o_thd, want_lse_th = oracle.attention(case)
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)

    def test_a_group_larger_than_a_tile(self) -> None:
        self.check([(1, 20), (3, 40)], Shape(num_heads=150, num_kv_heads=2, head_dim=8, num_tokens=8))

    def test_a_context_of_many_chunks(self) -> None:
        shape = Shape(max_len=640, num_tokens=64, sliding_window=300)
        self.check([(1, 600)], shape)
        self.check([(1, 600)], dataclasses.replace(shape, sliding_window=None))
        self.check([(40, 600)], shape)
        self.check([(40, 600)], dataclasses.replace(shape, sliding_window=None))

    @pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
    def test_an_update_stores_what_the_layout_would(self, kv_dtype: str) -> None:
        """Bit for bit, ties and subnormals and numbers too large included, for slots whatever they are."""
        shape = Shape(kv_dtype=kv_dtype)
        case = make_case(RAGGED["mixed"], shape)
        spec, rng = self.spec(case, shape), np.random.default_rng(1)
        kv = rng.standard_normal((2, shape.num_tokens, shape.num_kv_heads, shape.head_dim), np.float32)
        kv *= 2.0 ** rng.integers(-30, 20, kv.shape)
        kv[:, :, :, :4] = [-0.0, 0.5, 1.5, 2.5]
        k_tkd, v_tkd = jnp.asarray(kv)
        slots = jnp.asarray(rng.permutation(shape.num_tokens) + 16, jnp.int32)
        slots = slots.at[:4].set(jnp.array([-1, 2**31 - 1, -(2**31), spec.layout.blocks_per_layer * shape.block_size]))
        pool, layer = self.pool(case, spec.layout, scales_of(shape)), jnp.int32(case.layer)
        want = np.asarray(spec.layout.write(pool, layer, k_tkd, v_tkd, slots))
        q_thd, ones_lk2 = jnp.asarray(case.q_thd), jnp.ones((3, shape.num_kv_heads, 2))
        scales = ones_lk2 if spec.layout.is_scaled else None
        _, _, got = self.update(q_thd, (k_tkd, v_tkd, slots), pool, layer, self.rows(case), spec, scales)
        np.testing.assert_array_equal(_without_nans(np.asarray(got), kv_dtype), _without_nans(want, kv_dtype))

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim"), [(3, 3, 32), pytest.param(4, 2, 48, marks=pytest.mark.long)]
    )
    def test_tokens_of_whole_prompts_see_each_other(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Whole prompts are attended to by the call's keys; a part of one, and one that sees its past, are not."""
        shape = Shape(num_tokens=160, head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, max_len=160)
        case = make_case([(2, 2), (17, 17), (1, 1), (81, 81), (5, 9), (33, 33)], shape)
        positions = case.kv_lens_s.copy()
        positions[5] = 0
        case = dataclasses.replace(case, first_positions_s=positions)
        o_thd, lse_th, pool = self.run_update(case, shape)
        want_o_thd, want_lse_th = oracle.attention(case)
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)
        whole = self.pool(case, self.spec(case, shape).layout, None)
        np.testing.assert_array_equal(pool, np.asarray(whole))
        alone = make_case([(81, 81)], shape)
        tables = np.roll(case.block_tables_sm, -3, axis=0)
        alone = dataclasses.replace(alone, k_lnbkd=case.k_lnbkd, v_lnbkd=case.v_lnbkd, block_tables_sm=tables)
        alone = dataclasses.replace(alone, first_positions_s=alone.kv_lens_s)
        alone.q_thd[:81] = case.q_thd[20:101]
        got, got_lse, _ = self.run_update(alone, shape)
        assert got[:81].tobytes() == o_thd[20:101].tobytes()
        assert got_lse[:81].tobytes() == lse_th[20:101].tobytes()

    def run_update(self, case: oracle.Case, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Outputs, log-sum-exps and pool of a call that stores the rows' own keys."""
        new_kv, before = take_new(case, shape)
        spec, layer = self.spec(case, shape), jnp.int32(case.layer)
        pool = self.pool(before, spec.layout, None)
        found = self.update(jnp.asarray(case.q_thd, jnp.float32), new_kv, pool, layer, self.rows(case), spec, None)
        return np.asarray(found[0]), np.asarray(found[1]), np.asarray(found[2])

    @pytest.mark.parametrize("seed", range(20))
    def test_numbers_that_make_no_sense_stay_in_bounds(self, seed: int) -> None:
        """Each number of the rows may be anything; what can be made of them is what they say, clamped."""
        rng, shape = np.random.default_rng(seed), Shape()
        case = _spoil(make_case(RAGGED["mixed"], shape), rng)
        case = dataclasses.replace(case, k_lnbkd=np.nan_to_num(case.k_lnbkd), v_lnbkd=np.nan_to_num(case.v_lnbkd))
        o_thd, lse_th = self.run(case, shape)
        want_o_thd, want_lse_th = _oracle_of_anything(case)
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("kv_len", [193, 400, 10_000, 2**31 - 1])
    def test_a_context_ends_with_its_table(self, kv_len: int) -> None:
        shape = Shape()
        case = make_case([(1, 192), (3, 192), (1, 180)], shape)
        positions, lens = np.zeros((2, shape.num_rows), np.int32)
        positions[:3], lens[:3] = [kv_len - 1, 191, 2**31 - 2], [kv_len, kv_len, 180]
        case = dataclasses.replace(case, first_positions_s=positions, kv_lens_s=lens, kv_begins_s=np.zeros_like(lens))
        for got, want in zip(self.run(case, shape), _oracle_of_anything(case), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1, -(2**31)])
    def test_a_layer_that_is_not_there_reads_as_zeros_and_takes_nothing(self, layer: int) -> None:
        shape = Shape()
        case = make_case(RAGGED["mixed"], shape)
        spec = self.spec(case, shape)
        pool, rows = self.pool(case, spec.layout, None), self.rows(case)
        before, (new_kv, _) = np.asarray(pool), take_new(case, shape)
        q_thd = jnp.asarray(case.q_thd)
        o_thd, lse_th, pool = self.update(q_thd, new_kv, pool, jnp.int32(layer), rows, spec, None)
        np.testing.assert_array_equal(np.asarray(o_thd), 0)
        np.testing.assert_allclose(lse_th[0], np.log(33), rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(pool), before)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_threads_do_not_show_in_a_single_bit(self, dtype: str) -> None:
        """Contexts that are split over threads, and tiles that are not."""
        shape = Shape(dtype=dtype, max_len=2048, num_tokens=40, num_heads=32, num_kv_heads=2, head_dim=64)
        case = make_case([(1, 600)], shape)
        chunk = make_case([(40, 600)], shape)
        for each in (case, chunk):
            want = self.run(each, shape)
            for num_threads in (1, 2, 3):
                limited = _with_threads(num_threads, self.max_width)
                for got, expected in zip(limited.run(each, shape), want, strict=True):
                    np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize(("head_dim", "soft_cap"), [(64, None), (32, 30.0), (20, None)])
    def test_a_query_has_the_same_bits_in_a_chunk_as_alone(self, head_dim: int, soft_cap: float | None) -> None:
        """Many and few rows have different code, for pairs of bfloat16 numbers if a head is whole vectors of them."""
        shape = Shape(
            dtype="bfloat16", max_len=320, num_tokens=32, num_heads=6, head_dim=head_dim, soft_cap=soft_cap, num_rows=1
        )
        case = make_case([(32, 290)], shape)
        in_chunk = self.run(case, shape)
        for query in (0, 13, 31):
            q_thd = np.zeros_like(case.q_thd)
            q_thd[0] = case.q_thd[query]
            alone = dataclasses.replace(
                case, q_thd=q_thd, query_starts_s1=np.array([0, 1]), kv_lens_s=np.array([290 - 31 + query])
            )
            for got, want in zip(self.run(alone, shape), in_chunk, strict=True):
                np.testing.assert_array_equal(got[0], want[query])

    def test_many_calls_at_once(self) -> None:
        """Programs that compete for the threads of one pool all end, with the right numbers."""
        shape = Shape(max_len=640, num_tokens=64)
        case = make_case([(40, 600)], shape)
        spec, rows = self.spec(case, shape), self.rows(case)
        pool, layer = self.pool(case, spec.layout, None), jnp.int32(case.layer)
        want, _ = oracle.attention(case)
        q_thd = jnp.asarray(case.q_thd)
        outputs = [self.attend(q_thd, pool, layer, rows, spec, None)[0] for _ in range(32)]
        for o_thd in jax.block_until_ready(outputs):
            np.testing.assert_allclose(o_thd, want, rtol=2e-5, atol=2e-5)

    def test_the_pool_is_never_copied(self) -> None:
        shape = Shape()
        case = make_case(RAGGED["mixed"], shape)
        spec = self.spec(case, shape)
        layout, new_kv = spec.layout, take_new(case, shape)[0]
        pool = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype)
        q_thd, rows = jnp.asarray(case.q_thd), self.rows(case)

        def step(pool: jax.Array) -> jax.Array:
            for layer in range(layout.num_layers):
                _, _, pool = paged_attention_update(q_thd, new_kv, pool, layer, rows, spec, backend="cpu")
            return pool

        compiled = jax.jit(step, donate_argnums=0).lower(pool).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None
        assert memory.alias_size_in_bytes == layout.num_bytes
        assert memory.temp_size_in_bytes < layout.num_bytes // 4
        assert " copy(" not in text


@pytest.mark.long
class TestVectorsOf8(TestCpu):
    max_width = 8

    def attend(self, *args):
        return _attend(dataclasses.replace(_kernel(), max_width=self.max_width), *args)

    def update(self, *args):
        return _update(dataclasses.replace(_kernel(), max_width=self.max_width), *args)


@pytest.mark.long
class TestVectorsOf4(TestVectorsOf8):
    max_width = 4


@pytest.mark.long
def test_a_process_of_one_thread() -> None:
    """Pinned to one core, XLA's pool has one thread: the kernel does not wait for another."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from tests.kernels.test_paged_attention_cpu import TestCpu\n"
        "TestCpu().test_a_context_of_many_chunks(); TestCpu().test_many_calls_at_once()"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment, cwd=ROOT)


def test_it_is_built_wherever_a_compiler_is() -> None:
    assert isinstance(cpu.kernel(), CpuKernel) or _has_no_compiler(), f"run `make setup`: {cpu.kernel()}"


def test_other_devices_are_refused() -> None:
    class Device:
        platform = "gpu"

    assert cpu.unsupported_device_reason(Device()) == "it runs on CPUs, not on gpu"
    assert cpu.unsupported_device_reason(jax.devices()[0]) is None


# --- kernels of a process ----------------------------------------------------------------------------------------


def _kernel() -> CpuKernel:
    found = cpu.kernel()
    assert isinstance(found, CpuKernel), found
    return found


def _has_no_compiler() -> bool:
    try:
        build.find_compiler()
    except build.BuildError:
        return True
    return False


# XLA only calls the kernel, which is compiled already.
@functools.partial(jax.jit, static_argnums=(0, 5), compiler_options=QUICK_XLA_OPTIONS)
def _attend(kernel, q_thd, pool, layer, rows, spec, scales):
    return kernel.attend(AttentionCall(q_thd, pool, layer, rows, spec, scales))


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=3, compiler_options=QUICK_XLA_OPTIONS)
def _update(kernel, q_thd, new_kv, pool, layer, rows, spec, scales):
    call = AttentionCall(q_thd, pool, layer, rows, spec, scales)
    return kernel.update(call, call.scaled(new_kv))


def _with_threads(count: int, max_width: int) -> PagedAttentionConformance:
    """The suite, run by so many threads at most, on vectors as wide."""

    class Limited(PagedAttentionConformance):
        backend = "cpu"

        def attend(self, *args):
            return _attend(dataclasses.replace(_kernel(), max_threads=count, max_width=max_width), *args)

    return Limited()


# --- numbers that make no sense ----------------------------------------------------------------------------------


def _spoil(case: oracle.Case, rng: np.random.Generator) -> oracle.Case:
    """A third of the numbers of the rows are replaced."""

    def spoil(numbers: np.ndarray) -> np.ndarray:
        return np.where(rng.random(numbers.shape) < 1 / 3, rng.choice(EXTREMES, numbers.shape), numbers).astype(
            np.int32
        )

    num_rows = len(case.kv_lens_s)
    return dataclasses.replace(
        case,
        query_starts_s1=spoil(case.query_starts_s1),
        kv_lens_s=spoil(case.kv_lens_s),
        block_tables_sm=spoil(case.block_tables_sm),
        first_positions_s=spoil(np.full(num_rows, 20, np.int32)),
        kv_begins_s=spoil(np.zeros(num_rows, np.int32)),
        num_rows=int(rng.choice([-1, 0, 3, 5, 100, 2**31 - 1])),
    )


def _oracle_of_anything(case: oracle.Case) -> tuple[np.ndarray, np.ndarray]:
    """A token belongs to the first row that names it; a context ends with its table and begins with 0."""
    num_tokens, num_owned = case.q_thd.shape[0], 0
    o_thd, lse_th = np.zeros(case.q_thd.shape), np.full(case.q_thd.shape[:2], -np.inf)
    table_len = case.block_tables_sm.shape[1] * case.k_lnbkd.shape[2]
    for row in range(min(case.num_rows, len(case.kv_lens_s))):
        start, end = int(case.query_starts_s1[row]), min(int(case.query_starts_s1[row + 1]), num_tokens)
        first = max(start, num_owned)
        if first >= end:
            continue
        num_owned = end
        assert case.first_positions_s is not None and case.kv_begins_s is not None
        position = int(case.first_positions_s[row]) + first - start
        alone = dataclasses.replace(
            case,
            q_thd=case.q_thd[first:end],
            query_starts_s1=np.array([0, end - first]),
            kv_lens_s=np.clip(case.kv_lens_s[row : row + 1], 0, table_len),
            block_tables_sm=case.block_tables_sm[row : row + 1],
            first_positions_s=np.array([position], object),
            kv_begins_s=np.maximum(case.kv_begins_s[row : row + 1], 0),
            num_rows=1,
        )
        o_thd[first:end], lse_th[first:end] = oracle.attention(alone)
    return o_thd, lse_th


def _without_nans(pool: np.ndarray, kv_dtype: str) -> np.ndarray:
    """One kind of NaN; the others' bits are nobody's promise."""
    numbers = pool.view(jnp.dtype(kv_dtype)).astype(np.float32)
    return np.where(np.isnan(numbers), 0, pool)
