"""Common parts of both TPU kernels' sizes, and the limits of the scalar memory of a core.

    scalar memory   the lists of segments and tiles, the slots of new tokens; each rounded up to 128 words; and pages of
                    the block tables, which are stored outside the core (tables.py)

Sizes come from `tuned/<device kind>.json` if that kind has been measured (see tuned/README.md), and from a rule
otherwise (sizes.py of each kernel).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import Queries

SMEM_BYTES = 2**20
"""Scalar memory of every generation since v5e, according to their compiler."""
SMEM_BUDGET_BYTES = SMEM_BYTES - 8 * 2**10
"""Planned use; the rest is left to the compiler, which took 1.1 KiB: register spills, semaphores."""

PAGE_ALIGNMENT = 128
"""Ids of a block table: a page of it begins and ends at a multiple of this."""
PAGES_AHEAD = 8
"""Pages in flight: one per row if rows are short."""
PAGES_BUDGET_BYTES = 32 * 2**10
"""Maximum bytes of the pages of block tables."""

NUM_SEGMENT_FIELDS = 7
"""Lists that describe segments (`Segments` in the plans of both kernels)."""
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_MIN_TILE = 16
_MOST_CORES = 2
_LANES = 128
TUNED = Path(__file__).parent / "tuned"


def key_lanes(layout: KVLayout) -> int:
    """Return the lanes that a key or a query head fills: for a latent, those of all its pieces."""
    return layout.lanes if layout.value_dim is None else _up(layout.head_dim, _LANES)


def value_lanes(layout: KVLayout) -> int:
    """Return the lanes that a value fills, and a query head's output."""
    return layout.lanes if layout.value_dim is None else _up(layout.value_dim, _LANES)


def measured(
    layout: KVLayout, num_heads: int, *, is_decode: bool, device_kind: str, folder: Path = TUNED
) -> dict[str, Any] | None:
    """Return the entry of this device kind and shape, or None."""
    entries = _entries(folder / f"{device_kind.lower().replace(' ', '-')}.json")
    key = _key(layout, num_heads, is_decode=is_decode)
    return next((entry for entry in entries if entry["match"] == key), None)


def lists_refusal(queries: Queries, num_kv_heads: int, num_tiles: int) -> str | None:
    """Return why steps of this many rows and tokens are not supported, or None."""
    if (need := scalar_bytes(queries, num_kv_heads, num_tiles)) <= SMEM_BUDGET_BYTES:
        return None
    return (
        f"the step lists of {queries.num_rows} rows and {queries.num_tokens} tokens require {-(-need // 1024)} KiB of "
        f"scalar memory; the limit is {SMEM_BUDGET_BYTES // 1024} KiB"
    )


def scalar_bytes(queries: Queries, num_kv_heads: int, num_tiles: int) -> int:
    """Return the scalar memory of the larger of a step's two calls.

    Args:
        num_tiles: tiles of tokens of the call for rows of one query.
    """
    num_rows, num_tokens = queries.num_rows, queries.num_tokens
    decodes = NUM_SEGMENT_FIELDS * _words(min(num_rows, num_tokens)) + 2 * _words(num_tokens)
    decodes += 2 * _words(_MOST_CORES * (num_tiles + 1)) + _words(_MOST_CORES)
    num_chunks = -(-num_tokens // _MIN_TILE) + min(num_rows, num_tokens // 2)
    always = PAGES_BUDGET_BYTES // 4 + _words(2 * num_kv_heads) + 3 * _words(1)
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
        **({} if layout.value_dim is None else {"value_dim": layout.value_dim}),
    }


def _words(n: int) -> int:
    """Return the words of scalar memory that a list of n 32-bit numbers takes."""
    return _up(n, _LANES)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
