"""The kernel for TPUs: rows times matrices whose numbers share scales in groups.

The kernel multiplies a tile of rows with a matrix, which is dequantized between memory and the matrix unit.

grid (tiles, blocks of columns, blocks of the depth)

        matrix of the tile [K, N]                       scales [G, N]: those of a block of columns, all groups
         ┌────┬────┬────┐
depth 0  │ *  │    │    │    * a block is fetched while the previous one is multiplied; it is unpacked chunk by
depth 1  │    │    │    │      chunk. After the last tile with rows nothing more is fetched.
         └────┴────┴────┘

Calls take rows of several matrices, or rows of one. `GroupedForm` has the sizes of the blocks of a supported matrix.
Only functions that trace import Pallas: it takes a third as long as jax, and every model imports this module.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.matmul.quantized import QuantizedMatrix, rows_on_device
from jpaged.kernels.matmul.triton.form import TileField, list_tiles
from jpaged.kernels.matrix_format import VALUE_DTYPES

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

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


def unsupported_reason(matrix: QuantizedMatrix) -> str | None:
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


def choose_form(matrix: QuantizedMatrix, num_rows: int, dtype: np.dtype) -> GroupedForm:
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


def scales_by_group(matrix: QuantizedMatrix) -> bool:
    """Return True if groups are deep enough to be multiplied separately."""
    return matrix.group_size % LANES == 0 and matrix.values.dtype != _MXFP4


def _largest_part(depth: int, unit: int, most: int, at_least: int = 0) -> int:
    """Return the largest divisor of a depth that is a multiple of the unit and within bounds; else the depth."""
    parts = (part for part in range(unit, min(depth, most) + 1, unit) if depth % part == 0)
    return max((part for part in parts if part >= at_least), default=depth)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_VMEM_BYTES = 48 << 20


def run(
    tiles: tuple[jax.Array, jax.Array],
    x_pk: jax.Array,
    arrays: tuple[jax.Array, jax.Array, jax.Array | None],
    sums_pg: jax.Array | None,
    form: GroupedForm,
) -> jax.Array:
    """Multiply tiles of rows, each with its matrix: float32 `[P, N]`; unused tiles are undefined.

    Args:
        tiles: int32 `[I]`: the matrix of each tile, the used ones first; int32 `[1]`: their number.
        x_pk: the rows, `tile_rows` of each tile: `[I * tile_rows, K]`, or one tile that all share.
        arrays: values `[M, K, N]`, scales `[M, G, N]` and zero points of the same shape, or None.
        sums_pg: if there are zero points and matmuls of groups are scaled, the sum of each row's group, float32 `[P,
            G]`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    matrices_i, num_used = tiles
    values, scales, zeros = arrays
    depth, columns = values.shape[1:]
    grid = (len(matrices_i), pl.cdiv(columns, form.block_columns), depth // form.block_depth)
    shared = len(x_pk) == form.tile_rows

    def of_rows(width: int, last: Any) -> pl.BlockSpec:
        return pl.BlockSpec((form.tile_rows, width), lambda i, n, k, *_: (0 if shared else i, last(k)))

    def of_matrix(i: Any, n: Any, k: Any, matrices: Any, used: Any) -> tuple[Any, Any, Any]:
        is_used = i < used[0]
        return matrices[i], jnp.where(is_used, k, grid[2] - 1), jnp.where(is_used, n, grid[1] - 1)

    def of_groups(i: Any, n: Any, k: Any, matrices: Any, used: Any) -> tuple[Any, Any, Any]:
        matrix, _, block = of_matrix(i, n, k, matrices, used)
        return matrix, 0, block

    num_groups = scales.shape[1]
    group_spec = pl.BlockSpec((1, num_groups, form.block_columns), of_groups)
    operands = [x_pk, values, scales]
    specs = [
        of_rows(form.block_depth, lambda k: k),
        pl.BlockSpec((1, form.block_depth, form.block_columns), of_matrix),
        group_spec,
    ]
    if zeros is not None:
        operands.append(zeros)
        specs.append(group_spec)
    if sums_pg is not None:
        operands.append(sums_pg)
        specs.append(of_rows(num_groups, lambda k: 0))
    num_products = grid[0] * form.tile_rows * depth * columns
    y_pn: jax.Array = pl.pallas_call(
        functools.partial(_kernel, form=form, has_zeros=zeros is not None, has_sums=sums_pg is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=specs,
            out_specs=pl.BlockSpec((form.tile_rows, form.block_columns), lambda i, n, k, *_: (i, n)),
            scratch_shapes=_scratch(form, x_pk.dtype, 0 if zeros is None else num_groups),
        ),
        out_shape=jax.ShapeDtypeStruct((grid[0] * form.tile_rows, columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_products,
            transcendentals=0,
            bytes_accessed=grid[0] * (values[0].size * jax.dtypes.itemsize_bits(values.dtype) // 8 + scales[0].size * 4)
            + x_pk.size * 2,
        ),
        interpret=form.is_interpreted,
    )(matrices_i, num_used, *operands)
    return y_pn


def _scratch(form: GroupedForm, dtype: np.dtype, num_zeros: int) -> tuple[Any, ...]:
    """Return scratch memory for the weights of a block, and for the zero points of the columns."""
    from jax.experimental.pallas import tpu as pltpu

    if form.scales_products:
        return ()
    weights = pltpu.VMEM((form.block_depth, form.block_columns), dtype)
    return (weights, pltpu.VMEM((num_zeros, form.block_columns), jnp.float32)) if num_zeros else (weights,)


def _kernel(
    matrices_ref: Any,
    used_ref: Any,
    x_ref: Any,
    values_ref: Any,
    scales_ref: Any,
    *others: Any,
    form: GroupedForm,
    has_zeros: bool,
    has_sums: bool,
) -> None:
    from jax.experimental import pallas as pl

    del matrices_ref
    refs = list(others)
    zeros_ref = refs.pop(0) if has_zeros else None
    sums_ref = refs.pop(0) if has_sums else None
    y_ref, *scratch = refs
    k, size = pl.program_id(2), form.group_size
    num_chunks, of_chunk = form.block_depth // form.chunk_depth, form.chunk_depth // size

    def group_number(chunk: Any, group: int) -> Any:
        return (k * num_chunks + chunk) * of_chunk + group

    def of_depth(chunk: Any) -> Any:
        return pl.ds(pl.multiple_of(chunk * form.chunk_depth, form.chunk_depth), form.chunk_depth)

    def begin() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)
        if zeros_ref is not None and sums_ref is None:
            scratch[1][...] = zeros_ref[0].astype(jnp.float32)  # Mosaic cannot read single rows of int8
        elif zeros_ref is not None and sums_ref is not None:
            y_ref[...] -= _dot(sums_ref[...], zeros_ref[0].astype(jnp.float32) * scales_ref[0])

    def add_products(chunk: Any) -> None:
        codes, x, y = values_ref[0, of_depth(chunk), :], x_ref[:, of_depth(chunk)], y_ref[...]
        for group in range(of_chunk):
            own = slice(group * size, (group + 1) * size)
            scales = scales_ref[0, pl.ds(group_number(chunk, group), 1), :]
            y += _dot(x[:, own], codes[own].astype(x.dtype)) * scales
        y_ref[...] = y

    def make_weights(chunk: Any) -> None:
        codes = values_ref[0, of_depth(chunk), :]
        numbers = of_mxfp4(get_codes(codes)) if form.is_mxfp4 else codes.astype(jnp.float32)
        groups = numbers.reshape(of_chunk, size, form.block_columns)
        weights = []
        for group in range(of_chunk):
            row = pl.ds(group_number(chunk, group), 1)
            shifted = groups[group] if zeros_ref is None else groups[group] - scratch[1][row, :]
            weights.append(shifted * scales_ref[0, row, :])
        made = jnp.stack(weights).reshape(form.chunk_depth, form.block_columns)
        scratch[0][of_depth(chunk), :] = made.astype(scratch[0].dtype)

    def multiply() -> None:
        pl.when(k == 0)(begin)
        for_chunk = add_products if form.scales_products else make_weights
        if num_chunks == 1:
            for_chunk(0)
        else:
            jax.lax.fori_loop(0, num_chunks, lambda chunk, _: for_chunk(chunk), None)
        if not form.scales_products:
            y_ref[...] += _dot(x_ref[...], scratch[0][...])

    pl.when(pl.program_id(0) < used_ref[0])(multiply)


def get_codes(values: jax.Array) -> jax.Array:
    """Return 4-bit numbers as int4: Mosaic converts float4_e2m1fn only on TPU7x, and XLA would copy all of them."""
    from jax.experimental.pallas import tpu as pltpu

    codes: jax.Array = pltpu.bitcast(values, jnp.int4)
    return codes


def of_mxfp4(codes: jax.Array) -> jax.Array:
    """Convert codes to float32: a sign, and the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 for the magnitudes 0 to 7."""
    wide = codes.astype(jnp.int32)
    magnitudes = (wide & 7).astype(jnp.float32)
    doubled = magnitudes + jnp.maximum(magnitudes - 4, 0) + 2 * jnp.maximum(magnitudes - 6, 0)
    return jnp.where(wide < 0, -0.5, 0.5) * doubled


def _dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jax.lax.dot(x, weights, preferred_element_type=jnp.int32).astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot(x, weights, precision=precision, preferred_element_type=jnp.float32)


_LEAST_TILE = 16
_MOST_TILE = 128
_INTEGERS = (VALUE_DTYPES["int8"], VALUE_DTYPES["int4"])


def multiply_one(
    x_tk: Float[Array, "T K"], matrices: QuantizedMatrix, first: Int[Array, ""], *, is_interpreted: bool = False
) -> Float[Array, "T *out"]:
    """Multiply rows with one of several quantized matrices `[M, K, *out]`, which is read in place, in float32.

    Args:
        matrices: supported according to `unsupported_reason`.
        first: index of the matrix.
    """
    rows, row_scales = _rounded(
        x_tk, matrices, matrices.input_scale if matrices.input_scale is None else matrices.input_scale[first]
    )
    form = dataclasses.replace(choose_form(matrices, len(rows), rows.dtype), is_interpreted=is_interpreted)
    num_rows, num_parts = len(rows), int(np.prod(matrices.shape[2:-1]))
    num_tiles = -(-num_rows // form.tile_rows)
    rows = jnp.pad(rows, ((0, num_tiles * form.tile_rows - num_rows), (0, 0)))
    ys = []
    for part in range(num_parts):
        ids = jnp.full((num_tiles,), first * num_parts + part, jnp.int32)
        y = _run((ids, jnp.full((1,), num_tiles, jnp.int32)), rows, matrices, form)[:num_rows]
        ys.append(y if row_scales is None else y * row_scales)
    return jnp.stack(ys, axis=1).reshape(num_rows, *matrices.shape[2:]) if num_parts > 1 else ys[0]


def multiply_sorted(
    x_pk: Float[Array, "P K"],
    counts_x: Int[Array, "X"],
    matrices_p: Int[Array, "P"],
    matrices: QuantizedMatrix,
    *,
    is_interpreted: bool = False,
) -> Float[Array, "P N"]:
    """Multiply rows sorted by matrix, each with its own `[X, K, N]`, in float32.

    Rows after those that are counted are undefined.

    Args:
        counts_x: rows of each matrix.
        matrices_p: the matrix of each row.
        matrices: supported according to `unsupported_reason`.
    """
    input_scale = None if matrices.input_scale is None else matrices.input_scale[matrices_p][:, None, None]
    rows, row_scales = _rounded(x_pk, matrices, input_scale)
    even = max(_LEAST_TILE, -(-len(rows) // len(counts_x)))
    form = choose_form(matrices, min(1 << (even - 1).bit_length(), _MOST_TILE), rows.dtype)
    form = dataclasses.replace(form, is_interpreted=is_interpreted)
    tiles = list_tiles(counts_x, len(rows), form.tile_rows)
    first_i, rows_i = tiles[:, TileField.FIRST_ROW], tiles[:, TileField.NUM_ROWS]
    num_used = jnp.sum(rows_i > 0, dtype=jnp.int32)[None]
    # After the last used tile the same block is requested again, which is already there.
    last = tiles[jnp.maximum(num_used[0] - 1, 0), TileField.MATRIX]
    matrices_i = jnp.where(rows_i > 0, tiles[:, TileField.MATRIX], last)
    inside = jnp.arange(form.tile_rows, dtype=jnp.int32)
    from_p = first_i[:, None] + inside
    places = jnp.where(inside < rows_i[:, None], from_p, len(rows)).reshape(-1)
    y = _run((matrices_i, num_used), rows[jnp.minimum(from_p, len(rows) - 1).reshape(-1)], matrices, form)
    where_p = jnp.zeros((len(rows),), jnp.int32).at[places].set(jnp.arange(len(places), dtype=jnp.int32), mode="drop")
    y_pn = y[where_p]
    return y_pn if row_scales is None else y_pn * row_scales


def _rounded(
    x: jax.Array, matrices: QuantizedMatrix, input_scale: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return rows as the kernel multiplies them, and the factors of the sums, `[P, 1]`.

    Integers stay integers if groups are multiplied separately; other rows have the model's type.
    """
    rows, scales = rows_on_device(x, dataclasses.replace(matrices, input_scale=input_scale))
    if scales is None:
        return rows, None
    if matrices.activations == "int8" and scales_by_group(matrices) and matrices.values.dtype in _INTEGERS:
        return rows, scales
    if scales.shape[-1] == 1:
        return rows.astype(matrices.dtype), scales
    spread = jnp.repeat(scales, x.shape[-1] // scales.shape[-1], axis=-1)
    return (rows.astype(jnp.float32) * spread).astype(matrices.dtype), None


def _run(
    tiles: tuple[jax.Array, jax.Array], rows: jax.Array, matrices: QuantizedMatrix, form: GroupedForm
) -> jax.Array:
    """Run the kernel on matrices in place: parts of columns count as separate matrices."""
    zeros = None if matrices.zeros is None else _of_parts(matrices.zeros)
    arrays = _of_parts(matrices.values), _of_parts(matrices.scales), zeros
    sums = None
    if zeros is not None and form.scales_products:
        sums = rows.astype(jnp.float32).reshape(len(rows), matrices.num_groups, -1).sum(-1)
    return run(tiles, rows, arrays, sums, form)


def _of_parts(array: jax.Array) -> jax.Array:
    """Reshape `[M, K, *parts, N]` to `[M * parts, K, N]`."""
    if array.ndim > 3:
        array = jnp.moveaxis(array, 1, -2)
    return array.reshape(-1, *array.shape[-2:])
