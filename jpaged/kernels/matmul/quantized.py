"""A matrix of fewer bits: numbers of 8 or 4 bits, and the scales that dequantize them.

    weight[k, n] = (values[k, n] - zeros[g, n]) * scales[g, n]        g = k // group size, or group_ids[k]

| values            | from                                         | on TPUs and GPUs      | on CPUs            |
|-------------------|----------------------------------------------|-----------------------|--------------------|
| int8, int4        | GPTQ, AWQ, GGUF, compressed-tensors, on load | two int4 in a byte    | one int4 in a byte |
| float8_e4m3fn     | DeepSeek, Qwen, compressed-tensors, on load  | a byte                | a byte             |
| float4_e2m1fn     | gpt-oss (MXFP4)                              | two in a byte         | one in a byte      |

A matrix replaces its array in the tree. It may have leading axes, of layers or experts, which a scan or an index
removes from all arrays. So the contracted axis is counted from the end, and every array has the rank of the leaf.
Scales of tensors and of blocks are repeated over the columns: they are always `[groups, *out]`, at 3 percent of the
bytes for blocks of 128.

Rows are rounded first only if a checkpoint requires that, and to 8-bit floats only on devices that multiply those. XLA
is the specification here; the packed kernel of CPUs has its own form (`jpaged.kernels.matmul.packed`).

A `StackedMatrix` is the matrix of one of several layers, in one array with those of the others. A scan would first
slice a layer's part from the stack, and XLA for TPUs materializes that part: in memory, if it exceeds the free on-chip
memory. The kernel reads it in place.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.hardware import identify_hardware
from jpaged.kernels.matrix_format import LARGEST, VALUE_DTYPES, Activations, MatrixFormat, Values

__all__ = [
    "LARGEST",
    "VALUE_DTYPES",
    "Activations",
    "MatrixFormat",
    "QuantizedMatrix",
    "Values",
    "abstract_matrix",
    "component_axes",
    "dequantize",
    "multiplies_fp8",
    "multiply",
    "quantize",
    "round_rows",
    "round_to",
    "rounds_rows",
    "rows_on_device",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix as above; its arrays may be shapes, shardings or names of axes, leaf by leaf.

    Attributes:
        values: `[..., K, *out]`, or `[..., N, K]` of an embedding.
        scales: float32, of the same shape with groups in place of K.
        zeros: int8, or float32 if they are not whole, of the scales' shape; None is zero.
        group_ids: int32 `[..., K]`; None if groups are contiguous.
        input_scale: float32 `[...]`: divides rows before they are rounded; None computes a scale per row.
        axis: the contracted one, counted from the end; -1 is an embedding's.
        activations: the type that rows are rounded to.
        dtype: of the model, to which dequantized weights are rounded.
        num_bits, has_half_scales: as of `MatrixFormat`.
    """

    values: Any
    scales: Any
    zeros: Any
    group_ids: Any
    input_scale: Any
    axis: int = dataclasses.field(metadata={"static": True})
    activations: Activations | None = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    num_bits: int | None = dataclasses.field(default=None, metadata={"static": True})
    has_half_scales: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf that it replaces."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """Rank of the leaf that it replaces."""
        return len(self.shape)

    @property
    def depth(self) -> int:
        """K."""
        return self.shape[self.axis]

    @property
    def num_groups(self) -> int:
        """Groups of a column; 1 is a scale per column."""
        return int(self.scales.shape[self.axis])

    @property
    def group_size(self) -> int:
        """Numbers of a column that share a scale, if groups are contiguous."""
        return self.depth // self.num_groups

    @property
    def is_embedding(self) -> bool:
        """True if it is `[N, K]`."""
        return self.axis == -1

    def rows(self, ids_t: jax.Array) -> jax.Array:
        """Return rows `[T, K]` of an embedding, by their ids, in the model's type."""
        zeros = None if self.zeros is None else self.zeros[ids_t]
        of_rows = dataclasses.replace(self, values=self.values[ids_t], scales=self.scales[ids_t], zeros=zeros)
        return dequantize(of_rows)


def num_outer(rank: int, axis: int) -> int:
    """Return the number of leading axes of a leaf, of layers or experts."""
    return rank - 2 if axis == -1 else rank + axis


