"""Rows sorted by matrix, in tiles of one matrix each."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class TileField(enum.IntEnum):
    """Columns of a list of tiles; an unused tile has no rows."""

    MATRIX = 0
    FIRST_ROW = 1
    NUM_ROWS = 2


def max_tiles(num_rows: int, num_matrices: int, tile_rows: int) -> int:
    """Return the maximum number of tiles for rows: only a matrix's last tile is partly filled."""
    return max(1, min(num_rows, (num_rows + min(num_rows, num_matrices) * (tile_rows - 1)) // tile_rows))


def list_tiles(counts_x: Int[Array, "X"], num_rows: int, tile_rows: int) -> Int[Array, "I 3"]:
    """Return the tiles of rows sorted by matrix; those of a matrix are adjacent.

    Args:
        counts_x: int32, rows of each matrix, together at most `num_rows`.
        num_rows: maximum number of rows.
        tile_rows: of a tile.
    """
    ends_x, tiles_x = jnp.cumsum(counts_x), -(-counts_x // tile_rows)
    tile_ends_x = jnp.cumsum(tiles_x)
    numbers_i = jnp.arange(max_tiles(num_rows, len(counts_x), tile_rows), dtype=jnp.int32)
    # A search would launch a loop of kernels.
    matrices_i = jnp.sum(tile_ends_x[None, :] <= numbers_i[:, None], axis=1, dtype=jnp.int32)
    is_used = matrices_i < len(counts_x)
    matrices_i = jnp.minimum(matrices_i, len(counts_x) - 1)
    skipped_i = (numbers_i - (tile_ends_x - tiles_x)[matrices_i]) * tile_rows
    first_i = (ends_x - counts_x)[matrices_i] + skipped_i
    rows_i = jnp.where(is_used, jnp.minimum(counts_x[matrices_i] - skipped_i, tile_rows), 0)
    return jnp.stack([matrices_i, first_i, rows_i], axis=1).astype(jnp.int32)
