"""The Hopper backend of paged attention: its kernel interpreted, its plan of the work, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Queries, RaggedRows, paged_attention
from jpaged.kernels.paged_attention.gpu import attention as gpu
from jpaged.kernels.paged_attention.gpu import work
from jpaged.kernels.paged_attention.gpu.kernel import GpuItemField
from jpaged.kernels.paged_attention.gpu.work import (
    NUM_PROCESSORS,
    SHARED_BYTES,
    QueryPlaces,
    Tiling,
    choose_tiling,
    fixed_bytes,
    stage_bytes,
)
from jpaged.kernels.paged_attention.spec import ContextPart
from tests.kernels import gpu_interpreter
from tests.kernels.attention_conformance import (
    RAGGED,
    PagedAttentionPromises,
    Shape,
    Support,
    make_case,
)
from tests.kernels.gpu_conformance import Device, GpuBackend, GpuSizes

SUPPORT = Support(
    block_sizes=frozenset(range(8, 129, 8)), head_dims=frozenset(range(16, 257, 16)), latents=False, max_group=64
)


class Interpreted(GpuBackend):
    """The conformance suite's calls, interpreted."""

    backend = "pallas-gpu"
    supports = SUPPORT
    max_parts = 1
    tile_rows = 64

    def attend(self, q, pool, layer, rows, spec, scales):
        parts = [ContextPart(rows, spec)]
        return gpu_interpreter.attend(q, pool, layer, parts, scales, self.max_parts, self.tile_rows)


_INT8: dict[str, Any] = {"kv_dtype": "int8"}
_BF16: dict[str, Any] = {"dtype": "bfloat16"}


class Together(Interpreted, PagedAttentionPromises):
    """Every promise, and sizes and types all together."""

    @pytest.mark.long
    @pytest.mark.parametrize(
        "shape",
        [
            Shape(num_heads=6, num_kv_heads=3, head_dim=80, block_size=8, kv_dtype="int8", soft_cap=30.0),
            Shape(num_heads=7, num_kv_heads=1, head_dim=16, block_size=48, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
            Shape(num_heads=16, num_kv_heads=2, head_dim=128, block_size=32, kv_dtype="float8_e4m3fn", soft_cap=0.5),
            Shape(num_heads=4, num_kv_heads=4, head_dim=64, block_size=128, dtype="bfloat16", kv_dtype="int8"),
        ],
    )
    def test_sizes_and_types_together(self, shape: Shape) -> None:
        self.check(RAGGED["mixed"], shape)


@pytest.mark.deep
class TestPallasGpu(Together):
    """With contexts whole and tiles of 64 rows."""


@pytest.mark.deep
class TestPallasGpuSizes(Interpreted, GpuSizes):
    """Each size and type by itself, with contexts whole and tiles of 64 rows."""


@pytest.mark.deep
class TestCutContexts(Together):
    """With contexts in up to three parts: parts change which tiles there are, and a tile knows of no parts."""

    max_parts = 3


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        pytest.param(rows, Shape(num_kv_heads=1, **sizes), marks=mark)
        for rows, sizes, mark in (
            ("mixed", _INT8 | {"num_heads": 6, "head_dim": 80, "block_size": 8, "soft_cap": 30.0}, pytest.mark.deep),
            ("chunk_continues", _BF16 | {"num_heads": 7, "block_size": 48, "sliding_window": 50}, pytest.mark.deep),
            ("empty_rows", {"num_heads": 16, "sliding_window": 7}, pytest.mark.deep),
            ("longest_table", _BF16 | {"num_heads": 33, "kv_dtype": "float8_e4m3fn"}, pytest.mark.long),
        )
    ],
)
def test_two_consumers_with_sizes_and_types_together(rows: str, shape: Shape) -> None:
    """The rest of the promises is the plan's and the masks', which know no warpgroups."""
    suite = Interpreted()
    suite.tile_rows = 128
    num_tokens = sum(num_queries for num_queries, _ in RAGGED[rows])
    suite.check(RAGGED[rows], dataclasses.replace(shape, num_tokens=num_tokens, num_rows=len(RAGGED[rows])))


