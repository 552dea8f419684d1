"""The CUDA backend of paged attention: its kernels, compiled as C++ with emulated warps, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import Unsupported
from jpaged.kernels import cuda_library
from jpaged.kernels import cuda_library as library
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.cpu import build
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Queries, RaggedRows, choose, cuda
from jpaged.kernels.paged_attention.api import implementation
from jpaged.kernels.paged_attention.cuda import CudaItemField, CudaMergeField
from jpaged.kernels.paged_attention.spec import AttentionCall, merge
from tests.kernels import attention_oracle as oracle
from tests.kernels.attention_conformance import (
    LATENTS,
    RAGGED,
    TOLERANCE,
    PagedAttentionPromises,
    Shape,
    Support,
    make_case,
    scales_of,
)
from tests.kernels.cuda import cuda_emulator
from tests.kernels.gpu_conformance import Device, GpuBackend, GpuSizes
from tests.kernels.shared_prefixes import RIG, call, shared_case


class Emulated(GpuBackend):
    """The conformance suite's calls, emulated."""

    backend = "cuda"
    supports = Support(head_dims=frozenset([*range(16, 257, 16), 576]))
    part_keys: int | None = None
    """Keys of a part, for contexts that are too short for the rule's."""
    num_slots = 64

    def attend(self, q, pool, layer, rows, spec, scales):
        division = None
        if self.part_keys is not None:
            division = cuda.choose_division(spec, AttentionCall(q, pool, layer, rows, spec, scales).queries)
            division = dataclasses.replace(division, part_keys=self.part_keys, num_slots=self.num_slots)
        return cuda_emulator.attend(q, pool, layer, rows, spec, scales, division)


