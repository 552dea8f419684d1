"""Choice of the matmul on the device that a program is lowered for.

With a quantized matrix on GPUs, if numbers share scales in groups, XLA would dequantize the weights in every step
before it multiplies; a kernel dequantizes them just before the tensor core. XLA fuses the other cases into its own
matmuls: a scale per column is applied afterwards, and 8-bit numbers go to the tensor core unchanged if the rows have 8
bits too.

On TPUs XLA multiplies group by group, with a copy of a layer's matrix on the chip, or in memory if it is too large for
that; a kernel reads blocks of it in place, while it multiplies with the previous ones.

Matmuls with depths that XLA for GPUs would pad are summed in parts that need no padding:

    x [T, K], matrix [K, N]     ->     sum over s of  x [T, s, K / s], matrix [s, K / s, N]

If a matmul has fewer tiles than the device has processors, XLA divides its depth into a power of two of parts
(`splitk_rewriter.cc`). If that does not divide the depth into whole vectors, XLA pads it, and with it the matrix, in
every step: 45 MB of DeepSeek-V2-Lite's dense layer, whose depth of 10 944 is 171 times 64. A number of parts that is no
power of two needs no padding, and its parts are small enough not to be divided again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from jpaged.kernels.matmul import tpu
from jpaged.kernels.matmul.quantized import QuantizedMatrix, StackedMatrix, multiply, rows_on_device
from jpaged.kernels.matmul.triton.form import get_kind, get_lanes
from jpaged.kernels.matmul.triton.grouped import choose_backend, multiply_one, unsupported_reason

_BEFORE_AMPERE = ("Tesla", "Quadro", "TITAN", "GTX", "RTX 20")
"""Names in JAX of NVIDIA GPUs that have no asynchronous copies."""

_Product = Callable[[jax.Array, jax.Array | None, QuantizedMatrix], jax.Array]
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

    matrix: QuantizedMatrix
    specs: QuantizedMatrix = dataclasses.field(metadata={"static": True})
    mesh: Mesh | AbstractMesh = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole matrix."""
        return self.matrix.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the model."""
        return self.matrix.dtype


def multiply_on_device(x: jax.Array, matrix: QuantizedMatrix | StackedMatrix | PartedMatrix) -> jax.Array:
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

    def part(rows: jax.Array, row_scales: jax.Array | None, matrix: QuantizedMatrix) -> jax.Array:
        sums = multiply_one(rows, row_scales, matrix).reshape(len(rows), *matrix.shape[1:])
        return sums if over is None else jax.lax.psum(sums, over)

    out_specs = PartitionSpec(None, *columns)
    divided: Callable[..., jax.Array] = jax.shard_map(
        part, mesh=parted.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return divided(rows, row_scales, matrix).reshape(*x.shape[:-1], *matrix.shape[1:])


def _rows(x: jax.Array, matrix: QuantizedMatrix) -> tuple[jax.Array, jax.Array | None]:
    """Return rows `[T, K]` as the device multiplies them, and their scales."""
    x, row_scales = rows_on_device(x, matrix)
    rows = x.reshape(-1, x.shape[-1])
    return rows, None if row_scales is None else row_scales.reshape(-1, row_scales.shape[-1])


def takes_tpu_kernel(matrix: QuantizedMatrix) -> bool:
    """Return True if the program is for one TPU or its part, and the kernel supports the (stacked) matrix."""
    device = lowered_device()
    return device is not None and device.platform == "tpu" and tpu.unsupported_reason(matrix) is None


def _multiply_on_tpu(x: jax.Array, matrix: QuantizedMatrix | StackedMatrix) -> jax.Array:
    if not isinstance(matrix, StackedMatrix):
        matrix = StackedMatrix(jax.tree.map(lambda array: array[None], matrix), jnp.int32(0))
    y = tpu.multiply_one(x.reshape(-1, x.shape[-1]), matrix.matrices, matrix.index)
    return y.reshape(*x.shape[:-1], *matrix.shape[1:])


def takes_kernel(matrix: QuantizedMatrix) -> bool:
    """Return True if a kernel multiplies with a matrix, or its shapes, on the one device that is lowered for."""
    device = lowered_device()
    return device is not None and kernel_takes(matrix, device)


def kernel_takes(matrix: QuantizedMatrix, device: Any) -> bool:
    """Return True if a kernel multiplies with a matrix on a device, which needs only a platform and a kind."""
    if device.platform != "gpu" or any(name in device.device_kind for name in _BEFORE_AMPERE):
        return False
    needs_it = matrix.num_groups > 1 or get_lanes(get_kind(matrix)) > 1
    backend = choose_backend() if needs_it else None
    return backend is not None and unsupported_reason(matrix, backend) is None


_VECTOR = 16
"""A part's depth is a multiple of this."""
_LEAST, _MOST = 768, 1216
"""XLA makes no parts below the first, and divides nothing up to the second."""
_FEW_ROWS = 32
_TILE = 64, 128
_TILES = 198
"""Tiles that XLA aims for on 132 processors."""


def parts_of_depth(num_rows: int, depth: int, columns: int) -> int:
    """Return the number of parts to sum so that XLA for GPUs pads nothing; 1 if it would not pad."""
    wanted = depth // _LEAST
    if num_rows > _FEW_ROWS:
        num_tiles = -(-num_rows // _TILE[0]) * -(-columns // _TILE[1])
        wanted = min(wanted, -(-_TILES // num_tiles))
    if depth % (_VECTOR << (max(wanted, 1) - 1).bit_length()) == 0:
        return 1
    parts = (n for n in range(-(-depth // _MOST), depth // _VECTOR) if depth % (n * _VECTOR) == 0)
    return next(parts, 1)


def parts_on_device(x_tk: jax.Array, matrix: jax.Array) -> int:
    """Return the parts for rows and a matrix `[K, *out]` on the device that is lowered for: 1 unless it is one GPU."""
    device = lowered_device()
    if device is None or device.platform != "gpu":
        return 1
    return parts_of_depth(len(x_tk), len(matrix), math.prod(matrix.shape[1:]))


def lowered_device() -> AbstractDevice | None:
    """Return the one device of the program or its part; None if it is unknown, or XLA partitions the program."""
    mesh = jax.sharding.get_abstract_mesh()
    is_divided = math.prod(mesh.shape[name] for name in mesh.auto_axes) > 1
    return None if is_divided else mesh.abstract_device
