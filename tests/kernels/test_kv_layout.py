"""The pool's shape, and that writes and reads stay inside of their layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import InvalidArgument
from jpaged.kernels.kv_layout import KVLayout, split_rows

LAYOUT = KVLayout(num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype("float32"))
SLOTS_PER_LAYER = 6 * 4


def _rows(num_tokens: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, num_tokens, 2, 8)).astype(np.float32)
    return jnp.asarray(k), jnp.asarray(v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_a_block_costs_what_is_allocated(dtype: str) -> None:
    layout = KVLayout(3, 5, 4, 2, 8, jnp.dtype(dtype))
    pool = layout.encode(jnp.zeros(layout.shape))
    assert pool.dtype == layout.storage_dtype
    assert layout.num_bytes == pool.nbytes == 6 * layout.bytes_per_block


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read(dtype: str) -> None:
    layout = KVLayout(3, 5, 4, 2, 8, jnp.dtype(dtype))
    k, v = _rows(4)
    pool = layout.write(layout.encode(jnp.zeros(layout.shape)), jnp.int32(1), k, v, jnp.asarray([4, 23, 9, 6]))
    keys, values = split_rows(layout.gather(pool, jnp.int32(1), jnp.asarray([1, 5, 2])))
    for token, (block, offset) in enumerate([(0, 0), (1, 3), (2, 1), (0, 2)]):
        np.testing.assert_array_equal(keys[block, offset], k[token].astype(dtype))
        np.testing.assert_array_equal(values[block, offset], v[token].astype(dtype))


@pytest.mark.long
@settings(max_examples=50)
@given(
    layer=st.integers(0, 2),
    slots=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 100), min_size=6, max_size=6, unique=True),
)
def test_writes_outside_of_the_layer_are_dropped(layer: int, slots: list[int]) -> None:
    k, v = _rows(6)
    pool = np.asarray(LAYOUT.write(jnp.zeros(LAYOUT.shape), layer, k, v, jnp.asarray(slots, jnp.int32)))
    want = np.zeros((3, SLOTS_PER_LAYER, 4, 8), np.float32)
    for token, slot in enumerate(slots):
        if 0 <= slot < SLOTS_PER_LAYER:
            want[layer, slot, 0::2], want[layer, slot, 1::2] = k[token], v[token]
    np.testing.assert_array_equal(pool, want.reshape(LAYOUT.shape))


@settings(max_examples=50)
@given(
    layer=st.integers(0, 2),
    ids=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 9), min_size=4, max_size=4),
)
def test_reads_outside_of_the_layer_are_zeros(layer: int, ids: list[int]) -> None:
    pool = np.random.default_rng(0).normal(size=LAYOUT.shape).astype(np.float32)
    got = LAYOUT.gather(jnp.asarray(pool), layer, jnp.asarray(ids, jnp.int32))
    for block, block_id in zip(np.asarray(got), ids, strict=True):
        np.testing.assert_array_equal(block, pool[layer * 6 + block_id] if 0 <= block_id < 6 else 0)


@pytest.mark.parametrize("field", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "num_shards"])
def test_sizes_start_at_one(field: str) -> None:
    changes: dict[str, Any] = {field: 0}
    with pytest.raises(InvalidArgument, match=f"{field}: 0 is below the limit of 1"):
        dataclasses.replace(LAYOUT, **changes)


def test_slots_of_all_layers_must_fit_int32() -> None:
    with pytest.raises(InvalidArgument, match="num_blocks: 67108864 blocks of 16 tokens in 2 layers"):
        KVLayout(2, 1 << 26, 16, 1, 1, jnp.dtype("float32"))


def test_shards_divide_the_heads() -> None:
    with pytest.raises(InvalidArgument, match="num_shards: 3 does not divide the 2 key/value heads"):
        dataclasses.replace(LAYOUT, num_shards=3)


def test_other_types_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dtype: is int32; the pool holds float32"):
        dataclasses.replace(LAYOUT, dtype=jnp.dtype("int32"))


@pytest.mark.thinned(12)
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "shards", "token_shape"),
    [
        (8, 128, "bfloat16", 1, (8, 2, 128)),
        (3, 128, "bfloat16", 1, (3, 2, 128)),
        (1, 128, "int8", 1, (1, 4, 128)),
        (2, 128, "float32", 1, (4, 1, 128)),
        (2, 256, "float8_e4m3fn", 1, (1, 4, 256)),
        (2, 80, "bfloat16", 1, (2, 2, 128)),
        (3, 64, "bfloat16", 1, (2, 2, 128)),
        (4, 32, "float32", 1, (4, 1, 128)),
        (8, 64, "int8", 8, (8, 4, 128)),
        (8, 128, "bfloat16", 4, (8, 2, 128)),
    ],
)
def test_the_tiles_of_a_tpu(heads: int, head_dim: int, dtype: str, shards: int, token_shape: tuple[int, ...]) -> None:
    layout = KVLayout(2, 3, 4, heads, head_dim, jnp.dtype(dtype), "tpu", shards)
    assert layout.token_shape == token_shape
    pool = jnp.zeros(layout.shape, layout.storage_dtype)
    assert layout.num_bytes == pool.nbytes == 4 * layout.bytes_per_block
    assert layout.num_bytes == layout.local.num_bytes * shards
    k, v = (jnp.asarray(np.random.default_rng(i).integers(-9, 9, (5, heads, head_dim)), "float32") for i in (0, 1))
    slots = jnp.asarray([4, 15, 9, 6, 99])
    keys, values = split_rows(layout.gather(layout.write(pool, 1, k, v, slots), 1, jnp.asarray([1, 3, 2, 7])))
    for token, (block, offset) in enumerate([(0, 0), (1, 3), (2, 1), (0, 2)]):
        np.testing.assert_array_equal(keys[block, offset].astype("float32"), k[token])
        np.testing.assert_array_equal(values[block, offset].astype("float32"), v[token])
    np.testing.assert_array_equal(keys[3].astype("float32"), 0)


def test_a_shard_of_the_pool_is_the_pool_of_its_heads() -> None:
    layout = KVLayout(1, 3, 4, 6, 64, jnp.dtype("bfloat16"), "tpu", 2)
    k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(3, 6, 64)), "bfloat16") for i in (0, 1))
    whole = layout.token_rows(k, v)
    for shard, part in enumerate(np.split(np.asarray(whole), 2, axis=1)):
        heads = slice(3 * shard, 3 * shard + 3)
        np.testing.assert_array_equal(part, layout.local.token_rows(k[:, heads], v[:, heads]))


@pytest.mark.parametrize("form", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.thinned(12)
def test_latents_are_kept_once_and_their_values_are_their_beginnings(form: Any, dtype: str) -> None:
    """Half of the bytes of keys and values; each of two shards has the whole of its own."""
    layout = KVLayout(2, 3, 4, 2, 576, jnp.dtype(dtype), form, 2, 512)
    beside = dataclasses.replace(layout, value_dim=None)
    if form != "tpu":
        assert 2 * layout.bytes_per_block == beside.bytes_per_block
    assert layout.local.shape == (*layout.shape[:2], layout.shape[2] // 2, *layout.shape[3:])
    pool = jnp.zeros(layout.shape, layout.storage_dtype)
    k = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (5, 2, 576)), "float32")
    pool = layout.write(pool, 1, k, None, jnp.asarray([4, 15, 9, 6, 99]))
    keys, values = split_rows(layout.gather(pool, 1, jnp.asarray([1, 3, 2, 7])), layout.value_dim)
    assert values.shape == (4, 4, 2, 512)
    for token, (block, offset) in enumerate([(0, 0), (1, 3), (2, 1), (0, 2)]):
        np.testing.assert_array_equal(keys[block, offset].astype("float32"), k[token])
        np.testing.assert_array_equal(values[block, offset].astype("float32"), k[token, :, :512])
    np.testing.assert_array_equal(keys[3].astype("float32"), 0)
    moved = layout.write_blocks(pool, jnp.asarray([2]), layout.read_blocks(pool, jnp.asarray([1])))
    np.testing.assert_array_equal(layout.gather(moved, 1, jnp.asarray([2])), layout.gather(pool, 1, jnp.asarray([1])))


@pytest.mark.parametrize(
    ("dtype", "token_shape"), [("float32", (5, 1, 128)), ("bfloat16", (3, 2, 128)), ("float8_e4m3fn", (2, 4, 128))]
)
def test_a_latent_on_a_tpu_is_cut_into_whole_registers(dtype: str, token_shape: tuple[int, ...]) -> None:
    layout = KVLayout(1, 3, 16, 1, 576, jnp.dtype(dtype), "tpu", value_dim=512)
    assert layout.token_shape == token_shape
    assert 5 * layout.bytes_per_block <= 3 * dataclasses.replace(layout, value_dim=None).bytes_per_block


@pytest.mark.parametrize(
    ("heads", "value_dim", "message"),
    [
        (1, 0, "value_dim: 0 is not from 1 to the 576 numbers of a key"),
        (1, 577, "value_dim: 577 is not from 1 to the 576 numbers of a key"),
        (2, 512, "num_kv_heads: 2 heads of latents in 1 shards; each must have exactly one"),
    ],
)
def test_latents_that_make_no_sense_are_refused(heads: int, value_dim: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVLayout(1, 3, 4, heads, 576, jnp.dtype("float32"), value_dim=value_dim)


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("float8_e4m3fn", 448)])
def test_8_bits_saturate(dtype: str, largest: int) -> None:
    layout = KVLayout(1, 3, 4, 1, 8, jnp.dtype(dtype))
    stored = layout.decode(layout.encode(jnp.asarray([1e6, -1e6, 2.5, -3.5])))
    np.testing.assert_array_equal(
        np.asarray(stored, np.float32), [largest, -largest, *((2, -4) if dtype == "int8" else (2.5, -3.5))]
    )


@pytest.mark.parametrize(
    ("form", "num_kv_heads", "num_shards", "dtype"),
    [("cpu", 2, 1, "float32"), ("gpu", 2, 2, "float32"), ("tpu", 2, 1, "bfloat16"), ("tpu", 4, 4, "bfloat16")],
)
@pytest.mark.thinned(3)
def test_whole_blocks_are_moved_in_all_layers(form: Any, num_kv_heads: int, num_shards: int, dtype: str) -> None:
    """Blocks 4 and 1 to where 2 and 5 were; what was to go to the null block goes nowhere.

    The last case has one row of tiles a token and shard, whose blocks are moved token by token.
    """
    layout = KVLayout(3, 5, 4, num_kv_heads, 128, jnp.dtype(dtype), form, num_shards)
    numbers = np.random.default_rng(0).normal(size=layout.shape).astype(np.float32)
    pool = layout.encode(jnp.asarray(numbers))
    contents = layout.read_blocks(pool, jnp.asarray([4, 1, 3]))
    assert contents.shape == (3, *layout.block_shape)
    moved = np.asarray(layout.write_blocks(pool, jnp.asarray([2, 5, 0]), contents)).reshape(3, 6, -1)
    before = np.asarray(pool).reshape(3, 6, -1)
    np.testing.assert_array_equal(moved, before[:, [0, 1, 4, 3, 4, 1]])
