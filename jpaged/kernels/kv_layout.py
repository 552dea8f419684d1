"""Where keys and values lie in memory: the one place that knows the shape of the pool.

    pool [L * (N + 1), B, 2K, D]

    layer 0: | null | 1 | 2 | ... | N |     layer 1: | null | 1 | ... | N |     ...
                      └ [B, 2K, D]: for each token slot the rows k0 v0 k1 v1 ... of its key/value heads

All layers lie in one array, so that a step can donate it whole: block b of layer l is row l * (N + 1) + b. The pool is
never sliced by layer and never passed as scan xs/ys: each would copy a layer or the whole pool on every step (measured
with 805 MB: 0.5 ms for a step that adds the layer to the ids, 126 ms sliced, 549 ms as xs/ys).

16-bit floats are stored as their bits, in uint16: XLA's CPU backend has no 16-bit float gather and would convert the
whole pool to float32 in every step (measured: 13 ms instead of 2 for a layer, with a pool of 21 MB).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped

MAX_SLOTS = 2**31 - 1
"""Slots are numbered by int32 across all layers."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pool for CPU and GPU. Knows shapes and places; does not hold the array, nor who owns which block.

    Attributes:
        num_layers: L.
        num_blocks: N, usable blocks; block 0 of every layer is the null block and comes on top.
        block_size: B, token slots in a block.
        num_kv_heads: K.
        head_dim: D.
        dtype: of keys and values, as they are written and read.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        for name in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidArgument(name, f"{value} is below the limit of 1")
        num_slots = self.num_layers * self.blocks_per_layer * self.block_size
        if num_slots > MAX_SLOTS:
            raise InvalidArgument(
                "num_blocks",
                f"{self.num_blocks} blocks of {self.block_size} tokens in {self.num_layers} layers are {num_slots} "
                f"slots; the limit is {MAX_SLOTS}",
            )

    @property
    def blocks_per_layer(self) -> int:
        """The usable blocks and the null block: the stride from a layer to the next."""
        return self.num_blocks + 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.num_layers * self.blocks_per_layer, self.block_size, 2 * self.num_kv_heads, self.head_dim)

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Of one block, all layers of it: L, B, 2K, D."""
        return (self.num_layers, *self.shape[1:])

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Of the pool array: `dtype`, or the unsigned integers that hold its bits."""
        is_half = jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize == 2
        return jnp.dtype(jnp.uint16) if is_half else self.dtype

    @property
    def bytes_per_block(self) -> int:
        """What one block costs in all layers together, keys and values, as allocated."""
        row_bytes = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * self.block_size * row_bytes

    @property
    def num_bytes(self) -> int:
        """Of the whole pool, the null blocks included."""
        return self.blocks_per_layer * self.bytes_per_block

    def write(
        self,
        pool: Shaped[Array, "P B 2K D"],
        layer: Int[Array, ""] | int,
        k_tkd: Float[Array, "T K D"],
        v_tkd: Float[Array, "T K D"],
        slots_t: Int[Array, "T"],
    ) -> Shaped[Array, "P B 2K D"]:
        """Stores each token's keys and values in its slot of this layer, in place when the pool is donated.

        A slot (block * B + offset) outside of the layer is dropped: nothing is written for it. Of several tokens with
        one slot, any may win; only padding shares one.
        """
        num_tokens = k_tkd.shape[0]
        is_inside_t = (slots_t >= 0) & (slots_t < self.blocks_per_layer * self.block_size)
        places_t = jnp.where(is_inside_t, slots_t // self.block_size + layer * self.blocks_per_layer, self.shape[0])
        rows_tkd = self.encode(jnp.stack((k_tkd, v_tkd), axis=2).reshape(num_tokens, *self.shape[2:]))
        # Two indices and no reshape: XLA would copy a pool of block size 1 whose slots were folded into one axis.
        return pool.at[places_t, slots_t % self.block_size].set(rows_tkd, mode="drop")

    def gather(
        self, pool: Shaped[Array, "P B 2K D"], layer: Int[Array, ""] | int, block_ids_n: Int[Array, "n"]
    ) -> Float[Array, "n B 2K D"]:
        """The named blocks of this layer; an id outside of the layer reads as zeros, never as another's memory."""
        is_inside_n = (block_ids_n >= 0) & (block_ids_n < self.blocks_per_layer)
        places_n = jnp.where(is_inside_n, block_ids_n + layer * self.blocks_per_layer, self.shape[0])
        return self.decode(pool.at[places_n].get(mode="fill", fill_value=0))

    def read_blocks(self, pool: Shaped[Array, "P B 2K D"], block_ids_c: Int[Array, "C"]) -> Shaped[Array, "C L B 2K D"]:
        """What the named blocks hold in all layers, as it is stored. Every id names a block, the null block or not."""
        return pool[self._places(block_ids_c)]

    def write_blocks(
        self, pool: Shaped[Array, "P B 2K D"], block_ids_c: Int[Array, "C"], contents: Shaped[Array, "C L B 2K D"]
    ) -> Shaped[Array, "P B 2K D"]:
        """Stores what `read_blocks` gave, in place when the pool is donated; nothing is written to the null block."""
        places_cl = jnp.where(block_ids_c[:, None] > 0, self._places(block_ids_c), self.shape[0])
        return pool.at[places_cl].set(contents, mode="drop")

    def encode(self, rows: Float[Array, "..."]) -> jax.Array:
        """Numbers -> what the pool holds for them."""
        rows = rows.astype(self.dtype)
        return rows if self.storage_dtype == self.dtype else jax.lax.bitcast_convert_type(rows, self.storage_dtype)

    def decode(self, stored: jax.Array) -> Float[Array, "..."]:
        """What the pool holds -> numbers; the inverse of `encode`."""
        return stored if self.storage_dtype == self.dtype else jax.lax.bitcast_convert_type(stored, self.dtype)

    def split(self, rows: Float[Array, "... 2K D"]) -> tuple[jax.Array, jax.Array]:
        """Rows as `gather` returns them -> keys [..., K, D] and values [..., K, D]."""
        pairs = rows.reshape(*rows.shape[:-2], self.num_kv_heads, 2, self.head_dim)
        return pairs[..., 0, :], pairs[..., 1, :]

    def _places(self, block_ids_c: Int[Array, "C"]) -> Int[Array, "C L"]:
        """Where each block lies in each layer."""
        return block_ids_c[:, None] + jnp.arange(self.num_layers) * self.blocks_per_layer
