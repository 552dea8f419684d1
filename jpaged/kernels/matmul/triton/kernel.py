"""The Triton kernel: a tile of rows times some columns of their matrix.

    rows of a tile    | r0 | r1 | ...        numbers of their matrix, words of 8 to 32 bits

    for each chunk of the depth    X; W; sums += X W          with groups    sums += (X W) * scales

The compiler pipelines the loop: while a chunk is multiplied, the next one is in flight (cp.async). A program whose tile
has no rows ends at once, and a matrix without rows is not read.

Two 4-bit numbers share a byte; even and odd columns are multiplied separately, so that no interleaving is needed. The
same applies to 8-bit numbers, two per word, if an array has more of them than 31 bits count. 8-bit and 4-bit floats
become 16-bit floats by shifts, because Ampere does not convert them: their exponents are then 8 and 14 too small, which
is corrected after the matmul. If both sides have 8 bits, Triton gets both unchanged; its sums of a chunk are added up
in float32. For 8-bit floats on an H200 its compiler emits a matmul of 16-bit floats
(`mma.sync.m16n8k16.f32.f16.f16.f32`, according to the PTX): it uses Hopper's own 8-bit matmuls only if a dot allows
many sums of less precision than float32, which Pallas cannot express. So only dense matrices with a scale per column,
which cuBLASLt multiplies, use the tensor core's own type there.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jpaged.kernels.matmul.triton.form import ProductForm, TileField

_FP8 = np.dtype(jnp.float8_e4m3fn)
_MISSING = {"fp8": 2.0**8, "mxfp4": 2.0**14}
"""Correction factors of floats whose bits were shifted into 16."""


class Operands(NamedTuple):
    """The kernel's inputs, or references to them.

    Attributes:
        tiles: int32 `[I, 3]`, with the columns of `TileField`.
        rows: `[P, K]`.
        words: `[X, K, N]`, or int8 or int16 `[X, K, N / 2]` of two numbers each, or `[X, N, K]` (`depth_is_minor`).
        scales: float32 `[X, G, N]`, or one number that is not read, as for the next two.
        zeros: int8 `[X, G, N]`.
        row_scales: float32 `[P, G]`, or `[P, 1]`.
    """

    tiles: Any
    rows: Any
    words: Any
    scales: Any
    zeros: Any
    row_scales: Any


class _ProgramPlace(NamedTuple):
    """Places of a program's rows and words, and which of them exist."""

    matrix: jax.Array
    rows: jax.Array
    is_row: jax.Array
    words: jax.Array
    is_word: jax.Array


