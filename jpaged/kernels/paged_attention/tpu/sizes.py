"""How the TPU kernel cuts its work, and what the memories next to the core allow.

    vector memory   two chunks of blocks, queries and outputs of a tile (twice: the next one is on its way), the
                    running maxima, sums and outputs, and the scores and values of one head
    scalar memory   the block tables, the lists of segments, the slots of new tokens; each rounded up to 128 words

Sizes come from `tuned/<device kind>.json` where somebody has measured that kind (tuned/README.md says how),
and from a rule otherwise.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.errors import InternalError
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import Queries

VMEM_LIMIT_BYTES = 32 * 2**20
"""What the compiler may use; of the generations since v5e the smallest has 64 MiB."""
VMEM_BUDGET_BYTES = 24 * 2**20
"""What is planned; the rest is the compiler's, for values that find no register."""
SMEM_BYTES = 2**20
"""Scalar memory of every generation since v5e, as their compiler says."""
SMEM_BUDGET_BYTES = SMEM_BYTES - 8 * 2**10
"""What is planned; the rest is the compiler's, which took 1.1 KiB: registers without room, semaphores."""

NUM_SEGMENT_FIELDS = 7
"""Lists that tell a segment (`Segments` in kernel.py)."""
BLOCK_SIZES = (8, 16, 32, 64, 128)
_TILES = (128, 64, 32, 16)
_CHUNK_BYTES = 2**20
_MAX_CHUNK_TOKENS = 512
_TILE_ROWS = 256
_LANES = 128
TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one call.

    Attributes:
        tile: queries of a tile, a power of two; 1 for decodes.
        fetch_blocks: blocks of a chunk; a chunk is a multiple of 128 tokens.
    """

    tile: int
    fetch_blocks: int


def choose(layout: KVLayout, num_heads: int, *, is_decode: bool, device_kind: str, folder: Path = TUNED) -> Sizes:
    """Measured sizes of this device kind and shape, or the rule's.

    Raises:
        InternalError: an entry that cannot be used.
    """
    for entry in _entries(folder / f"{device_kind.lower().replace(' ', '-')}.json"):
        if entry["match"] == _key(layout, num_heads, is_decode=is_decode):
            sizes = Sizes(tile=1 if is_decode else entry["tile"], fetch_blocks=entry["fetch_blocks"])
            _check(sizes, layout, num_heads, device_kind)
            return sizes
    return rule(layout, num_heads, is_decode=is_decode)


def rule(layout: KVLayout, num_heads: int, *, is_decode: bool) -> Sizes:
    """Chunks of about 1 MiB, so that a DMA's latency is a small part of it, and products of 256 rows.

    Halves both until the vector memory is enough; the last sizes come back even where it is not (see `refusal`).
    """
    group = num_heads // layout.num_kv_heads
    tiles = [1] if is_decode else [t for t in _TILES if t * group <= _TILE_ROWS] or [_TILES[-1]]
    token_bytes = layout.bytes_per_block // (layout.num_layers * layout.block_size)
    wanted = max(_LANES, min(_MAX_CHUNK_TOKENS, _CHUNK_BYTES // token_bytes // _LANES * _LANES))
    chunks = [tokens for tokens in (512, 384, 256, 128) if tokens <= wanted]
    options = [Sizes(tile, tokens // layout.block_size) for tile in tiles for tokens in chunks]
    fitting = (sizes for sizes in options if vmem_bytes(sizes, layout, num_heads) <= VMEM_BUDGET_BYTES)
    return next(fitting, options[-1])


def rows_of(sizes: Sizes, layout: KVLayout, num_heads: int) -> int:
    """Rows of one matrix product."""
    group = num_heads // layout.num_kv_heads
    return _up(group, 16) if sizes.tile == 1 else group * sizes.tile


def vmem_bytes(sizes: Sizes, layout: KVLayout, num_heads: int) -> int:
    """Vector memory of a call with queries of 32 bits."""
    heads, rows, lanes = layout.num_kv_heads, rows_of(sizes, layout, num_heads), layout.lanes
    tokens = sizes.fetch_blocks * layout.block_size
    chunks = 2 * sizes.fetch_blocks * layout.bytes_per_block // layout.num_layers
    queries_and_outputs = 2 * 2 * heads * rows * lanes * 4
    lse = 2 * _up(heads, 8) * _up(rows, _LANES) * 4
    running = heads * rows * (2 * _LANES + lanes) * 4
    one_head = 4 * rows * tokens * 4 + 4 * tokens * layout.pack * lanes * 4
    return chunks + queries_and_outputs + lse + running + one_head


def refusal(layout: KVLayout, num_heads: int) -> str | None:
    """Why there is not enough vector memory for any sizes, or None."""
    for is_decode in (True, False):
        sizes = rule(layout, num_heads, is_decode=is_decode)
        if (need := vmem_bytes(sizes, layout, num_heads)) > VMEM_BUDGET_BYTES:
            return (
                f"{layout.num_kv_heads} key/value heads and {num_heads} query heads of {layout.head_dim} a chip need "
                f"{_mib(need)} of vector memory; the limit is {_mib(VMEM_BUDGET_BYTES)}: split the heads over more "
                f"chips"
            )
    return None


def tables_refusal(queries: Queries, num_kv_heads: int) -> str | None:
    """Why block tables of this size cannot be used in steps of so many tokens, or None."""
    if (need := scalar_bytes(queries, num_kv_heads)) <= SMEM_BUDGET_BYTES:
        return None
    return (
        f"block tables of {queries.num_rows} rows x {queries.table_width} blocks, in steps of {queries.num_tokens} "
        f"tokens, need {-(-need // 1024)} KiB of scalar memory; the limit is {SMEM_BUDGET_BYTES // 1024} KiB"
    )


def scalar_bytes(queries: Queries, num_kv_heads: int) -> int:
    """Scalar memory of the hungrier of a step's two calls."""
    num_rows, num_tokens = queries.num_rows, queries.num_tokens
    decodes = NUM_SEGMENT_FIELDS * _words(min(num_rows, num_tokens)) + 2 * _words(num_tokens)
    num_chunks = -(-num_tokens // _TILES[-1]) + min(num_rows, num_tokens // 2)
    always = _words(num_rows * queries.table_width) + _words(2 * num_kv_heads) + 3 * _words(1)
    return 4 * (always + max(decodes, NUM_SEGMENT_FIELDS * _words(num_chunks)))


@functools.cache
def _entries(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text())["entries"]) if path.exists() else ()


