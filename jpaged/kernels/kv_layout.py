"""The layout of keys and values in memory; only this module knows the shape of the pool.

    pool [L * (N + 1), B, ...]

    layer 0: | null | 1 | 2 | ... | N |     layer 1: | null | 1 | ... | N |     ...
                      └ keys and values of B tokens, in one of three forms:

    cpu, gpu  [B, 2K, D]             for each token the rows k0 v0 k1 v1 ... of the key/value heads
    tpu       [B, R, pack, lanes]    the same rows in tiles of 32 bits: pack = 4 / bytes of an element,
                                     lanes = D rounded up to 128 (D > 64), R = 2K / pack rounded up
                                     D <= 64: one row of 128 lanes is k | v of a head, R = K / pack rounded up

    If keys are latents (`value_dim`), the value of a token is a prefix of the key and is not stored separately:

    cpu, gpu  [B, K, D]              one row for each shard, K = 1 of them on a device
    tpu       [B, R, pack, 128]      the row cut into pieces of 128 lanes, R = D / 128 / pack rounded up

All layers are in one array, so that a step can donate it whole: block b of layer l is row l * (N + 1) + b. The pool is
never sliced by layer and never passed as scan xs/ys: each would copy a layer or the whole pool on every step (measured
with 805 MB: 0.5 ms for a step that adds the layer to the ids, 126 ms sliced, 549 ms as xs/ys).

The TPU form exists because a Mosaic kernel takes row-major arrays, and XLA stores other shapes in other orders: with
[B, 2K, D] the pool is copied whole, twice per call, for head size 64, for 3 heads, or for one head of 8 bits (observed
in programs that libtpu compiles for v5e, v5p, v6e and tpu7x).

On CPUs floats of 16 and 8 bits are stored as their bits, in unsigned integers: XLA has no gather for them there and
would convert the whole pool to float32 in every step (measured: 13 ms instead of 2 for a layer, a pool of 21 MB).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped

MAX_SLOTS = 2**31 - 1
"""Maximum number of slots; they are numbered by int32 across all layers."""

KVForm = Literal["cpu", "gpu", "tpu"]

MAX_NUMBER = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest number of an 8-bit element; integers are used symmetrically."""

