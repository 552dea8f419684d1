"""Compile-time form of a matmul: the numbers of a matrix and of rows, and sizes of the work.

Rows are sorted by matrix, in tiles of one matrix each.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.matmul.quantized import QuantizedMatrix
from jpaged.kernels.matrix_format import NUM_BITS, VALUE_DTYPES, Activations, Values

if TYPE_CHECKING:
    from jaxtyping import Array, Int

_KINDS: dict[np.dtype, Values] = {dtype: kind for kind, dtype in VALUE_DTYPES.items()}
_MIN_ROWS, _MAX_ROWS, _MAX_DENSE_ROWS = 16, 128, 64
"""The smallest matmul of a tensor core has 16 rows."""
_MIN_DEPTH = 32
"""Depth of the smallest matmul of a tensor core with 8-bit numbers."""
_LEAST_OFFSET, _MOST_OFFSET = 1 << 31, 1 << 32
_STAGE_BYTES = 32_768
"""Maximum bytes of rows and numbers of a chunk: three fit the shared memory of any GPU since Ampere."""
_MAX_CHUNK = 128
_PROGRAMS = 264
"""Two for each processor of an H200."""
_LEAST_CHUNKS = 4
_FLOAT16 = np.dtype(jnp.bfloat16)
_FP8_ROWS = ("fp8", "fp8-groups")


@dataclass(frozen=True, slots=True)
class ProductForm:
    """The static part of a matmul; hashable.

    Attributes:
        kind: of the matrix's numbers; None is the rows' own type.
        depth: K.
        columns: N.
        group_size: numbers of a column that share a scale; equal to the depth if all do.
        has_zeros: columns have zero points.
        rows_have_scales: rows were rounded.
        rows_have_groups: each row has a scale for each group.
        rows_are_fp8: rows come as 8-bit floats, or as their bits if the tensor core does not take them.
        multiplied: the type that rows and numbers are multiplied in.
        depth_is_minor: words are `[X, N, K]`, the tensor core's order for 8 bits.
        tile_rows: rows of a program, a power of two.
        tile_words: words of a matrix's row in a program, a power of two; a word is a number, or a byte of two.
        chunk: depth of a turn of the loop, a power of two.
        num_splits: parts of the depth, whose sums the caller adds.
        are_pairs: a word has two 8-bit numbers, because there are more than can be counted individually.
        is_interpreted: run on a CPU, in Pallas' interpreter.
    """

    kind: Values | None
    depth: int
    columns: int
    group_size: int
    has_zeros: bool
    rows_have_scales: bool
    rows_have_groups: bool
    rows_are_fp8: bool
    multiplied: np.dtype
    depth_is_minor: bool
    tile_rows: int
    tile_words: int
    chunk: int
    num_splits: int = 1
    are_pairs: bool = False
    is_interpreted: bool = False

    @property
    def is_quantized(self) -> bool:
        """True if numbers have scales."""
        return self.kind is not None

    @property
    def has_groups(self) -> bool:
        """True if a column has several scales."""
        return self.group_size < self.depth

    @property
    def lanes(self) -> int:
        """Numbers of a word."""
        return 2 if self.are_pairs else get_lanes(self.kind)

    @property
    def num_words(self) -> int:
        """Words of a matrix's row."""
        return self.columns // self.lanes

    @property
    def num_chunks(self) -> int:
        """Turns for the whole depth."""
        return -(-self.depth // self.chunk)

    @property
    def num_warps(self) -> int:
        """Number of warps whose registers hold the sums."""
        return 4 if self.tile_rows * self.tile_words * self.lanes <= 64 * 128 else 8

    @property
    def sum_dtype(self) -> np.dtype:
        """Type of the sums: those of integers are exact."""
        is_whole = np.issubdtype(self.multiplied, np.integer) and not self.has_groups
        return np.dtype(np.int32 if is_whole else np.float32)


def get_lanes(kind: Values | None) -> int:
    """Return the numbers of a word of a matrix."""
    return 2 if kind in ("int4", "mxfp4") else 1


def get_kind(matrix: QuantizedMatrix | jax.Array) -> Values | None:
    """Return the type of a matrix's numbers; None for an array."""
    return _KINDS[np.dtype(matrix.values.dtype)] if isinstance(matrix, QuantizedMatrix) else None


def lies_by_columns(matrix: QuantizedMatrix | jax.Array) -> bool:
    """Return True if GPUs store a column's numbers contiguously: if 8-bit matmuls use them.

    Tensor cores take 16 bits in any order, but 8 bits only with contiguous depth. Otherwise XLA's matmul would copy the
    matrix in every step.
    """
    if not isinstance(matrix, QuantizedMatrix) or matrix.activations is None or has_far_numbers(matrix):
        return False
    return get_kind(matrix) in ("int8", "fp8")


def has_far_numbers(matrix: QuantizedMatrix | jax.Array) -> bool:
    """Return True if 8-bit numbers have offsets that cannot be counted individually.

    Triton counts the elements before a number with 31 bits, and with 63 if an array has more than 4 GiB. In between,
    two numbers of a row form one word.
    """
    is_byte = isinstance(matrix, QuantizedMatrix) and get_lanes(get_kind(matrix)) == 1
    return is_byte and _LEAST_OFFSET < math.prod(matrix.shape) <= _MOST_OFFSET


def unsupported_reason(matrix: QuantizedMatrix | jax.Array) -> str | None:
    """Return why the kernel does not support a matrix `[K, *out]`, or several; None if it does."""
    if not isinstance(matrix, QuantizedMatrix):
        return None
    lanes = 2 if has_far_numbers(matrix) else get_lanes(get_kind(matrix))
    columns = math.prod(matrix.shape[matrix.ndim + matrix.axis + 1 :])
    if matrix.is_embedding:
        return "its columns are stored as rows"
    if matrix.group_ids is not None:
        return "groups are listed"
    if matrix.zeros is not None and matrix.zeros.dtype != np.int8:
        return "zero points are not integers"
    if columns % lanes:
        return f"{columns} columns are odd, but two share a word"
    if matrix.num_groups > 1 and matrix.group_size % _MIN_DEPTH:
        return f"groups of {matrix.group_size} numbers are not a multiple of {_MIN_DEPTH}"
    return None


def choose_form(
    matrices: QuantizedMatrix | jax.Array, num_rows: int, dtype: np.dtype, *, are_rounded: bool, has_fp8: bool
) -> ProductForm:
    """Return the form of a matmul with matrices `[X, K, *out]`, for rows of the model's type, spread evenly over them.

    If rows and numbers are both integers, or both have 8 bits, they are multiplied as they are. Other 8-bit or 4-bit
    numbers are multiplied in the model's type, which represents all of them.

    Args:
        are_rounded: the rows are rounded as the matrix requires.
        has_fp8: the device's tensor core multiplies 8-bit floats.
    """
    (num_matrices, depth, *out), kind = matrices.shape, get_kind(matrices)
    columns, group_size, activations, has_zeros = math.prod(out), depth, None, False
    are_pairs, multiplied = has_far_numbers(matrices), np.dtype(dtype)
    lanes = 2 if are_pairs else get_lanes(kind)
    if isinstance(matrices, QuantizedMatrix):
        group_size, has_zeros = matrices.group_size, matrices.zeros is not None
        activations = matrices.activations if are_rounded else None
        multiplied = _multiplied(matrices, activations, multiplied, has_fp8=has_fp8 and not are_pairs)
    even = -(-num_rows // num_matrices)
    most = _MAX_DENSE_ROWS if num_matrices == 1 else _MAX_ROWS
    tile_rows = min(max(_MIN_ROWS, 1 << (even - 1).bit_length()), most)
    width = 64 if kind is None and tile_rows < _MAX_ROWS else 128
    tile_words = min(width // lanes, max(_MIN_ROWS, 1 << (columns // lanes - 1).bit_length()))
    chunk = _MAX_CHUNK
    while chunk > _MIN_DEPTH and (tile_rows + tile_words * lanes) * chunk * multiplied.itemsize > _STAGE_BYTES:
        chunk //= 2
    if group_size < depth:
        chunk = math.gcd(chunk, group_size)
    chunk = min(chunk, max(_MIN_DEPTH, 1 << (depth - 1).bit_length()))
    rows = activations is not None, activations == "fp8-groups" and group_size < depth, activations in _FP8_ROWS
    return ProductForm(
        kind,
        depth,
        columns,
        group_size,
        has_zeros,
        *rows,
        multiplied,
        lies_by_columns(matrices),
        tile_rows,
        tile_words,
        chunk,
        are_pairs=are_pairs,
    )


def split_depth(form: ProductForm, num_tiles: int, num_rows: int) -> ProductForm:
    """Split the depth of a form into parts, if too few programs would read the matrix otherwise.

    Sums of all parts are written and read once more: together they must not exceed half of the matrix.
    """
    programs = num_tiles * -(-form.num_words // form.tile_words)
    bits = NUM_BITS[form.kind] if form.kind else 8 * form.multiplied.itemsize
    most = min(_PROGRAMS // programs, form.num_chunks // _LEAST_CHUNKS, form.depth * bits // (128 * num_rows))
    return dataclasses.replace(form, num_splits=max(1, most))


def _multiplied(
    matrices: QuantizedMatrix, activations: Activations | None, dtype: np.dtype, *, has_fp8: bool
) -> np.dtype:
    kind = get_kind(matrices)
    if activations is None:
        return dtype
    if activations == "int8":
        # The difference of two 8-bit numbers has 9 bits, of 4-bit numbers 5.
        is_whole = kind == "int4" or (kind == "int8" and matrices.zeros is None)
        return np.dtype(np.int8) if is_whole else _FLOAT16
    return VALUE_DTYPES["fp8"] if kind == "fp8" and has_fp8 else _FLOAT16


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