def _key(layout: KVLayout, num_heads: int, *, is_decode: bool) -> dict[str, object]:
    return {
        "kind": "decode" if is_decode else "chunks",
        "num_heads": num_heads,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "block_size": layout.block_size,
        "kv_dtype": layout.dtype.name,
    }


def _check(sizes: Sizes, layout: KVLayout, num_heads: int, device_kind: str) -> None:
    where = f"tuned sizes of {device_kind} for {num_heads}/{layout.num_kv_heads} heads of {layout.head_dim}"
    if sizes.tile != 1 and sizes.tile not in _TILES:
        raise InternalError(f"{where}: tile {sizes.tile} is none of {', '.join(map(str, _TILES))}")
    tokens = sizes.fetch_blocks * layout.block_size
    if tokens < 1 or tokens % _LANES:
        raise InternalError(f"{where}: fetch_blocks {sizes.fetch_blocks} are {tokens} tokens, no multiple of {_LANES}")
    if (need := vmem_bytes(sizes, layout, num_heads)) > VMEM_BUDGET_BYTES:
        raise InternalError(f"{where}: need {_mib(need)} of vector memory; the limit is {_mib(VMEM_BUDGET_BYTES)}")


def _words(n: int) -> int:
    """The words of scalar memory that a list of n numbers of 32 bits takes."""
    return _up(n, _LANES)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
