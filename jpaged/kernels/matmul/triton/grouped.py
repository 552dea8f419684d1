"""The calls: rows of several matrices, and rows of one whose numbers share scales in groups.

Two kernels compute them: Pallas Triton, and CUDA C++ (`jpaged/kernels/matmul/cuda`) in a jax without it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels import cuda_library
from jpaged.kernels.cuda_library import has_triton
from jpaged.kernels.matmul.quantized import QuantizedMatrix, multiplies_fp8, rows_on_device
from jpaged.kernels.matmul.triton import form as forms
from jpaged.kernels.matmul.triton.form import ProductForm, choose_form, list_tiles, split_depth
from jpaged.kernels.matrix_format import Values

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


ProductBackend = Literal["triton", "cuda"]
STORED: tuple[Values | None, ...] = (None, "int8", "fp8", "int4", "mxfp4")
"""Types of a matrix's numbers, in the order of `Stored` in kernel.cu; None is the rows' own type."""
_LINE = 8
"""Depths and columns that a lane of the CUDA kernel reads together: both must be a multiple of it."""
_CUDA_TILE_ROWS = 16, 32


def choose_backend() -> ProductBackend | None:
    """Return the kernel that this installation has, or None; XLA multiplies without one."""
    if has_triton():
        return "triton"
    return "cuda" if cuda_library.unusable_reason() is None else None


def unsupported_reason(matrix: QuantizedMatrix | jax.Array, backend: ProductBackend) -> str | None:
    """Return why a kernel does not support a matrix `[K, *out]`, or several `[X, K, *out]`; None if it does."""
    if backend == "triton":
        return forms.unsupported_reason(matrix)
    place = matrix.ndim + matrix.axis if isinstance(matrix, QuantizedMatrix) else matrix.ndim - 2
    depth, columns = matrix.shape[place], math.prod(matrix.shape[place + 1 :])
    if depth % _LINE or columns % _LINE:
        return f"{depth} x {columns} numbers are not multiples of {_LINE}"
    return forms.unsupported_reason(matrix)


def multiply_sorted(
    x_pk: Float[Array, "P K"],
    counts_x: Int[Array, "X"],
    matrices_p: Int[Array, "P"],
    matrices: Any,
    *,
    backend: ProductBackend = "triton",
    is_interpreted: bool = False,
) -> Float[Array, "P N"]:
    """Multiply rows sorted by matrix, each with its own `[X, K, N]`, quantized or not, in float32.

    Rows after those that are counted are undefined.

    Args:
        counts_x: rows of each matrix.
        matrices_p: the matrix of each row.
        matrices: supported by the backend according to `unsupported_reason`.
        is_interpreted: run Triton's kernel on a CPU.
    """
    model_dtype, row_scales = x_pk.dtype, None
    if isinstance(matrices, QuantizedMatrix):
        of_rows = matrices
        if matrices.input_scale is not None:
            of_rows = dataclasses.replace(matrices, input_scale=matrices.input_scale[matrices_p][:, None, None])
        x_pk, row_scales = rows_on_device(x_pk, of_rows)
    if backend == "cuda":
        tile_rows = _CUDA_TILE_ROWS[-(-len(x_pk) // len(counts_x)) > _CUDA_TILE_ROWS[0]]
        tiles = list_tiles(counts_x, len(x_pk), tile_rows)
        return _run_cuda(x_pk, tiles, matrices, row_scales, tile_rows)
    form = _form(matrices, len(x_pk), model_dtype, row_scales, is_interpreted=is_interpreted)
    tiles = list_tiles(counts_x, len(x_pk), form.tile_rows)
    return _run(x_pk, tiles, matrices, row_scales, form)[0]


def multiply_one(
    x_tk: Float[Array, "T K"],
    row_scales: Float[Array, "T G"] | None,
    matrix: QuantizedMatrix,
    *,
    backend: ProductBackend | None = None,
    is_interpreted: bool = False,
) -> Float[Array, "T N"]:
    """Multiply rows, as `rows_on_device` returns them, with a quantized matrix `[K, *out]`, in float32.

    It is dequantized between memory and the tensor core: no array of weights is made.

    Args:
        backend: that of the installation if None.
    """
    matrices: QuantizedMatrix = jax.tree.map(lambda array: array[None], matrix)
    if (backend or (not is_interpreted and choose_backend())) == "cuda":
        tile_rows = _CUDA_TILE_ROWS[len(x_tk) > _CUDA_TILE_ROWS[0]]
        return _run_cuda(x_tk, jnp.asarray(_even_tiles(len(x_tk), tile_rows)), matrices, row_scales, tile_rows)
    dtype = x_tk.dtype if row_scales is None else matrix.dtype
    form = _form(matrices, len(x_tk), dtype, row_scales, is_interpreted=is_interpreted)
    tiles = _even_tiles(len(x_tk), form.tile_rows)
    form = split_depth(form, len(tiles), len(x_tk))
    sums: jax.Array = _run(x_tk, jnp.asarray(tiles), matrices, row_scales, form).sum(0)
    return sums


def _even_tiles(num_rows: int, tile_rows: int) -> np.ndarray:
    """Return the tiles of rows of one matrix."""
    firsts = np.arange(0, num_rows, tile_rows)
    return np.stack([np.zeros_like(firsts), firsts, np.minimum(num_rows - firsts, tile_rows)], axis=1).astype(np.int32)


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


def _run_cuda(
    x_pk: jax.Array, tiles: jax.Array, matrices: Any, row_scales: jax.Array | None, tile_rows: int
) -> jax.Array:
    cuda_library.missing_reason()  # registers the library if there is one; a program is lowered without it
    is_quantized, kind = isinstance(matrices, QuantizedMatrix), forms.get_kind(matrices)
    values = matrices.values if is_quantized else matrices
    depth_is_minor = forms.lies_by_columns(matrices)
    values = values.reshape(len(values), x_pk.shape[1], -1)
    values = _words(values, jnp.int8) if forms.get_lanes(kind) == 2 else _bits(values)
    if depth_is_minor:
        values = jnp.swapaxes(values, 1, 2)  # only a view: this is their order on GPUs
    num_columns = values.shape[1] if depth_is_minor else values.shape[2] * forms.get_lanes(kind)
    of_columns = (len(values), -1, num_columns)
    has_zeros = is_quantized and matrices.zeros is not None
    y_pn: jax.Array = jax.ffi.ffi_call(
        cuda_library.PRODUCT_TARGET, jax.ShapeDtypeStruct((len(x_pk), num_columns), jnp.float32)
    )(
        tiles,
        x_pk,
        values,
        matrices.scales.reshape(of_columns) if is_quantized else jnp.zeros((0, 1, 1), jnp.float32),
        matrices.zeros.reshape(-1) if has_zeros else jnp.zeros((0,), jnp.int8),
        jnp.zeros((0, 1), jnp.float32) if row_scales is None else row_scales,
        stored=np.int64(STORED.index(kind)),
        depth_is_minor=np.int64(depth_is_minor),
        tile_rows=np.int64(tile_rows),
    )
    return y_pn


def _words(values: jax.Array, dtype: Any) -> jax.Array:
    """Return pairs of numbers as words, the first in the lower half: only a view if they are contiguous."""
    pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, dtype)


def _bits(array: jax.Array) -> jax.Array:
    """Return 8-bit floats as their bits."""
    return jax.lax.bitcast_convert_type(array, jnp.int8) if array.dtype == jnp.float8_e4m3fn else array
