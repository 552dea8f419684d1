"""Which product with a quantised matrix runs on the device that a program is lowered for.

On GPUs XLA would make weights of numbers that share scales in groups, in every step, before it multiplies with them;
a kernel makes them on the way to the tensor core. It fuses into its own products the rest: a scale a column comes
behind them, and numbers of 8 bits go to the tensor core as they are where the rows have 8 bits too.

On TPUs XLA multiplies group by group, of a copy of a layer's matrix on the chip, or in memory where it is too large for
that; a kernel reads blocks of it where it lies, while it multiplies with those before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jpaged.kernels.lowered_device import lowered_device
from jpaged.kernels.product.quantised import QuantisedMatrix, multiply, rows_on_device
from jpaged.kernels.product.stacked import StackedMatrix
from jpaged.kernels.product.tpu import form as tpu_form
from jpaged.kernels.product.tpu import grouped as tpu
from jpaged.kernels.product.triton.form import kind_of, lanes_of, unsupported_reason
from jpaged.kernels.product.triton.grouped import multiply_one
from jpaged.kernels.triton_compiler import has_triton

_BEFORE_AMPERE = ("Tesla", "Quadro", "TITAN", "GTX", "RTX 20")
"""What jax calls NVIDIA's GPUs that have no asynchronous copies."""

_Product = Callable[[jax.Array, jax.Array | None, QuantisedMatrix], jax.Array]
"""Rows `[T, K]`, their scales and a matrix `[K, *out]`: float32 `[T, N]`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PartedMatrix:
    """A quantised matrix `[K, *out]` of which each device of a mesh has a part, and multiplies with that by itself.

    XLA divides its own products over devices, and no kernel: it would give every device all of the matrix.

    Attributes:
        specs: how its arrays are split, in their places; the depth or one axis of the columns, over one mesh axis.
    """

    matrix: QuantisedMatrix
    specs: QuantisedMatrix = dataclasses.field(metadata={"static": True})
    mesh: Mesh | AbstractMesh = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole matrix."""
        return self.matrix.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the model."""
        return self.matrix.dtype


def multiply_on_device(x: jax.Array, matrix: QuantisedMatrix | StackedMatrix | PartedMatrix) -> jax.Array:
    """`multiply`, by a kernel where the device has one that is better than what XLA makes of it."""
    if isinstance(matrix, PartedMatrix):
        return multiply_parts(x, matrix)
    if takes_tpu_kernel(matrix.matrices if isinstance(matrix, StackedMatrix) else matrix):
        return _multiply_on_tpu(x, matrix)
    matrix = matrix.own() if isinstance(matrix, StackedMatrix) else matrix
    if not takes_kernel(matrix):
        return multiply(x, matrix)
    rows, row_scales = _rows(x, matrix)
    y = multiply_one(rows, row_scales, matrix)
    return y.reshape(*x.shape[:-1], *matrix.shape[1:])


def multiply_parts(x: jax.Array, parted: PartedMatrix, multiply_one: _Product = multiply_one) -> jax.Array:
    """Multiplies with a matrix that is in parts: devices that divide its depth add up what they found.

    Rows are rounded before they are divided, so that their scales are those of one device.
    """
    matrix, specs = parted.matrix, parted.specs
    rows, row_scales = _rows(x, matrix)
    over, *columns = specs.values
    whole = PartitionSpec()
    has_groups = row_scales is not None and row_scales.shape[-1] > 1
    in_specs = PartitionSpec(None, over), PartitionSpec(None, over) if has_groups else whole, specs

    def part(rows: jax.Array, row_scales: jax.Array | None, matrix: QuantisedMatrix) -> jax.Array:
        sums = multiply_one(rows, row_scales, matrix).reshape(len(rows), *matrix.shape[1:])
        return sums if over is None else jax.lax.psum(sums, over)

    out_specs = PartitionSpec(None, *columns)
    divided: Callable[..., jax.Array] = jax.shard_map(
        part, mesh=parted.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return divided(rows, row_scales, matrix).reshape(*x.shape[:-1], *matrix.shape[1:])


def _rows(x: jax.Array, matrix: QuantisedMatrix) -> tuple[jax.Array, jax.Array | None]:
    """Rows `[T, K]` as the device multiplies them, and their scales."""
    x, row_scales = rows_on_device(x, matrix)
    rows = x.reshape(-1, x.shape[-1])
    return rows, None if row_scales is None else row_scales.reshape(-1, row_scales.shape[-1])


def takes_tpu_kernel(matrix: QuantisedMatrix) -> bool:
    """Whether the program is for one TPU or its part, and the kernel takes a matrix, or those of layers or experts."""
    device = lowered_device()
    return device is not None and device.platform == "tpu" and tpu_form.unsupported_reason(matrix) is None


def _multiply_on_tpu(x: jax.Array, matrix: QuantisedMatrix | StackedMatrix) -> jax.Array:
    if not isinstance(matrix, StackedMatrix):
        matrix = StackedMatrix(jax.tree.map(lambda array: array[None], matrix), jnp.int32(0))
    y = tpu.multiply_one(x.reshape(-1, x.shape[-1]), matrix.matrices, matrix.index)
    return y.reshape(*x.shape[:-1], *matrix.shape[1:])


def takes_kernel(matrix: QuantisedMatrix) -> bool:
    """Whether a kernel multiplies with a matrix, or its shapes, on the one device that is lowered for."""
    device = lowered_device()
    return device is not None and kernel_takes(matrix, device)


def kernel_takes(matrix: QuantisedMatrix, device: Any) -> bool:
    """Whether a kernel multiplies with a matrix on a device, which is asked for its platform and its kind."""
    if device.platform != "gpu" or any(name in device.device_kind for name in _BEFORE_AMPERE):
        return False
    needs_it = matrix.num_groups > 1 or lanes_of(kind_of(matrix)) > 1
    return needs_it and has_triton() and unsupported_reason(matrix) is None