def abstract_matrix(form: MatrixFormat, shape: tuple[int, ...], axis: int, dtype: np.dtype) -> QuantizedMatrix:
    """Return the shapes of a matrix whose leaf has this shape.

    Args:
        axis: the contracted one, counted from the end.
        dtype: of the model.
    """
    groups = list(shape)
    groups[axis] = form.num_groups(shape[axis])
    outer = shape[: num_outer(len(shape), axis)]
    return QuantizedMatrix(
        jax.ShapeDtypeStruct(shape, form.dtype),
        jax.ShapeDtypeStruct(tuple(groups), np.dtype(np.float32)),
        jax.ShapeDtypeStruct(tuple(groups), form.zeros_dtype) if form.has_zeros else None,
        jax.ShapeDtypeStruct((*outer, shape[axis]), np.dtype(np.int32)) if form.has_group_ids else None,
        jax.ShapeDtypeStruct(outer, np.dtype(np.float32)) if form.has_input_scale else None,
        axis=axis,
        activations=form.activations,
        dtype=np.dtype(dtype),
        num_bits=form.num_bits,
        has_half_scales=form.has_half_scales,
    )


def component_axes(axes: tuple[str | None, ...], axis: int, form: MatrixFormat, dtype: np.dtype) -> QuantizedMatrix:
    """Return the axis names of each array of a matrix, in their places, from those of the leaf.

    Args:
        axis: the contracted one, counted from the end.
        dtype: of the model.
    """
    outer, groups = num_outer(len(axes), axis), list(axes)
    if form.group_size is None or form.has_group_ids:
        groups[axis] = None
    of_groups = tuple(groups)
    return QuantizedMatrix(
        axes,
        of_groups,
        of_groups if form.has_zeros else None,
        (*axes[:outer], axes[axis]) if form.has_group_ids else None,
        axes[:outer] if form.has_input_scale else None,
        axis=axis,
        activations=form.activations,
        dtype=np.dtype(dtype),
        num_bits=form.num_bits,
        has_half_scales=form.has_half_scales,
    )


def quantize(
    weights: Any, form: MatrixFormat, *, axis: int | None = None, dtype: np.dtype | None = None
) -> QuantizedMatrix:
    """Round weights to the nearest numbers of a format; each group's largest becomes the format's largest number.

    Args:
        weights: `[K, *out]`, or `[N, K]`.
        form: groups that do not divide K are made smaller (`MatrixFormat.split`). It has neither listed groups nor an
            input scale, which only come from checkpoints.
        axis: the contracted one, counted from the end; the first when None.
        dtype: of the model; that of the weights when None.
    """
    weights = np.asarray(weights)
    axis = -weights.ndim if axis is None else axis
    form = form.split(weights.shape[axis], 1)
    values, scales, zeros = round_to(weights, form, axis)
    arrays = (jnp.asarray(values), jnp.asarray(scales), None if zeros is None else jnp.asarray(zeros))
    return QuantizedMatrix(
        *arrays,
        None,
        None,
        axis=axis,
        activations=form.activations,
        dtype=np.dtype(dtype or weights.dtype),
        num_bits=form.num_bits,
        has_half_scales=form.has_half_scales,
    )


