"""Which product with a quantised matrix runs on the device that a program is lowered for.

On GPUs XLA would make weights of numbers that share scales in groups, in every step, before it multiplies with them;
a kernel makes them on the way to the tensor core. It fuses into its own products the rest: a scale a column comes
behind them, and numbers of 8 bits go to the tensor core as they are where the rows have 8 bits too.
"""

from __future__ import annotations

import math

import jax

from jpaged.kernels.product.quantised import QuantisedMatrix, multiply, round_rows
from jpaged.kernels.product.triton.form import kind_of, lanes_of, unsupported_reason
from jpaged.kernels.product.triton.grouped import has_triton, multiply_one

_BEFORE_AMPERE = ("Tesla", "Quadro", "TITAN", "GTX", "RTX 20")
"""What jax calls NVIDIA's GPUs that have no asynchronous copies."""


def multiply_on_device(x: jax.Array, matrix: QuantisedMatrix) -> jax.Array:
    """`multiply`, by a kernel where the device has one that is better than what XLA makes of it."""
    if not _takes_kernel(matrix):
        return multiply(x, matrix)
    row_scales = None
    if matrix.activations is not None:
        x, row_scales = round_rows(x, matrix)
        row_scales = row_scales.reshape(-1, row_scales.shape[-1])
    y = multiply_one(x.reshape(-1, x.shape[-1]), row_scales, matrix)
    return y.reshape(*x.shape[:-1], *matrix.shape[1:])


def _takes_kernel(matrix: QuantisedMatrix) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if device is None or device.platform != "gpu" or any(name in device.device_kind for name in _BEFORE_AMPERE):
        return False
    if math.prod(mesh.shape[name] for name in mesh.auto_axes) > 1:
        return False
    needs_it = matrix.num_groups > 1 or lanes_of(kind_of(matrix)) > 1
    return needs_it and has_triton() and unsupported_reason(matrix) is None
