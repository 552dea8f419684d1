"""The kernel: a tile of rows times a matrix, which is dequantized between memory and the matrix unit.

grid (tiles, blocks of columns, blocks of the depth)

        matrix of the tile [K, N]                       scales [G, N]: those of a block of columns, all groups
         ┌────┬────┬────┐
depth 0  │ *  │    │    │    * a block is fetched while the previous one is multiplied; it is unpacked chunk by
depth 1  │    │    │    │      chunk. After the last tile with rows nothing more is fetched.
         └────┴────┴────┘
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.product.tpu.form import GroupedForm

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
            bytes_accessed=grid[0] * (values[0].size * _bits(values) // 8 + scales[0].size * 4) + x_pk.size * 2,
        ),
        interpret=form.is_interpreted,
    )(matrices_i, num_used, *operands)
    return y_pn


def _scratch(form: GroupedForm, dtype: np.dtype, num_zeros: int) -> tuple[Any, ...]:
    """Return scratch memory for the weights of a block, and for the zero points of the columns."""
    if form.scales_products:
        return ()
    weights = pltpu.VMEM((form.block_depth, form.block_columns), dtype)
    return (weights, pltpu.VMEM((num_zeros, form.block_columns), jnp.float32)) if num_zeros else (weights,)


def _bits(values: jax.Array) -> int:
    return 4 if values.dtype in (jnp.int4, jnp.float4_e2m1fn) else 8


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
        numbers = of_mxfp4(codes_of(codes)) if form.is_mxfp4 else codes.astype(jnp.float32)
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


def codes_of(values: jax.Array) -> jax.Array:
    """Return 4-bit numbers as int4: Mosaic converts float4_e2m1fn only on TPU7x, and XLA would copy all of them."""
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