_DTYPES = ("float32", "bfloat16", "float16", *MAX_NUMBER)
_LANES = 128
_SIZES = ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim")
_COUNTS = (*_SIZES, "num_shards", "num_context_parts", "num_stages", "dp_size")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shapes and indices of the pool; holds neither the array nor the ownership of blocks.

    Attributes:
        num_layers: L.
        num_blocks: N, usable blocks; every layer also has the null block, block 0.
        block_size: B, token slots in a block.
        num_kv_heads: K, of all shards together.
        head_dim: D.
        dtype: of keys and values, as they are written and read. In 8 bits they are stored divided by their scales.
        form: layout of the rows of a token.
        num_shards: equal parts into which the heads are split over devices; each part is padded to tiles by itself.
        num_context_parts: equal parts into which the slots of a block are split over devices, each with its own tokens
            of every context.
        value_dim: keys are latents whose first `value_dim` numbers are the value, as in DeepSeek-V2 (2024); each device
            has one head, the same. None stores values separately.
        num_stages: equal parts into which the layers are split over devices, in order.
        dp_size: equal parts into which the blocks are split over devices (data-parallel attention), each with its own
            null blocks: block b is number (b - 1) % (N / dp_size) + 1 of part (b - 1) // (N / dp_size).
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    form: KVForm = "cpu"
    num_shards: int = 1
    value_dim: int | None = None
    num_context_parts: int = 1
    num_stages: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.dtype.name not in _DTYPES:
            raise InvalidArgument("dtype", f"is {self.dtype.name}; the pool holds {', '.join(_DTYPES)}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value < 1:
                raise InvalidArgument(name, f"{value} is below the limit of 1")
        if self.block_size % self.num_context_parts:
            raise InvalidArgument(
                "num_context_parts", f"{self.num_context_parts} does not divide the {self.block_size} slots of a block"
            )
        if self.num_layers % self.num_stages:
            raise InvalidArgument("num_stages", f"{self.num_stages} does not divide the {self.num_layers} layers")
        if self.num_kv_heads % self.num_shards:
            raise InvalidArgument(
                "num_shards", f"{self.num_shards} does not divide the {self.num_kv_heads} key/value heads"
            )
        if self.num_blocks % self.dp_size:
            raise InvalidArgument("num_blocks", f"{self.num_blocks} is not a multiple of dp_size, {self.dp_size}")
        if self.value_dim is not None:
            _check_latents(self, self.value_dim)
        num_slots = self.num_layers // self.num_stages * self.blocks_per_layer * self.block_size
        if num_slots > MAX_SLOTS:
            raise InvalidArgument(
                "num_blocks",
                f"{self.num_blocks} blocks of {self.block_size} tokens in {self.num_layers} layers are {num_slots} "
                f"slots; the limit is {MAX_SLOTS}",
            )

    @property
    def blocks_per_layer(self) -> int:
        """The usable blocks and the null block of each part; without parts, the stride from a layer to the next."""
        return self.num_blocks + self.dp_size

    @property
    def local(self) -> KVLayout:
        """The layout of one device's part: its stage's layers, one shard's heads, in the slots and blocks there."""
        return dataclasses.replace(
            self,
            num_layers=self.num_layers // self.num_stages,
            num_blocks=self.num_blocks // self.dp_size,
            block_size=self.block_size // self.num_context_parts,
            num_kv_heads=self.num_kv_heads // self.num_shards,
            num_shards=1,
            num_context_parts=1,
            num_stages=1,
            dp_size=1,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pool. Devices split axis 2 by heads, axis 1 by context, axis 0 by stages or sequences."""
        return (self.num_layers * self.blocks_per_layer, self.block_size, *self.token_shape)

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of one token's data in one layer."""
        if self.form != "tpu":
            return ((2 if self.value_dim is None else 1) * self.num_kv_heads, self.head_dim)
        return (self.num_shards * -(-_rows_of_shard(self) // self.pack), self.pack, self.lanes)

    @property
    def is_joined(self) -> bool:
        """True if a key and its value share a row of lanes, half each."""
        return self.form == "tpu" and self.value_dim is None and self.head_dim <= _LANES // 2

    @property
    def pack(self) -> int:
        """Rows of a TPU tile that share one 32-bit word."""
        return 4 // self.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Width of a TPU row: whole vector registers, one if rows are pieces of a latent."""
        return _LANES if self.value_dim is not None else -(-self.head_dim // _LANES) * _LANES

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block with all its layers: L, B and the token's shape."""
        return (self.num_layers, *self.shape[1:])

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Type of the pool array: `dtype`, or the unsigned integers that hold its bits."""
        if self.form == "cpu" and jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize < 4:
            return jnp.dtype(f"uint{8 * self.dtype.itemsize}")
        return self.dtype

    @property
    def is_scaled(self) -> bool:
        """True if keys and values are stored divided by a scale per head, because 8 bits have a small range."""
        return self.dtype.itemsize == 1

    @property
    def is_rotated(self) -> bool:
        """True if keys and values are stored rotated (`rotate_heads`), so that integers hold them better."""
        return self.dtype == jnp.int8 and self.value_dim is None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers and shards, keys and values, as allocated."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, including the null blocks."""
        return self.blocks_per_layer * self.bytes_per_block

    def local_ids(self, block_ids: Int[Array, "..."], rank: Int[Array, ""] | int) -> Int[Array, "..."]:
        """Return the numbers of blocks within one part (`dp_size`); the null block for blocks of other parts."""
        of_part = self.num_blocks // self.dp_size
        is_own = (block_ids > 0) & ((block_ids - 1) // of_part == rank)
        return jnp.where(is_own, (block_ids - 1) % of_part + 1, 0)

    def place_heads(self, x_thd: Float[Array, "T H D"], num_places: int) -> list[jax.Array]:
        """Return heads of a layer with several places, or smaller ones, as those of a layer at each place.

        Heads are padded with zeros. Those of one head of the pool, at all places, are adjacent.
        """
        num_tokens, _, own_dim = x_thd.shape
        padded = jnp.pad(x_thd, ((0, 0), (0, 0), (0, self.head_dim - own_dim)))
        grouped = padded.reshape(num_tokens, self.num_kv_heads, num_places, -1, self.head_dim)
        return [grouped[:, :, index].reshape(num_tokens, -1, self.head_dim) for index in range(num_places)]

    def join_heads(self, places: Sequence[jax.Array], own_dim: int) -> jax.Array:
        """Return the heads of all places without padding; the inverse of `place_heads`."""
        num_tokens = len(places[0])
        grouped = [x_thd.reshape(num_tokens, self.num_kv_heads, -1, self.head_dim) for x_thd in places]
        return jnp.stack(grouped, axis=2)[..., :own_dim].reshape(num_tokens, -1, own_dim)

    def write(
        self,
        pool: Shaped[Array, "P B ..."],
        layer: Int[Array, ""] | int,
        k_tkd: Float[Array, "T K D"],
        v_tkd: Float[Array, "T K D"] | None,
        slots_t: Int[Array, "T"],
    ) -> Shaped[Array, "P B ..."]:
        """Store each token's keys and values in its slot of this layer, in place if the pool is donated.

        Latents have no separate values (None).

        A slot (block * B + offset) outside the layer is dropped. If several tokens have the same slot, any may win;
        only padding shares a slot. If `is_scaled`, the arguments are already divided by their scales.
        """
        is_inside_t = (slots_t >= 0) & (slots_t < self.blocks_per_layer * self.block_size)
        places_t = jnp.where(is_inside_t, slots_t // self.block_size + layer * self.blocks_per_layer, self.shape[0])
        # Two indices and no reshape: XLA would copy a pool of block size 1 if its slots were folded into one axis.
        return pool.at[places_t, slots_t % self.block_size].set(self.token_rows(k_tkd, v_tkd), mode="drop")

    def token_rows(self, k_tkd: Float[Array, "T K D"], v_tkd: Float[Array, "T K D"] | None) -> Shaped[Array, "T ..."]:
        """Return keys and values as the pool stores them, `[T, *token_shape]`."""
        num_tokens = k_tkd.shape[0]
        rows_tknd = self.encode(k_tkd[:, :, None] if v_tkd is None else jnp.stack((k_tkd, v_tkd), axis=2))
        if self.form != "tpu":
            return rows_tknd.reshape(num_tokens, *self.token_shape)
        rows_tknd = jnp.pad(rows_tknd, ((0, 0), (0, 0), (0, 0), (0, _row_width(self) - self.head_dim)))
        rows_tsrl = rows_tknd.reshape(num_tokens, self.num_shards, -1, self.lanes)
        rows_tsrl = jnp.pad(rows_tsrl, ((0, 0), (0, 0), (0, -rows_tsrl.shape[2] % self.pack), (0, 0)))
        return rows_tsrl.reshape(num_tokens, *self.token_shape)

    def gather(
        self, pool: Shaped[Array, "P B ..."], layer: Int[Array, ""] | int, block_ids_n: Int[Array, "n"]
    ) -> Float[Array, "n B 2K D"] | Float[Array, "n B K D"]:
        """Return these blocks of this layer; an id outside the layer reads as zeros, never as other memory."""
        is_inside_n = (block_ids_n >= 0) & (block_ids_n < self.blocks_per_layer)
        places_n = jnp.where(is_inside_n, block_ids_n + layer * self.blocks_per_layer, self.shape[0])
        stored = self.decode(pool.at[places_n].get(mode="fill", fill_value=0))
        if self.form != "tpu":
            return stored
        rows = stored.reshape(*stored.shape[:2], self.num_shards, -1, self.lanes)[:, :, :, : _rows_of_shard(self)]
        return rows.reshape(*stored.shape[:2], -1, _row_width(self))[..., : self.head_dim]

    def read_blocks(self, pool: Shaped[Array, "P B ..."], block_ids_c: Int[Array, "C"]) -> Shaped[Array, "C L B ..."]:
        """Return the stored contents of these blocks in all layers. Every id must name a block or the null block."""
        return pool[_places(self, block_ids_c)]

    def write_blocks(
        self, pool: Shaped[Array, "P B ..."], block_ids_c: Int[Array, "C"], contents: Shaped[Array, "C L B ..."]
    ) -> Shaped[Array, "P B ..."]:
        """Store the result of `read_blocks`, in place if the pool is donated; nothing is written to the null block."""
        places, *slots = _places(self, block_ids_c)
        is_block_c = (block_ids_c > 0).reshape(-1, *(1,) * (places.ndim - 1))
        # One axis of places, not two: for two, XLA would first copy all contents into another order. The barrier
        # prevents that copy, and keeps the read of a copy within the pool out of the write's loop: fused, it could not
        # be in place.
        places = jnp.where(is_block_c, places, self.shape[0]).reshape(-1, *places.shape[2:])
        contents = jax.lax.optimization_barrier(contents.reshape(-1, *contents.shape[2:]))
        return pool.at[places, *slots].set(contents, mode="drop")

    def encode(self, numbers: Float[Array, "..."]) -> jax.Array:
        """Convert numbers to their stored form; 8 bits are rounded to the nearest and saturate."""
        if self.is_scaled:
            largest = MAX_NUMBER[self.dtype.name]
            numbers = jnp.clip(numbers.astype(jnp.float32), -largest, largest)
            numbers = jnp.round(numbers) if self.dtype == jnp.int8 else numbers
        stored = numbers.astype(self.dtype)
        return stored if self.storage_dtype == self.dtype else jax.lax.bitcast_convert_type(stored, self.storage_dtype)

    def decode(self, stored: jax.Array) -> Float[Array, "..."]:
        """Convert stored data to numbers; the inverse of `encode`."""
        return stored if self.storage_dtype == self.dtype else jax.lax.bitcast_convert_type(stored, self.dtype)


def output_dim(layout: KVLayout) -> int:
    """Return the numbers of a value, and so of a query head's output."""
    return layout.head_dim if layout.value_dim is None else layout.value_dim


def split_rows(rows: Float[Array, "... rows D"], value_dim: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Split rows from `KVLayout.gather` into keys and values [..., K, D]; a latent's value is its prefix."""
    if value_dim is not None:
        return rows, rows[..., :value_dim]
    pairs = rows.reshape(*rows.shape[:-2], -1, 2, rows.shape[-1])
    return pairs[..., 0, :], pairs[..., 1, :]


def _check_latents(layout: KVLayout, value_dim: int) -> None:
    if not 1 <= value_dim <= layout.head_dim:
        raise InvalidArgument("value_dim", f"{value_dim} is not from 1 to the {layout.head_dim} numbers of a key")
    if layout.num_kv_heads != layout.num_shards:
        raise InvalidArgument(
            "num_kv_heads",
            f"{layout.num_kv_heads} heads of latents in {layout.num_shards} shards; each must have exactly one",
        )


def _rows_of_shard(layout: KVLayout) -> int:
    """Return the rows of lanes that a shard's heads of one token fill on a TPU."""
    if layout.value_dim is not None:
        return -(-layout.head_dim // _LANES)
    return layout.num_kv_heads // layout.num_shards * (1 if layout.is_joined else 2)


def _row_width(layout: KVLayout) -> int:
    """Return the lanes that a key, or a value, takes on a TPU."""
    if layout.value_dim is not None:
        return _rows_of_shard(layout) * layout.lanes
    return layout.lanes // 2 if layout.is_joined else layout.lanes


def _places(layout: KVLayout, block_ids_c: Int[Array, "C"]) -> tuple[Int[Array, "C L ..."], ...]:
    """Return the place of each block in each layer: the index of the pool's first axis, or the first two."""
    places_cl = block_ids_c[:, None] + jnp.arange(layout.num_layers) * layout.blocks_per_layer
    if layout.form == "tpu" and layout.shape[2] == layout.num_shards:
        # One row of tiles per token: XLA would drop its axis, and copy the whole pool into another order and back.
        return places_cl[..., None], jnp.arange(layout.block_size)
    return (places_cl,)
