"""Choice of the matmul with a quantized matrix on the device that a program is lowered for.

On GPUs, if numbers share scales in groups, XLA would dequantize the weights in every step before it multiplies; a
kernel dequantizes them just before the tensor core. XLA fuses the other cases into its own matmuls: a scale per column
is applied afterwards, and 8-bit numbers go to the tensor core unchanged if the rows have 8 bits too.

On TPUs XLA multiplies group by group, with a copy of a layer's matrix on the chip, or in memory if it is too large for
that; a kernel reads blocks of it in place, while it multiplies with the previous ones.
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
"""Names in JAX of NVIDIA GPUs that have no asynchronous copies."""

_Product = Callable[[jax.Array, jax.Array | None, QuantisedMatrix], jax.Array]
"""Rows `[T, K]`, their scales and a matrix `[K, *out]`: float32 `[T, N]`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PartedMatrix:
    """A quantized matrix `[K, *out]` of which each device of a mesh has a part, and multiplies with that by itself.

    XLA partitions its own matmuls over devices, but no kernels: it would give every device the whole matrix.

    Attributes:
        specs: partition specs of the arrays, in their places; they split the depth or one axis of the columns, over one
            mesh axis.
    """

    matrix: QuantisedMatrix
    specs: QuantisedMatrix = dataclasses.field(metadata={"static": True})
    mesh: Mesh | AbstractMesh = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole matrix."""
        return self.matrix.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the model."""
        return self.matrix.dtype


def multiply_on_device(x: jax.Array, matrix: QuantisedMatrix | StackedMatrix | PartedMatrix) -> jax.Array:
    """Run `multiply`, with a kernel if the device has one that is faster than XLA."""
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
    """Multiply with a matrix in parts: if devices split its depth, they sum their results.

    Rows are rounded before they are split, so that their scales are those of one device.
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
    """Return rows `[T, K]` as the device multiplies them, and their scales."""
    x, row_scales = rows_on_device(x, matrix)
    rows = x.reshape(-1, x.shape[-1])
    return rows, None if row_scales is None else row_scales.reshape(-1, row_scales.shape[-1])


def takes_tpu_kernel(matrix: QuantisedMatrix) -> bool:
    """Return True if the program is for one TPU or its part, and the kernel supports the (stacked) matrix."""
    device = lowered_device()
    return device is not None and device.platform == "tpu" and tpu_form.unsupported_reason(matrix) is None


def _multiply_on_tpu(x: jax.Array, matrix: QuantisedMatrix | StackedMatrix) -> jax.Array:
    if not isinstance(matrix, StackedMatrix):
        matrix = StackedMatrix(jax.tree.map(lambda array: array[None], matrix), jnp.int32(0))
    y = tpu.multiply_one(x.reshape(-1, x.shape[-1]), matrix.matrices, matrix.index)
    return y.reshape(*x.shape[:-1], *matrix.shape[1:])


def takes_kernel(matrix: QuantisedMatrix) -> bool:
    """Return True if a kernel multiplies with a matrix, or its shapes, on the one device that is lowered for."""
    device = lowered_device()
    return device is not None and kernel_takes(matrix, device)


def kernel_takes(matrix: QuantisedMatrix, device: Any) -> bool:
    """Return True if a kernel multiplies with a matrix on a device, which needs only a platform and a kind."""
    if device.platform != "gpu" or any(name in device.device_kind for name in _BEFORE_AMPERE):
        return False
    needs_it = matrix.num_groups > 1 or lanes_of(kind_of(matrix)) > 1
    return needs_it and has_triton() and unsupported_reason(matrix) is None
