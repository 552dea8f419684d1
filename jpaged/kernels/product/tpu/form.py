"""Which matrices the kernel takes, and in which blocks it reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jpaged.kernels.matrix_format import VALUE_DTYPES
from jpaged.kernels.product.quantised import QuantisedMatrix

LANES = 128
_INT8, _MXFP4 = VALUE_DTYPES["int8"], VALUE_DTYPES["mxfp4"]
_NUM_SUBLANES = 8  # of 32 bits
_WHOLE_TILES = 64  # rows of int4: as many as a tile of any type has
_MOST_ROWS = 512
_BLOCK_NUMBERS = 1 << 20
_CHUNK_DEPTH = 1024


@dataclass(frozen=True, slots=True)
class GroupedForm:
    """How a product is run.

    Attributes:
        tile_rows: rows of a tile, all of one matrix.
        block_depth: of a column that a block has; it divides the depth.
        chunk_depth: of a block that are unpacked at a time; it divides `block_depth`.
        block_columns: of a block; the last may reach beyond the matrix.
        group_size: numbers that share a scale.
        scales_products: the product of each group is scaled; else weights are made, and multiplied with at once.
        is_mxfp4: the numbers are codes of float4_e2m1fn.
        is_interpreted: as a test runs it.
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
    """Why the kernel does not take a matrix, or those of several parts or experts; None if it does."""
    columns, size = matrix.shape[-1], matrix.group_size
    if matrix.is_embedding or matrix.axis < -3:
        return "rows are not multiplied with columns that lie beside each other"
    if matrix.num_groups == 1 and matrix.values.dtype != _MXFP4:
        return "XLA multiplies by columns with one scale as they lie"
    if matrix.group_ids is not None:
        return "its groups are listed"
    if matrix.axis == -3 and columns % LANES:
        return f"{columns} columns of a part are no multiple of {LANES}, so that they do not lie beside each other"
    if size % _NUM_SUBLANES or matrix.depth % _WHOLE_TILES:
        return f"groups of {size} and a depth of {matrix.depth} are no whole tiles"
    return None


def choose_form(matrix: QuantisedMatrix, num_rows: int, dtype: np.dtype) -> GroupedForm:
    """The blocks for rows of a type and number that share a matrix.

    Products of groups are scaled where that is less work than to scale the weights: where there are fewer rows than
    numbers in a group, and where rows are whole numbers, whose products are exact.
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
    """Whether groups are deep enough to be multiplied one by one."""
    return matrix.group_size % LANES == 0 and matrix.values.dtype != _MXFP4


def _largest_part(depth: int, unit: int, most: int, at_least: int = 0) -> int:
    """The largest part of a depth that divides it, is of whole units, and is in bounds; else all of it."""
    parts = (part for part in range(unit, min(depth, most) + 1, unit) if depth % part == 0)
    return max((part for part in parts if part >= at_least), default=depth)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
