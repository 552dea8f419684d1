"""What the kernel of rows that decode is given and keeps, and the static side of its call."""

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
"""Device kinds whose products take numbers of 8 bits in floating point, beside bfloat16."""
TURNING_KINDS = ("TPU7x",)
"""Device kinds that turn integers of 8 bits faster than their matrix units take what is not turned (counted: a push of
bfloat16 takes 4 cycles, and 8 where it is to be turned)."""
LOG2_E = math.log2(math.e)
LIFT = 100
"""Queries and weights are multiplied by 2^100 where keys and values are 2^120 times too small."""


class Segments(NamedTuple):
    """What one query sees; each a list in scalar memory, `first` and `items` one longer than the others.

    Attributes:
        row: whose block table is meant.
        place: of the query's token among those of the step of the grid.
        begin: first key that it sees.
        end: one behind the last.
        first: first item of its chunks.
        last: one behind the last; one item at least, even of no key.
        items: items of all segments before.
    """

    row: Any
    place: Any
    begin: Any
    end: Any
    first: Any
    last: Any
    items: Any


class Tiles(NamedTuple):
    """The tokens of each step of the grid: `places` of them that lie side by side, if one is in no chunk of a prompt.

    Attributes:
        num: steps of each core [cores].
        tile: of the packed tokens, in units of `places`, core by core [cores * tiles]; behind the last step its own.
        first: first segment of each step, and one behind the last, core by core [cores * (tiles + 1)].
    """

    num: Any
    tile: Any
    first: Any


class Scalars(NamedTuple):
    """What lies in scalar memory before the kernel starts.

    Attributes:
        layer: [1].
        cores: first segment of each core, and one behind the last of all [cores + 1].
        segments: see there.
        tiles: see there.
        writes: (slots [T], whether B tokens from here on fill a block [T]); empty where nothing is written.
    """

    layer: Any
    cores: Any
    segments: Segments
    tiles: Tiles
    writes: tuple[Any, ...]


class Kept(NamedTuple):
    """Memory of the kernel's own.

    Attributes:
        q: queries of the step's tokens, taken apart, and then outputs [places, bundles, rows, lanes of a key].
        chunks: ring of buffers [ring, n, B, pitch, pack, lanes].
        values: of heads that share columns of lanes, as words [ring, columns, W / tokens of a word, 128].
        scores: of the item at stage 2 [bundles, rows, W].
        weights: of the item at stage 3, alike.
        fade: what its row's output is multiplied by [bundles, rows, 128], alike in all lanes.
        m: running maxima [places + 1, bundles, rows, 128], alike in all lanes; the last place is nobody's.
        l: running sums, by lane.
        o: running outputs [places + 1, bundles, rows, lanes of a value].
        cursor: (segment, item of it, buffer) of the next fetch.
        turn: [1], the buffer of the next item.
        special: [ring], whether tokens of the buffer's item are not seen, and whether ids are outside of the layer.
        ids: (where the id of the cursor's block 0 would lie, and those of the buffers' items) [1 + ring].
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


class Refs(NamedTuple):
    """Arguments and results; queries and outputs as they are kept."""

    q: Any
    scale: Any
    tables: Any
    new: Any
    pool: Any
    o: Any
    lse: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """The static side of one call.

    Attributes:
        spec: of the attention.
        sizes: how the work is cut.
        group: query heads of a key/value head.
        table_width: blocks in a row's table (M).
        compute_dtype: of the matrix products' operands.
        takes_fp8: whether numbers of 8 bits in floating point are used as they are: products take them, or they become
            numbers of 32 bits.
        turns_keys: whether keys are turned before they are products' operands, while they have 8 bits.
        has_writes: whether new keys and values are stored.
        num_cores: of a device, which share the rows.
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
        """Rows of a bundle's product."""
        return -(-self.sizes.bundle * self.group // 8) * 8

    @property
    def column_heads(self) -> int:
        """Heads whose keys lie beside each other in as many lanes as a row of the pool has."""
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
        """Whether numbers come 2^FP8_SHIFT times too small."""
        return self.spec.layout.dtype == jnp.float8_e4m3fn and not self.takes_fp8

    @property
    def rows_of_heads(self) -> tuple[int, ...]:
        """The row of each query head among those of a token."""
        bundle, group = self.sizes.bundle, self.group
        heads = range(self.spec.layout.num_kv_heads)
        return tuple(k // bundle * self.rows + k % bundle * group + g for k in heads for g in range(group))


def plan_for(spec: AttentionSpec, queries: Queries, device_kind: str, *, has_writes: bool, num_cores: int = 1) -> Plan:
    """The static side of a call with these queries on devices of this kind with so many cores."""
    layout = spec.layout
    sizes = choose(layout, queries.num_heads, queries.num_tokens, device_kind)
    is_wide = jnp.float32 in (queries.dtype, layout.dtype)
    return Plan(
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
