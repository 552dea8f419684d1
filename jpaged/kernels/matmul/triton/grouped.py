"""The calls: rows of several matrices, and rows of one whose numbers share scales in groups."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.matmul.quantized import QuantizedMatrix, multiplies_fp8, rows_on_device
from jpaged.kernels.matmul.triton.form import ProductForm, choose_form, list_tiles, split_depth

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def multiply_sorted(
    x_pk: Float[Array, "P K"],
    counts_x: Int[Array, "X"],
    matrices_p: Int[Array, "P"],
    matrices: Any,
    *,
    is_interpreted: bool = False,
) -> Float[Array, "P N"]:
    """Multiply rows sorted by matrix, each with its own `[X, K, N]`, quantized or not, in float32.

    Rows after those that are counted are undefined.

    Args:
        counts_x: rows of each matrix.
        matrices_p: the matrix of each row.
        matrices: supported according to `unsupported_reason`.
    """
    model_dtype, row_scales = x_pk.dtype, None
    if isinstance(matrices, QuantizedMatrix):
        of_rows = matrices
        if matrices.input_scale is not None:
            of_rows = dataclasses.replace(matrices, input_scale=matrices.input_scale[matrices_p][:, None, None])
        x_pk, row_scales = rows_on_device(x_pk, of_rows)
    form = _form(matrices, len(x_pk), model_dtype, row_scales, is_interpreted=is_interpreted)
    tiles = list_tiles(counts_x, len(x_pk), form.tile_rows)
    return _run(x_pk, tiles, matrices, row_scales, form)[0]


def multiply_one(
    x_tk: Float[Array, "T K"],
    row_scales: Float[Array, "T G"] | None,
    matrix: QuantizedMatrix,
    *,
    is_interpreted: bool = False,
) -> Float[Array, "T N"]:
    """Multiply rows, as `rows_on_device` returns them, with a quantized matrix `[K, *out]`, in float32.

    It is dequantized between memory and the tensor core: no array of weights is made.
    """
    matrices: QuantizedMatrix = jax.tree.map(lambda array: array[None], matrix)
    dtype = x_tk.dtype if row_scales is None else matrix.dtype
    form = _form(matrices, len(x_tk), dtype, row_scales, is_interpreted=is_interpreted)
    firsts = np.arange(0, len(x_tk), form.tile_rows)
    form = split_depth(form, len(firsts), len(x_tk))
    counts = np.minimum(len(x_tk) - firsts, form.tile_rows)
    tiles = jnp.asarray(np.stack([np.zeros_like(firsts), firsts, counts], axis=1).astype(np.int32))
    sums: jax.Array = _run(x_tk, tiles, matrices, row_scales, form).sum(0)
    return sums


def _form(
    matrices: Any, num_rows: int, dtype: np.dtype, row_scales: jax.Array | None, *, is_interpreted: bool
) -> ProductForm:
    are_rounded = row_scales is not None
    form = choose_form(matrices, num_rows, dtype, are_rounded=are_rounded, has_fp8=multiplies_fp8())
    return dataclasses.replace(form, is_interpreted=is_interpreted)


def _run(
    x_pk: jax.Array, tiles: jax.Array, matrices: Any, row_scales: jax.Array | None, form: ProductForm
) -> jax.Array:
    from jpaged.kernels.matmul.triton import kernel

    is_quantized = isinstance(matrices, QuantizedMatrix)
    values = matrices.values if is_quantized else matrices
    words = values.reshape(values.shape[0], form.depth, form.columns)
    if form.lanes == 2:
        words = _words(words, jnp.int16 if form.are_pairs else jnp.int8)
    if form.depth_is_minor:
        words = jnp.swapaxes(words, 1, 2)  # only a view: this is their order on GPUs
    if form.multiplied.itemsize > 1:
        words, x_pk = _bits(words), _bits(x_pk)
    of_columns = (len(words), -1, form.columns)
    operands = kernel.Operands(
        tiles,
        x_pk,
        words,
        matrices.scales.reshape(of_columns) if is_quantized else jnp.zeros((1, 1, 1), jnp.float32),
        matrices.zeros.reshape(of_columns) if form.has_zeros else jnp.zeros((1, 1, 1), jnp.int8),
        jnp.zeros((1, 1), jnp.float32) if row_scales is None else row_scales,
    )
    return kernel.multiply_tiles(operands, form)


def _words(values: jax.Array, dtype: Any) -> jax.Array:
    """Return pairs of numbers as words, the first in the lower half: only a view if they are contiguous."""
    pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, dtype)


def _bits(array: jax.Array) -> jax.Array:
    """Return 8-bit floats as their bits."""
    return jax.lax.bitcast_convert_type(array, jnp.int8) if array.dtype == jnp.float8_e4m3fn else array
