"""The Triton backend of paged attention: its kernels, run in Pallas' interpreter, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import Unsupported
from jpaged.kernels import cuda_library
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Queries, RaggedRows, paged_attention
from jpaged.kernels.paged_attention.api import implementation
from jpaged.kernels.paged_attention.spec import ContextPart
from jpaged.kernels.paged_attention.triton import attention as triton
from jpaged.kernels.paged_attention.triton.kernel import pack_words
from tests.kernels.attention_conformance import (
    LATENTS,
    RAGGED,
    PagedAttentionPromises,
    Shape,
    Support,
    make_case,
)
from tests.kernels.gpu_conformance import Device, GpuBackend, GpuSizes
from tests.kernels.triton import triton_interpreter


class Interpreted(GpuBackend):
    """The conformance suite's calls, interpreted."""

    backend = "pallas-triton"
    supports = Support(head_dims=frozenset([*range(16, 257, 16), 576]), max_group=128)
    part_chunks: int | None = None
    """Chunks of the shortest part, for contexts that are too short for the rule's."""

    def attend(self, q, pool, layer, rows, spec, scales):
        return triton_interpreter.attend(q, pool, layer, [ContextPart(rows, spec)], scales, self.part_chunks)


@pytest.mark.deep
class TestPallasTritonSizes(Interpreted, GpuSizes):
    """Each size and type by itself."""

    @pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
    def test_a_pool_of_another_type(self, dtype: str, kv_dtype: str) -> None:
        self.check(RAGGED["mixed"], Shape(dtype=dtype, kv_dtype=kv_dtype))

    def test_71_heads_of_one_key_head(self) -> None:
        self.check(RAGGED["mixed"], Shape(num_heads=71, num_kv_heads=1, head_dim=64, dtype="bfloat16"))


