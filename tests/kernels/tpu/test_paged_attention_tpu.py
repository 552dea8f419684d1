"""The TPU backend, interpreted here: with DMAs as late as they may be, and as early, looking for races."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import InternalError, Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import (
    AttentionSpec,
    Queries,
    RaggedRows,
    paged_attention,
    paged_attention_update,
    prepare_rows,
)
from jpaged.kernels.paged_attention.spec import AttentionCall
from jpaged.kernels.paged_attention.tpu import attention as tpu
from jpaged.kernels.paged_attention.tpu import lists
from jpaged.kernels.paged_attention.tpu import sizes as sizing
from jpaged.kernels.paged_attention.tpu.chunks import sizes as chunk_sizes
from jpaged.kernels.paged_attention.tpu.chunks.plan import ChunkSegments
from jpaged.kernels.paged_attention.tpu.decode import sizes as decode_sizes
from jpaged.kernels.paged_attention.tpu.decode.plan import DecodeSegments
from jpaged.kernels.paged_attention.tpu.tables import Paging, whole_pages
from tests.kernels import attention_oracle as oracle
from tests.kernels import tpu_interpreter
from tests.kernels.attention_conformance import (
    LATENTS,
    RAGGED,
    PagedAttentionPromises,
    PagedAttentionSizes,
    Shape,
    make_case,
    scales_of,
)
from tests.kernels.tpu_interpreter import COMPILER_OPTIONS, EARLY, LATE, Device, Early, Interpreted, Late, small_sizes

LLAMA = KVLayout(32, 100, 32, 8, 128, jnp.dtype("bfloat16"), "tpu")


@pytest.mark.deep
class TestLate(Late):
    """The whole suite."""


@pytest.mark.deep
class TestEarlySizes(Device, PagedAttentionSizes):
    """Each size and type by itself."""

    params = EARLY


@pytest.mark.deep
class TestEarly(Device, PagedAttentionPromises):
    """Every promise, and sizes and types all together."""

    params = EARLY

    @pytest.mark.long
    @pytest.mark.parametrize(
        "shape",
        [
            Shape(
                num_heads=6, num_kv_heads=3, head_dim=80, block_size=8, kv_dtype="int8", soft_cap=30.0, num_tokens=40
            ),
            Shape(num_heads=7, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
            Shape(num_heads=16, num_kv_heads=2, head_dim=128, block_size=128, dtype="bfloat16", has_sinks=True),
            LATENTS["fp8"],
        ],
        ids=["int8", "fp8", "bfloat16", "latents"],
    )
    def test_sizes_and_types_together(self, shape: Shape) -> None:
        self.check(RAGGED["mixed"], shape)


# Of everything that the kernel does, once.


@pytest.mark.parametrize(("suite", "dtype"), [(Late(), "float32"), (Early(), "bfloat16")], ids=["late", "early"])
@pytest.mark.thinned(2)
def test_rows_of_all_kinds_whose_keys_are_stored(suite: Interpreted, dtype: str) -> None:
    suite.test_an_update_stores_the_new_keys_and_nothing_else("mixed", dtype, None)


@pytest.mark.parametrize("suite", [pytest.param(Late(), marks=pytest.mark.long), Early()], ids=["late", "early"])
@pytest.mark.long
def test_chunks_with_a_window_and_a_cap(suite: Interpreted) -> None:
    shape = Shape(head_dim=80, block_size=8, num_heads=6, num_kv_heads=3, sliding_window=20, soft_cap=5.0)
    suite.check(RAGGED["chunk_continues"], shape)


@pytest.mark.long
@pytest.mark.parametrize(
    ("suite", "kv_dtype", "head_dim"), [(Late(), "int8", 32), (Early(), "float8_e4m3fn", 128)], ids=["late", "early"]
)
@pytest.mark.thinned(2)
def test_decodes_of_8_bits(suite: Interpreted, kv_dtype: str, head_dim: int) -> None:
    # As many tokens as rows: one tile of the grid has them all.
    suite.check(RAGGED["decodes"], Shape(head_dim=head_dim, kv_dtype=kv_dtype, dtype="bfloat16", num_tokens=8))


@pytest.mark.long
@pytest.mark.parametrize(
    ("suite", "num_kv_heads", "kv_dtype"), [(Late(), 5, "float8_e4m3fn"), (Early(), 3, None)], ids=["late", "early"]
)
@pytest.mark.thinned(2)
def test_decodes_of_heads_that_share_lanes_in_pairs(
    suite: Interpreted, num_kv_heads: int, kv_dtype: str | None
) -> None:
    """And of the last one, which has nobody to share them with."""
    shape = Shape(
        head_dim=64,
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        kv_dtype=kv_dtype,
        dtype="bfloat16",
        num_tokens=8,
    )
    suite.check(RAGGED["decodes"], shape)


@pytest.mark.long
def test_latents_of_several_pieces_are_stored_and_seen() -> None:
    shape = Shape(num_kv_heads=1, head_dim=320, value_dim=256, num_tokens=40, dtype="bfloat16")
    Late().check_update("mixed", shape)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dtype"), [(8, 1, "bfloat16"), (8, 4, "float32")])
@pytest.mark.long
def test_heads_of_four_columns_of_lanes(num_heads: int, num_kv_heads: int, dtype: str) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=512, num_tokens=40, dtype=dtype)
    Late().check_update("mixed", shape)


@pytest.mark.deep
def test_all_numbers_of_float8_come_out_of_both_kernels() -> None:
    """As values of a row's only key; those below 2^-6 may be zero where a row decodes."""
    kv_dtype = "float8_e4m3fn"
    shape = Shape(head_dim=128, num_heads=2, kv_dtype=kv_dtype, dtype="bfloat16", num_tokens=16, num_rows=2)
    case, scales = make_case([(1, 1), (2, 2)], shape), scales_of(shape)
    assert scales is not None
    numbers = np.nan_to_num(np.arange(256).astype(np.uint8).view(jnp.dtype(kv_dtype)).astype(np.float32))
    want_kd = numbers.reshape(2, 128) * scales[case.layer, :, 1:]
    case.v_lnbkd[case.layer, case.block_tables_sm[:, 0], 0] = want_kd
    o_thd, _ = Late().run(case, shape)
    is_lost = (np.abs(numbers.reshape(2, 128)) < 2.0**-6) & (o_thd[0] == 0)
    np.testing.assert_allclose(np.where(is_lost, want_kd, o_thd[0]), want_kd, rtol=2.0**-7)
    np.testing.assert_allclose(o_thd[1], want_kd, rtol=2.0**-7)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have two cores; nothing is run that was compiled for one."""
    monkeypatch.setattr(lists, "num_cores", lambda: 2)
    _compile_anew(monkeypatch)


@pytest.fixture
def tpu7x(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are of that kind; nothing is run that was compiled for another."""
    monkeypatch.setattr(lists, "device_kind", lambda: "TPU7x")
    _compile_anew(monkeypatch)


