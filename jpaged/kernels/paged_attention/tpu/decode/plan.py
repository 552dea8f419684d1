"""Arguments and scratch memory of the kernel of rows that decode, and the static part of the call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries
from jpaged.kernels.paged_attention.tpu import words
from jpaged.kernels.paged_attention.tpu.decode.sizes import DecodeSizes, choose
from jpaged.kernels.paged_attention.tpu.sizes import key_lanes, value_lanes
from jpaged.kernels.paged_attention.tpu.tables import Pages, Paging

FP8_KINDS = ("TPU7x",)
"""Device kinds whose matmuls take 8-bit floats in addition to bfloat16."""
TURNING_KINDS = ("TPU7x",)
"""Device kinds that transpose 8-bit integers faster than their matrix units take untransposed operands.

By counted cycles, a push of bfloat16 takes 4 cycles, and 8 if it must be transposed.
"""
LOG2_E = math.log2(math.e)
LIFT = 100
"""Queries and weights are multiplied by 2^100 if keys and values are 2^120 times too small."""


class DecodeSegments(NamedTuple):
    """The visible keys of one query; each field a list in scalar memory.

    `first` and `items` are one longer than the others.

    Attributes:
        row: the row whose block table is read.
        place: of the query's token among those of the step of the grid.
        begin: first key that it sees.
        end: the end of the keys that it sees.
        first: first item of the chunks.
        last: the end of the items; at least one item, even without keys.
        items: number of items of all segments before.
    """

    row: Any
    place: Any
    begin: Any
    end: Any
    first: Any
    last: Any
    items: Any


class Tiles(NamedTuple):
    """The tokens of each step of the grid: `places` adjacent ones, at least one of which is in no chunk of a prompt.

    Attributes:
        num: steps of each core [cores].
        tile: of the packed tokens, in units of `places`, core by core [cores * tiles]; repeats the last one after the
            last step.
        first: first segment of each step, and the end of the last, core by core [cores * (tiles + 1)].
    """

    num: Any
    tile: Any
    first: Any


class DecodeScalars(NamedTuple):
    """Arguments in scalar memory.

    Attributes:
        layer: [1].
        cores: first segment of each core, and the end of all [cores + 1].
        segments: see `DecodeSegments`.
        tiles: see `Tiles`.
        writes: (slots [T], whether B tokens from here on fill a block [T]); empty if nothing is written.
    """

    layer: Any
    cores: Any
    segments: DecodeSegments
    tiles: Tiles
    writes: tuple[Any, ...]


class Kept(NamedTuple):
    """Scratch memory of the kernel.

    Attributes:
        q: unpacked queries of the step's tokens, and then outputs [places, bundles, rows, lanes of a key].
        chunks: ring of buffers [ring, n, B, pitch, pack, lanes].
        values: of heads that share columns of lanes, as words [ring, columns, W / tokens of a word, 128].
        scores: of the item at stage 2 [bundles, rows, W].
        weights: of the item at stage 3, of the same shape.
        fade: factor of the row's previous output [bundles, rows, 128], equal in all lanes.
        m: running maxima [places + 1, bundles, rows, 128], equal in all lanes; the last place is unused.
        l: running sums, by lane.
        o: running outputs [places + 1, bundles, rows, lanes of a value].
        cursor: (segment, item of it, buffer) of the next fetch.
        turn: [1], the buffer of the next item.
        special: [ring], whether tokens of the buffer's item are not seen, and whether ids are outside the layer.
        ids: [1 + ring]: the place of the id of the cursor's block 0, and of the buffers' items.
        pages: of the block tables.
        fetched: semaphores of the buffers.
        written: semaphores of whole blocks and of single tokens.
    """

    q: Any
    chunks: Any
    values: Any
    scores: Any
    weights: Any
    fade: Any
    m: Any
    l: Any
    o: Any
    cursor: Any
    turn: Any
    special: Any
    ids: Any
    pages: Pages
    fetched: Any
    written: Any


class DecodeRefs(NamedTuple):
    """Arguments and results; queries and outputs are those of the scratch memory."""

    q: Any
    scale: Any
    tables: Any
    new: Any
    pool: Any
    o: Any
    lse: Any


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The static part of one call.

    Attributes:
        spec: of the attention.
        sizes: sizes of the work.
        group: query heads of a key/value head.
        table_width: blocks in a row's table (M).
        compute_dtype: of the matmuls' operands.
        takes_fp8: 8-bit floats are used directly: matmuls take them, or they are converted to 32 bits.
        turns_keys: keys are transposed before the matmuls, while they have 8 bits.
        has_writes: new keys and values are stored.
        num_cores: cores of a device, which share the rows.
    """

    spec: AttentionSpec
    sizes: DecodeSizes
    group: int
    table_width: int
    compute_dtype: jnp.dtype
    takes_fp8: bool
    turns_keys: bool
    has_writes: bool
    num_cores: int

    @property
    def fetch_blocks(self) -> int:
        return self.sizes.chunk_tokens // self.spec.layout.block_size

    @property
    def paging(self) -> Paging:
        return Paging(self.table_width, self.fetch_blocks, self.spec.layout.block_size, self.sizes.ahead + 1)

    @property
    def num_bundles(self) -> int:
        return -(-self.spec.layout.num_kv_heads // self.sizes.bundle)

    @property
    def rows(self) -> int:
        """Rows of a bundle's matmul."""
        return -(-self.sizes.bundle * self.group // 8) * 8

    @property
    def column_heads(self) -> int:
        """Heads whose keys share the lanes of one row of the pool."""
        return 2 if self.spec.layout.is_joined else 1

    @property
    def folds(self) -> int:
        return self.spec.layout.lanes // words.LANES

    @property
    def key_lanes(self) -> int:
        return key_lanes(self.spec.layout)

    @property
    def value_lanes(self) -> int:
        return value_lanes(self.spec.layout)

    @property
    def lse_lanes(self) -> int:
        return -(-self.num_bundles * self.rows // words.LANES) * words.LANES

    @property
    def is_tiny(self) -> bool:
        """True if numbers come 2^FP8_SHIFT times too small."""
        return self.spec.layout.dtype == jnp.float8_e4m3fn and not self.takes_fp8

    @property
    def rows_of_heads(self) -> tuple[int, ...]:
        """Row of each query head among those of a token."""
        bundle, group = self.sizes.bundle, self.group
        heads = range(self.spec.layout.num_kv_heads)
        return tuple(k // bundle * self.rows + k % bundle * group + g for k in heads for g in range(group))


def plan_for(
    spec: AttentionSpec, queries: Queries, device_kind: str, *, has_writes: bool, num_cores: int = 1
) -> DecodePlan:
    """Return the static part of a call with these queries on devices of this kind with `num_cores` cores."""
    layout = spec.layout
    sizes = choose(layout, queries.num_heads, queries.num_tokens, device_kind)
    is_wide = jnp.float32 in (queries.dtype, layout.dtype)
    return DecodePlan(
        spec=spec,
        sizes=sizes,
        group=queries.num_heads // layout.num_kv_heads,
        table_width=queries.table_width,
        compute_dtype=jnp.dtype(jnp.float32 if is_wide else jnp.bfloat16),
        takes_fp8=is_wide or device_kind in FP8_KINDS,
        turns_keys=layout.dtype == jnp.int8 and not (is_wide or layout.is_joined) and device_kind in TURNING_KINDS,
        has_writes=has_writes,
        num_cores=num_cores,
    )