def multiply_tiles(operands: Operands, form: ProductForm) -> jax.Array:
    """Return sums `[splits, P, N]` in float32 of the tiles' rows; the other rows are not written."""
    num_columns = -(-form.num_words // form.tile_words)
    out_shape = (form.num_splits, operands.rows.shape[0], form.columns)
    sums: jax.Array = pl.pallas_call(
        functools.partial(_grouped_product, form),
        out_shape=jax.ShapeDtypeStruct(out_shape, jnp.float32),
        grid=(operands.tiles.shape[0], num_columns, form.num_splits),
        compiler_params=plgpu.CompilerParams(num_warps=form.num_warps, num_stages=3),
        interpret=form.is_interpreted,
        name="grouped_product",
    )(*operands)
    return sums


def _grouped_product(form: ProductForm, *refs: Any) -> None:
    *inputs, out = refs
    operands, program = Operands(*inputs), tuple(pl.program_id(axis) for axis in range(3))
    num_rows = operands.tiles[program[0], TileField.NUM_ROWS]
    pl.when(num_rows > 0)(functools.partial(_multiply_tile, form, operands, out, program, num_rows))


def _multiply_tile(
    form: ProductForm, operands: Operands, out: Any, program: tuple[jax.Array, ...], num_rows: jax.Array
) -> None:
    tile, block, split = program
    rows = jnp.arange(form.tile_rows, dtype=jnp.int32)
    words = block * form.tile_words + jnp.arange(form.tile_words, dtype=jnp.int32)
    place = _ProgramPlace(
        operands.tiles[tile, TileField.MATRIX],
        operands.tiles[tile, TileField.FIRST_ROW] + rows,
        rows < num_rows,
        words,
        words < form.num_words,
    )
    each = -(-form.num_chunks // form.num_splits)
    first, last = split * each, jnp.minimum((split + 1) * each, form.num_chunks)
    empty = jnp.zeros((form.tile_rows, form.tile_words), form.sum_dtype)
    turn = functools.partial(_add_chunk, form=form, operands=operands, place=place)
    sums = lax.fori_loop(first, last, turn, (empty,) * form.lanes)
    for lane, of_lane in enumerate(sums):
        columns = place.words * form.lanes + lane
        found = of_lane.astype(jnp.float32) * _missing(form)
        if form.is_quantized and not form.has_groups:
            found = _scaled(found, 0, columns, form, operands, place)
        at = out.at[split, place.rows[:, None], columns[None, :]]
        plgpu.store(at, found, mask=place.is_row[:, None] & place.is_word[None, :])


def _add_chunk(
    i: jax.Array, sums: tuple[jax.Array, ...], form: ProductForm, operands: Operands, place: _ProgramPlace
) -> tuple[jax.Array, ...]:
    """Add a chunk of the depth to the sums of even and odd columns, or of all."""
    depth = i * form.chunk + jnp.arange(form.chunk, dtype=jnp.int32)
    is_deep = None if form.depth % form.chunk == 0 else depth < form.depth
    x = _load(operands.rows.at[place.rows[:, None], depth[None, :]], _both(place.is_row, is_deep))
    if form.depth_is_minor:
        at = operands.words.at[place.matrix, place.words[:, None], depth[None, :]]
        words = _load(at, _both(place.is_word, is_deep)).T
    else:
        at = operands.words.at[place.matrix, depth[:, None], place.words[None, :]]
        mask = place.is_word[None, :]
        words = _load(at, mask if is_deep is None else is_deep[:, None] & mask)
    x = _shifted(x, form).astype(form.multiplied)
    group = lax.div(i * form.chunk, jnp.int32(form.group_size)) if form.has_groups else 0
    found = []
    for lane, total in enumerate(sums):
        numbers, columns = _numbers(words, lane, form), place.words * form.lanes + lane
        if form.has_zeros:
            zeros = _load(operands.zeros.at[place.matrix, group, columns], place.is_word)
            numbers = numbers - zeros.astype(numbers.dtype)[None, :]
        part = _product(x, numbers.astype(form.multiplied), form)
        if form.has_groups:
            part = _scaled(part.astype(jnp.float32), group, columns, form, operands, place)
        found.append(total + part)
    return tuple(found)


def _both(is_first: jax.Array, is_second: jax.Array | None) -> jax.Array:
    """Return the mask of a tile, from those of rows and columns."""
    return is_first[:, None] if is_second is None else is_first[:, None] & is_second[None, :]


def _scaled(
    x: jax.Array,
    group: jax.Array | int,
    columns: jax.Array,
    form: ProductForm,
    operands: Operands,
    place: _ProgramPlace,
) -> jax.Array:
    scales = _load(operands.scales.at[place.matrix, group, columns], place.is_word)
    x = x * scales[None, :]
    if not form.rows_have_scales:
        return x
    group = group if form.rows_have_groups else 0
    return x * _load(operands.row_scales.at[place.rows, group], place.is_row)[:, None]


def _load(at: Any, mask: jax.Array) -> jax.Array:
    """Load, with zeros outside the mask; Triton cannot convert an integer zero to an 8-bit float."""
    numbers: jax.Array = plgpu.load(at, mask=mask, other=0.0 if jnp.issubdtype(at.dtype, jnp.floating) else 0)
    return numbers


def _missing(form: ProductForm) -> float:
    """Return the correction factor of the sums, for floats whose exponents are too small."""
    if form.multiplied == _FP8:
        return 1.0
    of_rows = _MISSING["fp8"] if form.rows_are_fp8 else 1.0
    return of_rows * _MISSING.get(form.kind or "", 1.0)


def _shifted(x: jax.Array, form: ProductForm) -> jax.Array:
    """Convert rows of 8-bit floats that the tensor core does not take, given as bits, to 16-bit floats."""
    return _float16(x, 7) if form.rows_are_fp8 and form.multiplied != _FP8 else x


def _numbers(words: jax.Array, lane: int, form: ProductForm) -> jax.Array:
    """Return one number of each word; zero points can be subtracted from it."""
    if form.are_pairs:
        words = words >> 8 if lane else (words << 8) >> 8  # with their sign
    if form.kind == "fp8" and form.multiplied != _FP8:
        return _float16(words, 7)
    if form.are_pairs:
        return words
    if form.lanes == 1:
        return words.astype(form.multiplied) if form.has_zeros else words
    bits = words >> 4 if lane else (words << 4) >> 4  # with their sign
    return _float16(bits, 9, 0x7) if form.kind == "mxfp4" else bits


def _float16(bits: jax.Array, shift: int, mask: int = 0x7F) -> jax.Array:
    """Convert the bits of a float, sign first, to those of a 16-bit float with the same low exponent bits."""
    wide = bits.astype(jnp.int16)
    return lax.bitcast_convert_type((wide & -0x8000) | ((wide & mask) << shift), jnp.float16)


def _product(x: jax.Array, numbers: jax.Array, form: ProductForm) -> jax.Array:
    precision = lax.Precision.HIGHEST if form.multiplied == np.float32 else None
    is_whole = np.issubdtype(form.multiplied, np.integer)
    return jnp.dot(x, numbers, precision=precision, preferred_element_type=jnp.int32 if is_whole else jnp.float32)