def _compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function, spec in (("_attention", paged_attention, 4), ("_update", paged_attention_update, 5)):

        def fresh(*args: Any, function: Any = function, **options: Any) -> Any:
            return function(*args, **options)

        jitted = jax.jit(fresh, static_argnums=spec, static_argnames="backend", compiler_options=COMPILER_OPTIONS)
        monkeypatch.setattr(tpu_interpreter, name, jitted)


@pytest.mark.usefixtures("tpu7x")
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [pytest.param(1, 256, marks=pytest.mark.long), (4, 128)])
@pytest.mark.long
def test_keys_of_8_bits_that_are_turned_before_their_product(num_kv_heads: int, head_dim: int) -> None:
    """Heads that have their product alone, and that share it."""
    shape = Shape(
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype="int8",
        dtype="bfloat16",
        num_tokens=8,
    )
    Late().check(RAGGED["decodes"], shape)


@pytest.mark.usefixtures("tpu7x")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "kv_dtype"), [(16, 2, 128, "int8"), (16, 4, 64, "float8_e4m3fn")]
)
@pytest.mark.long
def test_heads_that_fill_a_deep_matrix_unit_together(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: str
) -> None:
    shape = Shape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
        dtype="bfloat16",
        num_tokens=8,
    )
    Late().check(RAGGED["decodes"], shape)


