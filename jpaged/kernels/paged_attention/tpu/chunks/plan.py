"""Arguments and scratch memory of the kernel for rows of several queries, and the static part of the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries
from jpaged.kernels.paged_attention.tpu.chunks import sizes as sizing
from jpaged.kernels.paged_attention.tpu.chunks.sizes import ITEMS_A_TURN, num_buffers
from jpaged.kernels.paged_attention.tpu.sizes import key_lanes, value_lanes
from jpaged.kernels.paged_attention.tpu.tables import Pages, Paging

LANES = 128


class ChunkSegments(NamedTuple):
    """The queries and the visible keys of each step of the grid; each field a list in scalar memory.

    Attributes:
        row: the row whose block table is read.
        tile: of the packed queries, in units of the query tile.
        lo: the row's first query in the tile.
        hi: the end of the row's queries in the tile.
        position: of the tile's first query, if it belonged to the row.
        begin: first key that any of them sees.
        end: the end of the keys that they see.
    """

    row: Any
    tile: Any
    lo: Any
    hi: Any
    position: Any
    begin: Any
    end: Any


class ChunkScalars(NamedTuple):
    """Arguments in scalar memory.

    Attributes:
        layer: [1].
        num_segments: [1].
        segments: see `ChunkSegments`.
        scales: [2K], alternating for keys and values; those of the keys include the softmax scale.
    """

    layer: Any
    num_segments: Any
    segments: ChunkSegments
    scales: Any


class ChunkRefs(NamedTuple):
    """Arguments and results."""

    q: Any
    tables: Any
    pool: Any
    before: Any
    o: Any
    lse: Any


class Scratch(NamedTuple):
    """Scratch memory of the kernel, kept from step to step.

    Attributes:
        chunk: two buffers of blocks [2, n, B, R, pack, lanes], in the pool's layout.
        rows: unpacked rows of tokens [buffers * R * pack, W, lanes]; for latents, concatenated [buffers, W, lanes].
        m: running maxima [slots, rows, 128].
        l: running sums, of the same shape.
        o: running outputs [slots, rows, lanes of a value].
        s: scores of the items of a turn [items, rows, W].
        p: their weights, of the same shape.
        fade: factors of the items' previous outputs [items, rows, 128].
        turn: [1], number of chunks so far, which selects the next buffer.
        num_missing: [2], blocks of a buffer that are not fetched: their ids are outside the layer.
        ids: [3]: the place of the id of the row's block 0, and of the first blocks of the buffers.
        pages: of the block tables.
        fetched: semaphores of the buffers.
        joined: a semaphore for the earlier results of the tile's other queries.
    """

    chunk: Any
    rows: Any
    m: Any
    l: Any
    o: Any
    s: Any
    p: Any
    fade: Any
    turn: Any
    num_missing: Any
    ids: Any
    pages: Pages
    fetched: Any
    joined: Any


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The static part of one call.

    Attributes:
        spec: of the attention.
        num_heads: query heads.
        tile: queries of a tile.
        part: queries of an item, a power of two.
        fetch_blocks: blocks of a chunk.
        table_width: blocks in a row's table (M).
        compute_dtype: of the matmuls' operands.
        num_cores: cores of a device, which share the heads; 1 if the heads cannot be shared.
    """

    spec: AttentionSpec
    num_heads: int
    tile: int
    part: int
    fetch_blocks: int
    table_width: int
    compute_dtype: jnp.dtype
    num_cores: int

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a core; a single one belongs to all cores, each with its own query heads."""
        return max(self.spec.layout.num_kv_heads // self.num_cores, 1)

    @property
    def group(self) -> int:
        """Query heads of a core that share a key/value head."""
        return self.num_heads // self.num_cores // self.num_kv_heads

    @property
    def has_own_rows(self) -> bool:
        """True if the heads of a core have their own rows of tiles: the core fetches only these."""
        layout = self.spec.layout
        num_rows = self.num_kv_heads * self.head_rows
        return layout.num_kv_heads == self.num_cores * self.num_kv_heads and num_rows % layout.pack == 0

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of what a core fetches for a token."""
        num_rows, *tile = self.spec.layout.token_shape
        return (num_rows // self.num_cores if self.has_own_rows else num_rows, *tile)

    @property
    def head_rows(self) -> int:
        """Rows of tokens of a key/value head: its key, and its value unless it shares the key's lanes."""
        return 1 if self.spec.layout.is_joined or self.spec.layout.value_dim is not None else 2

    @property
    def chunk_rows(self) -> int:
        """Unpacked rows of tokens of a chunk."""
        return 1 if self.spec.layout.value_dim is not None else self.token_shape[0] * self.spec.layout.pack

    @property
    def key_lanes(self) -> int:
        return key_lanes(self.spec.layout)

    @property
    def value_lanes(self) -> int:
        return value_lanes(self.spec.layout)

    @property
    def query_lanes(self) -> int:
        """Lanes of a core's query heads."""
        return self.num_heads // self.num_cores * self.key_lanes

    @property
    def output_lanes(self) -> int:
        """Lanes of their outputs."""
        return self.num_heads // self.num_cores * self.value_lanes

    @property
    def rows(self) -> int:
        """Rows of an item's matmuls."""
        return self.group * self.part

    @property
    def chunk_tokens(self) -> int:
        """Keys of an item's matmuls."""
        return self.fetch_blocks * self.spec.layout.block_size

    @property
    def paging(self) -> Paging:
        return Paging(self.table_width, self.fetch_blocks, self.spec.layout.block_size, held=2)

    @property
    def num_slots(self) -> int:
        """Slots of running values: parts of a tile times heads; the slot after them is unused."""
        return self.tile // self.part * self.num_kv_heads

    @property
    def is_paired(self) -> bool:
        """True if two tokens half a chunk apart are adjacent keys of a matmul: bfloat16 needs no arithmetic then."""
        return self.spec.layout.dtype == jnp.bfloat16 and self.compute_dtype == jnp.bfloat16

    @property
    def lse_lanes(self) -> int:
        return -(-self.num_heads // self.num_cores // LANES) * LANES

    def first_head(self, core: Any) -> Any:
        """Return the first key/value head of a core."""
        is_shared = self.num_cores > 1 and self.spec.layout.num_kv_heads > 1
        return core * self.num_kv_heads if is_shared else 0


def plan_for(spec: AttentionSpec, queries: Queries, device_kind: str, num_cores: int = 1) -> ChunkPlan:
    """Return the static part of a call on devices of this kind with `num_cores` cores."""
    layout = spec.layout
    group = queries.num_heads // layout.num_kv_heads
    if (group if layout.num_kv_heads == 1 else layout.num_kv_heads) % num_cores:
        num_cores = 1
    sizes = sizing.choose(layout, queries.num_heads, device_kind)
    # A step with fewer tokens than a tile uses a smaller one.
    tile = min(sizes.tile, max(16, 1 << (queries.num_tokens - 1).bit_length()))
    is_wide = jnp.float32 in (queries.dtype, layout.dtype)
    return ChunkPlan(
        spec=spec,
        num_heads=queries.num_heads,
        tile=tile,
        part=min(tile, sizing.get_part(group // num_cores if layout.num_kv_heads == 1 else group)),
        fetch_blocks=sizes.fetch_blocks,
        table_width=queries.table_width,
        compute_dtype=jnp.dtype(jnp.float32 if is_wide else jnp.bfloat16),
        num_cores=num_cores,
    )


class Item(NamedTuple):
    """Indices of an item for later stages: the running values, and the values of the head."""

    slot: Any
    value_row: Any


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of keys and the parts of the tile that see some of it.

    Attributes:
        first_key: of the chunk.
        first_head: the core's first among the pool's key/value heads.
        buffer: first of the chunk's unpacked rows of tokens.
        first_row: the first of those for the core's heads.
        first_part: the first part that sees a key.
        num_items: parts from there on times heads.
        is_whole: whether all of them see all keys.
    """

    first_key: Any
    first_head: Any
    buffer: Any
    first_row: Any
    first_part: Any
    num_items: Any
    is_whole: Any


def scratch_shapes(plan: ChunkPlan) -> Scratch:
    """Return the shapes of the kernel's scratch memory."""
    layout, slots = plan.spec.layout, plan.num_slots + 1
    num_rows = num_buffers(plan.num_kv_heads) * plan.chunk_rows
    items = (ITEMS_A_TURN, plan.rows)
    return Scratch(
        chunk=pltpu.VMEM((2, plan.fetch_blocks, layout.block_size, *plan.token_shape), layout.storage_dtype),
        rows=pltpu.VMEM((num_rows, plan.chunk_tokens, plan.key_lanes), plan.compute_dtype),
        m=pltpu.VMEM((slots, plan.rows, LANES), jnp.float32),
        l=pltpu.VMEM((slots, plan.rows, LANES), jnp.float32),
        o=pltpu.VMEM((slots, plan.rows, plan.value_lanes), jnp.float32),
        s=pltpu.VMEM((*items, plan.chunk_tokens), jnp.float32),
        p=pltpu.VMEM((*items, plan.chunk_tokens), plan.compute_dtype),
        fade=pltpu.VMEM((*items, LANES), jnp.float32),
        turn=pltpu.SMEM((1,), jnp.int32),
        num_missing=pltpu.SMEM((2,), jnp.int32),
        ids=pltpu.SMEM((3,), jnp.int32),
        pages=plan.paging.scratch_shapes(),
        fetched=pltpu.SemaphoreType.DMA((2,)),
        joined=pltpu.SemaphoreType.DMA(()),
    )


def cost(scalars: ChunkScalars, q: jax.Array, plan: ChunkPlan) -> pl.CostEstimate:
    """Estimate the cost with full tables, an upper bound: the lengths are unknown at compile time."""
    layout = plan.spec.layout
    num_keys = plan.table_width * layout.block_size
    num_segments = scalars.segments.row.shape[0]
    num_scores = num_segments * plan.num_heads * plan.tile * num_keys
    bytes_per_token = layout.bytes_per_block // layout.num_layers // layout.block_size
    return pl.CostEstimate(
        flops=2 * num_scores * (plan.key_lanes + plan.value_lanes),
        transcendentals=num_scores,
        bytes_accessed=2 * q.nbytes + num_segments * num_keys * bytes_per_token,
    )