class Promises(Emulated, PagedAttentionPromises):
    """Every promise, and what only these kernels can get wrong."""

    @pytest.mark.parametrize(
        ("dtype", "kv_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
    )
    def test_a_pool_of_another_type(self, dtype: str, kv_dtype: str) -> None:
        self.check(RAGGED["mixed"], Shape(dtype=dtype, kv_dtype=kv_dtype))

    @pytest.mark.parametrize("head_dim", [80, 112, 192])
    def test_heads_that_fill_no_tile(self, head_dim: int) -> None:
        for kv_dtype in (None, "int8"):
            self.check(RAGGED["mixed"], Shape(dtype="bfloat16", kv_dtype=kv_dtype, head_dim=head_dim, block_size=48))

    def test_groups_larger_than_a_tile(self) -> None:
        self.check(RAGGED["mixed"], Shape(num_heads=71, num_kv_heads=1, head_dim=64, dtype="bfloat16", num_tokens=40))

    @pytest.mark.parametrize("name", LATENTS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_latents(self, name: str, dtype: str) -> None:
        """Each warp computes 128 columns of the values."""
        self.check(RAGGED["mixed"], dataclasses.replace(LATENTS[name], dtype=dtype))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_bits_of_a_query_follow_from_its_context_alone(self, dtype: str) -> None:
        """In a chunk, alone, among other rows, and with its context divided over warps or not."""
        shape = Shape(dtype=dtype, max_len=320, num_tokens=64, num_heads=6, head_dim=64, num_rows=2)
        case = make_case([(32, 290), (20, 60)], shape)
        suite = Promises()
        suite.part_keys, suite.num_slots = 64, 0
        together = suite.run(case, shape)
        suite.num_slots = 64
        for query in (0, 13, 31):
            q_thd = np.zeros_like(case.q_thd)
            q_thd[0] = case.q_thd[query]
            starts, kv_lens = np.array([0, 1, 1], np.int32), np.array([290 - 31 + query, 0], np.int32)
            alone = dataclasses.replace(case, q_thd=q_thd, query_starts_s1=starts, kv_lens_s=kv_lens, num_rows=1)
            for got, want in zip(suite.run(alone, shape), together, strict=True):
                np.testing.assert_array_equal(got[0], want[query])

    @pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1, -(2**31)])
    def test_a_layer_that_is_not_there_reads_as_zeros(self, layer: int) -> None:
        shape = Shape(num_tokens=40)
        case = make_case(RAGGED["mixed"], shape)
        spec = self.spec(case, shape)
        pool, q_thd = self.pool(case, spec.layout, None), jnp.asarray(case.q_thd)
        o_thd, lse_th = self.attend(q_thd, pool, jnp.int32(layer), self.rows(case), spec, None)
        np.testing.assert_array_equal(np.asarray(o_thd), 0)
        np.testing.assert_allclose(lse_th[0], np.log(33), rtol=1e-6)

    @pytest.mark.parametrize(
        ("dtype", "kv_dtype"),
        [
            *(("float32", kv_dtype) for kv_dtype in ("bfloat16", "float16", "int8", "float8_e4m3fn")),
            *((dtype, kv_dtype) for dtype in ("bfloat16", "float16") for kv_dtype in ("int8", "float8_e4m3fn")),
        ],
    )
    def test_every_finite_number_that_a_pool_can_hold_is_read(self, dtype: str, kv_dtype: str) -> None:
        """A context of one key gives its value as it is."""
        stored = jnp.dtype(kv_dtype)
        numbers = np.arange(2 ** (8 * stored.itemsize)).astype(f"uint{8 * stored.itemsize}").view(stored)
        numbers = np.where(np.isfinite(numbers.astype(np.float32)), numbers, stored.type(0)).reshape(-1, 256)
        layout = KVLayout(1, len(numbers), 1, 1, 256, stored, "gpu")
        pool = jnp.zeros(layout.shape, stored).at[1:, 0, 1].set(jnp.asarray(numbers))
        counts = jnp.arange(len(numbers) + 1, dtype=jnp.int32)
        rows = RaggedRows(counts, jnp.ones_like(counts[1:]), counts[1:, None], counts[-1])
        scales = jnp.ones((1, 1, 2)) if layout.is_scaled else None
        q_thd, spec = jnp.zeros((len(numbers), 1, 256), dtype), AttentionSpec(layout, AttentionKind(1.0))
        o_thd, _ = cuda_emulator.attend(q_thd, pool, jnp.int32(0), rows, spec, scales)
        # In float32 the tensor cores' two parts have 21 bits, and underflow 10 powers of two above the smallest number.
        np.testing.assert_allclose(np.asarray(o_thd, np.float32)[:, 0], numbers.astype(np.float32), 1e-6, 1e-35)


@pytest.mark.long
class TestCuda(Promises):
    """With contexts divided by the rule."""


@pytest.mark.deep
class TestDividedContexts(Promises):
    """With contexts in parts of one step."""

    part_keys = 32


@pytest.mark.deep
class TestSomeDividedContexts(Promises):
    """With fewer slots than parts: some tiles run through their parts in one warp, others do not."""

    part_keys, num_slots = 32, 5