class AtOnce(Interpreted):
    """Two cores that run at the same time. Both store the new keys: races are not looked for."""

    params = dataclasses.replace(LATE, num_cores_or_threads=2)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("suite", "num_tokens"),
    [(Early(), 32), *(pytest.param(suite, n, marks=pytest.mark.deep) for suite, n in ((Early(), 8), (AtOnce(), 32)))],
)
@pytest.mark.long
def test_two_cores_share_the_rows(suite: Interpreted, num_tokens: int) -> None:
    """And a tile of tokens, alone and with one behind it that has no rows."""
    suite.check([(1, 130), (1, 5), (1, 192), (1, 33), (1, 64)], Shape(num_tokens=num_tokens, dtype="bfloat16"))


@pytest.mark.usefixtures("two_cores")
@pytest.mark.long
def test_two_cores_have_tiles_of_their_own() -> None:
    """Two and three: the first one's have a chunk's between them, and end in that in which the second one's begin."""
    rows = [*[(1, 140)] * 2, (50, 50), *[(1, 20)] * 9]
    Early().check(rows, Shape(num_tokens=96, num_rows=16, dtype="bfloat16"))


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("suite", [pytest.param(AtOnce(), marks=pytest.mark.deep), Early()])
@pytest.mark.long
def test_two_cores_store_new_keys_that_either_sees(suite: Interpreted) -> None:
    suite.test_an_update_stores_the_new_keys_and_nothing_else("mixed", "bfloat16", None)


class EarlyAtOnce(Interpreted):
    """Two cores that run at the same time, with races looked for."""

    params = dataclasses.replace(EARLY, num_cores_or_threads=2)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("suite", "shape"),
    [
        (Early(), Shape(num_heads=8, num_kv_heads=4, dtype="bfloat16")),
        (Late(), Shape(num_heads=8, num_kv_heads=2, kv_dtype="int8", dtype="bfloat16")),
        *(
            pytest.param(suite, shape, marks=mark)
            for suite, shape, mark in (
                (EarlyAtOnce(), Shape(num_heads=4, num_kv_heads=1, dtype="bfloat16"), pytest.mark.deep),
                (Late(), Shape(8, 4, head_dim=64, kv_dtype="float8_e4m3fn", dtype="bfloat16"), pytest.mark.deep),
                (Late(), Shape(num_heads=6, num_kv_heads=3), pytest.mark.long),
            )
        ),
    ],
    ids=["own rows", "shared row", "one head", "joined", "not halved"],
)
@pytest.mark.thinned(2)
@pytest.mark.long
def test_two_cores_share_the_heads_of_chunks(suite: Interpreted, shape: Shape) -> None:
    suite.check([(7, 7), (20, 90), (1, 33)], dataclasses.replace(shape, num_rows=4, num_tokens=32))


@pytest.mark.usefixtures("two_cores")
@pytest.mark.long
def test_two_cores_have_one_row_or_none() -> None:
    Late().check([(1, 140)], Shape(num_tokens=8))
    Late().test_no_rows_at_all()