def round_to(weights: np.ndarray, form: MatrixFormat, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return (values, scales, zeros) of weights on the host, as in a `QuantizedMatrix`; groups divide the depth."""
    if form.has_group_ids or form.has_input_scale:
        raise ValueError("listed groups and input scales exist only in checkpoints")
    depth = weights.shape[axis]
    num_groups = form.num_groups(depth)
    place = weights.ndim + axis
    grouped = (*weights.shape[:place], num_groups, depth // num_groups, *weights.shape[place + 1 :])
    groups = weights.astype(np.float32).reshape(grouped)
    zeros = None
    if form.has_zeros:
        scales, zeros = _scales_and_zeros(groups, form, place + 1)
        groups /= scales
        groups += zeros
        zeros = zeros.squeeze(place + 1).astype(form.zeros_dtype)
    else:
        scales = _scales(np.abs(groups).max(place + 1, keepdims=True), form)
        groups /= scales
    largest = form.largest
    if form.values in ("int8", "int4"):
        np.rint(groups, out=groups)
        np.clip(groups, -largest - 1, largest, out=groups)
    else:
        np.clip(groups, -largest, largest, out=groups)
    return groups.astype(form.dtype).reshape(weights.shape), scales.squeeze(place + 1), zeros


def _scales(largest: np.ndarray, form: MatrixFormat) -> np.ndarray:
    """Return the scales of groups, given their largest weights; those of MXFP4 are powers of two."""
    if form.values == "mxfp4":
        exponents = np.floor(np.log2(np.where(largest > 0, largest, 4.0))) - 2
        return np.exp2(np.clip(exponents, -126, 127)).astype(np.float32)
    return _kept_scales(np.where(largest > 0, largest / form.largest, 1.0), form)


def _kept_scales(scales: np.ndarray, form: MatrixFormat) -> np.ndarray:
    """Return scales as float32, rounded to float16 if the format's are."""
    return (scales.astype(np.float16) if form.has_half_scales else scales).astype(np.float32)


def _scales_and_zeros(groups: np.ndarray, form: MatrixFormat, axis: int) -> tuple[np.ndarray, np.ndarray]:
    least = -form.largest - 1
    low = np.minimum(groups.min(axis, keepdims=True), 0)
    high = np.maximum(groups.max(axis, keepdims=True), 0)
    scales = _kept_scales(np.where(high > low, (high - low) / (form.largest - least), 1.0), form)
    zeros = least - low / scales
    return scales, np.clip(np.rint(zeros), least, form.largest) if form.has_whole_zeros else zeros


def dequantize(matrix: QuantizedMatrix, dtype: np.dtype | None = None) -> jax.Array:
    """Return the weights, computed in float32 and rounded to `dtype`, the model's own when None."""
    values = matrix.values.astype(jnp.float32)
    if matrix.zeros is not None:
        values = values - _spread(matrix, matrix.zeros.astype(jnp.float32))
    return (values * _spread(matrix, matrix.scales)).astype(dtype or matrix.dtype)


def multiply(x: jax.Array, matrix: QuantizedMatrix) -> jax.Array:
    """Multiply `x [..., K]` with a matrix `[K, *out]`, or `[N, K]` transposed: float32 `[..., *out]`.

    A scale per column is applied after the matmul of the values. For groups, TPUs multiply one group at a time: XLA
    fuses all of it there, without an array of the weights' size. Elsewhere weights are dequantized first.
    """
    return _product(*rows_on_device(x, matrix), matrix)


def rows_on_device(x: jax.Array, matrix: QuantizedMatrix) -> tuple[jax.Array, jax.Array | None]:
    """Return rows as the device that is lowered for multiplies them, and their scales; None if they are not rounded."""
    return round_rows(x, matrix) if rounds_rows(matrix) else (x, None)


def rounds_rows(matrix: QuantizedMatrix) -> bool:
    """Return True if rows are rounded for a matmul on the device that a program is lowered for.

    They are always rounded to integers, which every device multiplies. On devices that do not multiply 8-bit floats,
    rounding to those gains nothing: rows stay unchanged, and more precise.
    """
    return matrix.activations == "int8" or (matrix.activations is not None and multiplies_fp8())


def multiplies_fp8() -> bool:
    """Return True if the device that is lowered for multiplies 8-bit floats; False for unknown devices.

    An abstract device has only a name. If it is not in the table, an attached device with this name decides.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    hardware = None if abstract is None else identify_hardware(abstract)
    if hardware is None:
        attached = jax.devices()[0]
        is_other = abstract is not None and abstract.device_kind != attached.device_kind
        hardware = None if is_other else identify_hardware(attached)
    return hardware is not None and hardware.multiplies_fp8


def round_rows(x: jax.Array, matrix: QuantizedMatrix) -> tuple[jax.Array, jax.Array]:
    """Return rows rounded as the matrix requires, and their scales, float32: `[..., 1]`, or `[..., groups]`."""
    kind: Values = "int8" if matrix.activations == "int8" else "fp8"
    largest, num_groups = LARGEST[kind], matrix.num_groups if matrix.activations == "fp8-groups" else 1
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], num_groups, -1)
    if matrix.input_scale is not None:
        scales = jnp.broadcast_to(matrix.input_scale, (*groups.shape[:-1], 1))
    else:
        size = jnp.abs(groups).max(axis=-1, keepdims=True)
        scales = jnp.where(size > 0, size / largest, 1.0)
    groups = jnp.clip(groups / scales, -largest - (kind == "int8"), largest)
    groups = jnp.round(groups) if kind == "int8" else groups
    return groups.astype(VALUE_DTYPES[kind]).reshape(x.shape), scales[..., 0]


def _product(x: jax.Array, row_scales: jax.Array | None, matrix: QuantizedMatrix) -> jax.Array:
    """Multiply rows, rounded or not, and apply the scales afterwards."""
    if matrix.num_groups > 1:
        if matrix.group_ids is not None:
            return _by_weights(x, row_scales, matrix)
        y: jax.Array = jax.lax.platform_dependent(x, row_scales, matrix, tpu=_by_groups, default=_by_weights)
        return y
    y = _dot(x, matrix.values, ((x.ndim - 1,), (matrix.ndim + matrix.axis,)))
    if matrix.zeros is not None:
        sums = _wide(x.astype(jnp.float32).sum(-1), matrix.ndim - 1)
        y = y - sums * matrix.zeros.squeeze(matrix.axis).astype(jnp.float32)
    y = y * matrix.scales.squeeze(matrix.axis)
    return y if row_scales is None else y * _wide(row_scales[..., 0], matrix.ndim - 1)


def _by_groups(x: jax.Array, row_scales: jax.Array | None, matrix: QuantizedMatrix) -> jax.Array:
    """Multiply each group separately, scale and add up."""
    num_groups, num_out = matrix.num_groups, matrix.ndim - 1
    place = matrix.ndim + matrix.axis
    x_groups = x.reshape(*x.shape[:-1], num_groups, matrix.group_size)
    shape = matrix.shape
    values = matrix.values.reshape(*shape[:place], num_groups, matrix.group_size, *shape[place + 1 :])
    contracted, batched = ((x.ndim,), (place + 1,)), ((x.ndim - 1,), (place,))
    y = _dot(x_groups, values, contracted, batched)  # [groups, ..., *out]
    scales = jnp.moveaxis(matrix.scales, place, 0)
    between = (num_groups, *(1,) * (x.ndim - 1))
    if matrix.zeros is not None:
        zeros = jnp.moveaxis(matrix.zeros, place, 0)
        sums = _wide(jnp.moveaxis(x_groups.astype(jnp.float32).sum(-1), -1, 0), num_out)
        y = y - sums * zeros.astype(jnp.float32).reshape(*between, *zeros.shape[1:])
    y = y * scales.reshape(*between, *scales.shape[1:])
    if row_scales is not None:
        y = y * _wide(jnp.moveaxis(row_scales, -1, 0), num_out)
    return y.sum(0)


def _by_weights(x: jax.Array, row_scales: jax.Array | None, matrix: QuantizedMatrix) -> jax.Array:
    """Multiply with dequantized weights; rounded rows are converted back."""
    dtype = x.dtype
    if row_scales is not None:
        dtype = matrix.dtype
        spread = jnp.repeat(row_scales, x.shape[-1] // row_scales.shape[-1], axis=-1)
        x = (x.astype(jnp.float32) * spread).astype(dtype)
    contracted = ((x.ndim - 1,), (matrix.ndim + matrix.axis,))
    return _dot(x, dequantize(matrix, dtype), contracted)


def _dot(
    x: jax.Array,
    values: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    batched: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> jax.Array:
    """Multiply in float32; integers exactly, in int32."""
    is_integer = jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(values.dtype, jnp.integer)
    if is_integer:
        y = jax.lax.dot_general(x, values.astype(jnp.int8), (contracted, batched), None, jnp.int32)
        return y.astype(jnp.float32)
    if x.dtype == values.dtype and x.dtype.itemsize == 1:
        return jax.lax.dot_general(x, values, (contracted, batched), None, jnp.float32)
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.bfloat16)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, values.astype(x.dtype), (contracted, batched), precision, jnp.float32)


def _spread(matrix: QuantizedMatrix, of_groups: jax.Array) -> jax.Array:
    """Return one number for each of the values, or one that applies to a whole column."""
    if matrix.num_groups == 1:
        return of_groups
    if matrix.group_ids is None:
        return jnp.repeat(of_groups, matrix.group_size, axis=matrix.axis)
    if matrix.group_ids.ndim > 1:
        return jax.vmap(_spread)(matrix, of_groups)
    return jnp.take(of_groups, matrix.group_ids, axis=matrix.axis)


def _wide(x: jax.Array, num_axes: int) -> jax.Array:
    """Append axes of size one."""
    return x.reshape(*x.shape, *(1,) * num_axes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """A matrix of one of several layers, in place of the layer's matrix.

    Attributes:
        matrices: `[L, K, *out]`.
        index: int32 scalar: the layer.
    """

    matrices: QuantizedMatrix
    index: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one layer's matrix."""
        return self.matrices.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """The type of the model."""
        return self.matrices.dtype

    def own(self) -> QuantizedMatrix:
        """Return the layer's matrix, sliced."""
        own: QuantizedMatrix = jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, self.index, keepdims=False), self.matrices
        )
        return own