@pytest.mark.deep
class TestCudaSizes(Emulated, GpuSizes):
    """Each size and type by itself."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["samples_decode", "chunks_take_part", "a_row_without_queries"])
@pytest.mark.parametrize("sliding_window", [None, 37])
def test_shared_prefixes_are_merged(name: str, sliding_window: int | None) -> None:
    shape = Shape(num_tokens=64, sliding_window=sliding_window)
    case, cascade = shared_case(name, shape)
    q, _, layer, spec, scales = call(case, shape)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    pool = RIG.pool(case, spec.layout, scales_of(shape))
    cuda_emulator.register()
    got = cuda.attend_parts(AttentionCall(q, pool, layer, cascade.rows, spec, scales), cascade.parts(spec))
    tolerance = TOLERANCE[shape.dtype]
    for found, want in zip(got, oracle.attention(case), strict=True):
        np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_of_shared_prefixes_are_rounded_once_after_they_were_merged(dtype: str) -> None:
    """The parts come in float32, as float32 queries of the same values give them, and the sum is rounded."""
    shape = Shape(dtype=dtype)
    case, cascade = shared_case("samples_decode", shape)
    q, _, layer, spec, scales = call(case, shape)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, form="gpu"))
    of_call = AttentionCall(q, RIG.pool(case, spec.layout, scales_of(shape)), layer, cascade.rows, spec, scales)
    cuda_emulator.register()
    parts = [
        cuda.attend(dataclasses.replace(of_call, rows=part.rows, spec=part.spec), dtype=np.dtype(np.float32))
        for part in cascade.parts(spec)
    ]
    assert len(parts) > 1
    assert all(out_thd.dtype == np.float32 for out_thd, _ in parts)
    rounded = [out_thd.astype(dtype) for out_thd, _ in parts]
    assert any((part != one[0]).any() for part, one in zip(rounded, parts, strict=True))
    got, _ = cuda.attend_parts(of_call, cascade.parts(spec))
    merged, _ = functools.reduce(merge, parts)
    np.testing.assert_array_equal(got, merged.astype(dtype))


# --- the list of work -------------------------------------------------------------------------------------------------


def listed(
    rows: list[tuple[int, int]], num_tokens: int, num_slots: int, sliding_window: int | None = None
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The items in use and the tiles to merge of these (queries, context) rows, 4 query heads, parts of 64 keys."""
    layout = KVLayout(1, 64, 16, 1, 64, jnp.dtype("bfloat16"), "gpu")
    spec = AttentionSpec(layout, AttentionKind(1.0, sliding_window))
    starts = jnp.cumsum(jnp.array([0, *(count for count, _ in rows), 0], jnp.int32))
    lens = jnp.array([*(length for _, length in rows), 9], jnp.int32)
    ragged = RaggedRows(starts, lens, jnp.zeros((len(lens), 32), jnp.int32), jnp.int32(len(rows)))
    division = cuda.choose_division(spec, Queries(4, jnp.dtype("bfloat16"), len(lens), 32, num_tokens))
    division = dataclasses.replace(division, part_keys=64, num_slots=num_slots)
    work = cuda.plan(ragged, spec, division, num_tokens)
    items, merges = (np.asarray(x).tolist() for x in work)
    items = [dict(zip((field.name for field in CudaItemField), item, strict=True)) for item in items]
    merges = [dict(zip((field.name for field in CudaMergeField), one, strict=True)) for one in merges]
    return [x for x in items if x["NUM_PAIRS"]], [x for x in merges if x["NUM_PARTS"] and x["NUM_PAIRS"]]