# Small enough for the quick suite, and between them they reach every branch of the kernel.
_FEW: dict[str, Any] = {"num_tokens": 24, "num_rows": 4}
_TWO: dict[str, Any] = {"num_tokens": 19, "num_rows": 2, "num_kv_heads": 1}
QUICK: dict[str, tuple[list[tuple[int, int]], Shape, int, int]] = {
    "refills": ([(1, 160), (17, 150), (1, 5)], Shape(**_FEW), 1, 64),
    "parts of a context": ([(1, 190), (20, 90), (1, 5)], Shape(sliding_window=70, soft_cap=5.0, **_FEW), 2, 64),
    "bfloat16": ([(3, 140), (1, 64)], Shape(7, head_dim=64, dtype="bfloat16", **_FEW | {"num_kv_heads": 1}), 1, 64),
    "int8": ([(1, 150), (9, 20)], Shape(kv_dtype="int8", **_FEW), 1, 64),
    "blocks that fill no chunk": ([(1, 150), (20, 49)], Shape(block_size=48, **_FEW), 1, 64),
    "warpgroups": ([(1, 300), (17, 280)], Shape(8, max_len=304, **_TWO), 1, 128),
    "narrow warpgroups": ([(18, 250)], Shape(sliding_window=170, max_len=256, kv_dtype="int8", **_TWO), 1, 128),
    "unfilled warpgroups": ([(1, 150), (18, 49)], Shape(block_size=48, soft_cap=5.0, **_TWO), 2, 128),
}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.thinned(8)
def test_the_kernel_is_right_and_free_of_races(name: str) -> None:
    rows, shape, max_parts, tile_rows = QUICK[name]
    suite = Interpreted()
    suite.max_parts, suite.tile_rows = max_parts, tile_rows
    suite.check(rows, shape)


@pytest.mark.long
def test_parts_are_merged_to_more_digits_than_the_result_has() -> None:
    """bfloat16 has 8 bits: what its parts round off would show in every other result. All keys weigh the same here."""
    shape = Shape(dtype="bfloat16", num_tokens=24, num_rows=4)
    case = make_case([(1, 190)], shape)
    case = dataclasses.replace(case, q_thd=np.zeros_like(case.q_thd))
    whole, cut = Interpreted(), Interpreted()
    cut.max_parts = 3
    (o_thd, _), (cut_o_thd, _) = whole.run(case, shape), cut.run(case, shape)
    assert (o_thd == cut_o_thd)[0].mean() > 0.98


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.thinned(2)
def test_what_lies_around_a_part_of_a_context_never_matters(tile_rows: int) -> None:
    """Skipped blocks hold NaN, and one in the middle is named by no id of the layer."""
    shape = Shape(num_heads=8, num_kv_heads=1, num_tokens=10, num_rows=2)
    suite = Interpreted()
    suite.tile_rows = tile_rows
    case = make_case([(1, 100), (9, 150)], shape)
    case.k_lnbkd[1, case.block_tables_sm[0, :3]] = np.nan
    case.v_lnbkd[1, case.block_tables_sm[0, :3]] = np.nan
    case.block_tables_sm[1, 2] = case.k_lnbkd.shape[1]
    case.block_tables_sm[0, 4] = -1
    suite.check_case(dataclasses.replace(case, kv_begins_s=np.array([48, 0], np.int32)), shape)


# --- the order of the kernel's steps: the interpreter of jax 0.10 knows nothing of the two ways to shared memory ------


def _uncommitted(jaxpr: Any, dirty: frozenset[str]) -> frozenset[str]:
    """Walks a program in order: `dirty` are the steps that may not come next, those behind it what is returned."""
    for equation in jaxpr.eqns:
        step = equation.primitive.name
        assert step not in dirty, f"{step} without a commit before it"
        if step == "commit_smem":
            dirty &= {"swap"}
        elif step == "wait_smem_to_gmem":
            dirty -= {"swap"}
        elif step == "swap":
            dirty |= {"wgmma_ref", "copy_gmem_to_smem", "copy_smem_to_gmem", "barrier_arrive"}
        elif step == "wgmma_ref":
            dirty |= {"copy_gmem_to_smem"}
        elif step == "copy_smem_to_gmem":
            dirty |= {"swap"}  # until it has read what would be written over
        elif step == "cond":
            dirty = frozenset().union(*(_uncommitted(branch.jaxpr, dirty) for branch in equation.params["branches"]))
        else:
            for inner in jaxprs_in_params(equation.params):
                dirty = _uncommitted(inner, dirty)
    return dirty


