"""Sizes of the work of the kernel for rows of several queries.

tile      queries of a step of the grid: the larger, the fewer times a context is fetched for a prompt
part      queries of a matmul, whose rows are those of all query heads of a key/value head
chunk     keys of a matmul
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jpaged.errors import InternalError
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.tpu import sizes as sizing

VMEM_LIMIT_BYTES = 60 * 2**20
"""The compiler's limit; of the generations since v5e the smallest has 64 MiB."""
VMEM_BUDGET_BYTES = 52 * 2**20
"""Planned use; the rest is left to the compiler, for values that spill from registers."""
ITEMS_A_TURN = 2
"""Matmuls that a turn of the pipeline works on at a time, in each of its three stages."""
_TILES = (256, 128, 64, 32, 16)
_TILE_ROWS = 2048
_PART_ROWS = 256
_CHUNK_TOKENS = (512, 256, 128)
_LANES = 128


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The sizes of one call.

    Attributes:
        tile: queries of a tile, a power of two.
        fetch_blocks: blocks of a chunk; a chunk is a multiple of 128 tokens.
    """

    tile: int
    fetch_blocks: int


def choose(layout: KVLayout, num_heads: int, device_kind: str, folder: Path = sizing.TUNED) -> ChunkSizes:
    """Return measured sizes of this device kind and shape, or the rule's.

    Raises:
        InternalError: an invalid entry.
    """
    entry = sizing.measured(layout, num_heads, is_decode=False, device_kind=device_kind, folder=folder)
    if entry is None:
        return rule(layout, num_heads)
    sizes = ChunkSizes(entry["tile"], entry["fetch_blocks"])
    where = f"tuned sizes of {device_kind} for {num_heads}/{layout.num_kv_heads} heads of {layout.head_dim}"
    if sizes.tile not in _TILES:
        raise InternalError(f"{where}: tile {sizes.tile} is not one of {', '.join(map(str, _TILES))}")
    tokens = sizes.fetch_blocks * layout.block_size
    if tokens < 1 or tokens % _LANES:
        raise InternalError(
            f"{where}: fetch_blocks {sizes.fetch_blocks} are {tokens} tokens, not a multiple of {_LANES}"
        )
    if (need := vmem_bytes(sizes, layout, num_heads)) > VMEM_BUDGET_BYTES:
        raise InternalError(f"{where}: require {_mib(need)} of vector memory; the limit is {_mib(VMEM_BUDGET_BYTES)}")
    return sizes


def refusal(layout: KVLayout, num_heads: int) -> str | None:
    """Return why there is not enough vector memory for any sizes, or None."""
    need = vmem_bytes(rule(layout, num_heads), layout, num_heads)
    if need <= VMEM_BUDGET_BYTES:
        return None
    return (
        f"{layout.num_kv_heads} key/value heads and {num_heads} query heads of {layout.head_dim} per chip require "
        f"{_mib(need)} of vector memory; the limit is {_mib(VMEM_BUDGET_BYTES)}: split the heads over more chips"
    )


def rule(layout: KVLayout, num_heads: int) -> ChunkSizes:
    """Return the largest tile and the longest chunk that the vector memory holds, with priority for the tile.

    If none fits, return the smallest sizes (see `refusal`).
    """
    group = num_heads // layout.num_kv_heads
    tiles = [tile for tile in _TILES if tile * group <= _TILE_ROWS] or [_TILES[-1]]
    chunks = [tokens for tokens in _CHUNK_TOKENS if tokens % layout.block_size == 0]
    options = [ChunkSizes(tile, tokens // layout.block_size) for tile in tiles for tokens in chunks]
    fitting = (sizes for sizes in options if vmem_bytes(sizes, layout, num_heads) <= VMEM_BUDGET_BYTES)
    return next(fitting, options[-1])


def get_part(group: int) -> int:
    """Return the queries of one matmul: with their group of heads at most 256 rows, but at least 16 queries."""
    return max(_TILES[-1], 1 << (_PART_ROWS // group).bit_length() - 1 if group <= _PART_ROWS else 0)


def num_buffers(num_kv_heads: int) -> int:
    """Return the number of unpacked chunks: values are multiplied two turns after a chunk's last scores."""
    return 2 if num_kv_heads > ITEMS_A_TURN else 3


def vmem_bytes(sizes: ChunkSizes, layout: KVLayout, num_heads: int) -> int:
    """Return the vector memory of a call with 32-bit queries, on a core with all heads; a share of them needs less."""
    group = num_heads // layout.num_kv_heads
    tokens, part = sizes.fetch_blocks * layout.block_size, get_part(group)
    keys, values = sizing.key_lanes(layout), sizing.value_lanes(layout)
    rows, operand = group * part, 4 if layout.dtype.itemsize == 4 else 2
    slots = max(1, sizes.tile // part) * layout.num_kv_heads + 1
    chunks = 2 * sizes.fetch_blocks * layout.bytes_per_block // layout.num_layers
    rows_apart = 1 if layout.value_dim is not None else layout.token_shape[0] * layout.pack
    taken_apart = num_buffers(layout.num_kv_heads) * rows_apart * tokens * keys * operand
    queries_and_outputs = 2 * sizes.tile * num_heads * (keys + values) * 4
    lse = 2 * sizes.tile * -(-num_heads // _LANES) * _LANES * 4
    running = slots * rows * (2 * _LANES + values) * 4
    items = ITEMS_A_TURN * rows * (tokens * (4 + operand) + _LANES * 4)
    return chunks + taken_apart + queries_and_outputs + lse + running + items


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