def test_every_pair_and_key_is_in_one_item() -> None:
    rows = [(1, 300), (9, 200), (0, 50), (40, 130), (1, 64)]
    items, merges = listed(rows, 60, 12)
    seen = []
    for item in items:
        assert 0 < item["NUM_PAIRS"] <= 16
        for pair in range(item["FIRST_PAIR"], item["FIRST_PAIR"] + item["NUM_PAIRS"]):
            parts = range(item["FIRST_PART"], item["FIRST_PART"] + item["NUM_PARTS"])
            seen += [(item["FIRST_TOKEN"] + pair // 4, pair % 4, part) for part in parts]
    want, token = [], 0
    for count, length in rows:
        for query in range(count):
            # A tile of four queries runs to the part of its last one.
            last = min(count, query // 4 * 4 + 4) - 1
            num_parts = (length - count + last) // 64 + 1
            want += [(token + query, head, part) for head in range(4) for part in range(num_parts)]
        token += count
    assert sorted(seen) == sorted(want)
    slots = [item["SLOT"] for item in items if item["SLOT"] >= 0]
    # Five parts of the first row, and four, three and three of the second's tiles: those that have room.
    assert sorted(slots) == list(range(len(slots)))
    assert slots == [s for m in merges for s in range(m["FIRST_SLOT"], m["FIRST_SLOT"] + m["NUM_PARTS"])]
    assert len(slots) == 9
    padding = [item for item in items if item["NUM_PARTS"] == 0]
    assert [(item["FIRST_TOKEN"], item["NUM_PAIRS"]) for item in padding] == [(51, 16), (51, 16), (51, 4)]


@pytest.mark.long
def test_a_window_leaves_parts_out() -> None:
    items, _ = listed([(1, 300)], 1, 8, sliding_window=70)
    assert [(item["FIRST_PART"], item["KV_BEGIN"], item["KV_END"]) for item in items] == [(3, 230, 300), (4, 230, 300)]


@pytest.mark.long
def test_rows_of_many_tiles_are_not_divided() -> None:
    items, merges = listed([(40, 400), (1, 200)], 41, 64)
    assert [item["NUM_PARTS"] for item in items] == [*[6] * 6, *[7] * 4, *[1] * 4]
    assert [(merge["NUM_PARTS"], merge["FIRST_TOKEN"]) for merge in merges] == [(4, 40)]


def test_the_keys_of_a_part_follow_from_the_table_alone() -> None:
    layout = KVLayout(1, 64, 16, 8, 64, jnp.dtype("bfloat16"), "gpu")
    spec = AttentionSpec(layout, AttentionKind(1.0))

    def division(table_width: int, num_tokens: int, num_rows: int) -> cuda.Division:
        return cuda.choose_division(spec, Queries(32, jnp.dtype("bfloat16"), num_rows, table_width, num_tokens))

    for sizes in ((1, 1), (64, 64), (2048, 64)):
        assert [division(width, *sizes).part_keys for width in (1, 512, 1024, 8192)] == [256, 256, 256, 2048]
    assert division(16, 64, 64).num_slots == 0
    assert division(17, 1, 1).num_slots == 2
    assert division(512, 64, 64).num_slots == 1024


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "reason"),
    [
        ("float64", 128, None, "queries are float64; they must be float32, bfloat16, float16"),
        ("bfloat16", 72, None, "head_dim 72 is not a multiple of 16 up to 256"),
        ("bfloat16", 272, None, "head_dim 272 is not a multiple of 16 up to 256"),
        ("bfloat16", 640, 512, "latents of 640 numbers are not multiples of 16 up to 576"),
        ("bfloat16", 576, 500, "values of 500 numbers are not multiples of 16 up to 512"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(dtype: str, head_dim: int, value_dim: int | None, reason: str) -> None:
    layout = KVLayout(1, 4, 16, 1, head_dim, jnp.dtype("bfloat16"), "gpu", value_dim=value_dim)
    queries = Queries(8, jnp.dtype(dtype), 8, 4, 16)
    with pytest.raises(Unsupported, match=f"attention backend cuda: {reason}"):
        implementation("cuda", AttentionSpec(layout, AttentionKind(1.0)), queries)


@pytest.fixture
def library_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the CUDA library would be, but is not."""
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libjpaged_cuda.so")
    clear_library()
    yield library.LIBRARY
    clear_library()


def clear_library() -> None:
    library.missing_reason.cache_clear()
    library._load.cache_clear()


def test_a_library_that_was_not_built_is_the_reason(library_path: Path) -> None:
    device: Any = Device("gpu", "NVIDIA L4", "8.9")
    reason = cuda.unsupported_device_reason(device)
    assert reason is not None
    assert reason.startswith("libjpaged_cuda.so was not built; `python -m jpaged.kernels.cuda_library`")
    clear_library()
    library_path.write_text("no library")
    assert "libjpaged_cuda.so cannot be loaded" in (cuda.unsupported_device_reason(device) or "")
    old: Any = Device("gpu", "Tesla T4", "7.5")
    assert cuda.unsupported_device_reason(old) == "runs on Ampere (sm_80) and later; this is Tesla T4, sm_75"


def write_library(path: Path, digest: str, architectures: str) -> None:
    """Compile a library that has only its symbols, and functions that are never called."""
    symbols = {library.DIGEST: digest, library.BUILT_FOR: architectures}
    source = "".join(build.define_symbol(*symbol) for symbol in symbols.items())
    source += "".join(f'extern "C" void* {target}(void*) {{ return nullptr; }}' for target in library.SOURCES)
    command = [build.find_compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    clear_library()


def test_a_library_of_other_sources_is_not_used(library_path: Path) -> None:
    write_library(library_path, "0123", "80")
    device: Any = Device("gpu", "NVIDIA L4", "8.9")
    assert cuda.unsupported_device_reason(device) == (
        "libjpaged_cuda.so cannot be loaded: it was built from other sources than the ones that are installed; "
        "rebuild it with `python -m jpaged.kernels.cuda_library`"
    )


def test_a_device_for_which_the_library_has_no_code_is_refused(library_path: Path) -> None:
    write_library(library_path, build.digest_sources(library.list_sources()), "86 90")
    for kind, capability in (("NVIDIA L4", "8.9"), ("NVIDIA H100", "9.0"), ("NVIDIA B200", "10.0")):
        device: Any = Device("gpu", kind, capability)
        assert cuda.unsupported_device_reason(device) is None
    older: Any = Device("gpu", "NVIDIA A100", "8.0")
    assert cuda.unsupported_device_reason(older) == (
        "libjpaged_cuda.so was built for compute capabilities 86, 90, which do not include 80; `python -m "
        "jpaged.kernels.cuda_library --architectures 80` builds it for this device"
    )


def test_a_jax_without_triton_gets_these_kernels_if_they_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
    layout, queries = KVLayout(1, 4, 16, 2, 64, jnp.dtype("bfloat16")), Queries(4, jnp.dtype("bfloat16"), 8, 4, 16)
    monkeypatch.setattr(library, "missing_reason", lambda: None)
    assert choose("auto", device, layout, queries).backend == "pallas-triton"
    assert choose("cuda", device, layout, queries).backend == "cuda"
    monkeypatch.setattr(cuda_library, "_TRITON", "jax.experimental.pallas.no_triton")
    cuda_library.has_triton.cache_clear()
    assert choose("auto", device, layout, queries).backend == "cuda"
    monkeypatch.setattr(library, "missing_reason", lambda: "not built")
    chosen = choose("auto", device, layout, queries)
    cuda_library.has_triton.cache_clear()
    assert chosen.backend == "xla"
    assert chosen.passed_over[-1] == ("cuda", "not built")


def test_the_fields_of_the_lists_are_those_of_the_source() -> None:
    source = library.SOURCES[library.TARGET].read_text(encoding="utf-8")
    for name, fields in (("Item", CudaItemField), ("Merge", CudaMergeField)):
        body = source.split(f"struct {name} {{")[1].split(";")[0]
        assert body.replace("int32_t", "").replace(",", " ").split() == [field.name.lower() for field in fields]


def test_the_kernels_are_called_in_a_traced_program() -> None:
    layout = KVLayout(2, 8, 16, 2, 64, jnp.dtype("int8"), "gpu")
    rows = RaggedRows(*(jnp.zeros(shape, jnp.int32) for shape in ((5,), (4,), (4, 32), ())))
    q, pool = jax.ShapeDtypeStruct((24, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct(layout.shape, layout.dtype)
    spec = AttentionSpec(layout, AttentionKind(0.125))

    def call(q: jax.Array, pool: jax.Array) -> Any:
        return cuda.attend(AttentionCall(q, pool, 0, rows, spec, jnp.ones((2, 2, 2))))

    out, lse = jax.eval_shape(call, q, pool)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((24, 4, 64), jnp.bfloat16, (24, 4), jnp.float32)
