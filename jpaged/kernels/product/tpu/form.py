"""Matrices that the kernel supports, and the sizes of the blocks that it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jpaged.kernels.matrix_format import VALUE_DTYPES
from jpaged.kernels.product.quantised import QuantisedMatrix

LANES = 128
_INT8, _MXFP4 = VALUE_DTYPES["int8"], VALUE_DTYPES["mxfp4"]
_NUM_SUBLANES = 8  # of 32 bits
_WHOLE_TILES = 64  # rows of int4: the maximum rows of a tile of any type
_MOST_ROWS = 512
_BLOCK_NUMBERS = 1 << 20
_CHUNK_DEPTH = 1024


@dataclass(frozen=True, slots=True)
class GroupedForm:
    """Sizes and form of a matmul.

    Attributes:
        tile_rows: rows of a tile, all of one matrix.
        block_depth: depth of a block; it divides the depth.
        chunk_depth: depth of a block that is unpacked at a time; it divides `block_depth`.
        block_columns: columns of a block; the last block may extend beyond the matrix.
        group_size: numbers that share a scale.
        scales_products: each group's matmul is scaled; otherwise weights are dequantized, and multiplied at once.
        is_mxfp4: the numbers are codes of float4_e2m1fn.
        is_interpreted: for tests.
    """

    tile_rows: int
    block_depth: int
    chunk_depth: int
    block_columns: int
    group_size: int
    scales_products: bool
    is_mxfp4: bool
    is_interpreted: bool = False


def unsupported_reason(matrix: QuantisedMatrix) -> str | None:
    """Return why the kernel does not support a matrix, or those of several parts or experts; None if it does."""
    columns, size = matrix.shape[-1], matrix.group_size
    if matrix.is_embedding or matrix.axis < -3:
        return "its columns are not adjacent"
    if matrix.num_groups == 1 and matrix.values.dtype != _MXFP4:
        return "XLA multiplies columns with one scale directly"
    if matrix.group_ids is not None:
        return "its groups are listed"
    if matrix.axis == -3 and columns % LANES:
        return f"{columns} columns of a part are not a multiple of {LANES}, so they are not adjacent"
    if size % _NUM_SUBLANES or matrix.depth % _WHOLE_TILES:
        return f"groups of {size} and a depth of {matrix.depth} are not whole tiles"
    return None


def choose_form(matrix: QuantisedMatrix, num_rows: int, dtype: np.dtype) -> GroupedForm:
    """Return the blocks for rows of a type and number that share a matrix.

    Matmuls of groups are scaled if that is less work than scaling the weights: if there are fewer rows than numbers in
    a group, or if rows are integers, whose matmuls are exact.
    """
    size = matrix.group_size
    tile_rows = min(_rounded_up(num_rows, 32 if dtype == _INT8 else 16), _MOST_ROWS)
    block_depth = _largest_part(matrix.depth, math.lcm(size, LANES), 2 * _CHUNK_DEPTH, at_least=512)
    chunk_depth = _largest_part(block_depth, math.lcm(size, _WHOLE_TILES), _CHUNK_DEPTH)
    columns = matrix.shape[-1]
    block_columns = max(LANES, min(1024, _BLOCK_NUMBERS // block_depth // LANES * LANES))
    return GroupedForm(
        tile_rows,
        block_depth,
        chunk_depth,
        min(block_columns, columns),
        size,
        scales_by_group(matrix) and (tile_rows <= size or dtype == _INT8),
        is_mxfp4=matrix.values.dtype == _MXFP4,
    )


def scales_by_group(matrix: QuantisedMatrix) -> bool:
    """Return True if groups are deep enough to be multiplied separately."""
    return matrix.group_size % LANES == 0 and matrix.values.dtype != _MXFP4


def _largest_part(depth: int, unit: int, most: int, at_least: int = 0) -> int:
    """Return the largest divisor of a depth that is a multiple of the unit and within bounds; else the depth."""
    parts = (part for part in range(unit, min(depth, most) + 1, unit) if depth % part == 0)
    return max((part for part in parts if part >= at_least), default=depth)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