class Together(Interpreted, PagedAttentionPromises):
    """Every promise, and sizes and types all together."""

    @pytest.mark.parametrize(
        "shape",
        [
            Shape(num_heads=6, num_kv_heads=3, head_dim=80, block_size=8, kv_dtype="int8", soft_cap=30.0),
            Shape(num_heads=7, num_kv_heads=1, head_dim=16, block_size=48, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
            Shape(num_heads=16, num_kv_heads=2, head_dim=128, block_size=256, kv_dtype="float8_e4m3fn", soft_cap=0.5),
            Shape(num_heads=4, num_kv_heads=4, head_dim=64, block_size=1, dtype="bfloat16", kv_dtype="int8"),
        ],
    )
    def test_sizes_and_types_together(self, shape: Shape) -> None:
        self.check(RAGGED["mixed"], shape)

    @pytest.mark.parametrize(
        "shape",
        [
            Shape(num_heads=6, num_kv_heads=3, head_dim=80, block_size=8, dtype="float16", kv_dtype="int8"),
            Shape(dtype="float16", sliding_window=20, soft_cap=5.0),
            dataclasses.replace(LATENTS["small"], dtype="float16"),
        ],
        ids=["8 bits", "window", "latents"],
    )
    def test_float16_together_with_sizes(self, shape: Shape) -> None:
        self.check(RAGGED["mixed"], shape)


@pytest.mark.long
class TestPallasTriton(Together):
    """With contexts cut as the rule cuts them."""


@pytest.mark.deep
class TestDividedContexts(Together):
    """With contexts in parts of one chunk."""

    part_chunks = 1


# Small enough for the quick suite, and between them they reach every branch of the kernels.
QUICK: dict[str, tuple[list[tuple[int, int]], Shape, int | None]] = {
    "chunks": ([(1, 160), (17, 150), (0, 0), (1, 5)], Shape(), None),
    "decodes": ([(1, 160), (1, 20), (1, 64), (1, 5)], Shape(num_tokens=4, dtype="bfloat16"), None),
    "parts": ([(1, 190), (20, 90), (1, 5)], Shape(sliding_window=70, soft_cap=5.0), 1),
    "pieces": ([(3, 140), (1, 64)], Shape(dtype="bfloat16", num_heads=7, num_kv_heads=1, head_dim=80), None),
    "int8": ([(1, 150), (9, 20)], Shape(kv_dtype="int8", block_size=48), None),
    "fp8": ([(1, 150), (9, 20)], Shape(kv_dtype="float8_e4m3fn", head_dim=64), 2),
    "latents": ([(1, 150), (9, 20)], Shape(num_heads=24, num_kv_heads=1, head_dim=96, value_dim=64), 2),
    "latents of 8 bits": ([(1, 90), (9, 20)], LATENTS["fp8"], None),
    "words of one number": ([(1, 50), (9, 20)], Shape(kv_dtype="float8_e4m3fn", head_dim=16), None),
}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.thinned(6)
def test_the_kernels_are_right(name: str) -> None:
    rows, shape, part_chunks = QUICK[name]
    suite = Interpreted()
    suite.part_chunks = part_chunks
    suite.check(rows, dataclasses.replace(shape, num_tokens=min(shape.num_tokens, 28), num_rows=4))


def test_what_lies_around_a_part_of_a_context_never_matters() -> None:
    """Skipped blocks hold NaN, and one in the middle is named by no id of the layer."""
    shape = Shape(num_tokens=24, num_rows=4)
    case = make_case([(1, 100), (9, 150)], shape)
    case.k_lnbkd[1, case.block_tables_sm[0, :3]] = np.nan
    case.v_lnbkd[1, case.block_tables_sm[0, :3]] = np.nan
    case.block_tables_sm[1, 2] = case.k_lnbkd.shape[1]
    case.block_tables_sm[0, 4] = -1
    Interpreted().check_case(dataclasses.replace(case, kv_begins_s=np.array([48, 0, 0, 0], np.int32)), shape)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_heads", "num_blocks", "reason"),
    [
        ("float64", 128, 8, 4, "queries are float64; they must be float32, bfloat16, float16"),
        ("bfloat16", 72, 8, 4, "head_dim 72 is not a multiple of 16 up to 256"),
        ("bfloat16", 272, 8, 4, "head_dim 272 is not a multiple of 16 up to 256"),
        ("bfloat16", 128, 258, 4, "129 query heads share a key/value head; the limit is 128"),
        ("bfloat16", 80, 8, 1 << 19, r"the pool has \d+ bytes in heads of 80 8-bit numbers; from 2147483648 to "),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_numbers(
    dtype: str, head_dim: int, num_heads: int, num_blocks: int, reason: str
) -> None:
    layout = KVLayout(1, num_blocks, 16, 2, head_dim, jnp.dtype("int8"), "gpu")
    queries = Queries(num_heads, jnp.dtype(dtype), 8, 4, 16)
    with pytest.raises(Unsupported, match=f"attention backend pallas-triton: {reason}"):
        implementation("pallas-triton", AttentionSpec(layout, AttentionKind(1.0)), queries)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "reason"),
    [
        ("bfloat16", 576, 512, None),
        ("bfloat16", 576, 500, "latents of 576 and 500 numbers are not multiples of 32 up to 640"),
        ("bfloat16", 1024, 512, "latents of 1024 and 512 numbers are not multiples of 32 up to 640"),
        ("float32", 576, 512, "latents of 576 numbers require 110592 bytes of shared memory; the limit is 101376"),
    ],
)
def test_latents_that_do_not_fit_are_refused(dtype: str, head_dim: int, value_dim: int, reason: str | None) -> None:
    layout = KVLayout(1, 8, 16, 1, head_dim, jnp.dtype(dtype), "gpu", value_dim=value_dim)
    assert triton.unsupported_reason(layout, Queries(128, jnp.dtype(dtype), 8, 4, 16)) == reason


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_31_bits_count_what_the_kernel_reads_or_the_pool_has_more_bytes_than_32_bits(dtype: str) -> None:
    """Triton takes offsets of 64 bits for arrays of more than 4 GiB, and those of 32 bits with a sign."""
    queries = Queries(8, jnp.dtype("bfloat16"), 8, 4, 16)
    for num_blocks in (1000, 1 << 18, 1 << 19, 1 << 20):
        for head_dim in (64, 80, 128):
            layout = KVLayout(1, num_blocks, 16, 2, head_dim, jnp.dtype(dtype), "gpu")
            pool = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype)
            words = jax.eval_shape(lambda pool, layout=layout: pack_words(pool, layout), pool)
            is_reached = words.size <= 1 << 31 or layout.num_bytes > 1 << 32
            assert is_reached == (triton.unsupported_reason(layout, queries) is None)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0"), None),
        (Device("gpu", "NVIDIA L4", "8.9"), None),
        (Device("gpu", "NVIDIA H200", "9.0"), None),
        (Device("gpu", "NVIDIA B200", "10.0"), None),
        (Device("gpu", "NVIDIA GeForce RTX 5090", "12.0"), None),
        (Device("gpu", "Tesla T4", "7.5"), "runs on Ampere (sm_80) and later; this is Tesla T4, sm_75"),
        (Device("gpu", "AMD Instinct MI300X", "gfx942"), "runs on NVIDIA GPUs; this is AMD Instinct MI300X, gfx942"),
        (Device("tpu", "TPU v5e", ""), "runs on NVIDIA GPUs since Ampere (sm_80); this is a tpu"),
    ],
)
def test_devices_before_ampere_are_refused(device: Any, reason: str | None) -> None:
    assert triton.unsupported_device_reason(device) == reason


def test_a_jax_without_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "_TRITON", "jax.experimental.pallas.no_triton")
    cuda_library.has_triton.cache_clear()
    device: Any = Device("gpu", "NVIDIA L4", "8.9")
    reason = triton.unsupported_device_reason(device)
    cuda_library.has_triton.cache_clear()
    assert reason == f"requires Pallas Triton, which jax {jax.__version__} does not have"


def test_the_kernels_are_called_in_a_traced_program() -> None:
    layout = KVLayout(2, 8, 16, 2, 64, jnp.dtype("int8"), "gpu")
    rows = RaggedRows(*(jnp.zeros(shape, jnp.int32) for shape in ((5,), (4,), (4, 32), ())))
    q, pool = jax.ShapeDtypeStruct((24, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct(layout.shape, layout.dtype)
    spec = AttentionSpec(layout, AttentionKind(0.125))

    def call(q: jax.Array, pool: jax.Array) -> Any:
        return paged_attention(q, pool, 0, rows, spec, jnp.ones((2, 2, 2)), backend="pallas-triton")

    text = str(jax.make_jaxpr(call)(q, pool))
    assert text.count("pallas_call") == 2
    assert text.count("i16[18,16,4,32]") >= 1