@pytest.mark.parametrize(
    ("items", "num_cores", "begins"),
    [
        ([4, 4, 4, 4], 2, [0, 2, 4]),
        ([9, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([5], 2, [0, 0, 1]),
        ([], 2, [0, 0, 0]),
        ([1, 2, 3], 1, [0, 3]),
        ([3, 3, 3, 3, 3, 3], 3, [0, 2, 4, 6]),
    ],
)
@pytest.mark.thinned(3)
def test_cores_have_as_many_items_as_rows_allow(items: list[int], num_cores: int, begins: list[int]) -> None:
    before = np.concatenate([[0], np.cumsum(items), [sum(items)] * 2]).astype(np.int32)  # and two rows that are unused
    np.testing.assert_array_equal(lists.shares(jnp.asarray(before), num_cores), begins)


@pytest.mark.long
@pytest.mark.parametrize(
    ("slots", "whole"),
    [
        ([8, 9, 10, 11], [0]),  # the run ends with the last token
        ([3, 4, 5, 6, 7, 8, 9, 10], [1]),
        ([4, 5, 6, 7, 8, 9, 10, 11], [0, 4]),
        ([5, 6, 7, 8, 9, 10, 11, 12], [3]),
        ([4, 5, 6, 20, 21, 22, 23, 24], [3]),
        ([4, 5, 6, 8, 9, 10, 11], [3]),
        ([4, 5, 6], []),
    ],
)
def test_blocks_that_are_stored_at_once_begin_with_their_first_slot(slots: list[int], whole: list[int]) -> None:
    starts = lists._starts_whole_block(jnp.asarray(slots, jnp.int32), 4)
    assert np.flatnonzero(np.asarray(starts)).tolist() == whole


@pytest.mark.long
def test_lists_made_ahead_of_all_layers_are_all_that_a_call_reads_of_its_rows() -> None:
    shape, suite = Shape(num_tokens=40), Late()
    case = make_case(RAGGED["mixed"], shape)
    spec, rows, q = suite.spec(case, shape), suite.rows(case), jnp.asarray(case.q_thd)
    pool, layer = suite.pool(case, spec.layout, None), jnp.int32(case.layer)
    call = AttentionCall(q, pool, layer, rows, spec)
    with small_sizes():
        made = prepare_rows(rows, None, spec, call.queries, backend="pallas-tpu").lists
    forgotten = dataclasses.replace(jax.tree.map(jnp.zeros_like, rows), lists=made)
    for got, want in zip(suite.attend(q, pool, layer, forgotten, spec, None), oracle.attention(case), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.long
def test_ids_outside_of_the_layer() -> None:
    Early().test_block_ids_outside_of_the_layer_read_as_zeros(num_queries=1)


@pytest.mark.long
def test_queries_of_padding_and_no_rows() -> None:
    Late().test_padding_tokens_are_zero_whatever_their_queries()
    Late().test_no_rows_at_all()


@pytest.mark.long
def test_new_tokens_outside_of_the_layer_are_dropped() -> None:
    shape, suite = Shape(num_tokens=16, num_rows=2), Early()
    case = make_case([(3, 3)], shape)
    spec = suite.spec(case, shape)
    pool = jnp.zeros(spec.layout.shape, spec.layout.dtype)
    k, v = (jnp.ones((16, 2, 32)) * x for x in (3, 4))
    num_slots = spec.layout.blocks_per_layer * spec.layout.block_size
    slots = jnp.asarray([-1, num_slots, 2**31 - 1, -(2**31), num_slots - 1, *[-1] * 11], jnp.int32)
    none = dataclasses.replace(case, num_rows=0)
    *_, after = suite.update(jnp.asarray(case.q_thd), (k, v, slots), pool, jnp.int32(1), suite.rows(none), spec, None)
    want = np.array(spec.layout.write(jnp.zeros(spec.layout.shape), 1, k, v, slots))
    assert np.count_nonzero(want) == 2 * 2 * 32
    np.testing.assert_array_equal(after, want)


def queries(num_heads: int, num_rows: int = 8, table_width: int = 8, num_tokens: int = 256) -> Queries:
    return Queries(num_heads, jnp.dtype("bfloat16"), num_rows, table_width, num_tokens)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 48}, "block_size 48 is not one of 8, 16, 32, 64, 128, 256"),
        ({"dtype": jnp.dtype("float16")}, "kv_dtype float16 is not one of float32, bfloat16, float8_e4m3fn, int8"),
        ({"head_dim": 640}, "head_dim 640 is above the limit of 512"),
        ({"num_shards": 2}, "the pool has 2 shards"),
        (
            {"num_kv_heads": 256},
            r"256 key/value heads and 256 query heads of 128 per chip require [\d.]+ MiB of vector",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    layout = dataclasses.replace(LLAMA, **changes)
    refusal = tpu.unsupported_reason(layout, queries(max(32, layout.num_kv_heads)))
    assert re.search(reason, str(refusal))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("block_size", sizing.BLOCK_SIZES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(32, 8, 128), (14, 2, 64), (32, 32, 128), (16, 16, 256), (9, 3, 80), (64, 1, 128), (8, 1, 512), (32, 4, 512)],
)
def test_real_shapes_have_sizes(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> None:
    layout = KVLayout(2, 9, block_size, num_kv_heads, head_dim, jnp.dtype(dtype), "tpu")
    assert tpu.unsupported_reason(layout, queries(num_heads)) is None
    decodes = decode_sizes.rule(layout, num_heads, 8, "TPU v6 lite")
    assert decodes.chunk_tokens % 128 == decodes.chunk_tokens % block_size == 0
    assert decode_sizes.vmem_bytes(decodes, layout, num_heads) <= decode_sizes.VMEM_BUDGET_BYTES
    chunks = chunk_sizes.rule(layout, num_heads)
    assert chunks.fetch_blocks * block_size % 128 == 0
    assert chunk_sizes.vmem_bytes(chunks, layout, num_heads) <= chunk_sizes.VMEM_BUDGET_BYTES
    for blocks, held in ((decodes.chunk_tokens // block_size, decodes.ahead + 1), (chunks.fetch_blocks, 2)):
        paging = Paging(8192, blocks, block_size, held)
        assert paging.page_blocks % blocks == paging.page_blocks % 128 == 0
        assert paging.num_bytes <= sizing.PAGES_BUDGET_BYTES


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "shallow", "deep"),
    [
        (16, 2, 128, 1, 2),  # two heads have 256 lanes
        (8, 1, 128, 1, 1),
        (24, 3, 128, 1, 1),  # three do not divide by two
        (32, 8, 64, 2, 4),  # two heads share 128 lanes
        (24, 6, 64, 2, 2),
        (16, 2, 256, 1, 1),
        (32, 8, 128, 2, 2),  # rows of one register have 256 lanes already
    ],
)
def test_a_matmul_is_as_deep_as_the_matrix_units_if_heads_divide_evenly(
    num_heads: int, num_kv_heads: int, head_dim: int, shallow: int, deep: int
) -> None:
    layout = KVLayout(2, 9, 64, num_kv_heads, head_dim, jnp.dtype("int8"), "tpu")
    bundles = {
        kind: decode_sizes.rule(layout, num_heads, 64, kind).bundle for kind in ("TPU v5 lite", "TPU v6e", "TPU7x")
    }
    assert bundles == {"TPU v5 lite": shallow, "TPU v6e": deep, "TPU7x": deep}


@pytest.mark.parametrize(("num_rows", "num_tokens", "kib"), [(64, 131072, 1095), (65536, 65536, 2356)])
def test_steps_whose_lists_are_beyond_the_scalar_memory_are_refused(num_rows: int, num_tokens: int, kib: int) -> None:
    assert tpu.unsupported_reason(LLAMA, queries(32, num_rows, 8, num_tokens)) == (
        f"the step lists of {num_rows} rows and {num_tokens} tokens require {kib} KiB of scalar memory; "
        "the limit is 1016 KiB"
    )


@pytest.mark.parametrize(("num_rows", "table_width"), [(64, 8192), (256, 65536), (1000, 129)])
def test_tables_may_have_any_length(num_rows: int, table_width: int) -> None:
    assert tpu.unsupported_reason(LLAMA, queries(32, num_rows, table_width, 8192)) is None


@pytest.mark.parametrize(
    ("table_width", "chunks_blocks", "num_columns"),
    [(1, (2,), 128), (127, (2,), 128), (128, (2,), 128), (129, (2,), 256), (1, (2, 48), 384), (385, (2, 48), 768)],
)
def test_tables_are_padded_to_whole_pages_and_no_further(
    table_width: int, chunks_blocks: tuple[int, ...], num_columns: int
) -> None:
    pagings = [Paging(table_width, blocks, 16, 2) for blocks in chunks_blocks]
    tables_sm = jax.ShapeDtypeStruct((2, table_width), jnp.int32)
    assert jax.eval_shape(lambda tables: whole_pages(tables, *pagings), tables_sm).shape == (2, num_columns)


def test_the_lists_of_a_segment_are_counted() -> None:
    assert len(ChunkSegments._fields) == len(DecodeSegments._fields) == sizing.NUM_SEGMENT_FIELDS


def test_a_call_with_too_many_tokens_is_refused() -> None:
    layout = KVLayout(1, 4, 16, 2, 64, jnp.dtype("float32"), "tpu")
    rows = RaggedRows(*(jnp.zeros(shape, jnp.int32) for shape in ((9,), (8,), (8, 4), ())))
    with pytest.raises(Unsupported, match="attention backend pallas-tpu: the step lists of 8 rows and 131072 tokens"):
        paged_attention(
            jnp.zeros((2**17, 2, 64)),
            jnp.zeros(layout.shape),
            0,
            rows,
            AttentionSpec(layout, AttentionKind(1.0)),
            backend="pallas-tpu",
        )


def test_queries_of_another_type_are_refused() -> None:
    layout = KVLayout(1, 4, 16, 2, 64, jnp.dtype("float32"), "tpu")
    rows = RaggedRows(*(jnp.zeros(shape, jnp.int32) for shape in ((3,), (2,), (2, 4), ())))
    q = jnp.zeros((8, 2, 64), jnp.float16)
    with pytest.raises(Unsupported, match="queries are float16; they must be float32 or bfloat16"):
        paged_attention(
            q, jnp.zeros(layout.shape), 0, rows, AttentionSpec(layout, AttentionKind(1.0)), backend="pallas-tpu"
        )


def test_only_tpus_run_it() -> None:
    assert tpu.unsupported_device_reason(jax.devices("cpu")[0]) == "requires a TPU; this device's platform is cpu"
    assert tpu.unsupported_device_reason(cast(jax.Device, SimpleNamespace(platform="tpu"))) is None


def _tuned(folder: Path, **sizes: int) -> Path:
    match = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 32, "kv_dtype": "bfloat16"}
    entries = [{"match": {"kind": "chunks", **match}, "measured": "never: a test", **sizes}]
    (folder / "tpu-v6-lite.json").write_text(json.dumps({"entries": entries}))
    return folder


def test_a_measured_entry_is_used_for_its_device_and_shape_alone(tmp_path: Path) -> None:
    folder = _tuned(tmp_path, tile=16, fetch_blocks=8)

    def choose(layout: KVLayout = LLAMA, kind: str = "TPU v6 lite") -> chunk_sizes.ChunkSizes:
        return chunk_sizes.choose(layout, 32, kind, folder)

    assert choose() == chunk_sizes.ChunkSizes(tile=16, fetch_blocks=8)
    assert choose(kind="TPU v5 lite") == chunk_sizes.rule(LLAMA, 32) != choose()
    decodes = decode_sizes.choose(LLAMA, 32, 8, "TPU v6 lite", folder)
    assert decodes == decode_sizes.rule(LLAMA, 32, 8, "TPU v6 lite")
    other = dataclasses.replace(LLAMA, block_size=64)
    assert choose(other) == chunk_sizes.rule(other, 32)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tile": 24, "fetch_blocks": 8}, "tile 24 is not one of 256, 128, 64, 32, 16"),
        ({"tile": 16, "fetch_blocks": 3}, "fetch_blocks 3 are 96 tokens, not a multiple of 128"),
        ({"tile": 128, "fetch_blocks": 512}, r"require [\d.]+ MiB of vector memory; the limit is 52.0 MiB"),
    ],
)
def test_an_entry_that_cannot_be_used_is_an_error(tmp_path: Path, sizes: dict[str, int], reason: str) -> None:
    folder = _tuned(tmp_path, **sizes)
    with pytest.raises(InternalError, match=f"tuned sizes of TPU v6 lite for 32/8 heads of 128.*{reason}"):
        chunk_sizes.choose(LLAMA, 32, "TPU v6 lite", folder)


def test_the_entries_that_are_shipped_can_be_used() -> None:
    for path in sizing.TUNED.glob("*.json"):
        for entry in json.loads(path.read_text())["entries"]:
            assert entry["measured"]
            match = entry["match"]
            layout = KVLayout(
                1, 9, match["block_size"], match["num_kv_heads"], match["head_dim"], jnp.dtype(match["kv_dtype"]), "tpu"
            )
            if match["kind"] == "decode":
                decode_sizes.choose(layout, match["num_heads"], 8, path.stem)
            else:
                chunk_sizes.choose(layout, match["num_heads"], path.stem)
    assert (sizing.TUNED / "README.md").exists()