@pytest.mark.parametrize("num_tokens", [24, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_is_written_is_committed_before_it_is_read_or_copied_over(dtype: str, num_tokens: int) -> None:
    layout = KVLayout(2, 8, 16, 2, 64, jnp.dtype(dtype), "gpu")
    spec = AttentionSpec(layout, AttentionKind(0.125))
    rows = RaggedRows(*(jnp.zeros(shape, jnp.int32) for shape in ((5,), (4,), (4, 32), ())))
    q, pool = jax.ShapeDtypeStruct((num_tokens, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct(layout.shape, layout.dtype)
    scales = jax.ShapeDtypeStruct((2, 2, 2), jnp.float32) if layout.is_scaled else None
    call = functools.partial(paged_attention, spec=spec, backend="pallas-gpu")
    program = jax.make_jaxpr(call)(q, pool, 0, rows, scales_lk2=scales).jaxpr
    assert str(program).count("wgmma_ref") >= 2
    assert ("set_max_registers" in str(program)) == (num_tokens == 64)
    assert _uncommitted(program, frozenset()) == set()


def test_latents_are_refused() -> None:
    layout = KVLayout(1, 8, 16, 1, 192, jnp.dtype("bfloat16"), "gpu", value_dim=128)
    queries = Queries(8, jnp.dtype("bfloat16"), 4, 4, 16)
    reason = "keys are latents of 192 numbers; only keys with separate values of up to 256 are supported"
    assert gpu.unsupported_reason(layout, queries) == reason


# --- the plan ---------------------------------------------------------------------------------------------------------


def _spec(num_kv_heads: int = 8, sliding_window: int | None = None) -> AttentionSpec:
    layout = KVLayout(1, 8192, 16, num_kv_heads, 128, jnp.dtype("bfloat16"), "gpu")
    return AttentionSpec(layout, AttentionKind(1.0, sliding_window))


def _rows(counts: list[int], kv_lens: list[int], used: int, **fields: Any) -> RaggedRows:
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    tables = jnp.zeros((len(counts), max(1, max(kv_lens) // 16 + 1)), jnp.int32)
    return RaggedRows(jnp.array(starts), jnp.array(kv_lens, jnp.int32), tables, jnp.int32(used), **fields)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _plan(rows: RaggedRows, spec: AttentionSpec, tiling: Tiling, num_tokens: int) -> tuple[jax.Array, QueryPlaces]:
    """One program: outside of one, each operation would be compiled by itself."""
    return work.plan([ContextPart(rows, spec)], tiling, num_tokens)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.thinned(8)
def test_every_key_of_every_query_is_in_one_item_at_its_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, num_tokens = 6, 90
    counts = rng.multinomial(int(rng.integers(0, num_tokens + 1)), np.ones(num_rows) / num_rows) * (rng.random(6) < 0.8)
    used = int(rng.integers(0, num_rows + 1))
    starts = np.concatenate(([0], np.cumsum(counts)))
    kv_lens = counts + rng.integers(0, 600, num_rows)
    window = int(rng.integers(1, 700)) if seed % 2 else None
    spec = _spec(2, window)
    tiling = choose_tiling(spec, 14, num_tokens, num_rows if seed % 4 < 2 else num_tokens, 64)
    tile_rows = 128 if seed % 4 < 2 else 64
    assert tiling.tile_rows == tile_rows
    tiling = dataclasses.replace(tiling, max_parts=1 + seed // 2, wanted_items=int(rng.integers(1, 20)), min_chunks=1)
    rows = _rows(counts.tolist(), kv_lens.tolist(), used)
    items, places = _plan(rows, spec, tiling, num_tokens)
    chunks: dict[int, list[int]] = {}
    places_t: dict[int, list[int]] = {}
    for index, fields in enumerate(np.asarray(items).tolist()):
        row, first, size, position, begin, end, first_chunk, num_chunks, _, is_bad = fields
        assert size <= tiling.tile_tokens
        assert first % 8 == 0
        tokens = np.asarray(places.tokens_m)[first : first + tile_rows][: size * tiling.group]
        heads = np.asarray(places.heads_m)[first : first + size * tiling.group]
        assert list(heads) == list(range(tiling.group)) * size
        assert list(tokens) == sorted(tokens)
        assert is_bad == 0
        for i in range(size):
            token = int(tokens[i * tiling.group])
            assert position + i == kv_lens[row] - counts[row] + token - starts[row]
            seen = range(0 if window is None else max(0, position + i - window + 1), position + i + 1)
            assert begin <= seen.start
            assert seen.stop <= end <= kv_lens[row]
            assert num_chunks > 0
            chunks.setdefault(token, []).extend(range(first_chunk, first_chunk + num_chunks))
            places_t.setdefault(token, []).append(index * tile_rows + i * tiling.group)
            span = tiling.chunk_tokens
            assert chunks[token][0] == begin // span
            assert set(range(chunks[token][0], chunks[token][-1] + 1)) == set(chunks[token])
            assert len(chunks[token]) <= -(-end // span) - begin // span
    want = [int(starts[row]) + i for row in range(used) for i in range(counts[row])]
    assert sorted(chunks) == want
    for token in range(num_tokens):
        parts = int(places.parts_lt[0, token])
        first = int(places.items_lt[0, token]) * tile_rows + int(places.first_rows_lt[0, token])
        assert [first + tile_rows * i for i in range(parts)] == places_t.get(token, [])
        if parts:
            row = int(np.searchsorted(starts, token, side="right")) - 1
            end = kv_lens[row] - counts[row] + token - starts[row] + 1
            assert chunks[token][-1] >= (end - 1) // tiling.chunk_tokens


def _parts(kv_lens: list[int], bucket: int, num_kv_heads: int = 8) -> list[int]:
    """Parts of rows of one query each, in arrays of a size."""
    spec, unused = _spec(num_kv_heads), bucket - len(kv_lens)
    tiling = choose_tiling(spec, 4 * num_kv_heads, bucket, bucket, 8192)
    rows = _rows([1] * len(kv_lens) + [0] * unused, kv_lens + [0] * unused, len(kv_lens))
    _, places = _plan(rows, spec, tiling, bucket)
    return np.asarray(places.parts_lt[0]).tolist()[: len(kv_lens)]


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_contexts_are_cut_until_the_chip_is_full_whatever_the_arrays_have_room_for(num_rows: int) -> None:
    parts = _parts([32_768] * num_rows, 8)
    assert parts == parts[:1] * num_rows
    assert parts[0] == 33 // num_rows or parts[0] == 32  # 512 chunks in 33 parts of 16 are 32
    assert sum(parts) * 8 <= 2 * NUM_PROCESSORS


def test_one_row_of_one_head_fills_the_chip() -> None:
    (parts,) = _parts([131_072], 8, num_kv_heads=1)
    assert 240 <= parts <= 264


@pytest.mark.long
def test_only_rows_that_are_longer_than_the_rest_are_cut() -> None:
    assert _parts([1000] * 60, 64) == [1] * 60
    parts = _parts([1000] * 59 + [32_768], 64)
    assert parts[:59] == [1] * 59
    assert parts[59] == choose_tiling(_spec(), 32, 64, 64, 2048).max_parts == 8


def test_short_contexts_are_not_cut() -> None:
    assert _parts([256], 8) == [1]
    assert _parts([512], 8) == [2]
    windowed = choose_tiling(_spec(sliding_window=512), 32, 1, 1, 1024)
    assert windowed.max_parts == 2


def test_what_merging_reads_is_bounded() -> None:
    for num_tokens in (1, 8, 64, 512, 2048):
        tiling = choose_tiling(_spec(), 32, num_tokens, 64, 2048)
        assert tiling.max_parts == 1 or tiling.max_parts * num_tokens * 32 * 128 * 4 <= 8 << 20
    assert choose_tiling(_spec(), 32, 2048, 64, 2048).max_parts == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_heads", "tile_rows"),
    [(64, 64, 32, 64), (96, 64, 32, 64), (128, 64, 32, 128), (2048, 256, 32, 128), (16, 1, 32, 64), (18, 1, 32, 128)],
)
def test_prompts_have_tiles_of_128_rows(num_tokens: int, num_rows: int, num_heads: int, tile_rows: int) -> None:
    tiling = choose_tiling(_spec(), num_heads, num_tokens, num_rows, 2048)
    assert (tiling.tile_rows, tiling.tile_tokens) == (tile_rows, tile_rows // 4)
    assert tiling.stages % tiling.num_consumers == 0


@pytest.mark.parametrize(
    ("head_dim", "soft_cap", "dtype", "tile_rows"),
    [(256, None, "bfloat16", 128), (256, 50.0, "bfloat16", 64), (128, 50.0, "bfloat16", 128), (256, None, "int8", 64)],
)
def test_heads_of_256_have_them_where_memory_and_registers_have_room(
    head_dim: int, soft_cap: float | None, dtype: str, tile_rows: int
) -> None:
    layout = KVLayout(1, 8192, 16, 8, head_dim, jnp.dtype(dtype), "gpu")
    spec = AttentionSpec(layout, AttentionKind(1.0, soft_cap=soft_cap))
    assert choose_tiling(spec, 32, 2048, 64, 2048).tile_rows == tile_rows


@pytest.mark.long
def test_two_consumers_read_a_prompts_keys_half_as_often() -> None:
    spec, rows = _spec(), _rows([1024, 1], [1024, 500], 2)
    chunks = []
    for num_rows in (1025, 2):
        tiling = dataclasses.replace(choose_tiling(spec, 32, 1025, num_rows, 2048), max_parts=1)
        items, _ = work.plan([ContextPart(rows, spec)], tiling, 1025)
        used = items[:, GpuItemField.NUM_TOKENS] > 0
        chunks.append(int((items[:, GpuItemField.NUM_CHUNKS] * used).sum()))
    decode = -(-500 // 64)
    # Tiles of 16 tokens and of 32; both end in the chunk with their last token.
    assert [n - decode for n in chunks] == [sum(range(1, 17)) * 4, sum(range(1, 17)) * 2]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim", "num_heads", "reason"),
    [
        ("float32", 16, 128, 8, "the pool has float32; tensor-core products require bfloat16, "),
        ("bfloat16", 12, 128, 8, "block_size 12 is not a multiple of 8 up to 128"),
        ("bfloat16", 136, 128, 8, "block_size 136 is not a multiple of 8 up to 128"),
        ("bfloat16", 16, 72, 8, "head_dim 72 is not a multiple of 16 up to 256"),
        ("bfloat16", 16, 272, 8, "head_dim 272 is not a multiple of 16 up to 256"),
        ("bfloat16", 16, 128, 130, "65 query heads share a key/value head; the limit is 64"),
        (
            "bfloat16",
            128,
            256,
            8,
            r"requires \d+ bytes of shared memory \(twice 131072, and \d+\); the limit is 232448",
        ),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_with_numbers(
    dtype: str, block_size: int, head_dim: int, num_heads: int, reason: str
) -> None:
    spec = AttentionSpec(KVLayout(1, 4, block_size, 2, head_dim, jnp.dtype(dtype), "gpu"), AttentionKind(1.0))
    with pytest.raises(Unsupported, match=f"attention backend pallas-gpu: .*{reason}"):
        _call(spec, num_heads, "bfloat16")


@pytest.mark.parametrize(("pool", "queries"), [("bfloat16", "float16"), ("bfloat16", "float32"), ("int8", "float32")])
def test_queries_of_another_type_are_refused(pool: str, queries: str) -> None:
    spec = AttentionSpec(KVLayout(1, 4, 16, 2, 64, jnp.dtype(pool), "gpu"), AttentionKind(1.0))
    with pytest.raises(Unsupported, match=f"queries are {queries} and the pool has {pool}"):
        _call(spec, 4, queries)


def _call(spec: AttentionSpec, num_heads: int, dtype: str) -> None:
    layout = spec.layout
    rows = RaggedRows(*(jnp.zeros(shape, jnp.int32) for shape in ((3,), (2,), (2, 4), ())))
    pool = jnp.zeros(layout.shape, layout.storage_dtype)
    scales = jnp.ones((1, layout.num_kv_heads, 2)) if layout.is_scaled else None
    q = jnp.zeros((8, num_heads, layout.head_dim), dtype)
    paged_attention(q, pool, 0, rows, spec, scales, backend="pallas-gpu")


def test_what_is_not_refused_fits_into_shared_memory() -> None:
    for dtype in ("bfloat16", "int8"):
        for block_size in range(8, 129, 8):
            for head_dim in range(16, 257, 16):
                layout = KVLayout(1, 4, block_size, 2, head_dim, jnp.dtype(dtype), "gpu")
                if gpu.unsupported_reason(layout, Queries(8, jnp.dtype("bfloat16"), 64, 64, 64)) is None:
                    for num_tokens in (64, 2048):
                        tiling = choose_tiling(AttentionSpec(layout, AttentionKind(1.0)), 8, num_tokens, 64, 64)
                        fixed, stage = (size(layout, tiling.num_consumers) for size in (fixed_bytes, stage_bytes))
                        assert tiling.stages >= 2
                        assert tiling.stages % tiling.num_consumers == 0
                        assert fixed + tiling.stages * stage <= SHARED_BYTES


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("gpu", "NVIDIA H200", "9.0"), None),
        (Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0"), "runs on Hopper (sm_90); this is NVIDIA A100-SXM4-80GB, sm_80"),
        (Device("gpu", "NVIDIA B200", "10.0"), "runs on Hopper (sm_90); this is NVIDIA B200, sm_100"),
        (Device("tpu", "TPU v5e", ""), "runs on Hopper GPUs (sm_90); this is a tpu"),
    ],
)
def test_devices_other_than_hopper_are_refused(device: Any, reason: str | None) -> None:
    assert (gpu.unsupported_device_reason(device) or "").startswith(reason or "")
    assert (gpu.unsupported_device_reason(device) is None) == (reason is None)
