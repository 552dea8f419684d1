"""The calls: rows of several matrices, and rows of one, whose numbers share scales in groups."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.matrix_format import VALUE_DTYPES
from jpaged.kernels.product.quantised import QuantisedMatrix, rows_on_device
from jpaged.kernels.product.tpu.form import GroupedForm, choose_form, scales_by_group
from jpaged.kernels.product.tpu.kernel import run
from jpaged.kernels.product.triton.tiles import TileField, list_tiles

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_LEAST_TILE = 16
_MOST_TILE = 128
_INTEGERS = (VALUE_DTYPES["int8"], VALUE_DTYPES["int4"])


def multiply_one(
    x_tk: Float[Array, "T K"], matrices: QuantisedMatrix, first: Int[Array, ""], *, is_interpreted: bool = False
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
    matrices: QuantisedMatrix,
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
    x: jax.Array, matrices: QuantisedMatrix, input_scale: jax.Array | None
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
    tiles: tuple[jax.Array, jax.Array], rows: jax.Array, matrices: QuantisedMatrix, form: GroupedForm
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
