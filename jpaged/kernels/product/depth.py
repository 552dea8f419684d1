"""Matmuls with depths that XLA for GPUs would pad, summed in parts that need no padding.

    x [T, K], matrix [K, N]     ->     sum over s of  x [T, s, K / s], matrix [s, K / s, N]

If a matmul has fewer tiles than the device has processors, XLA divides its depth into a power of two of parts
(`splitk_rewriter.cc`). If that does not divide the depth into whole vectors, XLA pads it, and with it the matrix, in
every step: 45 MB of DeepSeek-V2-Lite's dense layer, whose depth of 10 944 is 171 times 64. A number of parts that is no
power of two needs no padding, and its parts are small enough not to be divided again.
"""

from __future__ import annotations

import math

import jax

from jpaged.kernels.lowered_device import lowered_device

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
